"""The doctor: check everything that a publication needs. Checking changes nothing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from briter_worker.doctor import environment, repository, webhooks
from briter_worker.doctor.finding import Finding, State, error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from briter_worker.settings import Settings

__all__ = ["Finding", "State", "examine"]


def examine(settings: Settings, now: float) -> Iterator[Finding]:
    """Yield each finding as soon as it is known, at least one per check."""
    if settings.database_url:
        from briter_worker.doctor import cluster  # noqa: PLC0415 - the extra [postgres]

        yield from cluster.examine(settings, now)
        yield from webhooks.examine(settings)
        return
    yield from environment.check_configuration(settings, os.environ)
    yield from environment.check_folders(settings)
    yield from environment.check_disk(settings)
    yield environment.check_clock(now)
    yield environment.check_plugins(settings)
    try:
        yield from environment.check_queue(settings, now)
    except OSError as problem:
        yield error("queue", f"{settings.queue_root}: {problem.strerror}", "let the worker's user read it")
    yield from webhooks.examine(settings)
    yield from repository.examine(settings)
