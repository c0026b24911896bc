"""Everything a publication needs, looked at in turn; nothing is changed by looking."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from briter_worker.doctor import repository, surroundings, webhooks
from briter_worker.doctor.finding import Finding, State, error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from briter_worker.settings import Settings

__all__ = ["Finding", "State", "examine"]


def examine(settings: Settings, now: float) -> Iterator[Finding]:
    """The findings, each as soon as it is certain; at least one for every thing that is looked at."""
    if settings.database_url:
        from briter_worker.doctor import cluster  # noqa: PLC0415 - for a cluster only

        yield from cluster.examine(settings)
        yield from webhooks.examine(settings)
        return
    yield from surroundings.configuration(settings, os.environ)
    yield from surroundings.folders(settings)
    yield from surroundings.disk(settings)
    yield surroundings.clock(settings)
    yield surroundings.plugins(settings)
    try:
        yield from surroundings.queue(settings, now)
    except OSError as problem:
        yield error("queue", f"{settings.queue_root}: {problem.strerror}", "let the worker's user read it")
    yield from webhooks.examine(settings)
    yield from repository.examine(settings)
