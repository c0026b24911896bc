"""Waits for changes of the queue folder, and tells the index which files changed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from inotify_simple import INotify, flags  # type: ignore[import-untyped]

from briter_worker.queues.disk.files import is_job_name

if TYPE_CHECKING:
    from collections.abc import Collection

PAUSE_FILE = ".paused"
_EVENTS = (
    *(flags.MODIFY, flags.ATTRIB, flags.CLOSE_WRITE, flags.MOVED_FROM, flags.MOVED_TO),
    *(flags.CREATE, flags.DELETE, flags.DELETE_SELF, flags.MOVE_SELF, flags.ONLYDIR),
)
_QUIET_MS = 3
"""After a change, wait this long for more, so that files saved together are published together."""
_LONGEST_QUIET_S = 0.05
_STOP_CHECK_S = 0.1
_RETRY_S = 60.0
_MOUNTS = Path("/proc/self/mountinfo")
_LOCAL_FILE_SYSTEMS = frozenset(
    {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "ramfs", "tmpfs", "xfs", "zfs"}
)
"""No other machine writes to these file systems, so the kernel reports every change."""


class Stop(Protocol):
    """What ends a wait early."""

    def is_set(self) -> bool:
        """Return True if the worker is to stop."""
        ...

    def wait(self, seconds: float) -> object:
        """Sleep until the worker is to stop."""
        ...


class FolderWatcher:
    """Sleeps until the folder changes. Where there is no inotify, the poll has to do. For one thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._inotify: INotify | None = None
        self._watched = (0, 0)
        self._reports_all = False
        self._changed: set[str] | None = None
        """The files that changed since `changes` was called; None: any of them."""
        self._is_awake = False
        self._next_try = 0.0

    def wait(self, seconds: float, stop: Stop) -> None:
        """Return after `seconds`, or when the folder changed, or when `stop` is set."""
        if self._inotify is not None and _identity(self._folder) != self._watched:
            self.close()  # another folder has the name now
        if self._inotify is None:
            if not self._open():
                stop.wait(seconds)
            return  # what was saved before the watch existed is read first
        deadline = time.monotonic() + seconds
        while not self._is_awake and not stop.is_set():
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self._gather(self._inotify, min(left, _STOP_CHECK_S))
        self._is_awake = False

    def close(self) -> None:
        """Watch no more, until the next wait."""
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None

    def __del__(self) -> None:
        """Close the watch of a queue that is no longer used."""
        self.close()

    def changes(self, folder: os.stat_result) -> Collection[str] | None:
        """Return the files of the open folder that changed since the last call; None if that is unknown."""
        if self._inotify is None or (folder.st_dev, folder.st_ino) != self._watched:
            return None
        self._read(self._inotify, 0)
        changed, self._changed = self._changed, set() if self._reports_all else None
        return changed

    def _open(self) -> bool:
        if time.monotonic() < self._next_try:
            return False
        watched = _identity(self._folder)  # before: if the folder is replaced now, the next wait notices
        inotify = None
        try:
            inotify = INotify()
            inotify.add_watch(self._folder, sum(_EVENTS))
        except (OSError, AttributeError):  # another system, no watch left, or no folder yet
            if inotify is not None:
                inotify.close()
            self._next_try = time.monotonic() + _RETRY_S
            return False
        self._inotify, self._watched, self._changed = inotify, watched, None
        self._reports_all = _is_local(watched[0])
        return True

    def _gather(self, inotify: INotify, seconds: float) -> None:
        """Wait for a change, then for the end of a series of changes."""
        if not self._read(inotify, round(seconds * 1000)):
            return
        latest = time.monotonic() + _LONGEST_QUIET_S
        while time.monotonic() < latest and self._read(inotify, _QUIET_MS):
            pass

    def _read(self, inotify: INotify, milliseconds: int) -> bool:
        """Note what changed; return True if anything did."""
        events = list(inotify.read(timeout=milliseconds))
        if any(not event.name for event in events):  # too many events, or the folder itself changed
            self._changed = None
            self._is_awake = True
        # A half-written file, under a name that is no job's, wakes nobody.
        jobs = {event.name for event in events if is_job_name(event.name)}
        self._is_awake = self._is_awake or bool(jobs) or any(each.name == PAUSE_FILE for each in events)
        if self._changed is not None:
            self._changed |= jobs
        return bool(events)


def _identity(folder: Path) -> tuple[int, int]:
    try:
        found = folder.stat()
    except OSError:
        return (0, 0)
    return (found.st_dev, found.st_ino)


def _is_local(device: int) -> bool:
    """Return True if the device is known to be written to by this machine only."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    mounts = (line.split(" - ", 1) for line in lines if line.split()[2] == number)
    kinds = {rest[0].split()[0] for _, *rest in mounts if rest}
    return bool(kinds) and kinds <= _LOCAL_FILE_SYSTEMS
