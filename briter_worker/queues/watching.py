"""Wakes the worker when the queue's folder changes, and knows which of its files did."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from briter_worker.queues import pausing
from briter_worker.queues.files import is_job_name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from briter_worker.queues.inotify import Inotify

_QUIET = 0.003
"""So long nothing more may come until what came is looked at: files saved together are published together."""
_LONGEST_GATHERING = 0.05
_LOOK = 0.1
"""How often it is asked whether to stop."""
_MOUNTS = Path("/proc/self/mountinfo")
_TELLING = frozenset(
    {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "ramfs", "tmpfs", "xfs", "zfs"},
)
"""File systems of this host alone: whoever writes there does it through this kernel, which tells of it."""

Identity = tuple[int, int]
"""A folder's device and inode: of two that had one name, which."""


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

    `noticed` is told that something has changed, or may have. `relied_on` gets `changes` when from now on no
    change can go unnoticed: a watch stands, on a file system that nobody writes to but through this kernel.
    Then `changes` tells which, and `noticed` once more, of what was written until then. It gets None when
    that ends. One thread at a time.
    """

    def __init__(
        self,
        folder: Path,
        noticed: Callable[[], None],
        relied_on: Callable[[Callable[[Identity], Collection[str] | None] | None], None] | None = None,
    ) -> None:
        self._folder = folder
        self._noticed = noticed
        self._relied_on = relied_on
        self._watch: Inotify | None = None
        self._watched: Identity | None = None
        self._is_relied_on = False
        self._changed: set[str] | None = set()
        self._stirred = False
        self._next_try = 0.0

    def wait(self, seconds: float, stop: Stopping) -> None:
        """Return after `seconds`, or when the folder changed, or when `stop` is set."""
        if self._watch is not None and _identity(self._folder) != self._watched:
            # Another folder has the name now; the kernel would go on telling of the old one.
            self._watch.close()
            self._watch = None
            self._rely(False)
        known = self._watch
        watch = self._watching()
        if watch is None:
            stop.wait(seconds)
            return
        if watch is not known:
            # What was saved before the watch stood was seen by nobody: look again first.
            self._noticed()
            return
        deadline = time.monotonic() + seconds
        while not self._stirred and not stop.is_set():
            left = deadline - time.monotonic()
            if left <= 0:
                return
            if watch.wait(min(left, _LOOK)):
                self._gather(watch)
        if self._stirred:
            self._stirred = False
            if not self._is_relied_on:
                self._noticed()

    def changes(self, folder: Identity) -> Collection[str] | None:
        """Which files of the folder have changed since this was asked last; None where it may be any."""
        if self._watch is None or folder != self._watched:
            return None
        self._read(self._watch)
        changed, self._changed = self._changed, set()
        return changed

    def _gather(self, watch: Inotify) -> None:
        latest = time.monotonic() + _LONGEST_GATHERING
        self._read(watch)
        while time.monotonic() < latest and watch.wait(_QUIET):
            self._read(watch)

    def _read(self, watch: Inotify) -> None:
        names = watch.read()
        if names is None:
            self._changed = None
            self._stirred = True
            return
        # A writer's half-written file, under a name that no reader takes for a job, wakes nobody.
        jobs = {name for name in names if is_job_name(name)}
        self._stirred = self._stirred or bool(jobs) or pausing.NAME in names
        if self._is_relied_on and self._changed is not None:
            self._changed |= jobs

    def _watching(self) -> Inotify | None:
        if self._watch is None and time.monotonic() >= self._next_try:
            from briter_worker.queues.inotify import Inotify  # noqa: PLC0415 - only a daemon needs it

            # Asked before: if the folder is replaced in between, the next wait finds another one.
            self._watched = _identity(self._folder)
            try:
                self._watch = Inotify(self._folder)
            except OSError:  # no inotify here, or none left: ask again in a minute
                self._next_try = time.monotonic() + 60.0
            else:
                self._changed = set()
                self._rely(self._watched is not None and _tells_all(self._watched[0]))
        return self._watch

    def _rely(self, told: bool) -> None:  # noqa: FBT001 - it answers the name
        self._is_relied_on = told and self._relied_on is not None
        if self._relied_on is not None:
            self._relied_on(self.changes if told else None)


def _identity(folder: Path) -> Identity | None:
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
