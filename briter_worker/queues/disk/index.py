"""The waiting files in memory, so that a poll reads only what changed.

The folder stays the truth: a decision that the index suggests is made again on the file actually claimed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from inotify_simple import INotify, flags  # type: ignore[import-untyped]

from briter_worker.errors import FailureCode, os_error_text
from briter_worker.job import Job, QuietTime, Status, join_paths
from briter_worker.queues.disk.files import BadFile, Folder, is_job_name, printable, read_queue_file

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from pathlib import Path

    from briter_worker.job import Author
    from briter_worker.queues.disk.files import JobFile

PAUSE_FILE = ".paused"
GRACE_S = 2.0
"""Time that a producer without a rename may take to write a file."""
_RETRY_S = 60.0
"""After this time, a file that could not be moved is tried again."""
_SCAN_SHARE = 1 / 200
"""Share of the time for full scans while the kernel reports changes: it does not report other machines'."""
_SHORTEST_SCAN_INTERVAL_S, _LONGEST_SCAN_INTERVAL_S = 1.0, 300.0
_MANY = 1_000
"""A queue is large from this many jobs on."""
_RACY_NS = 50_000_000
"""A file may change once more within its time stamp's resolution."""
_QUARANTINED = frozenset({FailureCode.UNREADABLE.value, FailureCode.MALFORMED.value})
_NOTHING = "null"
_FIELDS = tuple(Job.model_fields)
_TEMPLATE = Job(id="-", slug="-", paths=())
"""A copy that is filled in costs a tenth of a job that is validated once more."""
_EVENTS = (
    *(flags.MODIFY, flags.ATTRIB, flags.CLOSE_WRITE, flags.MOVED_FROM, flags.MOVED_TO),
    *(flags.CREATE, flags.DELETE, flags.DELETE_SELF, flags.MOVE_SELF, flags.ONLYDIR),
)
_STOP_CHECK_S = 0.1


@dataclass(slots=True)
class Entry:
    """A waiting file, small enough to keep a hundred thousand: a job, or with a `problem` what is not one."""

    stamp: int = 0
    """0: the file is read again at the next look."""
    modified: float = 0.0
    due: float = 0.0
    """The time at which a job may be claimed, or a file that is no job is quarantined."""
    problem: str = ""
    slug: str = ""
    """This and the following: of what is not a job, what the file declared last."""
    paths: tuple[str, ...] = ()
    created_at: float = 0.0
    scheduled_for: float | None = None
    is_pending: bool = False
    failure: str | None = None
    values: tuple[Any, ...] = ()

    @property
    def job(self) -> Job:
        """Return the job; the worker itself never asks for most of them."""
        job = copy(_TEMPLATE)
        job.__dict__.update(zip(_FIELDS, self.values, strict=True))
        return job

    @property
    def is_quarantined(self) -> bool:
        """Return True for the failed job that names a quarantined file."""
        return not self.problem and not self.is_pending and self.failure in _QUARANTINED


@dataclass(eq=False)
class Index:
    """The waiting files by name and by slug. For one thread at a time."""

    root: Path
    longest_delay: float
    quiet: QuietTime
    dry_run: bool
    record: ScheduleRecord | None
    watcher: FolderWatcher
    entries: dict[str, Entry] = field(default_factory=dict)
    by_slug: dict[str, tuple[str, ...]] = field(default_factory=dict)
    version: int = 0
    """Counts the changes of what follows from the entries."""
    _changed: dict[str, str] = field(default_factory=dict)
    """The record's entries of files that were read or forgotten since it was written."""
    _blocked: dict[str, float] = field(default_factory=dict)
    """Until when files that could not be moved or read are left alone."""
    _reasons: dict[str, str] = field(default_factory=dict)
    _latest: float = 0.0
    _authors: dict[Author | None, Author | None] = field(default_factory=dict)
    _next_scan: float = -math.inf
    _racy: set[str] = field(default_factory=set)
    """Files to read again at the next look: no time stamp, and perhaps no event, tells a last change."""
    _next_work: tuple[int, float] = (-1, math.inf)

    # What the folder holds

    def refresh(self, now: float) -> None:
        """Read what changed. Without a watcher that names every change, look at each file's time stamp."""
        if now < self._latest - 1.0:  # the clock was set back: retries are due earlier
            self._next_scan = -math.inf
            for entry in self.entries.values():
                entry.stamp = 0
        self._latest = now
        try:
            folder = Folder.open(self.root)
        except FileNotFoundError:
            for name in list(self.entries):
                self.forget(name)
            return
        with folder:
            self.watcher.open()  # before the first scan: later looks read only what changed
            changed = self.watcher.changes(os.fstat(folder.descriptor))
            began = time.monotonic()
            is_scan = changed is None or began >= self._next_scan
            try:
                if is_scan:
                    changed = self.entries.keys() | set(filter(is_job_name, folder.names()))
                racy, self._racy = self._racy, set()
                for name in racy.union(changed or ()):
                    self._look(folder, name)
                self._write_record()
            except BaseException:
                self._next_scan = -math.inf  # the watcher does not name these files again
                raise
            if is_scan:
                wait = max((time.monotonic() - began) / _SCAN_SHARE, _SHORTEST_SCAN_INTERVAL_S)
                self._next_scan = began + min(wait, _LONGEST_SCAN_INTERVAL_S)

    def _look(self, folder: Folder, name: str) -> None:
        """Read the file if it is not the one that was read last."""
        known = self.entries.get(name)
        try:
            if known is not None and known.stamp == _stamp(folder.stat(name)):
                return
        except FileNotFoundError:
            self.forget(name)
            return
        wall = time.time_ns()
        try:
            file = read_queue_file(folder, name)
        except FileNotFoundError:
            self.forget(name)
            return
        except OSError as error:
            # A bad block under one file: the other files are read, and this one is reported.
            reason = f"the disk could not read it: {os_error_text(error, with_path=False)}"
            self._add(name, replace(self._declared(name), problem=reason))
            self.leave_alone([name], self._latest, reason)
            return
        if isinstance(file, BadFile):
            entry = self._damaged_entry(name, file)
        else:
            entry = self._job_entry(self.with_quiet_time(file, known))
            if known and known.problem:
                self._blocked.pop(name, None)
        if not -_RACY_NS <= wall - file.stat.st_ctime_ns < _RACY_NS:
            entry.stamp = _stamp(file.stat)
        else:
            self._racy.add(name)
        self._add(name, entry)

    def with_quiet_time(self, file: JobFile, known: Entry | None = None) -> JobFile:
        """Return the job with the end of its quiet time; `known`: what the file was when it was read last.

        A CMS may write each save over the one before, which counts as the first. A wrong clock never makes a
        post wait for longer than from now.
        """
        job, now = file.job, self._latest
        saved_at = job.created_at if job.created_at <= now else min(file.stat.st_mtime_ns / 1e9, now)
        earlier = []
        if self.quiet.after_save and known and known.is_pending and known.slug == job.slug:
            earlier.append(known.job)
            if known.created_at == job.created_at:
                ends = [each for each in (job.quiet_until, known.job.quiet_until) if each is not None]
                job = job.model_copy(update={"quiet_until": min(ends, default=None)})
        return replace(file, job=self.quiet.apply(job, saved_at, *earlier))

    def _job_entry(self, file: JobFile) -> Entry:
        job = file.job
        author = self._authors.setdefault(job.author, job.author)
        return Entry(
            modified=file.stat.st_mtime_ns / 1e9,
            due=self.due_of(job, self._latest),
            slug=job.slug,
            paths=job.paths,
            created_at=job.created_at,
            scheduled_for=job.scheduled_for,
            is_pending=job.status is Status.PENDING,
            failure=job.failure,
            values=tuple((dict(job) | {"author": author}).values()),
        )

    def _damaged_entry(self, name: str, file: BadFile) -> Entry:
        known, declared = self.entries.get(name), self._declared(name)
        modified = file.stat.st_mtime_ns / 1e9
        # A file from the future is not waited for forever.
        due = min(modified, self._latest) + GRACE_S if file.may_become_job else 0.0
        if known and known.problem and known.modified == modified:
            due = min(due, known.due)
        readable = file.document.get("paths")
        paths = join_paths(declared.paths, [path for path in readable or () if isinstance(path, str)])
        return replace(declared, modified=modified, due=due, problem=file.reason, paths=paths)

    def _declared(self, name: str) -> Entry:
        """Return what a scheduled job declared before its file was damaged: its paths stay withheld."""
        known = self.entries.get(name)
        if known is None:
            return self.record.declared(name) if self.record else Entry()
        if not (known.problem or known.is_pending or known.is_quarantined):
            return Entry()
        return Entry(
            slug=known.slug,
            paths=known.paths,
            created_at=known.created_at,
            scheduled_for=known.scheduled_for,
        )

    def _write_record(self) -> None:
        """Store what scheduled jobs declare, where that changed."""
        if self.record is None:
            return
        lines = {name: _record_of(self.entries.get(name)) for name in self._changed}
        with contextlib.suppress(OSError):  # a full disk stops no publication; the next look writes it
            self.record.update({n: line for n, line in lines.items() if line != self._changed[n]})
            if self.record.appended > max(_MANY, len(self.entries)):
                self.record.replace({n: _record_of(entry) for n, entry in self.entries.items()})
            self._changed = {}

    def _add(self, name: str, entry: Entry) -> None:
        self.forget(name)
        self.entries[name] = entry
        self.version += 1
        if not entry.problem:
            self.by_slug[entry.slug] = (*self.by_slug.get(entry.slug, ()), name)

    def forget(self, name: str) -> None:
        """Drop a name that was moved or is gone; if it comes back, it is read again."""
        entry = self.entries.pop(name, None)
        if self.record is not None:
            self._changed.setdefault(name, _record_of(entry))
        if entry is None:
            return
        self.version += 1
        if not entry.problem:
            left = tuple(each for each in self.by_slug.pop(entry.slug) if each != name)
            if left:
                self.by_slug[entry.slug] = left

    def leave_alone(self, names: Iterable[str], now: float, reason: str) -> None:
        """Do not try again for a while to move these files."""
        self._blocked |= dict.fromkeys(names, now + _RETRY_S)
        self._reasons |= dict.fromkeys(names, reason)
        self.version += 1

    # What follows from it

    def due_of(self, job: Job, now: float) -> float:
        """Return when the job may be claimed; never, if it failed or a dry run has tried it."""
        if job.status is Status.FAILED or (self.dry_run and job.dry_run_at is not None):
            return math.inf
        return job.due_at(now, self.longest_delay)

    def next_work(self) -> float:
        """Return when the next file will be claimed, quarantined or joined with others."""
        if self._next_work[0] != self.version:
            times = [max(entry.due, self._blocked.get(name, 0.0)) for name, entry in self.entries.items()]
            times += [max(self._blocked.get(name, 0.0) for name in names) for names in self._groups()]
            self._next_work = (self.version, min(times, default=math.inf))
        return self._next_work[1]

    def due(self, now: float) -> list[str]:
        """Return the names of all jobs that are due, and of the files to be quarantined."""
        due = (name for name, entry in self.entries.items() if entry.due <= now)
        return [name for name in due if self._blocked.get(name, 0.0) <= now]

    def rivals(self, now: float) -> list[list[str]]:
        """Return the names, by slug, of the jobs that one job is to stand for from now on."""
        until = self._blocked
        return [names for names in self._groups() if all(until.get(name, 0.0) <= now for name in names)]

    def _groups(self) -> list[list[str]]:
        found = []
        for slug in (slug for slug, names in self.by_slug.items() if len(names) > 1):
            letters = [name for name in self.failed(slug) if not self.entries[name].is_quarantined]
            found += [group for group in (self.pending(slug), letters) if len(group) > 1]
        return found

    def pending(self, slug: str) -> list[str]:
        """Return the names of the slug's pending jobs, the newest save first."""
        names = [name for name in self.by_slug.get(slug, ()) if self.entries[name].is_pending]
        saves = [(self.entries[name].created_at, self.entries[name].modified, name) for name in names]
        return [name for _, _, name in sorted(saves, reverse=True)]

    def failed(self, slug: str) -> list[str]:
        """Return the names of the slug's dead letters."""
        return [name for name in self.by_slug.get(slug, ()) if not self.entries[name].is_pending]

    def unusable(self, now: float) -> dict[str, str]:
        """Return the reasons why files are not jobs, or could not be moved."""
        bad = {name: each.problem for name, each in self.entries.items() if each.problem and each.due <= now}
        return {printable(name): reason for name, reason in (bad | self.stuck_files()).items()}

    def stuck_files(self) -> dict[str, str]:
        """Return the reasons why files could not be moved when that was last tried."""
        self._blocked = {name: until for name, until in self._blocked.items() if name in self.entries}
        return {name: self._reasons[name] for name in self._blocked}

    def scheduled_paths(self, now: float) -> Mapping[str, float]:
        """Return the paths of jobs whose time has not come; with 0, those that damaged files declare."""
        paths: dict[str, float] = {}
        for entry in self.entries.values():
            at = entry.scheduled_for or 0.0
            if entry.problem or entry.is_quarantined:
                saves = (self.entries[name] for name in self.pending(entry.slug) if entry.paths)
                if any(save.created_at >= entry.created_at for save in saves):
                    continue
                at = 0.0
            elif not entry.is_pending or at <= now:
                continue
            for path in entry.paths:
                paths[path] = min(at, paths.get(path, at))
        return paths

    def unsettled_until(self, now: float) -> float | None:
        """Return when the last half-written file that was never read whole is quarantined."""
        unread = (e for e in self.entries.values() if e.problem and e.scheduled_for is None)
        return max((e.due for e in unread if e.due > now), default=None)


def _stamp(found: os.stat_result) -> int:
    return hash((found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size))


def _record_of(entry: Entry | None) -> str:
    """Return what a scheduled job declares, or declared last; `_NOTHING` if there is nothing to withhold."""
    if entry is None or entry.scheduled_for is None or not (entry.problem or entry.is_pending):
        return _NOTHING
    return json.dumps([entry.slug, entry.paths, entry.created_at, entry.scheduled_for])


class ScheduleRecord:
    """The paths that scheduled jobs declared last, for when their files are damaged: one line per change.

    The file lies where only the operator writes. It is read when the worker starts, and written when the
    scheduled jobs change.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.appended = 0
        self._known: dict[str, str] | None = {}
        """The file's entries when the worker started, until they are compared with the queue folder."""
        with contextlib.suppress(OSError), path.open(encoding="ascii", errors="replace") as file:
            for line in file:
                name, _, declared = line.rstrip("\n").partition("\t")
                with contextlib.suppress(ValueError):  # a crash cut the line short
                    json.loads(declared)
                    self._known[json.loads(name)] = declared
        self._known = {name: line for name, line in self._known.items() if line != _NOTHING}

    def declared(self, name: str) -> Entry:
        """Return what a file declared last, before this worker started."""
        line = (self._known or {}).get(name)
        if line is None:
            return Entry()
        slug, paths, created_at, scheduled_for = json.loads(line)
        return Entry(slug=slug, paths=tuple(paths), created_at=created_at, scheduled_for=scheduled_for)

    def update(self, lines: Mapping[str, str]) -> None:
        """Store the changed lines durably; at the first call, `lines` has all of them."""
        if self._known is not None:
            if self._known != {name: line for name, line in lines.items() if line != _NOTHING}:
                self.replace(lines)
            self._known = None
        elif lines:
            with self._path.open("a", encoding="ascii") as file:
                # After a line that a crash cut short, a new one begins.
                file.writelines(f"\n{json.dumps(name)}\t{line}" for name, line in lines.items())
                file.flush()
                os.fsync(file.fileno())
            self.appended += len(lines)

    def replace(self, lines: Mapping[str, str]) -> None:
        """Store these lines in place of all earlier ones."""
        found = [f"{json.dumps(name)}\t{line}\n" for name, line in lines.items() if line != _NOTHING]
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        with Folder.open(self._path.parent) as folder:
            folder.replace(self._path.name, "".join(found).encode())
            folder.sync()
        self.appended = 0


class FolderWatcher:
    """Sleeps until the folder changes. Where there is no inotify, the poll has to do. For one thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._inotify: INotify | None = None
        self._watched = (0, 0)
        self._changed: set[str] | None = None
        """The files that changed since `changes` was called; None: any of them."""
        self._is_awake = False

    def wait(self, seconds: float, is_stopped: Callable[[], bool]) -> None:
        """Return after `seconds`, or when the folder changed, or when the worker is to stop."""
        if self._inotify is not None and _identity(self._folder) != self._watched:
            self.close()  # another folder has the name now
        if self._inotify is None:
            self.open()
            self._is_awake = self._inotify is not None  # what was saved before is read first
        deadline = time.monotonic() + seconds
        while not self._is_awake and not is_stopped() and (left := deadline - time.monotonic()) > 0:
            if self._inotify is None:
                time.sleep(min(left, _STOP_CHECK_S))
            else:
                self._read(self._inotify, min(left, _STOP_CHECK_S))
        self._is_awake = False

    def open(self) -> None:
        """Watch the folder from now on, if that is possible."""
        if self._inotify is not None:
            return
        watched = _identity(self._folder)  # before: if the folder is replaced now, the next wait notices
        inotify = None
        try:
            inotify = INotify()
            inotify.add_watch(self._folder, sum(_EVENTS))
        except (OSError, AttributeError):  # another system, no watch left, or no folder yet
            if inotify is not None:
                inotify.close()
        else:
            self._inotify, self._watched, self._changed = inotify, watched, None

    def close(self) -> None:
        """Watch no more, until the next wait."""
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None

    def __del__(self) -> None:
        """Close the watch of a queue that is no longer used."""
        self.close()

    def changes(self, folder: os.stat_result) -> Collection[str] | None:
        """Return the files of the open folder that changed since the last call; None if that is unknown."""
        if (folder.st_dev, folder.st_ino) != self._watched:
            self.close()
        if self._inotify is None:
            return None
        self._read(self._inotify, 0)
        changed, self._changed = self._changed, set()
        return changed

    def _read(self, inotify: INotify, seconds: float) -> None:
        """Note what changed; wait at most this time for a change."""
        events = list(inotify.read(timeout=round(seconds * 1000)))
        if any(not event.name for event in events):  # too many events, or the folder itself changed
            self._changed = None
            self._is_awake = True
        # A half-written file, under a name that is no job's, wakes nobody.
        jobs = {event.name for event in events if is_job_name(event.name)}
        self._is_awake = self._is_awake or bool(jobs) or any(each.name == PAUSE_FILE for each in events)
        if self._changed is not None:
            self._changed |= jobs


def _identity(folder: Path) -> tuple[int, int]:
    try:
        found = folder.stat()
    except OSError:
        return (0, 0)
    return (found.st_dev, found.st_ino)
