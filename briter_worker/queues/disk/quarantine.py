"""Files that are not jobs: moved out of the queue folder whole, each named by a failed job."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from typing import TYPE_CHECKING

from briter_worker.errors import Failure
from briter_worker.job import (
    SUFFIX,
    WORKERS_KEYS,
    Document,
    Job,
    MalformedJobError,
    Status,
    encode_document,
    format_time,
    with_state,
)
from briter_worker.ports import QuarantinedFile
from briter_worker.queues.disk.files import Folder, printable, stem, temporary_name, variants
from briter_worker.redaction import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from briter_worker.queues.disk.claims import ClaimFolder
    from briter_worker.queues.disk.index import Declaration, QueueFile

FIX = "correct what wrote the file, save the post again, then cancel this job"
_NEARBY = ".quarantine"
"""In the queue folder: for what cannot be copied to a quarantine on another file system."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_STAMP = re.compile(r"^\d{4}-\d\d-\d\dT[\d.]+Z-")
_KEPT = re.compile(r" is kept as (?P<file>.+)$")
_MAX_REASON = 400
"""Leaves room for the names of the files."""
_COPY_BYTES = 1 << 20


class Quarantine:
    """The folder that keeps the bytes of files that are not jobs."""

    def __init__(self, path: Path, claims: ClaimFolder) -> None:
        self._path = path
        self._claims = claims

    def put(
        self, taken: str, name: str, file: QueueFile, declared: Declaration | None, now: float
    ) -> QuarantinedFile:
        """Keep the bytes of a taken file called `name`, and write the failed job that names them.

        The job is written first: a crash in between quarantines the file once more, never silently.
        """
        self._path.mkdir(parents=True, exist_ok=True)
        target = self._free_name(name, now)
        reason = one_line(file.reason, _MAX_REASON)
        failure = Failure(
            file.code, f"{reason}. The file {printable(name)!r} is kept as {self._path / target}", FIX
        )
        document = file.document
        if declared:
            lost = {
                "slug": declared.slug,
                "paths": list(declared.paths),
                "scheduledFor": format_time(declared.scheduled_for),
            }
            document = lost | document
        document = _salvage(document, name, min(file.stat.st_mtime, now))
        document = with_state(document, now, status=Status.FAILED, attempts=0, failure=failure)
        letter = self._write_failed_job(name, document, file.stat)
        try:
            kept = self._move(taken, target)
        except OSError:
            if self._claims.claimed.has(taken):  # the next try writes the job again
                with contextlib.suppress(OSError):
                    self._withdraw(letter, document)
            raise
        return QuarantinedFile(document["id"], document["slug"], failure.message, str(kept))

    def _write_failed_job(self, name: str, document: Document, like: os.stat_result) -> str:
        temporary = temporary_name()
        claimed, root = self._claims.claimed, self._claims.root
        claimed.write_new(temporary, encode_document(document), like if stat.S_ISREG(like.st_mode) else None)
        try:
            for letter in variants(name if name.isprintable() else f"{temporary[1:33]}{SUFFIX}"):
                try:
                    claimed.link(temporary, root, letter)
                except FileExistsError:
                    continue  # a producer has used the name meanwhile
                root.sync()
                return letter
        finally:
            claimed.unlink(temporary)
        raise AssertionError  # variants never end

    def _withdraw(self, letter: str, document: Document) -> None:
        """Remove the failed job, unless a producer has put something else in its place."""
        taken = self._claims.take(letter)
        if taken is not None and self._claims.look(taken).document == document:
            self._claims.drop([taken])
        elif taken is not None:
            self._claims.give_back([taken])

    def _free_name(self, name: str, now: float) -> str:
        stamp = format_time(now).replace(":", "")
        safe = _UNSAFE.sub("_", stem(name))[:100] + SUFFIX
        with Folder.open(self._path) as folder:
            return next(each for each in variants(f"{stamp}-{safe}") if not folder.has(each))

    def _move(self, taken: str, target: str) -> Path:
        claimed = self._claims.claimed
        with Folder.open(self._path) as folder:
            try:
                claimed.rename(taken, folder, target)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                return self._move_across(taken, folder, target)
            folder.sync()
            claimed.sync()
            return folder.path / target

    def _move_across(self, taken: str, folder: Folder, target: str) -> Path:
        """Copy a file to another file system; what cannot be copied stays on this one."""
        claimed = self._claims.claimed
        try:
            source = os.open(taken, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=claimed.descriptor)
        except OSError:
            return self._move_nearby(taken, target)
        with os.fdopen(source, "rb") as reader:
            if not stat.S_ISREG(os.fstat(source).st_mode):
                return self._move_nearby(taken, target)
            temporary = temporary_name()
            folder.write_new(temporary, b"")
            try:
                path = folder.path / temporary
                with path.open("r+b") as writer:
                    while piece := reader.read(_COPY_BYTES):
                        writer.write(piece)
                    writer.flush()
                    os.fsync(writer.fileno())
                folder.rename(temporary, folder, target)
            except BaseException:
                folder.unlink(temporary)
                raise
        folder.sync()
        claimed.unlink(taken)
        return folder.path / target

    def _move_nearby(self, taken: str, target: str) -> Path:
        with self._claims.root.open_child(_NEARBY, create=True) as nearby:
            self._claims.claimed.rename(taken, nearby, target)
            nearby.sync()
            return nearby.path / target

    def contents(self, failed: Iterable[Job]) -> list[QuarantinedFile]:
        """Return what is kept, oldest first, with the failed jobs that name the files."""
        jobs = {}
        for job in failed:
            if match := _KEPT.search(job.last_error or ""):
                jobs[match["file"]] = job
        kept = []
        for folder in (self._path, self._claims.path.with_name(_NEARBY)):
            with contextlib.suppress(FileNotFoundError):
                kept += [path for path in folder.iterdir() if not path.name.endswith(".tmp")]
        return [_described(path, jobs.get(str(path))) for path in sorted(kept, key=lambda path: path.name)]


def _described(path: Path, job: Job | None) -> QuarantinedFile:
    if job is not None:
        return QuarantinedFile(job.id, job.slug, job.last_error or "", str(path))
    name = stem(_STAMP.sub("", path.name))
    return QuarantinedFile(name, name, "", str(path))


def _salvage(document: Document, name: str, modified: float) -> Document:
    """Return a job that can be listed, with every key of the document that breaks no rule."""
    default = {"id": stem(name), "slug": stem(name), "paths": []}
    usable = {k: v for k, v in document.items() if k not in WORKERS_KEYS and v is not None}
    while True:
        usable = {**default, **usable}
        try:
            job = Job.from_document(usable, name=name, modified=modified)
        except MalformedJobError as error:
            fewer = error.document
            usable = fewer if len(fewer) < len(usable) else {}
        else:
            return {"createdAt": format_time(job.created_at), **usable}
