"""What every queue does, whatever it is made of. Time is an argument throughout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from postgres import add_site
from queue_backends import LONGEST_DELAY, NOW, Backend, Disk, Postgres

from briter_worker.errors import DeclinedError, Failure, FailureCode
from briter_worker.job import QuietTime, State, format_time
from briter_worker.ports import Leftover, Outcome, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from briter_worker.ports import Claim
    from briter_worker.queues.postgres.database import Database

PENDING, SCHEDULED, RETRYING = State.PENDING, State.SCHEDULED, State.RETRYING
CLAIMED, FAILED, TRIED, QUIET = State.CLAIMED, State.FAILED, State.TRIED, State.QUIET
QUIET_TIME = QuietTime(2.0, 10.0)
NETWORK = Failure(FailureCode.NETWORK, "no network", "check the network")
REJECTED = Failure(FailureCode.REJECTED, "the remote refused it")


@pytest.fixture(params=["disk", "disk-named-after-slugs", "postgres"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    """An empty queue. Another one is another parameter here, and nothing else."""
    if request.param == "postgres":
        database: Database = request.getfixturevalue("database")
        return Postgres(database, add_site(database))
    return Disk(tmp_path, named_after_slugs=request.param == "disk-named-after-slugs")


def claimed(engine: Backend, now: float = NOW) -> tuple[Claim, ...]:
    claims = engine.queue.claim(now).claims
    assert claims
    return claims


def in_flight(engine: Backend, slug: str, paths: list[str], **keys: Any) -> tuple[Claim, ...]:  # noqa: ANN401
    """Save a job and claim what is due."""
    engine.save(slug, paths, **keys)
    return claimed(engine)


def slugs(claims: Sequence[Claim]) -> list[str]:
    return [claim.job.slug for claim in claims]


def keys(claims: Sequence[Claim]) -> set[str]:
    return {claim.key for claim in claims}


def acknowledge(engine: Backend, claims: Sequence[Claim]) -> None:
    engine.queue.acknowledge(claims, {})


def retry_later(engine: Backend, claims: Sequence[Claim], at: float = NOW + 60) -> None:
    for claim in claims:
        assert engine.queue.retry_later(claim, NETWORK, at=at)


def dead_letter(engine: Backend, claims: Sequence[Claim], failure: Failure = REJECTED) -> None:
    for claim in claims:
        assert engine.queue.dead_letter(claim, failure)


def release(engine: Backend, claims: Sequence[Claim]) -> None:
    assert list(engine.queue.release(claims)) == []


# Claims


def test_an_empty_queue_has_nothing_to_claim(engine: Backend) -> None:
    found = engine.queue.claim(NOW)
    assert (found.claims, found.superseded, found.quarantined) == ((), (), ())
    assert engine.queue.next_due(NOW) is None
    assert list(engine.queue.recover(NOW)) == []
    assert (dict(engine.queue.unusable_files(NOW)), list(engine.queue.quarantined())) == ({}, [])


def test_a_due_job_is_claimed_once(engine: Backend) -> None:
    (claim,) = in_flight(engine, "a", ["a.md"])
    assert (claim.job.slug, claim.job.paths, claim.attempt, claim.alone) == ("a", ("a.md",), 1, True)
    assert engine.queue.claim(NOW).claims == ()
    assert engine.rows("a") == [(CLAIMED, ("a.md",))]


def test_jobs_come_by_due_time_and_then_by_age(engine: Backend) -> None:
    engine.save("late", ["x"], created=NOW - 9, scheduledFor=format_time(NOW - 1))
    engine.save("old", ["x"], created=NOW - 5)
    engine.save("young", ["x"], created=NOW - 2)
    claims = claimed(engine)
    assert slugs(claims) == ["old", "young", "late"]
    assert not any(claim.alone for claim in claims)


def test_a_scheduled_job_waits_for_its_time(engine: Backend) -> None:
    engine.save("a", ["a.md", "b.png"], scheduledFor=format_time(NOW + 100))
    assert engine.queue.claim(NOW + 99).claims == ()
    assert engine.queue.next_due(NOW) == NOW + 100
    assert engine.rows("a") == [(SCHEDULED, ("a.md", "b.png"))]
    assert slugs(claimed(engine, NOW + 100)) == ["a"]


def test_the_paths_of_scheduled_jobs_are_known_with_their_times(engine: Backend) -> None:
    engine.save("plain", ["plain.md"])
    engine.save("held", ["held.md"], scheduledFor=format_time(NOW + 100))
    for now in (NOW, NOW + 1):  # the second time without computing them again
        assert dict(engine.queue.scheduled_paths(now)) == {"held.md": NOW + 100}
    engine.save("more", ["more.md"], scheduledFor=format_time(NOW + 50))
    assert dict(engine.queue.scheduled_paths(NOW + 2)) == {"held.md": NOW + 100, "more.md": NOW + 50}
    assert dict(engine.queue.scheduled_paths(NOW + 50)) == {"held.md": NOW + 100}


def test_a_retry_further_away_than_any_backoff_is_due_because_a_clock_was_set_back(engine: Backend) -> None:
    ahead = format_time(NOW + 86_400)
    engine.save("a", ["x"], attempts=1, nextAttemptAt=format_time(NOW + LONGEST_DELAY + 5), updatedAt=ahead)
    engine.save("b", ["x"], attempts=1, nextAttemptAt=format_time(NOW + LONGEST_DELAY - 5), updatedAt=ahead)
    assert slugs(claimed(engine)) == ["a"]


def test_a_clock_set_back_while_running_does_not_delay_a_retry(engine: Backend) -> None:
    retry_later(engine, in_flight(engine, "a", ["x"]), NOW + 60)
    assert engine.queue.claim(NOW).claims == ()
    assert slugs(claimed(engine, NOW - 86_400)) == ["a"]


# Saving again


def test_the_newest_save_wins_and_has_the_paths_of_both(engine: Backend) -> None:
    old = engine.save("a", ["a.md", "old.png"], created=NOW - 2, name="one")
    new = engine.save("a", ["a.md", "new.png"], created=NOW - 1, name="two")
    found = engine.queue.claim(NOW)
    (claim,) = found.claims
    assert (claim.job.id, claim.job.paths) == (new, ("a.md", "new.png", "old.png"))
    assert [(s.job_id, s.slug, s.superseded_by) for s in found.superseded] == [(old, "a", new)]
    acknowledge(engine, found.claims)
    assert engine.rows("a") == []


def test_the_newest_save_wins_also_when_it_is_scheduled_and_the_older_is_due(engine: Backend) -> None:
    engine.save("a", ["old.md"], created=NOW - 2, name="one")
    engine.save("a", ["new.md"], created=NOW - 1, name="two", scheduledFor=format_time(NOW + 50))
    expected = [(SCHEDULED, ("new.md", "old.md"))]
    assert engine.rows("a") == expected  # before the saves are joined
    found = engine.queue.claim(NOW)
    assert found.claims == ()
    assert len(found.superseded) == 1
    assert engine.rows("a") == expected
    assert set(engine.queue.scheduled_paths(NOW)) == {"new.md", "old.md"}
    (claim,) = claimed(engine, NOW + 50)
    assert claim.job.paths == ("new.md", "old.md")


# In a database, saves are in the order of their arrival. A folder has no such order.
by_creation_time = pytest.mark.parametrize("engine", ["disk", "disk-named-after-slugs"], indirect=True)


@by_creation_time
def test_the_creation_time_decides_not_the_order_of_writing(engine: Backend) -> None:
    newest = engine.save("a", ["new"], created=NOW - 1, name="one")
    engine.save("a", ["old"], created=NOW - 5, name="two")
    engine.save("a", ["older"], created=NOW - 7, name="three")
    (claim,) = claimed(engine)
    assert claim.job.id == newest
    assert set(claim.job.paths) == {"new", "old", "older"}


@pytest.mark.parametrize("settle", [retry_later, release], ids=["retried later", "released"])
def test_a_save_during_the_work_takes_over_what_comes_back(
    engine: Backend, settle: Callable[[Backend, Sequence[Claim]], None]
) -> None:
    claims = in_flight(engine, "a", ["a.md", "old.png"], created=NOW - 2)
    new = engine.save("a", ["a.md"], created=NOW - 1, message="the newest")
    settle(engine, claims)
    assert engine.rows("a") == [(PENDING, ("a.md", "old.png"))]
    found = engine.queue.claim(NOW)
    (claim,) = found.claims
    assert (claim.job.id, claim.job.message, claim.attempt) == (new, "the newest", 1)
    assert claim.job.paths == ("a.md", "old.png")
    assert {s.superseded_by for s in found.superseded} <= {new}


def test_a_save_during_the_work_is_published_after_the_older_was(engine: Backend) -> None:
    claims = in_flight(engine, "a", ["a.md", "old.png"], created=NOW - 2)
    new = engine.save("a", ["a.md"], created=NOW - 1)
    acknowledge(engine, claims)
    (claim,) = claimed(engine)
    assert (claim.job.id, claim.job.paths) == (new, ("a.md",))


def test_a_save_during_the_work_takes_over_the_paths_of_the_older_that_is_refused(engine: Backend) -> None:
    claims = in_flight(engine, "a", ["a.md", "huge.bin"], created=NOW - 2)
    new = engine.save("a", ["a.md"], created=NOW - 1)
    dead_letter(engine, claims)
    assert engine.rows("a") == [(PENDING, ("a.md", "huge.bin"))]
    again = claimed(engine)
    assert [(c.job.id, c.job.paths) for c in again] == [(new, ("a.md", "huge.bin"))]
    acknowledge(engine, again)
    assert engine.rows("a") == []


def test_a_save_may_be_claimed_while_the_older_is_in_flight(engine: Backend) -> None:
    first = in_flight(engine, "a", ["old"], created=NOW - 2)
    second = in_flight(engine, "a", ["new"], created=NOW - 1)
    assert keys(first).isdisjoint(keys(second))
    retry_later(engine, first)
    acknowledge(engine, second)
    assert engine.rows("a") == [(RETRYING, ("old",))]


@by_creation_time
def test_an_older_save_that_turns_up_late_joins_the_one_that_comes_back(engine: Backend) -> None:
    claims = in_flight(engine, "a", ["new"], created=NOW - 1)
    engine.save("a", ["old"], created=NOW - 9)
    retry_later(engine, claims, NOW + 60)
    assert engine.queue.claim(NOW).claims == ()
    assert engine.rows("a") == [(RETRYING, ("new", "old"))]


# Saves of the worker's own programs (`watch`, `undo`)


def held_and_found(engine: Backend, made_by: str = "watch") -> None:
    """A producer schedules a post; a program makes a due job of the same slug afterwards."""
    engine.save(
        "a", ["held.md"], created=NOW - 9, name="one", scheduledFor=format_time(NOW + 50), message="M"
    )
    engine.save("a", ["photo.png", "held.md"], created=NOW - 1, name="two", madeBy=made_by)


@pytest.mark.parametrize("made_by", ["watch", "undo"])
def test_a_programs_save_joins_the_scheduled_save_of_a_producer(engine: Backend, made_by: str) -> None:
    held_and_found(engine, made_by)
    expected = [(SCHEDULED, ("held.md", "photo.png"))]
    assert engine.rows("a") == expected  # before the saves are joined
    found = engine.queue.claim(NOW)
    assert found.claims == ()
    assert engine.rows("a") == expected
    assert set(engine.queue.scheduled_paths(NOW)) == {"held.md", "photo.png"}
    engine.restart()
    (claim,) = claimed(engine, NOW + 50)
    assert (claim.job.message, claim.job.paths) == ("M", ("held.md", "photo.png"))


def test_a_programs_save_joins_a_scheduled_save_whose_time_has_come_since(engine: Backend) -> None:
    held_and_found(engine)
    (claim,) = claimed(engine, NOW + 60)
    assert (claim.job.message, claim.job.made_by) == ("M", None)


def test_a_producers_newer_save_supersedes_a_programs_save(engine: Backend) -> None:
    engine.save("a", ["photo.png"], created=NOW - 5, name="one", madeBy="watch")
    new = engine.save("a", ["a.md"], created=NOW - 1, name="two")
    (claim,) = claimed(engine)
    assert (claim.job.id, claim.job.paths) == (new, ("a.md", "photo.png"))


def test_a_programs_save_supersedes_an_older_save_that_is_due(engine: Backend) -> None:
    engine.save("a", ["a.md"], created=NOW - 5, name="one")
    new = engine.save("a", ["photo.png"], created=NOW - 1, name="two", madeBy="watch")
    (claim,) = claimed(engine)
    assert (claim.job.id, claim.job.paths) == (new, ("photo.png", "a.md"))


@pytest.mark.parametrize("first", ["watch", None], ids=["program first", "producer first"])
def test_a_joined_job_knows_which_paths_no_producer_declared(engine: Backend, first: str | None) -> None:
    second = None if first else "watch"
    engine.save("a", ["both", "x"], created=NOW - 5, name="one", madeBy=first)
    engine.save("a", ["both", "y"], created=NOW - 3, name="two", madeBy=second)
    (claim,) = claimed(engine)
    assert set(claim.job.paths_of_programs) == {"x" if first else "y"}
    release(engine, [claim])
    engine.save("a", ["z"], created=NOW - 1, name="three", madeBy="undo")
    (claim,) = claimed(engine)
    assert set(claim.job.paths_of_programs) == {"x" if first else "y", "z"}
    release(engine, [claim])
    engine.save("a", ["x", "y", "z"], created=NOW, name="four")
    assert claimed(engine)[0].job.paths_of_programs == frozenset()


def test_the_paths_of_a_programs_job_are_all_its_own(engine: Backend) -> None:
    engine.save("a", ["x"], created=NOW - 5, name="one", madeBy="watch")
    engine.save("a", ["y"], created=NOW - 3, name="two", madeBy="watch")
    assert set(claimed(engine)[0].job.paths_of_programs) == {"x", "y"}


def test_a_word_of_the_producers_own_makes_no_job_a_programs(engine: Backend) -> None:
    engine.save("a", ["old"], created=NOW - 5, name="one", scheduledFor=format_time(NOW + 50))
    engine.save("a", ["new"], created=NOW - 1, name="two", madeBy="Ada", programPaths={"a": 1})
    (claim,) = claimed(engine)
    assert claim.job.paths == ("new", "old")
    assert not claim.job.paths_of_programs
    release(engine, [claim])
    document = engine.document("a")
    assert (document["madeBy"], document["programPaths"]) == ("Ada", {"a": 1})


COMES_BACK: dict[str, Callable[[Backend, Sequence[Claim]], None]] = {
    "retried later": lambda engine, claims: retry_later(engine, claims, NOW),
    "released": release,
    "dead-lettered": dead_letter,
    "revived": lambda engine, claims: dead_letter(engine, claims, NETWORK),
    "tried": lambda engine, claims: engine.queue.mark_tried(claims, NOW),
}


@pytest.mark.parametrize("comes_back", COMES_BACK)
@pytest.mark.parametrize("is_saved", ["meanwhile", "afterwards"])
def test_a_programs_job_that_comes_back_joins_the_scheduled_save(
    engine: Backend, comes_back: str, is_saved: str
) -> None:
    def schedule() -> None:
        engine.save("a", ["held.md"], created=NOW - 5, name="two", scheduledFor=format_time(NOW + 50))

    claims = in_flight(engine, "a", ["photo.png"], created=NOW, name="one", madeBy="watch")
    if is_saved == "meanwhile":
        schedule()
    COMES_BACK[comes_back](engine, claims)
    if is_saved == "afterwards":
        schedule()
    engine.restart()
    if comes_back == "dead-lettered" and is_saved == "afterwards":
        engine.queue.retry(claims[0].job.id, NOW)
    engine.queue.requeue(NOW)
    assert engine.queue.claim(NOW).claims == ()
    assert [(state, set(paths)) for state, paths in engine.rows("a")] == [
        (SCHEDULED, {"held.md", "photo.png"})
    ]
    assert set(engine.queue.scheduled_paths(NOW)) == {"held.md", "photo.png"}


def test_a_programs_job_in_flight_is_released_for_a_scheduled_save(engine: Backend) -> None:
    claims = in_flight(engine, "a", ["a.md"], created=NOW, name="one", madeBy="watch")
    engine.save("a", ["a.md"], created=NOW - 5, name="two", scheduledFor=format_time(NOW + 50))
    assert engine.queue.withdrawn(claims, NOW) == {claims[0].key: Result.RELEASED}


def test_a_programs_save_hides_no_scheduled_save_from_a_job_in_flight(engine: Backend) -> None:
    claims = in_flight(engine, "a", ["a.md"], created=NOW - 9, name="zero")
    held_and_found(engine)
    assert engine.queue.withdrawn(claims, NOW) == {claims[0].key: Result.RELEASED}


def test_a_scheduled_save_is_cancelled_with_what_programs_have_added(engine: Backend) -> None:
    held_and_found(engine)
    assert len(engine.queue.cancel("a", NOW).removed) == 1
    assert engine.rows("a") == []


def test_a_scheduled_save_published_now_takes_along_what_programs_have_added(engine: Backend) -> None:
    held_and_found(engine)
    assert len(engine.queue.publish_now("a", NOW)) == 1
    assert set(claimed(engine)[0].job.paths) == {"held.md", "photo.png"}


# Results


def test_a_retry_waits_and_counts_its_attempts(engine: Backend) -> None:
    retry_later(engine, in_flight(engine, "a", ["a.md"], scheduledFor=format_time(NOW - 5)), NOW + 60)
    assert engine.rows("a") == [(RETRYING, ("a.md",))]
    document = engine.document("a")
    assert (document["status"], document["attempts"]) == ("pending", 1)
    assert document["nextAttemptAt"] == format_time(NOW + 60)
    assert document["scheduledFor"] == format_time(NOW - 5)
    assert document["lastError"] == "no network"
    assert (document["failure"], document["fix"]) == ("network", "check the network")
    assert engine.queue.next_due(NOW) == NOW + 60
    assert claimed(engine, NOW + 60)[0].attempt == 2


def test_a_deferred_job_keeps_its_attempts(engine: Backend) -> None:
    (claim,) = in_flight(engine, "a", ["a.md"], attempts=1)
    assert engine.queue.retry_later(claim, NETWORK, at=NOW + 9, counts=False)
    assert engine.document("a")["attempts"] == 1
    assert claimed(engine, NOW + 9)[0].attempt == 2


def test_a_dead_letter_is_kept_with_its_reason_and_not_tried_again(engine: Backend) -> None:
    dead_letter(engine, in_flight(engine, "a", ["a.md"]), Failure(FailureCode.REJECTED, "no", "ask"))
    document = engine.document("a")
    assert (document["status"], document["attempts"]) == ("failed", 1)
    assert (document["failure"], document["lastError"], document["fix"]) == ("rejected", "no", "ask")
    assert engine.queue.claim(NOW + 1e6).claims == ()
    assert engine.queue.next_due(NOW) is None


def test_a_released_job_waits_as_if_it_had_not_been_claimed(engine: Backend) -> None:
    engine.save("a", ["a.md"], note="mine")
    before = engine.document("a")
    release(engine, claimed(engine))
    assert engine.document("a") == before
    assert claimed(engine)[0].attempt == 1


def test_keys_that_the_worker_does_not_know_are_kept(engine: Backend) -> None:
    extra: dict[str, Any] = {
        "revision": 7,
        "editor": {"name": "Ada", "tags": ["ü", None]},
        "author": {"name": "A", "email": "a@b"},
    }
    engine.save("a", ["x"], created=NOW - 2, name="one")
    engine.save("a", ["y"], created=NOW - 1, name="two", **extra)
    retry_later(engine, claimed(engine), NOW + 1)
    dead_letter(engine, claimed(engine, NOW + 1))
    document = engine.document("a")
    assert {key: document[key] for key in extra} == extra


def test_old_spellings_are_read_and_written_anew(engine: Backend) -> None:
    claims = in_flight(engine, "a", ["x"], commitMessage="Old", attempt=1)
    assert (claims[0].job.message, claims[0].attempt) == ("Old", 2)
    retry_later(engine, claims)
    document = engine.document("a")
    assert (document["message"], document["attempts"]) == ("Old", 2)
    assert not {"commitMessage", "attempt"} & document.keys()


@pytest.mark.parametrize("settle", ["retry_later", "dead_letter", "acknowledge", "release"])
def test_to_settle_a_job_twice_is_to_settle_it_once(engine: Backend, settle: str) -> None:
    """As when the answer was lost."""
    claims = in_flight(engine, "a", ["x"])
    for _ in range(2):
        match settle:
            case "retry_later":
                retry_later(engine, claims)
            case "dead_letter":
                dead_letter(engine, claims)
            case "acknowledge":
                acknowledge(engine, claims)
            case _:
                release(engine, claims)
    states = {"retry_later": [RETRYING], "dead_letter": [FAILED], "release": [PENDING]}.get(settle, [])
    assert [state for state, _ in engine.rows("a")] == states
    if settle in {"retry_later", "dead_letter"}:
        assert engine.document("a")["attempts"] == 1


def test_a_job_knows_its_keys_that_look_like_keys_of_the_contract(engine: Backend) -> None:
    claims = in_flight(engine, "a", ["x"], created_at="2026-01-01", uid=7, path="x", authors=[], types=[])
    assert claims[0].odd_keys == (("created_at", "createdAt"),)
    engine.restart()
    assert engine.queue.recover(NOW) == list(claims)


# Dry runs


def test_a_dry_run_tries_a_job_once_until_it_is_saved_again(engine: Backend) -> None:
    engine.restart(dry_run=True)
    engine.queue.mark_tried(in_flight(engine, "a", ["a.md"], created=NOW - 2, note=1, name="one"), NOW)
    assert engine.rows("a") == [(TRIED, ("a.md",))]
    document = engine.document("a")
    assert (document["dryRunAt"], document["attempts"], document["note"]) == (format_time(NOW), 0, 1)
    engine.restart(dry_run=True)
    assert engine.queue.claim(NOW + 1e6).claims == ()
    assert engine.queue.next_due(NOW) is None
    (claim,) = in_flight(engine, "a", ["b.md"], created=NOW - 1, name="two")
    assert (set(claim.job.paths), claim.attempt) == ({"a.md", "b.md"}, 1)


@by_creation_time
def test_a_dry_run_tries_a_job_again_that_an_older_save_has_joined(engine: Backend) -> None:
    engine.restart(dry_run=True)
    engine.queue.mark_tried(in_flight(engine, "a", ["new"], created=NOW - 1, name="new"), NOW)
    (claim,) = in_flight(engine, "a", ["old"], created=NOW - 9, name="old")
    assert claim.job.paths == ("new", "old")


def test_the_first_live_run_claims_what_dry_runs_have_tried_in_order(engine: Backend) -> None:
    engine.restart(dry_run=True)
    for age in (3, 2, 1):
        engine.save(f"s{age}", ["x"], created=NOW - age)
    engine.queue.mark_tried(claimed(engine), NOW)
    engine.restart()
    assert engine.queue.next_due(NOW) is not None
    claims = claimed(engine)
    assert slugs(claims) == ["s3", "s2", "s1"]
    retry_later(engine, claims)
    assert engine.document("s1").get("dryRunAt") is None


def test_a_claim_is_overtaken_by_a_newer_save_on_hold_alone(engine: Backend) -> None:
    engine.save("held", ["x"], created=NOW - 3)
    engine.save("due", ["y"], created=NOW - 2)
    held, due = claimed(engine)
    assert not engine.queue.withdrawn([held, due], NOW)
    engine.save("due", ["y"], created=NOW - 1, name="newer-due")
    engine.save("held", ["x"], created=NOW - 1, name="newer-held", scheduledFor=format_time(NOW + 600))
    assert engine.queue.withdrawn([held, due], NOW) == {held.key: Result.RELEASED}
    assert not engine.queue.withdrawn([held, due], NOW + 601)


# Dead letters


def test_dead_letters_of_environment_failures_wait_again_when_requeued(engine: Backend) -> None:
    engine.save("env", ["x"], created=NOW - 3)
    engine.save("own", ["x"], created=NOW - 2)
    env, own = claimed(engine)
    engine.queue.dead_letter(env, NETWORK)
    engine.queue.dead_letter(own, REJECTED)
    assert [job.slug for job in engine.queue.requeue(NOW)] == ["env"]
    assert list(engine.queue.requeue(NOW)) == []
    document = engine.document("env")
    assert (document["status"], document["attempts"], document["nextAttemptAt"]) == ("pending", 0, None)
    assert (document["lastError"], document["failure"]) == (None, None)
    assert slugs(claimed(engine)) == ["env"]
    assert engine.rows("own") == [(FAILED, ("x",))]


def test_retries_that_an_environment_failure_delayed_are_due_when_requeued(engine: Backend) -> None:
    engine.save("env", ["x"], created=NOW - 3)
    engine.save("lost", ["x"], created=NOW - 2)
    engine.save("slow", ["x"], created=NOW - 1)
    env, lost, slow = claimed(engine)
    engine.queue.retry_later(env, NETWORK, at=NOW + 600)
    engine.queue.retry_later(slow, Failure(FailureCode.TIMEOUT, "perhaps slow"), at=NOW + 600)
    engine.queue.retry_later(lost, Failure(FailureCode.LOST_RACE, "lost"), at=NOW + 600)
    assert list(engine.queue.requeue(NOW)) == []
    (claim,) = claimed(engine)
    assert (claim.job.slug, claim.attempt) == ("env", 2)


def test_a_dead_letter_of_an_unknown_failure_waits_for_the_operator(engine: Backend) -> None:
    engine.save("a", ["old"], created=NOW - 9, status="failed", failure="a-code-to-come")
    assert list(engine.queue.requeue(NOW)) == []
    claims = in_flight(engine, "a", ["new"], name="new")
    assert claims[0].job.paths == ("new",)
    release(engine, claims)
    assert [job.status.value for job in engine.queue.retry_all(NOW)] == ["pending"]


def test_a_requeued_job_joins_a_newer_save(engine: Backend) -> None:
    dead_letter(engine, in_flight(engine, "a", ["old"], created=NOW - 2), NETWORK)
    new = engine.save("a", ["new"], created=NOW - 1, name="other")
    engine.queue.requeue(NOW)
    assert [(c.job.id, c.job.paths) for c in claimed(engine)] == [(new, ("new", "old"))]


def test_a_dead_letter_keeps_the_paths_that_the_newer_save_did_not_publish(engine: Backend) -> None:
    dead_letter(engine, in_flight(engine, "a", ["a.md", "img/b.png", "huge.bin", "bad.exe"], created=NOW - 2))
    claims = in_flight(engine, "a", ["a.md", "img/", "bad.exe"], created=NOW - 1, name="other")
    assert claims[0].job.paths == ("a.md", "img/", "bad.exe")
    engine.queue.acknowledge(claims, {claims[0].key: ["bad.exe"]})
    assert engine.rows("a") == [(FAILED, ("huge.bin", "bad.exe"))]
    acknowledge(engine, in_flight(engine, "a", ["bad.exe", "huge.bin"], created=NOW, name="third"))
    assert engine.rows("a") == []


def test_a_slug_has_one_dead_letter_with_the_paths_of_all(engine: Backend) -> None:
    dead_letter(engine, in_flight(engine, "a", ["one"], created=NOW - 3))
    dead_letter(engine, in_flight(engine, "a", ["two"], created=NOW - 2, name="other"))
    engine.queue.claim(NOW)
    assert engine.rows("a") == [(FAILED, ("two", "one"))]


def test_a_newer_dead_letter_stays_when_an_older_save_is_published(engine: Backend) -> None:
    older = in_flight(engine, "a", ["old"], created=NOW - 3)
    dead_letter(engine, in_flight(engine, "a", ["old"], created=NOW - 2))
    acknowledge(engine, older)
    assert engine.rows("a") == [(FAILED, ("old",))]


# Crashes


def test_what_a_dead_worker_had_in_flight_is_recovered_as_it_was_claimed(engine: Backend) -> None:
    engine.save("a", ["a.md"], attempts=1, created=NOW - 2)
    claims = in_flight(engine, "b", ["b.md"])
    engine.restart()
    again = engine.queue.recover(NOW)
    assert sorted(again, key=lambda claim: claim.job.slug) == list(claims)
    assert engine.queue.recover(NOW) == again  # nothing has changed
    acknowledge(engine, again)
    engine.restart()
    assert list(engine.queue.recover(NOW)) == []


def test_what_was_settled_before_the_crash_stays_settled(engine: Backend) -> None:
    for number, slug in enumerate(["done", "late", "dead", "freed", "open"]):
        engine.save(slug, [slug], created=NOW - 9 + number)
    done, late, dead, freed, open_ = claimed(engine)
    acknowledge(engine, [done])
    retry_later(engine, [late])
    dead_letter(engine, [dead])
    release(engine, [freed])
    engine.restart()
    assert list(engine.queue.recover(NOW)) == [open_]
    states = {row.job.slug: row.state for row in engine.queue.jobs(NOW)}
    assert states == {"late": RETRYING, "dead": FAILED, "freed": PENDING, "open": CLAIMED}


def test_a_crash_counts_only_for_a_job_that_was_alone(engine: Backend) -> None:
    engine.save("a", ["x"], created=NOW - 2)
    in_flight(engine, "b", ["x"])
    for expected in (1, 2, 3):
        engine.restart()
        recovered = {claim.job.slug: claim for claim in engine.queue.recover(NOW)}
        again = engine.queue.reclaim(recovered["a"], NOW)
        assert (again.attempt, again.alone) == (expected, True)
        assert (recovered["b"].attempt, recovered["b"].alone) == (1, False)
    retry_later(engine, [again], NOW)
    assert engine.document("a")["attempts"] == 3


def test_a_job_that_was_claimed_alone_is_blamed_for_the_crash(engine: Backend) -> None:
    in_flight(engine, "a", ["x"])
    engine.restart()
    (claim,) = engine.queue.recover(NOW)
    again = engine.queue.reclaim(claim, NOW)
    assert (claim.attempt, claim.alone, again.attempt) == (1, True, 2)
    release(engine, [again])
    assert claimed(engine)[0].attempt == 2


def test_a_later_save_of_a_post_never_has_the_key_of_an_earlier_one(engine: Backend) -> None:
    """The plan of a push names jobs by their keys, and may be looked at long after."""
    seen: set[str] = set()
    for number in range(3):
        claims = in_flight(engine, "a", ["x"], created=NOW + number, name="a", id="a")
        assert not seen & keys(claims)
        seen |= keys(claims)
        acknowledge(engine, claims)


# Commands


def test_a_dead_letter_is_retried(engine: Backend) -> None:
    dead_letter(engine, in_flight(engine, "a", ["x"], revision=3))
    (job,) = engine.queue.retry("a", NOW)
    document = engine.document("a")
    assert job.id == document["id"]
    assert (document["status"], document["attempts"], document["revision"]) == ("pending", 0, 3)
    assert (document["nextAttemptAt"], document["lastError"], document["failure"]) == (None, None, None)
    assert claimed(engine)[0].attempt == 1


def test_a_job_that_waits_for_its_retry_is_retried_at_once(engine: Backend) -> None:
    job_id = engine.save("a", ["x"])
    retry_later(engine, claimed(engine))
    engine.queue.retry(job_id, NOW)
    assert slugs(claimed(engine)) == ["a"]


def test_what_a_retry_cannot_help_is_declined_with_the_fix(engine: Backend) -> None:
    dead_letter(engine, in_flight(engine, "a", ["x"]), Failure(FailureCode.UNKNOWN_TYPE, "no plugin"))
    with pytest.raises(DeclinedError) as declined:
        engine.queue.retry("a", NOW)
    assert "save the post again" in declined.value.fix
    with pytest.raises(DeclinedError, match="no job"):
        engine.queue.retry("nobody", NOW)
    engine.save("b", ["x"])
    with pytest.raises(DeclinedError, match="has not failed"):
        engine.queue.retry("b", NOW)


def test_a_cancelled_job_is_gone_with_the_older_saves_it_stood_for(engine: Backend) -> None:
    engine.save("a", ["old"], created=NOW - 2, name="one")
    new = engine.save("a", ["new"], created=NOW - 1, name="two", scheduledFor=format_time(NOW + 9))
    engine.save("b", ["b"])
    assert [job.id for job in engine.queue.cancel(new, NOW).removed] == [new]
    assert engine.rows("a") == []
    assert dict(engine.queue.scheduled_paths(NOW)) == {}
    assert slugs(claimed(engine, NOW + 100)) == ["b"]


def test_the_cancellation_of_a_job_in_flight_is_requested_and_the_save_behind_it_is_gone(
    engine: Backend,
) -> None:
    old = engine.save("a", ["old"], created=NOW - 2)
    claims = claimed(engine)
    new = engine.save("a", ["new"], created=NOW - 1)
    done = engine.queue.cancel("a", NOW)
    assert ([job.id for job in done.removed], [job.id for job in done.requested]) == ([new], [old])
    assert engine.queue.withdrawn(claims, NOW) == dict.fromkeys(keys(claims), Result.CANCELLED)
    assert engine.rows("a") == [(CLAIMED, ("old",))]


def test_a_requested_cancellation_outlives_the_worker(engine: Backend) -> None:
    in_flight(engine, "a", ["a"])
    engine.queue.cancel("a", NOW)
    engine.restart()
    claims = engine.queue.recover(NOW)
    assert claims
    assert engine.queue.withdrawn(claims, NOW) == dict.fromkeys(keys(claims), Result.CANCELLED)
    engine.queue.release(claims)
    assert engine.rows("a") == []


def test_a_cancelled_job_does_not_come_back(engine: Backend) -> None:
    queue = engine.queue
    for slug in ("retried", "dead", "released", "tried", "wanted"):
        engine.save(slug, [slug])
    claims = {claim.job.slug: claim for claim in claimed(engine)}
    for slug in claims.keys() - {"wanted"}:
        queue.cancel(slug, NOW)
    assert not queue.retry_later(claims["retried"], NETWORK, at=NOW + 60)
    assert not queue.dead_letter(claims["dead"], REJECTED)
    queue.mark_tried([claims["tried"]], NOW)
    assert list(queue.release([claims["released"], claims["wanted"]])) == [claims["released"]]
    assert [(row.job.slug, row.state) for row in queue.jobs(NOW)] == [("wanted", PENDING)]


def test_a_job_cancelled_in_flight_never_takes_a_newer_save_along(engine: Backend) -> None:
    job = engine.save("a", ["a"], created=NOW - 2)
    claims = claimed(engine)
    engine.queue.cancel(job, NOW)
    engine.save("a", ["b"], created=NOW - 1)
    engine.queue.release(claims)
    assert engine.rows("a") == [(PENDING, ("b",))]


def test_a_cancellation_that_came_too_late_does_not_reach_the_next_save(engine: Backend) -> None:
    job = engine.save("a", ["a"], name="a")
    claims = claimed(engine)
    engine.queue.cancel(job, NOW)
    acknowledge(engine, claims)
    assert engine.queue.withdrawn(in_flight(engine, "a", ["a"], name="a", id=job), NOW) == {}


def test_a_scheduled_job_can_be_published_now(engine: Backend) -> None:
    job = engine.save("a", ["x"], scheduledFor=format_time(NOW + 9), extra="kept")
    assert [done.id for done in engine.queue.publish_now("a", NOW)] == [job]
    assert engine.rows("a") == [(PENDING, ("x",))]
    assert engine.document("a")["extra"] == "kept"
    assert slugs(claimed(engine)) == ["a"]


def test_only_what_waits_for_a_time_can_be_published_now(engine: Backend) -> None:
    engine.save("due", ["x"])
    with pytest.raises(DeclinedError, match="its state is pending"):
        engine.queue.publish_now("due", NOW)
    dead_letter(engine, claimed(engine))
    with pytest.raises(DeclinedError) as declined:
        engine.queue.publish_now("due", NOW)
    assert "retry" in declined.value.fix


def test_ten_saves_in_any_state_leave_nothing_behind(engine: Backend) -> None:
    seen: set[str] = set()
    for number in range(10):
        engine.save("a", [f"p{number}"], created=NOW + number)
        claims = claimed(engine, NOW + number)
        seen |= set(claims[0].job.paths)
        [retry_later, release, acknowledge][number % 3](engine, claims)
    while claims := engine.queue.claim(NOW + 1000).claims:
        seen |= {path for claim in claims for path in claim.job.paths}
        acknowledge(engine, claims)
    assert seen == {f"p{number}" for number in range(10)}
    assert engine.rows("a") == []


# Quiet time


def save_at(engine: Backend, at: float, **keys: Any) -> str:  # noqa: ANN401 - of any job
    return engine.save("a", ["a.md"], created=at, arrived=at, **keys)


def test_a_post_is_published_when_it_was_not_saved_for_the_quiet_time(engine: Backend) -> None:
    engine.restart(quiet=QUIET_TIME)
    save_at(engine, NOW + 1)
    assert engine.queue.claim(NOW + 2.9).claims == ()
    assert engine.queue.next_due(NOW + 1) == NOW + 3
    assert engine.rows("a", NOW + 2.9) == [(QUIET, ("a.md",))]
    assert engine.document("a", NOW + 1)["quietUntil"] == format_time(NOW + 3)
    assert engine.rows("a", NOW + 3) == [(PENDING, ("a.md",))]
    assert slugs(claimed(engine, NOW + 3)) == ["a"]


def test_each_save_begins_the_quiet_time_anew_up_to_the_maximum(engine: Backend) -> None:
    engine.restart(quiet=QuietTime(2.0, 60.0))
    for number in range(40):  # an autosave each 1.5 s for a minute
        now = NOW + number * 1.5
        newest = save_at(engine, now)
        assert engine.queue.claim(now).claims == ()
        assert engine.queue.next_due(now) == min(now + 2, NOW + 60)
    assert engine.queue.claim(NOW + 59.9).claims == ()
    claims = claimed(engine, NOW + 60)
    assert [claim.job.id for claim in claims] == [newest]
    save_at(engine, NOW + 60.5)  # the first save that is not about to be published
    assert engine.queue.next_due(NOW + 60.5) == NOW + 62.5
    assert slugs(claimed(engine, NOW + 62.5)) == ["a"]


def test_the_first_unpublished_save_is_known_to_the_next_worker(engine: Backend) -> None:
    engine.restart(quiet=QUIET_TIME)
    save_at(engine, NOW + 1, name="one")
    save_at(engine, NOW + 2.5, name="two")
    assert engine.queue.claim(NOW + 2.5).claims == ()
    engine.restart(quiet=QuietTime(2.0, 3.0))
    assert engine.document("a", NOW + 3)["firstSavedAt"] == format_time(NOW + 1)
    save_at(engine, NOW + 3, name="three")
    assert engine.queue.claim(NOW + 3).claims == ()
    assert slugs(claimed(engine, NOW + 4)) == ["a"]


def test_publish_now_ends_the_quiet_time_and_cancel_removes_a_quiet_job(engine: Backend) -> None:
    engine.restart(quiet=QUIET_TIME)
    save_at(engine, NOW)
    assert len(engine.queue.publish_now("a", NOW)) == 1
    assert engine.rows("a") == [(PENDING, ("a.md",))]
    assert slugs(claimed(engine)) == ["a"]
    engine.save("b", ["b.md"])
    assert len(engine.queue.cancel("b", NOW).removed) == 1
    assert engine.rows("b") == []


def test_a_schedule_decides_and_the_quiet_time_counts_from_the_save(engine: Backend) -> None:
    engine.restart(quiet=QUIET_TIME)
    engine.save("late", ["x"], scheduledFor=format_time(NOW + 100))
    engine.save("soon", ["x"], scheduledFor=format_time(NOW + 1))
    assert (engine.rows("late"), engine.rows("soon")) == ([(SCHEDULED, ("x",))], [(SCHEDULED, ("x",))])
    assert engine.rows("soon", NOW + 1.5) == [(QUIET, ("x",))]
    assert slugs(claimed(engine, NOW + 2)) == ["soon"]
    assert slugs(claimed(engine, NOW + 100)) == ["late"]


def test_a_retry_has_no_quiet_time(engine: Backend) -> None:
    engine.restart(quiet=QuietTime(20.0, 25.0))
    save_at(engine, NOW, name="one")
    engine.queue.claim(NOW)
    save_at(engine, NOW + 19, name="two")
    engine.queue.claim(NOW + 19)
    retry_later(engine, claimed(engine, NOW + 25), NOW + 26)
    assert engine.rows("a", NOW + 26) == [(PENDING, ("a.md",))]
    assert slugs(claimed(engine, NOW + 26)) == ["a"]


def test_a_wrong_clock_of_the_cms_does_not_extend_the_quiet_time(engine: Backend) -> None:
    engine.restart(quiet=QUIET_TIME)
    save_at(engine, NOW)
    assert engine.queue.claim(NOW).claims == ()
    engine.save("a", ["a.md"], created=NOW + 86_400, arrived=NOW + 1)
    assert engine.queue.claim(NOW + 1).claims == ()
    assert engine.queue.next_due(NOW + 1) == NOW + 3
    assert slugs(claimed(engine, NOW + 3)) == ["a"]


def test_a_save_carries_the_authors_of_the_saves_that_it_supersedes(engine: Backend) -> None:
    people = [{"name": f"Person {number}", "email": f"{number}@example.org"} for number in range(3)]
    for number, author in enumerate([people[0], people[1], people[0], people[2]]):
        engine.save("a", ["a.md"], created=NOW - 9 + number, name=f"n{number}", author=author)
    (claim,) = claimed(engine)
    assert claim.job.author is not None
    assert claim.job.author.email == "2@example.org"
    assert sorted(person.email for person in claim.job.co_authors) == ["0@example.org", "1@example.org"]


# The pause


def test_a_pause_lasts_until_resume_whatever_becomes_of_the_worker(engine: Backend) -> None:
    assert engine.queue.active_pause(NOW) is None
    engine.queue.pause(NOW, reason="moving\x1b house")
    engine.restart()
    pause = engine.queue.active_pause(NOW + 1e6)
    assert pause is not None
    assert (pause.since, pause.until, pause.reason) == (NOW, None, "moving house")
    assert engine.queue.resume()
    assert engine.queue.active_pause(NOW) is None
    assert not engine.queue.resume()


def test_a_pause_with_an_end_ends_by_itself_and_a_second_one_replaces_it(engine: Backend) -> None:
    engine.queue.pause(NOW, until=NOW + 60)
    assert engine.queue.active_pause(NOW + 59) is not None
    assert engine.queue.active_pause(NOW + 60) is None
    engine.queue.pause(NOW, until=NOW + 9)
    assert engine.queue.active_pause(NOW + 10) is None


# What a push published in part

MISSING = Failure(FailureCode.MISSING, "no such file", "put it there")
WITHHELD = Failure(FailureCode.UNSETTLED, "scheduled", "wait")


def acknowledge_part(
    engine: Backend, claim: Claim, left: tuple[str, ...], failure: Failure, retry_at: float | None = None
) -> bool:
    outcome = Outcome(claim.key, Result.PUBLISHED, "c" * 40, missing=left)
    leftover = Leftover(failure, left, retry_at)
    return engine.queue.acknowledge_part(claim, outcome, leftover, at=NOW + 60)


def test_a_job_published_in_part_waits_for_the_paths_that_are_left(engine: Backend) -> None:
    (claim,) = in_flight(engine, "a", ["content/a.md", "content/b.png"], kept=1)
    assert acknowledge_part(engine, claim, ("content/b.png",), MISSING)
    assert engine.rows("a") == [(RETRYING, ("content/b.png",))]
    document = engine.document("a")
    assert (document["failure"], document["attempts"], document["kept"]) == ("missing", 1, 1)
    assert (document["publishedCommit"], document["missingAttempts"]) == ("c" * 40, 1)
    (again,) = claimed(engine, NOW + 60)
    assert (again.attempt, again.job.missing_attempts, again.job.published_commit) == (2, 1, "c" * 40)


def test_a_wait_for_what_is_withheld_counts_no_attempt(engine: Backend) -> None:
    (claim,) = in_flight(engine, "a", ["content/a/", "content/b.md"])
    assert acknowledge_part(engine, claim, ("content/a/",), WITHHELD, NOW + 60)
    assert engine.document("a")["attempts"] == 0
    assert "missingAttempts" not in engine.document("a")
    (again,) = claimed(engine, NOW + 60)
    assert (again.attempt, again.job.paths) == (1, ("content/a/",))


def test_a_newer_save_joins_only_what_an_older_one_has_not_published(engine: Backend) -> None:
    (claim,) = in_flight(engine, "a", ["content/a.md", "content/b.png"])
    newer = engine.save("a", ["content/c.md"], created=NOW + 1, arrived=NOW + 1)
    assert acknowledge_part(engine, claim, ("content/b.png",), MISSING)
    (again,) = claimed(engine, NOW + 60)
    assert (again.job.id, set(again.job.paths)) == (newer, {"content/c.md", "content/b.png"})
    assert (again.attempt, again.job.published_commit) == (1, None)


def test_what_is_published_in_part_leaves_older_dead_letters_only_the_rest(engine: Backend) -> None:
    dead_letter(engine, in_flight(engine, "a", ["content/a.md", "content/b.png", "content/c.md"]))
    keys: dict[str, Any] = {"created": NOW + 1, "arrived": NOW + 1, "name": "other"}
    (claim,) = in_flight(engine, "a", ["content/a.md", "content/b.png"], **keys)
    assert acknowledge_part(engine, claim, ("content/b.png",), MISSING)
    letters = [paths for state, paths in engine.rows("a") if state is FAILED]
    assert [set(paths) for paths in letters] == [{"content/b.png", "content/c.md"}]


def test_a_cancelled_job_does_not_wait_for_the_rest(engine: Backend) -> None:
    (claim,) = in_flight(engine, "a", ["content/a.md", "content/b.png"])
    engine.queue.cancel("a", NOW)
    assert not acknowledge_part(engine, claim, ("content/b.png",), MISSING)
    assert engine.rows("a") == []


@pytest.mark.parametrize("ends", ["cancel", "publish_now"])
def test_what_waits_for_a_scheduled_job_is_due_when_that_is_scheduled_no_more(
    engine: Backend, ends: str
) -> None:
    (claim,) = in_flight(engine, "a", ["content/trip/", "content/b.md"])
    engine.save("trip", ["content/trip/index.md"], scheduledFor=format_time(NOW + 9000))
    engine.save("other", ["content/other.md"], scheduledFor=format_time(NOW + 9000))
    assert acknowledge_part(engine, claim, ("content/trip/",), WITHHELD, NOW + 60)
    engine.queue.cancel("other", NOW)
    assert not engine.queue.claim(NOW).claims
    getattr(engine.queue, ends)("trip", NOW)
    assert "a" in slugs(claimed(engine))
