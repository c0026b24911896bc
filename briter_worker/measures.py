"""The site's numbers for Prometheus, from whoever has them: a worker, or the dashboard beside it."""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING

from briter_worker.errors import UsageError, for_people
from briter_worker.job import GIT_SYNC
from briter_worker.standing import stand
from briter_worker.wiring import open_history, open_queue

try:
    from briter_worker.sinks.metrics import ANY_KIND, Measures, Meters, MetricsSink
    from briter_worker.sinks.metrics_of_sites import ClusterMeters, Ended, SiteMeasures
except ImportError as missing:
    raise UsageError("metrics are not installed. Fix: pip install 'briter-worker[metrics]'") from missing

from briter_worker.sinks.history.reading import HistoryUnreadableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from briter_worker.queues.postgres.database import Database
    from briter_worker.settings import Settings
    from briter_worker.sinks.history.reading import Receipt
    from briter_worker.standing import Standing

_ENDED = frozenset(
    {"published", "nochange", "nopaths", "failed", "dead-lettered", "snoozed", "handled"}
    | {"cancelled", "superseded", "quarantined"}
)
_ANY = frozenset({"handled", "cancelled", "superseded", "quarantined"})
_AT_ONCE = 1000


def measured(standing: Standing) -> Measures:
    """The standing as numbers."""
    now = standing.now
    worker = standing.worker if standing.worker is not None and standing.worker.alive else None
    return Measures(
        jobs=standing.jobs,
        oldest_waiting=_age(standing.waiting_since, now),
        oldest_unpushed=_age(standing.unpushed_since, now),
        holder=None if worker is None else (for_people(worker.host or ""), worker.pid),
        heartbeat_age=_age(None if worker is None else worker.heartbeat, now),
        failure=standing.failure,
        paused=standing.paused is not None,
        dry_run=standing.dry_run,
        quarantined=standing.quarantined,
    )


def _age(since: float | None, now: float) -> float | None:
    return None if since is None else max(0.0, now - since)


def of_worker(settings: Settings, *, host: str, port: int) -> MetricsSink:
    """What `run` counts, and serves at this port; of a cluster's sites, `serve` has the standing.

    Raises UsageError.
    """
    measure = None
    if not settings.database_url:
        queue = open_queue(settings)  # one of its own: it remembers what it has read

        def measure() -> Measures:
            return measured(stand(settings, time.time(), queue=queue))

    try:
        return MetricsSink.serving(host, port, measure)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"metrics cannot be served at {host}, port {port}: {error}. "
            "Fix: choose another BRITER_METRICS_PORT, or BRITER_METRICS_HOST"
        ) from error


def of_cluster(database: Database) -> Callable[[], tuple[bytes, str]]:
    """What renders the numbers of all sites of a cluster, each with its site."""
    from briter_worker.cluster.overview import look, tallies  # noqa: PLC0415 - for a cluster only

    def measure() -> Iterator[SiteMeasures]:
        ended: dict[str, list[Ended]] = defaultdict(list)
        for tally in tallies(database):
            ended[tally.site].append(
                Ended(tally.kind, tally.outcome, tally.number, tally.waits, tally.waited)
            )
        now = time.time()
        for site in look(database, now).sites:
            yield SiteMeasures(
                site=site.name,
                jobs=site.jobs,
                oldest_waiting=_age(site.oldest, now),
                failure=site.failure,
                paused=site.paused is not None,
                ended=ended[site.name],
            )

    return ClusterMeters(measure).render


class Onlooker:
    """The numbers of one who publishes nothing: counts what the history tells from its start on."""

    def __init__(self, settings: Settings, standing: Callable[[], Standing]) -> None:
        self._history = open_history(settings)
        self._meters = Meters(lambda: measured(standing()))
        self._drain: tuple[str, float] | None = None
        try:
            self._seen = self._history.latest()[0]
        except HistoryUnreadableError:
            self._seen = 0

    def render(self) -> tuple[bytes, str]:
        """The text for Prometheus, and its content type. In one thread at a time."""
        with suppress(HistoryUnreadableError):  # what is known of the queue is told all the same
            self._catch_up()
        return self._meters.render()

    def close(self) -> None:
        """Let go of the history."""
        self._history.close()

    def _catch_up(self) -> None:
        newest = self._history.latest()[0]
        if newest < self._seen:
            self._seen = 0  # a spoilt history was put aside, and another one begun
        while moments := self._history.moments(self._seen, _AT_ONCE):
            for moment in moments:
                if moment.event not in _ENDED:
                    continue
                # The history does not tell the type of what a plugin has tried.
                self._meters.count(ANY_KIND if moment.event in _ANY else GIT_SYNC, moment.event)
                if moment.event == "published":
                    self._publication(moment.data["jobId"])
            self._seen = moments[-1].id

    def _publication(self, job_id: str) -> None:
        for receipt in self._history.attempts(job_id)[:1]:
            if receipt.save_to_remote is not None:
                self._meters.wait(receipt.save_to_remote)
            self._phases(receipt)

    def _phases(self, receipt: Receipt) -> None:
        """Those of a drain once, though each of its attempts has them."""
        drain = next(((phase.name, phase.began) for phase in receipt.phases), None)
        if drain is None or drain == self._drain:
            return
        self._drain = drain
        for phase in receipt.phases:
            if phase.ended is not None:
                self._meters.phase(phase.name, phase.ended - phase.began)
