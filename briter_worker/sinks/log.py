"""The log: one line per event, `[briter-worker] ` and a JSON object."""

from __future__ import annotations

import errno
import functools
import io
import json
import select
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from briter_worker.events import Event, Progress, Warned
from briter_worker.job import format_time
from briter_worker.redaction import one_line

if TYPE_CHECKING:
    from collections.abc import Callable

PREFIX = "[briter-worker] "
_CLOSED = frozenset({errno.EPIPE, errno.EBADF, errno.EIO})
"""Nobody reads the stream any more, and nobody will."""
_STALL_TIMEOUT_S = 5.0
_PIPE_BYTES = 4096
"""A pipe that is ready for writing takes at least this much without blocking, on any system."""
_CACHED_LENGTH = 100
_COLOURS = {"warning": "33", "error": "31"}
_TIMES = frozenset({"retry_at", "until"})


class Writer(Protocol):
    """An unbuffered binary stream; `write` may take a part, or nothing (None) when it would block."""

    def write(self, data: memoryview, /) -> int | None:
        """Return the number of bytes that were written."""
        ...

    def fileno(self) -> int:
        """Return the file descriptor."""
        ...


class LogSink:
    """Writes each event at once. Raises nothing, and never waits for long. Safe in several threads.

    A line that cannot be written is lost; `complain` hears of the first one. A reader that stalls is waited
    for once, then not before it reads on; it is told how many lines it missed.
    """

    def __init__(
        self,
        stream: Writer | None,
        complain: Callable[[str], None] = lambda _: None,
        *,
        has_colours: bool = False,
        patience: float = _STALL_TIMEOUT_S,
    ) -> None:
        self._stream = stream
        self._complain = complain
        self._has_colours = has_colours
        self._patience = patience
        self._lost = 0
        """Lines that a stalled reader has missed."""
        self._is_torn = False
        self._has_complained = False
        self._guard = threading.Lock()

    def __call__(self, event: Event, /, site: str | None = None) -> None:
        """Write the event's line; progress has none."""
        if isinstance(event, Progress):
            return
        text = log_line(event, time.time(), site)
        code = _COLOURS.get(event.level) if self._has_colours else None
        self.write(f"\x1b[{code}m{text}\x1b[0m" if code else text)

    def of(self, site: str) -> Callable[[Event], None]:
        """Return a sink whose lines name the site."""
        return functools.partial(self, site=site)

    def write(self, text: str) -> None:
        """Write one whole line, or note that it is lost."""
        with self._guard:
            if self._stream is None:
                return
            try:
                if self._lost:
                    self._report_lost(self._stream)
                self._put(self._stream, text, self._patience)
            except _StalledError:
                self._lost += 1  # `complain` may write to the same reader
            except (OSError, ValueError) as error:
                if isinstance(error, ValueError) or error.errno in _CLOSED:
                    self._stream = None
                if not self._has_complained:
                    self._has_complained = True
                    self._complain(f"the log cannot be written: {error}; publishing goes on without it")

    def _report_lost(self, stream: Writer) -> None:
        text = f"{self._lost} lines of the log are lost: nobody read the log for {self._patience:g} s"
        self._put(stream, log_line(Warned(error=text), time.time()), 0.0)
        self._lost = 0

    def _put(self, stream: Writer, text: str, patience: float) -> None:
        # A line that was cut short stays a line of its own.
        data = memoryview(f"{chr(10) if self._is_torn else ''}{text}\n".encode())
        left = data
        try:
            while left:
                _await_room(stream, patience)
                # None: a parent made the stream non-blocking, and another writer was quicker.
                left = left[stream.write(left[:_PIPE_BYTES]) or 0 :]
            self._is_torn = False
        except (OSError, ValueError, _StalledError):
            self._is_torn = self._is_torn or 0 < len(left) < len(data)
            raise


class _StalledError(Exception):
    """The reader of the log does not read on."""


def _await_room(stream: Writer, patience: float) -> None:
    try:
        room = select.poll()
        room.register(stream.fileno(), select.POLLOUT)
    except io.UnsupportedOperation:
        return  # not a file, so there is nobody to wait for
    if not room.poll(1000 * patience):
        raise _StalledError


def standard_output() -> Writer | None:
    """Return the process's standard output without a buffer; None if it has none."""
    return None if sys.stdout is None else io.FileIO(sys.stdout.fileno(), "w", closefd=False)


def log_line(event: Event, now: float, site: str | None = None) -> str:
    """Return the line of the event, without a line feed."""
    return PREFIX + json.dumps(log_entry(event, now, site), ensure_ascii=False, separators=(",", ":"))


def log_entry(event: Event, now: float, site: str | None = None) -> dict[str, Any]:
    """Return the keys and values of the event, redacted, without those that do not apply."""
    found: dict[str, Any] = {"time": format_time(now), "level": event.level, "event": event.name}
    if site is not None:
        found["site"] = site
    for name in event.fields:
        if name in event.unlogged:
            continue
        value = _shown(name, getattr(event, name))
        if value is not None and value != [] and (value or name != "fix"):
            found[_camel(name)] = value
    return found


def _shown(name: str, value: object) -> object:
    match value:
        case str():
            return _one_line_cached(value) if len(value) <= _CACHED_LENGTH else one_line(value)
        case tuple():
            return [one_line(str(item)) for item in value]
        case float() | int() if name in _TIMES:
            return format_time(value)
        case _:
            return value


@functools.lru_cache(maxsize=4096)
def _one_line_cached(text: str) -> str:
    """Return one redacted line. A job's id and slug come with each of its events, to several sinks."""
    return one_line(text)


@functools.cache
def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)
