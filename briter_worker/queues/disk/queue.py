"""The queue of one site as a folder of JSON files: for its worker, and for commands and pages beside it."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import time
from functools import partial
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from briter_worker.allowlist import normalized, parents
from briter_worker.errors import DeclinedError, Failure, is_environment, is_hurried, one_line, os_error_text
from briter_worker.events import DeclaredSave, Quarantined, Superseded
from briter_worker.job import (
    MAX_REWRITTEN_BYTES,
    NO_QUIET_TIME,
    State,
    Status,
    format_time,
    in_part,
    joined_keys,
    winner_index,
    with_state,
)
from briter_worker.ports import Cancellation, Claim, ClaimResult, ListedJob, Pause, Result
from briter_worker.queues import selection
from briter_worker.queues.disk.claims import ALONE, CANCEL, ClaimFolder, marked
from briter_worker.queues.disk.files import Folder, JobFile, is_job_name, read_queue_file
from briter_worker.queues.disk.index import GRACE_S, PAUSE_FILE, FolderWatcher, Index, list_job, save_of
from briter_worker.spelling import near_misses

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from briter_worker.job import Document, Job, QuietTime
    from briter_worker.ports import Leftover, Outcome

_ONE_FILE_ONLY = frozenset({errno.EPERM, errno.EBUSY, errno.EXDEV})
"""A rename fails so because of that file: it is immutable, or mounted."""
MAX_JOINED_BYTES = MAX_REWRITTEN_BYTES // 3
"""Saves of this size in all, written with one path on a line, have less than MAX_REWRITTEN_BYTES."""
_PAUSE = TypeAdapter(Pause)


class DiskQueue:
    """Implements `ports.Queue` for one worker per folder, beside any number of producers and commands.

    Everything is decided on the file actually taken. A crash or a power cut between any two system calls
    leaves every job waiting, in flight, or harmlessly both. An OSError (full disk, read-only file system)
    leaves the jobs so, too. For one thread at a time.
    """

    def __init__(
        self,
        root: Path,
        quarantine: Path,
        *,
        longest_delay: float,
        quiet: QuietTime = NO_QUIET_TIME,
        dry_run: bool,
        record: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.root = root
        self._clock = clock
        self._quarantine_path = quarantine
        self._claims = ClaimFolder(root, quarantine)
        self.watcher = FolderWatcher()
        """While it watches, only files that it names are read."""
        self._index = Index(root, longest_delay, quiet, dry_run, record, self.watcher, self._claims.waited)

    # Views

    def jobs(self, now: float) -> Sequence[ListedJob]:
        """Return every job once: in flight, then waiting by due time, then dead letters."""
        # A job that moves from one folder to the other meanwhile is found in one of these looks.
        before = self._claims.read_all()
        others = self._look(now).rows(now)
        claimed = []
        for file in (before | self._claims.read_all()).values():
            job = file.job.model_copy(update={"attempts": file.job.attempts + 1})
            claimed.append(list_job(f"{self.root}/.claimed/{file.name}", job, State.CLAIMED))
        seen = {save_of(row.job) for row in claimed}
        return [*claimed, *(row for row in others if save_of(row.job) not in seen)] if seen else others

    def find(self, wanted: str, now: float) -> Sequence[ListedJob]:
        """Return the job of this id, else all jobs of this slug."""
        return selection.select_matching(self.jobs(now), wanted)

    def dead_letters(self, slug: str) -> Sequence[Job]:
        """Return the dead letters of this slug, as they were at the last look."""
        return [self._index.entries[name].job for name in self._index.failed(slug)]

    def quarantined(self) -> Sequence[Path]:
        """Return the quarantined files, oldest first."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(self._quarantine_path.iterdir())
        return []

    def unusable_files(self, now: float) -> dict[str, str]:
        """Return the reason for each file that is not a job, or that could not be moved."""
        return self._look(now).unusable(now)

    def stuck_files(self) -> dict[str, str]:
        """Return the reasons why files could not be claimed or quarantined when that was last tried."""
        return self._index.stuck_files()

    def scheduled_paths(self, now: float) -> Mapping[str, float]:
        """Return the paths that scheduled jobs declare, each with its time; 0 for those of damaged files."""
        return self._look(now).scheduled_paths(now)

    def next_due(self, now: float) -> float | None:
        """Return when the next pending job is due, or there is something to tidy."""
        at = self._look(now).next_work()
        return None if math.isinf(at) else max(at, now)

    def _look(self, now: float) -> Index:
        """Return what the folder holds now."""
        self._index.refresh(now)
        return self._index

    # Commands

    def retry(self, wanted: str, now: float) -> Sequence[Job]:
        """Make dead letters and retrying jobs due at once."""
        return self._retry(lambda rows: selection.select_to_retry(rows, wanted), now)

    def retry_all(self, now: float) -> Sequence[Job]:
        """Make every dead letter that a retry can help due at once."""
        return self._retry(selection.select_retryable, now)

    def _retry(self, select: Callable[[Sequence[ListedJob]], list[ListedJob]], now: float) -> list[Job]:
        again = partial(with_state, now=now, status=Status.PENDING, attempts=0)
        with self._claims.exclusively():
            names = [_name(row) for row in select(self._list(now))]
            return self._alter(names, now, lambda file: again(file.document))

    def publish_now(self, wanted: str, now: float) -> Sequence[Job]:
        """Make jobs due at once that wait for a time; their attempts still count."""
        waits_no_more = {"scheduledFor": None, "nextAttemptAt": None, "updatedAt": format_time(now)}
        if self._index.quiet.after_save:
            waits_no_more["quietUntil"] = format_time(now)
        with self._claims.exclusively():
            rows = selection.select_to_publish_now(self._list(now), wanted)
            self._free_withheld([row.job for row in rows], now)
            names = [_name(row) for row in rows]
            return self._alter(names, now, lambda file: {**file.document, **waits_no_more})

    def cancel(self, wanted: str, now: float) -> Cancellation:
        """Remove jobs from the queue, with the older saves they stand for; mark those in flight."""
        with self._claims.exclusively():
            rows = selection.select_existing(self._list(now), wanted)
            in_flight = [row for row in rows if row.state is State.CLAIMED]
            for row in in_flight:
                self._claims.claimed.touch(_name(row) + CANCEL)
            self._claims.claimed.sync()
            waiting = [row for row in rows if row.state is not State.CLAIMED]
            removed = self._remove_files(
                [name for row in waiting for name in self._files_listed_as(row)], now
            )
            self._free_withheld(removed, now)
        if waiting and not removed:
            raise DeclinedError(
                f"{wanted!r} has just been saved again or claimed by the worker", "look again"
            )
        shown = {row.job.id for row in waiting}
        return Cancellation(
            tuple(job for job in removed if job.id in shown), tuple(row.job for row in in_flight)
        )

    def remove(self, rows: Sequence[ListedJob], now: float) -> None:
        """Remove waiting jobs and dead letters that are stored elsewhere by now; newer saves stay."""
        with self._claims.exclusively():
            self._index.refresh(now)
            self._remove_files([name for row in rows for name in self._files_of(row)], now)

    def join_saves(self, now: float) -> None:
        """Keep one waiting job of each slug, as the next claim would."""
        with self._claims.exclusively():
            self._index.refresh(now)
            self._tidy(now)
            _, due = self._join_saves(now)
            self._claims.give_back(file.name for file in due)

    def _free_withheld(self, jobs: Iterable[Job], now: float) -> None:
        """Make the jobs due that waited for files of these jobs, which are not scheduled any more."""
        paths = selection.paths_scheduled_later(jobs, now)
        if not paths:
            return
        waiting = [name for name, entry in self._index.entries.items() if entry.is_pending]
        names = [name for name in waiting if selection.is_withheld_for(self._index.entries[name].job, paths)]
        self._alter(names, now, lambda file: {**file.document, "nextAttemptAt": None})

    def _list(self, now: float) -> Sequence[ListedJob]:
        """List the jobs, those included that a dead process had taken out of the queue folder."""
        self._claims.tidy()
        return self.jobs(now)

    def _remove_files(self, names: Sequence[str], now: float) -> list[Job]:
        return self._alter(names, now, lambda _: None)

    def _files_listed_as(self, row: ListedJob) -> Sequence[str]:
        """Return the files that a row stands for which was listed under the same lock."""
        return [_name(row)] if row.state is State.FAILED else self._index.pending(row.job.slug)

    def _files_of(self, row: ListedJob) -> list[str]:
        """Return the files shown as this row. A later save is newer, or declares what the row did not."""
        jobs = {name: self._index.entries[name].job for name in self._index.pending(row.job.slug)}
        if row.state is State.FAILED:
            jobs = {name: row.job for name in self._index.failed(row.job.slug) if name == _name(row)}
        newest, declared = row.job.created_at, set(row.job.paths)
        return [n for n, job in jobs.items() if job.created_at <= newest and declared.issuperset(job.paths)]

    # The pause

    def active_pause(self, now: float) -> Pause | None:
        """Return the pause, if there is one. Damage, too: only `resume`, or its time, ends one."""
        self.watcher.is_steered = False
        try:
            with Folder.open(self.root) as root:
                self.watcher.watch(root.descriptor)  # first: a resume after this look wakes the worker
                pause = _PAUSE.validate_json(root.read(PAUSE_FILE)[0] or b"")
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            return Pause(since=0.0, until=None, reason=f"the file {PAUSE_FILE} cannot be read")
        return pause._replace(reason=one_line(pause.reason)) if pause.is_active(now) else None

    def pause(self, now: float, *, until: float | None = None, reason: str = "") -> Pause:
        """Stop claiming until a time, or until `resume`; durable when this returns."""
        pause = Pause(now, until, one_line(reason))
        with self._claims.exclusively():
            self._claims.root.replace(PAUSE_FILE, _PAUSE.dump_json(pause))
            self._claims.root.sync()
        return pause

    def resume(self) -> bool:
        """End the pause. Return True if there was one."""
        with contextlib.suppress(FileNotFoundError), Folder.open(self.root) as root:
            was_paused = root.has(PAUSE_FILE)
            root.unlink(PAUSE_FILE)
            root.sync()
            return was_paused
        return False

    # Claims

    def claim(self, now: float) -> ClaimResult:
        """Claim every due job, newest of its slug; being in `.claimed/` is the attempt's durable record."""
        if self._look(now).next_work() > now and not self._claims.has_taken():
            return ClaimResult()
        with self._claims.exclusively():
            self._tidy(now)
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

    def _tidy(self, now: float) -> None:
        if self._claims.tidy():
            self._index.refresh(now)

    def _begin(self, ready: Sequence[JobFile]) -> tuple[Claim, ...]:
        is_alone = len(ready) == 1
        claims = [_claim(self._claims.begin(file), file, is_alone=is_alone) for file in ready]
        if claims:
            self._claims.claimed.sync()
        if is_alone:
            self._claims.claimed.touch(claims[0].key + ALONE)
        return tuple(claims)

    def _join_saves(self, now: float) -> tuple[list[Superseded], list[JobFile]]:
        """Keep the newest save of each slug, with the paths of all; likewise of dead letters.

        Return the jobs that were superseded, and those of the kept ones that are due.
        """
        superseded: list[Superseded] = []
        due: list[JobFile] = []
        back: list[str] = []
        losers: list[str] = []
        for names in self._index.rivals(now):
            older = sorted(self._take_rivals(names, now), key=lambda file: file.order, reverse=True)
            if not older:
                continue
            newest = older.pop(winner_index([file.job for file in older]))
            excess = self._take_off_excess(newest, older)
            back += [file.name for file in excess]
            names_left = [file.name.removeprefix(".") for file in excess]
            self._index.leave_alone(
                names_left, now, "it waits for the newer saves of the post: they are large"
            )
            has_quiet_time = self._index.quiet.after_save > 0
            if keys := joined_keys(newest.job, [f.job for f in older], with_first_save=has_quiet_time):
                document = {**newest.document, **keys, "updatedAt": format_time(now)}
                newest = self._index.with_quiet_time(self._claims.rewrite(newest, document))
            if self._index.due_of(newest.job, now) <= now:
                due.append(newest)
            else:
                back.append(newest.name)
            losers += [file.name for file in older]
            for file in older:
                save = DeclaredSave.of(file.job)
                by = newest.job.id
                superseded.append(
                    Superseded(job_id=file.job.id, slug=newest.job.slug, superseded_by=by, save=save)
                )
        if losers:
            self._claims.claimed.sync()  # the joined paths are durable before the older files go
            self._claims.drop(losers)
        self._claims.give_back(back)
        return superseded, due

    def _take_off_excess(self, newest: JobFile, older: list[JobFile]) -> list[JobFile]:
        """Remove the oldest saves that would make the newest larger than a job file may be; return them.

        They are joined, or published, after the newest one.
        """
        excess: list[JobFile] = []
        size = newest.stat.st_size + sum(file.stat.st_size for file in older)
        while older and size > MAX_JOINED_BYTES:
            excess.append(older.pop())
            size -= excess[-1].stat.st_size
        return excess

    def _take_rivals(self, names: Sequence[str], now: float) -> list[JobFile]:
        """Take all these saves of a slug, or none: else an older one would be published before the newest."""
        entry = self._index.entries[names[0]]
        taken = [file for name in names if (file := self._take(name, now)) is not None]
        rivals = [f for f in taken if f.job.slug == entry.job.slug and f.job.status is entry.job.status]
        if any(name in self._index.entries for name in names):
            self._index.leave_alone(names, now, "another save of the post cannot be claimed")
            rivals = []
        self._claims.give_back(file.name for file in taken if file not in rivals)
        return rivals

    def _quarantine(self, name: str, now: float) -> list[Quarantined]:
        taken = None
        try:
            if taken := self._claims.take(name):
                file = self._index.read(self._claims.claimed, taken, name)
                # A producer may have completed the file, or begun a new one, since it was read.
                is_young = abs(now - file.stat.st_mtime) < GRACE_S
                if not isinstance(file, JobFile) and not (file.may_become_job and is_young):
                    return [self._claims.quarantine(taken, name, file, self._index.entries[name].job, now)]
                self._claims.give_back([taken])
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
            names = self._claims.claimed.names()
            for key in filter(is_job_name, names):
                file = self._claims.read(key)
                if file is None or not file.is_intact or file.job.status is Status.FAILED:
                    back.append(key)
                elif self._has_twin(file):
                    gone.append(key)
                else:
                    claims.append(_claim(key, file, is_alone=key + ALONE in names))
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
            index = self._look(self._clock())
            # The dead letters first: after a crash, the claims are still there to have them removed.
            for claim in claims:
                self._shorten_letters(index, claim, rejected.get(claim.key, ()))
            self._remove(claim.key for claim in claims)

    def _shorten_letters(self, index: Index, claim: Claim, left: Collection[str]) -> None:
        """Remove what the claim has published, all but `left`, from older dead letters of its slug."""
        published = {normalized(path) for path in claim.job.paths if path not in left}
        older = index.failed(claim.job.slug, claim.job.created_at)
        if claim.job.made_by is not None:  # what a damaged file declared stays withheld
            older = [name for name in older if not index.entries[name].is_quarantined]
        self._alter(older, self._clock(), partial(_without, published))

    def acknowledge_part(self, claim: Claim, outcome: Outcome, left: Leftover, *, at: float) -> bool:
        """Put the job back until `at`, for the paths that are left; False if it was cancelled."""
        now, commit = self._clock(), outcome.commit or ""
        attempts = claim.attempt if left.retry_at is None else claim.attempt - 1
        state = partial(with_state, now=now, status=Status.PENDING, attempts=attempts)

        def change(document: Document) -> Document:
            return in_part(state(document, failure=left.failure, next_attempt_at=at), left.paths, commit)

        with self._claims.exclusively():
            self._shorten_letters(self._look(now), claim, {*left.paths, *outcome.rejected_paths})
            return self._settle(claim, change)

    def mark_tried(self, claims: Sequence[Claim], now: float) -> None:
        """Put jobs that a dry run has built back as tried; the attempt does not count."""
        tried = partial(with_state, now=now, status=Status.PENDING, dry_run_at=now)
        with self._claims.exclusively():
            for claim in claims:
                self._settle(claim, partial(tried, attempts=claim.attempt - 1))

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
            is_joined = self._look(now).pending(claim.job.slug)
            status = Status.PENDING if is_joined else Status.FAILED
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

    def withdrawn(self, claims: Sequence[Claim], now: float) -> Mapping[str, Result]:
        """Return the claims that were cancelled, or whose posts were saved again, scheduled for later."""
        index, cancelled = self._look(now), marked(self._claims.list_names(), CANCEL)
        found = {claim.key: Result.CANCELLED for claim in claims if claim.key in cancelled}
        for claim in claims:
            for name in index.pending(claim.job.slug)[:1]:
                newest = index.entries[name].job
                is_newer = newest.created_at >= claim.job.created_at or claim.job.made_by is not None
                if is_newer and (newest.scheduled_for or 0.0) > now:
                    found.setdefault(claim.key, Result.RELEASED)
        return found

    def requeue(self, now: float, except_for: Collection[str] = ()) -> Sequence[Job]:
        """Make pending what environment failures ended or delayed; return the revived dead letters."""

        def revive(file: JobFile) -> Document:
            if not is_environment(file.job.failure):
                return file.document
            if file.job.status is Status.FAILED:
                return with_state(file.document, now, status=Status.PENDING, attempts=0)
            return {**file.document, "nextAttemptAt": None}  # not `updatedAt`: it failed before the end

        names = [
            name
            for name, entry in self._look(now).entries.items()
            if entry.job.failure and not entry.problem and is_environment(entry.job.failure)
            if entry.job.id not in except_for
            # A retry that is due by itself needs no change.
            if not entry.is_pending
            or (entry.due > now and entry.job.next_attempt_at is not None and is_hurried(entry.job.failure))
        ]
        if not names:
            return ()
        with self._claims.exclusively():
            return [job for job in self._alter(names, now, revive) if job.failure is None]

    def _remove(self, keys: Iterable[str]) -> None:
        files = {key: self._claims.read(key) for key in keys}
        intact = [key for key, file in files.items() if file is not None and file.is_intact]
        self._claims.give_back(files.keys() - intact)  # newer saves; what is gone stays gone
        self._claims.drop(intact)

    # Changes of waiting files

    def _take(self, name: str, now: float) -> JobFile | None:
        """Take the job in a waiting file; what is not a job (any more) stays, and what cannot be moved."""
        try:
            taken = self._claims.take(name)
        except OSError as error:
            if error.errno not in _ONE_FILE_ONLY:
                raise
            self._index.leave_alone([name], now, f"it cannot be claimed: {os_error_text(error)}")
            return None
        known = self._index.entries.get(name)
        self._index.forget(name)
        file = self._claims.read(taken) if taken else None
        if file is not None and self._index.fault_of(file):
            file = None
        if taken and file is None:
            self._claims.give_back([taken])
        return file and self._index.with_quiet_time(file, known)

    def _alter(
        self, names: Iterable[str], now: float, change: Callable[[JobFile], Document | None]
    ) -> list[Job]:
        """Replace the documents of waiting jobs, or remove the jobs where `change` returns None.

        A file that is another save by now stays as it is. Return the changed and removed jobs.
        """
        altered: list[Job] = []
        back: list[str] = []
        gone: list[str] = []
        for name in names:
            entry = self._index.entries[name]
            file = self._take(name, now)
            if file is None:
                continue
            document = change(file) if save_of(file.job) == save_of(entry.job) else file.document
            (gone if document is None else back).append(file.name)
            if document is None:
                altered.append(file.job)
            elif document != file.document:
                altered.append(self._claims.rewrite(file, document).job)
        self._claims.give_back(back)
        self._claims.drop(gone)
        return altered


def _claim(key: str, file: JobFile, *, is_alone: bool) -> Claim:
    odd_keys = tuple(near_misses(file.document).items())
    return Claim(key, file.job, file.job.attempts + 1, is_alone, odd_keys)


def _name(row: ListedJob) -> str:
    return os.path.basename(row.where)  # noqa: PTH119 - a Path of each of many names takes long


def _without(published: set[str], file: JobFile) -> Document | None:
    """Return the dead letter with what is not published of it; None if nothing is left."""
    spelled = {path: normalized(path) for path in file.job.paths}
    left = [path for path, plain in spelled.items() if published.isdisjoint((plain, *parents(plain)))]
    return {**file.document, "paths": left} if left else None
