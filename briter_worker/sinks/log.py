"""The log: one line per event, `[briter-worker] ` and a JSON object; at a terminal, for a person."""

from __future__ import annotations

import errno
import functools
import io
import json
import select
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from pydantic.alias_generators import to_camel

from briter_worker.errors import one_line
from briter_worker.events import Event, Progress, Warned, WorkerStarted, WorkerStopped
from briter_worker.job import format_time

if TYPE_CHECKING:
    from collections.abc import Callable

PREFIX = "[briter-worker] "
_CLOSED = frozenset({errno.EPIPE, errno.EBADF, errno.EIO})
"""The stream has no reader any more."""
_STALL_TIMEOUT_S = 5.0
_PIPE_BYTES = 4096
"""A pipe that is ready for writing takes at least this much without blocking, on any system."""
_CLEAR = "\r\x1b[K"
"""Returns to the start of a terminal's line, and empties it."""
_TIMES = frozenset({"retry_at", "until"})

# A job's id and slug come with each of its events, to several sinks.
_show_text = functools.lru_cache(maxsize=4096)(one_line)
_camel = functools.cache(to_camel)


@dataclass(eq=False)
class LogSink:
    """Writes each event at once. Raises nothing, and never waits for long. Safe in several threads.

    A line that cannot be written is lost; `complain` hears of the first one. A reader that stalls is waited
    for once, then not before it reads on; a line says how many lines it missed.
    """

    stream: BinaryIO | None
    """Unbuffered: may write a part, or nothing (None) when it would block."""
    complain: Callable[[str], None] = lambda _: None
    render: Callable[[dict[str, Any]], str] | None = None
    """Returns a line for a person; None writes JSON."""
    _lost: int = 0
    """Lines that a stalled reader has missed."""
    _is_cut: bool = False
    _shows_progress: bool = False
    _has_complained: bool = False
    _guard: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def standard(
        cls, complain: Callable[[str], None], render: Callable[[dict[str, Any]], str] | None = None
    ) -> Self:
        """Return the log on the process's standard output, if it has one."""
        stream = None if sys.stdout is None else io.FileIO(sys.stdout.fileno(), "w", closefd=False)
        return cls(stream, complain, render=render)

    def __call__(self, event: Event, /, site: str | None = None) -> None:
        """Write the event's line. Progress is a line of a terminal only, which the next line replaces."""
        is_progress = isinstance(event, Progress)
        if is_progress and self.render is None:
            return
        render = self.render or json_line
        with self._guard:
            if self.stream is None:
                return
            try:
                if self._lost:
                    text = f"{self._lost} log lines are lost: the reader of the log did not keep up"
                    self._write(self.stream, render(log_entry(Warned(error=text), time.time())), 0.0)
                    self._lost = 0
                line = render(log_entry(event, time.time(), site))
                text, self._shows_progress = (_CLEAR if self._shows_progress else "") + line, is_progress
                self._write(self.stream, text, _STALL_TIMEOUT_S, end="" if is_progress else "\n")
            except TimeoutError:
                self._lost += 1  # `complain` may write to the same reader
            except (OSError, ValueError) as error:
                if isinstance(error, ValueError) or error.errno in _CLOSED:
                    self.stream = None
                if not self._has_complained:
                    self._has_complained = True
                    self.complain(f"the log cannot be written: {error}; publishing goes on without it")

    def _write(self, stream: BinaryIO, text: str, patience: float, end: str = "\n") -> None:
        # A line that was cut short stays a line of its own.
        data = memoryview(f"{chr(10) if self._is_cut else ''}{text}{end}".encode())
        left = data
        try:
            while left:
                _await_room(stream, patience)
                # None: a parent made the stream non-blocking, and another writer was quicker.
                left = left[stream.write(left[:_PIPE_BYTES]) or 0 :]
            self._is_cut = False
        except (OSError, ValueError):
            self._is_cut = self._is_cut or 0 < len(left) < len(data)
            raise


@dataclass(eq=False)
class QuietLogSink(LogSink):
    """Writes nothing of a run that finds nothing to do: cron starts one each minute."""

    _started: WorkerStarted | None = None
    """Not written yet: whether the run does anything is not known."""

    def __call__(self, event: Event, /, site: str | None = None) -> None:
        """Write the event, and before the first one the worker's start."""
        if isinstance(event, WorkerStarted):
            self._started = event
            return
        if isinstance(event, WorkerStopped) and self._started is not None:
            return
        if self._started is not None and not isinstance(event, Progress):
            started, self._started = self._started, None
            super().__call__(started, site)
        super().__call__(event, site)


def _await_room(stream: BinaryIO, patience: float) -> None:
    try:
        room = select.poll()
        room.register(stream.fileno(), select.POLLOUT)
    except io.UnsupportedOperation:
        return  # not a file, so there is nobody to wait for
    if not room.poll(1000 * patience):
        raise TimeoutError


def json_line(entry: dict[str, Any]) -> str:
    """Return the line of an entry, without a line feed."""
    return PREFIX + json.dumps(entry, ensure_ascii=False, separators=(",", ":"))


def log_entry(event: Event, now: float, site: str | None = None) -> dict[str, Any]:
    """Return the keys and values of the event, redacted, without those that do not apply."""
    found: dict[str, Any] = {"time": format_time(now), "level": event.level, "event": event.name}
    if site is not None:
        found["site"] = site
    for name in event.fields:
        value = getattr(event, name)
        if name in event.unlogged or value in (None, ()) or (name == "fix" and not value):
            continue
        match value:
            case str():
                value = _show_text(value)
            case tuple():
                value = [one_line(str(item)) for item in value]
            case float() | int() if name in _TIMES:
                value = format_time(value)
            case _:
                pass
        found[_camel(name)] = value
    return found
