"""The doctor: check everything that a publication needs. Checking changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from briter_worker.doctor import environment, repository
from briter_worker.doctor.finding import Finding, State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from briter_worker.settings import Settings

__all__ = ["Finding", "State", "examine"]


def examine(settings: Settings, now: float) -> Iterator[Finding]:
    """Yield each finding as soon as it is known, at least one per check."""
    yield from environment.check_configuration(settings)
    yield environment.check_plugins(settings)
    yield from environment.check_webhooks(settings)
    if settings.database_url:
        yield environment.check_writable("cache", settings.cache_root)
        yield from environment.check_quiet_time(settings, now)
        yield from repository.examine_cluster(settings)
        return
    yield from environment.check_folders(settings)
    yield from environment.check_disk(settings)
    yield from environment.check_queue(settings, now)
    yield from repository.examine(settings)
