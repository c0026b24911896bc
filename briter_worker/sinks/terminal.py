"""The log on a terminal: lines in colour, and a progress bar while a drain takes long."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from briter_worker.events import Event, Progress
from briter_worker.sinks.log import log_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.progress import TaskID

    from briter_worker.sinks.log import LogSink

_COLOURS = {"warning": "33", "error": "31"}
_SHOWN_AFTER_S = 0.3


class TerminalSink:
    """Writes log lines as `LogSink` does, and removes the bar when its work is done."""

    def __init__(self, log: LogSink, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._has_colours = not os.environ.get("NO_COLOR")
        self._bar: Bar | None = None
        self._tasks: dict[str, TaskID] = {}
        self._began: dict[str, float] = {}
        self._guard = threading.Lock()

    def __call__(self, event: Event, /) -> None:
        """Print the event, or show the progress."""
        # `LogSink` reports a terminal that was closed.
        with self._guard, suppress(OSError, ValueError):
            if isinstance(event, Progress):
                self._show(event)
                return
            self._clear()
        if not isinstance(event, Progress):
            self._print(event, None)

    def of(self, site: str) -> Callable[[Event], None]:
        """Return a sink whose lines name the site. Many sites at once have no bar."""

        def write(event: Event, /) -> None:
            if not isinstance(event, Progress):
                self._print(event, site)

        return write

    def _print(self, event: Event, site: str | None) -> None:
        text = log_line(event, time.time(), site)
        code = _COLOURS.get(event.level) if self._has_colours else None
        self._log.write(f"\x1b[{code}m{text}\x1b[0m" if code else text)

    def _show(self, event: Progress) -> None:
        if event.done >= event.total:
            self._began.pop(event.phase, None)
            self._clear()
            return
        began = self._began.setdefault(event.phase, self._clock())
        if self._clock() - began < _SHOWN_AFTER_S:
            return
        if self._bar is None:
            self._bar = _new_bar()
            self._bar.start()
        if event.phase not in self._tasks:
            self._tasks[event.phase] = self._bar.add_task(event.phase, total=event.total)
        self._bar.update(self._tasks[event.phase], completed=event.done, total=event.total)

    def _clear(self) -> None:
        bar, self._bar = self._bar, None
        self._tasks.clear()
        if bar is not None:
            bar.stop()


def _new_bar() -> Bar:
    return Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
