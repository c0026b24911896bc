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
from briter_worker.events import Event, Progress
from briter_worker.job import format_time

if TYPE_CHECKING:
    from collections.abc import Callable

PREFIX = "[briter-worker] "
_GONE = frozenset({errno.EPIPE, errno.EBADF, errno.EIO})
"""Nobody reads any more, and nobody will."""
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

    A line that cannot be written is lost; the first such loss is told to `complain`. Safe to use from
    several threads.
    """

    def __init__(self, stream: Writer | None, complain: Callable[[str], None] = lambda _: None) -> None:
        self._stream = stream
        self._complain = complain
        self._torn = False
        self._complained = False
        self._guard = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Write the event's line; progress has none."""
        if not isinstance(event, Progress):
            self.write(line(event, time.time()))

    def write(self, text: str) -> None:
        """Write one line, whole, or note that it was lost."""
        with self._guard:
            if self._stream is None:
                return
            # What a full disk has cut short stays a line of its own.
            start = "\n" if self._torn else ""
            data = memoryview(f"{start}{text}\n".encode())
            left = data
            try:
                while left:
                    taken = self._stream.write(left)
                    if taken is None:
                        # A parent has made the stream non-blocking: it is slow, not gone.
                        select.select([], [self._stream], [])
                    else:
                        left = left[taken:]
                self._torn = False
            except (OSError, ValueError) as error:
                self._torn = self._torn or 0 < len(left) < len(data)
                if isinstance(error, ValueError) or error.errno in _GONE:
                    self._stream = None
                self._tell(error)

    def _tell(self, error: Exception) -> None:
        if not self._complained:
            self._complained = True
            self._complain(f"the log cannot be written: {error}; publishing goes on without it")


def standard_output() -> Writer | None:
    """The process's standard output without a buffer; None when it has none."""
    return None if sys.stdout is None else io.FileIO(sys.stdout.fileno(), "w", closefd=False)


def line(event: Event, now: float) -> str:
    """The event as it stands in the log, without a line end."""
    return PREFIX + json.dumps(entry(event, now), ensure_ascii=False, separators=(",", ":"))


def entry(event: Event, now: float) -> dict[str, Any]:
    """The event's keys and values; what it has nothing to say about is left out."""
    found: dict[str, Any] = {"time": format_time(now), "level": event.level, "event": event.name}
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
