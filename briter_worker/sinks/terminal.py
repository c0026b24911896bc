"""For a person who watches: the log's lines in colour, and a bar under them while a drain or push is long."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from briter_worker.events import Event, Progress
from briter_worker.sinks.log import line

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from briter_worker.sinks.log import LogSink

_COLOURS = {"warning": "33", "error": "31"}
_PATIENCE = 0.3
"""How long something takes before a person wants to see how far it is."""


class TerminalSink:
    """As the log, whose lines keep their form; the bar is gone when its work is done."""

    def __init__(self, log: LogSink, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._colour = not os.environ.get("NO_COLOR")
        self._bar: Bar | None = None
        self._tasks: dict[str, TaskID] = {}
        self._since: dict[str, float] = {}
        self._guard = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Print the event, or show how far the drain is."""
        with self._guard:
            if isinstance(event, Progress):
                # A terminal that went away is the log's to notice.
                with suppress(OSError, ValueError):
                    self._show(event)
                return
            with suppress(OSError, ValueError):
                self._clear()
            self._print(event, None)

    def of(self, site: str) -> Callable[[Event], None]:
        """The same, whose lines name the site. Many at once have no one bar."""

        def tell(event: Event) -> None:
            if not isinstance(event, Progress):
                with self._guard:
                    self._print(event, site)

        return tell

    def _print(self, event: Event, site: str | None) -> None:
        text = line(event, time.time(), site)
        code = _COLOURS.get(event.level) if self._colour else None
        self._log.write(f"\x1b[{code}m{text}\x1b[0m" if code else text)

    def _show(self, event: Progress) -> None:
        if event.done >= event.total:
            self._since.pop(event.phase, None)
            self._clear()
            return
        since = self._since.setdefault(event.phase, self._clock())
        if self._clock() - since < _PATIENCE:
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
    from rich.console import Console  # noqa: PLC0415 - only a long drain pays for it
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn  # noqa: PLC0415
    from rich.progress import Progress as RichProgress  # noqa: PLC0415

    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
