"""The queue as a folder of JSON files. See CONTRACT for the places, `flight` for how files are moved."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING
from uuid import uuid4

from briter_worker.errors import for_people
from briter_worker.job import Status, rewritten
from briter_worker.ports import Batch, Claim, Found
from briter_worker.queues.claiming import Claiming
from briter_worker.queues.files import printable
from briter_worker.queues.flight import Flight
from briter_worker.queues.index import Index, is_revivable
from briter_worker.queues.journal import Journal
from briter_worker.queues.pausing import Pausing
from briter_worker.queues.quarantine import Quarantine
from briter_worker.queues.recovery import Recovery
from briter_worker.queues.steering import Steering

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path

    from briter_worker.errors import Failure
    from briter_worker.job import Job
    from briter_worker.ports import Pause, Plan
    from briter_worker.queues.flight import Held
    from briter_worker.queues.quarantine import Quarantined
    from briter_worker.queues.steering import Cancellation, Listed

_OTHER = (-1, -1)
"""What no file has: whatever is there now is not what was taken."""


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
        self._clock = clock
        self._flight = Flight(root)
        self._index = Index(root, longest_delay)
        self._journal = Journal(self._flight.claimed)
        self._quarantine = Quarantine(quarantine, self._flight)
        self._recovery = Recovery(self._flight, self._index, self._journal)
        self._claiming = Claiming(self._flight, self._index, self._quarantine, self._recovery, longest_delay)
        self._steering = Steering(self._flight, self._index, self._journal, self._recovery)
        self._pausing = Pausing(root)
        # A dashboard looks from several threads.
        self._guard = threading.RLock()
        self._as_taken: dict[str, tuple[int, int]] = {}

    def notice(self) -> None:
        """The watcher saw a change: the next look is at every file, whatever the folder's time stamp."""
        with self._guard:
            self._index.notice()

    def rely_on_notice(self, changes: Callable[[tuple[int, int]], Collection[str] | None] | None) -> None:
        """This names every file that changes from now on, so that no other has to be looked at."""
        with self._guard:
            self._index.rely_on(changes)

    def recover(self, now: float) -> Sequence[Batch]:
        """What a dead worker left in flight, to be finished from its plans or taken up again."""
        if not self._flight.claimed.is_dir():
            return ()
        with self._alone():
            self._recovery.sweep()
            self._recovery.tidy(now)
            batches = self._recovery.batches(now)
            # `finish` removes the dead letters that it knows of.
            self._index.refresh(now)
            for batch in batches:
                for claim in batch.claims:
                    self._remember(claim.key, self._flight.read(claim.key))
            return batches

    def claim(self, now: float) -> Found:
        """Take every due job, newest of its slug; count the attempt; tidy what is no job."""
        with self._guard:
            self._index.refresh(now)
            if self._claiming.is_idle(now):
                return Found()
            with self._flight.exclusively():
                try:
                    return self._claim(now)
                except BaseException:
                    self._claiming.interrupted(now)
                    raise

    def _claim(self, now: float) -> Found:
        haul = self._claiming.haul(now)
        batch = None
        if haul.due:
            claims = tuple(Claim(held.name, held.job, held.job.attempts + 1) for held in haul.due)
            batch = Batch(uuid4().hex, claims)
            self._journal.open(batch.key, {claim.key: claim.attempt for claim in claims}, started=True)
            for held in haul.due:
                self._remember(held.name, held)
        return Found(batch, haul.superseded, haul.put_aside)

    def retake(self, batch: Batch, now: float) -> Sequence[Batch]:
        """An interrupted batch that did not land, ready to be tried again, in halves when it killed."""
        with self._alone():
            return self._recovery.split(batch, now)

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
        with self._alone():
            # The letters first: after a crash, the claims are still there to have them removed.
            self._claiming.drop_dead_letters(claims)
            self._remove(claims)

    def _remove(self, claims: Sequence[Claim]) -> None:
        resaved = [claim.key for claim in claims if self._is_resaved(claim.key)]
        self._flight.give_back(resaved)
        self._flight.drop(claim.key for claim in claims if claim.key not in resaved)

    def put_off(self, batch: Batch, claim: Claim, failure: Failure, text: str, until: float) -> bool:  # noqa: ARG002
        """Back to waiting, to be tried again at `until`; a newer save takes it over at the next claim."""
        return self._settle(claim, Status.PENDING, failure, text, until)

    def snooze(self, batch: Batch, claim: Claim, text: str, until: float) -> bool:  # noqa: ARG002
        """Back to waiting until then, this attempt not counted."""
        return self._settle(replace(claim, attempt=claim.attempt - 1), Status.PENDING, None, text, until)

    def bury(self, batch: Batch, claim: Claim, failure: Failure, text: str) -> bool:  # noqa: ARG002
        """Dead-letter it, with its reason; but if a newer save waits, that takes it over."""
        return self._settle(claim, Status.FAILED, failure, text, None)

    def _settle(
        self, claim: Claim, status: Status, failure: Failure | None, text: str, until: float | None
    ) -> bool:
        with self._alone():
            # Here, where nobody can mark it any more: given back, it would lose its mark.
            if self._flight.is_marked(claim.key):
                return False
            held = self._flight.read(claim.key)
            if status is Status.FAILED:
                # A newer save has come meanwhile: it takes this one's paths over, at the next claim.
                self._index.refresh(self._clock())
                if self._index.pending.get(claim.job.slug):
                    status = Status.PENDING
            if held is not None and not self._is_resaved(claim.key):
                document = rewritten(
                    held.document,
                    status=status,
                    attempts=claim.attempt,
                    now=self._clock(),
                    next_attempt_at=until,
                    last_error=for_people(text),
                    failure=None if failure is None else failure.value,
                )
                self._flight.rewrite(held, document)
            self._flight.give_back([claim.key])
            return True

    def release(self, batch: Batch, claims: Sequence[Claim]) -> None:  # noqa: ARG002 - the port's signature
        """Back to waiting as if they had not been claimed, but for those that are to be cancelled."""
        with self._alone():
            marked = self._flight.marked()
            wanted = [claim for claim in claims if claim.key not in marked]
            for claim in wanted:
                held = self._flight.read(claim.key)
                # Deaths of earlier workers were counted in the journal only.
                if held is not None and held.job.attempts < claim.attempt - 1:
                    self._flight.rewrite(held, {**held.document, "attempts": claim.attempt - 1})
            self._flight.give_back(claim.key for claim in wanted)

    def cancelled(self, batch: Batch) -> Collection[str]:
        """Of these claims, by their keys, those that a person wants cancelled."""
        return self._flight.marked() & {claim.key for claim in batch.claims}

    def overtaken(self, batch: Batch, now: float) -> Collection[str]:
        """Of these claims, those whose posts have been saved again since, and on hold."""
        with self._guard:
            self._index.refresh(now)
            return {each.key for each in batch.claims if self._index.is_held_newer(each.job, now)}

    def drop(self, batch: Batch, claims: Sequence[Claim]) -> None:  # noqa: ARG002 - the port's signature
        """These leave the queue as if they had never been asked for; a newer save of theirs stays."""
        with self._alone():
            self._remove(claims)

    def revive(self, now: float) -> Sequence[Job]:
        """Dead letters that the site's surroundings caused wait again, with no attempts."""
        with self._guard:
            self._index.refresh(now)
            if not self._index.revivable:
                return ()
        revived: list[Job] = []
        back: list[str] = []
        with self._alone():
            for name in sorted(self._index.revivable):
                held = self._claiming.take(name)
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
        with self._guard:
            self._index.refresh(now)
            return self._index.held_paths(now)

    def held_since(self, held: Collection[str], now: float) -> Collection[str]:
        """What such jobs declare now and is not among `held`."""
        return frozenset(self.held_paths(now)).difference(held)

    def next_due(self, now: float) -> float | None:
        """When the next waiting job becomes due, or there is something to tidy."""
        with self._guard:
            self._index.refresh(now)
            moments = [self._index.ripe_at(name, now) for name in self._index.troubled]
            if self._index.crowded:
                moments.append(now)
            due = self._index.next_due()
            if due is not None:
                moments.append(due)
            return min(moments, default=None)

    def paused(self, now: float) -> Pause | None:
        """The pause that lasts, if one does; it outlives every worker."""
        return self._pausing.read(now)

    def pause(self, now: float, *, until: float | None = None, reason: str = "") -> Pause:
        """Have nothing claimed until then, or until `resume`."""
        with self._alone():
            return self._pausing.pause(now, until=until, reason=for_people(reason))

    def resume(self) -> bool:
        """Have jobs claimed again; whether there was a pause to end."""
        return self._pausing.resume()

    def jobs(self, now: float) -> list[Listed]:
        """Every job once: in flight, then waiting by due time, then dead letters. Changes nothing."""
        with self._guard:
            return self._steering.jobs(now)

    def find(self, wanted: str, now: float) -> list[Listed]:
        """The job of this id, else all jobs of this slug. Changes nothing."""
        with self._guard:
            return self._steering.find(wanted, now)

    def retry(self, wanted: str, now: float) -> list[Job]:
        """Dead letters, and jobs that wait for a retry, are due at once. Raises SteeringError."""
        with self._alone():
            return self._steering.retry(wanted, now)

    def retry_all(self, now: float) -> list[Job]:
        """Every dead letter that a retry can help is due at once."""
        with self._alone():
            return self._steering.retry_all(now)

    def publish_now(self, wanted: str, now: float) -> list[Job]:
        """Jobs on hold, and such as wait for a retry, are due at once. Raises SteeringError."""
        with self._alone():
            return self._steering.publish_now(wanted, now)

    def cancel(self, wanted: str, now: float) -> Cancellation:
        """The jobs of this id or slug leave the queue, or are asked to. Raises SteeringError."""
        with self._alone():
            return self._steering.cancel(wanted, now)

    def remove(self, rows: Sequence[Listed], now: float) -> None:
        """These are kept elsewhere by now, as they were listed; newer saves of them stay."""
        with self._alone():
            self._steering.remove(rows, now)

    def stuck(self, now: float) -> dict[str, str]:
        """Files that are no jobs and have not been put aside, with what is wrong with each."""
        with self._guard:
            self._index.refresh(now)
            return self._index.stuck(now)

    def in_the_way(self) -> dict[str, str]:
        """Files that are no jobs and could not be put aside, with the reasons, as of the last tries."""
        with self._guard:
            return {printable(name): reason for name, reason in self._claiming.in_the_way.items()}

    def quarantined(self) -> list[Quarantined]:
        """What is kept of files that were no jobs, oldest first."""
        return self._quarantine.contents()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with self._guard, self._flight.exclusively():
            yield

    def _remember(self, key: str, held: Held | None) -> None:
        # It was a job a moment ago: a writer that has had it open is just saving it again.
        self._as_taken[key] = _OTHER if held is None else (held.stat.st_mtime_ns, held.stat.st_size)

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
