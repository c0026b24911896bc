"""The jobs and the status of a site as they were a moment ago, and what of them a page says first."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from briter_worker.job import State
from briter_worker.status import waits_since
from briter_worker.web import labels
from briter_worker.web.responses import ProblemError, explain

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from briter_worker.ports import ListedJob
    from briter_worker.sinks.history import History
    from briter_worker.status import SiteStatus

T = TypeVar("T")
FIRST_WAIT_S = 10.0
_DAY_S, _DAYS = 86400.0, 30
_GOOD = ("published", "nochange")
_BAD = ("dead-lettered", "nopaths", "quarantined")
_SHARE = 10.0
"""Reading takes at most about a tenth of one CPU, whatever it costs."""


class CachedValue(Generic[T]):
    """The result of `read`, kept for a second, or ten times as long as reading takes.

    Reading a queue of 100,000 jobs takes longer than a page may. So a thread reads, and a page shows the old
    value if the new one does not come in a moment.
    """

    def __init__(
        self, read: Callable[[], T], what: str, *, lifetime: float = 1.0, patience: float = 0.1
    ) -> None:
        self._read = read
        self._what = what
        self._lifetime = lifetime
        self._patience = patience
        self._guard = threading.Lock()
        self._known: Future[T] | None = None
        self._coming: Future[T] | None = None
        self._expires = 0.0

    def get(self) -> T:
        """Return the value. Raises ProblemError if it cannot be read, or takes too long the first time."""
        known, coming = self._begin()
        if coming is not None and wait([coming], FIRST_WAIT_S if known is None else self._patience).done:
            known = coming
        if known is None:
            text, fix = f"{self._what} is being read for the first time", "load the page again in a minute"
            raise ProblemError(503, text, fix, headers={"Retry-After": "2"})
        try:
            return known.result()
        except OSError as error:
            message, fix = explain(error)
            raise ProblemError(503, f"{self._what} cannot be read: {message}", fix) from None

    def renew(self, within: float = 1.0) -> None:
        """Read again, because something changed; return when that is done, or after some seconds."""
        _, running = self._begin()
        if running is not None:
            wait([running], within)  # it may have begun before the change
        with self._guard:
            self._expires = 0.0
        _, coming = self._begin()
        if coming is not None:
            wait([coming], within)

    def _begin(self) -> tuple[Future[T] | None, Future[T] | None]:
        """Begin to read if the value is old. Return the last read and the running one."""
        with self._guard:
            if self._coming is not None and self._coming.done():
                self._known, self._coming = self._coming, None
            if self._coming is None and time.monotonic() >= self._expires:
                self._coming = in_background(self._refresh)
            return self._known, self._coming

    def _refresh(self) -> T:
        began, pause = time.monotonic(), self._lifetime
        try:
            value = self._read()
            pause = max(pause, _SHARE * (time.monotonic() - began))
            return value
        finally:
            self._expires = time.monotonic() + pause


def in_background(work: Callable[[], T]) -> Future[T]:
    """Do the work in a thread that does not keep the dashboard from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001 - raised to whoever asks for the result
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The queue and the status, as they were read together."""

    status: SiteStatus
    jobs: Mapping[State, Sequence[ListedJob]]
    """By state: scheduled ones by time, failed ones with the latest save first."""
    revision: int
    """Another one when a job has changed."""

    @classmethod
    def of(cls, rows: Sequence[ListedJob], status: SiteStatus) -> Snapshot:
        """Sort the jobs of a queue, which come in the order of `DiskQueue.jobs`."""
        jobs: dict[State, list[ListedJob]] = {state: [] for state in State}
        for row in rows:
            jobs[row.state].append(row)
        jobs[State.FAILED].reverse()
        facts = tuple((row.job.id, row.state, row.job.created_at, row.job.updated_at) for row in rows)
        return cls(status, jobs, hash(facts) & 0xFFFFFFFF)  # JavaScript has no larger integers

    def find(self, wanted: str = "", slug: str = "") -> Sequence[ListedJob]:
        """Return the job of this id, or the jobs of this slug, the newest save first."""
        found, same_slug, slug = [], [], slug or wanted
        for rows in self.jobs.values():
            for row in rows:
                if row.job.id == wanted:
                    found.append(row)
                elif row.job.slug == slug:
                    same_slug.append(row)
        found = found or same_slug
        return sorted(found, key=lambda row: row.job.created_at, reverse=True)

    def longest_waiting(self) -> ListedJob | None:
        """Return the due job that waits longest."""
        waiting = (row for state in (State.PENDING, State.RETRYING) for row in self.jobs[state])
        return min(waiting, key=waits_since, default=None)


@dataclass(frozen=True, slots=True)
class Day:
    """The figures of one day."""

    label: str
    full: str
    published: int = 0
    failed: int = 0
    median: float = 0.0
    """Of the time from save to remote, in seconds."""
    slowest: float = 0.0
    """Its 95th percentile."""


def read_days(history: History, now: float) -> list[Day]:
    """Summarize the history of the last 30 days, by day of the server's time zone."""
    ahead = labels.utc_offset(now)
    first = (math.floor((now + ahead) / _DAY_S) - _DAYS + 1) * _DAY_S - ahead
    buckets = {round((bucket.began - first) / _DAY_S): bucket for bucket in history.throughput(first, _DAY_S)}
    days = []
    for number in range(_DAYS):
        # With a daylight-saving change, a day does not begin at midnight; its noon is always in it.
        noon = first + (number + 0.5) * _DAY_S
        bucket = buckets.get(number)
        outcomes, waits = (bucket.outcomes, bucket.waits) if bucket else ({}, ())
        published, failed = (sum(outcomes.get(each, 0) for each in group) for group in (_GOOD, _BAD))
        median, slowest = (waits[int(len(waits) * part)] if waits else 0.0 for part in (0.5, 0.95))
        names = labels.day_of(noon, short=True), labels.day_of(noon)
        days.append(Day(*names, published, failed, median, slowest))
    return days
