"""Files that are not jobs: moved out of the queue folder whole, each named by a failed job."""

from __future__ import annotations

import contextlib
import errno
import re
import stat
from typing import TYPE_CHECKING
from uuid import uuid4

from briter_worker.errors import Failure
from briter_worker.events import Quarantined
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
from briter_worker.queues.disk.files import Folder, printable, stem, variants
from briter_worker.redaction import one_line

if TYPE_CHECKING:
    from pathlib import Path

    from briter_worker.queues.disk.claims import ClaimFolder
    from briter_worker.queues.disk.files import QueueFile
    from briter_worker.queues.disk.index import Entry

_FIX = "correct what wrote the file, save the post again, then cancel this job"
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_REASON = 400
"""Leaves room for the names of the files."""


class Quarantine:
    """The folder that keeps the bytes of files that are not jobs."""

    def __init__(self, path: Path, claims: ClaimFolder) -> None:
        self._path = path
        self._claims = claims

    def put(self, taken: str, name: str, file: QueueFile, known: Entry, now: float) -> Quarantined:
        """Keep the bytes of a taken file called `name`, and write the failed job that names them.

        The job is written first: a crash in between quarantines the file once more, never silently.
        """
        self._path.mkdir(parents=True, exist_ok=True)
        target = self._free_name(name, now)
        reason = one_line(file.reason, _MAX_REASON)
        text = f"{reason}. The file {printable(name)!r} is kept as {self._path / target}"
        document = file.document
        if known.scheduled_for is not None:
            at = format_time(known.scheduled_for)
            document = {"slug": known.slug, "paths": list(known.paths), "scheduledFor": at} | document
        document = _salvage(document, name, min(file.stat.st_mtime, now))
        failure = Failure(file.code, text, _FIX)
        document = with_state(document, now, status=Status.FAILED, attempts=0, failure=failure)
        claimed = self._claims.claimed
        letter = f".{uuid4().hex}{SUFFIX}"
        like = file.stat if stat.S_ISREG(file.stat.st_mode) else None
        claimed.replace(letter, encode_document(document), like)
        try:
            claimed.sync()
            self._move(taken, target)
        except OSError:
            if claimed.has(taken):  # else the failed job waits from the next claim on
                claimed.unlink(letter)
            raise
        claimed.rename(letter, claimed, taken)
        self._claims.give_back([taken])
        return Quarantined(
            job_id=document["id"],
            slug=document["slug"],
            error=failure.message,
            file=str(self._path / target),
            fix=failure.fix,
        )

    def _free_name(self, name: str, now: float) -> str:
        stamp = format_time(now).replace(":", "")
        safe = _UNSAFE.sub("_", stem(name))[:100] + SUFFIX
        with Folder.open(self._path) as folder:
            return next(each for each in variants(f"{stamp}-{safe}") if not folder.has(each))

    def _move(self, taken: str, target: str) -> None:
        claimed = self._claims.claimed
        with Folder.open(self._path) as folder:
            try:
                claimed.rename(taken, folder, target)
            except OSError as error:
                data, like = claimed.read(taken)
                if error.errno != errno.EXDEV or data is None or len(data) < like.st_size:
                    raise
                folder.write_new(target, data, like)
                folder.sync()
                claimed.unlink(taken)
            folder.sync()
            claimed.sync()

    def files(self) -> list[Path]:
        """Return the quarantined files, oldest first."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(self._path.iterdir(), key=lambda path: path.name)
        return []


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
