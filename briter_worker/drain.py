"""The one use case: claim what is due, publish it with one push, settle each job.

Every claim is settled exactly once, whatever the publisher does; what is stored comes before what is told.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from posixpath import normpath
from typing import TYPE_CHECKING

from briter_worker.attempts import Attempts
from briter_worker.errors import AwayError, Failure, LockLostError, PublishError, Stopped, explained
from briter_worker.events import Flushed, JobStarted, Quarantined, Revived, Superseded, Warned
from briter_worker.job import GIT_SYNC
from briter_worker.ports import Outcome, Request
from briter_worker.settling import Desk, Tally, Work
from briter_worker.strictjson import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from briter_worker.ports import Batch, Change, Claim, Found, Plan, Publisher


_TITLE = 200
_UNREACHABLE = frozenset({Failure.NETWORK, Failure.TIMEOUT})


class Drain:
    """Empties one site's queue through one publisher, until `stopping`.

    Raises LockLostError, with nothing left claimed, when the site may be another worker's; AwayError when the
    queue cannot be asked: what is claimed then, the next one's `recover` finds.
    """

    def __init__(
        self, desk: Desk, publisher: Callable[[], Publisher], *, stopping: Callable[[], bool]
    ) -> None:
        self._desk = desk
        self._queue = desk.queue
        self._emit = desk.emit
        self._clock = desk.clock
        self._publisher = publisher
        self._stopping = stopping
        self._doubts = ""
        """Why jobs in flight had to wait, as it was told last: told again only when it changes."""

    def recover(self) -> Tally:
        """Finish what a dead worker left in flight: settle what has landed, take the rest up again.

        What the remote could not be asked about stays as it is, and is counted as undecided; what a stop
        leaves is for the next start.
        """
        tally = Tally()
        doubt: PublishError | None = None
        for batch in self._queue.recover(self._clock()):
            if self._stopping():
                return tally
            if doubt is not None and batch.plans and doubt.failure in _UNREACHABLE:
                tally.undecided += len(batch.claims)  # asking again would only take as long again
                continue
            try:
                landed = self._ask(batch)
            except Stopped:
                return tally
            except PublishError as failure:
                # Until the remote says whether it has them, nothing may be decided about these jobs.
                doubt = failure
                tally.undecided += len(batch.claims)
                continue
            tally.add(self._take_up(batch, landed))
        self._tell_doubt(doubt)
        return tally

    def _ask(self, batch: Batch) -> Sequence[Outcome]:
        try:
            return self._landed(batch, batch.plans)
        except (PublishError, Stopped, LockLostError, AwayError):
            raise
        except Exception as error:
            # It must not keep the other jobs from being published.
            raise PublishError(Failure.INTERNAL, _mistake(error)) from error

    def _take_up(self, batch: Batch, landed: Sequence[Outcome]) -> Tally:
        work = Work(self._desk, batch)
        work.settle(landed)
        work.cancel()
        tally = work.tally
        left = tuple(work.open.values())
        if not left:
            self._queue.close(batch)
        else:
            for part in self._queue.retake(replace(batch, claims=left), self._clock()):
                if self._stopping():
                    break
                self._queue.begin(part)
                tally.add(self._publish(part))
        return tally

    def run(self) -> Tally | None:
        """Publish what is due; None when nothing was."""
        found = self._queue.claim(self._clock())
        self._tell(found)
        if found.batch is None:
            return Tally(failed=len(found.put_aside)) if found.put_aside else None
        tally = self._publish(found.batch)
        tally.failed += len(found.put_aside)
        return tally

    def flush(self) -> None:
        """Push what dry runs have committed. Raises PublishError."""
        commit = self._publisher().flush(self._clock())
        if commit is not None:
            self._emit(Flushed(commit=commit))
            self._revive()

    def _tell_doubt(self, doubt: PublishError | None) -> None:
        text = doubt.text if doubt else ""
        if text and text != self._doubts:
            self._emit(Warned(error=f"jobs in flight have to wait: {text}"))
        self._doubts = text

    def _tell(self, found: Found) -> None:
        for old in found.superseded:
            self._emit(Superseded(job_id=old.job_id, slug=old.slug, superseded_by=old.by))
        for aside in found.put_aside:
            self._emit(Quarantined(job_id=aside.job_id, slug=aside.slug, error=aside.reason, file=aside.file))

    def _publish(self, batch: Batch) -> Tally:
        work = Work(self._desk, batch)
        for claim in batch.claims:
            self._emit(
                JobStarted(
                    job_id=claim.job.id,
                    slug=claim.job.slug,
                    attempt=claim.attempt,
                    dry_run=self._desk.dry_run,
                    title=claim.job.commit_message.partition("\n")[0][:_TITLE],
                    saved_at=claim.job.created_at,
                    due_at=claim.job.scheduled_for,
                )
            )
        work.settle(hopeless(batch.claims, self._desk.max_attempts, self._is_handled))
        with Attempts(self._desk.extensions, self._emit, dry_run=self._desk.dry_run) as attempts:
            work.settle(attempts.begin(work.open.values()))
            if not self._try(batch, work, attempts):
                return work.tally  # the next start asks the remote what became of them
        self._queue.close(batch)
        if work.pushed:
            self._revive()
        return work.tally

    def _try(self, batch: Batch, work: Work, attempts: Attempts) -> bool:
        """Settle what can be settled; whether it could be found out what became of all of it."""
        try:
            self._handle(work, attempts)
            self._run_publisher(work, attempts)
        except LockLostError:
            # Raised before a push, so that none of these is on the remote.
            with suppress(OSError):
                self._release(batch, work)
                self._queue.close(batch)
            raise
        except AwayError:
            # Nothing that could go to the remote has been planned: they wait as before. Else the next drain
            # asks the remote.
            if not work.plans:
                with suppress(OSError):
                    self._release(batch, work)
                    self._queue.close(batch)
            raise
        except Stopped:
            return self._stopped(batch, work)
        except PublishError as failure:
            work.fail_rest(failure.failure, failure.text)
        except OSError as error:
            # The queue or the repository cannot be written: every post would fail alike.
            work.fail_rest(Failure.DISK, explained(error))
        except Exception as error:  # noqa: BLE001 - whatever happens to a batch is never the worker's end
            work.fail_rest(Failure.INTERNAL, _mistake(error))
        return True

    def _is_handled(self, name: str) -> bool:
        return name == GIT_SYNC or self._desk.extensions.kind(name) is not None

    def _handle(self, work: Work, attempts: Attempts) -> None:
        """Jobs of other types are their plugins' own, one after another; a stop leaves the rest."""
        for claim in [claim for claim in work.open.values() if claim.job.type != GIT_SYNC]:
            if self._stopping():
                raise Stopped
            work.cancel()
            if claim.key in work.open:
                outcome = attempts.handle(claim)
                work.settle([outcome])
                attempts.end([outcome])

    def _run_publisher(self, work: Work, attempts: Attempts) -> None:
        requests = [_request(claim) for claim in work.open.values()]
        if not requests:
            return
        now = self._clock()
        held = self._queue.held_paths(now)
        for outcomes in self._publisher().publish(
            requests,
            held=held,
            examine=self._examiner(work.batch, attempts, held),
            cancelled=lambda: self._queue.cancelled(work.batch),
            record=work.record,
            now=now,
        ):
            work.settle(outcomes)
            attempts.end(outcomes)

    def _examiner(
        self, batch: Batch, attempts: Attempts, held: Collection[str]
    ) -> Callable[[str, Sequence[Change]], Outcome | None]:
        """What is asked about each request once all of them have been read.

        A post that was saved on hold meanwhile may have been read with them: those that declare its files
        wait for the next claim, which knows of it.
        """
        since: frozenset[str] | None = None
        overtaken: Collection[str] = ()

        def examine(key: str, changes: Sequence[Change]) -> Outcome | None:
            nonlocal since, overtaken
            if since is None:
                now = self._clock()
                new = self._queue.held_since(held, now)
                since = frozenset(normpath(path) for path in new)
                overtaken = self._queue.overtaken(batch, now)
            if key in overtaken or (since and any(_is_within(change.path, since) for change in changes)):
                return Outcome(key, overtaken=True)
            return attempts.examine(key, changes)

        return examine

    def _stopped(self, batch: Batch, work: Work) -> bool:
        """Settle what the interrupted push has brought to the remote; whether that could be found out."""
        try:
            work.settle(self._landed(batch, work.plans[-1:]))
        except PublishError as failure:
            self._emit(Warned(error=f"what became of the last push is not known yet: {failure.text}"))
            return False
        self._release(batch, work)
        return True

    def _release(self, batch: Batch, work: Work) -> None:
        self._queue.release(batch, list(work.open.values()))
        work.cancel()  # after it: until then, somebody may want one of them cancelled

    def _landed(self, batch: Batch, plans: Sequence[Plan]) -> list[Outcome]:
        keys = {claim.key for claim in batch.claims}
        found: dict[str, Outcome] = {}
        for plan in plans:
            if plan.commits.keys() & keys and self._publisher().landed(plan):
                found.update(
                    {key: Outcome(key, commit) for key, commit in plan.commits.items() if key in keys}
                )
        return list(found.values())

    def _revive(self) -> None:
        for job in self._queue.revive(self._clock()):
            self._emit(Revived(job_id=job.id, slug=job.slug))


def hopeless(
    claims: Iterable[Claim], max_attempts: int, is_handled: Callable[[str], bool] = GIT_SYNC.__eq__
) -> Sequence[Outcome]:
    """What need not be tried: kinds of job nobody handles, and jobs that killed worker after worker.

    The job tells the attempts that ended in the open. A claim counts one more; each death while it was
    alone adds one, so only then can it be further ahead. A job that merely has more attempts behind it
    than are allowed by now gets this one.
    """
    outcomes: list[Outcome] = []
    for claim in claims:
        if not is_handled(claim.job.type):
            text = f"no plugin handles the type {quoted(claim.job.type)}. Fix: leave type out, or install it"
            outcomes.append(Outcome(claim.key, failure=Failure.UNKNOWN_TYPE, text=text))
        elif claim.attempt > max(max_attempts, claim.job.attempts + 1):
            outcomes.append(Outcome(claim.key, failure=Failure.KILLED_WORKER, text=_deadly(claim)))
    return outcomes


def _is_within(path: str, declared: Collection[str]) -> bool:
    """Whether the path, or a folder above it, is declared."""
    return path in declared or any(path[:i] in declared for i, c in enumerate(path) if c == "/")


def _deadly(claim: Claim) -> str:
    deaths = claim.attempt - claim.job.attempts - 1
    times = "once" if deaths == 1 else f"{deaths} times"
    besides = f", and {claim.job.attempts} of its attempts failed" if claim.job.attempts else ""
    what = f"the worker died {times} while it tried this job alone{besides}"
    return f"{what}. Fix: look at its files, save it again"


def _mistake(error: Exception) -> str:
    return f"an error in the worker itself: {type(error).__name__}: {error}. Fix: please report it"


def _request(claim: Claim) -> Request:
    job = claim.job
    author = (job.author.name, job.author.email) if job.author else None
    return Request(claim.key, job.slug, job.paths, job.commit_message, author)
