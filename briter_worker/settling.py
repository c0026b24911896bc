"""What becomes of each claim of a batch: stored first, then told."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence  # noqa: TC003 - the dataclass's fields
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from briter_worker.backoff import Backoff
from briter_worker.errors import Failure, Kind, for_people
from briter_worker.events import (
    Cancelled,
    DeadLettered,
    Failed,
    Handled,
    NoChange,
    NoPaths,
    Progress,
    Published,
    Snoozed,
)
from briter_worker.job import GIT_SYNC
from briter_worker.ports import Outcome

if TYPE_CHECKING:
    from briter_worker.events import Event
    from briter_worker.ports import Batch, Claim, EventSink, Extensions, Plan, Queue


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """What settling needs: where jobs wait, who is told, and the rules."""

    queue: Queue
    emit: EventSink
    backoff: Backoff
    max_attempts: int
    extensions: Extensions
    dry_run: bool
    keep: Callable[[Sequence[Event]], None] = lambda _: None
    """Has receipts stored, in a moment or not at all. Who is told of these events is told by `emit`."""
    clock: Callable[[], float] = time.time
    timer: Callable[[], float] = time.monotonic


@dataclass(slots=True)
class Tally:
    """How many claims were settled, how many of them are not on the remote, and how many are undecided."""

    settled: int = 0
    failed: int = 0
    undecided: int = 0
    """In flight still: the remote could not be asked whether it has them."""

    def add(self, other: Tally) -> None:
        """Count the other's, too."""
        self.settled += other.settled
        self.failed += other.failed
        self.undecided += other.undecided


class Work:
    """One batch being worked on: which claims are still open, and what became of the others."""

    def __init__(self, desk: Desk, batch: Batch) -> None:
        self._desk = desk
        self.batch = batch
        self._began = desk.timer()
        self.open = {claim.key: claim for claim in batch.claims}
        self.plans: list[Plan] = []
        self.tally = Tally()
        self.pushed = False

    def record(self, plan: Plan) -> None:
        """Remember the plan here and durably."""
        self._desk.queue.record(self.batch, plan)
        self.plans.append(plan)

    def settle(self, outcomes: Sequence[Outcome]) -> None:
        """Store what became of these claims, then tell it."""
        known = [outcome for outcome in outcomes if outcome.key in self.open]
        if not known:
            return
        count = len(self.batch.claims)
        self._desk.emit(Progress(phase="settle", done=count - len(self.open) + len(known), total=count))
        done = {each.key: self._receipt(self.open[each.key], each) for each in known if _is_done(each)}
        if done:
            # Receipts first: of a job that has left the queue, nothing else would tell what became of it.
            self._desk.keep(list(done.values()))
            self._desk.queue.finish(self.batch, [self.open[key] for key in done])
        # These first: they have left the queue, and an error with the others must not keep it untold.
        for outcome in sorted(known, key=_is_done, reverse=True):
            claim = self.open[outcome.key]
            if outcome.overtaken:
                self._put_back(claim)
            elif outcome.cancelled:
                self._drop(claim)
            elif outcome.snooze_until is not None:
                self._snooze(claim, outcome, outcome.snooze_until)
            elif outcome.failure is None:
                self._desk.emit(done[outcome.key])
            else:
                self._fail(claim, outcome, outcome.failure)
            del self.open[outcome.key]
            self.tally.settled += 1

    def cancel(self) -> None:
        """Settle what a person wants cancelled, of the claims that have no outcome yet."""
        keys = self._desk.queue.cancelled(self.batch) if self.open else ()
        self.settle([Outcome(key, cancelled=True) for key in keys if key in self.open])

    def fail_rest(self, failure: Failure, text: str) -> None:
        """The same failure for every claim that has no outcome yet."""
        self.settle([Outcome(key, failure=failure, text=for_people(text)) for key in self.open])

    def _put_back(self, claim: Claim) -> None:
        """Nothing has become of it yet: the next claim decides, knowing what has been saved meanwhile."""
        self._desk.queue.release(self.batch, [claim])
        if claim.key in self._desk.queue.cancelled(self.batch):
            self._drop(claim)

    def _drop(self, claim: Claim) -> None:
        self._desk.queue.drop(self.batch, [claim])
        self._desk.emit(Cancelled(job_id=claim.job.id, slug=claim.job.slug))

    def _snooze(self, claim: Claim, outcome: Outcome, until: float) -> None:
        now, backoff = self._desk.clock(), self._desk.backoff
        if until <= now:
            until = now + backoff.delay(1)  # it would be due at once, again and again
        # Further away than any backoff, it would be taken for a clock that was set back.
        until = min(until, now + backoff.longest)
        if not self._desk.queue.snooze(self.batch, claim, outcome.text, until):
            self._drop(claim)
            return
        self._desk.emit(Snoozed(**self._facts(claim, outcome), error=outcome.text, retry_at=until))
        self.tally.failed += 1

    def _receipt(self, claim: Claim, outcome: Outcome) -> Event:
        if claim.job.type != GIT_SYNC:
            return Handled(**self._facts(claim, outcome))
        if outcome.commit is None:
            return NoChange(**self._facts(claim, outcome))
        self.pushed = True
        return Published(**self._facts(claim, outcome), commit=outcome.commit)

    def _fail(self, claim: Claim, outcome: Outcome, failure: Failure) -> None:
        desk = self._desk
        facts = self._facts(claim, outcome) | {"error": outcome.text}
        kind = None if claim.job.type == GIT_SYNC else desk.extensions.kind(claim.job.type)
        most = (kind and kind.max_attempts) or desk.max_attempts
        if failure.kind is not Kind.REFUSED and claim.attempt < most:
            backoff = Backoff(kind.delays) if kind and kind.delays else desk.backoff
            until = desk.clock() + min(backoff.delay(claim.attempt), desk.backoff.longest)
            told: Event = Failed(**facts, failure=failure.value, retry_at=until)
            is_wanted = desk.queue.put_off(self.batch, claim, failure, outcome.text, until)
        else:
            is_nopaths = failure is Failure.NO_PATHS
            told = NoPaths(**facts) if is_nopaths else DeadLettered(**facts, failure=failure.value)
            is_wanted = desk.queue.bury(self.batch, claim, failure, outcome.text)
        if not is_wanted:
            self._drop(claim)
            return
        desk.emit(told)
        self.tally.failed += 1

    def _facts(self, claim: Claim, outcome: Outcome) -> dict[str, Any]:
        return {
            "job_id": claim.job.id,
            "slug": claim.job.slug,
            "attempt": claim.attempt,
            "dry_run": self._desk.dry_run,
            "duration_ms": round((self._desk.timer() - self._began) * 1000),
            "rejected_paths": outcome.rejected_paths,
            "kind": claim.job.type,
            "webhook": claim.job.webhook,
        }


def _is_done(outcome: Outcome) -> bool:
    put_back = outcome.cancelled or outcome.overtaken or outcome.snooze_until is not None
    return outcome.failure is None and not put_back
