"""Decide what becomes of declared paths that a push did not publish.

Success is said only of what is known. A declared path that nobody ever had is tried again after the first two
delays; a file that a scheduled job or a stash holds back keeps its job waiting, at no attempt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from briter_worker.allowlist import nearest, normalized
from briter_worker.errors import Failure, FailureCode
from briter_worker.ports import Leftover, Result

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from briter_worker.job import Job
    from briter_worker.ports import Outcome

MISSING_RETRIES = 2
_NAMED = 3


class Judgement(NamedTuple):
    """The outcome of a claim, and the part of its job that stays in the queue."""

    outcome: Outcome
    leftover: Leftover | None = None
    is_in_part: bool = False
    """True if an earlier attempt published a part of the job, and the rest is given up."""


def judge(job: Job, outcome: Outcome, missing: Sequence[str], *, is_last_attempt: bool) -> Judgement:
    """Return what becomes of a published or unchanged claim. `missing`: the paths that nobody ever had."""
    in_stash = set(_covering(job.paths, outcome.stashed))
    missing = [path for path in missing if path not in in_stash]
    are_given_up = is_last_attempt or job.missing_attempts >= MISSING_RETRIES
    expected: Sequence[str] = () if are_given_up else missing
    reason = _reason_to_wait(outcome, expected)
    if reason is None:
        return _judge_final(job, outcome, missing)
    failure, retry_at = reason
    if are_given_up:
        outcome = outcome._replace(rejected_paths=(*outcome.rejected_paths, *missing))
    if outcome.result is Result.UNCHANGED:
        failed = outcome._replace(result=Result.FAILED, failure=failure, retry_at=retry_at)
        return Judgement(failed)
    left = [*expected, *_covering(job.paths, [*outcome.stashed, *outcome.withheld])]
    return Judgement(outcome, Leftover(failure, tuple(dict.fromkeys(left)), retry_at))


def _reason_to_wait(outcome: Outcome, expected: Sequence[str]) -> tuple[Failure, float | None] | None:
    """Return why and until when a job stays in the queue, as `Leftover` has it; None if the job is done.

    `expected`: missing paths that may still come.
    """
    if expected:
        return _missing(expected), None
    if outcome.stashed:
        return _stashed(outcome), 0.0
    if outcome.withheld:
        return _withheld(outcome), min(outcome.withheld.values())
    return None


def _judge_final(job: Job, outcome: Outcome, missing: Sequence[str]) -> Judgement:
    """Return the outcome of a claim that waits for nothing: its missing paths are given up.

    The claim fails if none of its paths is on the remote.
    """
    if not missing:
        return Judgement(outcome)
    given_up = outcome._replace(rejected_paths=(*outcome.rejected_paths, *missing))
    if outcome.result is Result.PUBLISHED:
        return Judgement(given_up)
    if job.published_commit is not None:  # an earlier attempt published the other paths
        in_part = given_up._replace(result=Result.PUBLISHED, commit=job.published_commit)
        return Judgement(in_part, is_in_part=True)
    unchanged_paths = set(job.paths).difference(missing, outcome.rejected_paths)
    if unchanged_paths:
        return Judgement(given_up)
    return Judgement(outcome._replace(result=Result.FAILED, failure=_missing(missing)))


def _covering(declared: Iterable[str], files: Iterable[str]) -> list[str]:
    """Return for each file the most specific declared path that is the file or a folder above it."""
    places = {normalized(path): path for path in declared}
    found = (nearest(file, places) for file in files)
    return [places[place] for place in found if place is not None]


def _missing(paths: Sequence[str]) -> Failure:
    # No colon behind a path: redaction would take it for the name of a secret.
    text = f"no such file, and the remote never had one ({_name_some(paths)})"
    fix = (
        "correct the path that the CMS declares; or put the file there, then: briter-worker retry ID-or-SLUG"
    )
    return Failure(FailureCode.MISSING, text, fix)


def _stashed(outcome: Outcome) -> Failure:
    path, stash = next(iter(outcome.stashed.items()))
    if not stash:
        text = f"git has written a conflict into {path} since the save; the post waits until it is resolved"
        fix = "resolve the conflict in the site's file, then git add the file; or save the post again"
        return Failure(FailureCode.UNSETTLED, text, fix)
    text = f"{stash}, made after the save, has another version of {path}; the post waits for that stash"
    fix = f"git stash pop {stash}, or git stash drop {stash}"
    return Failure(FailureCode.UNSETTLED, text, fix)


def _withheld(outcome: Outcome) -> Failure:
    path, until = min(outcome.withheld.items(), key=lambda each: each[1])
    if not until:
        text, fix = f"a job that cannot be read declares {path}", "save its post again, or cancel the job"
        return Failure(FailureCode.UNSETTLED, text, fix)
    text = f"{path} belongs to a scheduled post and is not published before its time"
    return Failure(FailureCode.UNSETTLED, text, "publish the scheduled post now, or cancel it")


def _name_some(paths: Collection[str]) -> str:
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    return f"{', '.join([*paths][:_NAMED])}{more}"
