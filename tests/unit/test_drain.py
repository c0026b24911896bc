"""What the drain decides about a job that no real publisher brings about; the queue is real."""

from __future__ import annotations

import errno
import math
import os
import signal
import threading
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from queue_backends import NOW, Disk

from briter_worker.drain import Counts, Drain
from briter_worker.errors import Failure, FailureCode, PublishError, UnavailableError
from briter_worker.job import State
from briter_worker.plugins import Plugins
from briter_worker.ports import Backoff, Outcome, Result
from briter_worker.worker import Stop, loop_backoff

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path

    from briter_worker.events import Event
    from briter_worker.ports import Claim, Publisher


COMMIT = "c" * 40


@dataclass
class Bench:
    """A drain of a real queue, and the publisher that it is given: each claim with one push."""

    disk: Disk
    refuses: Callable[[Claim], Exception | None] = lambda _: None
    """Raised for a whole batch that contains such a claim."""
    lost: Exception | None = None
    """Raised once by the push."""
    unopened: Exception | None = None
    """Raised where the publisher is to be opened."""
    plans: list[tuple[str, ...]] = field(default_factory=list)
    published: list[list[str]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """A new worker on the same folder."""
        self.disk.restart()
        self.drain = Drain(
            queue=self.disk.queue,
            publisher=self.open_publisher,
            emit=self,
            plugins=Plugins({}),
            backoff=Backoff((60.0,)),
            max_attempts=3,
            dry_run=False,
            stopping=lambda: False,
            clock=lambda: NOW,
        )

    def open_publisher(self) -> Publisher:
        if self.unopened:
            raise self.unopened
        return self

    def publish(self, claims: Sequence[Claim], **_: object) -> Iterator[Sequence[Outcome]]:
        for claim in claims:
            if error := self.refuses(claim):
                raise error
        self.plans.append(tuple(claim.key for claim in claims))
        if self.lost:
            error, self.lost = self.lost, None
            raise error
        self.published.append([claim.job.slug for claim in claims])
        yield [Outcome(claim.key, Result.PUBLISHED, COMMIT) for claim in claims]
        self.plans.pop()

    def resolve(self) -> Iterator[Sequence[Outcome]]:
        """Each push has landed."""
        while self.plans:
            yield [Outcome(key, Result.PUBLISHED, COMMIT) for key in self.plans[0]]
            self.plans.pop(0)

    def undecided(self) -> Collection[str]:
        return {*chain.from_iterable(self.plans)}

    def ever_had(self, paths: Collection[str]) -> Collection[str]:  # noqa: ARG002 - the port's signature
        """Nobody ever had anything."""
        return ()

    def tidy(self, now: float) -> None:
        """Nothing to do."""

    def __call__(self, event: Event, /) -> None:
        self.events.append(event)

    def deliver(self, events: Sequence[Event], acknowledge: Callable[[], None], /) -> None:
        acknowledge()
        self.events.extend(events)

    def save(self, *slugs: str) -> None:
        for slug in slugs:
            self.disk.save(slug, [f"content/{slug}.md"])

    def state(self, slug: str) -> tuple[State, int]:
        (row,) = [row for row in self.disk.queue.jobs(NOW) if row.job.slug == slug]
        return row.state, row.job.attempts


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(Disk(tmp_path))


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
    bench.refuses = lambda claim: error if claim.job.slug == "bad" else None
    assert bench.drain.run() == Counts(completed=5, failed=1)
    assert sorted(chain.from_iterable(bench.published)) == ["a", "b", "c", "d"]
    assert bench.disk.document("bad")["failure"] == code
    assert bench.state("bad") == (state, 1)


def test_what_may_have_been_pushed_as_the_store_went_away_is_completed_when_it_can_be(bench: Bench) -> None:
    bench.save("a")
    bench.lost = UnavailableError("no answer")
    with pytest.raises(UnavailableError):
        bench.drain.run()
    bench.start()
    bench.unopened = PublishError(FailureCode.NOT_A_REPOSITORY, "no repository")
    assert bench.drain.recover() == Counts(undecided=1)
    bench.unopened = None
    assert bench.drain.recover() == Counts(completed=1)
    assert bench.published == []


# The schedule of retries


DELAYS = st.lists(st.floats(0, 1e9), min_size=1, max_size=8).map(tuple)


def test_each_attempt_has_its_delay_and_the_last_one_repeats() -> None:
    backoff = Backoff((60.0, 300.0, 1800.0))
    assert [backoff.delay(n) for n in (1, 2, 3, 4, 100)] == [60, 300, 1800, 1800, 1800]


@pytest.mark.parametrize("until", [0.0, NOW - 1, NOW + 0.1, NOW + 9e9])
def test_a_job_that_waits_for_another_is_not_tried_again_and_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, until: float
) -> None:
    def withhold(claims: Sequence[Claim], **_: object) -> Iterator[Sequence[Outcome]]:
        failure = Failure(FailureCode.UNSETTLED, "it belongs to a scheduled post")
        yield [Outcome(each.key, Result.FAILED, failure=failure, retry_at=until) for each in claims]

    monkeypatch.setattr(bench, "publish", withhold)
    bench.drain.backoff = Backoff((0.0,))
    bench.save("a")
    bench.drain.run()
    assert bench.disk.queue.next_due(NOW) == NOW + 1


@pytest.mark.parametrize("jitter", [0.0, 0.5])
def test_no_wait_but_the_first_is_shorter_than_a_second(jitter: float) -> None:
    backoff = Backoff((0.0,), jitter)
    assert [backoff.delay(n, lambda: 0.0) for n in (1, 2, 3, 100)] == [0, 1, 1, 1]
    assert Backoff((0.0, 1.2), jitter=0.5).delay(2, lambda: 0.0) == 1
    assert backoff.longest == 1, "or a queue takes the retry for that of a clock that ran ahead"


def test_jitter_goes_either_way() -> None:
    backoff = Backoff((100.0, 1000.0), jitter=0.2)
    assert backoff.delay(1, lambda: 0.0) == pytest.approx(80)
    assert backoff.delay(1, lambda: 0.5) == pytest.approx(100)
    assert backoff.delay(1, lambda: 0.9999999) == pytest.approx(120)


@given(delays=DELAYS, jitter=st.floats(0, 1), attempt=st.integers(1, 20), drawn=st.floats(0, 1))
def test_a_jittered_delay_is_never_negative_and_never_over_the_longest(
    delays: tuple[float, ...], jitter: float, attempt: int, drawn: float
) -> None:
    backoff = Backoff(delays, jitter)
    assert 0 <= backoff.delay(attempt, lambda: drawn) <= backoff.longest


def test_the_loops_backoff_doubles_up_to_a_minute() -> None:
    assert [loop_backoff(n, 5.0) for n in range(1, 6)] == [10, 20, 40, 60, 60]
    assert loop_backoff(10**9, 5.0) == 60
    assert loop_backoff(3, 600.0) == 600
    assert all(math.isfinite(loop_backoff(n, 0.001)) for n in (1, 1100, 10**6))


def test_a_worker_that_stops_at_once_has_logged_the_signal_before_its_end() -> None:
    seen: list[str] = []
    is_logged = threading.Event()

    def log_slowly(event: Event) -> None:
        is_logged.wait(0.2)  # a slow standard output
        seen.append(event.name)

    stop = Stop(log_slowly, limit=60, abort=lambda: None)
    with stop.on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        stop.end()
        assert seen == ["worker-stopping"]
