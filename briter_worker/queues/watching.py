"""Wakes the worker when the queue's folder changes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from watchfiles._rust_notify import RustNotify

_STEP_MS = 5
"""How often watchfiles looks; its default of 50 ms alone would double the time from save to remote."""
_DEBOUNCE_MS = 50
_BLIND_STEP = 0.05
_MOUNTS = Path("/proc/self/mountinfo")
_TELLING = frozenset(
    {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "ramfs", "tmpfs", "xfs", "zfs"},
)
"""File systems of this host alone: whoever writes there does it through this kernel, which tells of it."""


class Stopping(Protocol):
    """What ends the wait early."""

    def is_set(self) -> bool:
        """Whether to stop."""
        ...

    def wait(self, seconds: float) -> None:
        """Sleep until then."""
        ...


class FolderWaker:
    """Sleeps until the folder changes. Where the system cannot tell, the poll alone has to do.

    `noticed` is told of every change, and `relied_on` whether from now on no change can go unnoticed: a watch
    stands, on a file system that nobody writes to but through this kernel. It is told before what may have
    gone unnoticed until then is looked for.
    """

    def __init__(
        self, folder: Path, noticed: Callable[[], None], relied_on: Callable[[bool], None] = lambda _: None
    ) -> None:
        self._folder = folder
        self._noticed = noticed
        self._relied_on = relied_on
        self._watch: RustNotify | None = None
        self._watched: tuple[int, int] | None = None
        self._next_try = 0.0

    def wait(self, seconds: float, stop: Stopping) -> None:
        """Return after `seconds`, or when the folder changed, or when `stop` is set."""
        if self._watch is not None and _identity(self._folder) != self._watched:
            # Another folder has the name now; the kernel would go on telling of the old one.
            self._lose()
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
            self._lose()
            stop.wait(min(seconds, _BLIND_STEP))
            return
        if isinstance(found, set):
            self._noticed()

    def _watching(self) -> RustNotify | None:
        if self._watch is None and time.monotonic() >= self._next_try:
            from watchfiles._rust_notify import RustNotify  # noqa: PLC0415 - only a daemon needs it

            # Asked before: if the folder is replaced in between, the next wait finds another one.
            self._watched = _identity(self._folder)
            try:
                self._watch = RustNotify([str(self._folder)], False, False, 0, False, True)
            except Exception:  # noqa: BLE001 - no inotify here, or none left: ask again in a minute
                self._next_try = time.monotonic() + 60.0
            else:
                self._relied_on(self._watched is not None and _tells_all(self._watched[0]))
        return self._watch

    def _lose(self) -> None:
        self._watch = None
        self._relied_on(False)


def _identity(folder: Path) -> tuple[int, int] | None:
    try:
        found = folder.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino)


def _tells_all(device: int) -> bool:
    """Whether this kernel sees every write to the file system: not on one that other hosts share."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    # A device that is not listed (a btrfs subvolume has one of its own) is a no, which only costs more looks.
    mounts = (line.split(" - ", 1) for line in lines if line.split()[2] == number)
    kinds = {rest[0].split()[0] for _, *rest in mounts if rest}
    return bool(kinds) and kinds <= _TELLING
