"""The loop: wake, drain, sleep; and how it ends.

One thread publishes. Beside it a heartbeat keeps the lock's record fresh, and when a signal comes a third
one bounds the time that the running publication may take to finish.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol

from briter_worker.errors import LockLostError, PublishError, Stopped, explained
from briter_worker.events import (
    Paused,
    Resumed,
    Warned,
    WorkerSkipped,
    WorkerStarted,
    WorkerStopped,
    WorkerStopping,
)
from briter_worker.settling import Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import FrameType

    from briter_worker.drain import Drain
    from briter_worker.ports import EventSink, Pause

SKIPPED = "another worker instance is active, skipping"
_TIDY_EVERY = 30.0
_LONGEST_PAUSE = 60.0


class Lock(Protocol):
    """One worker per site."""

    def beat(self, now: float) -> None:
        """Show that the holder lives."""
        ...

    def release(self) -> None:
        """Let the next one in."""
        ...


class Stop:
    """The wish to stop. Set once, by a signal; a second signal cuts the time to finish short."""

    def __init__(self, emit: EventSink, *, limit: float, abort: Callable[[], None]) -> None:
        self._emit = emit
        self._limit = limit
        self._abort = abort
        self._stopping = threading.Event()
        self._hurry = threading.Event()
        self._finished = threading.Event()

    def is_set(self) -> bool:
        """Whether no new job may be taken."""
        return self._stopping.is_set()

    def wait(self, seconds: float) -> None:
        """Sleep, unless and until it is set."""
        self._stopping.wait(seconds)

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT set it, inside."""
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        for number in before:
            signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            self._finished.set()
            self._hurry.set()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - signal's signature
        if self._stopping.is_set():
            self._hurry.set()
            return
        self._stopping.set()
        # Not in the handler itself: it may interrupt a write that holds the output's lock.
        name = signal.Signals(number).name
        threading.Thread(target=self._bound, args=(name,), name="shutdown", daemon=True).start()

    def _bound(self, name: str) -> None:
        self._emit(WorkerStopping(signal=name))
        self._hurry.wait(self._limit)
        if not self._finished.is_set():
            self._abort()


class Waker(Protocol):
    """Sleeps until there may be something to do."""

    def wait(self, seconds: float, stop: Stop) -> None:
        """Return after `seconds`, or when the queue's folder changed, or when `stop` is set."""
        ...


class Worker:
    """Publishes one site's posts while it holds the site's lock."""

    def __init__(  # noqa: PLR0913 - each is one question or one deed, by its keyword
        self,
        drain: Drain,
        emit: EventSink,
        stop: Stop,
        waker: Waker,
        *,
        next_due: Callable[[float], float | None],
        paused: Callable[[float], Pause | None],
        pending_flush: Callable[[], bool],
        still_ours: Callable[[], bool],
        tidy: Callable[[], None],
        poll: float,
        in_the_way: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._drain = drain
        self._emit = emit
        self._stop = stop
        self._waker = waker
        self._next_due = next_due
        self._paused = paused
        self._pending_flush = pending_flush
        self._still_ours = still_ours
        self._tidy = tidy
        self._poll = poll
        self._in_the_way = in_the_way
        self._told: frozenset[str] = frozenset()
        """What was in the way when that was told last."""
        self.total = Tally()
        self._trouble = 0
        self._flush_at = 0.0
        self._recover_at = 0.0
        self._doubts = 0
        self._pause: Pause | None = None
        """The pause that was told."""

    def once(self) -> Tally:
        """Drain what is due, and what becomes due by it. Raises LockLostError."""
        while not self._stop.is_set() and self._pass():
            pass
        self._tidy()
        return self.total

    def forever(self) -> Tally:
        """Drain whenever something is due, until told to stop. Raises LockLostError."""
        tidied = -math.inf  # a worker that died may have left something that is in a person's way
        while not self._stop.is_set():
            try:
                if self._pass():
                    continue
                self._trouble = 0
                if time.monotonic() - tidied > _TIDY_EVERY:
                    tidied = time.monotonic()
                    self._tidy()
                pause = self._rest()
            except (OSError, PublishError) as error:
                # The queue cannot be read or written. A job's backoff is for jobs; this is the loop's own.
                self._recover_at = 0.0
                self._trouble += 1
                pause = pause_after(self._trouble, self._poll)
                why = explained(error) if isinstance(error, OSError) else error.text
                self._emit(Warned(error=f"the queue cannot be worked on: {why}; next try in {pause:g} s"))
            if pause > 0:
                self._waker.wait(pause, self._stop)
        return self.total

    def _pass(self) -> bool:
        """Whether something was done, so that more may be due."""
        if not self._still_ours():
            raise LockLostError
        if self._is_paused():
            return False
        try:
            if time.monotonic() >= self._recover_at:
                self._recover()
            tally = None if self._stop.is_set() else self._drain.run()
            self._tell_in_the_way()
            if tally is None:
                return self._flush()
        except Stopped:
            return False  # what it left is for the next start
        self.total.add(tally)
        return True

    def _tell_in_the_way(self) -> None:
        """Each file that is no job and cannot be put aside is told of once, all that are new in one line."""
        found = self._in_the_way()
        new = [name for name in found if name not in self._told]
        self._told = frozenset(found)
        if new:
            more = f", and {len(new) - 1} more like it" if len(new) > 1 else ""
            text = f"the file {new[0]!r} is no job and cannot be put aside{more}: {found[new[0]]}"
            self._emit(Warned(error=text))
            self.total.failed += len(new)

    def _recover(self) -> None:
        self._recover_at = 0.0
        recovered = self._drain.recover()
        self.total.add(recovered)
        self.total.undecided = recovered.undecided
        self._doubts = self._doubts + 1 if recovered.undecided else 0
        wait = pause_after(self._doubts, self._poll) if self._doubts else math.inf
        self._recover_at = time.monotonic() + wait

    def _flush(self) -> bool:
        if self._stop.is_set() or time.monotonic() < self._flush_at or not self._pending_flush():
            return False
        try:
            self._drain.flush()
        except PublishError as failure:
            self._flush_at = time.monotonic() + _LONGEST_PAUSE
            self.total.failed += 1
            self._emit(Warned(error=f"the commits of dry runs were not pushed: {failure.text}"))
            return False
        return True

    def _is_paused(self) -> bool:
        """Whether a pause lasts; its beginning, its changes and its end are told once."""
        pause = self._paused(time.time())
        if pause != self._pause:
            self._pause = pause
            self._emit(Paused(reason=pause.reason, until=pause.until) if pause else Resumed())
        return pause is not None

    def _rest(self) -> float:
        """How long there is nothing to do; a pause is looked at each time, as its file is in the folder."""
        now = time.time()
        if self._pause is not None:
            return (
                self._poll
                if self._pause.until is None
                else max(0.0, min(self._poll, self._pause.until - now))
            )
        due = self._next_due(now)
        return self._poll if due is None else max(0.0, min(self._poll, due - now))


def pause_after(failures: int, poll: float) -> float:
    """How long the loop waits after so many failures in a row: doubled each time, up to a minute."""
    # Bounded before it is used: after some hours of trouble, two to that power is no float any more.
    return min(poll * 2.0 ** min(failures, 16), max(_LONGEST_PAUSE, poll))


@contextmanager
def heartbeat(lock: Lock, every: float) -> Iterator[None]:
    """The lock's record is kept fresh inside, however long a push takes; then the lock is released."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(every):
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


def started(emit: EventSink, *, dry_run: bool) -> None:
    """Tell that the worker begins."""
    emit(WorkerStarted(pid=os.getpid(), dry_run=dry_run))


def skipped(emit: EventSink, holder_pid: int | None) -> None:
    """Tell that another worker has the site."""
    emit(WorkerSkipped(message=SKIPPED, holder_pid=holder_pid))


def stopped(emit: EventSink, tally: Tally) -> None:
    """Tell that the worker ends."""
    emit(WorkerStopped(drained=tally.settled))
