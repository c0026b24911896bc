"""The waiting files in memory, so that a poll reads only what changed.

The folder stays the truth: a decision that the index suggests is made again on the file actually claimed.
"""

from __future__ import annotations

import errno
import heapq
import math
import os
import stat
import time
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from briter_worker.errors import FailureCode, is_environment, os_error_text
from briter_worker.job import (
    SUFFIX,
    Document,
    Job,
    MalformedJobError,
    Status,
    UnreadableJobError,
    read_document,
)
from briter_worker.queues.disk.files import Folder, is_job_name, printable, stem

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path

    from briter_worker.job import Author
    from briter_worker.queues.disk.watch import FolderWatcher

GRACE_S = 2.0
"""Time that a producer without a rename may take to write a file."""
RETRY_S = 60.0
"""After this time, a file that could not be moved is tried again."""
_FULL_SCAN_S = 300.0
"""Interval of full scans while the kernel reports every change."""
_RACY_NS = 50_000_000
"""A file may change once more within its time stamp's resolution."""
_QUARANTINED = frozenset({FailureCode.UNREADABLE.value, FailureCode.MALFORMED.value})
_FIELDS = tuple(Job.model_fields)
_TEMPLATE = Job(id="-", slug="-", paths=())
"""A copy that is filled in costs a tenth of a job that is validated once more."""
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


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
    except OSError as error:
        if error.errno not in {errno.ELOOP, errno.ENXIO, errno.EISDIR}:
            raise
        data, found = None, folder.stat(name)
    if data is None:
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "a special file")
        return QueueFile(found, reason=f"it is {kind}, and a job is a regular file")
    try:
        document = read_document(data)
        job = Job.from_document(
            document, name=stem(original or name) + SUFFIX, modified=found.st_mtime_ns / 1e9
        )
    except UnreadableJobError as error:
        return QueueFile(found, document=error.document, reason=str(error), may_become_job=True)
    except MalformedJobError as error:
        return QueueFile(found, None, error.document, FailureCode.MALFORMED, error.reason)
    return QueueFile(found, job, document)


@dataclass(slots=True)
class Entry:
    """A waiting job, small enough to keep a hundred thousand of them."""

    stamp: int
    is_racy: bool
    modified: float
    due: float
    slug: str
    paths: tuple[str, ...]
    created_at: float
    scheduled_for: float | None
    is_pending: bool
    failure: str | None
    _values: tuple[Any, ...]
    _job: Job | None = None

    @property
    def job(self) -> Job:
        """Return the job; the worker itself never asks for most of them."""
        if self._job is None:
            self._job = copy(_TEMPLATE)
            self._job.__dict__.update(zip(_FIELDS, self._values, strict=True))
        return self._job

    @property
    def order(self) -> tuple[float, float]:
        """Return the key by which the newest save of a slug is the greatest."""
        return (self.created_at, self.modified)

    @property
    def is_quarantined(self) -> bool:
        """Return True for the failed job that names a quarantined file."""
        return not self.is_pending and self.failure in _QUARANTINED


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a scheduled job declared before its file was damaged."""

    slug: str
    paths: tuple[str, ...]
    scheduled_for: float


@dataclass(slots=True)
class DamagedFile:
    """A queue file that is not a job."""

    stamp: int
    is_racy: bool
    identity: tuple[int, int, int]
    given_up_at: float
    reason: str
    declared: Declaration | None

    def is_unchanged(self, found: os.stat_result) -> bool:
        """Return True if nobody has written to the file since; moving a file changes its ctime only."""
        return self.identity == _identity(found)


class Index:
    """The waiting files by name and by slug. For one thread at a time."""

    def __init__(self, root: Path, longest_delay: float, *, dry_run: bool) -> None:
        self._root = root
        self._longest_delay = longest_delay
        self._dry_run = dry_run
        self.watcher: FolderWatcher | None = None
        self.entries: dict[str, Entry] = {}
        self.damaged: dict[str, DamagedFile] = {}
        self.pending: dict[str, list[str]] = {}
        self.failed: dict[str, list[str]] = {}
        self.crowded: set[str] = set()
        """Slugs with more than one pending job, or more than one dead letter that can be joined."""
        self.version = 0
        """Counts the changes of `entries`."""
        self.stuck: dict[str, tuple[float, str]] = {}
        """Files that could not be moved: until when they are left alone, and why."""
        self._authors: dict[tuple[str, str], Author] = {}
        self._latest = 0.0
        self._scanned_at = -math.inf
        self._queue: list[tuple[float, str]] = []
        """A heap of due times; those that are not current are passed over."""
        self._scheduled: Mapping[str, float] | None = None
        self._scheduled_from = self._scheduled_until = 0.0

    # What the folder holds

    def refresh(self, now: float) -> None:
        """Read what changed. Without a watcher that names every change, look at each file's time stamp."""
        if now < self._latest - 1.0:
            self._reckon_again(now)
        self._latest = now
        try:
            folder = Folder.open(self._root)
        except FileNotFoundError:
            for name in [*self.entries, *self.damaged]:
                self.forget(name)
            return
        with folder:
            changed = self.watcher.changes(os.fstat(folder.descriptor)) if self.watcher else None
            try:
                if changed is None or time.monotonic() - self._scanned_at >= _FULL_SCAN_S:
                    self._scan(folder, now)
                    self._scanned_at = time.monotonic()
                else:
                    self._look_at(folder, changed, now)
            except BaseException:
                self._scanned_at = -math.inf  # the watcher does not name these files again
                raise

    def _look_at(self, folder: Folder, names: Iterable[str], now: float) -> None:
        for name in names:
            try:
                self._compare(folder, name, now, folder.stat(name))
            except FileNotFoundError:
                self.forget(name)

    def _scan(self, folder: Folder, now: float) -> None:
        gone = self.entries.keys() | self.damaged.keys()
        with os.scandir(folder.descriptor) as found:
            for entry in found:
                if not is_job_name(entry.name):
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                gone.discard(entry.name)
                self._compare(folder, entry.name, now, status)
        for name in gone:
            self.forget(name)

    def _compare(self, folder: Folder, name: str, now: float, found: os.stat_result) -> None:
        known = self.entries.get(name) or self.damaged.get(name)
        if known is None or known.is_racy or known.stamp != _stamp(found):
            self._read(folder, name, now)

    def _read(self, folder: Folder, name: str, now: float) -> None:
        known = self.entries.get(name) or self.damaged.get(name)
        declared = self._declaration(name)
        wall = time.time_ns()
        try:
            file = read_queue_file(folder, name)
        except FileNotFoundError:
            self.forget(name)
            return
        except OSError as error:
            # A bad block under one file: the other files are read, and this one is reported.
            self.forget(name)
            reason = f"the disk could not read it: {os_error_text(error, with_path=False)}"
            self.damaged[name] = DamagedFile(0, True, (0, 0, 0), now, reason, declared)
            self.stuck[name] = (now + RETRY_S, reason)
            return
        stamp = _stamp(file.stat)
        is_racy = -_RACY_NS <= wall - file.stat.st_ctime_ns < _RACY_NS
        if isinstance(known, DamagedFile) and known.stamp == stamp and not file.job:
            known.is_racy = is_racy  # the time to give up the file does not move
            return
        self.forget(name)
        if not file.job:
            # A file from the future is not waited for forever.
            modified = min(file.stat.st_mtime_ns / 1e9, now)
            given_up_at = modified + GRACE_S if file.may_become_job else 0.0
            identity = _identity(file.stat)
            self.damaged[name] = DamagedFile(stamp, is_racy, identity, given_up_at, file.reason, declared)
        else:
            if isinstance(known, DamagedFile):
                self.stuck.pop(name, None)
            self._add(name, file.job, file.stat, is_racy=is_racy)

    def _declaration(self, name: str) -> Declaration | None:
        """Return what the file declared last, if it was scheduled; the paths stay withheld while damaged."""
        if name in self.damaged:
            return self.damaged[name].declared
        entry = self.entries.get(name)
        if entry is None or entry.scheduled_for is None or not (entry.is_pending or entry.is_quarantined):
            return None
        return Declaration(entry.slug, entry.paths, entry.scheduled_for)

    def _add(self, name: str, job: Job, found: os.stat_result, *, is_racy: bool) -> None:
        values = dict(job)
        if job.author:
            author = self._authors.setdefault((job.author.name, job.author.email), job.author)
            values["author"] = author
        due = max(self.due_of(job, self._latest), self.stuck.get(name, (0.0, ""))[0])
        heapq.heappush(self._queue, (due, name))
        self.version += 1
        self.entries[name] = Entry(
            stamp=_stamp(found),
            is_racy=is_racy,
            modified=found.st_mtime_ns / 1e9,
            due=due,
            slug=job.slug,
            paths=job.paths,
            created_at=job.created_at,
            scheduled_for=job.scheduled_for,
            is_pending=job.status is Status.PENDING,
            failure=job.failure,
            _values=tuple(values[field] for field in _FIELDS),
        )
        names = (self.pending if job.status is Status.PENDING else self.failed).setdefault(job.slug, [])
        names.append(name)
        if job.scheduled_for is not None:
            self._scheduled = None
        if len(names) > 1:
            self._mark_crowd(job.slug)

    def forget(self, name: str) -> None:
        """Drop a name that was moved or is gone; if it comes back, it is read again."""
        if self.damaged.pop(name, None):
            self._scheduled = None
        entry = self.entries.pop(name, None)
        if entry is None:
            return
        self.version += 1
        self._scheduled = None if entry.scheduled_for is not None else self._scheduled
        by_slug = self.pending if entry.is_pending else self.failed
        by_slug[entry.slug].remove(name)
        if not by_slug[entry.slug]:
            del by_slug[entry.slug]
        if entry.slug in self.crowded:
            self._mark_crowd(entry.slug)

    def _mark_crowd(self, slug: str) -> None:
        if len(self.pending.get(slug, ())) > 1 or len(self.joinable(slug)) > 1:
            self.crowded.add(slug)
        else:
            self.crowded.discard(slug)

    # What follows from it

    def due_of(self, job: Job, now: float) -> float:
        """Return when the job may be claimed; never, if it failed or a dry run has tried it."""
        if job.status is Status.FAILED or (self._dry_run and job.dry_run_at is not None):
            return math.inf
        return job.due_at(now, self._longest_delay)

    def _reckon_again(self, now: float) -> None:
        """Compute due times again, because the clock was set back."""
        for entry in self.entries.values():
            entry.due = self.due_of(entry.job, now)
        self._queue = [(entry.due, name) for name, entry in self.entries.items()]
        heapq.heapify(self._queue)
        self.version += 1

    def leave_alone(self, names: Collection[str], now: float, reason: str) -> None:
        """Do not try again for a while to move these files."""
        for name in names:
            self.stuck[name] = (now + RETRY_S, reason)
            if name in self.entries:
                self.entries[name].due = max(self.entries[name].due, now + RETRY_S)
                heapq.heappush(self._queue, (self.entries[name].due, name))

    def _is_left_alone(self, name: str, now: float) -> bool:
        return name in self.stuck and self.stuck[name][0] > now

    def joinable(self, slug: str) -> list[str]:
        """Return the slug's dead letters that one file can stand for: not those of quarantined files."""
        return [name for name in self.failed.get(slug, ()) if not self.entries[name].is_quarantined]

    def newest_first(self, names: Iterable[str]) -> list[str]:
        """Sort names of jobs of one slug, the newest save first."""
        return sorted(names, key=lambda name: (*self.entries[name].order, name), reverse=True)

    def due(self, now: float) -> list[str]:
        """Return the names of all jobs that are due, by due time."""
        found = []
        while (first := self.next_due()) is not None and first <= now:
            found.append(heapq.heappop(self._queue))
        for item in dict.fromkeys(found):
            heapq.heappush(self._queue, item)
        return list(dict.fromkeys(name for _, name in found))

    def next_due(self) -> float | None:
        """Return when the first waiting job becomes due."""
        while self._queue:
            due, name = self._queue[0]
            entry = self.entries.get(name)
            if entry is not None and entry.due == due:
                return None if math.isinf(due) else due
            heapq.heappop(self._queue)
        return None

    def crowds(self, now: float) -> list[str]:
        """Return the slugs whose saves are to be joined now."""
        return sorted(
            slug
            for slug in self.crowded
            if not any(
                self._is_left_alone(name, now)
                for name in (*self.pending.get(slug, ()), *self.failed.get(slug, ()))
            )
        )

    def given_up_at(self, name: str) -> float:
        """Return when the damaged file is quarantined."""
        return max(self.damaged[name].given_up_at, self.stuck.get(name, (0.0, ""))[0])

    def given_up(self, now: float) -> list[str]:
        """Return the damaged files that nobody has completed in time."""
        return [name for name in self.damaged if self.given_up_at(name) <= now]

    def unusable(self, now: float) -> dict[str, str]:
        """Return the reasons why files are not jobs, or could not be moved."""
        found = {n: f.reason for n, f in self.damaged.items() if f.given_up_at <= now}
        return {printable(name): reason for name, reason in (found | self.stuck_files()).items()}

    def stuck_files(self) -> dict[str, str]:
        """Return the reasons why files could not be moved when that was last tried."""
        for name in self.stuck.keys() - self.entries.keys() - self.damaged.keys():
            del self.stuck[name]
        return {name: reason for name, (_, reason) in self.stuck.items()}

    def scheduled_paths(self, now: float) -> Mapping[str, float]:
        """Return the paths of jobs whose time has not come; computed again only when the jobs change."""
        if self._scheduled is None or not self._scheduled_from <= now < self._scheduled_until:
            paths: dict[str, float] = {}
            self._scheduled_until = math.inf
            for at, declared in self._declared(now):
                self._scheduled_until = min(self._scheduled_until, at)
                for path in declared:
                    paths[path] = min(at, paths.get(path, at))
            self._scheduled, self._scheduled_from = paths, now
        return self._scheduled

    def _declared(self, now: float) -> Iterable[tuple[float, tuple[str, ...]]]:
        for entry in self.entries.values():
            if entry.scheduled_for is None:
                continue
            if entry.is_pending and entry.scheduled_for > now:
                yield entry.scheduled_for, entry.paths
            elif entry.is_quarantined and entry.slug not in self.pending:
                yield max(entry.scheduled_for, now + RETRY_S), entry.paths
        for file in self.damaged.values():
            if file.declared and file.declared.slug not in self.pending:
                yield max(file.declared.scheduled_for, now + RETRY_S), file.declared.paths

    def revivable(self, now: float) -> list[str]:
        """Return the jobs that an environment failure ended, or delays."""
        return [
            name
            for name, entry in self.entries.items()
            if entry.failure is not None
            and is_environment(entry.failure)
            and (not entry.is_pending or (entry.due > now and entry.job.next_attempt_at is not None))
            and not self._is_left_alone(name, now)
        ]


def _stamp(found: os.stat_result) -> int:
    return hash((found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size))


def _identity(found: os.stat_result) -> tuple[int, int, int]:
    return (found.st_ino, found.st_mtime_ns, found.st_size)
