"""What every queue does, whatever it is made of. Time is an argument throughout."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from queue_engines import LONGEST_DELAY, MAX_ATTEMPTS, NOW

from briter_worker.errors import Failure
from briter_worker.job import State, format_time
from briter_worker.ports import Plan
from briter_worker.queues.steering import SteeringError

if TYPE_CHECKING:
    from collections.abc import Callable

    from queue_engines import Engine

    from briter_worker.ports import Batch

PENDING, SCHEDULED, RETRYING = State.PENDING, State.SCHEDULED, State.RETRYING
CLAIMED, FAILED = State.CLAIMED, State.FAILED


def claimed(engine: Engine, now: float = NOW) -> Batch:
    found = engine.queue.claim(now)
    assert found.batch is not None
    return found.batch


def slugs(batch: Batch | None) -> list[str]:
    return [] if batch is None else [claim.job.slug for claim in batch.claims]


def finish(engine: Engine, batch: Batch) -> None:
    engine.queue.finish(batch, batch.claims)
    engine.queue.close(batch)


def put_off(engine: Engine, batch: Batch, until: float = NOW + 60) -> None:
    for claim in batch.claims:
        engine.queue.put_off(batch, claim, Failure.NETWORK, "no network", until)
    engine.queue.close(batch)


def bury(engine: Engine, batch: Batch, failure: Failure = Failure.REJECTED) -> None:
    for claim in batch.claims:
        engine.queue.bury(batch, claim, failure, "it is dead")
    engine.queue.close(batch)


def release(engine: Engine, batch: Batch) -> None:
    engine.queue.release(batch, batch.claims)
    engine.queue.close(batch)


# ── claiming ────────────────────────────────────────────────────────────────────────────────────────


def test_an_empty_queue_has_nothing_to_claim(engine: Engine) -> None:
    assert engine.queue.claim(NOW).batch is None
    assert engine.queue.next_due(NOW) is None
    assert list(engine.queue.recover(NOW)) == []
    assert (engine.queue.stuck(NOW), engine.queue.quarantined()) == ({}, [])


def test_a_due_job_is_claimed_once(engine: Engine) -> None:
    engine.save("a", ["a.md"])
    (claim,) = claimed(engine).claims
    assert (claim.job.slug, claim.job.paths, claim.attempt) == ("a", ("a.md",), 1)
    assert engine.queue.claim(NOW).batch is None
    assert engine.rows("a") == [(CLAIMED, ("a.md",))]


def test_jobs_come_by_due_time_and_then_by_age(engine: Engine) -> None:
    engine.save("late", ["x"], created=NOW - 9, scheduledFor=format_time(NOW - 1))
    engine.save("young", ["x"], created=NOW - 2)
    engine.save("old", ["x"], created=NOW - 5)
    assert slugs(claimed(engine)) == ["old", "young", "late"]


def test_a_job_on_hold_waits_for_its_time(engine: Engine) -> None:
    engine.save("a", ["a.md", "b.png"], scheduledFor=format_time(NOW + 100))
    assert engine.queue.claim(NOW + 99).batch is None
    assert engine.queue.next_due(NOW) == NOW + 100
    assert set(engine.queue.held_paths(NOW)) == {"a.md", "b.png"}
    assert engine.rows("a") == [(SCHEDULED, ("a.md", "b.png"))]
    assert slugs(claimed(engine, NOW + 100)) == ["a"]
    assert set(engine.queue.held_paths(NOW + 100)) == set()


def test_what_is_on_hold_is_known_beside_what_waits_for_nothing(engine: Engine) -> None:
    engine.save("plain", ["plain.md"])
    engine.save("held", ["held.md"], scheduledFor=format_time(NOW + 100))
    for now in (NOW, NOW + 1):  # asked again, it is not found anew
        assert set(engine.queue.held_paths(now)) == {"held.md"}
    engine.save("more", ["more.md"], scheduledFor=format_time(NOW + 50))
    assert set(engine.queue.held_paths(NOW + 2)) == {"held.md", "more.md"}
    assert set(engine.queue.held_paths(NOW + 50)) == {"held.md"}


def test_of_what_is_on_hold_it_can_be_asked_how_many_there_are_and_which(engine: Engine) -> None:
    engine.save("plain", ["plain.md"])
    engine.save("held", ["held.md", "held.png"], scheduledFor=format_time(NOW + 100))
    held = engine.queue.held_paths(NOW)
    assert len(held) == 2
    assert "held.png" in held
    assert "plain.md" not in held


def test_a_retry_further_away_than_any_backoff_is_due_as_a_clock_was_set_back(engine: Engine) -> None:
    ahead = format_time(NOW + 86_400)
    engine.save("a", ["x"], attempts=1, nextAttemptAt=format_time(NOW + LONGEST_DELAY + 5), updatedAt=ahead)
    engine.save("b", ["x"], attempts=1, nextAttemptAt=format_time(NOW + LONGEST_DELAY - 5), updatedAt=ahead)
    assert slugs(claimed(engine)) == ["a"]


def test_a_clock_set_back_while_running_does_not_delay_a_retry(engine: Engine) -> None:
    engine.save("a", ["x"])
    put_off(engine, claimed(engine), NOW + 60)
    assert engine.queue.claim(NOW).batch is None
    assert slugs(claimed(engine, NOW - 86_400)) == ["a"]


# ── saving again ────────────────────────────────────────────────────────────────────────────────────


def test_the_newest_save_wins_and_has_the_paths_of_both(engine: Engine) -> None:
    old = engine.save("a", ["a.md", "old.png"], created=NOW - 2, name="one")
    new = engine.save("a", ["a.md", "new.png"], created=NOW - 1, name="two")
    found = engine.queue.claim(NOW)
    assert found.batch is not None
    (claim,) = found.batch.claims
    assert (claim.job.id, claim.job.paths) == (new, ("a.md", "new.png", "old.png"))
    assert [(s.job_id, s.slug, s.by) for s in found.superseded] == [(old, "a", new)]
    finish(engine, found.batch)
    assert engine.rows("a") == []


def test_the_newest_save_wins_also_when_it_is_on_hold_and_the_older_is_due(engine: Engine) -> None:
    engine.save("a", ["old.md"], created=NOW - 2, name="one")
    engine.save("a", ["new.md"], created=NOW - 1, name="two", scheduledFor=format_time(NOW + 50))
    expected = [(SCHEDULED, ("new.md", "old.md"))]
    assert engine.rows("a") == expected  # before anyone has tidied
    found = engine.queue.claim(NOW)
    assert found.batch is None
    assert len(found.superseded) == 1
    assert engine.rows("a") == expected
    assert set(engine.queue.held_paths(NOW)) == {"new.md", "old.md"}
    (claim,) = claimed(engine, NOW + 50).claims
    assert claim.job.paths == ("new.md", "old.md")


def test_the_creation_time_decides_not_the_order_of_writing(engine: Engine) -> None:
    newest = engine.save("a", ["new"], created=NOW - 1, name="one")
    engine.save("a", ["old"], created=NOW - 5, name="two")
    engine.save("a", ["older"], created=NOW - 7, name="three")
    (claim,) = claimed(engine).claims
    assert claim.job.id == newest
    assert set(claim.job.paths) == {"new", "old", "older"}


@pytest.mark.parametrize("settle", [put_off, release], ids=["put off", "released"])
def test_a_save_while_in_flight_takes_over_what_comes_back(
    engine: Engine, settle: Callable[[Engine, Batch], None]
) -> None:
    engine.save("a", ["a.md", "old.png"], created=NOW - 2)
    batch = claimed(engine)
    new = engine.save("a", ["a.md"], created=NOW - 1, message="the newest")
    settle(engine, batch)
    assert engine.rows("a") == [(PENDING, ("a.md", "old.png"))]
    found = engine.queue.claim(NOW)
    assert found.batch is not None
    (claim,) = found.batch.claims
    assert (claim.job.id, claim.job.message, claim.attempt) == (new, "the newest", 1)
    assert claim.job.paths == ("a.md", "old.png")
    assert [s.by for s in found.superseded] == [new]


def test_a_save_while_in_flight_is_published_after_the_older_was(engine: Engine) -> None:
    engine.save("a", ["a.md", "old.png"], created=NOW - 2)
    batch = claimed(engine)
    new = engine.save("a", ["a.md"], created=NOW - 1)
    finish(engine, batch)
    (claim,) = claimed(engine).claims
    assert (claim.job.id, claim.job.paths) == (new, ("a.md",))


def test_a_save_while_in_flight_takes_over_the_paths_of_the_older_that_is_refused(engine: Engine) -> None:
    engine.save("a", ["a.md", "huge.bin"], created=NOW - 2)
    batch = claimed(engine)
    new = engine.save("a", ["a.md"], created=NOW - 1)
    bury(engine, batch, Failure.TOO_LARGE)
    assert engine.rows("a") == [(PENDING, ("a.md", "huge.bin"))]
    again = claimed(engine)
    assert [(c.job.id, c.job.paths) for c in again.claims] == [(new, ("a.md", "huge.bin"))]
    finish(engine, again)
    assert engine.rows("a") == []


def test_a_save_may_be_claimed_while_the_older_is_in_flight(engine: Engine) -> None:
    engine.save("a", ["old"], created=NOW - 2)
    first = claimed(engine)
    engine.save("a", ["new"], created=NOW - 1)
    second = claimed(engine)
    assert {c.key for c in first.claims}.isdisjoint(c.key for c in second.claims)
    put_off(engine, first)
    finish(engine, second)
    assert engine.rows("a") == [(RETRYING, ("old",))]


def test_an_older_save_that_turns_up_late_gives_way_to_the_one_that_comes_back(engine: Engine) -> None:
    newest = engine.save("a", ["new"], created=NOW - 1)
    batch = claimed(engine)
    engine.save("a", ["old"], created=NOW - 9)
    put_off(engine, batch, NOW + 60)
    found = engine.queue.claim(NOW)
    assert found.batch is None
    assert [s.by for s in found.superseded] == [newest]
    assert engine.rows("a") == [(RETRYING, ("new", "old"))]


# ── settling ────────────────────────────────────────────────────────────────────────────────────────


def test_a_finished_job_is_gone(engine: Engine) -> None:
    engine.save("a", ["a.md"])
    finish(engine, claimed(engine))
    engine.die()
    assert list(engine.queue.recover(NOW)) == []
    assert engine.queue.jobs(NOW) == []
    assert engine.queue.next_due(NOW) is None


def test_a_job_put_off_waits_and_counts_its_attempts(engine: Engine) -> None:
    engine.save("a", ["a.md"], scheduledFor=format_time(NOW - 5))
    put_off(engine, claimed(engine), NOW + 60)
    assert engine.rows("a") == [(RETRYING, ("a.md",))]
    document = engine.document("a")
    assert document["status"] == "pending"
    assert document["attempts"] == 1
    assert document["nextAttemptAt"] == format_time(NOW + 60)
    assert document["scheduledFor"] == format_time(NOW - 5)
    assert document["lastError"] == "no network"
    assert document["failure"] == "network"
    assert engine.queue.next_due(NOW) == NOW + 60
    (claim,) = claimed(engine, NOW + 60).claims
    assert claim.attempt == 2


def test_a_buried_job_is_kept_with_its_reason_and_not_tried_again(engine: Engine) -> None:
    engine.save("a", ["a.md"])
    bury(engine, claimed(engine))
    document = engine.document("a")
    assert (document["status"], document["failure"], document["lastError"], document["attempts"]) == (
        "failed",
        "rejected",
        "it is dead",
        1,
    )
    assert engine.queue.claim(NOW + 1e6).batch is None
    assert engine.queue.next_due(NOW) is None


def test_a_released_job_waits_as_if_it_had_not_been_claimed(engine: Engine) -> None:
    engine.save("a", ["a.md"], note="mine")
    before = engine.document("a")
    release(engine, claimed(engine))
    assert engine.document("a") == before
    (claim,) = claimed(engine).claims
    assert claim.attempt == 1


def test_the_reason_in_a_job_shows_no_credentials_and_no_control_characters(engine: Engine) -> None:
    engine.save("a", ["a.md"])
    batch = claimed(engine)
    text = "\x1b[31mhttps://ada:hunter2@example.org/x.git\nrefused"
    engine.queue.put_off(batch, batch.claims[0], Failure.AUTH, text, NOW + 1)
    error = engine.document("a")["lastError"]
    assert "hunter2" not in error
    assert error.isprintable()


def test_keys_that_the_worker_does_not_know_are_kept(engine: Engine) -> None:
    extra = {
        "revision": 7,
        "editor": {"name": "Ada", "tags": ["ü", None]},
        "author": {"name": "A", "email": "a@b"},
    }
    engine.save("a", ["x"], created=NOW - 2, name="one")
    engine.save("a", ["y"], created=NOW - 1, name="two", **extra)
    put_off(engine, claimed(engine), NOW + 1)
    bury(engine, claimed(engine, NOW + 1))
    document = engine.document("a")
    assert {key: document[key] for key in extra} == extra


def test_old_spellings_are_read_and_written_anew(engine: Engine) -> None:
    engine.save("a", ["x"], commitMessage="Old", attempt=1)
    batch = claimed(engine)
    assert (batch.claims[0].job.message, batch.claims[0].attempt) == ("Old", 2)
    put_off(engine, batch)
    document = engine.document("a")
    assert (document["message"], document["attempts"]) == ("Old", 2)
    assert not {"commitMessage", "attempt"} & document.keys()


# ── dead letters ────────────────────────────────────────────────────────────────────────────────────


def test_dead_letters_of_the_surroundings_wait_again_when_revived(engine: Engine) -> None:
    engine.save("env", ["x"], created=NOW - 2)
    engine.save("own", ["x"], created=NOW - 1)
    batch = claimed(engine)
    engine.queue.bury(batch, batch.claims[0], Failure.NETWORK, "down")
    engine.queue.bury(batch, batch.claims[1], Failure.REJECTED, "no")
    engine.queue.close(batch)
    assert [job.slug for job in engine.queue.revive(NOW)] == ["env"]
    assert engine.queue.revive(NOW) == ()
    document = engine.document("env")
    assert (document["status"], document["attempts"], document["nextAttemptAt"]) == ("pending", 0, None)
    assert (document["lastError"], document["failure"]) == (None, None)
    assert slugs(claimed(engine)) == ["env"]
    assert engine.rows("own") == [(FAILED, ("x",))]


def test_a_dead_letter_of_a_kind_that_only_a_newer_worker_knows_waits_for_a_person(engine: Engine) -> None:
    engine.save("a", ["old"], created=NOW - 9, status="failed", failure="a-word-to-come")
    assert list(engine.queue.revive(NOW)) == []
    engine.save("a", ["new"], name="new")
    batch = claimed(engine)
    assert batch.claims[0].job.paths == ("new",)  # as nobody knows whether the old ones were refused
    release(engine, batch)
    assert [job.status.value for job in engine.queue.retry_all(NOW)] == ["pending"]


def test_a_revived_job_gives_way_to_a_newer_save(engine: Engine) -> None:
    engine.save("a", ["old"], created=NOW - 2)
    bury(engine, claimed(engine), Failure.NETWORK)
    new = engine.save("a", ["new"], created=NOW - 1, name="other")
    engine.queue.revive(NOW)
    found = engine.queue.claim(NOW)
    assert found.batch is not None
    assert [(c.job.id, c.job.paths) for c in found.batch.claims] == [(new, ("new", "old"))]
    assert [s.by for s in found.superseded] == [new]


def test_what_an_unlucky_dead_letter_never_published_goes_out_with_the_newer_save(engine: Engine) -> None:
    engine.save("a", ["a.md", "image.png"], created=NOW - 2)
    bury(engine, claimed(engine), Failure.NETWORK)
    engine.save("a", ["a.md"], created=NOW - 1, name="other")
    batch = claimed(engine)
    assert batch.claims[0].job.paths == ("a.md", "image.png")
    assert (FAILED, ("a.md", "image.png")) in engine.rows("a")
    finish(engine, batch)
    assert engine.rows("a") == []


def test_a_slug_has_one_dead_letter_with_the_paths_of_all(engine: Engine) -> None:
    engine.save("a", ["one"], created=NOW - 3)
    bury(engine, claimed(engine))
    engine.save("a", ["two"], created=NOW - 2, name="other")
    bury(engine, claimed(engine))
    engine.queue.claim(NOW)
    assert engine.rows("a") == [(FAILED, ("two", "one"))]


def test_dead_letters_that_each_name_a_file_put_aside_stand_for_nothing_but_themselves(
    engine: Engine,
) -> None:
    for number in (1, 2):
        failure = {"status": "failed", "failure": "malformed"}
        engine.save("a", [f"{number}.md"], created=NOW - 9 + number, name=f"a{number}", **failure)
    assert engine.queue.claim(NOW).batch is None
    assert sorted(engine.rows("a")) == [(FAILED, ("1.md",)), (FAILED, ("2.md",))]
    assert engine.queue.retry_all(NOW) == []


@pytest.mark.parametrize("settle", ["put_off", "bury", "finish"])
def test_to_settle_a_job_twice_is_to_settle_it_once(engine: Engine, settle: str) -> None:
    """As when the answer was lost."""
    engine.save("a", ["x"])
    batch = claimed(engine)
    (claim,) = batch.claims
    for _ in range(2):
        match settle:
            case "put_off":
                assert engine.queue.put_off(batch, claim, Failure.NETWORK, "no network", NOW + 60)
            case "bury":
                assert engine.queue.bury(batch, claim, Failure.REJECTED, "no")
            case "finish":
                engine.queue.finish(batch, batch.claims)
    engine.queue.close(batch)
    states = {"put_off": [RETRYING], "bury": [FAILED], "finish": []}[settle]
    assert [state for state, _ in engine.rows("a")] == states
    if states:
        assert engine.document("a")["attempts"] == 1


def test_saves_that_are_too_large_together_are_one_job_all_the_same(engine: Engine) -> None:
    for number in (1, 2):
        paths = [f"{number}{place:06}".ljust(600, "x") for place in range(1_000)]
        engine.save("a", paths, created=NOW - 9 + number, name=f"a{number}")
    batch = claimed(engine)
    assert len(batch.claims[0].job.paths) == 2_000
    release(engine, batch)
    assert len(claimed(engine, NOW + 1).claims[0].job.paths) == 2_000


def test_a_newer_dead_letter_stays_when_an_older_save_is_published(engine: Engine) -> None:
    engine.save("a", ["old"], created=NOW - 3)
    older = claimed(engine)
    engine.save("a", ["new"], created=NOW - 2)
    bury(engine, claimed(engine))
    assert (FAILED, ("new",)) in engine.rows("a")
    finish(engine, older)
    assert engine.rows("a") == [(FAILED, ("new",))]


# ── crashes ─────────────────────────────────────────────────────────────────────────────────────────


def plan_for(batch: Batch) -> Plan:
    return Plan(
        old="1" * 40,
        new="2" * 40,
        ref=f"refs/briter/{batch.key}",
        commits={claim.key: "2" * 40 for claim in batch.claims},
        staged={"a.md": "3" * 40, "gone.md": None, "\udcff": "4" * 40},
        dry_run=True,
    )


def test_a_dead_workers_batch_is_found_with_its_plans_and_attempts(engine: Engine) -> None:
    engine.save("a", ["a.md"], attempts=1)
    batch = claimed(engine)
    first, second = plan_for(batch), plan_for(replace(batch, key="other"))
    engine.queue.record(batch, first)
    engine.queue.record(batch, second)
    engine.die()
    (again,) = engine.queue.recover(NOW)
    assert again.key == batch.key
    assert again.claims == batch.claims
    assert again.claims[0].attempt == 2
    assert again.plans == (first, second)
    finish(engine, again)
    engine.die()
    assert list(engine.queue.recover(NOW)) == []


def test_what_was_settled_before_the_crash_stays_settled(engine: Engine) -> None:
    for number, slug in enumerate(["done", "late", "dead", "freed", "open"]):
        engine.save(slug, [slug], created=NOW - 9 + number)
    batch = claimed(engine)
    done, late, dead, freed, open_ = batch.claims
    engine.queue.finish(batch, [done])
    engine.queue.put_off(batch, late, Failure.LOST_RACE, "later", NOW + 60)
    engine.queue.bury(batch, dead, Failure.CONFLICT, "conflict")
    engine.queue.release(batch, [freed])
    engine.die()
    (again,) = engine.queue.recover(NOW)
    assert again.claims == (open_,)
    states = {row.job.slug: row.state for row in engine.queue.jobs(NOW)}
    assert states == {"late": RETRYING, "dead": FAILED, "freed": PENDING, "open": CLAIMED}


def killed(engine: Engine, batch: Batch) -> list[Batch]:
    """The worker begins the batch and dies of it; the next one takes up what is left."""
    engine.queue.begin(batch)
    engine.die()
    left: list[Batch] = []
    for found in engine.queue.recover(NOW):
        left += engine.queue.retake(found, NOW)
    return left


@pytest.mark.parametrize("neighbours", [0, 1, 6, 20])
@pytest.mark.parametrize("place", [0, -1])
def test_a_job_that_kills_its_worker_is_found_and_its_neighbours_live(
    engine: Engine, neighbours: int, place: int
) -> None:
    names = [f"good{n}" for n in range(neighbours)]
    names.insert(place if place == 0 else len(names), "killer")
    for age, slug in enumerate(names):
        engine.save(slug, [slug], created=NOW - 100 + age)
    todo = [claimed(engine)]
    attempts: dict[str, int] = {}
    for _ in range(40):
        if not todo:
            break
        batch = todo.pop(0)
        over = [claim for claim in batch.claims if claim.attempt > MAX_ATTEMPTS]
        if over:
            assert [claim.job.slug for claim in over] == ["killer"]
            engine.queue.begin(batch)
            bury(engine, batch, Failure.KILLED_WORKER)
        elif "killer" in slugs(batch):
            todo = killed(engine, batch)
        else:
            attempts |= {claim.job.slug: claim.attempt for claim in batch.claims}
            engine.queue.begin(batch)
            finish(engine, batch)
    assert engine.rows("killer") == [(FAILED, ("killer",))]
    assert engine.document("killer")["failure"] == "killed-worker"
    assert len(engine.queue.jobs(NOW)) == 1
    assert set(attempts.values()) <= {1}
    engine.die()
    assert list(engine.queue.recover(NOW)) == []


def test_a_batch_that_had_not_begun_is_not_suspected(engine: Engine) -> None:
    for number in range(4):
        engine.save(f"s{number}", ["x"], created=NOW - 9 + number)
    first, second = killed(engine, claimed(engine))
    assert (slugs(first), slugs(second)) == (["s0", "s1"], ["s2", "s3"])
    after = killed(engine, first)
    assert [slugs(batch) for batch in after] == [["s0"], ["s1"], ["s2", "s3"]]
    assert {claim.attempt for batch in after for claim in batch.claims} == {1}


def test_a_lone_jobs_deaths_are_all_counted_even_when_it_is_released_in_between(engine: Engine) -> None:
    engine.save("a", ["x"])
    (batch,) = killed(engine, claimed(engine))
    assert batch.claims[0].attempt == 2
    release(engine, batch)
    assert claimed(engine).claims[0].attempt == 2


def test_a_job_that_was_claimed_anew_belongs_to_its_latest_batch_only(engine: Engine) -> None:
    engine.save("a", ["x"])
    first = claimed(engine)
    engine.queue.put_off(first, first.claims[0], Failure.LOST_RACE, "lost", NOW)
    second = claimed(engine)  # and the first was never closed
    engine.die()
    (again,) = engine.queue.recover(NOW)
    assert (again.key, again.claims) == (second.key, second.claims)


def test_an_interrupted_job_that_has_been_saved_again_is_left_to_the_newer_save(engine: Engine) -> None:
    engine.save("a", ["old"], created=NOW - 2)
    batch = claimed(engine)
    new = engine.save("a", ["new"], created=NOW - 1, name="new")
    assert killed(engine, batch) == []
    engine.die()
    assert list(engine.queue.recover(NOW)) == []
    (claim,) = claimed(engine).claims
    assert (claim.job.id, set(claim.job.paths)) == (new, {"new", "old"})


def test_a_save_after_the_crash_is_published_after_the_older(engine: Engine) -> None:
    engine.save("a", ["old"], created=NOW - 2)
    batch = claimed(engine)
    new = engine.save("a", ["new"], created=NOW - 1)
    engine.die()
    (again,) = engine.queue.recover(NOW)
    finish(engine, again)
    assert batch.claims == again.claims
    assert [claim.job.id for claim in claimed(engine).claims] == [new]


# ── a person's hands ────────────────────────────────────────────────────────────────────────────────


def test_a_dead_letter_is_retried_by_hand(engine: Engine) -> None:
    engine.save("a", ["x"], revision=3)
    bury(engine, claimed(engine))
    (job,) = engine.queue.retry("a", NOW)
    document = engine.document("a")
    assert job.id == document["id"]
    assert (document["status"], document["attempts"], document["revision"]) == ("pending", 0, 3)
    assert (document["nextAttemptAt"], document["lastError"], document["failure"]) == (None, None, None)
    assert claimed(engine).claims[0].attempt == 1


def test_a_job_that_waits_for_its_retry_can_be_hurried(engine: Engine) -> None:
    job_id = engine.save("a", ["x"])
    put_off(engine, claimed(engine))
    engine.queue.retry(job_id, NOW)
    assert slugs(claimed(engine)) == ["a"]


def test_what_a_retry_cannot_help_is_refused_with_the_way_out(engine: Engine) -> None:
    engine.save("a", ["x"])
    bury(engine, claimed(engine), Failure.UNKNOWN_TYPE)
    with pytest.raises(SteeringError, match="save the post again"):
        engine.queue.retry("a", NOW)
    with pytest.raises(SteeringError, match="no job"):
        engine.queue.retry("nobody", NOW)
    engine.save("b", ["x"])
    with pytest.raises(SteeringError, match="has not failed"):
        engine.queue.retry("b", NOW)


def test_all_dead_letters_that_can_be_helped_are_retried_at_once(engine: Engine) -> None:
    for slug, failure in (("a", Failure.REJECTED), ("b", Failure.LOST_RACE), ("c", Failure.UNKNOWN_TYPE)):
        engine.save(slug, ["x"])
        bury(engine, claimed(engine), failure)
    assert sorted(job.slug for job in engine.queue.retry_all(NOW)) == ["a", "b"]
    assert engine.rows("c") == [(FAILED, ("x",))]


def test_a_cancelled_job_is_gone_with_the_older_saves_it_stood_for(engine: Engine) -> None:
    engine.save("a", ["old"], created=NOW - 2, name="one")
    new = engine.save("a", ["new"], created=NOW - 1, name="two", scheduledFor=format_time(NOW + 9))
    engine.save("b", ["b"])
    assert [job.id for job in engine.queue.cancel(new, NOW).gone] == [new]
    assert engine.rows("a") == []
    assert slugs(claimed(engine, NOW + 100)) == ["b"]


def test_a_job_in_flight_is_only_asked_to_end_and_the_save_behind_it_is_gone_at_once(engine: Engine) -> None:
    old = engine.save("a", ["old"], created=NOW - 2)
    batch = claimed(engine)
    new = engine.save("a", ["new"], created=NOW - 1)
    done = engine.queue.cancel("a", NOW)
    assert ([job.id for job in done.gone], [job.id for job in done.asked]) == ([new], [old])
    assert engine.queue.cancelled(batch) == {claim.key for claim in batch.claims}
    assert engine.rows("a") == [(CLAIMED, ("old",))]


def test_a_wish_to_cancel_outlives_the_worker_that_was_at_it(engine: Engine) -> None:
    engine.save("a", ["a"])
    claimed(engine)
    engine.queue.cancel("a", NOW)
    engine.die()
    (batch,) = engine.queue.recover(NOW)
    assert engine.queue.cancelled(batch) == {claim.key for claim in batch.claims}
    engine.queue.drop(batch, batch.claims)
    engine.queue.close(batch)
    assert engine.rows("a") == []


def test_what_nobody_wants_any_more_is_not_given_back(engine: Engine) -> None:
    queue = engine.queue
    for slug in ("put-off", "snoozed", "buried", "released", "wanted"):
        engine.save(slug, [slug])
    batch = claimed(engine)
    claim = {each.job.slug: each for each in batch.claims}
    for slug in claim.keys() - {"wanted"}:
        queue.cancel(slug, NOW)
    assert not queue.put_off(batch, claim["put-off"], Failure.NETWORK, "down", NOW + 60)
    assert not queue.snooze(batch, claim["snoozed"], "later", NOW + 60)
    assert not queue.bury(batch, claim["buried"], Failure.REJECTED, "no")
    queue.release(batch, [claim["released"], claim["wanted"]])
    assert {slug: engine.rows(slug)[0][0] for slug in claim} == {
        **dict.fromkeys(claim, CLAIMED),
        "wanted": PENDING,
    }
    assert queue.cancelled(batch) == {each.key for slug, each in claim.items() if slug != "wanted"}


def test_what_is_dropped_never_takes_a_newer_save_along(engine: Engine) -> None:
    engine.save("a", ["a"], created=NOW - 2)
    batch = claimed(engine)
    engine.save("a", ["b"], created=NOW - 1)
    engine.queue.drop(batch, batch.claims)
    engine.queue.close(batch)
    assert engine.rows("a") == [(PENDING, ("b",))]


def test_a_wish_that_came_too_late_does_not_reach_the_next_save(engine: Engine) -> None:
    job = engine.save("a", ["a"], name="a")
    batch = claimed(engine)
    engine.queue.cancel(job, NOW)
    finish(engine, batch)
    engine.save("a", ["b"], name="a", id=job)
    assert engine.queue.cancelled(claimed(engine)) == set()


def test_a_job_on_hold_can_be_published_now(engine: Engine) -> None:
    job = engine.save("a", ["x"], scheduledFor=format_time(NOW + 9), extra="kept")
    assert engine.rows("a") == [(SCHEDULED, ("x",))]
    assert [done.id for done in engine.queue.publish_now("a", NOW)] == [job]
    assert engine.rows("a") == [(PENDING, ("x",))]
    assert engine.document("a")["extra"] == "kept"
    assert slugs(claimed(engine)) == ["a"]


def test_publishing_a_retry_now_keeps_the_count_of_its_attempts(engine: Engine) -> None:
    engine.save("a", ["x"])
    put_off(engine, claimed(engine))
    engine.queue.publish_now("a", NOW)
    (claim,) = claimed(engine).claims
    assert claim.attempt == 2
    assert claim.job.last_error == "no network"


def test_only_what_waits_for_a_time_can_be_hurried(engine: Engine) -> None:
    engine.save("due", ["x"])
    with pytest.raises(SteeringError, match="is not on hold: it is pending"):
        engine.queue.publish_now("due", NOW)
    bury(engine, claimed(engine))
    with pytest.raises(SteeringError, match="use retry"):
        engine.queue.publish_now("due", NOW)


def test_another_process_sees_and_steers_while_the_worker_is_at_work(engine: Engine) -> None:
    engine.save("busy", ["x"], created=NOW - 2)
    batch = claimed(engine)
    worker = engine.queue
    engine.save("dead", ["x"], created=NOW - 1)
    bury(engine, claimed(engine))
    engine.die()  # a second process, with nothing of the first in memory
    states = {row.job.slug: (row.state, row.job.attempts) for row in engine.queue.jobs(NOW)}
    assert states == {"busy": (CLAIMED, 1), "dead": (FAILED, 1)}
    engine.queue.retry("dead", NOW)
    assert slugs(worker.claim(NOW).batch) == ["dead"]
    worker.finish(batch, batch.claims)
    assert engine.rows("busy") == []


def test_a_job_is_found_by_its_id_and_by_its_slug(engine: Engine) -> None:
    one = engine.save("a", ["x"])
    assert [row.job.id for row in engine.queue.find("a", NOW)] == [one]
    assert [row.job.slug for row in engine.queue.find(one, NOW)] == ["a"]
    assert engine.queue.find("b", NOW) == []


def test_ten_saves_in_any_state_leave_nothing_behind(engine: Engine) -> None:
    seen: set[str] = set()
    for number in range(10):
        engine.save("a", [f"p{number}"], created=NOW + number)
        batch = claimed(engine, NOW + number)
        seen |= set(batch.claims[0].job.paths)
        [put_off, release, finish][number % 3](engine, batch)
    while (found := engine.queue.claim(NOW + 1000)).batch is not None:
        seen |= {path for claim in found.batch.claims for path in claim.job.paths}
        finish(engine, found.batch)
    assert seen == {f"p{number}" for number in range(10)}
    assert engine.rows("a") == []


# ── pausing ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_pause_lasts_until_it_is_ended_whatever_becomes_of_the_worker(engine: Engine) -> None:
    assert engine.queue.paused(NOW) is None
    engine.queue.pause(NOW, reason="moving\x1b house")
    engine.die()
    pause = engine.queue.paused(NOW + 1e6)
    assert pause is not None
    assert (pause.since, pause.until, pause.reason) == (NOW, None, "moving house")
    assert engine.queue.resume()
    assert engine.queue.paused(NOW) is None
    assert not engine.queue.resume()


def test_a_pause_with_an_end_ends_by_itself(engine: Engine) -> None:
    engine.queue.pause(NOW, until=NOW + 60)
    assert engine.queue.paused(NOW + 59) is not None
    assert engine.queue.paused(NOW + 60) is None


def test_a_second_pause_takes_the_place_of_the_first(engine: Engine) -> None:
    engine.queue.pause(NOW, until=NOW + 60)
    engine.queue.pause(NOW, until=NOW + 9)
    assert engine.queue.paused(NOW + 10) is None
