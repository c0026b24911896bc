"""Prometheus metrics: counters of what the events add up to, and gauges that are looked up when asked.

One module for a site and for a cluster. There, each gauge has its site as a label.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from briter_worker.events import (
    Cancelled,
    Event,
    JobOutcome,
    JobStarted,
    Progress,
    Published,
    Quarantined,
    Superseded,
)
from briter_worker.sinks.recorder import ANY_KIND, RunningDrain
from briter_worker.sinks.store import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from wsgiref.simple_server import WSGIServer

    from prometheus_client.metrics_core import Metric

    from briter_worker.sinks.history import Tally

_PHASE_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_WAIT_BUCKETS = (0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 3600, 14_400)
_WAIT_HELP = "From the save, or from the time it was scheduled for, to the remote."


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteMeasures:
    """The gauges of one site. Ages are seconds, None where nothing waits."""

    site: str = ""
    """Empty where there is only one."""
    jobs: Mapping[str, int]
    """By state."""
    oldest_waiting: float | None
    failure: str | None
    """The site condition's failure code."""
    paused: bool
    tallies: Sequence[Tally] = ()
    """The site's counters in the history, for a process that publishes nothing."""
    machine: MachineMeasures | None = None
    """For a site with a folder of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineMeasures:
    """The gauges of a site that has a folder and a worker of its own."""

    oldest_unpushed: float | None
    holder: tuple[str, int] | None
    """Host and PID of the live worker that holds the lock."""
    heartbeat_age: float | None
    dry_run: bool
    quarantined: int


class Gauges:
    """Collector that looks the sites up when somebody asks, at most once in `fresh` seconds."""

    def __init__(self, measure: Callable[[], Iterable[SiteMeasures]], *, fresh: float) -> None:
        self._measure = measure
        self._fresh = fresh
        self._guard = threading.Lock()
        self._last: tuple[float, list[SiteMeasures]] | None = None

    def describe(self) -> Iterable[Metric]:
        """Return nothing: nothing is looked up at registration."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Return the gauges; none if the sites cannot be looked up: no number is better than an old one."""
        with self._guard:
            if self._last is None or time.monotonic() - self._last[0] > self._fresh:
                try:
                    self._last = (time.monotonic(), list(self._measure()))
                except (OSError, StoreError):
                    self._last = None
                    return []
            sites = self._last[1]
        families = [*_site_families(sites), *_tally_families(sites)]
        for site in sites:
            if site.machine is not None:
                families += _machine_families(site, site.machine)
        return families


class StoredMetrics:
    """The metrics of a process that publishes nothing: gauges of its sites, and counters of their history.

    Where cron starts the worker, the dashboard is the process that stays; no node of a cluster sees all
    publications.
    """

    def __init__(self, measure: Callable[[], Iterable[SiteMeasures]]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(Gauges(measure, fresh=5.0))  # a question about every row

    def render(self) -> tuple[bytes, str]:
        """Return the text for Prometheus, and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


class Meters:
    """Counters and histograms of one process."""

    def __init__(self, measure: Callable[[], SiteMeasures] | None = None) -> None:
        self.registry = CollectorRegistry()
        self.processed = Counter(
            "briter_processed", "Attempts that ended.", ["kind", "outcome"], registry=self.registry
        )
        self.phase = Histogram(
            "briter_phase_seconds",
            "Duration of a drain's phases.",
            ["phase"],
            buckets=_PHASE_BUCKETS,
            registry=self.registry,
        )
        self.wait = Histogram(
            "briter_save_to_remote_seconds", _WAIT_HELP, buckets=_WAIT_BUCKETS, registry=self.registry
        )
        if measure is not None:
            self.registry.register(Gauges(lambda: [measure()], fresh=1.0))


class MetricsSink:
    """Counts a worker's events, and serves the numbers."""

    def __init__(
        self, meters: Meters, server: WSGIServer | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._meters = meters
        self._server = server
        self._clock = clock
        self._drain: RunningDrain | None = None
        self._started: dict[str, JobStarted] = {}

    @classmethod
    def serving(cls, host: str, port: int, measure: Callable[[], SiteMeasures] | None) -> MetricsSink:
        """Return a sink that answers at this port. Raises OSError and OverflowError."""
        meters = Meters(measure)
        server, _ = start_http_server(port, host, meters.registry)
        return cls(meters, server)

    def for_drain(self) -> MetricsSink:
        """Return a sink with the same numbers, for a drain that runs beside others."""
        return MetricsSink(self._meters, clock=self._clock)

    def __call__(self, event: Event, /) -> None:
        """Count the event."""
        match event:
            case JobStarted():
                if self._drain is None or not self._drain.is_starting:
                    # Jobs of the last drain may be open for ever: they were released.
                    self._drain, self._started = RunningDrain(self._clock()), {}
                self._drain.open.add(event.job_id)
                self._started[event.job_id] = event
            case Progress() if self._drain is not None:
                self._drain.advance(event, self._clock())
            case JobOutcome() | Cancelled() | Superseded() | Quarantined():
                self._end(event, self._clock())
            case _:
                pass

    def close(self) -> None:
        """Stop answering."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _end(self, event: JobOutcome | Cancelled | Superseded | Quarantined, now: float) -> None:
        kind = event.job_type if isinstance(event, JobOutcome) else ANY_KIND
        self._meters.processed.labels(kind, event.name).inc()
        started = self._started.pop(event.job_id, None)
        if started is not None and isinstance(event, Published) and not event.dry_run:
            self._meters.wait.observe(max(0.0, now - max(started.saved_at, started.due_at or 0.0)))
        if self._drain is not None:
            self._drain.end(event.job_id, now)
            if not self._drain.open:
                for name, began, ended in self._drain.phases:
                    self._meters.phase.labels(name).observe(max(0.0, ended - began))
                self._drain = None


def _site_families(sites: Sequence[SiteMeasures]) -> Iterable[Metric]:
    labels = ["site"] if any(site.site for site in sites) else []

    def gauge(name: str, text: str, *more: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, text, labels=[*labels, *more])

    jobs = gauge("briter_jobs", "Jobs in the queue, by state.", "state")
    oldest = gauge(
        "briter_oldest_waiting_seconds", "How long the post that is due and waits longest has waited."
    )
    dead = gauge("briter_dead_letters", "Jobs that failed and are not retried.")
    paused = gauge("briter_paused", "1 while publishing is paused.")
    condition = gauge("briter_condition", "1 while no post of the site can be published.", "failure")
    for site in sites:
        own = [site.site] if labels else []
        for state, number in site.jobs.items():
            jobs.add_metric([*own, state], number)
        oldest.add_metric(own, site.oldest_waiting or 0)
        dead.add_metric(own, site.jobs.get("failed", 0))
        paused.add_metric(own, int(site.paused))
        if site.failure is not None:
            condition.add_metric([*own, site.failure], 1)
    return jobs, oldest, dead, paused, condition


def _tally_families(sites: Sequence[SiteMeasures]) -> Iterable[Metric]:
    if not any(site.tallies for site in sites):
        return ()
    label = ["site"] if any(site.site for site in sites) else []
    processed = CounterMetricFamily(
        "briter_processed", "Attempts that ended.", labels=[*label, "kind", "outcome"]
    )
    waits = SummaryMetricFamily("briter_save_to_remote_seconds", _WAIT_HELP, labels=label)
    for site in sites:
        own = [site.site] if label else []
        for tally in site.tallies:
            processed.add_metric([*own, tally.kind, tally.outcome], tally.number)
        number = sum(tally.waits for tally in site.tallies)
        if number:
            waits.add_metric(own, number, sum(tally.waited for tally in site.tallies))
    return processed, waits


def _machine_families(site: SiteMeasures, machine: MachineMeasures) -> Iterable[Metric]:
    holder = GaugeMetricFamily(
        "briter_lock_holder", "1 for the worker that holds the site's lock.", labels=["host", "pid"]
    )
    if machine.holder is not None:
        holder.add_metric([machine.holder[0], str(machine.holder[1])], 1)
    yield holder
    waited = "How long the oldest post that is due, dead letters included, has waited."
    for name, text, value in (
        ("in_flight", "Jobs that are being published.", site.jobs.get("claimed", 0)),
        ("oldest_unpushed_seconds", waited, machine.oldest_unpushed or 0),
        ("worker_alive", "1 while a live worker holds the lock.", int(machine.holder is not None)),
        ("dry_run", "1 while nothing reaches the remote.", int(machine.dry_run)),
        ("quarantined", "Files that are no jobs.", machine.quarantined),
        ("worker_heartbeat_age_seconds", "Age of the heartbeat in the lock.", machine.heartbeat_age),
    ):
        if value is not None:
            yield GaugeMetricFamily(f"briter_{name}", text, value=value)
