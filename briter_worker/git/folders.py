"""The work tree's folders and files, opened part by part without ever following a link."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_OPEN_AT_ONCE = 64
_NO_NAMES = frozenset({"", ".", ".."})
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Refused(Exception):  # noqa: N818 - a decision, not an error
    """What is there may not be published. `reason` says why, and what to do."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)

    @classmethod
    def of(cls, mode: int) -> Refused:
        """The refusal of what is neither a file nor a folder."""
        if stat.S_ISLNK(mode):
            return cls("it is, or is below, a symbolic link; put the file itself there")
        return cls("it is no regular file; put a regular file there")


class Folders:
    """Folders of one work tree, kept open while a batch is staged. Close it after."""

    def __init__(self, root: Path) -> None:
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._open: dict[str, int] = {}

    def close(self) -> None:
        """Close every folder."""
        self._forget()
        os.close(self._root)

    def open(self, folder: str) -> int:
        """The descriptor of a folder, valid until the next call.

        Raises Refused for a link, a special file, a nested repository or a way out of the work tree;
        FileNotFoundError or NotADirectoryError where there is no such folder.
        """
        if not folder:
            return self._root
        known = self._open.get(folder)
        if known is not None:
            return known
        parent, _, name = folder.rpartition("/")
        if name in _NO_NAMES:
            raise Refused("it has an empty part, or a part . or .., in it; write it in full")
        above = self.open(parent)
        try:
            fd = os.open(name, _FOLDER, dir_fd=above)
        except OSError:
            mode = kind_of(above, name)
            if mode is not None and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise Refused.of(mode) from None
            raise
        if _is_repository(fd):
            os.close(fd)
            raise Refused("it is inside a nested repository; publish it from there")
        for rules in (".gitignore", ".gitattributes"):
            mode = kind_of(fd, rules)
            if mode is not None and stat.S_ISFIFO(mode):
                os.close(fd)
                raise Refused(f"{folder}/{rules} is a pipe, on which git would wait for ever; remove that")
        if len(self._open) >= _OPEN_AT_ONCE:
            self._forget()
        self._open[folder] = fd
        return fd

    def make(self, folder: str) -> int:
        """As `open`, and what is missing on the way is made."""
        try:
            return self.open(folder)
        except FileNotFoundError:
            parent, _, name = folder.rpartition("/")
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=self.make(parent))
            return self.open(folder)

    def remove(self, folder: str) -> None:
        """Remove an empty folder. Raises OSError for one that is not empty."""
        parent, _, name = folder.rpartition("/")
        os.rmdir(name, dir_fd=self.open(parent))
        known = self._open.pop(folder, None)
        if known is not None:
            os.close(known)  # of what is gone: another folder may get the name

    def listing(self, folder: str) -> list[tuple[str, int]]:
        """Names and kinds (`st_mode`) of what a folder holds."""
        with os.scandir(self.open(folder)) as entries:
            return [(entry.name, _kind(entry)) for entry in entries]

    @contextmanager
    def file(self, folder: str, name: str) -> Iterator[int]:
        """A descriptor of a regular file, for reading."""
        above = self.open(folder)
        try:
            fd = os.open(name, _FILE, dir_fd=above)
        except OSError:
            mode = kind_of(above, name)
            if mode is not None and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise Refused.of(mode) from None
            raise
        try:
            mode = os.fstat(fd).st_mode
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(errno.EISDIR, "a folder took its place meanwhile", name)
            if not stat.S_ISREG(mode):
                raise Refused.of(mode)
            yield fd
        finally:
            os.close(fd)

    def _forget(self) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()


def _is_repository(folder: int) -> bool:
    """Whether it is the top of a work tree, or a bare repository."""
    return kind_of(folder, ".git") is not None or all(
        kind_of(folder, name) is not None for name in ("HEAD", "objects", "refs")
    )


def kind_of(folder: int, name: str) -> int | None:
    """The `st_mode` of what is there, a link itself; None where nothing is."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return None


def _kind(entry: os.DirEntry[str]) -> int:
    if entry.is_symlink():
        return stat.S_IFLNK
    if entry.is_dir(follow_symlinks=False):
        return stat.S_IFDIR
    return stat.S_IFREG if entry.is_file(follow_symlinks=False) else stat.S_IFIFO


def read_all(fd: int, size: int) -> bytes:
    """The whole file; a file that grows is read to one byte past `size`, which shows."""
    parts: list[bytes] = []
    left = size + 1
    while left > 0 and (part := os.read(fd, min(left, 1 << 22))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
