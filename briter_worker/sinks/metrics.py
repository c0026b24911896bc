"""Numbers for Prometheus: what the events add up to, and how the site stands at the moment of asking."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from briter_worker.events import (
    Cancelled,
    Event,
    JobEvent,
    JobOutcome,
    JobStarted,
    Progress,
    Published,
    Quarantined,
    Superseded,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from wsgiref.simple_server import WSGIServer

    from prometheus_client.metrics_core import Metric

_PHASES = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_WAITS = (0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 3600, 14_400)
_FIRST_PHASE = "validate"
ANY_KIND = "any"
"""Of what never came to an attempt, the type is not told."""
_FRESH = 1.0
"""Seconds for which the site's standing is not looked up anew, however many ask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """How the site stands. Ages are seconds, None where nothing waits."""

    jobs: Mapping[str, int]
    """By state."""
    oldest_waiting: float | None
    oldest_unpushed: float | None
    holder: tuple[str, int] | None
    """The host and PID of the live worker that holds the site's lock."""
    heartbeat_age: float | None
    failure: str | None
    paused: bool
    dry_run: bool
    quarantined: int


class Meters:
    """Counts what ends and measures how long it took."""

    def __init__(self, measure: Callable[[], Measures] | None = None) -> None:
        self.registry = CollectorRegistry()
        self._processed = Counter(
            "briter_processed", "Attempts that ended.", ["kind", "outcome"], registry=self.registry
        )
        self._phase = Histogram(
            "briter_phase_seconds", "A drain's phases.", ["phase"], buckets=_PHASES, registry=self.registry
        )
        self._wait = Histogram(
            "briter_save_to_remote_seconds",
            "From the save, or from the time it was held until, to the remote.",
            buckets=_WAITS,
            registry=self.registry,
        )
        if measure is not None:
            self.registry.register(_Standing(measure))

    def count(self, kind: str, outcome: str) -> None:
        """An attempt ended."""
        self._processed.labels(kind, outcome).inc()

    def phase(self, name: str, seconds: float) -> None:
        """A phase ended."""
        self._phase.labels(name).observe(max(0.0, seconds))

    def wait(self, seconds: float) -> None:
        """A post is on the remote."""
        self._wait.observe(max(0.0, seconds))

    def render(self) -> tuple[bytes, str]:
        """The text for Prometheus, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST


class MetricsSink:
    """Turns a worker's events into numbers, and serves them."""

    def __init__(
        self, meters: Meters, server: WSGIServer | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._meters = meters
        self._server = server
        self._clock = clock
        self._open: dict[str, JobStarted] = {}
        self._phase: tuple[str, float] | None = None
        self._beginning = False
        """Whether the last that the drain told was a start: it tells all of them before anything else."""

    @classmethod
    def serving(cls, host: str, port: int, measure: Callable[[], Measures] | None) -> MetricsSink:
        """One that answers at this port. Raises OSError."""
        meters = Meters(measure)
        server, _ = start_http_server(port, host, meters.registry)
        return cls(meters, server)

    def __call__(self, event: Event) -> None:
        """Count it."""
        match event:
            case JobStarted():
                self._start(event)
            case Progress():
                self._progress(event)
            case JobOutcome():
                self._end(event)
            case Cancelled() | Superseded() | Quarantined():
                self._end(event)
            case _:
                pass

    def beside(self) -> MetricsSink:
        """One that adds to the same numbers, for a drain that runs at the same time as others."""
        return MetricsSink(self._meters, clock=self._clock)

    def close(self) -> None:
        """Answer nobody any more."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _start(self, event: JobStarted) -> None:
        if not self._beginning:
            # Of an earlier drain, some may be open for ever: they were put back.
            self._open.clear()
            self._enter(_FIRST_PHASE)
        self._beginning = True
        self._open[event.job_id] = event

    def _progress(self, event: Progress) -> None:
        self._beginning = False
        if self._open and (self._phase is None or self._phase[0] != event.phase):
            self._leave()
            self._enter(event.phase)

    def _end(self, event: JobEvent) -> None:
        self._beginning = False
        self._meters.count(event.kind if isinstance(event, JobOutcome) else ANY_KIND, event.name)
        started = self._open.pop(event.job_id, None)
        if started is not None and isinstance(event, Published) and not event.dry_run:
            self._meters.wait(self._clock() - max(started.saved_at, started.due_at or 0.0))
        if not self._open:
            self._leave()

    def _enter(self, phase: str) -> None:
        self._phase = (phase, self._clock())

    def _leave(self) -> None:
        if self._phase is not None:
            name, began = self._phase
            self._meters.phase(name, self._clock() - began)
            self._phase = None


class _Standing:
    """Looks how the site stands when somebody asks, at most once a second."""

    def __init__(self, measure: Callable[[], Measures]) -> None:
        self._measure = measure
        self._guard = threading.Lock()
        self._last: tuple[float, Measures] | None = None

    def describe(self) -> Iterable[Metric]:
        """Nothing is looked up when it is registered."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The gauges; none when the site cannot be looked at, as no number is better than an old one."""
        with self._guard:
            if self._last is None or time.monotonic() - self._last[0] > _FRESH:
                try:
                    self._last = (time.monotonic(), self._measure())
                except OSError:
                    return []
            return list(_gauges(self._last[1]))


def _gauges(site: Measures) -> Iterable[Metric]:
    jobs = GaugeMetricFamily("briter_jobs", "Jobs in the queue, by state.", labels=["state"])
    for state, count in site.jobs.items():
        jobs.add_metric([state], count)
    yield jobs
    condition = GaugeMetricFamily(
        "briter_condition",
        "1 while the site's surroundings keep posts from being published.",
        labels=["failure"],
    )
    if site.failure is not None:
        condition.add_metric([site.failure], 1)
    yield condition
    holder = GaugeMetricFamily(
        "briter_lock_holder", "1 for the worker that holds the site's lock.", labels=["host", "pid"]
    )
    if site.holder is not None:
        host, pid = site.holder
        holder.add_metric([host, str(pid)], 1)
    yield holder
    single: list[tuple[str, str, Any]] = [
        ("briter_in_flight", "Jobs being published now.", site.jobs.get("claimed", 0)),
        ("briter_dead_letters", "Jobs that failed for good.", site.jobs.get("failed", 0)),
        (
            "briter_oldest_waiting_seconds",
            "How long the post that is due and waits longest has waited.",
            site.oldest_waiting or 0,
        ),
        (
            "briter_oldest_unpushed_seconds",
            "The same, with those that failed for good.",
            site.oldest_unpushed or 0,
        ),
        ("briter_worker_alive", "1 while a live worker holds the site's lock.", int(site.holder is not None)),
        ("briter_paused", "1 while somebody wants nothing published.", int(site.paused)),
        ("briter_dry_run", "1 while nothing reaches the remote.", int(site.dry_run)),
        ("briter_quarantined", "Files that were no jobs.", site.quarantined),
    ]
    if site.heartbeat_age is not None:
        what = "How old the sign of life in the lock is."
        single.append(("briter_worker_heartbeat_age_seconds", what, site.heartbeat_age))
    for name, text, value in single:
        yield GaugeMetricFamily(name, text, value=value)
