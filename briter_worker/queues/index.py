"""What waits in the queue folder, in memory, so that a poll reads only what changed.

The folder itself stays the truth: whatever is decided from the index is decided again from the file that
was actually taken.
"""

from __future__ import annotations

import heapq
import math
import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from briter_worker.errors import Failure, Kind
from briter_worker.job import Job, Status
from briter_worker.queues.files import is_job_name
from briter_worker.queues.sighting import Trouble, look

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

GRACE = 2.0
"""How long a writer that does not rename may take to write a file."""
RETRY_TROUBLE = 60.0
"""What could not be put aside is tried again after this long."""
_RACY_NS = 50_000_000
_NO_FOLDER = (-1, -1, -1)
_FULL_SCAN = 60.0
_FULL_SCAN_TOLD = 300.0
"""Where the kernel tells of every write; still some, as it may forget when too much happens at once."""

Signature = tuple[int, int, int, int]


@dataclass(slots=True)
class Seen:
    """One name, as it was when its file was read last."""

    signature: Signature
    modified: float
    racy: bool
    job: Job | None = None
    trouble: Trouble | None = None
    since: float = 0.0
    """When trouble was first seen like this: a file from the future must not be waited for forever."""
    not_before: float = 0.0
    due: float | None = None
    """When it is due, while it is in the heap."""

    @property
    def order(self) -> tuple[float, float]:
        """Of two saves of a slug, the greater is the newer."""
        return (self.job.created_at if self.job else 0.0, self.modified)

    def is_still(self, found: os.stat_result) -> bool:
        """Whether nobody wrote since; moving a file changes its ctime only."""
        inode, modified, _, size = self.signature
        return (found.st_ino, found.st_mtime_ns, found.st_size) == (inode, modified, size)


class Index:
    """The waiting jobs by slug and by due time. One thread at a time."""

    def __init__(self, root: Path, longest_delay: float) -> None:
        self._root = root
        self._longest_delay = longest_delay
        self.seen: dict[str, Seen] = {}
        self.pending: dict[str, list[str]] = {}
        self.failed: dict[str, list[str]] = {}
        self.crowded: set[str] = set()
        """Slugs with more than one pending job, or more than one dead letter that may be joined."""
        self.revivable: set[str] = set()
        self.troubled: set[str] = set()
        self._heap: list[tuple[float, float, str]] = []
        self._postponed: dict[str, float] = {}
        self._latest = 0.0
        self._folder = _NO_FOLDER
        self._scanned: float | None = None
        self._again = True
        self._changes: Callable[[tuple[int, int]], Collection[str] | None] | None = None
        self._is_told = False
        self._held: frozenset[str] | None = None
        self._held_from = self._held_until = 0.0

    def notice(self) -> None:
        """Something may have changed: the next refresh looks at every file's state."""
        self._again = True

    def rely_on(self, changes: Callable[[tuple[int, int]], Collection[str] | None] | None) -> None:
        """From now on, this names every file that changes, of a folder given by its device and inode.

        It gives None where it cannot tell, and is None itself where nothing can.
        """
        self._changes = changes
        self._again = True

    def refresh(self, now: float) -> None:
        """Know what the folder holds. Nothing is read, nor even listed, while it cannot have changed.

        Where the kernel tells what has changed, only that is looked at; and every file once in five minutes.
        Elsewhere the folder is listed when its time stamp has moved. If that is as young as the clock's
        resolution, it is listed again, as git does with its index: a second change in that moment would not
        move the stamp. A file written in place does not move it either, so all are looked at once a minute.
        """
        if now < self._latest - 1.0:
            self._rebuild(now)
        self._latest = now
        try:
            status = self._root.stat()
        except FileNotFoundError:
            for name in list(self.seen):
                self.forget(name)
            self._folder = _NO_FOLDER
            return
        folder = (status.st_dev, status.st_ino, status.st_mtime_ns)
        changed = None
        if self._changes is not None:
            # Asked after the folder: what has moved its stamp is among them.
            changed = self._changes(folder[:2])
            self._again = self._again or changed is None
        self._is_told = changed is not None
        longest = _FULL_SCAN_TOLD if self._is_told else _FULL_SCAN
        fresh = self._scanned is not None and time.monotonic() - self._scanned < longest
        try:
            if fresh and not self._again and (self._is_told or folder == self._folder):
                self._look_at(changed or (), now)
            else:
                self._again = not self._is_told and _is_racy(status.st_mtime_ns, time.time_ns())
                self._scan(now)
                self._scanned = time.monotonic()
        except BaseException:
            self._again = True  # what was not looked at is not named again
            raise
        self._folder = folder

    def _look_at(self, names: Collection[str], now: float) -> None:
        for name in names:
            try:
                self._compare(name, now, os.lstat(f"{self._root}/{name}"))
            except FileNotFoundError:
                self.forget(name)

    def _compare(self, name: str, now: float, found: os.stat_result) -> None:
        known = self.seen.get(name)
        if known is None or known.racy or known.signature != _signature(found):
            self._read(name, now, found)

    def _scan(self, now: float) -> None:
        gone = set(self.seen)
        with os.scandir(self._root) as entries:
            for entry in entries:
                name = entry.name
                if not is_job_name(name):
                    continue
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                gone.discard(name)
                self._compare(name, now, found)
        for name in gone:
            self.forget(name)

    def _read(self, name: str, now: float, found: os.stat_result) -> None:
        known = self.seen.get(name)
        wall = time.time_ns()
        try:
            sighting = look(f"{self._root}/{name}", name, found)
        except FileNotFoundError:
            self.forget(name)
            return
        except OSError as error:
            # A bad block under one file: the others go on, and this one is shown as stuck.
            self.forget(name)
            trouble = Trouble(
                Failure.UNREADABLE, f"the disk could not read it: {error.strerror}", passing=True
            )
            self._add(
                name, Seen((0, 0, 0, 0), now, racy=True, trouble=trouble, not_before=now + RETRY_TROUBLE)
            )
            return
        if sighting.trouble is None:
            self._postponed.pop(name, None)
        signature = _signature(sighting.stat)
        racy = _is_racy(sighting.stat.st_ctime_ns, wall)
        self._again = self._again or (racy and not self._is_told)
        if known is not None and known.signature == signature and known.trouble and sighting.trouble:
            known.racy = racy
            return
        self.forget(name)
        seen = Seen(signature, sighting.stat.st_mtime_ns / 1e9, racy, sighting.job, since=now)
        if sighting.trouble is not None:
            # What it says of the document is read again when it is put aside.
            seen.trouble = replace(sighting.trouble, document=None)
            seen.not_before = self._postponed.get(name, 0.0)
        self._add(name, seen)

    def _add(self, name: str, seen: Seen) -> None:
        self.seen[name] = seen
        job = seen.job
        if job is None:
            self.troubled.add(name)
            return
        names = (self.pending if job.status is Status.PENDING else self.failed).setdefault(job.slug, [])
        names.append(name)
        if job.scheduled_for is not None:
            self._held = None
        if job.status is Status.PENDING:
            seen.due = job.due_at(self._latest, self._longest_delay)
            heapq.heappush(self._heap, (seen.due, job.created_at, name))
        elif is_revivable(job):
            self.revivable.add(name)
        if len(names) > 1:
            self._mark(job.slug)

    def _mark(self, slug: str) -> None:
        if len(self.pending.get(slug, ())) > 1 or len(self.joinable(slug)) > 1:
            self.crowded.add(slug)
        else:
            self.crowded.discard(slug)

    def forget(self, name: str) -> None:
        """`name` is taken or gone; should it come back, it is read anew."""
        seen = self.seen.pop(name, None)
        if seen is None:
            return
        self.troubled.discard(name)
        self.revivable.discard(name)
        if seen.job is not None:
            if seen.job.scheduled_for is not None:
                self._held = None
            slug = seen.job.slug
            places = self.pending if seen.job.status is Status.PENDING else self.failed
            names = places[slug]
            names.remove(name)
            if not names:
                del places[slug]
            if slug in self.crowded:
                self._mark(slug)

    def joinable(self, slug: str) -> list[str]:
        """The slug's dead letters that one file could stand for: not those that name a file put aside."""
        return [name for name in self.failed.get(slug, ()) if not _names_a_file(self.job(name))]

    def newest_first(self, names: list[str]) -> list[str]:
        """Names of jobs of one slug, the newest save first."""
        return sorted(names, key=lambda name: (*self.seen[name].order, name), reverse=True)

    def take_due(self, now: float) -> list[str]:
        """Every name that is due, earliest first; each is given out once, until it is seen anew."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            key = heapq.heappop(self._heap)
            if self._is_current(key):
                self.seen[key[2]].due = None
                due.append(key[2])
        return due

    def next_due(self) -> float | None:
        """When the first waiting job becomes due."""
        while self._heap and not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def restore(self, now: float) -> None:
        """What `take_due` gave out was not dealt with: it is given out again."""
        self._rebuild(now)
        self._again = True

    def ripe(self, now: float) -> list[str]:
        """What has been no job for long enough to be put aside."""
        return [name for name in self.troubled if self.ripe_at(name, now) <= now]

    def ripe_at(self, name: str, now: float) -> float:
        """When it may be put aside."""
        return max(self._given_up_at(name, now), self.seen[name].not_before)

    def _given_up_at(self, name: str, now: float) -> float:
        """When its writer has had its time."""
        seen = self.seen[name]
        if seen.trouble is None or not seen.trouble.passing:
            return 0.0
        seen.since = min(seen.since, now)
        return min(seen.modified, seen.since) + GRACE

    def postpone(self, name: str, until: float) -> None:
        """It could not be put aside: not again before then."""
        self._postponed[name] = until
        if name in self.seen:
            self.seen[name].not_before = until

    def stuck(self, now: float) -> dict[str, str]:
        """What has been no job for longer than a writer may take, by name, with what is wrong with it."""
        late = [name for name in self.troubled if self._given_up_at(name, now) <= now]
        troubles = {name: self.seen[name].trouble for name in late}
        return {name: trouble.reason for name, trouble in troubles.items() if trouble is not None}

    def held_paths(self, now: float) -> frozenset[str]:
        """What the pending jobs declare whose time has not come. Found anew only when these are others."""
        if self._held is None or not self._held_from <= now < self._held_until:
            pending = (self.job(name) for names in self.pending.values() for name in names)
            jobs = [job for job in pending if (job.scheduled_for or 0.0) > now]
            self._held = frozenset(path for job in jobs for path in job.paths)
            self._held_from = now
            self._held_until = min((job.scheduled_for or 0.0 for job in jobs), default=math.inf)
        return self._held

    def is_held_newer(self, job: Job, now: float) -> bool:
        """Whether the post of this job has been saved again since, and that save is on hold."""
        others = (self.job(name) for name in self.pending.get(job.slug, ()))
        return any(o.created_at > job.created_at and (o.scheduled_for or 0.0) > now for o in others)

    def job(self, name: str) -> Job:
        """The job of a name that is filed under a slug."""
        job = self.seen[name].job
        assert job is not None  # noqa: S101 - only jobs are filed under a slug
        return job

    def _is_current(self, key: tuple[float, float, str]) -> bool:
        seen = self.seen.get(key[2])
        return seen is not None and seen.due == key[0]

    def _rebuild(self, now: float) -> None:
        self._heap = []
        for name, seen in self.seen.items():
            job = seen.job
            if job is not None and job.status is Status.PENDING:
                seen.due = job.due_at(now, self._longest_delay)
                self._heap.append((seen.due, job.created_at, name))
        heapq.heapify(self._heap)


def is_revivable(job: Job) -> bool:
    """Whether the site's surroundings caused this dead letter."""
    return job.status is Status.FAILED and kind_of(job) is Kind.ENVIRONMENT


def kind_of(job: Job) -> Kind | None:
    """The class of its failure; None for a word that this version does not know."""
    try:
        return Failure(job.failure).kind if job.failure else None
    except ValueError:
        return None


def _names_a_file(job: Job) -> bool:
    return job.failure in {Failure.UNREADABLE, Failure.MALFORMED}


def _signature(found: os.stat_result) -> Signature:
    return (found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size)


def _is_racy(stamp_ns: int, looked_ns: int) -> bool:
    return -_RACY_NS <= looked_ns - stamp_ns < _RACY_NS
