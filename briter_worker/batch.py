"""The claims of one drain: their attempts, as plugins see them, and their outcomes.

An outcome is stored first and emitted then. A plugin's error is a failure of the job at hand only.
"""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from briter_worker.errors import (
    Failure,
    FailureClass,
    FailureCode,
    LockLostError,
    PublishError,
    SnoozedError,
    StoppedError,
)
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
    Warned,
)
from briter_worker.job import GIT_SYNC, quoted
from briter_worker.ports import Outcome, Publication, Result
from briter_worker.retry import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from briter_worker.events import Event
    from briter_worker.ports import Change, Claim, EventSink, Extensions, Queue


@dataclass(slots=True)
class Counts:
    """How many claims were completed, how many of them are not published, and how many are undecided."""

    completed: int = 0
    failed: int = 0
    undecided: int = 0
    """Still in flight, because the remote did not say whether it has them."""

    def add(self, other: Counts) -> None:
        """Add the counts of another batch."""
        self.completed += other.completed
        self.failed += other.failed
        self.undecided += other.undecided


class Batch:
    """The claims of one drain that are still open, and what became of the others."""

    def __init__(
        self,
        claims: Iterable[Claim],
        *,
        queue: Queue,
        emit: EventSink,
        extensions: Extensions,
        backoff: Backoff,
        max_attempts: int,
        dry_run: bool,
        clock: Callable[[], float],
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self.open = {claim.key: claim for claim in claims}
        self.counts = Counts()
        self.has_pushed = False
        self.failed_ids: set[str] = set()
        self._total = len(self.open)
        self._queue = queue
        self._emit = emit
        self._extensions = extensions
        self._backoff = backoff
        self._max_attempts = max_attempts
        self._dry_run = dry_run
        self._clock = clock
        self._timer = timer
        self._started = timer()
        self._attempts: dict[str, ExitStack] = {}

    def __enter__(self) -> Self:
        """Start without any attempt entered."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the contexts of attempts that were not completed."""
        for key in list(self._attempts):
            self._leave_attempt(key)

    def enter_attempts(self) -> None:
        """Enter the context that plugins put around each attempt; complete those that a plugin refuses."""
        ended = []
        for claim in self.open.values():
            stack = self._attempts[claim.key] = ExitStack()
            around = self._extensions.around_attempt(claim.job, claim.attempt)
            if outcome := _refusal(claim.key, partial(stack.enter_context, around)):
                ended.append(outcome)
        self.complete(ended)

    def check(self, key: str, changes: Sequence[Change]) -> Outcome | None:
        """Return the outcome of a job that a plugin refuses to publish."""
        job = self.open[key].job
        return _refusal(key, lambda: self._extensions.before_publish(job, changes))

    def handle(self, claim: Claim) -> Outcome:
        """Have a plugin handle a job of the plugin's own type."""
        kind = self._extensions.kind(claim.job.type)
        if kind is None:
            failure = Failure(
                FailureCode.UNKNOWN_TYPE,
                f"no plugin handles the type {quoted(claim.job.type)}",
                "leave type out, or install the plugin",
            )
            return Outcome(claim.key, Result.FAILED, failure=failure)
        return _refusal(claim.key, lambda: kind.handle(claim.job)) or Outcome(claim.key, Result.PUBLISHED)

    def complete(self, outcomes: Sequence[Outcome]) -> None:
        """Store what became of these claims, then emit it."""
        known = {each.key: each for each in outcomes if each.key in self.open}
        if not known:
            return
        done = self._total - len(self.open) + len(known)
        self._emit(Progress(phase="settle", done=done, total=self._total))
        finished = [each for each in known.values() if each.result in {Result.PUBLISHED, Result.UNCHANGED}]
        if finished:
            events = [self._receipt(self.open[each.key], each) for each in finished]
            self._emit.deliver(events, partial(self._acknowledge, finished))
        for outcome in known.values():
            claim = self.open[outcome.key]
            self._complete(claim, outcome)
            del self.open[outcome.key]
            self.counts.completed += 1
            self._leave_attempt(outcome.key)
            if outcome.commit is not None and claim.job.type == GIT_SYNC:
                self._after_publish(claim, outcome, outcome.commit)

    def complete_cancelled(self, *, except_for: Collection[str] = ()) -> None:
        """Drop the open claims whose cancellation was requested."""
        keys = self._queue.cancelled(list(self.open.values())) if self.open else ()
        self.complete([Outcome(key, Result.CANCELLED) for key in keys if key not in except_for])

    def fail(self, keys: Iterable[str], failure: Failure) -> None:
        """Complete these claims with the same failure."""
        self.complete([Outcome(key, Result.FAILED, failure=failure) for key in keys])

    def release(self, *, except_for: Collection[str] = ()) -> None:
        """Put the open claims back as if they had not been claimed."""
        claims = [claim for key, claim in self.open.items() if key not in except_for]
        for claim in claims:
            del self.open[claim.key]
        for claim in self._queue.release(claims) if claims else ():
            self._emit(Cancelled(job_id=claim.job.id, slug=claim.job.slug))

    def _acknowledge(self, finished: Sequence[Outcome]) -> None:
        tried = [
            each
            for each in finished
            if self._dry_run and each.result is Result.PUBLISHED and each.commit is not None
        ]
        if tried:
            self._queue.mark_tried([self.open[each.key] for each in tried], self._clock())
        gone = [each for each in finished if each not in tried]
        if gone:
            rejected = {each.key: each.rejected_paths for each in gone}
            self._queue.acknowledge([self.open[each.key] for each in gone], rejected)

    def _complete(self, claim: Claim, outcome: Outcome) -> None:
        match outcome.result:
            case Result.PUBLISHED | Result.UNCHANGED:
                pass  # acknowledged together
            case Result.CANCELLED:
                self._drop(claim)
            case Result.RELEASED:
                if self._queue.release([claim]):
                    self._emit(Cancelled(job_id=claim.job.id, slug=claim.job.slug))
            case Result.SNOOZED:
                self._snooze(claim, outcome)
            case Result.FAILED:
                self._fail(claim, outcome)

    def _drop(self, claim: Claim) -> None:
        self._queue.drop([claim])
        self._emit(Cancelled(job_id=claim.job.id, slug=claim.job.slug))

    def _snooze(self, claim: Claim, outcome: Outcome) -> None:
        now = self._clock()
        at = outcome.retry_at or 0.0
        if at <= now:
            at = now + self._backoff.delay(1)  # it would be due at once, again and again
        # Further away than any backoff, it would be taken for the retry of a clock that ran ahead.
        at = min(at, now + self._backoff.longest)
        failure = outcome.failure or Failure(FailureCode.UNSETTLED, "a plugin deferred the job")
        if not self._queue.retry_later(claim, failure, at=at, counts=False):
            self._emit(Cancelled(job_id=claim.job.id, slug=claim.job.slug))
            return
        self._emit(Snoozed(**self._facts(claim, outcome), error=failure.message, retry_at=at))
        self.counts.failed += 1

    def _fail(self, claim: Claim, outcome: Outcome) -> None:
        failure = outcome.failure or Failure(FailureCode.INTERNAL, "the publisher gave no reason")
        kind = None if claim.job.type == GIT_SYNC else self._extensions.kind(claim.job.type)
        max_attempts = (kind and kind.max_attempts) or self._max_attempts
        facts = self._facts(claim, outcome) | {"error": failure.message, "fix": failure.fix}
        event: Event
        if failure.code.failure_class is not FailureClass.REFUSED and claim.attempt < max_attempts:
            backoff = Backoff(kind.delays) if kind and kind.delays else self._backoff
            at = self._clock() + min(backoff.delay(claim.attempt), self._backoff.longest)
            event = Failed(**facts, failure=failure.code.value, retry_at=at)
            is_kept = self._queue.retry_later(claim, failure, at=at)
        else:
            is_nopaths = failure.code is FailureCode.NO_PATHS
            event = NoPaths(**facts) if is_nopaths else DeadLettered(**facts, failure=failure.code.value)
            is_kept = self._queue.dead_letter(claim, failure)
        if not is_kept:
            event = Cancelled(job_id=claim.job.id, slug=claim.job.slug)
        else:
            self.counts.failed += 1
            self.failed_ids.add(claim.job.id)
        self._emit(event)

    def _receipt(self, claim: Claim, outcome: Outcome) -> Event:
        if claim.job.type != GIT_SYNC:
            return Handled(**self._facts(claim, outcome))
        if outcome.result is Result.UNCHANGED or outcome.commit is None:
            return NoChange(**self._facts(claim, outcome))
        self.has_pushed = self.has_pushed or not self._dry_run
        return Published(**self._facts(claim, outcome), commit=outcome.commit)

    def _facts(self, claim: Claim, outcome: Outcome) -> dict[str, Any]:
        return {
            "job_id": claim.job.id,
            "slug": claim.job.slug,
            "attempt": claim.attempt,
            "dry_run": self._dry_run,
            "duration_ms": round((self._timer() - self._started) * 1000),
            "rejected_paths": outcome.rejected_paths,
            "job_type": claim.job.type,
            "webhook": claim.job.webhook,
        }

    def _leave_attempt(self, key: str) -> None:
        stack = self._attempts.pop(key, None)
        if stack is not None:
            self._call_safely(key, stack.close)

    def _after_publish(self, claim: Claim, outcome: Outcome, commit: str) -> None:
        publication = Publication(claim.job, commit, claim.attempt, self._dry_run, outcome.rejected_paths)
        self._call_safely(claim.job.slug, lambda: self._extensions.after_publish(publication))

    def _call_safely(self, slug: str, step: Callable[[], object]) -> None:
        """Run a plugin's code for a completed job: its errors are reported and change nothing."""
        try:
            step()
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything
            failure = _plugin_failure(error)
            self._emit(Warned(error=f"after {slug}: {failure.message}", fix=failure.fix))


def _refusal(key: str, step: Callable[[], object]) -> Outcome | None:
    """Run a plugin's code for a job; return the job's outcome if the code raised."""
    try:
        step()
    except SnoozedError as snooze:
        retry_at = snooze.until if math.isfinite(snooze.until) else 0.0
        reason = Failure(FailureCode.PLUGIN, snooze.text)
        return Outcome(key, Result.SNOOZED, failure=reason, retry_at=retry_at)
    except PublishError as error:
        return Outcome(key, Result.FAILED, failure=error.failure)
    except (StoppedError, LockLostError):
        raise
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything
        return Outcome(key, Result.FAILED, failure=_plugin_failure(error))
    return None


def _plugin_failure(error: Exception) -> Failure:
    message = f"a plugin failed: {type(error).__name__}: {error}"
    return Failure(FailureCode.INTERNAL, message, "correct the plugin, or uninstall it")
