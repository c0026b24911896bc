"""Say where to look: by the kernel's events, or everywhere at intervals where there are none."""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

from inotify_simple import INotify, flags  # type: ignore[import-untyped]

from briter_worker.allowlist import is_inside, parents
from briter_worker.errors import os_error_fix, os_error_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

_MASK = (
    flags.CLOSE_WRITE | flags.MODIFY | flags.ATTRIB | flags.CREATE | flags.DELETE
    | flags.MOVED_FROM | flags.MOVED_TO | flags.ONLYDIR
)  # fmt: skip
_LOST = flags.Q_OVERFLOW | flags.UNMOUNT
_REMOTE_TYPES = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs", "ceph", "afs", "lustre", "ocfs2", "gfs2"}
    | {"vboxsf", "vmhgfs", "prl_fs", "fakeowner", "grpcfuse"}
)
"""File systems on which other machines write, whose changes the kernel does not report."""
_LEAF_LINKS = 2
"""Its name above, and its own `.`; file systems that do not count links say 1."""
_BACKSTOP_S = 600.0
"""So often everything is looked at where the kernel reports changes: it does not report all of them.

Of a write through another hard link, and of a mount over a folder, there is no event.
"""
_MOUNTS = "/proc/self/mountinfo"


class Writer(Enum):
    """State of the program that wrote a file last, as events tell it."""

    CLOSED = auto()
    """The program has closed the file."""
    MOVED = auto()
    """The file was renamed, most often after it was closed."""
    WRITING = auto()
    """The program has written, and not closed the file since."""
    UNKNOWN = auto()


@dataclass(slots=True)
class Look:
    """Places in which something may have changed."""

    paths: dict[str, Writer] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)
    """Folders that came, went or opened up: everything below may have changed."""
    is_everything: bool = False


class Source(Protocol):
    """Says where to look. For one thread."""

    def wait(self, seconds: float) -> Look:
        """Return what may have changed, within so many seconds."""

    def close(self) -> None:
        """End."""


class Poll:
    """Says to look at everything every `interval` seconds: for folders without the kernel's events."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._next = time.monotonic() + interval

    def wait(self, seconds: float) -> Look:
        """Wait, and say to look at everything when that is due."""
        time.sleep(max(0.0, min(seconds, self._next - time.monotonic())))
        if time.monotonic() < self._next:
            return Look()
        self._next = time.monotonic() + self._interval
        return Look(is_everything=True)

    def close(self) -> None:
        """Do nothing."""


class KernelEvents:
    """The kernel's events of some folders and all folders below them."""

    def __init__(self, root: Path, folders: Sequence[str], interval: float = _BACKSTOP_S) -> None:
        """Watch from now on. Raises OSError where the kernel offers no events, or no more of them.

        Every `interval` seconds, everything is looked at besides.
        """
        self._root = root
        self._folders = folders
        self._watched: dict[int, str] = {}
        self._open: set[str] = set()
        """Files that were written, and not closed since."""
        self._moved_open: set[int] = set()
        """The cookies of their renames."""
        self._poll = Poll(interval)
        self._inotify = INotify()
        try:
            for folder in folders:
                for above in ("", *parents(folder)):  # a folder may be made, or replaced, later
                    self._add(above)
                self._watch(folder)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop watching."""
        self._inotify.close()

    def wait(self, seconds: float) -> Look:
        """Return what changed, as soon as anything does."""
        look = Look()
        for event in self._inotify.read(timeout=round(seconds * 1000)):
            self._note(event.wd, event.mask, event.cookie, event.name, look)
        if self._poll.wait(0).is_everything:
            look.is_everything = True
            self._watch_all()  # a mount may have taken the place of a folder
        return look

    def _note(self, number: int, mask: int, cookie: int, name: str, look: Look) -> None:
        if mask & _LOST:
            look.is_everything = True
            self._open.clear()
            # Folders may have been made of which no event tells.
            look.folders.update(self._folders)
            self._watch_all()
            return
        place = self._watched.get(number)
        if place is None:
            return
        if mask & flags.IGNORED:
            del self._watched[number]
            return
        path = f"{place}/{name}".strip("/")
        if mask & flags.ISDIR:
            self._note_folder(path, mask, look)
        elif self._is_below(path):
            look.paths[path] = self._writer(path, mask, cookie, look.paths.get(path, Writer.UNKNOWN))

    def _writer(self, path: str, mask: int, cookie: int, before: Writer) -> Writer:
        """Return what is known of the writer after an event. Some rename a file, then write the rest."""
        if mask & flags.MODIFY or (mask & flags.MOVED_TO and cookie in self._moved_open):
            self._moved_open.discard(cookie)
            self._open.add(path)
            return Writer.WRITING
        if mask & flags.MOVED_FROM and path in self._open:
            self._moved_open = {cookie}  # both events of a rename follow one another
        if mask & (flags.CLOSE_WRITE | flags.MOVED_FROM | flags.MOVED_TO | flags.DELETE):
            self._open.discard(path)
        if mask & flags.CLOSE_WRITE:
            return Writer.CLOSED
        return Writer.MOVED if mask & flags.MOVED_TO else before

    def _note_folder(self, path: str, mask: int, look: Look) -> None:
        if not self._is_below(path) and not any(is_inside(path, each) for each in self._folders):
            return
        if mask & (flags.MOVED_FROM | flags.DELETE):
            self._forget(path)
        else:
            self._watch_from(path)
        look.folders.add(path)

    def _is_below(self, path: str) -> bool:
        return any(is_inside(folder, path) for folder in self._folders)

    def _forget(self, path: str) -> None:
        """Stop watching a folder that was moved away: its events would name the old place."""
        for number in [number for number, folder in self._watched.items() if is_inside(path, folder)]:
            with suppress(OSError):  # it is gone
                self._inotify.rm_watch(number)
            self._watched.pop(number, None)

    def _watch_from(self, path: str) -> None:
        """Watch a folder that came, as far as posts are below it."""
        if self._is_below(path):
            self._watch(path)
            return
        for folder in self._folders:
            if is_inside(path, folder):
                for above in parents(folder):
                    self._add(above)
                self._watch(folder)

    def _watch_all(self) -> None:
        for folder in self._folders:
            self._watch(folder)

    def _watch(self, top: str) -> None:
        """Watch a folder and all below it."""
        todo = [top]
        while todo:
            folder = todo.pop()
            self._add(folder)
            with suppress(OSError):
                todo += self._folders_in(folder)

    def _folders_in(self, folder: str) -> list[str]:
        """Return the folders in a folder. Where links are counted, a folder with two of them has none."""
        place = f"{self._root}/{folder}"
        if os.lstat(place).st_nlink == _LEAF_LINKS:
            return []
        with os.scandir(place) as entries:
            return [f"{folder}/{entry.name}" for entry in entries if entry.is_dir(follow_symlinks=False)]

    def _add(self, folder: str) -> None:
        mask = _MASK | (flags.DONT_FOLLOW if folder else 0)
        try:
            self._watched[self._inotify.add_watch(self._root / folder, mask)] = folder
        except OSError as error:
            # Gone meanwhile, a link, or not to be read: the comparison says so where it matters.
            if error.errno in {errno.ENOSPC, errno.ENOMEM}:
                raise


def open_source(
    root: Path, folders: Sequence[str], interval: float, warn: Callable[[str, str], None]
) -> Source:
    """Return the kernel's events, or a poll where there are none. `warn` is told why, with the fix."""
    try:
        return KernelEvents(root, folders, interval if has_remote_folders(root, folders) else _BACKSTOP_S)
    except OSError as error:
        warn(
            f"watch polls every {interval:g} s, as the kernel reports no changes: {_reason(error)}",
            _fix(error),
        )
        return Poll(interval)


def _reason(error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return "there are more folders than fs.inotify.max_user_watches"
    if error.errno == errno.EMFILE:
        return "there are more watchers than fs.inotify.max_user_instances, or too many open files"
    return os_error_text(error, with_path=False)


def _fix(error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return "raise fs.inotify.max_user_watches with sysctl, and start watch again"
    if error.errno == errno.EMFILE:
        return "raise fs.inotify.max_user_instances with sysctl, or ulimit -n, and start watch again"
    return os_error_fix(error)


def has_remote_folders(root: Path, folders: Iterable[str], mounts: str = _MOUNTS) -> bool:
    """Return True if one of the folders, or a mount below it, is on a file system of other machines."""
    tops = [os.path.realpath(root / folder) for folder in folders]
    with suppress(OSError), open(mounts, encoding="utf-8", errors="surrogateescape") as file:  # noqa: PTH123 - a file of the kernel
        listed = list(_read_mounts(file))
        for top in tops:
            above = [mount for mount in listed if is_inside(mount[0].rstrip("/"), top)]
            nearest = max(above, key=lambda mount: len(mount[0]), default=("/", ""))
            below = [mount for mount in listed if mount[0] != top and is_inside(top, mount[0])]
            if any(_is_remote(kind) for _, kind in (nearest, *below)):
                return True
    return False


def _read_mounts(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield mount point and type of each line of the kernel's list; of one place, the last is on top."""
    for line in lines:
        about, _, source = line.partition(" - ")
        place = about.split(" ")[4].encode("utf-8", "surrogateescape")
        name = place.decode("unicode_escape").encode("latin-1").decode("utf-8", "surrogateescape")
        yield name, source.split(" ")[0]


def _is_remote(kind: str) -> bool:
    return kind in _REMOTE_TYPES or kind.startswith("fuse")
