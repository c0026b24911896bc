"""The site's condition: what keeps any post from being published. Told when it begins, changes and ends.

It is kept, and that it has passed, so that a worker that starts into a known condition does not tell it
again, nor does each minute's cron. Only the holder of the site's lock writes it down.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from briter_worker.errors import Failure, Kind
from briter_worker.events import ConditionChanged, DeadLettered, Event, Failed, Flushed, Published

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from dataclasses import dataclass
    from pathlib import Path
else:
    from briter_worker.lazily import dataclass


class Outlet(Protocol):
    """Where events go on to."""

    def __call__(self, event: Event, /) -> None:
        """Take note of the event."""
        ...

    def keep(self, events: Sequence[Event]) -> None:
        """Have these stored first, which are told next: see `fan.Keeper`."""
        ...

    def close(self) -> None:
        """Finish what is left."""
        ...


@dataclass(frozen=True)
class Ailment:
    """What is wrong with the site's surroundings: as one word, and in words."""

    failure: str
    text: str


class Slate(Protocol):
    """Where the condition is kept, and that it has passed. Raises OSError."""

    def read(self) -> Ailment | None:
        """What is wrong, as far as is known."""
        ...

    def write(self, ailment: Ailment | None) -> None:
        """From now on, this is."""
        ...


class FileSlate:
    """A file. Of a damaged one, nothing is known."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Ailment | None:
        """What is wrong, as far as is known."""
        return read_ailment(self._path)

    def write(self, ailment: Ailment | None) -> None:
        """From now on, this is."""
        _write(self._path, ailment)


class ConditionWatch:
    """Passes every event on, and behind it what the event says that is new of the site's condition."""

    def __init__(self, slate: Slate, outlet: Outlet) -> None:
        self._slate = slate
        self._outlet = outlet
        self._read: Callable[[], Ailment | None] = self._read_once
        self._known: Ailment | None = None

    def __call__(self, event: Event, /) -> None:
        """Tell the event, then the change that it brings."""
        self._outlet(event)
        match event:
            case Failed() | DeadLettered() if is_environment(event.failure):
                known = self._read()
                # The words of one failure may differ from time to time; it is the same condition.
                if known is None or known.failure != event.failure:
                    self._change(Ailment(event.failure, event.error))
            case Published() | Flushed() if self._read() is not None:
                self._change(None)
            case _:
                pass

    def keep(self, events: Sequence[Event]) -> None:
        """See `Outlet`."""
        self._outlet.keep(events)

    def close(self) -> None:
        """Nothing is left to be done here."""
        self._outlet.close()

    def _read_once(self) -> Ailment | None:
        with suppress(OSError):
            self._known = self._slate.read()
        self._read = lambda: self._known
        return self._known

    def _change(self, ailment: Ailment | None) -> None:
        self._known = ailment
        # A disk that is full may be the condition itself; this worker tells it once all the same.
        with suppress(OSError):
            self._slate.write(ailment)
        if ailment is None:
            self._outlet(ConditionChanged(condition=None, failure=None))
        else:
            self._outlet(ConditionChanged(condition=ailment.text, failure=ailment.failure))


def is_environment(word: str | None) -> bool:
    """Whether this word of a failure means that no post of the site could be published."""
    try:
        return Failure(word or "").kind is Kind.ENVIRONMENT
    except ValueError:
        return False


def read_ailment(path: Path) -> Ailment | None:
    """What is wrong, as far as is known: of a damaged file, nothing."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["failure"] is None:
            return None
        return Ailment(str(document["failure"]), str(document["condition"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def well_since(path: Path) -> float:
    """When the last condition passed; 0 while one lasts, and when none is known."""
    try:
        return 0.0 if read_ailment(path) else path.stat().st_mtime
    except OSError:
        return 0.0


def _write(path: Path, ailment: Ailment | None) -> None:
    document = {
        "failure": ailment.failure if ailment else None,
        "condition": ailment.text if ailment else None,
    }
    partial = path.with_name(f".{path.name}.tmp")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(document, file, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(descriptor)
    partial.replace(path)
