"""Numbers for Prometheus of all sites of a cluster, each with its site: looked up when somebody asks."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from prometheus_client.metrics_core import Metric

_FRESH = 5.0
"""Seconds for which nothing is looked up anew, however many ask: it is a question about every row."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How often a site had an outcome, and how long authors waited for it in all."""

    kind: str
    outcome: str
    number: int
    waits: int
    waited: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteMeasures:
    """How a site stands."""

    site: str
    jobs: Mapping[str, int]
    oldest_waiting: float | None
    failure: str | None
    paused: bool
    ended: Sequence[Ended]


class ClusterMeters:
    """Renders what `measure` finds; nothing when it cannot look, as no number is better than an old one."""

    def __init__(self, measure: Callable[[], Iterable[SiteMeasures]]) -> None:
        self._measure = measure
        self._guard = threading.Lock()
        self._last: tuple[float, list[SiteMeasures]] | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> tuple[bytes, str]:
        """The text for Prometheus, and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def describe(self) -> Iterable[Metric]:
        """Nothing is looked up when it is registered."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """All numbers of all sites."""
        with self._guard:
            if self._last is None or time.monotonic() - self._last[0] > _FRESH:
                try:
                    self._last = (time.monotonic(), list(self._measure()))
                except OSError:
                    self._last = None
                    return []
            return list(_families(self._last[1]))


def _families(sites: Sequence[SiteMeasures]) -> Iterable[Metric]:
    jobs = GaugeMetricFamily("briter_jobs", "Jobs in the queue, by state.", labels=["site", "state"])
    oldest = GaugeMetricFamily(
        "briter_oldest_waiting_seconds",
        "How long the post that is due and waits longest has waited.",
        labels=["site"],
    )
    letters = GaugeMetricFamily("briter_dead_letters", "Jobs that failed for good.", labels=["site"])
    paused = GaugeMetricFamily("briter_paused", "1 while somebody wants nothing published.", labels=["site"])
    condition = GaugeMetricFamily(
        "briter_condition",
        "1 while the site's surroundings keep posts from being published.",
        labels=["site", "failure"],
    )
    processed = CounterMetricFamily(
        "briter_processed", "Attempts that ended.", labels=["site", "kind", "outcome"]
    )
    waits = SummaryMetricFamily(
        "briter_save_to_remote_seconds",
        "From the save, or from the time it was held until, to the remote.",
        labels=["site"],
    )
    for site in sites:
        for state, count in site.jobs.items():
            jobs.add_metric([site.site, state], count)
        oldest.add_metric([site.site], site.oldest_waiting or 0)
        letters.add_metric([site.site], site.jobs.get("failed", 0))
        paused.add_metric([site.site], int(site.paused))
        if site.failure is not None:
            condition.add_metric([site.site, site.failure], 1)
        for each in site.ended:
            processed.add_metric([site.site, each.kind, each.outcome], each.number)
        number = sum(each.waits for each in site.ended)
        if number:
            waits.add_metric([site.site], number, sum(each.waited for each in site.ended))
    yield from (jobs, oldest, letters, paused, condition, processed, waits)
