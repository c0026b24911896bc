"""The queue of one site as a folder of JSON files, as the worker uses it."""

from __future__ import annotations

import contextlib
import errno
import time
from dataclasses import replace
from functools import partial
from posixpath import normpath
from typing import TYPE_CHECKING

from briter_worker.errors import is_environment, os_error_text
from briter_worker.job import Document, Job, Status, format_time, join_paths, with_state
from briter_worker.ports import Claim, ClaimResult, SupersededJob
from briter_worker.queues.disk.claims import ALONE, CANCEL, TakenJob, is_claim_of, marked
from briter_worker.queues.disk.control import DiskControl
from briter_worker.queues.disk.index import read_queue_file
from briter_worker.queues.disk.watch import FolderWatcher

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from briter_worker.errors import Failure
    from briter_worker.ports import QuarantinedFile

_ONE_FILE_ONLY = frozenset({errno.EPERM, errno.EBUSY, errno.EXDEV})
"""A rename fails so because of that file: it is immutable, or mounted."""


class DiskQueue(DiskControl):
    """Implements `ports.Queue` for one worker per folder, beside any number of producers.

    A crash or a power cut between any two system calls leaves every job waiting, in flight, or harmlessly
    both. An OSError (full disk, read-only file system) leaves the jobs so, too.
    """

    def __init__(
        self,
        root: Path,
        quarantine: Path,
        *,
        longest_delay: float,
        dry_run: bool,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(root, quarantine, longest_delay=longest_delay, dry_run=dry_run, clock=clock)
        self._is_interrupted = False
        """A change failed half-way: the next claim gives back what was moved."""
        self._begun: list[str] = []

    def watch(self) -> FolderWatcher:
        """Return a watcher of the folder; from now on only files that it names are read."""
        self._index.watcher = FolderWatcher(self.root)
        return self._index.watcher

    # Claims

    def claim(self, now: float) -> ClaimResult:
        """Claim every due job, newest of its slug; being in `.claimed/` is the attempt's durable record."""
        with self._guard:
            self._index.refresh(now)
            if not self._has_work(now):
                return ClaimResult()
            with self._claims.exclusively():
                self._undo_interrupted(now)
                self._is_interrupted = True
                found = self._claim(now)
                self._is_interrupted, self._begun = False, []
                return found

    def _undo_interrupted(self, now: float) -> None:
        """Give back what a claim that failed half-way, or a process that died, had moved."""
        if self._begun:
            self._claims.give_back(self._begun)
            self._begun = []
            self._index.refresh(now)
        self._give_back_taken(now)

    def _has_work(self, now: float) -> bool:
        index = self._index
        return bool(self._is_interrupted or index.due(now) or index.crowds(now) or index.given_up(now))

    def _claim(self, now: float) -> ClaimResult:
        found = [self._quarantine_file(name, now) for name in self._index.given_up(now)]
        superseded, ready = self._join_saves(now)
        slugs = {taken.job.slug for taken in ready}
        back = []
        for name in self._index.due(now):
            taken = self._take(name, now)
            if taken is None:
                continue
            if self._is_due(taken, now) and taken.job.slug not in slugs:
                slugs.add(taken.job.slug)
                ready.append(taken)
            else:
                back.append(taken.name)
        self._claims.give_back(back)
        ready.sort(key=lambda taken: (self._index.due_of(taken.job, now), *taken.order))
        return ClaimResult(
            claims=self._begin(ready),
            superseded=tuple(superseded),
            quarantined=tuple(file for file in found if file is not None),
        )

    def _begin(self, ready: Sequence[TakenJob]) -> tuple[Claim, ...]:
        claims: list[Claim] = []
        is_alone = len(ready) == 1
        for taken in ready:
            begun = self._claims.begin(taken)
            self._begun.append(begun.name)
            claims.append(Claim(begun.name, taken.job, taken.job.attempts + 1, is_alone))
        if is_alone:
            self._claims.mark(claims[0].key, ALONE)
        if claims:
            self._claims.claimed.sync()
        return tuple(claims)

    def _take(self, name: str, now: float) -> TakenJob | None:
        """Take the job in a waiting file; what is not a job (any more) stays, and what cannot be moved."""
        try:
            taken = self._claims.take(name)
        except OSError as error:
            if error.errno not in _ONE_FILE_ONLY:
                raise
            self._index.leave_alone([name], now, f"it cannot be claimed: {os_error_text(error)}")
            return None
        self._index.forget(name)
        if taken is None:
            return None
        job = self._claims.read(taken)
        if job is None:
            self._claims.give_back([taken])
        return job

    def _is_due(self, taken: TakenJob, now: float) -> bool:
        return self._index.due_of(taken.job, now) <= now

    def _join_saves(self, now: float) -> tuple[list[SupersededJob], list[TakenJob]]:
        """Keep the newest save of each slug, with the paths of all; likewise of dead letters.

        Return the jobs that were superseded, and those of the kept ones that are due.
        """
        superseded: list[SupersededJob] = []
        due: list[TakenJob] = []
        back: list[str] = []
        losers: list[str] = []
        for slug in self._index.crowds(now):
            for status, names in (
                (Status.PENDING, list(self._index.pending.get(slug, ()))),
                (Status.FAILED, self._index.joinable(slug)),
            ):
                rivals, others = self._take_rivals(slug, status, names, now) if len(names) > 1 else ([], [])
                back += others
                if not rivals:
                    continue
                winner, *older = sorted(rivals, key=lambda taken: taken.order, reverse=True)
                winner = self._with_paths(winner, join_paths(winner.job.paths, *(t.job.paths for t in older)))
                losers += [taken.name for taken in older]
                superseded += [SupersededJob(taken.job.id, slug, winner.job.id) for taken in older]
                if self._is_due(winner, now):
                    due.append(winner)
                else:
                    back.append(winner.name)
        if losers:
            self._claims.claimed.sync()  # the joined paths are durable before the older files go
            self._claims.drop(losers)
        self._claims.give_back(back)
        return superseded, due

    def _take_rivals(
        self, slug: str, status: Status, names: Sequence[str], now: float
    ) -> tuple[list[TakenJob], list[str]]:
        """Take all saves of a slug, or none: else an older one would be published before the newest."""
        taken = [job for name in names if (job := self._take(name, now)) is not None]
        if any(name in self._index.entries for name in names):
            self._index.leave_alone(names, now, "another save of the post cannot be claimed")
            return [], [job.name for job in taken]
        rivals = [job for job in taken if job.job.slug == slug and job.job.status is status]
        return rivals, [job.name for job in taken if job not in rivals]

    def _with_paths(self, taken: TakenJob, paths: tuple[str, ...]) -> TakenJob:
        if set(paths) == set(taken.job.paths):
            return taken
        document = {**taken.document, "paths": list(paths)}
        document.pop("dryRunAt", None)
        return self._claims.rewrite(taken, document)

    def _quarantine_file(self, name: str, now: float) -> QuarantinedFile | None:
        damaged = self._index.damaged[name]
        try:
            taken = self._claims.take(name)
        except OSError as error:  # this file stays; the others are claimed
            self._index.leave_alone([name], now, os_error_text(error))
            return None
        if taken is None:
            self._index.forget(name)
            return None
        try:
            file = self._claims.look(taken)
            # A producer may have completed the file, or begun a new one, since it was read.
            if not file.job and (not file.may_become_job or damaged.is_unchanged(file.stat)):
                found = self._quarantine.put(taken, name, file, damaged.declared, now)
                self._index.forget(name)
                return found
            self._claims.give_back([taken])
        except OSError as error:
            self._claims.give_back([taken])
            self._index.leave_alone([name], now, _quarantine_problem(error))
        return None

    # After a crash

    def recover(self, now: float) -> Sequence[Claim]:
        """Return the claims that a dead worker left in flight."""
        with self._claims.opened() as folder:
            if folder is None:
                return ()
        with self._exclusively():
            self._index.refresh(now)
            with contextlib.suppress(PermissionError):
                self._undo_interrupted(now)
            keys, _ = self._claims.names()
            claims, back, gone = [], [], []
            for key in keys:
                taken = self._claims.read(key)
                if taken is None or not self._is_intact(taken) or taken.job.status is Status.FAILED:
                    back.append(key)
                elif self._has_twin(taken):
                    gone.append(key)
                else:
                    is_alone = self._claims.is_marked(key, ALONE)
                    claims.append(Claim(key, taken.job, taken.job.attempts + 1, is_alone))
            with contextlib.suppress(PermissionError):
                self._claims.give_back(back)
                self._claims.drop(gone)
            return claims

    def reclaim(self, claim: Claim, now: float) -> Claim:  # noqa: ARG002 - the port's signature
        """Claim a recovered job again, alone; if it was alone when its worker died, that attempt counts."""
        with self._exclusively():
            taken = self._claims.read(claim.key)
            if taken is not None:
                if claim.alone:
                    self._claims.rewrite(taken, {**taken.document, "attempts": claim.attempt})
                self._claims.mark(claim.key, ALONE)
                self._claims.claimed.sync()
        return replace(claim, attempt=claim.attempt + claim.alone, alone=True)

    def _has_twin(self, taken: TakenJob) -> bool:
        """Return True if this save waits already: a crash came between giving it back and removing it."""
        slug = taken.job.slug
        for name in (*self._index.pending.get(slug, ()), *self._index.failed.get(slug, ())):
            with contextlib.suppress(FileNotFoundError):
                file = read_queue_file(self._claims.root, name)
                if file.job:
                    twin = TakenJob(name, file.job, file.document, file.stat)
                    if twin.save == taken.save:
                        return True
        return False

    def _is_intact(self, taken: TakenJob) -> bool:
        """Return False if a producer that had the file open has written a newer save into it."""
        return is_claim_of(taken.name, taken.document, taken.stat)

    # Results

    def acknowledge(self, claims: Sequence[Claim], rejected: Mapping[str, Collection[str]]) -> None:
        """Remove published jobs, and older dead letters of their slugs as far as they are published now."""
        with self._exclusively():
            self._index.refresh(self._clock())
            # The dead letters first: after a crash, the claims are still there to have them removed.
            for claim in claims:
                published = set(claim.job.paths).difference(rejected.get(claim.key, ()))
                self._prune_dead_letters(claim.job, {normpath(path) for path in published})
            self._remove(claim.key for claim in claims)

    def _prune_dead_letters(self, job: Job, published: Collection[str]) -> None:
        names = self._index.failed.get(job.slug, ())
        gone, back = [], []
        for name in [name for name in names if self._index.entries[name].created_at <= job.created_at]:
            taken = self._take(name, self._clock())
            if taken is None:
                continue
            left = [path for path in taken.job.paths if not _is_within(normpath(path), published)]
            is_older = taken.job.status is Status.FAILED and taken.job.created_at <= job.created_at
            if is_older and taken.job.slug == job.slug and not left:
                gone.append(taken.name)
            else:
                if is_older and taken.job.slug == job.slug and len(left) < len(taken.job.paths):
                    self._with_paths(taken, tuple(left))
                back.append(taken.name)
        if gone or back:
            self._is_interrupted = True  # until all is back in its place
            self._claims.give_back(back)
            if gone:
                self._claims.drop(gone)
            self._is_interrupted = False

    def mark_tried(self, claims: Sequence[Claim], now: float) -> None:
        """Put jobs that a dry run has built back as tried; the attempt does not count."""
        with self._exclusively():
            for claim in claims:
                attempts = claim.attempt - 1
                tried = partial(with_state, now=now, status=Status.PENDING, attempts=attempts, dry_run_at=now)
                self._settle(claim, tried)

    def retry_later(self, claim: Claim, failure: Failure, *, at: float, counts: bool = True) -> bool:
        """Put the job back until `at`; return False, and remove the job, if somebody cancelled it."""
        attempts = claim.attempt if counts else claim.attempt - 1
        with self._exclusively():
            return self._settle(
                claim,
                lambda document: with_state(
                    document,
                    self._clock(),
                    status=Status.PENDING,
                    attempts=attempts,
                    failure=failure,
                    next_attempt_at=at,
                ),
            )

    def dead_letter(self, claim: Claim, failure: Failure) -> bool:
        """Store the job as failed; while another save waits, as pending, for the next claim to join them."""
        with self._exclusively():
            self._index.refresh(self._clock())
            status = Status.PENDING if self._index.pending.get(claim.job.slug) else Status.FAILED
            return self._settle(
                claim,
                lambda document: with_state(
                    document, self._clock(), status=status, attempts=claim.attempt, failure=failure
                ),
            )

    def _settle(self, claim: Claim, change: Callable[[Document], Document]) -> bool:
        if self._claims.is_marked(claim.key, CANCEL):
            self._remove([claim.key])
            return False
        taken = self._claims.read(claim.key)
        if taken is None or not self._is_intact(taken):
            self._claims.give_back([claim.key])  # a newer save, perhaps half-written; or gone
        else:
            self._claims.put_back(taken, change(taken.document))
        return True

    def release(self, claims: Sequence[Claim]) -> Sequence[Claim]:
        """Put jobs back as if they had not been claimed; remove and return the cancelled ones."""
        with self._exclusively():
            cancelled = marked(self._claims.claimed, CANCEL)
            self._claims.give_back(claim.key for claim in claims if claim.key not in cancelled)
            removed = [claim for claim in claims if claim.key in cancelled]
            self._remove(claim.key for claim in removed)
            return removed

    def cancelled(self, claims: Sequence[Claim]) -> Collection[str]:
        """Return the keys of the claims whose cancellation was requested."""
        with self._claims.opened() as folder:
            found = marked(folder, CANCEL) if folder else set()
        return found & {claim.key for claim in claims}

    def drop(self, claims: Sequence[Claim]) -> None:
        """Remove cancelled jobs."""
        with self._exclusively():
            self._remove(claim.key for claim in claims)

    def _remove(self, keys: Iterable[str]) -> None:
        intact: list[str] = []
        others: list[str] = []
        for key in keys:
            taken = self._claims.read(key)
            (intact if taken is not None and self._is_intact(taken) else others).append(key)
        self._claims.give_back(others)  # newer saves; what is gone stays gone
        self._claims.drop(intact)

    # The site's other jobs

    def requeue(self, now: float) -> Sequence[Job]:
        """Make pending what environment failures ended or delayed; return the revived dead letters."""
        with self._guard:
            self._index.refresh(now)
            names = self._index.revivable(now)
        if not names:
            return ()
        revived: list[Job] = []
        back: list[str] = []
        with self._exclusively():
            for name in sorted(names):
                taken = self._take(name, now)
                if taken is None:
                    continue
                back.append(taken.name)
                if not is_environment(taken.job.failure):
                    continue
                if taken.job.status is Status.FAILED:
                    document = with_state(taken.document, now, status=Status.PENDING, attempts=0)
                    revived.append(self._claims.rewrite(taken, document).job)
                else:
                    due = {"nextAttemptAt": None, "updatedAt": format_time(now)}
                    self._claims.rewrite(taken, {**taken.document, **due})
            self._claims.give_back(back)
        return revived

    def scheduled_paths(self, now: float) -> Mapping[str, float]:
        """Return the paths that scheduled jobs declare, each with the time it is scheduled for.

        The paths of a scheduled job whose file was damaged since stay withheld.
        """
        with self._guard:
            self._index.refresh(now)
            return self._index.scheduled_paths(now)

    def next_due(self, now: float) -> float | None:
        """Return when the next pending job is due, or there is something to tidy."""
        with self._guard:
            self._index.refresh(now)
            times = [self._index.given_up_at(name) for name in self._index.damaged]
            times += [now] if self._index.crowds(now) else []
            due = self._index.next_due()
            return min([*times, due] if due is not None else times, default=None)

    def stuck_files(self) -> dict[str, str]:
        """Return the reasons why files could not be claimed or quarantined when that was last tried."""
        with self._guard:
            return self._index.stuck_files()


def _is_within(path: str, folders: Collection[str]) -> bool:
    """Return True if the path, or a folder above it, is among the folders."""
    return path in folders or any(path[:i] in folders for i, c in enumerate(path) if c == "/")


def _quarantine_problem(error: OSError) -> str:
    if error.errno in {errno.EEXIST, errno.ENOTDIR}:
        return f"{error.filename} is not a folder"
    return os_error_text(error)
