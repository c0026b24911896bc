"""What every reader sees: the queue and what is under way, looked at by one thread, however many read.

A page never waits for the disk. The thread looks when the queue or the history has changed, and leaves the
processor to others most of the time: with very many jobs, the picture is some seconds old instead.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from briter_worker.errors import explained
from briter_worker.job import State
from briter_worker.sinks.history.reading import HistoryUnreadableError
from briter_worker.standing import stand, waits_since
from briter_worker.web.plots import Figures, figures_of
from briter_worker.wiring import open_history

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from briter_worker.queues.steering import Shown
    from briter_worker.settings import Settings
    from briter_worker.sinks.history.reading import History, Moment, Receipt
    from briter_worker.standing import Standing
    from briter_worker.web.looking import Looking, Steered

_SHARE = 3.0
"""After a look that cost a second of the processor, so many seconds pass before the next one."""
_MOST_APART = 10.0
_CHEAP = 0.02
"""What a look may have cost for a reader to be worth another one."""
_FULL = 60.0
"""A file that was written in place moves no time stamp."""
_WORKER_EVERY = 1.0
_FIGURES_EVERY = 60.0
_MOST_MOMENTS = 500
_WAITING = (State.PENDING, State.RETRYING)


@dataclass(frozen=True)
class Snapshot:
    """The queue as it was at `at`."""

    at: float
    standing: Standing
    in_flight: Sequence[Shown] = ()
    pending: Sequence[Shown] = ()
    retrying: Sequence[Shown] = ()
    scheduled: Sequence[Shown] = ()
    """Soonest first."""
    failed: Sequence[Shown] = ()
    """The latest save first."""
    by_id: Mapping[str, Shown | list[Shown]] = field(default_factory=dict)
    by_slug: Mapping[str, Shown | list[Shown]] = field(default_factory=dict)
    longest_waiting: Shown | None = None
    """Of those that are due and not in flight."""
    turns_at: float | None = None
    """When a job changes its state by time alone."""
    is_first: bool = False
    """Nobody has looked yet: it knows nothing."""

    def of(self, state: State) -> Sequence[Shown]:
        """All jobs of a state."""
        return {
            State.CLAIMED: self.in_flight,
            State.PENDING: self.pending,
            State.RETRYING: self.retrying,
            State.SCHEDULED: self.scheduled,
            State.FAILED: self.failed,
        }[state]

    def find(self, wanted: str) -> Sequence[Shown]:
        """The jobs of this id, else those of this slug, the newest save first."""
        return _newest_first(self.by_id.get(wanted) or self.by_slug.get(wanted))

    def of_slug(self, slug: str) -> Sequence[Shown]:
        """The jobs of this slug, the newest save first."""
        return _newest_first(self.by_slug.get(slug))

    def standing_at(self, now: float) -> Standing:
        """Its standing, with ages and waits as of `now`."""
        passed = max(0.0, now - self.at)
        standing = self.standing
        due = standing.next_due_in
        return dataclasses.replace(
            standing,
            now=now,
            oldest={state: None if age is None else age + passed for state, age in standing.oldest.items()},
            next_due_in=None if due is None else max(0.0, due - passed),
        )


def _newest_first(found: Shown | list[Shown] | None) -> Sequence[Shown]:
    if found is None:
        return ()
    rows = found if isinstance(found, list) else [found]
    return sorted(rows, key=lambda row: row.job.created_at, reverse=True)


def _file(place: dict[str, Shown | list[Shown]], key: str, row: Shown) -> None:
    """Nearly every job is the only one of its slug: of a hundred thousand lists, none is made."""
    known = place.setdefault(key, row)
    if isinstance(known, list):
        known.append(row)
    elif known is not row:
        place[key] = [known, row]


def picture(settings: Settings, queue: Steered, now: float) -> Snapshot:
    """Look at the whole queue."""
    rows = queue.jobs(now)
    sorted_by: dict[State, list[Shown]] = {state: [] for state in State}
    by_id: dict[str, Shown | list[Shown]] = {}
    by_slug: dict[str, Shown | list[Shown]] = {}
    turns = []
    for row in rows:
        sorted_by[row.state].append(row)
        _file(by_id, row.job.id, row)
        _file(by_slug, row.job.slug, row)
        if row.state is State.RETRYING:
            turns.append(row.job.next_attempt_at or now)
    scheduled = sorted_by[State.SCHEDULED]
    scheduled.sort(key=lambda row: row.job.scheduled_for or 0.0)
    if scheduled:
        turns.append(scheduled[0].job.scheduled_for or now)
    waiting = (row for state in _WAITING for row in sorted_by[state])
    return Snapshot(
        at=now,
        standing=stand(settings, now, queue=queue, rows=rows),
        longest_waiting=min(waiting, key=waits_since, default=None),
        in_flight=sorted_by[State.CLAIMED],
        pending=sorted_by[State.PENDING],
        retrying=sorted_by[State.RETRYING],
        scheduled=scheduled,
        failed=sorted_by[State.FAILED][::-1],
        by_id=by_id,
        by_slug=by_slug,
        turns_at=min(turns, default=None),
    )


class Keeper:
    """Keeps the snapshot, from a thread of its own. `changed` is told of every news, in that thread."""

    def __init__(
        self,
        settings: Settings,
        looking: Looking,
        changed: Callable[[Sequence[Moment], dict[str, Any] | None], None],
        restarted: Callable[[int], None],
    ) -> None:
        self._settings = settings
        self._looking = looking
        self._changed = changed
        self._restarted = restarted
        self._history: History = open_history(settings)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="snapshot", daemon=True)
        self._fresh = threading.Condition()
        self._wanted = 0
        self._reached = 0
        self._dirty = True
        self._stamp: tuple[float, ...] = ()
        self._looked = 0.0
        self._not_before = 0.0
        self._cheap = True
        self._worker_at = 0.0
        self._figures_at = 0.0
        self._figures_for = -1
        self._told: dict[str, Any] | None = None
        self.latest = 0
        """The newest moment that readers were told of."""
        self.revision = 0
        """Grows with each look at the queue: a post saved again changes no count, yet it is news."""
        self.under_way: Sequence[Receipt] = ()
        self.figures = Figures()
        self.history_problem: str | None = None
        self.queue_problem: str | None = None
        self.beat = time.monotonic()
        """When the thread was last seen at work."""
        now = time.time()
        self.snapshot = Snapshot(at=now, standing=looking.nothing_known(now), is_first=True)

    def start(self) -> None:
        """Begin to look."""
        self._looking.prepare()
        self.latest = self._newest()
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stop.set()

    def renew(self, within: float = 1.0) -> None:
        """Something was just changed: wait for a snapshot that shows it, but not for ever."""
        with self._fresh:
            self._wanted += 1
            wanted = self._wanted
            self._looking.hurry()
            self._fresh.wait_for(lambda: self._reached >= wanted, timeout=within)

    def catch_up(self) -> None:
        """Who reloads after a save sees it, as long as a look at the queue costs next to nothing."""
        with suppress(OSError):
            if self._cheap and self._looking.stamp() != self._stamp:
                self.renew()

    def status(self) -> dict[str, Any]:
        """What readers are told whenever it changes; by time alone, nothing in it moves but the revision."""
        standing = self.snapshot.standing.as_json()
        worker = standing["worker"]
        return {
            "revision": self.revision,
            "jobs": standing["jobs"],
            "worker": None if worker is None else {"pid": worker["pid"], "alive": worker["alive"]},
            **{key: standing[key] for key in ("paused", "condition", "failure", "dryRun")},
            "inFlight": self.progress(),
        }

    def progress(self) -> list[dict[str, Any]]:
        """How far each job in flight is."""
        known = {each.job_id: each for each in self.under_way}
        rows = []
        for row in self.snapshot.in_flight[:_MOST_MOMENTS]:
            each = known.get(row.job.id)
            rows.append(
                {
                    "jobId": row.job.id,
                    "slug": row.job.slug,
                    "attempt": row.job.attempts,
                    "phase": each and each.phase,
                    "done": each.done if each else 0,
                    "total": each.total if each else 0,
                }
            )
        return rows

    def _run(self) -> None:
        waker = self._looking.waker(self._notice)
        while not self._stop.is_set():
            self.beat = time.monotonic()
            moments = self._look_at_history()
            self._look_at_queue()
            status = self.status()
            if moments or status != self._told:
                self._changed(moments, status if status != self._told else None)
                self._told = status
            self._count()
            waker.wait(self._looking.glance if self._reached >= self._wanted else 0.01, self._stop)  # type: ignore[arg-type]
        self._history.close()

    def _notice(self) -> None:
        self._dirty = True

    def _newest(self) -> int:
        try:
            newest, _ = self._history.latest()
        except HistoryUnreadableError:
            return 0
        return newest

    def _look_at_history(self) -> Sequence[Moment]:
        try:
            moments = self._history.moments(self.latest, _MOST_MOMENTS)
            if moments:
                self.latest = moments[-1].id
            elif self._newest() < self.latest:
                # The file was put aside and begun anew.
                self.latest = self._newest()
                self._restarted(self.latest)
            self.under_way = self._history.under_way()
            self.history_problem = None
        except HistoryUnreadableError as error:
            self.history_problem = str(error)
            return ()
        return moments

    def _look_at_queue(self) -> None:
        now, tick = time.time(), time.monotonic()
        wanted = self._wanted
        try:
            stamp = self._looking.stamp()
            turned = self.snapshot.turns_at is not None and self.snapshot.turns_at <= now
            if stamp != self._stamp or turned or tick - self._looked > _FULL:
                self._dirty = True
            if wanted > self._reached or (self._dirty and tick >= self._not_before):
                self._renew(now, stamp)
            elif tick - self._worker_at > _WORKER_EVERY:
                self._worker_at = tick
                standing = self._looking.lately(self.snapshot.standing, now)
                self.snapshot = dataclasses.replace(self.snapshot, standing=standing)
        except Exception as error:  # noqa: BLE001 - the thread's end would be the end of all news
            self.queue_problem = explained(error) if isinstance(error, OSError) else str(error)
        with self._fresh:
            self._reached = wanted
            self._fresh.notify_all()

    def _renew(self, now: float, stamp: tuple[float, ...]) -> None:
        began = time.thread_time()
        try:
            self.snapshot = picture(self._settings, self._looking.queue, now)
            self.revision += 1
            self.queue_problem = None
        except OSError as error:
            self.queue_problem = explained(error)
        self._stamp = stamp
        self._dirty = self._looking.may_hide_more(stamp)
        self._looked = self._worker_at = time.monotonic()
        cost = time.thread_time() - began
        self._not_before = self._looked + min(_MOST_APART, _SHARE * cost)
        self._cheap = cost < _CHEAP

    def _count(self) -> None:
        """The figures: every receipt of a month is read for them, so that is done at most once a minute."""
        if self.latest == self._figures_for or time.monotonic() < self._figures_at:
            return
        began = time.monotonic()
        try:
            self.figures = figures_of(self._history, time.time())
        except HistoryUnreadableError as error:
            self.history_problem = str(error)
        self._figures_for = self.latest
        took = time.monotonic() - began
        # The first receipts of a new site are worth seeing at once.
        self._figures_at = time.monotonic() + (
            min(_FIGURES_EVERY, 100 * took) if took < 1 else _FIGURES_EVERY
        )
