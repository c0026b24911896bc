"""The loop's own decisions: when it looks again, and how it ends. Time is an argument of the test."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import pytest

from briter_worker.drain import Counts
from briter_worker.errors import FailureCode, PublishError
from briter_worker.events import Warned
from briter_worker.worker import Stop, Worker, loop_backoff

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from briter_worker.drain import Drain
    from briter_worker.events import Event
    from briter_worker.ports import Pause
    from briter_worker.worker import WatchedQueue

POLL = 5.0


@dataclass
class FakeDrain:
    """Answers by a script; the last answer repeats."""

    recoveries: list[Counts | Exception] = field(default_factory=lambda: [Counts()])
    runs: list[Counts | Exception | None] = field(default_factory=lambda: [None])
    calls: list[str] = field(default_factory=list)
    during: Callable[[str], None] = lambda _: None

    def recover(self) -> Counts:
        return cast("Counts", self._next("recover", self.recoveries))

    def run(self) -> Counts | None:
        return cast("Counts | None", self._next("run", self.runs))

    def _next(self, name: str, answers: Sequence[Any]) -> Any:  # noqa: ANN401 - as each list has it
        self.calls.append(name)
        self.during(name)
        answer = answers[min(self.calls.count(name), len(answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Bench:
    """A worker whose sleep moves the clock, and which stops after some sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.naps: list[float] = []
        self.max_naps = 10
        self.stopped = False
        self.ours = True
        self.pause: Pause | None = None
        self.stuck: dict[str, str] = {}
        self.events: list[Event] = []
        self.drain = FakeDrain()
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.worker = Worker(
            drain=cast("Drain", self.drain),
            queue=cast("WatchedQueue", self),
            still_ours=lambda: self.ours,
            emit=self,
            stop=cast("Stop", self),
            wait=self.wait,
            tidy=lambda: None,
            poll=POLL,
        )

    def is_set(self) -> bool:
        return self.stopped or len(self.naps) >= self.max_naps

    def wait(self, seconds: float, is_stopped: Callable[[], bool]) -> None:  # noqa: ARG002 - the waker's
        self.naps.append(seconds)
        self.now += seconds

    def __call__(self, event: Event, /) -> None:
        self.events.append(event)

    def deliver(self, events: Sequence[Event], acknowledge: Callable[[], None], /) -> None:
        self.events.extend(events)
        acknowledge()

    def next_due(self, now: float) -> float | None:  # noqa: ARG002 - the queue's signature
        return None

    def active_pause(self, now: float) -> Pause | None:  # noqa: ARG002 - the queue's signature
        return self.pause

    def stuck_files(self) -> Mapping[str, str]:
        return self.stuck


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_the_loops_backoff_doubles_up_to_a_minute() -> None:
    assert [loop_backoff(n, 5.0) for n in range(1, 6)] == [10, 20, 40, 60, 60]
    assert loop_backoff(10**9, 5.0) == 60
    assert loop_backoff(3, 600.0) == 600
    assert all(math.isfinite(loop_backoff(n, 0.001)) for n in (1, 1100, 10**6))


@pytest.mark.parametrize("error", [OSError(28, "full"), PublishError(FailureCode.DISK, "full")])
def test_a_week_of_a_full_disk_does_not_end_the_worker(bench: Bench, error: Exception) -> None:
    bench.drain.recoveries = [error]
    bench.max_naps = 2000
    bench.worker.run_forever()
    assert len(bench.naps) == 2000
    assert bench.naps[-1] == 60
    assert isinstance(bench.events[0], Warned)
    assert bench.events[0].error == "the queue cannot be used: full; next try in 10 s"


def test_the_remote_is_asked_ever_more_rarely_about_undecided_jobs(bench: Bench) -> None:
    bench.drain.recoveries = [Counts(completed=5, undecided=3)]
    bench.max_naps = 40
    bench.worker.run_forever()
    # At 0, 10, 30, 70, 130 and 190 s of 200: a poll every 5 s.
    assert bench.drain.calls.count("recover") == 6
    assert bench.drain.calls.count("run") == 40
    assert bench.worker.counts.undecided == 3


def test_decided_jobs_are_not_asked_about_again(bench: Bench) -> None:
    bench.drain.recoveries = [Counts(undecided=1), Counts(completed=1), Counts(undecided=9)]
    bench.max_naps = 40
    bench.worker.run_forever()
    assert bench.drain.calls.count("recover") == 2
    assert (bench.worker.counts.completed, bench.worker.counts.undecided) == (1, 0)


def test_an_uncertain_push_is_asked_about_at_once(bench: Bench) -> None:
    bench.drain.runs = [Counts(undecided=1), None]
    bench.drain.recoveries = [Counts(), Counts(completed=1), Counts(undecided=9)]
    bench.worker.run_once()
    assert bench.drain.calls == ["recover", "run", "recover", "run"]
    assert bench.worker.counts == Counts(completed=1)
