"""Prometheus metrics: counters of what the events add up to, and gauges that are looked up when asked.

One module for a site and for a cluster. There, each gauge has its site as a label.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from copy import copy
from itertools import groupby
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from briter_worker import events
from briter_worker.sinks.history import Tally
from briter_worker.sinks.recorder import ANY_KIND, Ending, RunningDrain
from briter_worker.sinks.store import StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from wsgiref.simple_server import WSGIServer

    from prometheus_client.metrics_core import Metric

_PHASE_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_WAIT_BUCKETS = (0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 3600, 14_400)
_WAIT_HELP = "From the save, or from the time it was scheduled for, to the remote."
_PROCESSED_HELP = "Attempts that ended, by `kind` of job and `outcome`."
GAUGES = {
    "jobs": "Jobs in the queue, by `state`.",
    "condition": "1 while no post of the site can be published, by `failure`.",
    "oldest_waiting_seconds": "How long the post that is due and waits longest has waited.",
    "dead_letters": "Jobs that failed and are not retried.",
    "paused": "1 while publishing is paused.",
    "node_sick": "1 while the node takes no sites, because of a failure of its own.",
    "in_flight": "Jobs that are being published.",
    "oldest_unpushed_seconds": "How long the oldest post that is due, dead letters included, has waited.",
    "worker_alive": "1 while a live worker holds the lock.",
    "lock_holder": "1 for the worker that holds the site's lock, by `host` and `pid`.",
    "dry_run": "1 while nothing reaches the remote.",
    "quarantined": "Files in the quarantine.",
    "worker_heartbeat_age_seconds": "Age of the heartbeat in the lock.",
}
"""The description of each gauge, by its name without the prefix."""

Sample = tuple[str, dict[str, str], float]
"""The name of a gauge, its labels and its value. In a cluster, `site` is a label."""
Measure = Callable[[], tuple[Iterable[Sample], Iterable[Tally]]]
"""Looks the gauges up, and the history's counters for a process that publishes nothing."""


class Gauges:
    """Collector that looks the gauges up when a user asks."""

    def __init__(self, measure: Measure) -> None:
        self._measure = measure

    def collect(self) -> Iterable[Metric]:
        """Return the gauges; none if they cannot be looked up: no number is better than an old one."""
        families: dict[str, GaugeMetricFamily] = {}
        try:
            samples, tallies = self._measure()
            for name, labels, value in samples:
                if name not in families:
                    text = GAUGES[name]
                    families[name] = GaugeMetricFamily(f"briter_{name}", text, labels=list(labels))
                families[name].add_metric(list(labels.values()), value)
        except (OSError, StoreError):
            return []
        return [*families.values(), *_tally_families(list(tallies))]


def render_metrics(measure: Measure) -> tuple[bytes, str]:
    """Return the text and the content type of a process that publishes nothing: gauges and history counters.

    Where cron starts the worker, the dashboard is the process that stays; no node of a cluster sees all
    publications.
    """
    registry = CollectorRegistry()
    registry.register(Gauges(measure))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class MetricsSink:
    """Counts a worker's events. In a cluster, each drain has a copy with the same counters."""

    def __init__(
        self,
        measure: Measure | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._server: WSGIServer | None = None
        self._drain: RunningDrain | None = None
        self.registry = registry = CollectorRegistry()
        self._processed = Counter("briter_processed", _PROCESSED_HELP, ["kind", "outcome"], registry=registry)
        self._phase = Histogram(
            *("briter_phase_seconds", "Duration of each `phase` of a drain.", ["phase"]),
            buckets=_PHASE_BUCKETS,
            registry=registry,
        )
        self._wait = Histogram(
            "briter_save_to_remote_seconds", _WAIT_HELP, buckets=_WAIT_BUCKETS, registry=registry
        )
        if measure is not None:
            registry.register(Gauges(measure))

    def serve(self, host: str, port: int) -> None:
        """Answer at this port until `close`. Raises OSError and OverflowError."""
        self._server, _ = start_http_server(port, host, self.registry)

    def for_drain(self) -> MetricsSink:
        """Return a sink with the same counters, for a drain that runs beside others."""
        other = copy(self)
        vars(other).update(_server=None, _drain=None)
        return other

    def store(self, batch: Sequence[events.Event], /) -> None:
        """Count the events."""
        for event in batch:
            now = self._clock()
            if isinstance(event, Ending) and not isinstance(event, events.ConflictAhead):
                kind = event.job_type if isinstance(event, events.JobOutcome) else ANY_KIND
                self._processed.labels(kind, event.name).inc()
                started = self._drain and self._drain.open.get((event.job_id, event.slug))
                if started and isinstance(event, events.Published) and not event.dry_run:
                    self._wait.observe(max(0.0, now - max(started.saved_at, started.due_at or 0.0)))
            self._drain = RunningDrain.follow(self._drain, event, now)
            if self._drain is not None and not self._drain.open:
                for name, began, ended in self._drain.phases:
                    self._phase.labels(name).observe(max(0.0, ended - began))
                self._drain = None

    def close(self) -> None:
        """Stop answering."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


def _tally_families(tallies: Sequence[Tally]) -> Iterable[Metric]:
    if not tallies:
        return ()
    label = ["site"] if any(tally.site for tally in tallies) else []
    processed = CounterMetricFamily("briter_processed", _PROCESSED_HELP, labels=[*label, "kind", "outcome"])
    waits = SummaryMetricFamily("briter_save_to_remote_seconds", _WAIT_HELP, labels=label)
    for site, group in groupby(tallies, key=lambda tally: tally.site):
        own, found = [site] if label else [], list(group)
        for tally in found:
            processed.add_metric([*own, tally.kind, tally.outcome], tally.number)
        if number := sum(tally.waits for tally in found):
            waits.add_metric(own, number, sum(tally.waited for tally in found))
    return processed, waits
