"""What is told of a batch, what the publisher is asked, and what is counted: to the letter."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
from drain_bench import COMMIT, Bench, plan_of
from queue_engines import MAX_ATTEMPTS, NOW, Disk

from briter_worker.drain import hopeless
from briter_worker.errors import AwayError, Failure, LockLostError, PublishError, Stopped
from briter_worker.events import (
    Cancelled,
    DeadLettered,
    Failed,
    Flushed,
    Handled,
    JobStarted,
    NoChange,
    NoPaths,
    Published,
    Quarantined,
    Revived,
    Snoozed,
    Superseded,
    Warned,
)
from briter_worker.job import Job, State, format_time
from briter_worker.plugins import hookimpl
from briter_worker.ports import Claim, JobKind, Outcome, Request
from briter_worker.settling import Tally

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Each look at its clock is four seconds after the one before."""
    looks = count()
    return Bench(Disk(tmp_path), timer=lambda: 1000 + next(looks) * 4)


def test_a_start_and_its_publication_are_told_in_full(bench: Bench) -> None:
    due = format_time(NOW - 5)
    bench.disk.save(
        "a",
        ["content/a.md"],
        created=NOW - 9,
        id="one",
        commitMessage="Say\nit\nall",
        attempts=1,
        scheduledFor=due,
    )
    bench.publisher.outcome = lambda each: Outcome(each.key, COMMIT, rejected_paths=("b: no",))
    bench.drain.run()
    started, published = bench.events
    assert started == JobStarted(
        job_id="one", slug="a", attempt=2, dry_run=False, title="Say", saved_at=NOW - 9, due_at=NOW - 5
    )
    assert published == Published(
        job_id="one",
        slug="a",
        attempt=2,
        dry_run=False,
        duration_ms=4000,
        rejected_paths=("b: no",),
        commit=COMMIT,
    )


def test_a_dry_run_says_so(tmp_path: Path) -> None:
    bench = Bench(Disk(tmp_path), dry_run=True)
    bench.save("a")
    bench.drain.run()
    assert [event.dry_run for event in bench.events] == [True, True]  # type: ignore[attr-defined]


def test_what_the_remote_has_already_is_told_so_and_revives_nobody(bench: Bench) -> None:
    bench.disk.save("old", ["content/old.md"], status="failed", failure="network", attempts=3)
    bench.disk.save("a", ["content/a.md"], id="one")
    bench.publisher.outcome = lambda each: Outcome(each.key, rejected_paths=("b: no",))
    assert bench.drain.run() == Tally(settled=1)
    assert bench.events[1:] == [
        NoChange(
            job_id="one", slug="a", attempt=1, dry_run=False, duration_ms=4000, rejected_paths=("b: no",)
        )
    ]


def test_a_failure_that_may_pass_is_told_with_the_time_of_the_next_attempt(bench: Bench) -> None:
    bench.disk.save("a", ["content/a.md"], id="one")
    bench.publisher.outcome = lambda each: Outcome(each.key, failure=Failure.LOST_RACE, text="again")
    assert bench.drain.run() == Tally(settled=1, failed=1)
    assert bench.events[1:] == [
        Failed(
            job_id="one",
            slug="a",
            attempt=1,
            dry_run=False,
            duration_ms=4000,
            error="again",
            failure="lost-race",
            retry_at=NOW + 60,
        )
    ]
    job = bench.disk.document("a")
    assert job["nextAttemptAt"] == format_time(NOW + 60)
    assert (job["failure"], job["lastError"], job["attempts"]) == ("lost-race", "again", 1)
    assert bench.state("a")[0] is State.RETRYING


def test_the_last_attempt_that_is_allowed_is_the_last(bench: Bench) -> None:
    bench.disk.save("a", ["content/a.md"], id="one", attempts=MAX_ATTEMPTS - 1)
    bench.publisher.outcome = lambda each: Outcome(each.key, failure=Failure.LOST_RACE, text="again")
    bench.drain.run()
    assert bench.events[1:] == [
        DeadLettered(
            job_id="one",
            slug="a",
            attempt=MAX_ATTEMPTS,
            dry_run=False,
            duration_ms=4000,
            error="again",
            failure="lost-race",
        )
    ]
    assert bench.state("a") == (State.FAILED, MAX_ATTEMPTS)


def test_a_refusal_is_dead_at_the_first_attempt(bench: Bench) -> None:
    bench.disk.save("a", ["content/a.md"], id="one")
    bench.publisher.outcome = lambda each: Outcome(each.key, failure=Failure.CONFLICT, text="both")
    bench.drain.run()
    assert [(event.name, bench.state("a")) for event in bench.events[1:]] == [
        ("dead-lettered", (State.FAILED, 1))
    ]


def test_a_job_without_a_path_to_publish_has_an_event_of_its_own(bench: Bench) -> None:
    bench.disk.save("a", ["content/a.md"], id="one")
    bench.publisher.outcome = lambda each: Outcome(
        each.key, failure=Failure.NO_PATHS, text="none is allowed", rejected_paths=("x: no",)
    )
    bench.drain.run()
    assert bench.events[1:] == [
        NoPaths(
            job_id="one",
            slug="a",
            attempt=1,
            dry_run=False,
            duration_ms=4000,
            rejected_paths=("x: no",),
            error="none is allowed",
        )
    ]
    assert bench.state("a") == (State.FAILED, 1)


def test_one_failure_of_all_is_written_into_each_job_and_each_is_counted(bench: Bench) -> None:
    bench.save("a", "b", "c")
    bench.publisher.steps.append(PublishError(Failure.NETWORK, "no route to https://u:secret@example.org"))
    assert bench.drain.run() == Tally(settled=3, failed=3)
    for slug in "abc":
        assert bench.disk.document(slug)["lastError"] == "no route to https://***@example.org"


def test_a_mistake_of_our_own_is_named_in_the_job_with_what_to_do(bench: Bench) -> None:
    bench.save("a")
    bench.publisher.steps.append(ValueError("oops"))
    bench.drain.run()
    assert (
        bench.disk.document("a")["lastError"]
        == "an error in the worker itself: ValueError: oops. Fix: please report it"
    )


def test_the_tallies_of_several_batches_add_up() -> None:
    tally = Tally(settled=5, failed=4, undecided=3)
    tally.add(Tally(settled=30, failed=20, undecided=10))
    assert tally == Tally(settled=35, failed=24, undecided=13)


def test_what_was_tidied_on_the_way_is_told_and_what_is_no_job_counts_as_failed(bench: Bench) -> None:
    bench.disk.save("a", ["content/a.md"], created=NOW - 9, id="older", name="older")
    bench.disk.save("a", ["content/a.md"], id="newer", name="newer")
    (bench.disk.root / "odd.json").write_text('{"slug": "odd"}')
    assert bench.drain.run() == Tally(settled=1, failed=1)
    superseded, quarantined, *others = bench.events
    assert superseded == Superseded(job_id="older", slug="a", superseded_by="newer")
    assert isinstance(quarantined, Quarantined)
    (kept,) = bench.disk.queue.quarantined()
    assert (quarantined.job_id, quarantined.slug, quarantined.file) == ("odd", "odd", str(kept.path))
    assert "paths" in quarantined.error
    assert [event.name for event in others] == ["start", "published"]


def test_a_file_that_is_no_job_is_something_and_nothing_is_nothing(bench: Bench) -> None:
    (bench.disk.root / "odd.json").write_text('{"slug": "odd"}')
    assert bench.drain.run() == Tally(failed=1)
    assert bench.drain.run() is None


def test_what_a_flush_pushes_is_told_and_revives(bench: Bench) -> None:
    bench.disk.save("old", ["content/old.md"], status="failed", failure="network", attempts=3, id="old")
    bench.publisher.flushed = COMMIT
    bench.drain.flush()
    assert bench.publisher.now == NOW
    assert bench.events == [Flushed(commit=COMMIT), Revived(job_id="old", slug="old")]


def test_a_flush_with_nothing_to_push_tells_nothing_and_revives_nobody(bench: Bench) -> None:
    bench.disk.save("old", ["content/old.md"], status="failed", failure="network", attempts=3)
    bench.drain.flush()
    assert bench.events == []


def test_the_publisher_gets_the_post_as_its_job_says(bench: Bench) -> None:
    author = {"name": "Ada", "email": "ada@example.org"}
    bench.disk.save("a", ["content/a.md", "content/b"], message="Say\n\nit", author=author)
    bench.drain.run()
    (request,) = bench.publisher.requests
    assert replace(request, key="") == Request(
        "", "a", ("content/a.md", "content/b"), "Say\n\nit", ("Ada", "ada@example.org")
    )


def test_a_job_without_message_and_author_has_the_default_ones(bench: Bench) -> None:
    bench.save("a")
    bench.drain.run()
    (request,) = bench.publisher.requests
    assert (request.message, request.author) == ("Publish a", None)


def test_the_publisher_is_told_what_is_held_back_and_what_time_it_is(bench: Bench) -> None:
    bench.save("a")
    bench.disk.save("later", ["content/later.md"], scheduledFor=format_time(NOW + 99))
    bench.drain.run()
    assert set(bench.publisher.held) == {"content/later.md"}
    assert bench.publisher.now == NOW


def test_a_batch_without_hope_is_not_brought_to_the_publisher(bench: Bench) -> None:
    bench.disk.save("a", ["content/a.md"], type="newsletter")
    assert bench.drain.run() == Tally(settled=1, failed=1)
    assert bench.publisher.requests == []


@pytest.mark.parametrize(
    ("attempt", "kind", "failure", "text"),
    [
        (
            1,
            "newsletter",
            Failure.UNKNOWN_TYPE,
            "no plugin handles the type 'newsletter'. Fix: leave type out, or install it",
        ),
        (
            4,
            "git-sync",
            Failure.KILLED_WORKER,
            "the worker died 3 times while it tried this job alone. Fix: look at its files, save it again",
        ),
    ],
)
def test_what_is_hopeless_is_named_with_its_reason_and_its_remedy(
    attempt: int, kind: str, failure: Failure, text: str
) -> None:
    claim = Claim("k", Job(id="j", slug="s", paths=(), created_at=NOW, type=kind), attempt)
    assert hopeless([claim], 3) == [Outcome("k", failure=failure, text=text)]


def test_each_group_of_outcomes_is_a_step_of_the_progress(bench: Bench) -> None:
    bench.save("a", "b", "c")
    bench.publisher.parts = 3
    bench.drain.run()
    assert bench.progress == [("settle", 1, 3), ("settle", 2, 3), ("settle", 3, 3)]


# Plugins


class Newsletters:
    """A plugin with a type of job of its own."""

    def __init__(self, **rules: Any) -> None:  # noqa: ANN401 - as JobKind has them
        self.rules = rules
        self.sent: list[str] = []
        self.broken = False
        self.while_sending: Callable[[], object] = lambda: None

    @hookimpl  # type: ignore[untyped-decorator]  # pluggy is imported when it is needed
    def job_kinds(self, settings: object) -> dict[str, JobKind]:  # noqa: ARG002 - the hook's signature
        return {"newsletter": JobKind(self.send, **self.rules)}

    def send(self, job: Job) -> None:
        if self.broken:
            raise ConnectionError("no answer")
        self.sent.append(job.slug)
        self.while_sending()


def with_newsletters(bench: Bench, *, broken: bool = False, **rules: object) -> Newsletters:
    plugin = Newsletters(**rules)
    plugin.broken = broken
    bench.plugins = (plugin,)
    bench.start()
    return plugin


def test_a_stop_leaves_the_jobs_that_a_plugin_has_not_begun(bench: Bench) -> None:
    plugin = with_newsletters(bench)
    bench.disk.save("a", [], type="newsletter", createdAt=format_time(NOW - 2))
    bench.disk.save("b", [], type="newsletter", createdAt=format_time(NOW - 1))
    plugin.while_sending = lambda: setattr(bench, "stopping", True)
    assert bench.drain.run() == Tally(settled=1)
    assert plugin.sent == ["a"]
    assert bench.state("b") == (State.PENDING, 0)


def test_a_job_that_is_cancelled_while_a_plugin_does_another_is_not_done(bench: Bench) -> None:
    plugin = with_newsletters(bench)
    bench.disk.save("a", [], type="newsletter", createdAt=format_time(NOW - 3))
    bench.disk.save("b", [], type="newsletter", createdAt=format_time(NOW - 2))
    bench.disk.save("c", [], type="newsletter", createdAt=format_time(NOW - 1))
    plugin.while_sending = lambda: plugin.sent == ["a"] and bench.disk.queue.cancel("b", NOW)
    assert bench.drain.run() == Tally(settled=3)
    assert plugin.sent == ["a", "c"]
    assert gone(bench, "b")


def test_a_job_of_a_plugins_own_type_is_its_plugins_and_not_the_publishers(bench: Bench) -> None:
    plugin = with_newsletters(bench)
    bench.disk.save("a", ["content/a.md"], id="one", type="newsletter")
    bench.disk.save("old", ["content/old.md"], status="failed", failure="network", attempts=3)
    assert bench.drain.run() == Tally(settled=1)
    assert plugin.sent == ["a"]
    assert bench.publisher.published == []
    (handled,) = bench.events[1:]
    assert isinstance(handled, Handled)
    assert replace(handled, duration_ms=0) == Handled(
        job_id="one", slug="a", attempt=1, dry_run=False, duration_ms=0, kind="newsletter"
    )
    assert gone(bench, "a")


@pytest.mark.parametrize(
    ("rules", "attempts", "delay"),
    [
        ({}, 0, 60.0),
        ({"delays": (7.0, 9.0)}, 0, 7.0),
        ({"delays": (7.0, 9.0)}, 1, 9.0),
        ({"delays": (7000.0,)}, 0, 60.0),  # further away, it would be taken for a clock that was set back
        ({"max_attempts": MAX_ATTEMPTS + 2}, MAX_ATTEMPTS, 60.0),
        ({"max_attempts": 1}, 0, None),
        ({"delays": (7.0,)}, MAX_ATTEMPTS - 1, None),
    ],
)
def test_a_plugins_type_has_its_own_attempts_and_delays_or_everybodys(
    bench: Bench, rules: dict[str, object], attempts: int, delay: float | None
) -> None:
    with_newsletters(bench, broken=True, **rules)
    bench.disk.save("a", ["content/a.md"], type="newsletter", attempts=attempts)
    assert bench.drain.run() == Tally(settled=1, failed=1)
    last = bench.events[-1]
    if delay is None:
        assert isinstance(last, DeadLettered)
    else:
        assert isinstance(last, Failed)
        assert last.retry_at == NOW + delay


def test_the_rules_of_a_plugins_type_are_for_no_other(bench: Bench) -> None:
    with_newsletters(bench, delays=(7.0,), max_attempts=1)
    bench.save("a")
    bench.publisher.outcome = lambda each: Outcome(each.key, failure=Failure.LOST_RACE, text="again")
    bench.drain.run()
    last = bench.events[-1]
    assert isinstance(last, Failed)
    assert last.retry_at == NOW + 60


class Broken:
    """A plugin whose mistake shows when it is asked for its types of job."""

    def __init__(self, kinds: object) -> None:
        self.kinds = kinds

    @hookimpl  # type: ignore[untyped-decorator]  # as above
    def job_kinds(self) -> object:
        if isinstance(self.kinds, Exception):
            raise self.kinds
        return self.kinds


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        (KeyError("smtp_host"), "smtp_host"),
        ({"newsletter": print}, "no JobKind"),
        ({"newsletter": JobKind(print, delays=(-1.0,))}, "delays"),
        ([], "AttributeError"),
    ],
)
def test_jobs_of_a_broken_plugin_wait_for_its_repair_and_stop_no_worker(
    bench: Bench, kinds: object, words: str
) -> None:
    bench.plugins = (Broken(kinds),)
    bench.start()
    bench.disk.save("a", ["content/a.md"], type="newsletter")
    bench.save("b")
    assert bench.drain.run() == Tally(settled=2, failed=2)
    failed = [event for event in bench.events if isinstance(event, Failed)]
    assert [(each.slug, each.failure) for each in failed] == [("a", "plugin-broken"), ("b", "plugin-broken")]
    assert all(words in each.error for each in failed)


@pytest.mark.parametrize(
    ("wish", "until"), [(NOW + 30, NOW + 30), (NOW + 9_999, NOW + 60), (NOW, NOW + 60), (NOW - 1, NOW + 60)]
)
def test_what_a_plugin_puts_off_waits_as_long_as_it_may_and_costs_no_attempt(
    bench: Bench, wish: float, until: float
) -> None:
    bench.disk.save("a", ["content/a.md"], id="one")
    bench.save("b")
    bench.publisher.outcome = lambda each: Outcome(each.key, snooze_until=wish, text="not at night")
    assert bench.drain.run() == Tally(settled=2, failed=2)
    told = next(event for event in bench.events if isinstance(event, Snoozed) and event.slug == "a")
    assert replace(told, duration_ms=0) == Snoozed(
        job_id="one",
        slug="a",
        attempt=1,
        dry_run=False,
        duration_ms=0,
        error="not at night",
        retry_at=until,
    )
    document = bench.disk.document("a")
    assert (document["attempts"], document["nextAttemptAt"]) == (0, format_time(until))
    assert document["lastError"] == "not at night"


def test_what_is_published_is_told_also_when_its_neighbour_cannot_be_put_off(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def settled(request: Request) -> Outcome:
        monkeypatch.setattr(os, "write", full)
        if request.slug == "a":
            return Outcome(request.key, failure=Failure.LOST_RACE, text="again")
        return Outcome(request.key, COMMIT)

    bench.save("a", "b")
    bench.publisher.outcome = settled
    with pytest.raises(OSError, match="No space"):
        bench.drain.run()
    assert bench.names() == ["start", "start", "published"]


# Cancelled while in flight


def cancelling(bench: Bench, *slugs: str) -> Callable[[], None]:
    def cancel() -> None:
        for slug in slugs:
            bench.disk.queue.cancel(slug, NOW)

    return cancel


def gone(bench: Bench, slug: str) -> bool:
    return bench.disk.rows(slug) == []


def test_what_the_publisher_left_out_as_cancelled_is_gone_and_told(bench: Bench) -> None:
    bench.disk.save("a", ["content/a.md"], id="one")
    bench.disk.save("old", ["content/old.md"], status="failed", failure="network", attempts=3)
    bench.publisher.before_push = cancelling(bench, "a")
    bench.publisher.outcome = lambda each: Outcome(
        each.key, cancelled=each.key in bench.publisher.cancelled()
    )
    assert bench.drain.run() == Tally(settled=1)
    assert bench.events[1:] == [Cancelled(job_id="one", slug="a")]
    assert gone(bench, "a")


def test_what_was_pushed_before_it_could_be_cancelled_is_published(bench: Bench) -> None:
    bench.save("a")
    bench.publisher.before_push = cancelling(bench, "a")
    bench.drain.run()
    assert bench.names() == ["start", "published"]
    assert gone(bench, "a")


def test_what_fails_and_is_not_wanted_any_more_is_gone_and_no_failure(bench: Bench) -> None:
    bench.save("a", "b")
    bench.publisher.before_push = cancelling(bench, "a")
    bench.publisher.steps.append(PublishError(Failure.NETWORK, "down"))
    assert bench.drain.run() == Tally(settled=2, failed=1)
    assert sorted(bench.names()) == ["cancelled", "failed", "start", "start"]
    assert gone(bench, "a")
    assert bench.state("b") == (State.RETRYING, 1)


@pytest.mark.parametrize(
    "outcome", [{"snooze_until": NOW + 30}, {"failure": Failure.NETWORK}, {"failure": Failure.REJECTED}]
)
def test_what_is_cancelled_at_the_last_moment_does_not_wait_again(
    bench: Bench, outcome: dict[str, Any]
) -> None:
    bench.disk.save("a", ["content/a.md"], id="one")

    def settled(request: Request) -> Outcome:
        bench.disk.queue.cancel("a", NOW)
        return Outcome(request.key, **outcome)

    bench.publisher.outcome = settled
    assert bench.drain.run() == Tally(settled=1)
    assert bench.events[1:] == [Cancelled(job_id="one", slug="a")]
    assert gone(bench, "a")


@pytest.mark.parametrize("error", [LockLostError(), Stopped()])
def test_what_is_given_back_is_not_given_back_when_it_is_not_wanted_any_more(
    bench: Bench, error: Exception
) -> None:
    bench.save("a", "b")
    bench.publisher.before_push = cancelling(bench, "a")
    bench.publisher.steps.append(error)
    with suppress(LockLostError):
        bench.drain.run()
    assert "cancelled" in bench.names()
    assert gone(bench, "a")
    assert bench.state("b") == (State.PENDING, 0)


def test_what_a_dead_worker_left_and_nobody_wants_any_more_is_not_published(bench: Bench) -> None:
    bench.save("a", "b")
    bench.killed(bench.drain.run)
    cancelling(bench, "a")()
    assert bench.drain.recover() == Tally(settled=2)
    assert bench.publisher.published == [["b"]]
    assert gone(bench, "a")


# Recovery


def test_a_recovery_with_nothing_in_flight_tells_nothing(bench: Bench) -> None:
    assert bench.drain.recover() == Tally()
    assert bench.events == []


def test_each_batch_that_could_not_be_asked_about_counts(bench: Bench) -> None:
    for slugs in ("ab", "cd", "ef"):
        bench.save(*slugs)
        bench.killed(bench.drain.run)
    bench.publisher.remote.extend(PublishError(Failure.AUTH, "no key") for _ in range(3))
    assert bench.drain.recover() == Tally(undecided=6)


def test_a_mistake_in_asking_is_named(bench: Bench) -> None:
    bench.save("a")
    bench.killed(bench.drain.run)
    bench.events.clear()
    bench.publisher.remote.append(KeyError("x"))
    bench.drain.recover()
    assert bench.events == [
        Warned(
            error="jobs in flight have to wait: an error in the worker itself: KeyError: 'x'. "
            "Fix: please report it"
        )
    ]


def test_what_is_settled_after_the_first_of_two_pushes_is_not_asked_about_again(bench: Bench) -> None:
    bench.save("a", "b")
    bench.publisher.parts = 2
    bench.publisher.steps.append(None)
    bench.killed(bench.drain.run)
    (settled,) = bench.publisher.published
    bench.publisher.parts = 1
    assert bench.drain.recover() == Tally(settled=1)
    (asked,) = bench.publisher.asked
    assert asked == plan_of([Request(key, "", (), "") for key in asked.commits])
    (published,) = bench.publisher.published[1:]
    assert sorted([*settled, *published]) == ["a", "b"]


def test_a_stop_asks_only_about_the_last_push(bench: Bench) -> None:
    bench.save("a", "b")
    bench.publisher.parts = 2
    bench.publisher.steps.extend([None, Stopped()])
    bench.publisher.remote.append(True)
    assert bench.drain.run() == Tally(settled=2)
    assert len(bench.publisher.asked) == 1


def test_what_had_landed_is_settled_and_only_the_rest_is_published(bench: Bench) -> None:
    bench.save("a", "b")
    bench.publisher.parts = 2

    bench.publisher.outcome = lambda each: Outcome("unknown " + each.key, COMMIT)  # nothing is settled yet
    bench.publisher.steps.append(None)
    bench.killed(bench.drain.run)
    bench.publisher.outcome = lambda each: Outcome(each.key, COMMIT)
    bench.publisher.parts = 1
    (first,) = bench.publisher.published
    bench.publisher.remote.extend([True, False])
    assert bench.drain.recover() == Tally(settled=2)
    (again,) = bench.publisher.published[1:]
    assert set(first) | set(again) == {"a", "b"}
    assert len(first) == len(again) == 1


def test_a_stop_that_nobody_can_be_asked_about_leaves_all_in_flight_and_says_so(bench: Bench) -> None:
    bench.save("a")
    bench.publisher.steps.append(Stopped())
    bench.publisher.remote.append(PublishError(Failure.NETWORK, "down"))
    assert bench.drain.run() == Tally()
    assert bench.events[1:] == [Warned(error="what became of the last push is not known yet: down")]
    assert bench.state("a")[0] is State.CLAIMED
    bench.start()
    bench.publisher.remote.append(True)
    assert bench.drain.recover() == Tally(settled=1)
    assert bench.names()[2:] == ["published"]
    assert bench.publisher.published == []


def test_a_stop_that_was_cleared_up_leaves_nothing_to_recover(bench: Bench) -> None:
    bench.save("a")
    bench.publisher.steps.append(Stopped())
    bench.drain.run()
    assert [path.name for path in (bench.disk.root / ".claimed").iterdir() if path.name != ".lock"] == []


def test_a_lost_lock_ends_the_drain_also_when_the_queue_cannot_be_written(bench: Bench) -> None:
    bench.save("a")
    bench.publisher.steps.append(LockLostError())

    def lose_the_folder() -> None:
        shutil.rmtree(bench.disk.root)
        bench.disk.root.write_text("in the way")

    bench.publisher.before_push = lose_the_folder
    with pytest.raises(LockLostError):
        bench.drain.run()


def test_a_queue_that_is_away_is_what_is_told_also_when_it_cannot_be_written(bench: Bench) -> None:
    bench.save("a")

    def lose_the_folder() -> None:
        shutil.rmtree(bench.disk.root)
        bench.disk.root.write_text("in the way")
        raise AwayError("no answer")

    bench.publisher.while_reading = lose_the_folder
    with pytest.raises(AwayError, match="no answer"):
        bench.drain.run()


def test_a_revived_job_is_named(bench: Bench) -> None:
    bench.disk.save("old", ["content/old.md"], status="failed", failure="network", attempts=3, id="it")
    bench.save("a")
    bench.drain.run()
    assert bench.events[-1] == Revived(job_id="it", slug="old")
