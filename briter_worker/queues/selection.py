"""Which jobs a command means and may change, the same for every queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from briter_worker.allowlist import normalized, parents
from briter_worker.errors import DeclinedError, FailureCode, UnknownJobError, one_line
from briter_worker.job import Program, State

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from briter_worker.job import Job
    from briter_worker.ports import ListedJob

_NOT_RETRYABLE = frozenset({FailureCode.MALFORMED, FailureCode.UNREADABLE, FailureCode.UNKNOWN_TYPE})


def is_retryable(job: Job) -> bool:
    """Return True unless the job fails again however often it is tried: only a new save helps then."""
    return job.failure not in _NOT_RETRYABLE


def paths_scheduled_later(jobs: Iterable[Job], now: float) -> list[str]:
    """Return the paths that the jobs declare whose scheduled time has not come."""
    scheduled = [job for job in jobs if (job.scheduled_for or 0.0) > now]
    return [path for job in scheduled for path in job.paths]


def is_withheld_for(job: Job, paths: Collection[str]) -> bool:
    """Return True if a waiting job may have been put off because another one had scheduled these paths."""
    if job.failure != FailureCode.UNSETTLED or job.next_attempt_at is None:
        return False
    scheduled = {normalized(path) for path in paths}
    declared = {normalized(path) for path in job.paths}
    is_inside_scheduled = not scheduled.isdisjoint(_with_parents(declared))
    contains_scheduled = not declared.isdisjoint(_with_parents(scheduled))
    return is_inside_scheduled or contains_scheduled


def _with_parents(paths: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for path in paths:
        found.update((path, *parents(path)))
    return found


def select_matching(rows: Sequence[ListedJob], wanted: str) -> list[ListedJob]:
    """Return the job of this id, else all jobs of this slug."""
    return [row for row in rows if row.job.id == wanted] or [row for row in rows if row.job.slug == wanted]


def select_existing(rows: Sequence[ListedJob], wanted: str) -> list[ListedJob]:
    """Return the job of this id, else all jobs of this slug. Raises UnknownJobError when there is none."""
    found = select_matching(rows, wanted)
    if not found:
        message = f"the queue has no job with the id or slug {one_line(wanted, 80)!r}"
        raise UnknownJobError(message, "briter-worker list --status all")
    return found


def check_undo(rows: Sequence[ListedJob], slug: str) -> None:
    """Raise DeclinedError while a save of the post waits or is in flight. `rows` are the post's jobs.

    The job of an earlier undo is no save: a second undo supersedes the first one.
    """
    saves = [row for row in rows if row.state is not State.FAILED and row.job.made_by is not Program.UNDO]
    if saves:
        text = f"the queue has a save of {one_line(slug, 80)}, which is {saves[0].state.value}"
        fix = f"briter-worker cancel {one_line(slug, 80)}, or undo when it is published"
        raise DeclinedError(f"{text}: the undo would take it back unpublished", fix)


def select_to_retry(rows: Sequence[ListedJob], wanted: str) -> list[ListedJob]:
    """Return the wanted jobs that failed or wait for a retry. Raises DeclinedError with the fix."""
    found = select_existing(rows, wanted)
    chosen = [row for row in found if row.state in {State.FAILED, State.RETRYING}]
    if not chosen:
        raise DeclinedError(f"{one_line(wanted, 80)!r} has not failed: its state is {found[0].state.value}")
    for row in chosen:
        if not is_retryable(row.job):
            raise DeclinedError(
                f"{one_line(wanted, 80)!r} would fail again ({row.job.failure}) if it was retried",
                "save the post again, then cancel this job",
            )
    return chosen


def select_retryable(rows: Sequence[ListedJob]) -> list[ListedJob]:
    """Return the dead letters that a retry can help."""
    return [row for row in rows if row.state is State.FAILED and is_retryable(row.job)]


def select_outdated(rows: Sequence[ListedJob], wanted: str) -> list[ListedJob]:
    """Return the wanted dead letters that a later version stopped. Raises DeclinedError."""
    found = select_existing(rows, wanted)
    chosen = [row for row in found if row.job.failure == FailureCode.OUTDATED]
    if not chosen:
        raise DeclinedError(f"{one_line(wanted, 80)!r} is not outdated", "leave --over out")
    return chosen


def select_to_publish_now(rows: Sequence[ListedJob], wanted: str) -> list[ListedJob]:
    """Return the wanted jobs that wait for a time. Raises DeclinedError with the fix."""
    found = select_existing(rows, wanted)
    chosen = [row for row in found if row.state in {State.SCHEDULED, State.RETRYING, State.QUIET}]
    if not chosen:
        state = found[0].state
        fix = "briter-worker retry" if state is State.FAILED else ""
        raise DeclinedError(
            f"{one_line(wanted, 80)!r} does not wait for a time: its state is {state.value}", fix
        )
    return chosen
