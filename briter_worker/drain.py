"""The one use case: claim what is due, publish it with one push, acknowledge each job.

Every claim is completed exactly once, whatever the publisher does. An outcome is stored first and emitted
then. An error of a plugin is a failure of the job at hand only.
"""

from __future__ import annotations

import math
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from briter_worker import events
from briter_worker.bisection import Bisection, Verdict
from briter_worker.errors import (
    Failure,
    FailureClass,
    FailureCode,
    LockLostError,
    NodeFailureError,
    PublishError,
    SnoozedError,
    StoppedError,
    UnavailableError,
    failure_of,
    one_line,
)
from briter_worker.job import GIT_SYNC
from briter_worker.leftovers import MISSING_RETRIES, Judgement, judge
from briter_worker.ports import SHORTEST_WAIT_S, Backoff, Outcome, Publication, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from briter_worker.job import Job
    from briter_worker.plugins import Plugins
    from briter_worker.ports import Change, Claim, ClaimResult, EventSink, Leftover, Publisher, Queue

_MAX_TITLE = 200


@dataclass(slots=True)
class Counts:
    """Numbers of completed claims, of those of them that are not published, and of undecided ones."""

    completed: int = 0
    failed: int = 0
    undecided: int = 0
    """Still in flight, because the remote did not say whether it has them."""

    def add(self, other: Counts) -> None:
        """Add the counts of another batch."""
        self.completed += other.completed
        self.failed += other.failed
        self.undecided += other.undecided


@dataclass(kw_only=True, eq=False)
class Drain:
    """Publishes what is due in one site's queue, until `stopping`.

    Raises LockLostError, with nothing left claimed, when the site may be another worker's. Raises
    UnavailableError when the queue cannot be reached; the next `recover` finds what is claimed then. Raises
    NodeFailureError, with nothing left claimed, when this machine cannot publish.
    """

    queue: Queue
    publisher: Callable[[], Publisher]
    emit: EventSink
    plugins: Plugins
    backoff: Backoff
    max_attempts: int
    dry_run: bool
    co_authors: bool = False
    stopping: Callable[[], bool]
    declared_earlier: Callable[[Job, Collection[str]], Collection[str]] = lambda _job, _paths: ()
    """Returns which of these paths an earlier save of the job's post declared."""
    blames_node: Callable[[Failure], bool] = lambda _: False
    """Returns True for a failure that is this machine's alone: it costs no attempt."""
    clock: Callable[[], float] = time.time
    _doubt: Failure | None = field(default=None, init=False)

    def run(self, found: ClaimResult | None = None) -> Counts | None:
        """Publish what is due, or was claimed just now; return None if nothing was."""
        found = found or self.queue.claim(self.clock())
        for event in (*found.superseded, *found.quarantined):
            self.emit(event)
        counts = Counts(failed=len(found.quarantined))
        if found.claims:
            counts.add(self._drain(found.claims))
        return counts if found.claims or found.quarantined else None

    def recover(self) -> Counts:
        """Complete what is in flight: acknowledge what landed, and publish the rest again, job by job.

        Jobs whose push the remote did not answer for stay in flight and count as undecided.
        """
        # What a live worker had pushed before it died is published, also if a dry run finds it.
        batch = _Batch(self, self.queue.recover(self.clock()), dry_run=False)
        undecided = self._resolve(batch)
        for claim in [claim for key, claim in batch.open.items() if key not in undecided]:
            if self.stopping():
                break  # the next start finds it in flight
            claimed = self.queue.reclaim(claim, self.clock())
            if claim.alone and claimed.attempt > self.max_attempts:
                poisoned = _Batch(self, [claimed], dry_run=self.dry_run)
                made = claimed.attempt - 1
                text = f"the worker died while it published this job alone; {made} attempts were made"
                fix = "check the files of the post, then save it again"
                poisoned.fail([Verdict(claimed, Failure(FailureCode.KILLED_WORKER, text, fix))])
                batch.counts.add(poisoned.counts)
            else:
                batch.counts.add(self._drain([claimed]))
        batch.counts.undecided += len(undecided)
        return batch.counts

    def _resolve(self, batch: _Batch) -> Collection[str]:
        """Acknowledge what landed of the recorded plans; return the keys of the claims still undecided."""
        doubt: Failure | None = None
        try:
            for landed in self.publisher().resolve():
                batch.complete(landed)
        except StoppedError:
            pass  # the plans that were not asked about are undecided
        except (LockLostError, UnavailableError):
            raise
        except Exception as error:  # noqa: BLE001 - an error here must not stop the other jobs
            doubt = failure_of(error)
        undecided = self._undecided(batch, unopened=batch.open)  # without a publisher, nobody knows the plans
        batch.complete_cancelled(except_for=undecided)
        doubt = doubt if undecided else None
        if doubt and doubt != self._doubt:  # once per reason
            text = f"jobs in flight wait for the remote: {doubt.message}"
            self.emit(events.Warned(error=text, fix=doubt.fix))
        self._doubt = doubt
        return undecided

    def _drain(self, claims: Sequence[Claim]) -> Counts:
        """Publish the claims with one push, and complete each of them."""
        batch = _Batch(self, claims, dry_run=self.dry_run)
        with batch.attempts:
            try:
                batch.start()
                for claim in [claim for claim in batch.open.values() if claim.job.type != GIT_SYNC]:
                    if self.stopping():
                        raise StoppedError  # noqa: TRY301 - as the publisher does
                    batch.complete_cancelled()
                    if claim.key in batch.open:
                        batch.handle(claim)
                posts = list(batch.open.values())
                if not self.co_authors:
                    alone = {"co_authors": ()}
                    posts = [claim._replace(job=claim.job.model_copy(update=alone)) for claim in posts]
                self._publish(batch, posts)
            except StoppedError:
                undecided = self._resolve(batch)
                batch.counts.undecided = len(undecided)
                batch.release(except_for=undecided)
            except (LockLostError, UnavailableError):
                with suppress(OSError, PublishError):
                    batch.release(except_for=self._undecided(batch))
                raise
        if batch.has_pushed:
            for job in self.queue.requeue(self.clock(), batch.failed_ids):
                self.emit(events.Revived(job_id=job.id, slug=job.slug))
        return batch.counts

    def _publish(self, batch: _Batch, claims: Sequence[Claim]) -> None:
        """Publish the claims with one push; where it fails, search for the one at fault."""
        search = Bisection(claims)
        while piece := search.next_piece():
            if self.stopping():
                raise StoppedError
            accepted = batch.accepted
            error = self._push(batch, [claim for claim in piece if claim.key in batch.open])
            if batch.accepted > accepted:
                batch.fail(search.note_passed())
            if error is None:
                continue
            if self.blames_node(failure := failure_of(error)):
                raise NodeFailureError(failure)
            batch.fail(search.note_failed(self._unpublished(batch, piece), error))
        batch.fail(search.rest())

    def _push(self, batch: _Batch, claims: Sequence[Claim]) -> Exception | None:
        """Publish these claims with one push; return the error of those that have no outcome after it."""
        if not claims:
            return None
        try:
            for outcomes in self.publisher().publish(
                claims,
                scheduled=lambda: self.queue.scheduled_paths(self.clock()),
                check=batch.check,
                withdrawn=lambda: self.queue.withdrawn([*batch.open.values()], self.clock()),
                now=self.clock(),
            ):
                batch.complete(outcomes)
        except (LockLostError, UnavailableError, StoppedError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever happens to a batch never ends the worker
            return error
        return None

    def _unpublished(self, batch: _Batch, claims: Sequence[Claim]) -> list[Claim]:
        """Return the claims that the failed push has surely not published."""
        undecided = self._undecided(batch)
        batch.counts.undecided = len(undecided)
        return [each for each in claims if each.key in batch.open and each.key not in undecided]

    def _undecided(self, batch: _Batch, unopened: Collection[str] = ()) -> frozenset[str]:
        """Return the keys of the open claims whose push may have landed; `unopened` without a publisher."""
        try:
            return frozenset(self.publisher().undecided()) & batch.open.keys()
        except PublishError:
            return frozenset(unopened)
        except OSError:
            return frozenset(batch.open)


class _Batch:
    """The claims of one drain that are still open, and what became of the others."""

    def __init__(self, drain: Drain, claims: Iterable[Claim], *, dry_run: bool) -> None:
        self.open = {claim.key: claim for claim in claims}
        self.counts = Counts()
        self.attempts = ExitStack()
        """Leaves the contexts of attempts that were not completed."""
        self.has_pushed = False
        self.accepted = 0
        """Posts that the remote accepted, or would accept."""
        self.failed_ids: set[str] = set()
        self._total = len(self.open)
        self._drain = drain
        self._dry_run = dry_run
        self._started = time.monotonic()
        self._contexts: dict[str, ExitStack] = {}
        self._leftover_at: dict[str, float] = {}
        """By claim key: when the part of the job that is not published is tried again."""
        self._cancelled_rests: list[Claim] = []
        """Claims that were published in part, and whose rest is cancelled."""

    def start(self) -> None:
        """Emit the start of each attempt, and enter the contexts that plugins put around it."""
        for claim in self.open.values():
            self._drain.emit(self._start_of(claim))
            if claim.attempt == 1:
                self._warn_of_odd_keys(claim)
        ended = []
        for claim in self.open.values():
            self._contexts[claim.key] = ExitStack()
            self.attempts.callback(self._leave_attempt, claim.key)
            if outcome := _refusal(claim.key, partial(self._enter_attempt, claim)):
                ended.append(outcome)
        self.complete(ended)

    def _warn_of_odd_keys(self, claim: Claim) -> None:
        for key, right in claim.odd_keys:
            text = f"the job of {claim.job.slug} has the key {one_line(key, 80)}, which is not read"
            fix = f"if {right} is meant, correct what writes the job"
            self._drain.emit(events.Warned(error=text, fix=fix))

    def _start_of(self, claim: Claim) -> events.JobStarted:
        return events.JobStarted(
            job_id=claim.job.id,
            slug=claim.job.slug,
            attempt=claim.attempt,
            dry_run=self._dry_run,
            title=claim.job.commit_message.partition("\n")[0][:_MAX_TITLE],
            author=claim.job.author.name if claim.job.author else "",
            saved_at=claim.job.created_at,
            due_at=claim.job.scheduled_for,
        )

    def _enter_attempt(self, claim: Claim) -> None:
        for around in self._drain.plugins.call("around_attempt", job=claim.job, attempt=claim.attempt):
            self._contexts[claim.key].enter_context(around)

    def check(self, key: str, changes: Sequence[Change]) -> Outcome | None:
        """Return the outcome of a job that a plugin refuses to publish."""
        job = self.open[key].job
        return _refusal(key, lambda: self._drain.plugins.call("before_publish", job=job, changes=changes))

    def handle(self, claim: Claim) -> None:
        """Have a plugin handle a job of the plugin's own type."""
        outcome = _refusal(claim.key, lambda: self._drain.plugins.handle(claim.job))
        self.complete([outcome or Outcome(claim.key, Result.PUBLISHED)])

    def complete(self, outcomes: Sequence[Outcome]) -> None:
        """Store what became of these claims, then emit it."""
        judgements = self._judge([each for each in outcomes if each.key in self.open])
        if not judgements:
            return
        known = {each.outcome.key: each.outcome for each in judgements}
        done = self._total - len(self.open) + len(known)
        self._drain.emit(events.Progress(phase="settle", done=done, total=self._total))
        finished = [
            each for each in judgements if each.outcome.result in {Result.PUBLISHED, Result.UNCHANGED}
        ]
        if finished:
            receipts = [self._receipt(self.open[each.outcome.key], each) for each in finished]
            self._drain.emit.deliver(receipts, partial(self._acknowledge, finished))
        self._emit_cancelled_rests()
        for outcome in known.values():
            claim = self.open[outcome.key]
            if outcome.result is Result.FAILED:
                self._fail(claim, outcome)
            elif outcome.result in {Result.CANCELLED, Result.RELEASED}:
                self._release([claim])
            del self.open[outcome.key]
            self.counts.completed += 1
            self._leave_attempt(outcome.key)
            if outcome.commit is not None and claim.job.type == GIT_SYNC:
                facts = (claim.job, outcome.commit, claim.attempt, self._dry_run, outcome.rejected_paths)
                after = partial(self._drain.plugins.call, "after_publish", publication=Publication(*facts))
                self._call_safely(claim.job.slug, after)

    def _judge(self, outcomes: Sequence[Outcome]) -> list[Judgement]:
        """Return for each outcome whether its job is done, has failed, or waits for declared paths.

        A missing path may be of an earlier save, which a receipt shows. `watch` and `undo` declare only files
        that they have seen, so that a draft of theirs that is gone is never missing. Only other paths are
        looked up in the remote's history, all at once: git reads the history for long.
        """
        unsure: dict[str, list[str]] = {}
        for outcome in outcomes:
            job = self.open[outcome.key].job
            is_done = outcome.result in {Result.PUBLISHED, Result.UNCHANGED}
            if is_done and outcome.missing and job.type == GIT_SYNC:
                known_saves = {*job.paths_of_programs, *self._drain.declared_earlier(job, outcome.missing)}
                unsure[outcome.key] = [path for path in outcome.missing if path not in known_saves]
        known = self._ever_had({path for paths in unsure.values() for path in paths})
        judgements = []
        for outcome in outcomes:
            claim = self.open[outcome.key]
            missing = [path for path in unsure.get(outcome.key, ()) if path not in known]
            judgement = Judgement(outcome)
            if outcome.result in {Result.PUBLISHED, Result.UNCHANGED}:
                is_last = claim.attempt >= self._drain.max_attempts
                judgement = judge(claim.job, outcome, missing, is_last_attempt=is_last)
            if judgement.leftover is not None:
                self._leftover_at[outcome.key] = self._leftover_time(claim, judgement.leftover)
            judgements.append(judgement)
        return judgements

    def _ever_had(self, paths: Collection[str]) -> Collection[str]:
        """Return the paths that the remote has or ever had; none where git cannot tell."""
        if not paths:
            return ()
        try:
            return self._drain.publisher().ever_had(paths)
        except PublishError as error:
            self._drain.emit(
                events.Warned(error=f"the history cannot be read: {error.message}", fix=error.fix)
            )
            return ()

    def complete_cancelled(self, *, except_for: Collection[str] = ()) -> None:
        """Drop the open claims whose cancellation was requested."""
        found = self._drain.queue.withdrawn([*self.open.values()], self._drain.clock()) if self.open else {}
        cancelled = [key for key, result in found.items() if result is Result.CANCELLED]
        self.complete([Outcome(key, Result.CANCELLED) for key in cancelled if key not in except_for])

    def fail(self, verdicts: Iterable[Verdict]) -> None:
        """Complete claims with their failures."""
        self.complete([Outcome(claim.key, Result.FAILED, failure=failure) for claim, failure in verdicts])

    def release(self, *, except_for: Collection[str] = ()) -> None:
        """Put the open claims back as if they had not been claimed."""
        self._release([self.open.pop(key) for key in [*self.open] if key not in except_for])

    def _release(self, claims: Sequence[Claim]) -> None:
        for claim in self._drain.queue.release(claims) if claims else ():
            self._emit_cancelled(claim)

    def _acknowledge(self, finished: Sequence[Judgement]) -> None:
        tried: list[Claim] = []
        gone: list[Claim] = []
        rejected: dict[str, Collection[str]] = {}
        for outcome, leftover, _ in finished:
            claim = self.open[outcome.key]
            if self._dry_run and outcome.result is Result.PUBLISHED and outcome.commit is not None:
                tried.append(claim)
            elif leftover is not None:
                self._acknowledge_part(claim, outcome, leftover)
            else:
                gone.append(claim)
                rejected[outcome.key] = outcome.rejected_paths
        if tried:
            self._drain.queue.mark_tried(tried, self._drain.clock())
        if gone:
            self._drain.queue.acknowledge(gone, rejected)

    def _acknowledge_part(self, claim: Claim, outcome: Outcome, leftover: Leftover) -> None:
        """Keep the job for what its commit lacks."""
        at = self._leftover_at[claim.key]
        is_kept = self._drain.queue.acknowledge_part(claim, outcome, leftover, at=at)
        if not is_kept:
            self._cancelled_rests.append(claim)
        elif leftover.retry_at is None:
            self.counts.failed += 1
            self.failed_ids.add(claim.job.id)

    def _emit_cancelled_rests(self) -> None:
        """Emit which jobs were cancelled during the push of a part of them, after the part's own outcome."""
        for claim in self._cancelled_rests:
            self._emit_cancelled(claim)
        self._cancelled_rests.clear()

    def _leftover_time(self, claim: Claim, leftover: Leftover) -> float:
        deferred = Outcome(claim.key, Result.FAILED, failure=leftover.failure, retry_at=leftover.retry_at)
        return self._retry_time(claim, deferred, None)

    def _fail(self, claim: Claim, outcome: Outcome) -> None:
        """Store and emit a failure: the job is deferred, retried after a backoff, or a dead letter."""
        failure = outcome.failure or Failure(FailureCode.INTERNAL, "the publisher gave no reason")
        kind = None if claim.job.type == GIT_SYNC else self._drain.plugins.kinds.get(claim.job.type)
        max_attempts = (kind and kind.max_attempts) or self._drain.max_attempts
        save = events.DeclaredSave.of(claim.job.model_copy(update={"failure": failure.code}))
        facts = self._facts(claim, outcome) | {"error": failure.message, "fix": failure.fix, "save": save}
        is_deferred = outcome.retry_at is not None
        if failure.code is FailureCode.MISSING:
            max_attempts = min(max_attempts, claim.attempt + MISSING_RETRIES - claim.job.missing_attempts)
        event: events.Event
        if is_deferred or (not _is_refusal(failure) and claim.attempt < max_attempts):
            at = self._retry_time(claim, outcome, kind.delays if kind else None)
            event = events.Failed(**facts, failure=failure.code.value, retry_at=at)
            is_kept = self._drain.queue.retry_later(claim, failure, at=at, counts=not is_deferred)
        else:
            event = events.DeadLettered(**facts, failure=failure.code.value)
            if failure.code is FailureCode.NO_PATHS:
                event = events.NoPaths(**facts)
            is_kept = self._drain.queue.dead_letter(claim, failure)
        if not is_kept:
            self._emit_cancelled(claim)
            return
        self.counts.failed += 1
        self.failed_ids.add(claim.job.id)
        self._drain.emit(event)

    def _retry_time(self, claim: Claim, outcome: Outcome, delays: tuple[float, ...] | None) -> float:
        now, longest = self._drain.clock(), self._drain.backoff.longest
        if outcome.retry_at is None:
            attempt = claim.attempt
            if outcome.failure and outcome.failure.code is FailureCode.MISSING:
                attempt = claim.job.missing_attempts + 1
            wait = (Backoff(delays) if delays else self._drain.backoff).delay(attempt)
        else:  # a time that has come would make the job due at once, again and again
            wait = outcome.retry_at - now if outcome.retry_at > now else self._drain.backoff.delay(1)
            wait = max(wait, SHORTEST_WAIT_S)  # such attempts are not counted, so that none is the first
        return now + min(wait, longest)  # a later one would be taken for that of a clock that ran ahead

    def _receipt(self, claim: Claim, judgement: Judgement) -> events.Event:
        outcome, leftover, is_in_part = judgement
        facts = self._facts(claim, outcome)
        if claim.job.type != GIT_SYNC or outcome.result is Result.UNCHANGED or outcome.commit is None:
            reason = f"git has written {outcome.restored} since the save" if outcome.restored else None
            return events.NoChange(**facts, reason=reason)
        if is_in_part:
            return events.PublishedInPart(**facts, commit=outcome.commit)
        self.accepted += 1
        self.has_pushed = self.has_pushed or not self._dry_run
        if leftover is not None:
            facts |= {"waiting_paths": leftover.paths, "reason": leftover.failure.message}
            if not self._dry_run:
                facts["retry_at"] = self._leftover_at[claim.key]
        return events.Published(
            **facts,
            commit=outcome.commit,
            changes=outcome.changes,
            signed_with=outcome.signed_with,
        )

    def _facts(self, claim: Claim, outcome: Outcome) -> dict[str, Any]:
        return {
            "job_id": claim.job.id,
            "slug": claim.job.slug,
            "attempt": claim.attempt,
            "dry_run": self._dry_run,
            "duration_ms": round((time.monotonic() - self._started) * 1000),
            "rejected_paths": outcome.rejected_paths,
            "job_type": claim.job.type,
            "webhook": claim.job.webhook,
            "start": self._start_of(claim),
        }

    def _emit_cancelled(self, claim: Claim) -> None:
        save = events.DeclaredSave.of(claim.job)
        self._drain.emit(events.Cancelled(job_id=claim.job.id, slug=claim.job.slug, save=save))

    def _leave_attempt(self, key: str) -> None:
        if stack := self._contexts.pop(key, None):
            self._call_safely(key, stack.close)

    def _call_safely(self, slug: str, step: Callable[[], object]) -> None:
        """Run a plugin's code for a completed job: its errors are reported and change nothing."""
        try:
            step()
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything
            failure = _plugin_failure(error)
            self._drain.emit(events.Warned(error=f"after {slug}: {failure.message}", fix=failure.fix))


def _refusal(key: str, step: Callable[[], object]) -> Outcome | None:
    """Run a plugin's code for a job; return the job's outcome if the code raised."""
    try:
        step()
    except SnoozedError as deferral:
        until = deferral.until if math.isfinite(deferral.until) else 0.0
        return Outcome(key, Result.FAILED, failure=Failure(FailureCode.PLUGIN, deferral.text), retry_at=until)
    except PublishError as error:
        return Outcome(key, Result.FAILED, failure=error.failure)
    except (StoppedError, LockLostError):
        raise
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything
        return Outcome(key, Result.FAILED, failure=_plugin_failure(error))
    return None


def _is_refusal(failure: Failure) -> bool:
    return failure.code.failure_class is FailureClass.REFUSED


def _plugin_failure(error: Exception) -> Failure:
    message = f"a plugin failed: {type(error).__name__}: {error}"
    return Failure(FailureCode.INTERNAL, message, "correct the plugin, or uninstall it")
