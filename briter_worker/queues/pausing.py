"""The pause: a file in the queue's folder, which outlives every worker. While it stands, nothing starts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from briter_worker.job import format_time, parse_time
from briter_worker.ports import Pause
from briter_worker.queues.files import belong_to, replace, sync_folder

if TYPE_CHECKING:
    from pathlib import Path

NAME = ".paused"
"""Begins with a dot, so that no reader takes it for a job; the worker's watcher still sees it come and go."""
_UNREADABLE = "the file that says so cannot be read"


class Pausing:
    """Asks for a pause, ends it, and tells whether one lasts."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._path = root / NAME

    def read(self, now: float) -> Pause | None:
        """The pause that lasts at `now`. Damage cannot end one: only `resume`, or its time."""
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError):
            return Pause(since=0.0, until=None, reason=_UNREADABLE)
        try:
            document = json.loads(text)
            until = document["until"]
            pause = Pause(
                since=parse_time(document["since"]),
                until=None if until is None else parse_time(until),
                reason=str(document["reason"]),
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return Pause(since=0.0, until=None, reason=_UNREADABLE)
        return None if pause.until is not None and pause.until <= now else pause

    def pause(self, now: float, *, until: float | None = None, reason: str = "") -> Pause:
        """Nothing is claimed from now on, until then or until `resume`; durable when this returns."""
        pause = Pause(since=now, until=until, reason=reason)
        document = {
            "since": format_time(now),
            "until": None if until is None else format_time(until),
            "reason": reason,
        }
        replace(self._path, json.dumps(document, ensure_ascii=False).encode() + b"\n")
        belong_to(self._path, self._root)
        sync_folder(self._root)
        return pause

    def resume(self) -> bool:
        """Whether there was a pause to end; jobs are claimed again."""
        try:
            self._path.unlink()
        except FileNotFoundError:
            return False
        sync_folder(self._root)
        return True
