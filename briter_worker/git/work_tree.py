"""Files of the work tree, read and replaced while the CMS may write them.

Every path is opened part by part without following a link. A file is replaced by an exchange of two names,
followed by a look at the file that was there: what the CMS has saved in that moment is put back.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import secrets
import signal
import stat
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_SHA1_LENGTH = 40
_PIECE_BYTES = 1 << 20
_NO_REPLACE, _EXCHANGE = 1, 2
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP})
_PREFIX, _SUFFIX = ".briter-", ".swp"
"""Temporary files look like an editor's, which no adapter publishes if one is left behind."""


class BlockedError(OSError):
    """A link, a folder or a special file is where a file, or a folder on the way to it, should be."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.ENOTDIR, "a link, a folder or a special file is in the way", path)


@dataclass(frozen=True, slots=True)
class Temporary:
    """A file that is complete and waits beside its target."""

    folder: str
    name: str
    inode: int


class WorkTree:
    """The files below one folder, to be closed after use. `journal` has the names of temporary files.

    Folders are opened one by one: thousands of them need neither recursion nor a long path.
    """

    def __init__(self, root: Path, journal: Path) -> None:
        self._root = os.open(root, _FOLDER & ~os.O_NOFOLLOW)
        self._journal = journal
        self._open: tuple[str, int] | None = None

    def close(self) -> None:
        """Close the folders."""
        self._close_folder()
        os.close(self._root)

    def read(self, path: str, *, id_length: int) -> tuple[os.stat_result | None, str | None]:
        """Return the status of a regular file and its blob before any conversion; None if nothing is there.

        Raises BlockedError if it is not a regular file.
        """
        folder, _, name = path.rpartition("/")
        try:
            parent = self._folder(folder)
            if not stat.S_ISREG(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                raise BlockedError(path)
            handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
        except (FileNotFoundError, NotADirectoryError):
            return None, None
        with os.fdopen(handle, "rb") as file:
            status = os.fstat(handle)
            digest = hashlib.sha1 if id_length == _SHA1_LENGTH else hashlib.sha256
            blob = digest(b"blob %d\0" % status.st_size, usedforsecurity=False)
            while piece := file.read(_PIECE_BYTES):
                blob.update(piece)
        return status, blob.hexdigest()

    def write_beside(
        self, path: str, pieces: Iterable[bytes], *, executable: bool, like: os.stat_result | None
    ) -> Temporary:
        """Write a new file beside `path`, on the same file system, durably.

        Its owner, group and mode are those of `like`, the file that it is to replace; else the folder's.
        """
        folder = path.rpartition("/")[0]
        while True:
            try:
                parent = self._folder(folder)
                break
            except (FileNotFoundError, NotADirectoryError):
                folder = folder.rpartition("/")[0]  # made later; a file may be in its place until then
        name = self._new_name(folder)
        with os.fdopen(os.open(name, _NEW_FILE, 0o600, dir_fd=parent), "wb") as file:
            file.writelines(pieces)
            file.flush()
            _take_access(file.fileno(), like or os.fstat(parent), executable=executable, is_file=bool(like))
            os.fsync(file.fileno())
            return Temporary(folder, name, os.fstat(file.fileno()).st_ino)

    def _new_name(self, folder: str) -> str:
        name = f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}"
        with self._journal.open("ab") as journal:
            journal.write(os.fsencode(f"{folder}/{name}\0"))
        return name

    def put(self, new: Temporary, path: str, expected: os.stat_result | None) -> bool:
        """Replace the file by the new one. Return False, with nothing changed, if it is not as expected."""
        folder, _, name = path.rpartition("/")
        source = os.dup(self._folder(new.folder))
        try:
            target = self._make_folder(folder)
            if expected is None:
                return _place(source, new.name, target, name)
            if not _is_same(os.stat(name, dir_fd=target, follow_symlinks=False), expected, changed=True):
                return False
            return _replace(source, new, target, name, expected)
        except FileNotFoundError:
            return False
        finally:
            os.close(source)

    def remove(self, path: str, expected: os.stat_result) -> bool:
        """Remove the file and folders that are empty then. Return False if it is not as expected."""
        folder, _, name = path.rpartition("/")
        parent = self._folder(folder)
        aside = self._new_name(folder)
        try:
            if not _is_same(os.stat(name, dir_fd=parent, follow_symlinks=False), expected, changed=True):
                return False
            os.rename(name, aside, src_dir_fd=parent, dst_dir_fd=parent)
        except FileNotFoundError:
            return False
        if not _is_unchanged(parent, aside, expected):
            if not _place(parent, aside, parent, name):  # the CMS has saved once more
                os.unlink(aside, dir_fd=parent)
            return False
        os.unlink(aside, dir_fd=parent)
        with suppress(OSError):
            while folder:
                self._close_folder()
                above, _, name = folder.rpartition("/")
                os.rmdir(name, dir_fd=self._folder(above))
                folder = above
        return True

    def clear_temporary(self) -> None:
        """Remove temporary files that are still there, of this process or a dead one."""
        try:
            names = self._journal.read_bytes().split(b"\0")
        except FileNotFoundError:
            return
        for path in map(os.fsdecode, filter(None, names)):
            folder, _, name = path.rpartition("/")
            if name.startswith(_PREFIX) and name.endswith(_SUFFIX):
                with suppress(OSError):
                    os.unlink(name, dir_fd=self._folder(folder))
        self._journal.unlink(missing_ok=True)

    def _folder(self, folder: str) -> int:
        """Return a descriptor of the folder, valid until the next call."""
        if not folder:
            return self._root
        if self._open is None or self._open[0] != folder:
            self._walk(folder, make=False)
        return self._open[1] if self._open else self._root

    def _make_folder(self, folder: str) -> int:
        if folder:
            self._walk(folder, make=True)
        return self._folder(folder)

    def _walk(self, folder: str, *, make: bool) -> None:
        self._close_folder()
        current = os.dup(self._root)
        for part in folder.split("/"):
            try:
                below = _open_folder(current, part, make=make)
            finally:
                os.close(current)
            current = below
        self._open = folder, current

    def _close_folder(self) -> None:
        if self._open is not None:
            os.close(self._open[1])
            self._open = None


def _open_folder(parent: int, name: str, *, make: bool) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=parent)
    except NotADirectoryError:
        if not stat.S_ISREG(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            raise BlockedError(name) from None
        raise
    except FileNotFoundError:
        if not make:
            raise
    with suppress(FileExistsError):
        os.mkdir(name, dir_fd=parent)
    made = os.open(name, _FOLDER, dir_fd=parent)
    above = os.fstat(parent)
    _take_owner(made, above)
    os.fchmod(made, stat.S_IMODE(above.st_mode))  # after the owner: a change of owner clears setgid
    return made


def _take_access(file: int, like: os.stat_result, *, executable: bool, is_file: bool) -> None:
    """Have the CMS read and write the file as it does the one that it replaces, or its folder."""
    _take_owner(file, like)
    mode = like.st_mode & (0o7777 if is_file else 0o666) & ~0o111
    if executable:
        mode |= (mode & 0o444) >> 2
    os.fchmod(file, mode | stat.S_IRUSR | stat.S_IWUSR)


def _take_owner(file: int, like: os.stat_result) -> None:
    with suppress(PermissionError):
        os.fchown(file, -1, like.st_gid)
    if os.geteuid() == 0:
        os.fchown(file, like.st_uid, -1)


def _place(source: int, name: str, target: int, new_name: str) -> bool:
    """Rename without replacing anything. Return False if something is there."""
    try:
        _rename(source, name, target, new_name, _NO_REPLACE)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        with suppress(FileNotFoundError):
            os.stat(new_name, dir_fd=target, follow_symlinks=False)
            return False
        os.rename(name, new_name, src_dir_fd=source, dst_dir_fd=target)
    return True


def _replace(source: int, new: Temporary, target: int, name: str, expected: os.stat_result) -> bool:
    """Exchange the two files, and put back what the CMS has changed."""
    try:
        _rename(source, new.name, target, name, _EXCHANGE)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        os.rename(new.name, name, src_dir_fd=source, dst_dir_fd=target)
        return True
    if _is_unchanged(source, new.name, expected):
        os.unlink(new.name, dir_fd=source)
        return True
    placed = new.inode
    with suppress(FileNotFoundError):  # the CMS has removed the file since
        while True:
            held = os.stat(new.name, dir_fd=source, follow_symlinks=False).st_ino
            _rename(source, new.name, target, name, _EXCHANGE)
            if os.stat(new.name, dir_fd=source, follow_symlinks=False).st_ino == placed:
                break
            placed = held  # the CMS has saved once more: that save belongs there
    os.unlink(new.name, dir_fd=source)
    return False


def _is_unchanged(folder: int, name: str, expected: os.stat_result) -> bool:
    """Return True if the file is as expected and no process has it open for writing."""
    handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        with suppress(OSError):
            # A lease is refused while the file is open for writing. No program can open the file by its name
            # any more; the signal of a broken lease would end this process, if it were not an ignored one.
            fcntl.fcntl(handle, fcntl.F_SETSIG, signal.SIGURG)
            try:
                fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            except BlockingIOError:
                return False
            fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return _is_same(os.fstat(handle), expected, changed=False)
    finally:
        os.close(handle)


def _is_same(now: os.stat_result, before: os.stat_result, *, changed: bool) -> bool:
    """Compare two states of a file; `changed`: with the time of change, which a rename sets."""
    same = (now.st_ino, now.st_size, now.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    return same and (not changed or now.st_ctime_ns == before.st_ctime_ns)


def _rename(source: int, name: str, target: int, new_name: str, flags: int) -> None:
    """Call renameat2, which no library offers."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # neither glibc nor Linux
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from None
    if call(source, os.fsencode(name), target, os.fsencode(new_name), ctypes.c_uint(flags)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), new_name)
