"""The CMS's work tree: its files and its index, replaced while the CMS and people may write them.

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
import shutil
import signal
import stat
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from briter_worker.errors import FailureCode, PublishError, sync_folder
from briter_worker.git.repository import Entry

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from briter_worker.git.run import Git

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_SHA1_LENGTH = 40
_PIECE_BYTES = 1 << 20
_NO_REPLACE, _EXCHANGE = 1, 2
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP})
_PREFIX, _SUFFIX = ".briter-", ".swp"
"""Temporary files look like an editor's, which no adapter publishes if one is left behind."""

_PATIENCE_S = 1.0
"""A person's `git add` ends within this time; an editor or a stale lock does not."""
_POLL_S = 0.01
_SWITCH_S = 0.2
"""`git switch` writes the index, then HEAD: a younger index may be another branch's already."""
_FEW_PATHS = 100
_Stamp = tuple[int, int, int]


class BlockedError(OSError):
    """A link, a folder or a special file is where a file, or a folder on the way to it, should be."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.ENOTDIR, "a link, a folder or a special file is in the way", path)


class WorkTree:
    """The files below one folder, to be closed after use. `journal` has the names of temporary files.

    Folders are opened one by one: thousands of them need neither recursion nor a long path.
    """

    def __init__(self, root: Path, journal: Path) -> None:
        self._root = os.open(root, _FOLDER & ~os.O_NOFOLLOW)
        self._journal = journal

    def close(self) -> None:
        """Remove temporary files, and close the folder."""
        self.clear_temporary()
        os.close(self._root)

    def read(self, path: str, *, id_length: int) -> tuple[os.stat_result | None, str | None]:
        """Return the status of a regular file and its blob before any conversion; None if nothing is there.

        Raises BlockedError if it is not a regular file.
        """
        try:
            with self._parent(path) as (parent, name):
                if not stat.S_ISREG(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                    raise BlockedError(path)
                handle = os.open(name, _FILE, dir_fd=parent)
        except (FileNotFoundError, NotADirectoryError):
            return None, None
        with os.fdopen(handle, "rb") as file:
            status = os.fstat(handle)
            digest = hashlib.sha1 if id_length == _SHA1_LENGTH else hashlib.sha256
            blob = digest(b"blob %d\0" % status.st_size, usedforsecurity=False)
            while piece := file.read(_PIECE_BYTES):
                blob.update(piece)
        return status, blob.hexdigest()

    def copy_beside(self, path: str, source: Path, *, executable: bool, like: os.stat_result | None) -> str:
        """Copy a file beside `path`, on the same file system, durably. Return the copy's path.

        Its owner, group and mode are those of `like`, the file that it is to replace; else the folder's.
        """
        temporary = self._new_name(self._nearest_folder(path))
        with (
            source.open("rb") as content,
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
        with self._journal.open("ab") as journal:
            journal.write(os.fsencode(f"{path}\0"))
        return path

    def put(self, temporary: str, path: str, expected: os.stat_result | None) -> bool:
        """Replace the file. Return False, with nothing changed, if it is not as expected."""
        try:
            with (
                self._parent(temporary) as (source, name),
                self._parent(path, make=True) as (target, new_name),
            ):
                if expected is None:
                    return _place(source, name, target, new_name)
                return _is_same(_status(target, new_name), expected, changed=True) and _replace(
                    source, name, target, new_name, expected
                )
        except FileNotFoundError:
            return False

    def remove(self, path: str, expected: os.stat_result) -> bool:
        """Remove the file and folders that are empty then. Return False if it is not as expected."""
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
        with suppress(FileNotFoundError):
            for path in map(os.fsdecode, self._journal.read_bytes().split(b"\0")):
                if path.rpartition("/")[2].startswith(_PREFIX) and path.endswith(_SUFFIX):
                    with suppress(OSError), self._parent(path) as (parent, name):
                        os.unlink(name, dir_fd=parent)
            self._journal.unlink()

    @contextmanager
    def _parent(self, path: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """Open the path's folder part by part; yield its descriptor, and the path's last part."""
        *parts, name = path.split("/")
        folder = os.dup(self._root)
        try:
            for part in parts:
                below = _open_folder(folder, part, make=make)
                os.close(folder)
                folder = below
            yield folder, name
        finally:
            os.close(folder)


def _open_folder(parent: int, name: str, *, make: bool) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=parent)
    except NotADirectoryError:
        if not stat.S_ISREG(_status(parent, name).st_mode):
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
            _status(target, new_name)
            return False
        os.rename(name, new_name, src_dir_fd=source, dst_dir_fd=target)
    return True


def _replace(source: int, name: str, target: int, new_name: str, expected: os.stat_result) -> bool:
    """Exchange the two files, and put back what the CMS has changed."""
    placed = _status(source, name).st_ino
    try:
        _rename(source, name, target, new_name, _EXCHANGE)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
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
    os.unlink(name, dir_fd=source)
    return is_unchanged


def _is_unchanged(folder: int, name: str, expected: os.stat_result) -> bool:
    """Return True if the file is as expected and no process has it open for writing."""
    handle = os.open(name, _FILE, dir_fd=folder)
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
    return _stamp(now) == _stamp(before) and (not changed or now.st_ctime_ns == before.st_ctime_ns)


def _stamp(status: os.stat_result) -> _Stamp:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _rename(source: int, name: str, target: int, new_name: str, flags: int) -> None:
    """Call renameat2, which no library offers."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # neither glibc nor Linux
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from None
    if call(source, os.fsencode(name), target, os.fsencode(new_name), ctypes.c_uint(flags)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), new_name)


class Index:
    """The index, changed in a copy that replaces it under git's own lock: git sees all of it or nothing.

    The lock is a hard link of the copy: it is complete when it appears, and known as the worker's after a
    crash.
    """

    def __init__(self, git: Git, branch_ref: str) -> None:
        self._git = git
        self._refs = git.git_dir / "HEAD", git.common_dir / branch_ref
        self._file = git.git_dir / "index"
        self._lock = git.git_dir / "index.lock"
        # Linked work trees share the worker's folder.
        self._copy = git.state_dir / f"{git.git_dir.name.strip('.')}-index"
        self._contents = self._copy.with_name(f"{self._copy.name}-files")
        self._copied: _Stamp | None = None
        self.is_changed = False
        self._is_held = False
        self._waited_for: _Stamp | None = None

    def clear_leftovers(self) -> None:
        """Remove the copy and all that belongs to it, also of a dead worker."""
        self._copied = None
        with suppress(FileNotFoundError):
            if self._lock.samefile(self._copy):
                self._lock.unlink()
        self._copy.with_name(f"{self._copy.name}.lock").unlink(missing_ok=True)
        self._copy.unlink(missing_ok=True)
        shutil.rmtree(self._contents, ignore_errors=True)

    def entries(self, paths: Collection[str]) -> tuple[dict[str, Entry], set[str]]:
        """Return the entries of these paths, and which of them git ignores in the work tree.

        They are those of the copy, or of the index while there is no copy. Unmerged ones have no mode.
        """
        few = [f":(top,literal){path}" for path in paths] if len(paths) <= _FEW_PATHS else []
        env = {"GIT_INDEX_FILE": str(self._copy)} if self._copied else {}
        what = "the index could not be read"
        out = self._git.run("ls-files", "-z", "-s", "-v", "--", *few, env=env, what=what)
        wanted, found, skipped = set(paths), {}, set()
        for line in os.fsdecode(out).split("\0")[:-1]:
            about, _, path = line.partition("\t")
            tag, mode, blob, stage = about.split(" ")
            if path in wanted:
                found[path] = Entry("" if int(stage) else mode, blob)
                skipped |= {path} if tag in "Ss" else set()
        return found, skipped

    def is_locked(self) -> bool:
        """Return True if a git command holds the index."""
        return self._lock.exists()

    def stamp(self) -> _Stamp | None:
        """Return what changes whenever git writes the index."""
        return _stamp(self._file.stat()) if self._file.exists() else None

    @contextmanager
    def copied(self) -> Iterator[None]:
        """Work on a copy of the index as it is now."""
        self.clear_leftovers()
        try:
            self._wait_for_switch(self._file.stat())
            self._copied, self.is_changed = self.stamp(), False
            try:  # the same file is on the disk already; git never writes into it, but replaces its name
                os.link(self._file, self._copy)
            except FileNotFoundError:
                raise
            except OSError:  # no hard links on this file system; the age tells what git may trust
                shutil.copy2(self._file, self._copy)
        except FileNotFoundError as error:
            raise PublishError(FailureCode.CORRUPT, "the repository has no index", "git reset") from error
        try:
            yield
        finally:
            self.clear_leftovers()

    def _wait_for_switch(self, status: os.stat_result) -> None:
        age = time.time() - status.st_mtime
        written = [path.stat().st_mtime_ns for path in self._refs if path.exists()]
        if 0 <= age < _SWITCH_S and max(written, default=0) < status.st_mtime_ns:
            time.sleep(_SWITCH_S - age)

    def change(self, entries: Mapping[str, Entry | None], *, null: str) -> None:
        """Set these entries in the copy; None, written with the `null` object id, removes one."""
        lines = [
            f"{entry.mode} {entry.blob}\t{path}\0" if entry else f"0 {null}\t{path}\0"
            for path, entry in sorted(entries.items(), key=lambda item: item[1] is not None)
        ]
        self._update("--add", "--replace", "--index-info", lines=lines)

    def skip(self, paths: Collection[str]) -> None:
        """Have git ignore the work tree's files of these paths.

        Without this mark on a file that lacks the branch's version, `git commit -a` would take that back.
        """
        self._update("--skip-worktree", "--stdin", lines=[f"{path}\0" for path in paths])

    def _update(self, *options: str, lines: Collection[str]) -> None:
        if lines:
            self._git.run(
                *("update-index", "-z", *options),
                stdin=os.fsencode("".join(lines)),
                env={"GIT_INDEX_FILE": str(self._copy)},
                what="the index could not be written",
            )
            self.is_changed = True

    def check_out(self, paths: Collection[str]) -> Iterator[tuple[str, Path]]:
        """Yield each path, and a file with its content as git writes it into a work tree."""
        if not paths:
            return
        self._contents.mkdir(mode=0o700)
        out = self._git.run(
            *(f"--work-tree={self._contents}", "checkout-index", "--temp", "-z", "--stdin"),
            stdin=os.fsencode("".join(f"{path}\0" for path in paths)),
            env={"GIT_INDEX_FILE": str(self._copy)},
            what="the remote's files could not be read",
        )
        for line in os.fsdecode(out).split("\0")[:-1]:
            name, _, path = line.partition("\t")
            yield path, self._contents / name
            (self._contents / name).unlink()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the index. Raises PublishError if another git command holds it, or has changed it since."""
        self._take_lock()
        try:
            if self.stamp() != self._copied:
                raise PublishError(
                    FailureCode.LOCKED, "another git command has changed the index", "let that command end"
                )
            yield
        finally:
            if self._is_held:
                self._lock.unlink()
                self._is_held = False

    def _take_lock(self) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                self._make_lock()
            except FileExistsError:
                with suppress(FileNotFoundError):
                    held = _stamp(self._lock.stat())
                    if time.monotonic() > deadline or held == self._waited_for:
                        self._waited_for = held
                        raise PublishError(
                            FailureCode.LOCKED,
                            f"another git command holds the index ({self._lock})",
                            "let that command end; if none runs, remove the file",
                        ) from None
                time.sleep(_POLL_S)
            else:
                self._is_held = True
                return

    def _make_lock(self) -> None:
        try:
            os.link(self._copy, self._lock)
        except FileExistsError:
            raise
        except OSError:  # no hard links on this file system
            self._lock.open("xb").close()

    def place(self) -> None:
        """Put the copy in the place of the index, durably. Call it while the index is held."""
        if self.is_changed:
            self._copy.replace(self._lock)  # nothing happens if both are the same file still
            self._lock.replace(self._file)
            self._is_held = False
            sync_folder(self._file.parent)
