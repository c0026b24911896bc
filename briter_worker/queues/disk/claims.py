"""The folder `.claimed/`: jobs in flight, and files taken out of the queue folder to be changed.

The queue folder belongs to the CMS, which may rename a newer save over any name in it at any moment. So a
file is never changed or removed there: it is taken by a rename, changed in `.claimed/`, and given back by a
link, which overwrites nothing. A crash leaves each step done or not done.

Names in `.claimed/`: `.<name>` is a taken file, which waits again after a crash; `<stem>.<digest>.json` is a
claim, in flight; `<claim>.alone` and `<claim>.cancel` are marks of a claim.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

from briter_worker.job import (
    MAX_FILE_BYTES,
    SUFFIX,
    WORKERS_KEYS,
    Document,
    Job,
    encode_document,
    format_time,
)
from briter_worker.queues.disk.files import (
    Folder,
    QueueFile,
    is_job_name,
    read_queue_file,
    stem,
    temporary_name,
    variants,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator
    from pathlib import Path

CANCEL, ALONE = ".cancel", ".alone"
_FOLDER = ".claimed"
_LOCK = ".lock"
_LONGEST_NAME = 220
"""In bytes: leaves room for a digest and a mark."""
_DIGEST = re.compile(r"\.[0-9a-f]{16}(-\d+)?(?=\.json$)")
_NOT_THE_PRODUCERS = frozenset({*WORKERS_KEYS, "id", "message", "commitMessage"})
"""The worker writes these keys, or adds them, or spells them anew."""


@dataclass(frozen=True, slots=True)
class TakenJob:
    """A job in `.claimed/`, as it was when it was read there."""

    name: str
    job: Job
    document: Document
    stat: os.stat_result

    @property
    def order(self) -> tuple[float, float, str]:
        """Return the key by which the newest save of a slug is the greatest."""
        return (self.job.created_at, self.stat.st_mtime_ns / 1e9, self.name)

    @property
    def save(self) -> str:
        """Return the digest of this save: the same however often the worker writes the file anew."""
        own = {key: value for key, value in self.document.items() if key not in _NOT_THE_PRODUCERS}
        message = self.document.get("message", self.document.get("commitMessage"))
        text = json.dumps([own, message, self.stat.st_mtime_ns], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def is_intact(self) -> bool:
        """Return False if a producer that had the claimed file open has written a newer save into it."""
        return f".{self.save}" in self.name


class ClaimFolder:
    """Moves files between the queue folder and `.claimed/`, under the lock of all who change the queue."""

    root: Folder
    """The queue folder; only under the lock."""
    claimed: Folder
    """`.claimed/`; only under the lock."""

    def __init__(self, root: Path) -> None:
        self.path = root / _FOLDER
        self._root_path = root

    @contextlib.contextmanager
    def exclusively(self) -> Iterator[None]:
        """Keep out other processes that change the queue; producers still add files."""
        self._root_path.mkdir(parents=True, exist_ok=True)
        with Folder.open(self._root_path) as self.root:
            self.root.make_child(_FOLDER)
            with self.root.open_child(_FOLDER) as self.claimed, self.claimed.locked(_LOCK):
                yield

    @contextlib.contextmanager
    def opened(self) -> Iterator[Folder | None]:
        """Open `.claimed/` for reading, with or without the lock; None if there is none."""
        with contextlib.ExitStack() as stack:
            claimed: Folder | None = None
            with contextlib.suppress(FileNotFoundError):
                root = stack.enter_context(Folder.open(self._root_path))
                claimed = stack.enter_context(root.open_child(_FOLDER))
            yield claimed

    # Out of the queue folder, and back

    def take(self, name: str) -> str | None:
        """Move a waiting file out of other programs' reach; return the new name, or None if it is gone."""
        taken = f".{name}"
        if not name.isprintable() or len(os.fsencode(name)) > _LONGEST_NAME or self.claimed.has(taken):
            taken = f".{uuid4().hex}{SUFFIX}"
        try:
            self.root.rename(name, self.claimed, taken)
        except FileNotFoundError:
            return None
        if taken != f".{name}":
            self._keep_id(taken, stem(name))
        return taken

    def look(self, name: str) -> QueueFile:
        """Read a file in `.claimed/`. Raises FileNotFoundError."""
        return read_queue_file(self.claimed, name, original_name(name))

    def read(self, name: str) -> TakenJob | None:
        """Return the job in `.claimed/`; None if it is gone, or not a job."""
        return read_job(self.claimed, name)

    def rewrite(self, taken: TakenJob, document: Document) -> TakenJob:
        """Replace the document of a job in `.claimed/`; durable once the folder is synced."""
        self.claimed.replace(taken.name, _encode(document, taken.stat), taken.stat)
        return self.read(taken.name) or taken

    def give_back(self, names: Iterable[str]) -> None:
        """Let these files wait again, under their own names or, where a producer has used those, like ones.

        If some of them cannot be given back, the others are, and the first OSError is raised.
        """
        failed: OSError | None = None
        placed = []
        for name in names:
            try:
                if self._place(name, name):
                    placed.append(name)
            except OSError as error:
                failed = failed or error
        if placed:
            self.root.sync()  # only when the new names are durable may the old ones go
            self.drop(placed)
        if failed is not None:
            raise failed

    def put_back(self, taken: TakenJob, document: Document) -> None:
        """Let a job in flight wait again with another document.

        The new file is complete before it gets its name, so that a crash leaves the job in flight, or in both
        places.
        """
        temporary = temporary_name()
        self.claimed.write_new(temporary, _encode(document, taken.stat), taken.stat)
        try:
            self._place(temporary, taken.name)
            self.root.sync()
        finally:
            self.claimed.unlink(temporary)
        self.drop([taken.name])

    def _place(self, source: str, name: str) -> bool:
        """Link `source` into the queue folder under the name that `name` had there. Return True if it is."""
        original = original_name(name)
        for candidate in variants(original):
            if candidate != original:
                self._keep_id(source, stem(original))
            try:
                if stat.S_ISDIR(self.claimed.stat(source).st_mode):  # which no producer of jobs creates
                    if not self.root.has(candidate):
                        self.claimed.rename(source, self.root, candidate)
                        return False
                    continue
                self.claimed.link(source, self.root, candidate)
            except (FileExistsError, NotADirectoryError):
                if self._is_same_file(source, candidate):
                    return True  # a crash came between the link and the removal
            except FileNotFoundError:
                return False
            else:
                return True
        raise AssertionError  # variants never end

    def _is_same_file(self, taken: str, name: str) -> bool:
        try:
            return os.path.samestat(self.claimed.stat(taken), self.root.stat(name))
        except FileNotFoundError:
            return False

    def _keep_id(self, name: str, job_id: str) -> None:
        """Write the id of a job whose id is its file's name into the file, before the name changes."""
        job = self.read(name)
        if job is not None and not job.document.get("id"):
            self.rewrite(job, {**job.document, "id": job_id})

    def drop(self, names: Collection[str]) -> None:
        """Remove files from `.claimed/`, with their marks, durably. Raises the first OSError at the end."""
        failed: OSError | None = None
        for name in names:
            try:
                self.claimed.unlink(name)
                if not name.startswith("."):
                    self.claimed.unlink(name + CANCEL)
                    self.claimed.unlink(name + ALONE)
            except OSError as error:
                failed = failed or error
        self.claimed.sync()
        self.root.sync()  # nor do the names come back that the files had there
        if failed is not None:
            raise failed

    # Claims

    def begin(self, taken: TakenJob) -> str:
        """Make a taken job a claim, and return its key; durable once the folder is synced."""
        base = f"{taken.name.removeprefix('.').removesuffix(SUFFIX)}.{taken.save}{SUFFIX}"
        key = next(each for each in variants(base) if not self.claimed.has(each))
        self.claimed.unlink(key + CANCEL)  # left by a crash, of an earlier claim of the same name
        self.claimed.unlink(key + ALONE)
        self.claimed.rename(taken.name, self.claimed, key)
        return key

    def names(self) -> tuple[list[str], list[str]]:
        """Return the claims, and the files that a dead process has taken; remove half-written files."""
        names = self.claimed.names()
        for name in names:
            if name.startswith(".") and name.endswith(".tmp"):
                self.claimed.unlink(name)
        claims = [name for name in names if is_job_name(name)]
        return claims, [name for name in names if name.startswith(".") and name.endswith(SUFFIX)]


def marked(folder: Folder, mark: str) -> set[str]:
    """Return the claims that have this mark: one look, however many there are."""
    return {name.removesuffix(mark) for name in folder.names() if name.endswith(mark)}


def jobs_in(folder: Folder) -> list[TakenJob]:
    """Return the jobs in flight."""
    found = (read_job(folder, name) for name in folder.names() if is_job_name(name))
    return [job for job in found if job is not None]


def original_name(name: str) -> str:
    """Return the name in the queue folder of a file in `.claimed/`."""
    return name[1:] if name.startswith(".") else _DIGEST.sub("", name)


def read_job(folder: Folder, name: str) -> TakenJob | None:
    """Return the job in a file of the queue folder or `.claimed/`; None if it is gone, or not a job."""
    try:
        file = read_queue_file(folder, name, original_name(name))
    except FileNotFoundError:
        return None
    return TakenJob(name, file.job, file.document, file.stat) if file.job else None


def _encode(document: Document, like: os.stat_result) -> bytes:
    data = encode_document(document)
    if len(data) > MAX_FILE_BYTES and "updatedAt" not in document:
        # `updatedAt` marks the worker's own files, which may be larger than a producer's.
        data = encode_document({**document, "updatedAt": format_time(like.st_mtime)})
    return data
