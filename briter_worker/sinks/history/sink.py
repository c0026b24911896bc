"""Writes the history. Publishing never waits for it, and never fails with it.

Events are handed to a thread, which stores all that has gathered in one transaction: one save costs one
small write, and a drain of thousands a few large ones. What cannot be stored (the file is locked, the disk
is full) is kept for the next try, up to a limit; the first failure is told.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from briter_worker.events import Event, HistoryRetired, JobStarted, Progress
from briter_worker.sinks.history.database import is_damage, open_to_write, put_aside
from briter_worker.sinks.history.recording import Recorder
from briter_worker.sinks.history.retention import retire

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from briter_worker.ports import EventSink
    from briter_worker.sinks.history.recording import Target
    from briter_worker.sinks.history.retention import Retention

_KEPT = 50_000
"""As many events wait in memory for a history that cannot be written; older ones are given up."""
_AGAIN = 1.0
_LAST_WAIT = 10.0
_AT_ONCE = 5000
_PROGRESS_EVERY = 0.25
_RETIRE_EVERY = 3600.0


class HistorySink:
    """Stores what happens. One for each process; the file is opened with the first event."""

    def __init__(
        self,
        path: Path,
        target: Target,
        retention: Retention,
        *,
        announce: EventSink,
        complain: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._recorder = Recorder(target)
        self._retention = retention
        self._announce = announce
        self._complain = complain
        self._clock = clock
        self._events: deque[tuple[float, Event]] = deque(maxlen=_KEPT)
        self._wake = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._connection: sqlite3.Connection | None = None
        self._complained = False
        self._shown: tuple[str, float] = ("", 0.0)
        self._retire_at = 0.0

    def __call__(self, event: Event) -> None:
        """Take note of the event; it is stored within a moment."""
        if isinstance(event, Progress) and not self._is_news(event):
            return
        with self._wake:
            self._events.append((self._clock(), event))
            if self._thread is None:
                self._thread = threading.Thread(target=self._write, name="history", daemon=True)
                self._thread.start()
            # A start is soon followed by more; who waits for progress waits for its phase.
            if not isinstance(event, JobStarted):
                self._wake.notify()

    def close(self) -> None:
        """Store what is left, within a bounded time, and close the file."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(_LAST_WAIT)

    def _is_news(self, event: Progress) -> bool:
        """A phase's beginning and end always are; what lies between, a few times a second."""
        phase, told = self._shown
        now = time.monotonic()
        if event.phase == phase and event.done < event.total and now - told < _PROGRESS_EVERY:
            return False
        self._shown = (event.phase, now)
        return True

    def _write(self) -> None:
        while True:
            with self._wake:
                if not self._events and not self._closing:
                    self._wake.wait(_RETIRE_EVERY)
                closing = self._closing
                gathered = [self._events.popleft() for _ in range(min(_AT_ONCE, len(self._events)))]
            stored = self._store(gathered)
            if not stored:
                with self._wake:
                    self._events.extendleft(reversed(gathered[: _KEPT - len(self._events)]))
                    if closing:
                        break
                    self._wake.wait(_AGAIN)
            elif not self._events:
                self._retire()
                if closing:
                    break
        if self._connection is not None:
            self._connection.close()

    def _store(self, gathered: list[tuple[float, Event]]) -> bool:
        """Whether the events are in the file, all of them; else none is."""
        if not gathered:
            return True
        try:
            if self._connection is None:
                self._connection = open_to_write(self._path)
            connection = self._connection
            connection.execute("BEGIN IMMEDIATE")
            try:
                self._recorder.record(connection, gathered)
                connection.execute("COMMIT")
            except BaseException:
                self._recorder.forget()
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        except (sqlite3.Error, OSError) as error:
            self._give_up(error)
            return False
        self._complained = False
        return True

    def _retire(self) -> None:
        """Let old receipts go, now and then, when there is nothing else to store."""
        if self._connection is None or time.monotonic() < self._retire_at:
            return
        try:
            retired = retire(self._connection, self._retention, self._clock())
        except sqlite3.Error as error:
            self._give_up(error)
            return
        if retired.is_whole:
            self._retire_at = time.monotonic() + _RETIRE_EVERY
        if retired.stale or retired.deleted:
            self._announce(HistoryRetired(stale=retired.stale, deleted=retired.deleted))

    def _give_up(self, error: sqlite3.Error | OSError) -> None:
        """Close the file, so that the next try opens it anew; tell the first of several failures."""
        if not self._complained:
            self._complained = True
            self._complain(
                f"the history {self._path} cannot be written: {error}; publishing goes on without it. "
                "Fix: free space, or give the worker's user write access"
            )
        connection, self._connection = self._connection, None
        try:
            if connection is not None:
                connection.close()
            if isinstance(error, sqlite3.Error) and is_damage(error):
                put_aside(self._path)
        except (sqlite3.Error, OSError):
            pass  # told already; the next try meets the same
