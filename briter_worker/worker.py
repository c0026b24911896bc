"""The loop of one site's worker: wake, drain, sleep, stop.

One thread publishes. A second one keeps the heartbeat of the lock fresh. After a signal, a third one limits
the time that the running publication may take to finish.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from briter_worker.drain import Counts, Drain
from briter_worker.errors import Failure, FailureCode, LockLostError, PublishError, StoppedError, describe
from briter_worker.events import Event, Paused, Resumed, Warned, WorkerStopping
from briter_worker.job import span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path
    from types import FrameType

    from briter_worker.lock import SiteLock
    from briter_worker.ports import Pause

_TIDY_INTERVAL_S = 30.0
_MAX_LOOP_PAUSE_S = 60.0
_MAX_PULL_PAUSE_S = 900.0


class Stop:
    """The order to stop, set by a signal; after `limit` seconds the running publication is aborted.

    A second signal gives the publication up at once: the remote is not even asked what became of the push.
    The next run asks, so that nothing is lost and nothing is published twice.
    """

    def __init__(self, emit: Callable[[Event], None], *, limit: float, abort: Callable[[], None]) -> None:
        self._emit = emit
        self._limit = limit
        self.abort = abort
        self.give_up = abort
        self._is_busy = False
        self._signals = 0
        self._stopping = threading.Event()
        self._finished = threading.Event()
        self._threads: list[threading.Thread] = []

    def is_set(self) -> bool:
        """Return True if no new job may be claimed."""
        return self._stopping.is_set()

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Let SIGTERM and SIGINT set the order inside."""
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        for number in before:
            signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            self.end()
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Mark what runs inside as a publication, for which a stop waits."""
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    def end(self) -> None:
        """Ignore signals from now on, and return once `worker-stopping` is logged if there was one."""
        self._finished.set()
        for thread in self._threads:
            thread.join()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - signal's signature
        if self._finished.is_set():
            return
        self._signals += 1  # before the thread starts: the next signal may come while it does
        self._stopping.set()
        name = signal.Signals(number).name
        match self._signals:
            case 1:
                self._start(self._limit_shutdown, name)
            case 2:
                self._start(self._end_publication, name)

    def _start(self, step: Callable[[str], None], name: str) -> None:
        """Run a step outside the handler, which may interrupt a write that holds the output's lock."""
        thread = threading.Thread(target=step, args=(name,), name="shutdown", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _limit_shutdown(self, name: str) -> None:
        message = None
        if self._is_busy and self._limit:
            limit = span(self._limit)
            message = f"waiting up to {limit} for the running publication to end; a second signal ends it now"
        self._emit(WorkerStopping(signal=name, message=message))
        if not self._finished.wait(self._limit):
            self.abort()

    def _end_publication(self, name: str) -> None:
        text = "ending the running publication; the next run asks the remote whether the push arrived"
        self._emit(WorkerStopping(signal=name, message=text))
        self.give_up()


@dataclass(eq=False)
class Puller:
    """Brings the remote's edits into the site: at an interval (0: never), and on an order.

    The order is a file, which stays until a pull has succeeded. `report` gets the failure of a pull, or None:
    the site condition shows it.
    """

    order: Path
    interval: float
    pull: Callable[[], None]
    report: Callable[[Failure | None], None]
    _failures: int = 0
    _tried: int | None = None
    """The time of the last order that was tried."""

    def __post_init__(self) -> None:
        self._next = -math.inf if self.interval else math.inf

    def run(self, now: float) -> None:
        """Pull if it is time, at `now` on the monotonic clock. After failures, wait longer each time."""
        if now < self._next and self._ordered_at() in {None, self._tried}:
            return
        self._tried = self._ordered_at()
        try:
            self.pull()
            if self._ordered_at() == self._tried:  # else the pull may have missed what the order is about
                self.order.unlink(missing_ok=True)
        except StoppedError:
            return
        except (PublishError, OSError) as error:
            self._failures += 1
            self._next = now + pull_backoff(self._failures, self.interval)
            failure = error.failure if isinstance(error, PublishError) else None
            self.report(failure or Failure(FailureCode.DISK, *describe(error)))
        else:
            self._failures, self._next = 0, now + (self.interval or math.inf)
            self.report(None)

    def _ordered_at(self) -> int | None:
        with suppress(OSError):
            return self.order.stat().st_mtime_ns
        return None


@dataclass(kw_only=True, eq=False)
class Worker:
    """Publishes one site's posts while it holds the site's lock.

    `wait` returns after some seconds, or when the queue changed, or when its second argument returns True.
    `stuck_files` returns the reason for each file that could not be quarantined when that was last tried.
    """

    drain: Drain
    stuck_files: Callable[[], Mapping[str, str]]
    still_ours: Callable[[], bool]
    stop: Stop
    wait: Callable[[float, Callable[[], bool]], None]
    log_actions: Callable[[], None]
    pull: Callable[[float], None]
    poll: float
    counts: Counts = field(default_factory=Counts)
    _queue_errors: int = 0
    _recover_at: float = 0.0
    _recoveries: int = 0
    _pause: Pause | None = None
    _reported_files: frozenset[str] = frozenset()

    def run_once(self) -> Counts:
        """Drain until nothing is due. Raises LockLostError."""
        while not self.stop.is_set() and self._work():
            pass
        self.log_actions()
        self._tidy()
        self._pull_if_idle()
        return self.counts

    def run_forever(self) -> Counts:
        """Drain whenever something is due, until stopped. Raises LockLostError."""
        tidied = -math.inf  # a worker that died may have left the local branch behind the remote
        while not self.stop.is_set():
            try:
                if self._work():
                    continue
                self._queue_errors = 0
                self.log_actions()
                if time.monotonic() - tidied > _TIDY_INTERVAL_S:
                    tidied = time.monotonic()
                    self._tidy()
                self._pull_if_idle()
                pause = self._idle_time()
            except (OSError, PublishError) as error:
                self._recover_at = 0.0
                self._queue_errors += 1
                pause = loop_backoff(self._queue_errors, self.poll)
                message, fix = describe(error)
                text = f"the queue cannot be used: {message}; next try in {pause:g} s"
                self.drain.emit(Warned(error=text, fix=fix))
            if pause > 0:
                self.wait(pause, self.stop.is_set)
        return self.counts

    def _work(self) -> bool:
        """Recover and drain once; return True if something was done, so that more may be due."""
        if not self.still_ours():
            raise LockLostError
        if self._is_paused():
            return False
        if time.monotonic() >= self._recover_at:
            self._recover()
        if self.stop.is_set():
            return False
        with self.stop.busy():
            done = self.drain.run()
        self._report_stuck_files()
        if done is None:
            return False
        if done.undecided:
            self._recover_at = 0.0
        self.counts.add(done)
        self.counts.undecided = done.undecided
        return True

    def _tidy(self) -> None:
        """Sync the local branch and clean up; whatever prevents it now is tried again later."""
        with suppress(PublishError, OSError, StoppedError):
            self.drain.publisher().tidy(self.drain.clock())

    def _pull_if_idle(self) -> None:
        """Pull if it is time, but not during a pause, and not when stopped."""
        if self._pause is None and not self.stop.is_set():
            self.pull(time.monotonic())

    def _recover(self) -> None:
        """Complete what is in flight; ask the remote again later about what stays undecided."""
        self._recover_at = 0.0  # again at once, if this raises
        with self.stop.busy():
            recovered = self.drain.recover()
        self.counts.add(recovered)
        self.counts.undecided = recovered.undecided
        self._recoveries = self._recoveries + 1 if recovered.undecided else 0
        wait = loop_backoff(self._recoveries, self.poll) if recovered.undecided else math.inf
        self._recover_at = time.monotonic() + wait

    def _report_stuck_files(self) -> None:
        """Warn once about each file that is not a job and could not be quarantined."""
        found = self.stuck_files()
        new = [name for name in found if name not in self._reported_files]
        self._reported_files = frozenset(found)
        if new:
            more = f", and {len(new) - 1} more" if len(new) > 1 else ""
            text = f"the file {new[0]!r} is not a job and could not be quarantined{more}: {found[new[0]]}"
            self.drain.emit(Warned(error=text, fix="remove the file from the queue folder"))
            self.counts.failed += len(new)

    def _is_paused(self) -> bool:
        """Return True during a pause; emit its beginning, its changes and its end once."""
        pause = self.drain.queue.active_pause(time.time())
        if pause != self._pause:
            self._pause = pause
            self.drain.emit(Paused(reason=pause.reason, until=pause.until) if pause else Resumed())
        return pause is not None

    def _idle_time(self) -> float:
        """Return the seconds until the next job is due or the pause ends, at most the poll interval."""
        now = time.time()
        at = self._pause.until if self._pause else self.drain.queue.next_due(now)
        return self.poll if at is None else max(0.0, min(self.poll, at - now))


def loop_backoff(failures: int, poll: float, longest: float = _MAX_LOOP_PAUSE_S) -> float:
    """Return how long the loop waits after failures in a row: doubled each time, up to a minute."""
    # The exponent is bounded, because after hours of failures the power is no float any more.
    return min(poll * 2.0 ** min(failures, 16), max(longest, poll))


def pull_backoff(failures: int, interval: float) -> float:
    """Return the wait for the next pull after failures in a row; `interval` is 0 without one."""
    return loop_backoff(failures, interval or _MAX_LOOP_PAUSE_S, longest=_MAX_PULL_PAUSE_S)


@contextmanager
def heartbeat(lock: SiteLock, interval: float) -> Iterator[None]:
    """Keep the lock's heartbeat fresh inside, however long a push takes; release the lock at the end."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(interval):
            with suppress(OSError):
                lock.beat(time.time())

    beating = threading.Thread(target=beat, name="heartbeat", daemon=True)
    beating.start()
    try:
        yield
    finally:
        done.set()
        beating.join()
        lock.release()
