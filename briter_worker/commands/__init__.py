"""The commands: one file per group. Here is what they share."""

from __future__ import annotations

import os
import pwd
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from briter_worker.errors import UsageError
from briter_worker.settings import load_settings
from briter_worker.wiring import open_database

if TYPE_CHECKING:
    from briter_worker.settings import Settings

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Wanted = Annotated[str, typer.Argument(metavar="ID-or-SLUG", help="Job id or post slug.")]
SiteOption = Annotated[
    str | None,
    typer.Option("--site", metavar="NAME", help="Site to act on (cluster only). [env: BRITER_SITE]"),
]


def read_site(site: str | None) -> Settings:
    """Return the configuration of one site; in a cluster, with the site's own values.

    Raises UsageError, and DeclinedError if there is no such site.
    """
    settings = load_settings()
    if not settings.database_url:
        if site is not None:
            raise UsageError(
                f"BRITER_DATABASE_URL is not set, so that the only site is that of {settings.storage_root}",
                "leave --site out, or set BRITER_DATABASE_URL for a cluster",
            )
        return settings
    name = site or settings.site
    if not name:
        raise UsageError(
            "no site was given", "use --site NAME or BRITER_SITE; briter-worker site list shows the names"
        )
    from briter_worker.cluster import sites  # noqa: PLC0415 - the extra [postgres]

    return sites.settings_of(sites.get(open_database(settings), name), settings)


def read_cluster(command: str) -> Settings:
    """Return the configuration for a command that only a cluster has. Raises UsageError."""
    settings = load_settings()
    if not settings.database_url:
        raise UsageError(
            f"{command} is for a cluster, and there is none",
            "set BRITER_DATABASE_URL, such as postgresql://db.example.org/briter",
        )
    return settings


def user_name() -> str:
    """Return the name of the system's user who gave the command."""
    with suppress(KeyError):
        return pwd.getpwuid(os.getuid()).pw_name
    return str(os.getuid())
