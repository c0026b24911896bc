"""What the drain decides about each job; the queue is real, the publisher follows a script."""

from __future__ import annotations

import errno
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest
from drain_bench import COMMIT, MAX_ATTEMPTS, Bench
from queue_engines import NOW, Disk

from briter_worker.drain import Counts
from briter_worker.errors import (
    Failure,
    FailureCode,
    LockLostError,
    PublishError,
    RefusedError,
    SnoozedError,
    StoppedError,
    UnavailableError,
)
from briter_worker.events import (
    Cancelled,
    DeadLettered,
    Failed,
    JobStarted,
    Published,
    Revived,
    Superseded,
    Warned,
)
from briter_worker.job import Job, State, format_time
from briter_worker.plugins import hookimpl
from briter_worker.ports import JobKind, Outcome, Request, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from briter_worker.ports import Change, Publication

AGAIN = Failure(FailureCode.LOST_RACE, "others pushed", "nothing")
DOWN = PublishError(FailureCode.NETWORK, "the remote is down", "wait")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(Disk(tmp_path))


def failing(failure: Failure) -> Callable[[Request], Outcome]:
    return lambda request: Outcome(request.key, Result.FAILED, failure=failure)


# One attempt


def test_a_start_and_its_publication_are_emitted_in_full(bench: Bench) -> None:
    bench.disk.save(
        "a",
        ["content/a.md"],
        created=NOW - 9,
        id="one",
        commitMessage="Say\nit\nall",
        attempts=1,
        scheduledFor=format_time(NOW - 5),
    )
    bench.publisher.outcome = lambda each: Outcome(
        each.key, Result.PUBLISHED, COMMIT, rejected_paths=("b: no",)
    )
    assert bench.drain.run() == Counts(completed=1)
    started, published = bench.events
    assert started == JobStarted(
        job_id="one", slug="a", attempt=2, dry_run=False, title="Say", saved_at=NOW - 9, due_at=NOW - 5
    )
    assert isinstance(published, Published)
    assert Published(**{**vars(published), "duration_ms": 0}) == Published(
        job_id="one",
        slug="a",
        attempt=2,
        dry_run=False,
        duration_ms=0,
        rejected_paths=("b: no",),
        commit=COMMIT,
    )
    assert bench.disk.queue.jobs(NOW) == []


def test_the_publisher_gets_the_post_as_its_job_declares_it(bench: Bench) -> None:
    author = {"name": "Ada", "email": "ada@example.org"}
    bench.disk.save("a", ["content/a.md", "content/b"], message="Say\n\nit", author=author)
    bench.disk.save("plain", ["content/p.md"])
    bench.disk.save("later", ["content/later.md"], scheduledFor=format_time(NOW + 99))
    bench.drain.run()
    requests = {request.slug: request._replace(key="", saved_at=0.0) for request in bench.publisher.requests}
    assert requests == {
        "a": Request("", "a", ("content/a.md", "content/b"), "Say\n\nit", 0.0, ("Ada", "ada@example.org")),
        "plain": Request("", "plain", ("content/p.md",), "Publish plain", 0.0),
    }
    assert bench.publisher.scheduled == {"content/later.md": NOW + 99}
    assert bench.publisher.now == NOW


def test_a_failure_that_may_pass_is_retried_after_the_backoff(bench: Bench) -> None:
    bench.disk.save("a", ["content/a.md"], id="one")
    bench.publisher.outcome = failing(AGAIN)
    assert bench.drain.run() == Counts(completed=1, failed=1)
    (failed,) = bench.events[1:]
    assert isinstance(failed, Failed)
    assert (failed.failure, failed.error, failed.fix) == ("lost-race", "others pushed", "nothing")
    assert failed.retry_at == NOW + 60
    job = bench.disk.document("a")
    assert (job["failure"], job["lastError"], job["fix"]) == ("lost-race", "others pushed", "nothing")
    assert job["nextAttemptAt"] == format_time(NOW + 60)
    assert bench.state("a") == (State.RETRYING, 1)


def test_the_last_allowed_attempt_ends_as_a_dead_letter(bench: Bench) -> None:
    bench.disk.save("a", ["content/a.md"], attempts=MAX_ATTEMPTS - 1)
    bench.publisher.outcome = failing(AGAIN)
    bench.drain.run()
    assert isinstance(bench.events[-1], DeadLettered)
    assert bench.state("a") == (State.FAILED, MAX_ATTEMPTS)


def test_a_refused_job_is_a_dead_letter_at_the_first_attempt(bench: Bench) -> None:
    bench.save("a")
    bench.publisher.outcome = failing(Failure(FailureCode.CONFLICT, "both changed it"))
    bench.drain.run()
    assert bench.names() == ["start", "dead-lettered"]
    assert bench.state("a") == (State.FAILED, 1)


def test_a_withheld_job_waits_and_costs_no_attempt(bench: Bench) -> None:
    bench.save("a")
    reason = Failure(FailureCode.UNSETTLED, "content/a.md is scheduled by another job")
    bench.publisher.outcome = lambda each: Outcome(each.key, Result.FAILED, failure=reason, retry_at=NOW + 30)
    bench.drain.run()
    assert isinstance(bench.events[-1], Failed)
    assert bench.state("a") == (State.RETRYING, 0)
    assert bench.disk.document("a")["lastError"] == reason.message


def test_a_released_job_is_pending_again_and_costs_no_attempt(bench: Bench) -> None:
    bench.save("a")
    bench.publisher.outcome = lambda each: Outcome(each.key, Result.RELEASED)
    bench.drain.run()
    assert bench.state("a") == (State.PENDING, 0)


def test_what_the_queue_tidied_is_emitted(bench: Bench) -> None:
    bench.disk.save("a", ["content/a.md"], created=NOW - 9, id="older", name="older")
    bench.disk.save("a", ["content/a.md"], id="newer", name="newer")
    (bench.disk.root / "odd.json").write_text('{"slug": "odd"}')
    assert bench.drain.run() == Counts(completed=1, failed=1)
    assert sorted(bench.names()) == ["published", "quarantined", "start", "superseded"]
    assert Superseded(job_id="older", slug="a", superseded_by="newer") in bench.events
    assert bench.drain.run() is None


# Dry run


def test_a_dry_run_keeps_its_jobs_as_tried_until_they_are_saved_again(tmp_path: Path) -> None:
    bench = Bench(Disk(tmp_path), dry_run=True)
    bench.disk.save("a", ["content/a.md"], id="one", created=NOW - 9)
    assert bench.drain.run() == Counts(completed=1)
    assert [event.dry_run for event in bench.events] == [True, True]  # type: ignore[attr-defined]
    assert bench.state("a") == (State.TRIED, 0)
    assert bench.disk.document("a")["dryRunAt"] == format_time(NOW)
    assert bench.drain.run() is None
    bench.disk.save("a", ["content/a.md"], id="two")
    assert bench.drain.run() == Counts(completed=1)


def test_a_dry_run_acknowledges_what_the_remote_has_already(tmp_path: Path) -> None:
    bench = Bench(Disk(tmp_path), dry_run=True)
    bench.save("a")
    bench.publisher.outcome = lambda each: Outcome(each.key, Result.UNCHANGED)
    bench.drain.run()
    assert bench.names() == ["start", "nochange"]
    assert bench.disk.queue.jobs(NOW) == []


# A batch that fails


def test_an_environment_failure_concerns_every_job_of_the_batch(bench: Bench) -> None:
    bench.save("a", "b", "c")
    down = PublishError(FailureCode.NETWORK, "no route to https://u:secret@example.org")
    bench.publisher.refuses = lambda _: down
    assert bench.drain.run() == Counts(completed=3, failed=3)
    for slug in "abc":
        assert bench.disk.document(slug)["lastError"] == "no route to https://***@example.org"
        assert bench.disk.document(slug)["attempts"] == 1


@pytest.mark.parametrize(
    ("error", "code", "state"),
    [
        (ValueError("oops"), "internal", State.RETRYING),
        (MemoryError(), "internal", State.RETRYING),
        (RecursionError("deep"), "internal", State.RETRYING),
        (OSError(errno.ENAMETOOLONG, "too long"), "internal", State.RETRYING),
        (PublishError(FailureCode.REJECTED, "a hook said no"), "rejected", State.FAILED),
    ],
)
def test_one_jobs_fault_is_found_by_halving_and_the_others_are_published(
    bench: Bench, error: Exception, code: str, state: State
) -> None:
    bench.save("a", "b", "bad", "c", "d")
    bench.publisher.refuses = lambda request: error if request.slug == "bad" else None
    assert bench.drain.run() == Counts(completed=5, failed=1)
    assert sorted(chain.from_iterable(bench.publisher.published)) == ["a", "b", "c", "d"]
    assert bench.disk.document("bad")["failure"] == code
    assert bench.state("bad") == (state, 1)


def test_a_full_disk_is_an_environment_failure_and_is_not_halved(bench: Bench) -> None:
    bench.save("a", "b")
    pushes = iter([OSError(errno.ENOSPC, "full")])
    bench.publisher.refuses = lambda _: next(pushes)
    bench.drain.run()
    assert bench.disk.document("a")["failure"] == "disk"
    assert bench.disk.document("a")["fix"] == "free some space"


def test_a_job_whose_push_is_uncertain_stays_in_flight_and_the_others_fail(bench: Bench) -> None:
    bench.save("a")
    bench.publisher.steps.append(DOWN)  # after the plan was recorded
    assert bench.drain.run() == Counts(undecided=1)
    assert bench.state("a")[0] is State.CLAIMED
    bench.publisher.remote.append(True)
    assert bench.drain.recover() == Counts(completed=1)
    assert bench.names() == ["start", "published"]


# Cancellation


def test_a_job_cancelled_before_the_push_is_gone(bench: Bench) -> None:
    bench.disk.save("a", ["content/a.md"], id="one")
    bench.publisher.while_reading = partial(bench.cancel, "a")
    bench.publisher.outcome = lambda each: Outcome(
        each.key, Result.CANCELLED if each.key in bench.publisher.cancelled() else Result.PUBLISHED
    )
    bench.drain.run()
    assert bench.events[1:] == [Cancelled(job_id="one", slug="a")]
    assert bench.disk.queue.jobs(NOW) == []


@pytest.mark.parametrize(
    "outcome",
    [
        failing(AGAIN),
        failing(Failure(FailureCode.CONFLICT, "both")),
        lambda each: Outcome(each.key, Result.FAILED, retry_at=NOW + 9),
        lambda each: Outcome(each.key, Result.RELEASED),
    ],
)
def test_a_job_cancelled_too_late_for_the_push_does_not_wait_again(
    bench: Bench, outcome: Callable[[Request], Outcome]
) -> None:
    bench.disk.save("a", ["content/a.md"], id="one")
    bench.publisher.before_push = partial(bench.cancel, "a")
    bench.publisher.outcome = outcome
    assert bench.drain.run() == Counts(completed=1)
    assert bench.events[1:] == [Cancelled(job_id="one", slug="a")]
    assert bench.disk.queue.jobs(NOW) == []


# Stop, lost lock, unavailable store


def test_a_stop_puts_back_what_did_not_land_and_acknowledges_what_did(bench: Bench) -> None:
    bench.save("a")
    bench.publisher.steps.append(StoppedError())
    assert bench.drain.run() == Counts()
    assert bench.state("a") == (State.PENDING, 0)
    bench.publisher.steps.append(StoppedError())
    bench.publisher.remote.append(True)
    assert bench.drain.run() == Counts(completed=1)
    assert bench.names() == ["start", "start", "published"]


def test_a_stop_that_the_remote_does_not_answer_leaves_the_job_in_flight(bench: Bench) -> None:
    bench.save("a")
    bench.publisher.steps.append(StoppedError())
    bench.publisher.remote.append(DOWN)
    assert bench.drain.run() == Counts(undecided=1)
    assert bench.state("a")[0] is State.CLAIMED
    assert bench.events[-1] == Warned(
        error="jobs in flight wait for the remote: the remote is down", fix="wait"
    )


def test_a_worker_that_is_stopping_publishes_nothing(bench: Bench) -> None:
    bench.save("a")
    bench.stopping = True
    assert bench.drain.run() == Counts()
    assert bench.state("a") == (State.PENDING, 0)
    assert bench.publisher.requests == []


@pytest.mark.parametrize("error", [LockLostError(), UnavailableError("no answer")])
def test_a_lost_site_puts_the_jobs_back_uncounted_and_ends_the_drain(bench: Bench, error: Exception) -> None:
    def lose() -> None:
        raise error

    bench.save("a", "b")
    bench.publisher.while_reading = lose
    with pytest.raises(type(error)):
        bench.drain.run()
    assert {bench.state("a"), bench.state("b")} == {(State.PENDING, 0)}
    assert bench.names() == ["start", "start"]


def test_what_may_have_been_pushed_as_the_store_went_away_is_completed_later(bench: Bench) -> None:
    bench.save("a")
    bench.publisher.steps.append(UnavailableError("no answer"))
    with pytest.raises(UnavailableError):
        bench.drain.run()
    bench.start()
    bench.publisher.remote.append(True)
    assert bench.drain.recover() == Counts(completed=1)
    assert bench.names() == ["start", "published"]


# After a crash


def test_what_landed_before_the_crash_is_acknowledged_once(bench: Bench) -> None:
    bench.save("a", "b")
    bench.kill(bench.drain.run)
    bench.publisher.remote.append(True)
    assert bench.drain.recover() == Counts(completed=2)
    assert bench.publisher.published == []
    assert bench.drain.recover() == Counts()


def test_what_did_not_land_is_published_job_by_job_uncounted(bench: Bench) -> None:
    bench.save("a", "b", "c")
    bench.kill(bench.drain.run)
    assert bench.drain.recover() == Counts(completed=3)
    assert sorted(bench.publisher.published) == [["a"], ["b"], ["c"]]
    assert {event.attempt for event in bench.events if isinstance(event, Published)} == {1}


def test_a_poison_job_ends_as_a_dead_letter_and_the_others_are_published(bench: Bench) -> None:
    bench.save("a", "poison", "z")
    bench.kill(bench.drain.run)
    bench.publisher.before_push = lambda: (
        bench.publisher.steps.append(KeyboardInterrupt())
        if bench.publisher.requests[0].slug == "poison"
        else None
    )
    for _ in range(MAX_ATTEMPTS):
        with pytest.raises(KeyboardInterrupt):
            bench.drain.recover()
        bench.start()
    bench.drain.recover()
    assert bench.disk.document("poison")["failure"] == "killed-worker"
    assert sorted(chain.from_iterable(bench.publisher.published)) == ["a", "z"]


def test_a_job_with_more_attempts_than_allowed_by_now_gets_one_more(bench: Bench) -> None:
    bench.disk.save("a", ["content/a.md"], attempts=MAX_ATTEMPTS + 2)
    assert bench.drain.run() == Counts(completed=1)


def test_jobs_wait_while_the_remote_cannot_be_asked_and_the_doubt_is_emitted_once(bench: Bench) -> None:
    bench.save("a")
    bench.kill(bench.drain.run)
    bench.publisher.remote.extend([DOWN, DOWN, ValueError("oops"), True])
    assert bench.drain.recover() == Counts(undecided=1)
    assert bench.drain.recover() == Counts(undecided=1)
    assert bench.drain.recover() == Counts(undecided=1)
    assert [event.error for event in bench.events if isinstance(event, Warned)] == [
        "jobs in flight wait for the remote: the remote is down",
        "jobs in flight wait for the remote: an error in the worker itself: ValueError: oops",
    ]
    assert bench.drain.recover() == Counts(completed=1)


def test_jobs_wait_while_the_publisher_cannot_be_opened(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.save("a")
    bench.kill(bench.drain.run)
    broken = PublishError(FailureCode.NOT_A_REPOSITORY, "no repository")

    def fail() -> Any:  # noqa: ANN401 - never returns
        raise broken

    monkeypatch.setattr(bench, "open_publisher", fail)
    bench.start()
    assert bench.drain.recover() == Counts(undecided=1)


def test_a_stop_during_recovery_starts_no_further_job(bench: Bench) -> None:
    bench.save("a", "b")
    bench.kill(bench.drain.run)

    def stop() -> None:
        bench.stopping = True

    bench.publisher.before_push = stop
    assert bench.drain.recover() == Counts(completed=1)
    assert len(bench.publisher.published) == 1


def test_dead_letters_of_the_environment_come_back_when_a_push_succeeds(bench: Bench) -> None:
    bench.disk.save("old", ["content/old.md"], status="failed", failure="network", attempts=3, id="old")
    bench.save("a")
    bench.publisher.outcome = lambda each: Outcome(each.key, Result.UNCHANGED)
    bench.drain.run()
    assert bench.state("old") == (State.FAILED, 3)
    bench.save("a")
    bench.publisher.outcome = lambda each: Outcome(each.key, Result.PUBLISHED, COMMIT)
    bench.drain.run()
    assert bench.events[-1] == Revived(job_id="old", slug="old")
    assert bench.state("old") == (State.PENDING, 0)


# Plugins


class Newsletters:
    """A plugin with hooks and a type of job of its own."""

    def __init__(self, **rules: Any) -> None:  # noqa: ANN401 - as JobKind has them
        self.rules = rules
        self.calls: list[str] = []
        self.sends: Exception | None = None
        self.refuses: Exception | None = None

    @hookimpl
    def job_kinds(self) -> dict[str, JobKind]:
        return {"newsletter": JobKind(self._send, **self.rules)}

    @hookimpl
    def before_publish(self, job: Job, changes: Sequence[Change]) -> None:
        self.calls.append(f"before {job.slug} {len(changes)}")
        if self.refuses:
            raise self.refuses

    @hookimpl
    @contextmanager
    def around_attempt(self, job: Job, attempt: int) -> Iterator[None]:
        self.calls.append(f"enter {job.slug} {attempt}")
        yield
        self.calls.append(f"leave {job.slug}")

    @hookimpl
    def after_publish(self, publication: Publication) -> None:
        self.calls.append(f"after {publication.job.slug}")
        raise ValueError("after all")

    def _send(self, job: Job) -> None:
        self.calls.append(f"send {job.slug}")
        if self.sends:
            raise self.sends


def with_plugin(tmp_path: Path, plugin: object) -> Bench:
    return Bench(Disk(tmp_path), plugins=(plugin,))


@pytest.mark.parametrize(
    ("error", "name", "state"),
    [
        (RefusedError("no category", "add one"), "dead-lettered", (State.FAILED, 1)),
        (SnoozedError(NOW + 30, "embargo"), "failed", (State.RETRYING, 0)),
        (SnoozedError(float("inf"), "for ever"), "failed", (State.RETRYING, 0)),
        (ValueError("oops"), "failed", (State.RETRYING, 1)),
    ],
)
def test_a_plugin_keeps_a_job_back(
    tmp_path: Path, error: Exception, name: str, state: tuple[State, int]
) -> None:
    plugin = Newsletters()
    plugin.refuses = error
    bench = with_plugin(tmp_path, plugin)
    bench.save("a")
    bench.drain.run()
    assert bench.names() == ["start", name]
    assert bench.state("a") == state


def test_a_plugins_type_has_its_own_attempts_and_delays(tmp_path: Path) -> None:
    plugin = Newsletters(max_attempts=2, delays=(5.0,))
    plugin.sends = ValueError("no mail")
    bench = with_plugin(tmp_path, plugin)
    bench.disk.save("first", [], type="newsletter")
    bench.disk.save("second", [], type="newsletter", attempts=1)
    bench.drain.run()
    assert bench.disk.document("first")["nextAttemptAt"] == format_time(NOW + 5)
    assert bench.state("second") == (State.FAILED, 2)
