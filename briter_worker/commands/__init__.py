"""What each command does. Heavy imports wait until a command needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from briter_worker.errors import UsageError

if TYPE_CHECKING:
    from briter_worker.settings import Settings


class DeclinedError(Exception):
    """What was asked for cannot be done; the text says why: exit 1, one line."""


def read_settings() -> Settings:
    """The configuration. Raises UsageError."""
    from briter_worker.settings import load_settings  # noqa: PLC0415

    return load_settings()


def read_site(site: str | None) -> Settings:
    """The configuration of one site: in a cluster, with what it has of its own.

    Raises UsageError, and DeclinedError when there is no such site.
    """
    settings = read_settings()
    if not settings.database_url:
        if site is not None:
            raise UsageError(
                "--site goes with a cluster, and there is none: BRITER_DATABASE_URL is not set, so the only "
                f"site is that of {settings.storage_root}. Fix: leave --site out, or set BRITER_DATABASE_URL"
            )
        return settings
    name = site or settings.site
    if not name:
        raise UsageError(
            "which site? Fix: --site NAME or BRITER_SITE; briter-worker site list names them all"
        )
    from briter_worker.cluster import sites  # noqa: PLC0415 - for a cluster only
    from briter_worker.wiring import open_database  # noqa: PLC0415

    try:
        return sites.settings_of(sites.get(open_database(settings), name), settings)
    except sites.SiteError as error:
        raise DeclinedError(str(error)) from None


def read_cluster(what: str) -> Settings:
    """The configuration, for what only a cluster has. Raises UsageError."""
    settings = read_settings()
    if not settings.database_url:
        raise UsageError(
            f"{what} is for a cluster, and there is none. Fix: set BRITER_DATABASE_URL, such as "
            "postgresql://db.example.org/briter"
        )
    return settings


def wake(settings: Settings) -> None:
    """Have the site's jobs looked at at once; beside a folder, the worker watches it."""
    if settings.database_url:
        from briter_worker.cluster import waking  # noqa: PLC0415 - for a cluster only
        from briter_worker.wiring import open_database  # noqa: PLC0415

        waking.wake(open_database(settings), [settings.site])
