"""Files that are whole or absent, whatever happens: atomic writes, moves that overwrite nothing, fsync.

A folder is flushed apart from the files in it (`sync_folder`), once for many of them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from typing import TYPE_CHECKING
from uuid import uuid4

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SUFFIX = ".json"
_NAME_BYTES = 255
_NO_LINKS = frozenset(
    {errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
)
_PATIENCE = 10.0


def is_job_name(name: str) -> bool:
    """Whether the contract lets a file of this name be a job."""
    return name.endswith(SUFFIX) and not name.startswith(".")


def printable(name: str) -> str:
    """A file name as a text that may be stored and shown: undecodable bytes and controls are replaced."""
    if name.isprintable():
        return name
    text = os.fsencode(name).decode(errors="replace")
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def stem(name: str) -> str:
    """The job id that a file name stands for, when the file itself has none."""
    return printable(name.removesuffix(SUFFIX)) or "unnamed"


def variants(name: str) -> Iterator[str]:
    """`name`, then others close to it; none is longer than a file name may be."""
    yield name
    base = os.fsencode(name.removesuffix(SUFFIX))
    number = 2
    while True:
        tail = f"-{number}{SUFFIX}".encode()
        cut = base[: _NAME_BYTES - len(tail)]
        # A character cut in two would make the name undecodable.
        yield (
            os.fsdecode(cut if len(cut) == len(base) else cut.decode(errors="ignore").encode())
            + tail.decode()
        )
        number += 1


def temporary(folder: Path) -> Path:
    """A name in `folder` that no reader takes for a job."""
    return folder / f".{uuid4().hex}.tmp"


@contextlib.contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """An OSError inside says which file it was about: what works on a descriptor does not."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def write_new(path: Path, data: bytes, like: os.stat_result | None = None, *, mode: int = 0o640) -> None:
    """A new file with these bytes, flushed; with the mode, owner and age of `like`. Not yet its folder.

    On failure nothing is left behind.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, mode)
    try:
        try:
            with naming(path):
                view = memoryview(data)
                while view:
                    view = view[os.write(descriptor, view) :]
                if like is not None:
                    _make_alike(descriptor, like)
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def _make_alike(descriptor: int, like: os.stat_result) -> None:
    """The program that wrote the original must still be able to read and replace it."""
    with contextlib.suppress(OSError):
        os.fchown(descriptor, like.st_uid, like.st_gid)
    with contextlib.suppress(OSError):
        os.fchmod(descriptor, stat.S_IMODE(like.st_mode) & 0o777)
    # Without a `createdAt`, the age of the file is what orders two saves.
    with contextlib.suppress(OSError):
        os.utime(descriptor, ns=(like.st_atime_ns, like.st_mtime_ns))


def replace(path: Path, data: bytes, like: os.stat_result | None = None) -> None:
    """`path` holds these bytes: all of them, or what it held before. Its folder is not flushed yet.

    Only for folders in which nobody else writes; in the queue's own it would overwrite a newer save.
    """
    temp = temporary(path.parent)
    write_new(temp, data, like)
    try:
        temp.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temp.unlink()
        raise


def place(source: Path, target: Path) -> None:
    """`target` is `source`'s file; FileExistsError when there is one of that name. `source` stays.

    A rename would overwrite what another program has put there since we looked; a link never does.
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _place_copy(source, target)


def _place_copy(source: Path, target: Path) -> None:
    """Where a link is refused: another's file under fs.protected_hardlinks, a file system without links."""
    like = source.lstat()
    if not stat.S_ISREG(like.st_mode):
        raise OSError(errno.EINVAL, "only a file can be put back", str(source))
    data = source.read_bytes()
    temp = temporary(source.parent)
    write_new(temp, data, like)
    try:
        os.link(temp, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        write_new(target, data, like)
    finally:
        temp.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Names created, moved and removed in `folder` so far survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with naming(folder):
            os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE file systems flush folders by themselves and refuse to be asked.
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
            raise
    finally:
        os.close(descriptor)


def make_folder(folder: Path, owner: Path) -> None:
    """`folder` exists; made by root, it belongs to whoever owns `owner`."""
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        belong_to(folder, owner)


def belong_to(path: Path, owner: Path) -> None:
    """What root makes must not lock out the user that the worker runs as."""
    if os.geteuid() == 0:  # pragma: no branch - nobody else can give a file away
        like = owner.stat()
        with contextlib.suppress(OSError):
            os.chown(path, like.st_uid, like.st_gid)


@contextlib.contextmanager
def exclusively(lock: Path) -> Iterator[None]:
    """One process and thread at a time: the kernel lets go when its holder dies.

    Raises OSError (EBUSY) after some seconds; nobody holds it longer than a few file operations.
    """
    new = not lock.exists()
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o660)
    try:
        if new:
            belong_to(lock, lock.parent)
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    text = "another process has been changing the queue for too long"
                    raise OSError(errno.EBUSY, text, str(lock)) from None
                time.sleep(0.002)
        yield
    finally:
        os.close(descriptor)
