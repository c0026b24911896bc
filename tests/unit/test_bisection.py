"""Which pushes the search for the claim at fault makes, and what it concludes from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from briter_worker.bisection import Bisection
from briter_worker.errors import Failure, FailureCode, PublishError, PushRejectedError, SlowBatchError
from briter_worker.job import Job
from briter_worker.ports import Claim

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

F = FailureCode


def claims_of(count: int) -> list[Claim]:
    made = []
    for number in range(count):
        slug = f"post-{number}"
        job = Job.model_validate({"id": f"id {slug}", "slug": slug, "paths": [f"content/{slug}.md"]})
        made.append(Claim(slug, job, 1))
    return made


def search(
    claims: Sequence[Claim], push: Callable[[Sequence[Claim]], Exception | None]
) -> tuple[int, dict[int, Failure]]:
    """Return the number of pushes, and the failures by the number of the claim, each of them once."""
    bisection, pushes, found, order = Bisection(claims), 0, [], {each.key: n for n, each in enumerate(claims)}
    while piece := bisection.next_piece():
        pushes += 1
        error = push(piece)
        found += bisection.note_failed(piece, error) if error else bisection.note_passed()
    found += bisection.rest()
    failures = {order[each.claim.key]: each.failure for each in found}
    assert len(failures) == len(found)
    return pushes, failures


def refusal(words: str, *, is_known: bool = False) -> PushRejectedError:
    condition = Failure(F.PROTECTED if is_known else F.REMOTE_REFUSED, words)
    return PushRejectedError(words, "change it", condition, is_known=is_known)


def refuses(bad: Collection[int]) -> Callable[[Sequence[Claim]], Exception | None]:
    """A remote that minds these posts."""
    keys = {f"post-{number}" for number in bad}
    return lambda piece: None if keys.isdisjoint(each.key for each in piece) else refusal("no swearing")


@pytest.mark.parametrize("count", [2, 3, 10, 500])
@pytest.mark.parametrize("is_known", [False, True])
def test_a_remote_that_refuses_everything_is_one_condition_and_costs_few_pushes(
    count: int,
    is_known: bool,  # noqa: FBT001
) -> None:
    pushes, failures = search(claims_of(count), lambda _: refusal("no", is_known=is_known))
    assert {each.code for each in failures.values()} == {F.PROTECTED if is_known else F.REMOTE_REFUSED}
    assert len(failures) == count
    assert pushes <= 21


@pytest.mark.parametrize(
    "words", ["commit 3f5e{n}a of {slug}: no date", "{path} is 1{n} MB", "see https://h/{n}: 'x{n}' is bad"]
)
def test_numbers_ids_and_names_make_no_difference_between_refusals(words: str) -> None:
    def push(piece: Sequence[Claim]) -> Exception:
        job = piece[0].job
        return refusal(words.format(n=len(job.slug) * 7, slug=job.slug, path=job.paths[0]))

    failures = search(claims_of(12), push)[1]
    assert {each.code for each in failures.values()} == {F.REMOTE_REFUSED}


def test_posts_that_are_refused_with_words_of_their_own_are_refused_each_for_itself() -> None:
    why = ["no date", "no title", "no picture"]
    failures = search(claims_of(3), lambda piece: refusal(why[int(piece[0].job.slug[-1])]))[1]
    assert [failures[number].code for number in range(3)] == [F.REJECTED] * 3


@pytest.mark.parametrize(
    "bad", [{0}, {7}, {0, 1}, {0, 7}, {3, 4}, {6, 7}, {0, 1, 2, 3}, {4, 5, 6, 7}], ids=str
)
def test_posts_at_fault_are_found_and_the_others_pass(bad: set[int]) -> None:
    failures = search(claims_of(8), refuses(bad))[1]
    assert failures.keys() == bad
    assert {each.code for each in failures.values()} == {F.REJECTED}


def test_where_a_single_job_is_due_a_known_sentence_decides_and_other_words_refuse_the_post() -> None:
    assert search(claims_of(1), lambda _: refusal("GH006", is_known=True))[1][0].code is F.PROTECTED
    assert search(claims_of(1), lambda _: refusal("try again"))[1][0].code is F.REJECTED


def slow(bad: Collection[int]) -> Callable[[Sequence[Claim]], Exception | None]:
    """A remote or a filter that is too slow for these posts."""
    keys, failure = {f"post-{number}" for number in bad}, Failure(F.TIMEOUT, "too slow", "wait")
    return lambda piece: None if keys.isdisjoint(each.key for each in piece) else SlowBatchError(failure)


def test_a_post_that_is_too_slow_is_found_with_three_time_outs_and_named() -> None:
    pushes, failures = search(claims_of(4), slow({2}))
    assert failures.keys() == {2}
    assert failures[2].code is F.TIMEOUT
    assert failures[2].fix == "the post post-2: wait"
    assert pushes <= 5


def test_three_time_outs_end_the_search_and_the_rest_is_published() -> None:
    pushes, failures = search(claims_of(500), slow({0}))
    assert failures.keys() == set(range(125))
    assert "one of the posts post-0, post-1, post-2 and 122 more" in failures[0].fix
    assert pushes == 5


def test_a_remote_that_is_too_slow_for_all_posts_costs_five_time_outs() -> None:
    pushes, failures = search(claims_of(500), slow(range(500)))
    assert (pushes, len(failures)) == (5, 500)


def test_a_silent_remote_costs_one_time_out() -> None:
    pushes, failures = search(claims_of(500), lambda _: PublishError(F.TIMEOUT, "silence"))
    assert (pushes, len(failures)) == (1, 500)


def test_a_remote_that_falls_silent_during_the_search_is_not_asked_again() -> None:
    answers = iter([refusal("no"), refusal("no"), PublishError(F.TIMEOUT, "silence")])
    pushes, failures = search(claims_of(500), lambda _: next(answers))
    assert (pushes, len(failures)) == (3, 500)
    assert {each.code for each in failures.values()} == {F.TIMEOUT}


def test_of_any_other_failure_a_smaller_batch_would_fail_as_well() -> None:
    pushes, failures = search(claims_of(500), lambda _: PublishError(F.AUTH, "who are you?"))
    assert (pushes, len(failures)) == (1, 500)
