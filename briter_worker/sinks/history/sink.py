"""Writes the history: events as they come, old receipts away when there is nothing else to do."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from briter_worker.events import Event, HistoryRetired, JobStarted, Progress
from briter_worker.sinks.history.database import SCHEMA
from briter_worker.sinks.history.recording import Recorder
from briter_worker.sinks.history.retention import retire
from briter_worker.sinks.storing import NEVER, FileStoring

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from briter_worker.ports import EventSink
    from briter_worker.sinks.history.recording import Target
    from briter_worker.sinks.history.retention import Retention

_PROGRESS_EVERY = 0.25
_RETIRE_EVERY = 3600.0
_MOMENT = 1.0
"""For so long a job that is on the remote stays in flight, where its receipt cannot be stored."""


class Pace:
    """Which of a drain's progress is worth a row."""

    def __init__(self) -> None:
        self._shown: tuple[str, float] = ("", 0.0)

    def is_news(self, event: Progress) -> bool:
        """A phase's beginning and end always are; what lies between, a few times a second."""
        phase, told = self._shown
        now = time.monotonic()
        if event.phase == phase and event.done < event.total and now - told < _PROGRESS_EVERY:
            return False
        self._shown = (event.phase, now)
        return True


class HistorySink(FileStoring[tuple[float, Event]]):
    """Stores what happens, within a moment."""

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
        super().__init__(path, SCHEMA, what="history", complain=complain)
        self._recorder = Recorder(target)
        self._retention = retention
        self._announce = announce
        self._clock = clock
        self._pace = Pace()
        self._retire_at = 0.0

    def __call__(self, event: Event) -> None:
        """Take note of the event."""
        if not isinstance(event, Progress) or self._pace.is_news(event):
            # A start is soon followed by more; who waits for progress waits for its phase.
            self.put((self._clock(), event), within=NEVER if isinstance(event, JobStarted) else 0.0)

    def keep(self, events: Sequence[Event]) -> None:
        """Take note of these; they are in the file when it returns, if it can be written within a moment."""
        for event in events:
            self(event)
        self.settle(_MOMENT)

    def record(self, connection: sqlite3.Connection, items: list[tuple[float, Event]]) -> None:
        """Store these, in order."""
        self._recorder.record(connection, items)

    def forget(self) -> None:
        """The transaction was given up."""
        self._recorder.forget()

    def tidy(self, connection: sqlite3.Connection) -> None:
        """Let old receipts go, now and then."""
        if time.monotonic() < self._retire_at:
            return
        retired = retire(connection, self._retention, self._clock())
        if retired.is_whole:
            self._retire_at = time.monotonic() + _RETIRE_EVERY
        if retired.stale or retired.deleted:
            self._announce(HistoryRetired(stale=retired.stale, deleted=retired.deleted))
