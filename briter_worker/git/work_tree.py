"""The CMS's work tree: its files, replaced while the CMS and people may write them.

Every path is opened part by part without following a link. A file is replaced by an exchange of two names,
followed by a look at the file that was there: what the CMS has saved in that moment is put back.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import secrets
import shutil
import signal
import stat
from contextlib import contextmanager, suppress
from functools import partial
from typing import IO, TYPE_CHECKING, Any

from briter_worker.git.folders import OPEN_FILE, OPEN_FOLDER, descend
from briter_worker.ports import blob_hash

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_PIECE_BYTES = 1 << 20
_NO_REPLACE, _EXCHANGE = 1, 2
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP})
_PREFIX, _SUFFIX = ".briter-", ".swp"
"""Temporary files look like an editor's, which no adapter publishes if one is left behind."""


class BlockedError(OSError):
    """A link, a folder or a special file is where a file, or a folder on the way to it, should be."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.ENOTDIR, "a link, a folder or a special file is in the way", path)


class WorkTree:
    """The files below one folder, to be closed after use.

    `journal` has the names of temporary files, and which ones were to replace what. Folders are opened one by
    one: thousands of them need neither recursion nor a long path.
    """

    def __init__(self, root: Path, journal: Path) -> None:
        self._root = os.open(root, OPEN_FOLDER & ~os.O_NOFOLLOW)
        self._journal = journal

    def close(self) -> None:
        """Close the folder. Remove temporary files, unless `placed` needs the journal."""
        if not self.placed():
            self.clear_temporary()
        os.close(self._root)

    def read(self, path: str, id_length: int = 40) -> tuple[os.stat_result | None, str | None]:
        """Return the status of a regular file and its blob before any conversion; None if nothing is there.

        Raises BlockedError if it is not a regular file.
        """
        try:
            with self._parent(path) as (parent, name):
                if not stat.S_ISREG(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                    raise BlockedError(path)
                handle = os.open(name, OPEN_FILE, dir_fd=parent)
        except (FileNotFoundError, NotADirectoryError):
            return None, None
        with os.fdopen(handle, "rb") as file:
            status = os.fstat(handle)
            blob = blob_hash(status.st_size, id_length)
            while piece := file.read(_PIECE_BYTES):
                blob.update(piece)
        return status, blob.hexdigest()

    def copy_beside(
        self, path: str, content: IO[bytes], *, executable: bool, like: os.stat_result | None
    ) -> str:
        """Write a file beside `path`, on the same file system, durably. Return its path.

        Its owner, group and mode are those of `like`, the file that it is to replace; else the folder's.
        """
        temporary = self._new_name(self._nearest_folder(path))
        with (
            self._parent(temporary) as (parent, name),
            os.fdopen(os.open(name, _NEW_FILE, 0o600, dir_fd=parent), "wb") as file,
        ):
            shutil.copyfileobj(content, file, _PIECE_BYTES)
            file.flush()
            _take_access(file.fileno(), like or os.fstat(parent), executable=executable, is_file=bool(like))
            os.fsync(file.fileno())
        return temporary

    def _nearest_folder(self, path: str) -> str:
        """Return the lowest folder above the path that is there; others are made later.

        Until then a file may be in the place of one of them.
        """
        while folder := path.rpartition("/")[0]:
            with suppress(FileNotFoundError, NotADirectoryError), self._parent(path):
                break
            path = folder
        return folder

    def _new_name(self, folder: str) -> str:
        path = f"{folder}/{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}".lstrip("/")
        self._note(path)
        return path

    def _note(self, *record: str | int) -> None:
        with self._journal.open("a") as journal:
            journal.write(f"{json.dumps(record)}\n")

    def _records(self) -> list[list[Any]]:
        lines = self._journal.read_text().splitlines() if self._journal.exists() else []
        return [json.loads(line) for line in lines if line.endswith("]")]  # the last may be cut off

    def placed(self) -> dict[str, list[str]]:
        """Return, by commit, the files that were replaced or removed with its version.

        The temporary file of one that was not is still there.
        """
        found: dict[str, list[str]] = {}
        for temporary, *about in self._records():
            for path, inode, commit in [about] if about else []:
                now = None
                with suppress(OSError), self._parent(temporary) as (parent, name):
                    now = _status(parent, name).st_ino
                if now != inode:
                    found.setdefault(commit, []).append(path)
        return found

    def put(
        self, temporary: str | None, path: str, expected: os.stat_result | None, commit: str = ""
    ) -> bool:
        """Replace the file, or remove it (None). Return False, with nothing changed, if it differs.

        `commit` has this version: `placed` tells so until the temporary files are cleared.
        """
        if temporary is None:
            return expected is None or self._remove(path, expected, commit)
        try:
            with (
                self._parent(temporary) as (source, name),
                self._parent(path, make=True) as (target, new_name),
            ):
                if commit:
                    self._note(temporary, path, _status(source, name).st_ino, commit)
                if expected is None:
                    return _place(source, name, target, new_name)
                return _is_same(_status(target, new_name), expected, changed=True) and _replace(
                    source, name, target, new_name, expected
                )
        except FileNotFoundError:
            return False

    def _remove(self, path: str, expected: os.stat_result, commit: str) -> bool:
        """Remove the file and folders that are empty then."""
        folder = path.rpartition("/")[0]
        aside = self._new_name(folder).rpartition("/")[2]
        with self._parent(path) as (parent, name):
            try:
                if not _is_same(_status(parent, name), expected, changed=True):
                    return False
                os.rename(name, aside, src_dir_fd=parent, dst_dir_fd=parent)
            except FileNotFoundError:
                return False
            is_unchanged = _is_unchanged(parent, aside, expected)
            if is_unchanged and commit:
                self._note(aside, path, 0, commit)
            if is_unchanged or not _place(parent, aside, parent, name):  # the CMS has saved once more
                os.unlink(aside, dir_fd=parent)
        with suppress(OSError):
            while is_unchanged and folder:
                with self._parent(folder) as (parent, name):
                    os.rmdir(name, dir_fd=parent)
                folder = folder.rpartition("/")[0]
        return is_unchanged

    def clear_temporary(self) -> None:
        """Remove temporary files that are still there, of this process or a dead one."""
        for path, *_ in self._records():
            if path.rpartition("/")[2].startswith(_PREFIX) and path.endswith(_SUFFIX):
                with suppress(OSError), self._parent(path) as (parent, name):
                    os.unlink(name, dir_fd=parent)
        self._journal.unlink(missing_ok=True)

    @contextmanager
    def _parent(self, path: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """Open the path's folder part by part; yield its descriptor, and the path's last part."""
        above, _, name = path.rpartition("/")
        folder = descend(self._root, above, partial(_open_folder, make=make))
        try:
            yield folder, name
        finally:
            os.close(folder)


def _open_folder(parent: int, name: str, *, make: bool) -> int:
    try:
        return os.open(name, OPEN_FOLDER, dir_fd=parent)
    except NotADirectoryError:
        if not stat.S_ISREG(_status(parent, name).st_mode):
            raise BlockedError(name) from None
        raise
    except FileNotFoundError:
        if not make:
            raise
    with suppress(FileExistsError):
        os.mkdir(name, dir_fd=parent)
    made = os.open(name, OPEN_FOLDER, dir_fd=parent)
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
    with suppress(FileExistsError):
        if not _rename(source, name, target, new_name, _NO_REPLACE):
            with suppress(FileNotFoundError):
                _status(target, new_name)
                return False
            os.rename(name, new_name, src_dir_fd=source, dst_dir_fd=target)
        return True
    return False


def _replace(source: int, name: str, target: int, new_name: str, expected: os.stat_result) -> bool:
    """Exchange the two files, and put back what the CMS has changed."""
    placed = _status(source, name).st_ino
    if not _rename(source, name, target, new_name, _EXCHANGE):
        os.rename(name, new_name, src_dir_fd=source, dst_dir_fd=target)
        return True
    is_unchanged = _is_unchanged(source, name, expected)
    with suppress(FileNotFoundError):  # the CMS has removed the file since
        while not is_unchanged:
            held = _status(source, name).st_ino
            _rename(source, name, target, new_name, _EXCHANGE)
            if _status(source, name).st_ino == placed:
                break
            placed = held  # the CMS has saved once more: that save belongs there
    if is_unchanged:
        os.unlink(name, dir_fd=source)
    return is_unchanged


def _is_unchanged(folder: int, name: str, expected: os.stat_result) -> bool:
    """Return True if the file is as expected and no process has it open for writing."""
    handle = os.open(name, OPEN_FILE, dir_fd=folder)
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


def _status(folder: int, name: str) -> os.stat_result:
    return os.stat(name, dir_fd=folder, follow_symlinks=False)


def _is_same(now: os.stat_result, before: os.stat_result, *, changed: bool) -> bool:
    """Compare two states of a file; `changed`: with the time of change, which a rename sets."""
    return stamp(now) == stamp(before) and (not changed or now.st_ctime_ns == before.st_ctime_ns)


def stamp(status: os.stat_result) -> tuple[int, int, int]:
    """Return what changes whenever a file is written or replaced."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def _rename(source: int, name: str, target: int, new_name: str, flags: int) -> bool:
    """Call renameat2, which no library offers. Return False where there is no such call."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # of glibc, on Linux
    if call and not call(source, os.fsencode(name), target, os.fsencode(new_name), ctypes.c_uint(flags)):
        return True
    number = ctypes.get_errno() if call else errno.ENOSYS
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), new_name)
