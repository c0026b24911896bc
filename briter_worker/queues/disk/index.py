"""The waiting files in memory, so that a poll reads only what changed.

The folder stays the truth: a decision that the index suggests is made again on the file actually claimed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inotify_simple import INotify, flags  # type: ignore[import-untyped]

from briter_worker.errors import FailureCode, os_error_text
from briter_worker.job import (
    Author,
    Document,
    Job,
    QuietTime,
    State,
    Status,
    embargo_fault,
    format_time,
    join_paths,
    winner_index,
)
from briter_worker.ports import ListedJob
from briter_worker.queues.disk.files import BadFile, Folder, JobFile, is_job_name, printable, read_queue_file

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from briter_worker.queues.disk.waited import WaitedJobs

PAUSE_FILE = ".paused"
GRACE_S = 2.0
"""Time that a producer without a rename may take to write a file."""
_RETRY_S = 60.0
"""After this time, a file that could not be moved is tried again."""
_SCAN_SHARE = 1 / 200
"""Share of the time for full scans while the kernel reports changes: it does not report other machines'."""
_RACY_NS = 50_000_000
"""A file may change once more within its time stamp's resolution."""
_QUARANTINED = frozenset({FailureCode.UNREADABLE.value, FailureCode.MALFORMED.value})
_NOTHING = Job.model_construct(id="", slug="", paths=())
"""The declaration of a file of which nothing is known."""
_RECORDED = ("slug", "paths", "created_at", "scheduled_for")
_INTERNALS = {"__pydantic_fields_set__": set[str](), "__pydantic_extra__": None, "__pydantic_private__": None}
_EVENTS = (
    *(flags.MODIFY, flags.ATTRIB, flags.CLOSE_WRITE, flags.MOVED_FROM, flags.MOVED_TO),
    *(flags.CREATE, flags.DELETE, flags.DELETE_SELF, flags.MOVE_SELF, flags.ONLYDIR),
)
_STOP_CHECK_S = 0.1


@dataclass(slots=True)
class Entry:
    """A waiting file: a job, or with a `problem` what is not one."""

    job: Job
    """Of what is not a job: what the file declared last."""
    stamp: int = 0
    """0: the file is read again at the next look."""
    modified: float = 0.0
    due: float = 0.0
    """The time at which a job may be claimed, or a file that is no job is quarantined."""
    problem: str = ""

    @property
    def is_pending(self) -> bool:
        """Return True for a job that did not fail."""
        return not self.problem and self.job.status is Status.PENDING

    @property
    def is_quarantined(self) -> bool:
        """Return True for the failed job that names a quarantined file."""
        return not self.problem and not self.is_pending and self.job.failure in _QUARANTINED


@dataclass(eq=False)
class Index:
    """The waiting files by name and by slug. For one thread at a time."""

    root: Path
    longest_delay: float
    quiet: QuietTime
    dry_run: bool
    record: Path | None
    """The file for what scheduled jobs declared last, for when their files are damaged."""
    watcher: FolderWatcher
    waited: WaitedJobs
    entries: dict[str, Entry] = field(default_factory=dict)
    by_slug: dict[str, tuple[str, ...]] = field(default_factory=dict)
    version: int = 0
    """Counts the changes of what follows from the entries."""
    _recorded: dict[str, Any] | None = None
    """The record, while one look needs it."""
    _first_saves: dict[str, float] | None = None
    """Times of the first saves of posts in their quiet time, by slug, as an earlier process knew them.

    Read before the first look; empty after it. A CMS may have written over the files since.
    """
    _stored_saves: tuple[int, dict[str, float] | None] = (-1, None)
    """The version whose first saves are stored, and these."""
    _is_record_old: bool = True
    _stuck: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Until when files that could not be moved or read are left alone, and why."""
    _latest: float = 0.0
    _authors: dict[Author | None, Author | None] = field(default_factory=dict)
    _next_scan: float = -math.inf
    _next_work: tuple[int, float] = (-1, math.inf)
    _listed: tuple[int, float, list[ListedJob]] = (-1, 0.0, [])
    """The version, until when the states hold, and the rows."""

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
            # Watched before the first scan: later looks read only what changed.
            changed = self.watcher.changes(folder.descriptor)
            began = time.monotonic()
            is_scan = changed is None or began >= self._next_scan
            self._read_first_saves()
            try:
                if is_scan:
                    changed = self.entries.keys() | set(filter(is_job_name, folder.names()))
                for name in changed or ():
                    self._look(folder, name)
                self._write_record()
                self._write_first_saves()
            except BaseException:
                self._next_scan = -math.inf  # the watcher does not name these files again
                raise
            if is_scan:
                self._next_scan = began + (time.monotonic() - began) / _SCAN_SHARE

    def _look(self, folder: Folder, name: str) -> None:
        """Read the file if it is not the one that was read last."""
        known = self.entries.get(name)
        wall = time.time_ns()
        try:
            if known is not None and known.stamp == _stamp(folder.stat(name)):
                return
            file = self.read(folder, name)
        except FileNotFoundError:
            self.forget(name)
            return
        except OSError as error:
            # A bad block under one file: the other files are read, and this one is reported.
            reason = f"the disk could not read it: {os_error_text(error, with_path=False)}"
            self._add(name, Entry(self._declared(name), problem=reason))
            self.leave_alone([name], self._latest, reason)
            return
        if isinstance(file, BadFile):
            declared = self._declared(name)
            # A file from the future is not waited for forever.
            due = min(file.stat.st_mtime, self._latest) + GRACE_S if file.may_become_job else 0.0
            named = file.document.get("paths", ())
            job = declared.model_copy(update={"paths": join_paths(declared.paths, named)})
            entry = Entry(job, due=due, problem=file.reason)
        else:
            job = self.with_quiet_time(file, known).job
            entry = Entry(self._compacted(job), due=self.due_of(job, self._latest))
            if known and known.problem:
                self._stuck.pop(name, None)
        entry.modified = file.stat.st_mtime_ns / 1e9
        if not -_RACY_NS <= wall - file.stat.st_ctime_ns < _RACY_NS:
            entry.stamp = _stamp(file.stat)
        self._add(name, entry)

    def read(self, folder: Folder, name: str, original: str | None = None) -> JobFile | BadFile:
        """Read a waiting file; what is refused because of a misspelt key is no job. Raises OSError."""
        file = read_queue_file(folder, name, original)
        fault = self.fault_of(file) if isinstance(file, JobFile) else ""
        if isinstance(file, JobFile) and fault:
            return BadFile(file.stat, fault, FailureCode.MALFORMED, file.document)
        return file

    def fault_of(self, file: JobFile) -> str:
        """Return why the time of a waiting job would be overlooked; empty for one that waited before."""
        if file.job.status is Status.FAILED:
            return ""
        fault = embargo_fault(file.document, self._latest)
        return "" if fault and self.waited.has(file) else fault

    def with_quiet_time(self, file: JobFile, known: Entry | None = None) -> JobFile:
        """Return the job with the end of its quiet time; `known`: what the file was when it was read last.

        A CMS may write each save over the one before, which counts as the first. A wrong clock never makes a
        post wait for longer than from now.
        """
        job, now = file.job, self._latest
        saved_at = job.created_at
        if saved_at > now:
            saved_at = min(file.stat.st_mtime_ns / 1e9, now)
        earlier: list[Job] = []
        overwritten = self._overwritten_save(job, known)
        if overwritten is not None:
            earlier.append(overwritten)
            if overwritten.created_at == job.created_at:
                ends = [each for each in (job.quiet_until, overwritten.quiet_until) if each is not None]
                job = job.model_copy(update={"quiet_until": min(ends, default=None)})
        if first := (self._first_saves or {}).get(job.slug):
            job = job.model_copy(update={"first_saved_at": min(first, job.first_saved_at or first)})
        return replace(file, job=self.quiet.apply(job, saved_at, *earlier))

    def _overwritten_save(self, job: Job, known: Entry | None) -> Job | None:
        """Return the waiting save of the same post that the file had before, if posts have a quiet time."""
        if known is None or not self.quiet.after_save:
            return None
        was_waiting = known.is_pending or known.problem
        if was_waiting and known.job.slug == job.slug:
            return known.job
        return None

    def _compacted(self, job: Job) -> Job:
        """Return the job in half the memory: its attributes share their keys with those of the others."""
        compact = Job.__new__(Job)
        author = self._authors.setdefault(job.author, job.author)
        for name, value in {**_INTERNALS, **dict(job), "author": author}.items():
            object.__setattr__(compact, name, value)
        return compact

    def _declared(self, name: str) -> Job:
        """Return what a scheduled job declared before its file was damaged: its paths stay withheld."""
        if known := self.entries.get(name):
            return known.job if known.problem or known.is_pending or known.is_quarantined else _NOTHING
        if self._recorded is None:
            self._recorded = {}
            with contextlib.suppress(ValueError):
                self._recorded = json.loads(self._read_record())
        facts = self._recorded.get(name)
        return _NOTHING.model_copy(update=dict(zip(_RECORDED, facts, strict=True))) if facts else _NOTHING

    def _write_record(self) -> None:
        """Store what scheduled jobs declare, where that changed."""
        self._recorded = None
        if self.record is None or not self._is_record_old:
            return
        scheduled = {
            name: [getattr(entry.job, key) for key in _RECORDED]
            for name, entry in self.entries.items()
            if entry.job.scheduled_for is not None and (entry.problem or entry.is_pending)
        }
        record = json.dumps(scheduled, sort_keys=True)
        with contextlib.suppress(OSError):  # a full disk stops no publication; the next look writes it
            if record != self._read_record():
                _replace_durably(self.record, record)
            self._is_record_old = False

    def _read_first_saves(self) -> None:
        if self._first_saves is not None:
            return
        self._first_saves = {}
        if self._saves_file is None or not self.quiet.after_save:
            return
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            found = json.loads(self._saves_file.read_text("ascii"))
            self._first_saves = {str(slug): float(at) for slug, at in found.items()}

    def _write_first_saves(self) -> None:
        """Store when the posts in their quiet time were saved first, where that changed."""
        self._first_saves = {}
        if self._saves_file is None or not self.quiet.after_save or self._stored_saves[0] == self.version:
            return
        saves: dict[str, float] = {}
        for entry in self.entries.values():
            slug, first = entry.job.slug, entry.job.first_saved_at
            if slug and first is not None and (entry.is_pending or entry.problem):
                saves[slug] = min(first, saves.get(slug, first))
        with contextlib.suppress(OSError):  # as for the record
            if saves != self._stored_saves[1] and (saves or self._saves_file.exists()):
                _replace_durably(self._saves_file, json.dumps(saves, sort_keys=True))
            self._stored_saves = (self.version, saves)

    @property
    def _saves_file(self) -> Path | None:
        return self.record.with_name("first-saves") if self.record is not None else None

    def _read_record(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            return self.record.read_text("ascii") if self.record is not None else ""
        return ""

    def _add(self, name: str, entry: Entry) -> None:
        self.forget(name)
        self.entries[name] = entry
        self._note_change(entry)
        if not entry.problem:
            self.by_slug[entry.job.slug] = (*self.by_slug.get(entry.job.slug, ()), name)

    def forget(self, name: str) -> None:
        """Drop a name that was moved or is gone; if it comes back, it is read again."""
        entry = self.entries.pop(name, None)
        if entry is None:
            return
        self._note_change(entry)
        if not entry.problem:
            left = tuple(each for each in self.by_slug.pop(entry.job.slug) if each != name)
            if left:
                self.by_slug[entry.job.slug] = left

    def _note_change(self, entry: Entry) -> None:
        self.version += 1
        self._is_record_old = self._is_record_old or entry.job.scheduled_for is not None

    def leave_alone(self, names: Iterable[str], now: float, reason: str) -> None:
        """Do not try again for a while to move these files."""
        self._stuck |= dict.fromkeys(names, (now + _RETRY_S, reason))
        self.version += 1

    # What follows from it

    def due_of(self, job: Job, now: float) -> float:
        """Return when the job may be claimed; never, if it failed or a dry run has tried it."""
        if job.status is Status.FAILED or (self.dry_run and job.dry_run_at is not None):
            return math.inf
        return job.due_at(now, self.longest_delay)

    def _blocked_until(self, *names: str) -> float:
        return max(self._stuck.get(name, (0.0, ""))[0] for name in names)

    def next_work(self) -> float:
        """Return when the next file will be claimed, quarantined or joined with others."""
        if self._next_work[0] != self.version:
            times = [max(entry.due, self._blocked_until(name)) for name, entry in self.entries.items()]
            times += [self._blocked_until(*names) for names in self._groups()]
            self._next_work = (self.version, min(times, default=math.inf))
        return self._next_work[1]

    def due(self, now: float) -> list[str]:
        """Return the names of all jobs that are due, and of the files to be quarantined."""
        due = (name for name, entry in self.entries.items() if entry.due <= now)
        return [name for name in due if self._blocked_until(name) <= now]

    def rivals(self, now: float) -> list[list[str]]:
        """Return the names, by slug, of the jobs that one job is to stand for from now on."""
        return [names for names in self._groups() if self._blocked_until(*names) <= now]

    def _groups(self) -> list[list[str]]:
        found = []
        for slug in (slug for slug, names in self.by_slug.items() if len(names) > 1):
            letters = [name for name in self.failed(slug) if not self.entries[name].is_quarantined]
            found += [group for group in (self.pending(slug), letters) if len(group) > 1]
        return found

    def pending(self, slug: str) -> list[str]:
        """Return the names of the slug's pending jobs: first the save that stands for all, then by age."""
        names = [name for name in self.by_slug.get(slug, ()) if self.entries[name].is_pending]
        if len(names) > 1:
            saves = [(self.entries[name].job.created_at, self.entries[name].modified, name) for name in names]
            names = [name for _, _, name in sorted(saves, reverse=True)]
            names.insert(0, names.pop(winner_index([self.entries[name].job for name in names])))
        return names

    def failed(self, slug: str, until: float = math.inf) -> list[str]:
        """Return the names of the slug's dead letters that were saved until then."""
        found = ((name, self.entries[name]) for name in self.by_slug.get(slug, ()))
        return [name for name, each in found if not each.is_pending and each.job.created_at <= until]

    def unusable(self, now: float) -> dict[str, str]:
        """Return the reasons why files are not jobs, or could not be moved."""
        bad = {name: each.problem for name, each in self.entries.items() if each.problem and each.due <= now}
        return {printable(name): reason for name, reason in (bad | self.stuck_files()).items()}

    def stuck_files(self) -> dict[str, str]:
        """Return the reasons why files could not be moved when that was last tried."""
        return {name: reason for name, (_, reason) in self._stuck.items() if name in self.entries}

    def scheduled_paths(self, now: float) -> Mapping[str, float]:
        """Return the paths of jobs whose time has not come; with 0, those that damaged files declare."""
        paths: dict[str, float] = {}
        for entry in self.entries.values():
            job, at = entry.job, entry.job.scheduled_for or 0.0
            if entry.problem or entry.is_quarantined:
                saves = (self.entries[name].job for name in self.pending(job.slug) if job.paths)
                if any(save.created_at >= job.created_at and save.made_by is None for save in saves):
                    continue
                at = 0.0
            elif at <= now or not entry.is_pending:
                continue
            for path in job.paths:
                paths[path] = min(at, paths.get(path, at))
        return paths

    def rows(self, now: float) -> list[ListedJob]:
        """List the jobs: waiting by due time, then dead letters. Sorted only if a file or a state changed."""
        version, until, rows = self._listed
        if version != self.version or now >= until:
            slugs = list(self.by_slug)
            waiting = [self._waiting_row(names, now) for slug in slugs if (names := self.pending(slug))]
            waiting.sort(key=lambda row: (row.job.due_at(0.0, math.inf), row.job.created_at, row.where))
            letters = [(name, self.entries[name].job) for slug in slugs for name in self.failed(slug)]
            failed = [list_job(f"{self.root}/{name}", job, State.FAILED) for name, job in letters]
            failed.sort(key=lambda row: (row.job.created_at, row.where))
            jobs = (row.job for row in waiting)
            times = (at for job in jobs for at in (job.scheduled_for, job.next_attempt_at, job.quiet_until))
            until = min((at for at in times if at and at > now), default=math.inf)
            rows = [*waiting, *failed]
            self._listed = (self.version, until, rows)
        return rows

    def _waiting_row(self, names: Sequence[str], now: float) -> ListedJob:
        """List the newest save of a slug, with the paths of the older saves that it will supersede."""
        job, *older = (self.entries[name].job for name in names)
        if older:
            paths = join_paths(job.paths, *(each.paths for each in older))
            job = self.quiet.apply(job.model_copy(update={"paths": paths}), job.created_at, *older)
        return list_job(f"{self.root}/{names[0]}", job, job.state(now))


def save_of(job: Job) -> tuple[str, str, float, Status]:
    """Return what tells a save of a job from another one."""
    return (job.id, job.slug, job.created_at, job.status)


def list_job(where: str, job: Job, state: State) -> ListedJob:
    """Return the job for commands and pages, which read its document only if they show it."""
    return ListedJob(job, state, partial(_read_document, where, job), where)


def _replace_durably(path: Path, text: str) -> None:
    """Replace a file atomically, with its folder made if absent, so that the text survives a power cut."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with Folder.open(path.parent) as folder:
        folder.replace(path.name, text.encode())
        folder.sync()


def _read_document(where: str, job: Job) -> Document:
    """Return the document of a listed job as it is now; or as it was, if it is gone."""
    path = Path(where)
    document = job.model_dump(mode="json", by_alias=True)
    with contextlib.suppress(OSError), Folder.open(path.parent) as folder:
        file = read_queue_file(folder, path.name)
        if isinstance(file, JobFile) and file.job.slug == job.slug:
            document = file.document
    if job.quiet_until is not None:
        document = {**document, "quietUntil": format_time(job.quiet_until)}
    return {"id": job.id, **document, "paths": list(job.paths), "attempts": job.attempts}


def _stamp(found: os.stat_result) -> int:
    return hash((found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size))


class FolderWatcher:
    """Sleeps until the folder changes. Where there is no inotify, the poll has to do. For one thread."""

    def __init__(self) -> None:
        self._inotify: INotify | None = None
        self._watched = (0, 0)
        self._changed: set[str] | None = None
        """The files that changed since `changes` was called; None: any of them."""
        self.is_steered = False
        """A pause began or ended since its reader set this to False: `wait` returns at once."""

    def wait(self, seconds: float, is_stopped: Callable[[], bool]) -> None:
        """Return after `seconds`, or when the folder changed, or when the worker is to stop."""
        deadline = time.monotonic() + seconds
        while not is_stopped() and (left := deadline - time.monotonic()) > 0:
            if self._inotify is None:
                time.sleep(min(left, _STOP_CHECK_S))
            elif self._read(self._inotify, min(left, _STOP_CHECK_S)):
                return

    def watch(self, folder: int) -> None:
        """Watch this open folder from now on."""
        found = os.fstat(folder)
        if (found.st_dev, found.st_ino) != self._watched:
            self.close()
            self._watched = (found.st_dev, found.st_ino)
        if self._inotify is None:
            try:
                self._inotify, self._changed = INotify(), None
                self._inotify.add_watch(f"/proc/self/fd/{folder}", sum(_EVENTS))
            except (OSError, AttributeError):  # another system, or no watch left
                self.close()

    def changes(self, folder: int) -> Collection[str] | None:
        """Return the files of this open folder that changed since the last call; None if that is unknown."""
        self.watch(folder)
        if self._inotify is None:
            return None
        self._read(self._inotify, 0)
        changed, self._changed = self._changed, set()
        return changed

    def close(self) -> None:
        """Watch no more, until the next call of `changes`."""
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None

    def __del__(self) -> None:
        """Close the watch of a queue that is no longer used."""
        self.close()

    def _read(self, inotify: INotify, seconds: float) -> bool:
        """Note what changed; wait at most this time. Return True if the worker has something to look at."""
        events = list(inotify.read(timeout=round(seconds * 1000)))
        # A half-written file, under a name that is no job's, wakes nobody.
        jobs = {event.name for event in events if is_job_name(event.name)}
        is_lost = any(not event.name for event in events)  # too many events, or the folder itself changed
        self._changed = None if is_lost or self._changed is None else self._changed | jobs
        self.is_steered = self.is_steered or any(each.name == PAUSE_FILE for each in events)
        return is_lost or bool(jobs) or self.is_steered
