"""The metrics of `run`: what the events add up to, and the site's status at the time of a scrape."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from briter_worker.errors import UsageError
from briter_worker.redaction import one_line
from briter_worker.status import read_status
from briter_worker.wiring import open_queue

try:
    from briter_worker.sinks.metrics import MetricsSink, SiteMeasures
except ImportError as missing:
    raise UsageError("metrics are not installed", "pip install 'briter-worker[metrics]'") from missing

if TYPE_CHECKING:
    from briter_worker.settings import Settings
    from briter_worker.status import SiteStatus


def measure_site(status: SiteStatus) -> SiteMeasures:
    """Return the status as numbers."""
    worker = status.worker if status.worker is not None and status.worker.alive else None
    return SiteMeasures(
        jobs=status.jobs,
        failure=status.failure,
        values={
            "oldest_waiting_seconds": _age(status.waiting_since, status.now) or 0,
            "dead_letters": status.jobs["failed"],
            "paused": int(status.paused is not None),
            "in_flight": status.jobs["claimed"],
            "oldest_unpushed_seconds": _age(status.unpushed_since, status.now) or 0,
            "worker_alive": int(worker is not None),
            "dry_run": int(status.dry_run),
            "quarantined": status.quarantined,
            "worker_heartbeat_age_seconds": _age(worker.heartbeat, status.now) if worker else None,
        },
        holder=None if worker is None else (one_line(worker.host or ""), worker.pid),
    )


def _age(since: float | None, now: float) -> float | None:
    return None if since is None else max(0.0, now - since)


def open_metrics(settings: Settings) -> MetricsSink:
    """Return a sink that counts, and serves `/metrics`. In a cluster, `serve` shows the sites' status.

    Raises UsageError.
    """
    measure = None
    if not settings.database_url:
        queue = open_queue(settings)  # not the worker's: the scrape has a thread of its own

        def measure() -> SiteMeasures:
            return measure_site(read_status(settings, time.time(), queue=queue, local_commits=()))

    metrics = MetricsSink(measure)
    try:
        metrics.serve(settings.metrics_host, settings.metrics_port)
    except (OSError, OverflowError) as error:
        where = f"{settings.metrics_host}, port {settings.metrics_port}"
        raise UsageError(
            f"metrics cannot be served at {where}: {error}",
            "choose another BRITER_METRICS_PORT or BRITER_METRICS_HOST",
        ) from error
    return metrics
