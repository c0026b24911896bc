"""Durable files: written whole or not at all, never overwriting another program's, never following a link.

A `Folder` works on an open descriptor, so that nobody can put another folder in its place meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self
from uuid import uuid4

from briter_worker.errors import FailureCode
from briter_worker.job import (
    MAX_REWRITTEN_BYTES,
    SUFFIX,
    Document,
    Job,
    MalformedJobError,
    UnreadableJobError,
    read_document,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

PAUSE_FILE = ".paused"
_NAME_BYTES = 255
_NO_LINKS = frozenset({errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})
_NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP})
"""Some network and FUSE file systems sync folders by themselves and refuse to be asked."""
_LOCK_TIMEOUT_S = 10.0
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_CREATE_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def is_job_name(name: str) -> bool:
    """Return True if the contract lets a file of this name be a job."""
    return name.endswith(SUFFIX) and not name.startswith(".")


def printable(name: str) -> str:
    """Return a file name as text: undecodable bytes and control characters are replaced."""
    if name.isprintable():
        return name
    text = os.fsencode(name).decode(errors="replace")
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def stem(name: str) -> str:
    """Return the job id of a file whose job declares none."""
    return printable(name.removesuffix(SUFFIX)) or "unnamed"


def variants(name: str) -> Iterator[str]:
    """Yield `name`, then names close to it, none longer than a file name may be."""
    yield name
    base = os.fsencode(name.removesuffix(SUFFIX))
    number = 2
    while True:
        tail = f"-{number}{SUFFIX}"
        cut = base[: _NAME_BYTES - len(tail)]
        if len(cut) < len(base):  # a character cut in two would make the name undecodable
            cut = cut.decode(errors="ignore").encode()
        yield os.fsdecode(cut) + tail
        number += 1


def temporary_name() -> str:
    """Return a new file name that no reader takes for a job."""
    return f".{uuid4().hex}.tmp"


@contextlib.contextmanager
def _naming(path: Path, name: str = "") -> Iterator[None]:
    """Add the path to an OSError; a call on a descriptor does not name one."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path / name)) from error


def write_new(
    path: Path,
    data: bytes,
    like: os.stat_result | None = None,
    *,
    mode: int = 0o640,
    folder: int | None = None,
) -> None:
    """Create and sync a file, with the mode, owner and times of `like`. The folder is not synced yet.

    `folder`: an open folder in which `path` is a name. On failure nothing is left behind.
    """
    descriptor = os.open(path, _CREATE_FILE, mode, dir_fd=folder)
    try:
        try:
            with _naming(path):
                view = memoryview(data)
                while view:
                    view = view[os.write(descriptor, view) :]
                if like is not None:
                    _copy_attributes(descriptor, like)
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path, dir_fd=folder)
        raise


def _copy_attributes(descriptor: int, like: os.stat_result) -> None:
    """Let the program that wrote the original still read and replace the file, as far as permitted."""
    with contextlib.suppress(OSError):  # the time of the save, which orders jobs without `createdAt`
        os.utime(descriptor, ns=(like.st_atime_ns, like.st_mtime_ns))
    with contextlib.suppress(OSError):
        os.fchown(descriptor, like.st_uid, like.st_gid)
    with contextlib.suppress(OSError):
        os.fchmod(descriptor, stat.S_IMODE(like.st_mode) & 0o777)


def sync_folder(folder: Path) -> None:
    """Make names created, moved and removed in the folder survive a power cut."""
    with Folder.open(folder) as opened:
        opened.sync()


@contextlib.contextmanager
def exclusively(lock: Path) -> Iterator[None]:
    """Let one process and thread at a time in. The kernel releases the lock when its holder dies.

    Raises OSError (EBUSY) after some seconds; nobody holds the lock longer than a few file operations.
    """
    with Folder.open(lock.parent) as folder, folder.locked(lock.name):
        yield


class Folder:
    """An open folder. Every method takes names of entries in it."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a folder that the operator configured, which may be a link."""
        return cls(path, os.open(path, _OPEN_FOLDER))

    def open_child(self, name: str) -> Folder:
        """Open a folder in this one. Raises OSError if it is a link, or anything else than a folder."""
        with _naming(self.path, name):
            try:
                descriptor = os.open(name, _OPEN_FOLDER | os.O_NOFOLLOW, dir_fd=self.descriptor)
            except OSError as error:
                if error.errno in {errno.ELOOP, errno.ENOTDIR}:
                    raise NotADirectoryError(errno.ENOTDIR, "the worker needs a folder here") from None
                raise
        return Folder(self.path / name, descriptor)

    def make_child(self, name: str) -> None:
        """Create a folder in this one, if there is nothing of this name."""
        with contextlib.suppress(FileExistsError), _naming(self.path, name):
            os.mkdir(name, dir_fd=self.descriptor)
            self.give_to_owner(name)

    def __enter__(self) -> Self:
        """Return the open folder."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the folder."""
        os.close(self.descriptor)

    def names(self) -> list[str]:
        """Return the names of all entries, sorted."""
        with _naming(self.path):
            return sorted(os.listdir(self.descriptor))  # noqa: PTH208 - a Path has no descriptor

    def stat(self, name: str) -> os.stat_result:
        """Return what `name` is, without following a link."""
        with _naming(self.path, name):
            return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)

    def has(self, name: str) -> bool:
        """Return True if there is an entry of this name, of any kind."""
        try:
            self.stat(name)
        except FileNotFoundError:
            return False
        return True

    def read(self, name: str) -> tuple[bytes | None, os.stat_result]:
        """Return the bytes of a file, at most one more than a job file may have, and its status.

        The bytes are None for anything but a regular file, which is neither followed nor waited for.
        """
        with _naming(self.path, name):
            try:
                descriptor = os.open(name, _OPEN_FILE, dir_fd=self.descriptor)
            except OSError as error:
                if error.errno in {errno.ELOOP, errno.ENXIO}:  # a link, a socket
                    return None, self.stat(name)
                raise
            try:
                found = os.fstat(descriptor)
                if not stat.S_ISREG(found.st_mode):
                    return None, found
                data = b""
                # A file that grows or shrinks from now on is read again, because its size tells.
                while chunk := os.read(descriptor, min(found.st_size, MAX_REWRITTEN_BYTES) + 1):
                    data += chunk
                    if len(data) > MAX_REWRITTEN_BYTES:
                        break
                return data, found
            finally:
                os.close(descriptor)

    def write_new(self, name: str, data: bytes, like: os.stat_result | None = None) -> None:
        """Create and sync a file, with the mode, owner and times of `like`."""
        with _naming(self.path, name):
            write_new(Path(name), data, like, folder=self.descriptor)

    def replace(self, name: str, data: bytes, like: os.stat_result | None = None) -> None:
        """Replace a file atomically, in a folder in which nobody else writes."""
        temporary = temporary_name()
        self.write_new(temporary, data, like)
        try:
            self.rename(temporary, self, name)
        except BaseException:
            self.unlink(temporary)
            raise

    def rename(self, name: str, target: Folder, new_name: str) -> None:
        """Move an entry, over any entry of the new name."""
        with _naming(self.path, name):
            os.rename(name, new_name, src_dir_fd=self.descriptor, dst_dir_fd=target.descriptor)

    def link(self, name: str, target: Folder, new_name: str) -> None:
        """Give a file a second name. Raises FileExistsError where a rename would overwrite the other file.

        Where fs.protected_hardlinks refuses to link another user's file, a copy is linked; on a file system
        without links, the copy is written in place.
        """
        try:
            self._link(name, target, new_name)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            data, like = self.read(name)
            if data is None:
                raise
            temporary = temporary_name()
            self.write_new(temporary, data, like)
            try:
                self._link(temporary, target, new_name)
            except OSError as again:
                if again.errno not in _NO_LINKS:
                    raise
                target.write_new(new_name, data, like)
            finally:
                self.unlink(temporary)

    def _link(self, name: str, target: Folder, new_name: str) -> None:
        folders = {"src_dir_fd": self.descriptor, "dst_dir_fd": target.descriptor}
        with _naming(self.path, name):
            os.link(name, new_name, **folders, follow_symlinks=False)

    def unlink(self, name: str) -> None:
        """Remove a name, if it is there."""
        with _naming(self.path, name), contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def sync(self) -> None:
        """Make names created, moved and removed in the folder survive a power cut."""
        try:
            with _naming(self.path):
                os.fsync(self.descriptor)
        except OSError as error:
            if error.errno not in _NO_FOLDER_SYNC:
                raise

    def touch(self, name: str) -> None:
        """Create an empty file if there is none, with the owner of the folder."""
        with contextlib.suppress(FileExistsError), _naming(self.path, name):
            os.close(os.open(name, _CREATE_FILE, 0o660, dir_fd=self.descriptor))
            self.give_to_owner(name)

    def give_to_owner(self, name: str) -> None:
        """Let the folder's owner, as whom the worker may run, change what root created."""
        if os.geteuid() == 0:
            owner = os.fstat(self.descriptor)
            with contextlib.suppress(OSError):
                os.chown(name, owner.st_uid, owner.st_gid, dir_fd=self.descriptor, follow_symlinks=False)

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Hold the kernel's lock on a file in this folder. Raises OSError (EBUSY) after some seconds."""
        self.touch(name)
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with _naming(self.path, name):
            descriptor = os.open(name, flags, dir_fd=self.descriptor)
        try:
            deadline = time.monotonic() + _LOCK_TIMEOUT_S
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        text = "another process has been changing the queue for too long"
                        raise OSError(errno.EBUSY, text, str(self.path / name)) from None
                    time.sleep(0.002)
            yield
        finally:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class QueueFile:
    """A file as it was when it was read: a job, or the reason why it is not one."""

    stat: os.stat_result
    job: Job | None = None
    document: Document = field(default_factory=dict)
    """All keys of the job; or those that could be read of what is not one."""
    code: FailureCode = FailureCode.UNREADABLE
    reason: str = ""
    may_become_job: bool = False
    """A producer may still be writing the file."""


def read_queue_file(folder: Folder, name: str, original: str | None = None) -> QueueFile:
    """Read a file that its producer called `original`. Never follows a link and never waits.

    Raises FileNotFoundError if the file is gone, another OSError if the disk cannot be read.
    """
    try:
        data, found = folder.read(name)
    except PermissionError:
        reason = "the worker's user may not read it: let its group or others read job files"
        return QueueFile(folder.stat(name), reason=reason, may_become_job=True)
    if data is None:
        return QueueFile(found, reason="it is not a regular file")
    modified = found.st_mtime_ns / 1e9
    try:
        document = read_document(data)
        job = Job.from_document(document, name=stem(original or name) + SUFFIX, modified=modified)
    except UnreadableJobError as error:
        return QueueFile(found, reason=str(error), may_become_job=True)
    except MalformedJobError as error:
        return QueueFile(found, None, error.document, FailureCode.MALFORMED, error.reason)
    return QueueFile(found, job, document)
