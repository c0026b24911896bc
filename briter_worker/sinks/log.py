"""The log: one line for each event, `[briter-worker] ` and a JSON object, for people and programs alike."""

from __future__ import annotations

import dataclasses
import errno
import functools
import io
import json
import select
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from briter_worker.errors import for_people
from briter_worker.events import Event, Progress, Warned
from briter_worker.job import format_time

if TYPE_CHECKING:
    from collections.abc import Callable

PREFIX = "[briter-worker] "
_GONE = frozenset({errno.EPIPE, errno.EBADF, errno.EIO})
"""Nobody reads any more, and nobody will."""
_PATIENCE = 5.0
"""How long a reader may take nothing before it is not waited for any more."""
_AT_ONCE = 4096
"""So much fits into a pipe that says it has room, on any system: writing it waits for nobody."""
_SHORT = 100
_TIMES = frozenset({"retry_at", "until"})


class Writer(Protocol):
    """An unbuffered binary stream; `write` may take only a part, or nothing (None) when it would block."""

    def write(self, data: memoryview, /) -> int | None:
        """How many bytes were taken."""
        ...

    def fileno(self) -> int:
        """The descriptor to wait for."""
        ...


class LogSink:
    """Writes each event at once. Whatever becomes of the stream, nothing is raised and nobody waits in vain.

    A line that cannot be written is lost; the first such loss is told to `complain`. A reader that stalls is
    waited for once, then not before it has read on; it is told how many lines it missed. Safe to use from
    several threads.
    """

    def __init__(
        self,
        stream: Writer | None,
        complain: Callable[[str], None] = lambda _: None,
        *,
        patience: float = _PATIENCE,
    ) -> None:
        self._stream = stream
        self._complain = complain
        self._patience = patience
        self._lost = 0
        """Lines that a reader which stalls has missed."""
        self._torn = False
        self._complained = False
        self._guard = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Write the event's line; progress has none."""
        if not isinstance(event, Progress):
            self.write(line(event, time.time()))

    def of(self, site: str) -> Callable[[Event], None]:
        """The same, whose lines name the site."""

        def tell(event: Event) -> None:
            if not isinstance(event, Progress):
                self.write(line(event, time.time(), site))

        return tell

    def write(self, text: str) -> None:
        """Write one line, whole, or note that it was lost."""
        with self._guard:
            if self._stream is None:
                return
            try:
                if self._lost:
                    self._catch_up(self._stream)
                self._put(self._stream, text, self._patience)
            except _StalledError:
                self._lost += 1  # not told to `complain`, which may speak to the same reader
            except (OSError, ValueError) as error:
                if isinstance(error, ValueError) or error.errno in _GONE:
                    self._stream = None
                self._tell(error)

    def _catch_up(self, stream: Writer) -> None:
        """Tell a reader that stalled, and reads on, what it has missed."""
        lost = Warned(
            error=f"{self._lost} lines of the log are lost: nobody read on for {self._patience:g} s"
        )
        self._put(stream, line(lost, time.time()), 0.0)
        self._lost = 0

    def _put(self, stream: Writer, text: str, patience: float) -> None:
        # What was cut short stays a line of its own.
        data = memoryview(f"{chr(10) if self._torn else ''}{text}\n".encode())
        left = data
        try:
            while left:
                _await_room(stream, patience)
                # None: a parent has made the stream non-blocking, and another writer was quicker.
                left = left[stream.write(left[:_AT_ONCE]) or 0 :]
            self._torn = False
        except (OSError, ValueError, _StalledError):
            self._torn = self._torn or 0 < len(left) < len(data)
            raise

    def _tell(self, error: Exception) -> None:
        if not self._complained:
            self._complained = True
            self._complain(f"the log cannot be written: {error}; publishing goes on without it")


class _StalledError(Exception):
    """Whoever reads the log does not read on."""


def _await_room(stream: Writer, patience: float) -> None:
    """Return as soon as the stream takes something. Raises _StalledError when patience is over before."""
    try:
        room = select.poll()
        room.register(stream.fileno(), select.POLLOUT)
    except io.UnsupportedOperation:
        return  # no file, so there is nobody to wait for
    if not room.poll(1000 * patience):
        raise _StalledError


def standard_output() -> Writer | None:
    """The process's standard output without a buffer; None when it has none."""
    return None if sys.stdout is None else io.FileIO(sys.stdout.fileno(), "w", closefd=False)


def line(event: Event, now: float, site: str | None = None) -> str:
    """The event as it stands in the log, without a line end."""
    return PREFIX + json.dumps(entry(event, now, site), ensure_ascii=False, separators=(",", ":"))


def entry(event: Event, now: float, site: str | None = None) -> dict[str, Any]:
    """The event's keys and values; what it has nothing to say about is left out.

    In a cluster, `site` says whose it is.
    """
    found: dict[str, Any] = {"time": format_time(now), "level": event.level, "event": event.name}
    if site is not None:
        found["site"] = site
    for field in dataclasses.fields(event):
        if field.name in event.unlogged:
            continue
        value = _shown(field.name, getattr(event, field.name))
        if value is not None and value != []:
            found[_camel(field.name)] = value
    return found


def _shown(name: str, value: object) -> object:
    match value:
        case str():
            return _for_people_again(value) if len(value) <= _SHORT else for_people(value)
        case tuple():
            return [for_people(str(item)) for item in value]
        case float() | int() if name in _TIMES:
            return format_time(value)
        case _:
            return value


@functools.lru_cache(maxsize=4096)
def _for_people_again(text: str) -> str:
    """A job's id and slug come with each of its events, and each event to several sinks."""
    return for_people(text)


@functools.cache
def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)
