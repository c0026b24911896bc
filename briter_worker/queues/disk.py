"""The queue as a folder of JSON files. See CONTRACT for the places, `flight` for how files are moved."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from uuid import uuid4

from briter_worker.errors import Failure, Kind, for_people
from briter_worker.job import Status, joined, rewritten
from briter_worker.ports import Batch, Claim, Found, Plan, PutAside, Superseding
from briter_worker.queues.flight import Flight, Held
from briter_worker.queues.index import RETRY_TROUBLE, Index, is_revivable, kind_of
from briter_worker.queues.journal import Journal
from briter_worker.queues.quarantine import Quarantine
from briter_worker.queues.recovery import Recovery

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from pathlib import Path

    from briter_worker.job import Job


class DiskQueue:
    """Implements `ports.Queue` for one worker per folder, beside any number of writers.

    A crash or a power cut between any two system calls leaves every job waiting, in flight, or harmlessly
    both. An OSError (full disk, read-only file system) leaves them so too.
    """

    def __init__(
        self,
        root: Path,
        quarantine: Path,
        *,
        max_attempts: int,
        longest_delay: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.max_attempts = max_attempts
        self._longest_delay = longest_delay
        self._clock = clock
        self._flight = Flight(root)
        self._index = Index(root, longest_delay)
        self._journal = Journal(self._flight.claimed)
        self._quarantine = Quarantine(quarantine, self._flight)
        self._recovery = Recovery(self._flight, self._index, self._journal)
        self._untidy = False
        self._as_taken: dict[str, tuple[int, int]] = {}

    def notice(self) -> None:
        """The watcher saw a change: the next look is at every file, whatever the folder's time stamp."""
        self._index.notice()

    def recover(self, now: float) -> Sequence[Batch]:
        """What a dead worker left in flight, to be finished from its plans or taken up again."""
        if not self._flight.claimed.is_dir():
            return ()
        with self._flight.exclusively():
            self._recovery.sweep()
            batches = self._recovery.batches(now)
            self._recovery.tidy(now)
            for batch in batches:
                for claim in batch.claims:
                    self._remember(self._flight.read(claim.key))
            return batches

    def claim(self, now: float) -> Found:
        """Take every due job, newest of its slug; count the attempt; tidy what is no job."""
        self._index.refresh(now)
        due = self._index.next_due()
        idle = (due is None or due > now) and not self._index.crowded and not self._index.ripe(now)
        if idle and not self._untidy:
            return Found()
        with self._flight.exclusively():
            try:
                return self._claim(now)
            except BaseException:
                # What was taken and has no journal is an orphan now: given back before the next claim.
                self._untidy = True
                self._index.restore(now)
                raise

    def _claim(self, now: float) -> Found:
        if self._untidy:
            self._recovery.tidy(now)
            self._index.refresh(now)
            self._untidy = False
        put_aside = [aside for name in self._index.ripe(now) if (aside := self._put_aside(name, now))]
        superseded, taken, back = self._settle_crowds(now)
        slugs = {held.job.slug for held in taken}
        for name in self._index.take_due(now):
            held = self._take(name)
            if held is None:
                continue
            if self._is_due(held, now) and held.job.slug not in slugs:
                slugs.add(held.job.slug)
                taken.append(self._with_lost_paths(held))
            else:
                back.append(held.name)
        self._flight.give_back(back)
        if not taken:
            return Found(None, tuple(superseded), tuple(put_aside))
        taken.sort(key=lambda held: (held.job.due_at(now, self._longest_delay), *held.order))
        claims = tuple(Claim(held.name, held.job, held.job.attempts + 1) for held in taken)
        key = uuid4().hex
        self._journal.open(key, {claim.key: claim.attempt for claim in claims}, started=True)
        for held in taken:
            self._remember(held)
        return Found(Batch(key, claims), tuple(superseded), tuple(put_aside))

    def _take(self, name: str) -> Held | None:
        """The job in a waiting file, out of everyone else's reach; what is no job (any more) stays."""
        taken = self._flight.take(name)
        self._index.forget(name)
        if taken is None:
            return None
        held = self._flight.read(taken)
        if held is None:
            self._flight.give_back([taken])
        return held

    def _is_due(self, held: Held, now: float) -> bool:
        return held.job.status is Status.PENDING and held.job.due_at(now, self._longest_delay) <= now

    def _settle_crowds(self, now: float) -> tuple[list[Superseding], list[Held], list[str]]:
        """Of several saves of a slug the newest stays, with all their paths; likewise of dead letters."""
        superseded: list[Superseding] = []
        due: list[Held] = []
        back: list[str] = []
        losers: list[str] = []
        for slug in sorted(self._index.crowded):
            for status, names in (
                (Status.PENDING, list(self._index.pending.get(slug, ()))),
                (Status.FAILED, self._index.joinable(slug)),
            ):
                if len(names) < 2:  # noqa: PLR2004 - one is no crowd
                    continue
                all_taken = [held for name in names if (held := self._take(name)) is not None]
                rivals = [h for h in all_taken if h.job.slug == slug and h.job.status is status]
                back += [held.name for held in all_taken if held not in rivals]
                if not rivals:
                    continue
                winner, *older = sorted(rivals, key=lambda held: held.order, reverse=True)
                winner = self._with_paths(winner, joined(winner.job.paths, *(h.job.paths for h in older)))
                losers += [held.name for held in older]
                superseded += [Superseding(held.job.id, slug, winner.job.id) for held in older]
                if self._is_due(winner, now):
                    due.append(self._with_lost_paths(winner))
                else:
                    back.append(winner.name)
        if losers:
            # The winners' joined paths are durable before the older files go.
            self._flight.sync()
            self._flight.drop(losers)
        return superseded, due, back

    def _with_lost_paths(self, held: Held) -> Held:
        """With the paths of an older dead letter that this job's publication will remove.

        What was refused is not carried on: it would have the newer save refused, too.
        """
        lost = [
            other.paths
            for name in self._index.failed.get(held.job.slug, ())
            if (other := self._index.seen[name].job) is not None
            and other.created_at <= held.job.created_at
            and kind_of(other) in {Kind.TRANSIENT, Kind.ENVIRONMENT}
        ]
        return self._with_paths(held, joined(held.job.paths, *lost))

    def _with_paths(self, held: Held, paths: tuple[str, ...]) -> Held:
        if set(paths) == set(held.job.paths):
            return held
        return self._flight.rewrite(held, {**held.document, "paths": list(paths)})

    def _put_aside(self, name: str, now: float) -> PutAside | None:
        seen = self._index.seen[name]
        try:
            taken = self._flight.take(name)
            self._index.forget(name)
            if taken is None:
                return None
            sighting = self._flight.look(taken)
            trouble = sighting.trouble
            # A writer may have finished it, or begun a new one, since we looked.
            if trouble is None or (trouble.passing and not seen.is_still(sighting.stat)):
                self._flight.give_back([taken])
                return None
            try:
                return self._quarantine.put_aside(taken, name, sighting, trouble, now)
            except OSError:
                self._flight.give_back([taken])
                raise
        except OSError:
            # This file stays; the others go on.
            self._untidy = True
            self._index.postpone(name, now + RETRY_TROUBLE)
            self._index.notice()
            return None

    def retake(self, batch: Batch, now: float) -> Sequence[Batch]:  # noqa: ARG002 - the port's signature
        """An interrupted batch that did not land, ready to be tried again, in halves when it killed."""
        with self._flight.exclusively():
            return self._recovery.split(batch)

    def begin(self, batch: Batch) -> None:
        """The work on a retaken batch begins: a crash from here on counts."""
        self._journal.begin(batch.key)

    def record(self, batch: Batch, plan: Plan) -> None:
        """Remember durably what the next push is about to do."""
        self._journal.record(batch.key, plan)

    def close(self, batch: Batch) -> None:
        """The batch is settled: forget its plans."""
        self._journal.close(batch.key)
        for claim in batch.claims:
            self._as_taken.pop(claim.key, None)

    def finish(self, batch: Batch, claims: Sequence[Claim]) -> None:  # noqa: ARG002 - the port's signature
        """These are on the remote: they leave the queue, with any older dead letter of their slugs."""
        with self._flight.exclusively():
            # The letters first: after a crash, the claims are still there to have them removed.
            self._drop_dead_letters(claims)
            resaved = [claim.key for claim in claims if self._is_resaved(claim.key)]
            self._flight.give_back(resaved)
            self._flight.drop(claim.key for claim in claims if claim.key not in resaved)

    def _drop_dead_letters(self, claims: Iterable[Claim]) -> None:
        gone: list[str] = []
        back: list[str] = []
        for claim in claims:
            for name in list(self._index.failed.get(claim.job.slug, ())):
                held = self._take(name)
                if held is None:
                    continue
                job = held.job
                over = (
                    job.status is Status.FAILED
                    and job.slug == claim.job.slug
                    and job.created_at <= claim.job.created_at
                )
                (gone if over else back).append(held.name)
        self._flight.give_back(back)
        if gone:
            self._flight.drop(gone)

    def put_off(self, batch: Batch, claim: Claim, failure: Failure, text: str, until: float) -> None:  # noqa: ARG002
        """Back to waiting, to be tried again at `until`; a newer save takes it over at the next claim."""
        self._settle(claim, Status.PENDING, failure, text, until)

    def bury(self, batch: Batch, claim: Claim, failure: Failure, text: str) -> None:  # noqa: ARG002
        """Dead-letter it, with its reason; a newer save of the post is not touched."""
        self._settle(claim, Status.FAILED, failure, text, None)

    def _settle(self, claim: Claim, status: Status, failure: Failure, text: str, until: float | None) -> None:
        with self._flight.exclusively():
            held = self._flight.read(claim.key)
            if held is not None and not self._is_resaved(claim.key):
                document = rewritten(
                    held.document,
                    status=status,
                    attempts=claim.attempt,
                    now=self._clock(),
                    next_attempt_at=until,
                    last_error=for_people(text),
                    failure=failure.value,
                )
                self._flight.rewrite(held, document)
            self._flight.give_back([claim.key])

    def release(self, batch: Batch, claims: Sequence[Claim]) -> None:  # noqa: ARG002 - the port's signature
        """Back to waiting as if it had not been claimed: the attempt does not count."""
        with self._flight.exclusively():
            for claim in claims:
                held = self._flight.read(claim.key)
                # Deaths of earlier workers were counted in the journal only.
                if held is not None and held.job.attempts < claim.attempt - 1:
                    self._flight.rewrite(held, {**held.document, "attempts": claim.attempt - 1})
            self._flight.give_back(claim.key for claim in claims)

    def revive(self, now: float) -> Sequence[Job]:
        """Dead letters that the site's surroundings caused wait again, with no attempts."""
        self._index.refresh(now)
        if not self._index.revivable:
            return ()
        revived: list[Job] = []
        back: list[str] = []
        with self._flight.exclusively():
            for name in sorted(self._index.revivable):
                held = self._take(name)
                if held is None:
                    continue
                back.append(held.name)
                if is_revivable(held.job):
                    document = rewritten(held.document, status=Status.PENDING, attempts=0, now=now)
                    revived.append(self._flight.rewrite(held, document).job)
            self._flight.give_back(back)
        return revived

    def held_paths(self, now: float) -> Collection[str]:
        """What jobs that are still on hold declare: no folder of another job may carry it."""
        self._index.refresh(now)
        return {path for job in self._index.held(now) for path in job.paths}

    def next_due(self, now: float) -> float | None:
        """When the next waiting job becomes due, or there is something to tidy."""
        self._index.refresh(now)
        moments = [self._index.ripe_at(name, now) for name in self._index.troubled]
        if self._index.crowded:
            moments.append(now)
        due = self._index.next_due()
        if due is not None:
            moments.append(due)
        return min(moments, default=None)

    def _remember(self, held: Held | None) -> None:
        if held is not None:
            self._as_taken[held.name] = (held.stat.st_mtime_ns, held.stat.st_size)

    def _is_resaved(self, key: str) -> bool:
        """Whether a writer that does not rename, and had the file open, has written to it in flight."""
        before = self._as_taken.get(key)
        if before is None:
            return False
        try:
            found = self._flight.look(key).stat
        except FileNotFoundError:
            return False
        return (found.st_mtime_ns, found.st_size) != before
