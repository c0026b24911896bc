"""What the drain decides about each job; the queue is real, the publisher follows a script."""

from __future__ import annotations

import errno
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest
from drain_bench import Bench
from queue_engines import Disk

from briter_worker.drain import Counts
from briter_worker.errors import (
    FailureCode,
    PublishError,
    UnavailableError,
)
from briter_worker.job import State
from briter_worker.ports import Outcome, Result

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(Disk(tmp_path))


# One attempt


def test_a_released_job_is_pending_again_and_costs_no_attempt(bench: Bench) -> None:
    bench.save("a")
    bench.publisher.outcome = lambda each: Outcome(each.key, Result.RELEASED)
    bench.drain.run()
    assert bench.state("a") == (State.PENDING, 0)


# A batch that fails


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


# Stop, lost lock, unavailable store


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
