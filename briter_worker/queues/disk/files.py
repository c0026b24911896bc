"""Durable files: written whole or not at all, never overwriting another program's, never following a link."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self
from uuid import uuid4

from briter_worker.errors import FailureCode, sync_folder
from briter_worker.job import (
    MAX_REWRITTEN_BYTES,
    SUFFIX,
    WORKERS_KEYS,
    Document,
    Job,
    MalformedJobError,
    UnreadableJobError,
    read_document,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_NO_LINKS = frozenset({errno.EPERM, errno.EACCES, errno.EXDEV, errno.ENOTSUP, errno.ENOSYS})
_LOCK_TIMEOUT_S = 10.0
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_OPEN_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NOT_THE_PRODUCERS = frozenset({*WORKERS_KEYS, "id", "message", "commitMessage"})
"""The worker writes these keys, or adds them, or spells them again."""


def is_job_name(name: str) -> bool:
    """Return True if the contract lets a file of this name be a job."""
    return name.endswith(SUFFIX) and not name.startswith(".")


def printable(name: str) -> str:
    """Return a file name as text: undecodable bytes and control characters are replaced."""
    text = os.fsencode(name).decode(errors="replace")
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def stem(name: str) -> str:
    """Return the job id of a file whose job declares none."""
    return printable(name.removesuffix(SUFFIX)) or "unnamed"


def unused_name() -> str:
    """Return a name for a job file whose own name is in use."""
    return f"{uuid4().hex}{SUFFIX}"


class Folder:
    """An open folder, so that nobody can put another one in its place. Methods take names of its entries."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a folder that the operator configured, which may be a link."""
        return cls(path, os.open(path, _OPEN_FOLDER))

    def open_child(self, name: str) -> Folder:
        """Open a folder in this one. Raises OSError if it is a link, or anything else than a folder."""
        with self._naming(name):
            descriptor = os.open(name, _OPEN_FOLDER | os.O_NOFOLLOW, dir_fd=self.descriptor)
        return Folder(self.path / name, descriptor)

    def __enter__(self) -> Self:
        """Return the open folder."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the folder."""
        os.close(self.descriptor)

    @contextlib.contextmanager
    def _naming(self, name: str = "") -> Iterator[None]:
        """Add the path to an OSError; a call on a descriptor does not name one."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path / name)) from error

    def names(self) -> list[str]:
        """Return the names of all entries, sorted."""
        with self._naming():
            return sorted(os.listdir(self.descriptor))  # noqa: PTH208 - a Path has no descriptor

    def stat(self, name: str) -> os.stat_result:
        """Return what `name` is, without following a link."""
        with self._naming(name):
            return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)

    def has(self, name: str) -> bool:
        """Return True if there is an entry of this name, of any kind."""
        with contextlib.suppress(FileNotFoundError):
            return bool(self.stat(name))
        return False

    def read(self, name: str) -> tuple[bytes | None, os.stat_result]:
        """Return the bytes of a file, at most one more than a job file may have, and its status.

        The bytes are None for anything but a regular file, which is neither followed nor waited for.
        """
        with self._naming(name):
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
                # A file that grows or shrinks from now on is read again, because its size tells.
                return os.read(descriptor, min(found.st_size, MAX_REWRITTEN_BYTES) + 1), found
            finally:
                os.close(descriptor)

    @contextlib.contextmanager
    def written(self, data: bytes, like: os.stat_result | None = None, *, mode: int = 0o640) -> Iterator[str]:
        """Write and sync a file, with the mode, owner and times of `like`; return its temporary name.

        The name is gone at the end, whatever happens inside. No reader takes it for a job.
        """
        name = f".{uuid4().hex}.tmp"
        try:
            with self._naming(name):
                descriptor = os.open(name, _CREATE_FILE, mode, dir_fd=self.descriptor)
                try:
                    view = memoryview(data)
                    while view:
                        view = view[os.write(descriptor, view) :]
                    if like is not None:
                        _copy_attributes(descriptor, like)
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            yield name
        finally:
            self.unlink(name)

    def replace(
        self, name: str, data: bytes, like: os.stat_result | None = None, *, mode: int = 0o640
    ) -> None:
        """Replace a file atomically; durable once the folder is synced."""
        with self.written(data, like, mode=mode) as temporary:
            self.rename(temporary, self, name)

    def overwrite(self, name: str, data: bytes) -> None:
        """Write into a file that has to stay the same file, durably; a crash may leave a part of the data."""
        with self._naming(name):
            descriptor = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.descriptor)
            try:
                os.ftruncate(descriptor, 0)
                view = memoryview(data)
                while view:
                    view = view[os.write(descriptor, view) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def rename(self, name: str, target: Folder, new_name: str) -> None:
        """Move an entry, over any entry of the new name."""
        with self._naming(name):
            os.rename(name, new_name, src_dir_fd=self.descriptor, dst_dir_fd=target.descriptor)

    def link(self, name: str, target: Folder, new_name: str) -> None:
        """Give an entry a second name. Raises FileExistsError where a rename would overwrite another entry.

        Where fs.protected_hardlinks refuses to link another user's file, and in another file system, a copy
        is linked; a folder, and what cannot be read, is moved.
        """
        with self._naming(name):
            try:
                return self._link(name, target, new_name)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
        data = None
        with contextlib.suppress(PermissionError):  # another user's file, which the worker may only move
            data, like = self.read(name)
        if data is None or len(data) < like.st_size:
            if target.has(new_name):
                raise FileExistsError(errno.EEXIST, "in use", str(target.path / new_name))
            return self.rename(name, target, new_name)
        with target.written(data, like) as temporary:
            try:
                target._link(temporary, target, new_name)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                text = "the file system has no hard links"
                raise OSError(errno.ENOTSUP, text, str(target.path / new_name)) from error

    def _link(self, name: str, target: Folder, new_name: str) -> None:
        folders = {"src_dir_fd": self.descriptor, "dst_dir_fd": target.descriptor}
        os.link(name, new_name, **folders, follow_symlinks=False)

    def unlink(self, name: str) -> None:
        """Remove a name, if it is there."""
        with self._naming(name), contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def sync(self) -> None:
        """Make names created, moved and removed in the folder survive a power cut."""
        with self._naming():
            sync_folder(self.descriptor)

    def touch(self, name: str) -> None:
        """Create an empty file if there is none."""
        with contextlib.suppress(FileExistsError), self._naming(name):
            os.close(os.open(name, _CREATE_FILE, 0o660, dir_fd=self.descriptor))

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Hold the kernel's lock on a file in this folder. Raises OSError (EBUSY) after some seconds.

        The kernel releases the lock when its holder dies; nobody holds it longer than a few file operations.
        """
        with self._naming(name):
            descriptor = os.open(name, _OPEN_LOCK, 0o660, dir_fd=self.descriptor)
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


def _copy_attributes(descriptor: int, like: os.stat_result) -> None:
    """Let the program that wrote the original still read and replace the file, as far as permitted."""
    with contextlib.suppress(OSError):  # the time of the save, which orders jobs without `createdAt`
        os.utime(descriptor, ns=(like.st_atime_ns, like.st_mtime_ns))
    with contextlib.suppress(OSError):
        os.fchown(descriptor, like.st_uid, like.st_gid)
    with contextlib.suppress(OSError):
        os.fchmod(descriptor, stat.S_IMODE(like.st_mode) & 0o777)


@dataclass(frozen=True, slots=True)
class JobFile:
    """A job, and its file as it was when it was read."""

    name: str
    stat: os.stat_result
    job: Job
    document: Document

    @property
    def order(self) -> tuple[float, float, str]:
        """Return the key by which the newest save of a slug is the greatest."""
        return (self.job.created_at, self.stat.st_mtime_ns / 1e9, self.name)

    @property
    def save(self) -> str:
        """Return the digest of this save: the same however often the worker rewrites the file."""
        own = {key: value for key, value in self.document.items() if key not in _NOT_THE_PRODUCERS}
        message = self.document.get("message", self.document.get("commitMessage"))
        text = json.dumps([own, message, self.stat.st_mtime_ns], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def is_intact(self) -> bool:
        """Return False if a producer that had the claimed file open has written a newer save into it."""
        return f".{self.save}" in self.name


@dataclass(frozen=True, slots=True)
class BadFile:
    """A file that is not a job, as it was when it was read."""

    stat: os.stat_result
    reason: str
    code: FailureCode = FailureCode.UNREADABLE
    document: Document = field(default_factory=dict)
    """The keys that could be read."""
    may_become_job: bool = False
    """A producer may still be writing the file."""


def read_queue_file(folder: Folder, name: str, original: str | None = None) -> JobFile | BadFile:
    """Read a file that its producer called `original`. Never follows a link and never waits.

    Raises FileNotFoundError if the file is gone, another OSError if the disk cannot be read.
    """
    try:
        data, found = folder.read(name)
    except PermissionError:
        reason = "the worker's user may not read it: let its group or others read job files"
        return BadFile(folder.stat(name), reason, may_become_job=True)
    if data is None:
        return BadFile(found, "it is not a regular file")
    try:
        document = read_document(data)
        modified = found.st_mtime_ns / 1e9
        job = Job.from_document(document, name=stem(original or name) + SUFFIX, modified=modified)
    except MalformedJobError as error:
        return BadFile(found, error.reason, FailureCode.MALFORMED, error.document)
    except UnreadableJobError as error:
        return BadFile(found, error.reason, document=error.document, may_become_job=True)
    return JobFile(name, found, job, document)
