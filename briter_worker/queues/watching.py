"""Wakes the worker when the queue's folder changes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from watchfiles._rust_notify import RustNotify

_STEP_MS = 5
"""How often watchfiles looks; its default of 50 ms alone would double the time from save to remote."""
_DEBOUNCE_MS = 50
_BLIND_STEP = 0.05


class Stopping(Protocol):
    """What ends the wait early."""

    def is_set(self) -> bool:
        """Whether to stop."""
        ...

    def wait(self, seconds: float) -> None:
        """Sleep until then."""
        ...


class FolderWaker:
    """Sleeps until the folder changes. Where the system cannot tell, the poll alone has to do."""

    def __init__(self, folder: Path, noticed: Callable[[], None]) -> None:
        self._folder = folder
        self._noticed = noticed
        self._watch: RustNotify | None = None
        self._next_try = 0.0

    def wait(self, seconds: float, stop: Stopping) -> None:
        """Return after `seconds`, or when the folder changed, or when `stop` is set."""
        known = self._watch
        watch = self._watching()
        if watch is None:
            stop.wait(seconds)
            return
        if watch is not known:
            # What was saved before the watch stood was seen by nobody: look again first.
            self._noticed()
            return
        try:
            found = watch.watch(_DEBOUNCE_MS, _STEP_MS, max(1, round(seconds * 1000)), stop)
        except Exception:  # noqa: BLE001 - whatever the watcher does, the poll is the backstop
            self._watch = None
            stop.wait(min(seconds, _BLIND_STEP))
            return
        if isinstance(found, set):
            self._noticed()

    def _watching(self) -> RustNotify | None:
        if self._watch is None and time.monotonic() >= self._next_try:
            from watchfiles._rust_notify import RustNotify  # noqa: PLC0415 - only a daemon needs it

            try:
                self._watch = RustNotify([str(self._folder)], False, False, 0, False, True)
            except Exception:  # noqa: BLE001 - no inotify here, or none left: ask again in a minute
                self._next_try = time.monotonic() + 60.0
        return self._watch
