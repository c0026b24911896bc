"""What a name in a queue folder turned out to be: a job, or what is wrong with it."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from briter_worker.errors import Failure
from briter_worker.jobfile import parse_job
from briter_worker.queues.files import SUFFIX, naming, stem
from briter_worker.strictjson import (
    MAX_REWRITTEN,
    Document,
    MalformedJobError,
    UnreadableJobError,
    read_document,
)

if TYPE_CHECKING:
    from pathlib import Path

    from briter_worker.job import Job

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_DENIED = frozenset({errno.EACCES, errno.EPERM})
_CHANGED_KIND = frozenset({errno.ELOOP, errno.ENXIO, errno.EISDIR})


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a file is no job."""

    failure: Failure
    reason: str
    passing: bool
    """A writer may still be at it: it is given a moment."""
    document: Document | None = None


@dataclass(frozen=True, slots=True)
class Sighting:
    """A file as it was when we looked: with a job and its document, or with trouble."""

    stat: os.stat_result
    job: Job | None = None
    document: Document | None = None
    trouble: Trouble | None = None


def look(path: Path | str, name: str, found: os.stat_result | None = None) -> Sighting:
    """What `path` is; `name` is the name its writer gave it. Never follows, never blocks.

    `found` is what `lstat` has said of it just now, where it was asked already.

    Raises FileNotFoundError when it is gone, another OSError when the disk could not be asked.
    """
    found = found or os.lstat(path)
    if not stat.S_ISREG(found.st_mode):
        return _special(found)
    try:
        data, found = _read(path)
    except OSError as error:
        if error.errno in _DENIED:
            reason = "the worker's user may not read it: let its group or others read job files"
            return Sighting(found, trouble=Trouble(Failure.UNREADABLE, reason, passing=True))
        if error.errno in _CHANGED_KIND:
            return _special(os.lstat(path))
        raise
    if not stat.S_ISREG(found.st_mode):
        return _special(found)
    return _parsed(data, found, name)


def _parsed(data: bytes, found: os.stat_result, name: str) -> Sighting:
    try:
        document = read_document(data)
        job = parse_job(document, name=stem(name) + SUFFIX, modified=found.st_mtime_ns / 1e9)
    except UnreadableJobError as error:
        return Sighting(found, trouble=Trouble(Failure.UNREADABLE, str(error), passing=True))
    except MalformedJobError as error:
        trouble = Trouble(Failure.MALFORMED, error.reason, passing=False, document=error.document)
        return Sighting(found, trouble=trouble)
    return Sighting(found, job, document)


def _special(found: os.stat_result) -> Sighting:
    kind = _KINDS.get(stat.S_IFMT(found.st_mode), "a special file")
    reason = f"it is {kind}, and a job is a regular file"
    return Sighting(found, trouble=Trouble(Failure.UNREADABLE, reason, passing=False))


def _read(path: Path | str) -> tuple[bytes, os.stat_result]:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    descriptor = os.open(path, flags)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            return b"", found
        with naming(path):
            data = os.read(descriptor, min(found.st_size, MAX_REWRITTEN) + 1)
            # Should it have grown, or grow from now on, its size will tell: it is read again then.
            while len(data) != found.st_size and len(data) <= MAX_REWRITTEN:
                chunk = os.read(descriptor, MAX_REWRITTEN + 1 - len(data))
                if not chunk:
                    break
                data += chunk
        return data, found
    finally:
        os.close(descriptor)
