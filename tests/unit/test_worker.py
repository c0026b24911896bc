"""The loop's own decisions: when it looks again, and how it ends. Time is an argument of the test."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import pytest

from briter_worker.errors import Failure, LockLostError, PublishError, Stopped
from briter_worker.events import Paused, Resumed, Warned
from briter_worker.ports import Pause
from briter_worker.settling import Tally
from briter_worker.worker import Stop, Worker, pause_after

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from briter_worker.drain import Drain
    from briter_worker.events import Event

POLL = 5.0


@dataclass
class FakeDrain:
    """Answers as it is told; the last answer repeats."""

    recoveries: list[Tally | Exception] = field(default_factory=lambda: [Tally()])
    runs: list[Tally | Exception | None] = field(default_factory=lambda: [None])
    flushes: list[Exception | None] = field(default_factory=lambda: [None])
    calls: list[str] = field(default_factory=list)
    during: Callable[[str], None] = lambda _: None

    def recover(self) -> Tally:
        return cast("Tally", self._next("recover", self.recoveries))

    def run(self) -> Tally | None:
        return cast("Tally | None", self._next("run", self.runs))

    def flush(self) -> None:
        self._next("flush", self.flushes)

    def _next(self, name: str, answers: Sequence[Any]) -> Any:  # noqa: ANN401 - as each list has it
        self.calls.append(name)
        self.during(name)
        answer = answers[min(self.calls.count(name), len(answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Bench:
    """A worker whose sleep moves the clock, and which is told to stop after so many sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.naps: list[float] = []
        self.most_naps = 10
        self.stopped = False
        self.ours = True
        self.flushable = False
        self.pause: Pause | None = None
        self.in_the_way: dict[str, str] = {}
        self.events: list[Event] = []
        self.drain = FakeDrain()
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.worker = Worker(
            cast("Drain", self.drain),
            self.events.append,
            cast("Stop", self),
            self,
            next_due=lambda _: None,
            paused=lambda _: self.pause,
            pending_flush=lambda: self.flushable,
            still_ours=lambda: self.ours,
            tidy=lambda: None,
            poll=POLL,
            in_the_way=lambda: self.in_the_way,
        )

    def is_set(self) -> bool:
        return self.stopped or len(self.naps) >= self.most_naps

    def wait(self, seconds: float, stop: Stop) -> None:  # noqa: ARG002 - the waker's signature
        self.naps.append(seconds)
        self.now += seconds


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_trouble_is_waited_out_longer_each_time_and_never_longer_than_a_minute() -> None:
    assert [pause_after(n, 5.0) for n in range(1, 6)] == [10, 20, 40, 60, 60]
    assert pause_after(10**9, 5.0) == 60
    assert pause_after(3, 600.0) == 600
    assert all(math.isfinite(pause_after(n, 0.001)) for n in (1, 1100, 10**6))


def test_a_week_of_a_full_disk_does_not_end_the_worker(bench: Bench) -> None:
    bench.drain.recoveries = [OSError(28, "full")]
    bench.most_naps = 2000
    bench.worker.forever()
    assert len(bench.naps) == 2000
    assert bench.naps[-1] == 60


def test_what_is_in_the_way_is_told_when_it_is_new_and_counted_as_often(bench: Bench) -> None:
    found = [{}, {"a": "full"}, {"a": "full"}, {"a": "full", "b": "full"}, {}, {"b": "broken", "c": "broken"}]

    def next_found(call: str) -> None:
        if call == "run":
            bench.in_the_way = found[min(bench.drain.calls.count("run"), len(found)) - 1]

    bench.drain.during = next_found
    bench.worker.forever()
    told = [event.error for event in bench.events if isinstance(event, Warned)]
    assert [text.replace(" is no job and cannot be put aside", "") for text in told] == [
        *("the file 'a': full", "the file 'b': full", "the file 'b', and 1 more like it: broken"),
    ]
    assert bench.worker.total.failed == 4


def test_the_lock_is_looked_at_before_anything_is_claimed(bench: Bench) -> None:
    bench.ours = False
    with pytest.raises(LockLostError):
        bench.worker.forever()
    with pytest.raises(LockLostError):
        bench.worker.once()
    assert bench.drain.calls == []


def test_a_lock_that_is_lost_in_a_drain_ends_the_worker(bench: Bench) -> None:
    bench.drain.runs = [Tally(settled=3), LockLostError()]
    with pytest.raises(LockLostError):
        bench.worker.forever()
    assert bench.drain.calls == ["recover", "run", "run"]
    assert bench.worker.total.settled == 3


def test_what_is_undecided_is_asked_about_again_ever_more_rarely(bench: Bench) -> None:
    bench.drain.recoveries = [Tally(settled=5, undecided=3)]
    bench.most_naps = 40
    bench.worker.forever()
    # At 0, 10, 30, 70, 130 and 190 s of 200: a poll every 5 s.
    assert bench.drain.calls.count("recover") == 6
    assert bench.drain.calls.count("run") == 40
    assert bench.worker.total.undecided == 3


def test_what_is_decided_is_not_asked_about_again(bench: Bench) -> None:
    bench.drain.recoveries = [Tally(undecided=1), Tally(settled=1), Tally(undecided=9)]
    bench.most_naps = 40
    bench.worker.forever()
    assert bench.drain.calls.count("recover") == 2
    assert (bench.worker.total.settled, bench.worker.total.undecided) == (1, 0)


def test_a_recovery_that_failed_by_the_disk_is_repeated_at_the_next_try(bench: Bench) -> None:
    bench.drain.recoveries = [OSError(28, "full"), Tally(settled=1)]
    bench.most_naps = 2
    bench.worker.forever()
    assert bench.drain.calls == ["recover", "recover", "run"]


def test_a_stop_in_recovery_claims_nothing(bench: Bench) -> None:
    def stop(_: str) -> None:
        bench.stopped = True

    bench.drain.during = stop
    assert bench.worker.once() == Tally()
    assert bench.drain.calls == ["recover"]


def test_a_stop_in_the_flush_is_no_failure(bench: Bench) -> None:
    bench.flushable = True
    bench.drain.flushes = [Stopped()]
    assert bench.worker.once() == Tally()
    assert bench.events == []


@pytest.mark.parametrize("place", ["recoveries", "runs"])
def test_a_stop_anywhere_is_no_failure(bench: Bench, place: str) -> None:
    setattr(bench.drain, place, [Stopped()])
    assert bench.worker.once() == Tally()
    assert bench.events == []


def test_a_flush_that_failed_is_tried_again_after_a_minute(bench: Bench) -> None:
    bench.flushable = True
    bench.drain.flushes = [PublishError(Failure.NETWORK, "down")]
    bench.most_naps = 13
    bench.worker.forever()
    assert bench.drain.calls.count("flush") == 2
    assert [event.name for event in bench.events] == ["warning", "warning"]


def test_a_paused_worker_touches_nothing_and_says_so_once(bench: Bench) -> None:
    bench.pause = Pause(since=1.0, until=None, reason="moving house")
    bench.flushable = True
    bench.worker.forever()
    assert bench.drain.calls == []
    assert bench.events == [Paused(reason="moving house", until=None)]
    assert set(bench.naps) == {POLL}


def test_work_goes_on_when_the_pause_is_over(bench: Bench) -> None:
    bench.pause = Pause(since=1.0, until=None, reason="")
    bench.worker.once()
    bench.pause = None
    bench.worker.once()
    assert bench.events[1:] == [Resumed()]
    assert "run" in bench.drain.calls


def test_a_pause_that_is_changed_is_told_again(bench: Bench) -> None:
    for until in (None, 2e9):
        bench.pause = Pause(since=1.0, until=until, reason="")
        bench.worker.once()
    assert bench.events == [Paused(reason="", until=None), Paused(reason="", until=2e9)]


def test_a_pause_with_an_end_is_slept_no_longer_than_that(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    bench.pause = Pause(since=1.0, until=1000.0 + POLL / 4, reason="")
    bench.most_naps = 1
    bench.worker.forever()
    assert bench.naps == [POLL / 4]
