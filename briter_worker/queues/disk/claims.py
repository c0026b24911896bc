"""The folder `.claimed/`: jobs in flight, and files taken out of the queue folder to be changed.

The queue folder belongs to the CMS, which may rename a newer save over any name in it at any moment. So a
file is never changed or removed there: it is taken by a rename, changed in `.claimed/`, and given back by a
link, which overwrites nothing. A crash leaves each step done or not done.

Names in `.claimed/`: `.<name>` is a taken file, which waits again after a crash; `<stem>.<digest>.json` is a
claim, in flight; `<claim>.alone` and `<claim>.cancel` are marks of a claim.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from typing import TYPE_CHECKING

from briter_worker.errors import Failure, one_line
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
from briter_worker.queues.disk.files import (
    BadFile,
    Folder,
    JobFile,
    is_job_name,
    printable,
    read_queue_file,
    stem,
    unused_name,
)
from briter_worker.queues.disk.waited import WaitedJobs

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator
    from pathlib import Path

CANCEL, ALONE = ".cancel", ".alone"
_FOLDER, _LOCK = ".claimed", ".lock"
_LONGEST_NAME = 220
"""In bytes: leaves room for a digest and a mark."""
_DIGEST = re.compile(r"\.[0-9a-f]{16}(?=\.json$)")
_PARTIAL = re.compile(r"\.[0-9a-f]{32}\.tmp")
_PARTIAL_S = 3600.0
_FIX = "correct what wrote the file, save the post again, then cancel this job"
_MAX_REASON = 400
"""Leaves room for the names of the files."""


def marked(names: Iterable[str], mark: str) -> set[str]:
    """Return the claims that have this mark."""
    return {name.removesuffix(mark) for name in names if name.endswith(mark)}


def _read(folder: Folder, name: str) -> JobFile | None:
    """Return the job in a file of `.claimed/`; None if it is gone, or not a job."""
    with contextlib.suppress(FileNotFoundError):
        file = read_queue_file(folder, name, _original_name(name))
        return file if isinstance(file, JobFile) else None
    return None


def _original_name(name: str) -> str:
    """Return the name in the queue folder of a file in `.claimed/`."""
    return name[1:] if name.startswith(".") else _DIGEST.sub("", name)


class ClaimFolder:
    """Moves files between the queue folder and `.claimed/`, under the lock of all who change the queue."""

    root: Folder
    """The queue folder; only under the lock."""
    claimed: Folder
    """`.claimed/`; only under the lock."""

    def __init__(self, root: Path, quarantine: Path) -> None:
        self._root_path = root
        self._quarantine_path = quarantine
        self.waited = WaitedJobs(root / _FOLDER, _LOCK)

    @contextlib.contextmanager
    def exclusively(self) -> Iterator[None]:
        """Keep out other processes that change the queue; producers still add files."""
        self._root_path.mkdir(parents=True, exist_ok=True)
        with Folder.open(self._root_path) as self.root:
            is_new = False
            with contextlib.suppress(FileExistsError):
                (self._root_path / _FOLDER).mkdir()
                is_new = True
            with self.root.open_child(_FOLDER) as self.claimed, self.claimed.locked(_LOCK):
                if not self.waited.is_noted(self.claimed):
                    self.waited.note(self.claimed, () if is_new else self._all_jobs())
                yield

    def _all_jobs(self) -> Iterator[JobFile]:
        """Yield the jobs that wait, are in flight, or were taken by a process that died."""
        places = [(self.root, name, name) for name in self.root.names() if is_job_name(name)]
        claimed = [name for name in self.claimed.names() if name.endswith(SUFFIX)]
        places += [(self.claimed, name, _original_name(name)) for name in claimed]
        for folder, name, original in places:
            with contextlib.suppress(OSError):
                file = read_queue_file(folder, name, original)
                if isinstance(file, JobFile):
                    yield file

    def list_names(self) -> list[str]:
        """Return the names in `.claimed/`, without the lock."""
        with contextlib.suppress(FileNotFoundError), self._opened() as folder:
            return folder.names()
        return []

    def read_all(self) -> dict[str, JobFile]:
        """Return the jobs in flight, without the lock."""
        with contextlib.suppress(FileNotFoundError), self._opened() as folder:
            found = {name: _read(folder, name) for name in folder.names() if is_job_name(name)}
            return {name: file for name, file in found.items() if file is not None}
        return {}

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Folder]:
        with Folder.open(self._root_path) as root, root.open_child(_FOLDER) as claimed:
            yield claimed

    def has_taken(self) -> bool:
        """Return True if an interrupted operation, or a running one, has taken files. Needs no lock."""
        return any(map(_is_taken, self.list_names()))

    def tidy(self) -> bool:
        """Remove what dead processes had half written, and give back what they had taken, if anything."""
        names = self.claimed.names()
        for name in names:
            if name.startswith(".") and name.endswith(".tmp"):
                self.claimed.unlink(name)
        taken = list(filter(_is_taken, names))
        self.give_back(taken)
        return bool(taken)

    def remove_partials(self, now: float) -> None:
        """Remove what producers that were killed an hour ago had half written."""
        for name in filter(_PARTIAL.fullmatch, self.root.names()):
            with contextlib.suppress(FileNotFoundError):
                if now - self.root.stat(name).st_mtime > _PARTIAL_S:
                    self.root.unlink(name)

    # Out of the queue folder, and back

    def take(self, name: str) -> str | None:
        """Move a waiting file out of other programs' reach; return the new name, or None if it is gone."""
        taken = f".{name}"
        if not name.isprintable() or len(os.fsencode(name)) > _LONGEST_NAME or self.claimed.has(taken):
            taken = f".{unused_name()}"
        try:
            self.root.rename(name, self.claimed, taken)
        except FileNotFoundError:
            return None
        if taken != f".{name}":
            self._keep_id(taken, name)
        return taken

    def begin(self, file: JobFile) -> str:
        """Make a taken job a claim, and return its key; durable once the folder is synced."""
        name, digest = file.name.removeprefix(".").removesuffix(SUFFIX), f".{file.save}{SUFFIX}"
        if self.claimed.has(name + digest):
            self._keep_id(file.name, name)
            name = unused_name().removesuffix(SUFFIX)
        key = name + digest
        self.claimed.unlink(key + CANCEL)  # left by a crash, of an earlier claim of the same name
        self.claimed.unlink(key + ALONE)
        self.claimed.rename(file.name, self.claimed, key)
        return key

    def read(self, name: str) -> JobFile | None:
        """Return the job in `.claimed/`; None if it is gone, or not a job."""
        return _read(self.claimed, name)

    def rewrite(self, file: JobFile, document: Document) -> JobFile:
        """Replace the document of a job in `.claimed/`; durable once the folder is synced."""
        self.claimed.replace(file.name, encode_document(document), file.stat)
        return self.read(file.name) or file

    def give_back(self, names: Iterable[str]) -> None:
        """Let these files wait again, under their own names or, where a producer has used those, others.

        If some of them cannot be given back, the others are, and the first OSError is raised.
        """
        failed: OSError | None = None
        placed = []
        for name in names:
            try:
                with contextlib.suppress(FileNotFoundError):
                    self._place(name, _original_name(name))
                    placed.append(name)
            except OSError as error:
                failed = failed or error
        if placed:
            self.root.sync()  # only when the new names are durable may the old ones go
            self.drop(placed)
        if failed is not None:
            raise failed

    def put_back(self, file: JobFile, document: Document) -> None:
        """Let a job in flight wait again with another document.

        The new file is complete before it gets its name, so that a crash leaves the job in flight, or in both
        places.
        """
        with self.claimed.written(encode_document(document), file.stat) as temporary:
            self._place(temporary, _original_name(file.name))
            self.root.sync()
        self.drop([file.name])

    def _place(self, source: str, name: str) -> None:
        """Link `source` into the queue folder as `name`, or as another name if that is in use."""
        try:
            self.claimed.link(source, self.root, name)
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                if os.path.samestat(self.claimed.stat(source), self.root.stat(name)):
                    return  # a crash came between the link and the removal
            self._keep_id(source, name)
            self.claimed.link(source, self.root, unused_name())

    def _keep_id(self, name: str, original: str) -> None:
        """Write the id of a job whose id is its file's name into the file, before the name changes."""
        file = self.read(name)
        if file is not None and not file.document.get("id"):
            # `updatedAt` marks the worker's own files, which may be larger than a producer's.
            updated = format_time(file.stat.st_mtime)
            self.rewrite(file, {"updatedAt": updated, **file.document, "id": stem(original)})

    def drop(self, names: Collection[str]) -> None:
        """Remove files from `.claimed/`, with their marks, durably."""
        for name in names:
            self.claimed.unlink(name)
            if not name.startswith("."):
                self.claimed.unlink(name + CANCEL)
                self.claimed.unlink(name + ALONE)
        if names:
            self.claimed.sync()
            self.root.sync()  # nor do the names come back that the files had there

    def quarantine(self, taken: str, name: str, file: BadFile, declared: Job, now: float) -> Quarantined:
        """Keep the bytes of a taken file called `name`, and write the failed job that names them.

        A crash in between quarantines the file once more, never silently.
        """
        self._quarantine_path.mkdir(parents=True, exist_ok=True)
        with Folder.open(self._quarantine_path) as kept:
            safe = re.sub(r"[^A-Za-z0-9._-]+", "_", stem(name))[:100]
            target = f"{format_time(now).replace(':', '')}-{safe}{SUFFIX}"
            if kept.has(target):
                target = f"{target.removesuffix(SUFFIX)}-{unused_name()}"
            path = kept.path / target
            text = f"{one_line(file.reason, _MAX_REASON)}. The file {printable(name)!r} is kept as {path}"
            failure = Failure(file.code, text, _FIX)
            document = _salvage(file, name, declared, now)
            document = with_state(document, now, status=Status.FAILED, attempts=0, failure=failure)
            like = file.stat if stat.S_ISREG(file.stat.st_mode) else None
            with self.claimed.written(encode_document(document), like) as temporary:
                self.claimed.link(taken, kept, target)
                kept.sync()
                self.claimed.rename(temporary, self.claimed, taken)
        self.give_back([taken])
        return Quarantined(job_id=document["id"], slug=document["slug"], error=text, file=str(path), fix=_FIX)


def _is_taken(name: str) -> bool:
    return name.startswith(".") and name.endswith(SUFFIX)


def _salvage(file: BadFile, name: str, declared: Job, now: float) -> Document:
    """Return a job that can be listed: what could be read of the file, over what it declared last."""
    default: Document = {"id": stem(name), "slug": stem(name), "paths": list(declared.paths)}
    if declared.scheduled_for is not None:
        default |= {"slug": declared.slug, "scheduledFor": format_time(declared.scheduled_for)}
    theirs = WORKERS_KEYS | {"paths"}
    usable = {k: v for k, v in file.document.items() if k not in theirs and v is not None}
    while True:
        document = default | usable
        try:
            job = Job.from_document(document, name=name, modified=min(file.stat.st_mtime, now))
        except MalformedJobError as error:
            fewer = {k: v for k, v in usable.items() if k in error.document}
            usable = fewer if len(fewer) < len(usable) else {}
        else:
            return {"createdAt": format_time(job.created_at), **document}
