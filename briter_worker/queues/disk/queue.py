"""The queue of one site as a folder of JSON files, as the worker uses it."""

from __future__ import annotations

import contextlib
import errno
import math
from functools import partial
from typing import TYPE_CHECKING

from briter_worker.allowlist import normalized, parents
from briter_worker.errors import is_environment, os_error_text
from briter_worker.events import Quarantined, Superseded
from briter_worker.job import Document, Job, Status, format_time, joined_keys, with_state
from briter_worker.ports import Claim, ClaimResult
from briter_worker.queues.disk.claims import ALONE, CANCEL, marked
from briter_worker.queues.disk.control import DiskControl
from briter_worker.queues.disk.files import JobFile, read_queue_file
from briter_worker.queues.disk.index import GRACE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from briter_worker.errors import Failure


class DiskQueue(DiskControl):
    """Implements `ports.Queue` for one worker per folder, beside any number of producers.

    A crash or a power cut between any two system calls leaves every job waiting, in flight, or harmlessly
    both. An OSError (full disk, read-only file system) leaves the jobs so, too. For one thread at a time.
    """

    # Claims

    def claim(self, now: float) -> ClaimResult:
        """Claim every due job, newest of its slug; being in `.claimed/` is the attempt's durable record."""
        if self._look(now).next_work() > now and not self._claims.has_taken():
            return ClaimResult()
        with self._claims.exclusively():
            self._tidy(now)
            return self._claim(now)

    def _tidy(self, now: float) -> None:
        """Give back what an interrupted operation, or a process that died, had taken."""
        if back := self._claims.names()[1]:
            self._claims.give_back(back)
            self._index.refresh(now)

    def _claim(self, now: float) -> ClaimResult:
        superseded, ready = self._join_saves(now)
        quarantined: list[Quarantined] = []
        slugs = {file.job.slug for file in ready}
        back = []
        for name in self._index.due(now):
            if self._index.entries[name].problem:
                quarantined += self._quarantine(name, now)
                continue
            file = self._take(name, now)
            if file and self._index.due_of(file.job, now) <= now and file.job.slug not in slugs:
                slugs.add(file.job.slug)
                ready.append(file)
            elif file:
                back.append(file.name)
        self._claims.give_back(back)
        ready.sort(key=lambda file: (self._index.due_of(file.job, now), *file.order))
        return ClaimResult(self._begin(ready), tuple(superseded), tuple(quarantined))

    def _begin(self, ready: Sequence[JobFile]) -> tuple[Claim, ...]:
        is_alone = len(ready) == 1
        keys = [self._claims.begin(file) for file in ready]
        if keys:
            self._claims.claimed.sync()
        if is_alone:
            self._claims.claimed.touch(keys[0] + ALONE)
        pairs = zip(keys, (file.job for file in ready), strict=True)
        return tuple(Claim(key, job, job.attempts + 1, is_alone) for key, job in pairs)

    def _join_saves(self, now: float) -> tuple[list[Superseded], list[JobFile]]:
        """Keep the newest save of each slug, with the paths of all; likewise of dead letters.

        Return the jobs that were superseded, and those of the kept ones that are due.
        """
        superseded: list[Superseded] = []
        due: list[JobFile] = []
        back: list[str] = []
        losers: list[str] = []
        for names in self._index.rivals(now):
            rivals = self._take_rivals(names, now)
            if not rivals:
                continue
            newest, *older = sorted(rivals, key=lambda file: file.order, reverse=True)
            has_quiet_time = self._index.quiet.after_save > 0
            keys = joined_keys(newest.job, [each.job for each in older], with_first_save=has_quiet_time)
            if keys:
                document = {**newest.document, **keys, "updatedAt": format_time(now)}
                newest = self._index.with_quiet_time(self._claims.rewrite(newest, document))
            losers += [file.name for file in older]
            superseded += [
                Superseded(job_id=file.job.id, slug=newest.job.slug, superseded_by=newest.job.id)
                for file in older
            ]
            if self._index.due_of(newest.job, now) <= now:
                due.append(newest)
            else:
                back.append(newest.name)
        if losers:
            self._claims.claimed.sync()  # the joined paths are durable before the older files go
            self._claims.drop(losers)
        self._claims.give_back(back)
        return superseded, due

    def _take_rivals(self, names: Sequence[str], now: float) -> list[JobFile]:
        """Take all these saves of a slug, or none: else an older one would be published before the newest."""
        entry = self._index.entries[names[0]]
        taken = [file for name in names if (file := self._take(name, now)) is not None]
        rivals = [f for f in taken if f.job.slug == entry.job.slug and f.job.status is entry.job.status]
        if any(name in self._index.entries for name in names):
            self._index.leave_alone(names, now, "another save of the post cannot be claimed")
            rivals = []
        self._claims.give_back([file.name for file in taken if file not in rivals])
        return rivals

    def _quarantine(self, name: str, now: float) -> list[Quarantined]:
        taken = None
        try:
            if taken := self._claims.take(name):
                file = read_queue_file(self._claims.claimed, taken, name)
                # A producer may have completed the file, or begun a new one, since it was read.
                if isinstance(file, JobFile) or (
                    file.may_become_job and abs(now - file.stat.st_mtime) < GRACE_S
                ):
                    self._claims.give_back([taken])
                else:
                    return [self._claims.quarantine(taken, name, file, self._index.entries[name].job, now)]
            self._index.forget(name)
        except OSError as error:  # this file stays; the others are claimed
            if taken:
                self._claims.give_back([taken])
            is_in_the_way = error.errno in {errno.EEXIST, errno.ENOTDIR}
            reason = f"{error.filename} is not a folder" if is_in_the_way else os_error_text(error)
            self._index.leave_alone([name], now, reason)
        return []

    # After a crash

    def recover(self, now: float) -> Sequence[Claim]:
        """Return the claims that a dead worker left in flight."""
        with self._claims.exclusively():
            self._index.refresh(now)
            with contextlib.suppress(PermissionError):
                self._tidy(now)
                self._claims.remove_partials(now)
            claims, back, gone = [], [], []
            for key in self._claims.names()[0]:
                file = self._claims.read(key)
                if file is None or not file.is_intact or file.job.status is Status.FAILED:
                    back.append(key)
                elif self._has_twin(file):
                    gone.append(key)
                else:
                    is_alone = self._claims.claimed.has(key + ALONE)
                    claims.append(Claim(key, file.job, file.job.attempts + 1, is_alone))
            with contextlib.suppress(PermissionError):
                self._claims.give_back(back)
                self._claims.drop(gone)
            return claims

    def _has_twin(self, file: JobFile) -> bool:
        """Return True if this save waits already: a crash came between giving it back and removing it."""
        for name in self._index.by_slug.get(file.job.slug, ()):
            with contextlib.suppress(FileNotFoundError):
                twin = read_queue_file(self._claims.root, name)
                if isinstance(twin, JobFile) and twin.save == file.save:
                    return True
        return False

    def reclaim(self, claim: Claim, now: float) -> Claim:  # noqa: ARG002 - the port's signature
        """Claim a recovered job again, alone; if it was alone when its worker died, that attempt counts."""
        with self._claims.exclusively():
            file = self._claims.read(claim.key)
            if file is not None:
                if claim.alone:
                    self._claims.rewrite(file, {**file.document, "attempts": claim.attempt})
                self._claims.claimed.touch(claim.key + ALONE)
                self._claims.claimed.sync()
        return claim._replace(attempt=claim.attempt + claim.alone, alone=True)

    # Results

    def acknowledge(self, claims: Sequence[Claim], rejected: Mapping[str, Collection[str]]) -> None:
        """Remove published jobs, and older dead letters of their slugs as far as they are published now."""
        with self._claims.exclusively():
            self._index.refresh(self._clock())
            # The dead letters first: after a crash, the claims are still there to have them removed.
            for claim in claims:
                published = set(claim.job.paths).difference(rejected.get(claim.key, ()))
                folders = {normalized(path) for path in published}
                letters = self._index.failed(claim.job.slug)
                jobs = {name: self._index.entries[name].job for name in letters}
                older = [name for name, job in jobs.items() if job.created_at <= claim.job.created_at]
                self._alter(older, self._clock(), partial(_without, folders))
            self._remove(claim.key for claim in claims)

    def mark_tried(self, claims: Sequence[Claim], now: float) -> None:
        """Put jobs that a dry run has built back as tried; the attempt does not count."""
        with self._claims.exclusively():
            for claim in claims:
                attempts = claim.attempt - 1
                tried = partial(with_state, now=now, status=Status.PENDING, attempts=attempts, dry_run_at=now)
                self._settle(claim, tried)

    def retry_later(self, claim: Claim, failure: Failure, *, at: float, counts: bool = True) -> bool:
        """Put the job back until `at`; return False, and remove the job, if a user cancelled it."""
        attempts = claim.attempt if counts else claim.attempt - 1
        state = partial(with_state, now=self._clock(), status=Status.PENDING, attempts=attempts)
        with self._claims.exclusively():
            return self._settle(claim, partial(state, failure=failure, next_attempt_at=at))

    def dead_letter(self, claim: Claim, failure: Failure) -> bool:
        """Store the job as failed; while another save waits, as pending, for the next claim to join them."""
        now = self._clock()
        with self._claims.exclusively():
            self._index.refresh(now)
            status = Status.PENDING if self._index.pending(claim.job.slug) else Status.FAILED
            state = partial(with_state, now=now, status=status, attempts=claim.attempt, failure=failure)
            return self._settle(claim, state)

    def _settle(self, claim: Claim, change: Callable[[Document], Document]) -> bool:
        if self._claims.claimed.has(claim.key + CANCEL):
            self._remove([claim.key])
            return False
        file = self._claims.read(claim.key)
        if file is None or not file.is_intact:
            self._claims.give_back([claim.key])  # a newer save, perhaps half-written; or gone
        else:
            self._claims.put_back(file, change(file.document))
        return True

    def release(self, claims: Sequence[Claim]) -> Sequence[Claim]:
        """Put jobs back as if they had not been claimed; remove and return the cancelled ones."""
        with self._claims.exclusively():
            cancelled = marked(self._claims.claimed.names(), CANCEL)
            self._claims.give_back(claim.key for claim in claims if claim.key not in cancelled)
            removed = [claim for claim in claims if claim.key in cancelled]
            self._remove(claim.key for claim in removed)
            return removed

    def cancelled(self, claims: Sequence[Claim]) -> Collection[str]:
        """Return the keys of the claims whose cancellation was requested."""
        return marked(self._claims.list_names(), CANCEL) & {claim.key for claim in claims}

    def find_superseded(self, claims: Sequence[Claim], now: float) -> Collection[str]:
        """Return the keys of the claims whose posts have been saved again since, scheduled for later."""
        self._index.refresh(now)
        found = set()
        for claim in claims:
            for name in self._index.pending(claim.job.slug)[:1]:
                newest = self._index.entries[name].job
                is_newer = newest.created_at >= claim.job.created_at
                if is_newer and (newest.scheduled_for or 0.0) > now:
                    found.add(claim.key)
        return found

    def _remove(self, keys: Iterable[str]) -> None:
        intact: list[str] = []
        others: list[str] = []
        for key in keys:
            file = self._claims.read(key)
            (intact if file is not None and file.is_intact else others).append(key)
        self._claims.give_back(others)  # newer saves; what is gone stays gone
        self._claims.drop(intact)

    # The site's other jobs

    def requeue(self, now: float, except_for: Collection[str] = ()) -> Sequence[Job]:
        """Make pending what environment failures ended or delayed; return the revived dead letters."""

        def revive(file: JobFile) -> Document:
            if not is_environment(file.job.failure):
                return file.document
            if file.job.status is Status.FAILED:
                return with_state(file.document, now, status=Status.PENDING, attempts=0)
            return {**file.document, "nextAttemptAt": None, "updatedAt": format_time(now)}

        self._index.refresh(now)
        names = [
            name
            for name, entry in self._index.entries.items()
            if entry.job.failure and not entry.problem and is_environment(entry.job.failure)
            # A retry that is due by itself needs no change.
            if not entry.is_pending or (entry.due > now and entry.job.next_attempt_at is not None)
            if entry.job.id not in except_for
        ]
        if not names:
            return ()
        with self._claims.exclusively():
            return [job for job in self._alter(names, now, revive) if job.failure is None]

    def scheduled_paths(self, now: float) -> Mapping[str, float]:
        """Return the paths that scheduled jobs declare, each with its time; 0 for those of damaged files."""
        return self._look(now).scheduled_paths(now)

    def unsettled_until(self, now: float) -> float | None:
        """Return until when a half-written file may turn out to schedule anything; None if there is none."""
        return self._look(now).unsettled_until(now)

    def next_due(self, now: float) -> float | None:
        """Return when the next pending job is due, or there is something to tidy."""
        at = self._look(now).next_work()
        return None if math.isinf(at) else max(at, now)

    def stuck_files(self) -> dict[str, str]:
        """Return the reasons why files could not be claimed or quarantined when that was last tried."""
        return self._index.stuck_files()


def _without(published: set[str], file: JobFile) -> Document | None:
    """Return the dead letter with what is not published of it; None if nothing is left."""
    spelled = {path: normalized(path) for path in file.job.paths}
    left = [path for path, plain in spelled.items() if published.isdisjoint((plain, *parents(plain)))]
    return {**file.document, "paths": left} if left else None
