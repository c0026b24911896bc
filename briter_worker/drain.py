"""The one use case: claim what is due, publish it with one push, acknowledge each job.

Every claim is completed exactly once, whatever the publisher does; the change is stored before it is emitted.
"""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from briter_worker.batch import Batch, Counts
from briter_worker.errors import (
    OS_FIXES,
    Failure,
    FailureClass,
    FailureCode,
    LockLostError,
    PublishError,
    StoppedError,
    UnavailableError,
)
from briter_worker.events import JobStarted, Quarantined, Revived, Superseded, Warned
from briter_worker.job import GIT_SYNC
from briter_worker.ports import Outcome, Request, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from briter_worker.ports import Change, Claim, ClaimResult, EventSink, Extensions, Publisher, Queue
    from briter_worker.retry import Backoff

_MAX_TITLE = 200


class Drain:
    """Publishes what is due in one site's queue, until `stopping`.

    Raises LockLostError, with nothing left claimed, when the site may be another worker's. Raises
    UnavailableError when the queue cannot be reached; the next `recover` finds what is claimed then.
    """

    def __init__(
        self,
        *,
        queue: Queue,
        publisher: Callable[[], Publisher],
        emit: EventSink,
        extensions: Extensions,
        backoff: Backoff,
        max_attempts: int,
        dry_run: bool,
        stopping: Callable[[], bool],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._queue = queue
        self._open_publisher = publisher
        self._emit = emit
        self._max_attempts = max_attempts
        self._dry_run = dry_run
        self._stopping = stopping
        self._clock = clock
        self._new_batch = partial(
            Batch,
            queue=queue,
            emit=emit,
            extensions=extensions,
            backoff=backoff,
            max_attempts=max_attempts,
            dry_run=dry_run,
            clock=clock,
        )
        self._last_doubt = ""

    def run(self) -> Counts | None:
        """Publish what is due; return None if nothing was."""
        found = self._queue.claim(self._clock())
        self._report(found)
        counts = Counts(failed=len(found.quarantined))
        if found.claims:
            counts.add(self._drain(found.claims))
        return counts if found.claims or found.quarantined else None

    def recover(self) -> Counts:
        """Complete what is in flight: acknowledge what landed, and publish the rest again, job by job.

        Jobs whose push the remote did not answer for stay in flight and count as undecided.
        """
        # What a live worker had pushed before it died is published, also if a dry run finds it.
        batch = self._new_batch(self._queue.recover(self._clock()), dry_run=False)
        undecided = self._resolve(batch)
        for claim in [claim for key, claim in batch.open.items() if key not in undecided]:
            if self._stopping():
                break  # the next start finds it in flight
            claimed = self._queue.reclaim(claim, self._clock())
            if claim.alone and claimed.attempt > self._max_attempts:
                poisoned = self._new_batch([claimed])
                poisoned.fail([claimed.key], _poison_failure(claimed))
                batch.counts.add(poisoned.counts)
            else:
                batch.counts.add(self._drain([claimed]))
        batch.counts.undecided += len(undecided & batch.open.keys())
        return batch.counts

    def _resolve(self, batch: Batch) -> frozenset[str]:
        """Acknowledge what landed of the recorded plans; return the keys of the claims still undecided."""
        doubt: Failure | None = None
        try:
            publisher = self._open_publisher()
        except PublishError as error:  # nobody knows the plans
            doubt, undecided = error.failure, frozenset(batch.open)
        else:
            try:
                for landed in publisher.resolve():
                    batch.complete([Outcome(key, Result.PUBLISHED, commit) for key, commit in landed.items()])
            except StoppedError:
                pass  # the plans that were not asked about are undecided
            except (LockLostError, UnavailableError):
                raise
            except Exception as error:  # noqa: BLE001 - an error here must not stop the other jobs
                doubt = _failure_of(error)
            undecided = frozenset(publisher.undecided()) & batch.open.keys()
        batch.complete_cancelled(except_for=undecided)
        self._report_doubt(doubt if undecided else None)
        return undecided

    def _report_doubt(self, doubt: Failure | None) -> None:
        """Warn once per reason why jobs in flight have to wait."""
        message = doubt.message if doubt else ""
        if doubt and message != self._last_doubt:
            self._emit(Warned(error=f"jobs in flight wait for the remote: {message}", fix=doubt.fix))
        self._last_doubt = message

    def _report(self, found: ClaimResult) -> None:
        for old in found.superseded:
            self._emit(Superseded(job_id=old.job_id, slug=old.slug, superseded_by=old.by))
        for file in found.quarantined:
            self._emit(Quarantined(job_id=file.job_id, slug=file.slug, error=file.reason, file=file.file))

    def _drain(self, claims: Sequence[Claim]) -> Counts:
        """Publish the claims with one push, and complete each of them."""
        batch = self._new_batch(claims)
        for claim in claims:
            self._emit(
                JobStarted(
                    job_id=claim.job.id,
                    slug=claim.job.slug,
                    attempt=claim.attempt,
                    dry_run=self._dry_run,
                    title=claim.job.commit_message.partition("\n")[0][:_MAX_TITLE],
                    saved_at=claim.job.created_at,
                    due_at=claim.job.scheduled_for,
                )
            )
        with batch:
            try:
                batch.enter_attempts()
                self._handle_other_types(batch)
                self._publish(batch, [_request(claim) for claim in batch.open.values()])
            except StoppedError:
                undecided = self._resolve(batch)
                batch.counts.undecided = len(undecided)
                batch.release(except_for=undecided)
            except (LockLostError, UnavailableError):
                with suppress(OSError, PublishError):
                    batch.release(except_for=self._undecided(batch))
                raise
        if batch.has_pushed:
            for job in self._queue.requeue(self._clock(), batch.failed_ids):
                self._emit(Revived(job_id=job.id, slug=job.slug))
        return batch.counts

    def _handle_other_types(self, batch: Batch) -> None:
        """Have plugins handle the jobs of their own types, one after another."""
        for claim in [claim for claim in batch.open.values() if claim.job.type != GIT_SYNC]:
            if self._stopping():
                raise StoppedError
            batch.complete_cancelled()
            if claim.key in batch.open:
                batch.complete([batch.handle(claim)])

    def _publish(self, batch: Batch, requests: Sequence[Request]) -> None:
        """Publish the requests with one push; halve them while one of them is at fault."""
        if not requests:
            return
        if self._stopping():
            raise StoppedError
        overtaken: set[str] = set()

        def scheduled() -> Mapping[str, float]:
            """Look, before and after the files are read, also for saves that claims must wait for."""
            overtaken.update(self._queue.overtaken(list(batch.open.values()), self._clock()))
            return self._queue.scheduled_paths(self._clock())

        def check(key: str, changes: Sequence[Change]) -> Outcome | None:
            return Outcome(key, Result.RELEASED) if key in overtaken else batch.check(key, changes)

        try:
            for outcomes in self._open_publisher().publish(
                requests,
                scheduled=scheduled,
                check=check,
                cancelled=lambda: self._queue.cancelled(list(batch.open.values())),
                now=self._clock(),
            ):
                batch.complete(outcomes)
        except (LockLostError, UnavailableError, StoppedError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever happens to a batch never ends the worker
            self._publish_less(batch, requests, _failure_of(error))

    def _publish_less(self, batch: Batch, requests: Sequence[Request], failure: Failure) -> None:
        """Fail the requests of a failed push, or publish them in halves until one at fault stands alone."""
        undecided = self._undecided(batch)
        batch.counts.undecided = len(undecided)
        left = [each for each in requests if each.key in batch.open and each.key not in undecided]
        if len(left) > 1 and _is_one_jobs_fault(failure):
            middle = len(left) // 2
            self._publish(batch, left[:middle])
            self._publish(batch, left[middle:])
        else:
            batch.fail([each.key for each in left], failure)

    def _undecided(self, batch: Batch) -> frozenset[str]:
        """Return the keys of the open claims whose push may have landed."""
        try:
            return frozenset(self._open_publisher().undecided()) & batch.open.keys()
        except PublishError:  # the publisher never opened, so nothing was pushed
            return frozenset()
        except OSError:
            return frozenset(batch.open)


def _request(claim: Claim) -> Request:
    job = claim.job
    author = (job.author.name, job.author.email) if job.author else None
    return Request(claim.key, job.slug, job.paths, job.commit_message, author)


def _failure_of(error: Exception) -> Failure:
    """Return the failure that an exception of the publisher means for its requests."""
    match error:
        case PublishError():
            return error.failure
        case OSError() if error.errno in OS_FIXES:
            return PublishError.from_os("the queue or the repository cannot be used", error).failure
        case MemoryError():
            return Failure(FailureCode.INTERNAL, "the memory does not suffice", "give the worker more memory")
        case _:
            message = f"an error in the worker itself: {type(error).__name__}: {error}"
            return Failure(FailureCode.INTERNAL, message, "report it to the developers of Briter Worker")


def _is_one_jobs_fault(failure: Failure) -> bool:
    """Return True if a smaller batch may succeed."""
    return failure.code is FailureCode.INTERNAL or failure.code.failure_class is FailureClass.REFUSED


def _poison_failure(claim: Claim) -> Failure:
    return Failure(
        FailureCode.KILLED_WORKER,
        f"the worker died while it published this job alone; {claim.attempt - 1} attempts were made",
        "check the files of the post, then save it again",
    )
