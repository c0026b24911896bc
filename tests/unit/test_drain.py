"""What the drain decides, with a publisher that does as it is told; the real ones are tested elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from drain_bench import Bench
from queue_engines import MAX_ATTEMPTS, NOW, Disk

from briter_worker.drain import hopeless
from briter_worker.errors import AwayError, Failure, LockLostError, PublishError, Stopped
from briter_worker.events import Cancelled, JobStarted
from briter_worker.job import Job, State, format_time
from briter_worker.ports import Claim
from briter_worker.settling import Tally

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(Disk(tmp_path))


def claim(attempt: int, attempts: int, **keys: str) -> Claim:
    job = Job(id="j", slug="s", paths=("content/s.md",), created_at=NOW, attempts=attempts, **keys)  # type: ignore[arg-type]
    return Claim("k", job, attempt)


@pytest.mark.parametrize(
    ("attempt", "attempts", "word"),
    [
        (1, 0, None),
        (3, 2, None),
        (6, 5, None),  # the maximum was lowered since: nobody died
        (4, 2, Failure.KILLED_WORKER),
        (7, 5, Failure.KILLED_WORKER),
        (3, 1, None),
    ],
)
def test_only_deaths_make_a_job_a_killer(attempt: int, attempts: int, word: Failure | None) -> None:
    found = hopeless([claim(attempt, attempts)], 3)
    assert [outcome.failure for outcome in found] == ([] if word is None else [word])


@pytest.mark.parametrize(
    ("attempt", "attempts", "said"),
    [
        (4, 0, "the worker died 3 times while it tried this job alone. Fix: "),
        (4, 2, "the worker died once while it tried this job alone, and 2 of its attempts failed. Fix: "),
    ],
)
def test_what_died_and_what_failed_is_told_apart(attempt: int, attempts: int, said: str) -> None:
    (outcome,) = hopeless([claim(attempt, attempts)], 3)
    assert outcome.text.startswith(said)


def test_a_kind_of_job_that_nobody_handles_is_not_tried() -> None:
    (found,) = hopeless([claim(1, 0, type="newsletter")], 3)
    assert found.failure is Failure.UNKNOWN_TYPE
    assert "'newsletter'" in found.text
    (found,) = hopeless([claim(1, 0, type="x" * 100_000)], 3)
    assert found.text.startswith("no plugin handles the type '…' (100000 characters). Fix: ")


def test_a_job_with_more_attempts_than_are_allowed_by_now_gets_one_more_and_then_is_dead(
    bench: Bench,
) -> None:
    bench.disk.save("good", ["content/good.md"], attempts=5)
    bench.disk.save("bad", ["content/bad.md"], attempts=5, createdAt="2020-01-01T00:00:00Z")
    assert bench.drain.run() == Tally(settled=2)
    bench.disk.save("bad", ["content/bad.md"], attempts=5)
    bench.publisher.steps.append(PublishError(Failure.LOST_RACE, "again"))
    assert bench.drain.run() == Tally(settled=1, failed=1)
    assert bench.disk.document("bad")["failure"] == "lost-race"
    assert bench.state("bad") == (State.FAILED, 6)


def test_a_job_that_is_alone_each_time_its_worker_dies_is_buried(bench: Bench) -> None:
    bench.save("bomb")
    bench.killed(bench.drain.run)
    for _ in range(MAX_ATTEMPTS - 1):
        bench.killed(bench.drain.recover)
    assert bench.drain.recover() == Tally(settled=1, failed=1)
    assert bench.disk.document("bomb")["failure"] == "killed-worker"


def test_a_lost_lock_gives_the_jobs_back_uncounted_and_ends_the_drain(bench: Bench) -> None:
    bench.save("a", "b")
    bench.publisher.steps.append(LockLostError())
    with pytest.raises(LockLostError):
        bench.drain.run()
    assert {bench.state("a"), bench.state("b")} == {(State.PENDING, 0)}
    assert bench.publisher.asked == []
    bench.start()
    assert bench.drain.recover() == Tally()


def test_a_queue_that_is_away_for_a_moment_costs_no_attempt(bench: Bench) -> None:
    def away() -> None:
        raise AwayError("no answer")

    bench.save("a", "b")
    bench.publisher.while_reading = away
    with pytest.raises(AwayError):
        bench.drain.run()
    assert {bench.state("a"), bench.state("b")} == {(State.PENDING, 0)}
    assert bench.names() == ["start", "start"]


def test_what_may_have_been_pushed_while_the_queue_went_away_is_settled_with_it(bench: Bench) -> None:
    bench.save("a")
    bench.publisher.steps.append(AwayError("no answer"))
    with pytest.raises(AwayError):
        bench.drain.run()
    assert bench.names() == ["start"]
    bench.start()
    bench.publisher.remote.append(True)
    assert bench.drain.recover() == Tally(settled=1)
    assert bench.names() == ["start", "published"]


def test_what_cannot_be_settled_as_the_queue_is_away_is_left_to_the_next_drain(bench: Bench) -> None:
    bench.save("a")
    bench.publisher.steps.append(AwayError("no answer"))
    with pytest.raises(AwayError):
        bench.drain.run()
    bench.start()
    bench.publisher.remote.append(AwayError("no answer"))
    with pytest.raises(AwayError):
        bench.drain.recover()
    bench.start()
    bench.publisher.remote.append(True)
    assert bench.drain.recover() == Tally(settled=1)
    assert bench.names() == ["start", "published"]


def test_a_stop_gives_back_what_did_not_land(bench: Bench) -> None:
    bench.save("a")
    bench.publisher.steps.append(Stopped())
    assert bench.drain.run() == Tally()
    assert bench.state("a") == (State.PENDING, 0)


def test_a_stop_settles_what_landed(bench: Bench) -> None:
    bench.save("a")
    bench.publisher.steps.append(Stopped())
    bench.publisher.remote.append(True)
    assert bench.drain.run() == Tally(settled=1)
    assert bench.names() == ["start", "published"]


def test_what_nobody_could_be_asked_about_is_undecided_and_nothing_else(bench: Bench) -> None:
    bench.save("a")
    bench.killed(bench.drain.run)
    bench.publisher.remote.extend([PublishError(Failure.AUTH, "no key"), True])
    assert bench.drain.recover() == Tally(undecided=1)
    bench.save("b")
    assert bench.drain.run() == Tally(settled=1)
    assert bench.drain.recover() == Tally(settled=1)
    assert bench.publisher.published == [["b"]]


def test_an_undecided_batch_is_not_hidden_by_one_that_was_settled(bench: Bench) -> None:
    bench.save("a")
    bench.killed(bench.drain.run)
    bench.save("b", "c")
    bench.killed(bench.drain.run)
    bench.publisher.remote.extend([PublishError(Failure.AUTH, "no key"), True])
    assert bench.drain.recover() == Tally(settled=2, undecided=1)


def test_a_remote_out_of_reach_is_asked_once_for_all_batches(bench: Bench) -> None:
    for slug in "abc":
        bench.save(slug)
        bench.killed(bench.drain.run)
    bench.publisher.remote.append(PublishError(Failure.TIMEOUT, "no answer"))
    assert bench.drain.recover() == Tally(undecided=3)
    assert len(bench.publisher.asked) == 1


def test_a_doubt_is_told_once_until_it_changes(bench: Bench) -> None:
    bench.save("a")
    bench.killed(bench.drain.run)
    bench.events.clear()
    down, key = PublishError(Failure.NETWORK, "down"), PublishError(Failure.AUTH, "no key")
    bench.publisher.remote.extend([down, down, key, key, down])
    for _ in range(5):
        bench.drain.recover()
    told = [event.error for event in bench.events if event.name == "warning"]  # type: ignore[attr-defined]
    assert [text.rpartition(": ")[2] for text in told] == ["down", "no key", "down"]


@pytest.mark.parametrize("error", [OSError(5, "I/O"), KeyError("x")])
def test_a_mistake_in_asking_leaves_the_batch_and_the_others_undisturbed(
    bench: Bench, error: Exception
) -> None:
    bench.save("a")
    bench.killed(bench.drain.run)
    bench.publisher.remote.append(error)
    assert bench.drain.recover() == Tally(undecided=1)
    assert bench.state("a")[0] is State.CLAIMED


def test_a_stop_while_the_remote_is_asked_leaves_all_for_the_next_start(bench: Bench) -> None:
    bench.save("a")
    bench.killed(bench.drain.run)
    bench.publisher.remote.append(Stopped())
    assert bench.drain.recover() == Tally()
    bench.start()
    assert bench.drain.recover() == Tally(settled=1)


def test_a_stop_during_recovery_begins_no_further_part(bench: Bench) -> None:
    bench.save("a", "b", "c", "d")
    bench.killed(bench.drain.run)

    def stop() -> None:
        bench.stopping = True

    bench.publisher.before_push = stop
    assert bench.drain.recover() == Tally(settled=2)
    assert bench.drain.recover() == Tally()
    bench.start()
    bench.stopping = False
    bench.publisher.before_push = lambda: None
    assert bench.drain.recover() == Tally(settled=2)
    assert bench.publisher.published == [["a", "b"], ["c", "d"]]


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (OSError(28, "No space left on device", "f"), "disk"),
        (ValueError("oops"), "internal"),
        (PublishError(Failure.WRONG_BRANCH, "not main"), "wrong-branch"),
    ],
)
def test_whatever_the_publisher_raises_concerns_the_jobs_and_not_the_worker(
    bench: Bench, error: Exception, word: str
) -> None:
    bench.save("a")
    bench.publisher.steps.append(error)
    assert bench.drain.run() == Tally(settled=1, failed=1)
    assert bench.names() == ["start", "failed"]
    assert bench.disk.document("a")["failure"] == word


def test_dead_letters_of_the_surroundings_come_back_when_a_push_succeeds(bench: Bench) -> None:
    bench.disk.save("old", ["content/old.md"], status="failed", failure="network", attempts=3)
    bench.disk.save("bad", ["content/bad.md"], status="failed", failure="conflict", attempts=1)
    bench.save("a")
    bench.drain.run()
    assert bench.names() == ["start", "published", "revived"]
    assert bench.state("old") == (State.PENDING, 0)


@pytest.mark.parametrize(
    ("slug", "held"), [("a", "content/a.md"), ("other", "content/a.md"), ("other", "./content//a.md/")]
)
def test_what_is_saved_on_hold_while_it_is_read_does_not_go_out_early(
    bench: Bench, slug: str, held: str
) -> None:
    bench.save("a", "b")

    def hold() -> None:
        bench.disk.save(slug, [held], created=NOW + 1, scheduledFor=format_time(NOW + 600))

    bench.publisher.while_reading = hold
    bench.drain.run()
    assert bench.publisher.published == [["b"]]
    assert {type(event).__name__ for event in bench.events} == {"JobStarted", "Published"}
    bench.publisher.while_reading = lambda: None
    bench.drain.run()
    if slug == "a":
        assert [type(event).__name__ for event in bench.events][-1] == "Superseded"
        assert bench.disk.rows("a") == [(State.SCHEDULED, ("content/a.md",))]
    else:  # by now it is known: a file that both declare is the due one's to publish
        assert bench.publisher.published == [["b"], ["a"]]
        assert held in bench.publisher.held


def test_what_is_saved_on_hold_as_a_folder_holds_what_is_in_it_and_nothing_beside_it(bench: Bench) -> None:
    bench.disk.save("a", ["content/a/index.md"])
    bench.disk.save("b", ["content/b.md"])

    def hold() -> None:
        held = ["content/a", "conten", "content/b.m", "content/b.md/c"]
        bench.disk.save("other", held, created=NOW + 1, scheduledFor=format_time(NOW + 600))

    bench.publisher.while_reading = hold
    bench.drain.run()
    assert bench.publisher.published == [["b"]]


def test_the_second_half_of_what_a_dead_worker_left_gives_way_to_what_was_saved_on_hold_meanwhile(
    bench: Bench,
) -> None:
    bench.save("a", "b")
    bench.killed(bench.drain.run)

    def hold() -> None:
        bench.disk.save("b", ["content/b.md"], created=NOW + 1, scheduledFor=format_time(NOW + 600))
        bench.publisher.before_push = lambda: None

    bench.start()
    bench.publisher.before_push = hold
    bench.drain.recover()
    assert bench.publisher.published == [["a"]]
    bench.drain.run()
    assert bench.disk.rows("b") == [(State.SCHEDULED, ("content/b.md",))]


def test_what_is_cancelled_while_it_is_overtaken_is_gone(bench: Bench) -> None:
    bench.save("a")

    def hold_and_cancel() -> None:
        bench.disk.queue.cancel("a", NOW)
        bench.disk.save("other", ["content/a.md"], created=NOW + 1, scheduledFor=format_time(NOW + 600))

    bench.publisher.while_reading = hold_and_cancel
    bench.drain.run()
    assert bench.disk.rows("a") == []
    assert [type(event).__name__ for event in bench.events] == ["JobStarted", "Cancelled"]
    started, cancelled = bench.events
    assert isinstance(started, JobStarted)
    assert cancelled == Cancelled(job_id=started.job_id, slug="a")
