"""The jobs and the status of a site as they were a moment ago, and what of them a page says first."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

from briter_worker.errors import describe, failure_text
from briter_worker.job import State
from briter_worker.status import waits_since
from briter_worker.web.responses import ProblemError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from briter_worker.job import Job
    from briter_worker.ports import ListedJob
    from briter_worker.status import SiteStatus

T = TypeVar("T")
_RENEW_TIMEOUT_S = 1.0
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
        self._latest: Future[T] | None = None
        """The running read, or the last one."""
        self._expires = 0.0

    def get(self) -> T:
        """Return the value. Raises ProblemError if it cannot be read."""
        known, latest = self._begin()
        wait([latest], self._patience if known else None)
        try:
            return (latest if latest.done() or known is None else known).result()
        except OSError as error:
            message, fix = describe(error)
            raise ProblemError(503, f"{self._what} cannot be read: {message}", fix) from None

    def renew(self) -> None:
        """Read again, because something changed; return when that is done, or after a second."""
        wait([self._begin()[1]], _RENEW_TIMEOUT_S)  # it may have begun before the change
        self._expires = 0.0
        wait([self._begin()[1]], _RENEW_TIMEOUT_S)

    def _begin(self) -> tuple[Future[T] | None, Future[T]]:
        """Begin to read if the value is old. Return an earlier read, and the latest one."""
        with self._guard:
            is_running = self._latest is not None and not self._latest.done()
            if self._latest is None or (not is_running and time.monotonic() >= self._expires):
                self._known, self._latest = self._latest, in_background(self._refresh)
            return self._known, self._latest

    def _refresh(self) -> T:
        began, pause = time.monotonic(), self._lifetime
        try:
            value = self._read()
            pause = max(pause, _SHARE * (time.monotonic() - began))  # not after a failure: it may soon pass
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

    rows: Sequence[ListedJob]
    texts: list[str]
    """What `search` looks at, for each row; made by the first search."""

    @classmethod
    def of(cls, rows: Sequence[ListedJob], status: SiteStatus, last: Snapshot | None = None) -> Snapshot:
        """Sort the jobs of a queue, which come in the order of `DiskQueue.jobs`."""
        if last is not None and rows == last.rows:
            return replace(last, status=status)
        jobs: dict[State, list[ListedJob]] = {state: [] for state in State}
        for row in rows:
            jobs[row.state].append(row)
        jobs[State.FAILED].reverse()
        facts = tuple((row.job.id, row.state, row.job.created_at, row.job.updated_at) for row in rows)
        revision = hash(facts) & 0xFFFFFFFF  # JavaScript has no larger integers
        return cls(status, jobs, revision, rows, [])

    def find(self, wanted: str = "", slug: str = "") -> Sequence[ListedJob]:
        """Return the job of this id, or the jobs of this slug, the newest save first."""
        found = [row for row in self.rows if row.job.id == wanted]
        found = found or [row for row in self.rows if row.job.slug == (slug or wanted)]
        return sorted(found, key=lambda row: row.job.created_at, reverse=True)

    def search(self, text: str) -> list[ListedJob]:
        """Return the jobs with all these words, in any case, in their post, title, author or reason."""
        texts = self.texts
        if len(texts) != len(self.rows):
            texts = [_searched(row.job) for row in self.rows]
            self.texts[:] = texts
        found: Sequence[int] = range(len(texts))
        for word in dict.fromkeys(text.lower().split()):
            found = [index for index in found if word in texts[index]]
        return [self.rows[index] for index in found]

    def longest_waiting(self) -> ListedJob | None:
        """Return the job that waits longest, scheduled ones aside."""
        states = [State.PENDING, State.RETRYING, State.QUIET, State.TRIED]
        states += [] if self.status.has_worker else [State.CLAIMED]
        waiting = (row for state in states for row in self.jobs[state])
        return min(waiting, key=waits_since, default=None)


def _searched(job: Job) -> str:
    title, author = (job.message or "").partition("\n")[0], job.author.name if job.author else ""
    reason = f"{failure_text(job.failure)}\n{job.last_error or ''}" if job.failure else ""
    return f"{job.id}\n{job.slug}\n{title}\n{author}\n{reason}".lower()
