"""Many sinks behind one: none harms another, and none harms the publication."""

from __future__ import annotations

from briter_worker.events import Cancelled, Event, Warned, WorkerStopped
from briter_worker.sinks.fan import AtFirstJob, Fan

JOB = Cancelled(job_id="1", slug="a")
END = WorkerStopped(drained=0)


class Notes:
    """A sink that writes down what it is told, or cannot."""

    def __init__(self, told: list[tuple[str, Event | str]], name: str, *, broken: bool = False) -> None:
        self.told, self.name, self.broken = told, name, broken

    def __call__(self, event: Event) -> None:
        if self.broken:
            raise RuntimeError("no ink")
        self.told.append((self.name, event))

    def close(self) -> None:
        if self.broken:
            raise RuntimeError("no ink")
        self.told.append((self.name, "closed"))


def test_what_is_stored_is_stored_before_it_is_told() -> None:
    told: list[tuple[str, Event | str]] = []
    fan = Fan([Notes(told, "history")], Notes(told, "log"))
    fan(JOB)
    fan.close()
    assert told == [("history", JOB), ("log", JOB), ("history", "closed")]


def test_a_sink_that_fails_is_told_of_once_and_the_others_go_on() -> None:
    told: list[tuple[str, Event | str]] = []
    fan = Fan([Notes(told, "broken", broken=True), Notes(told, "history")], Notes(told, "log"))
    fan(JOB)
    fan(END)
    fan.close()
    warnings = [event for name, event in told if name == "log" and isinstance(event, Warned)]
    assert len(warnings) == 1
    assert "no ink" in warnings[0].error
    assert [event for name, event in told if name == "history"] == [JOB, END, "closed"]


def test_a_sink_for_jobs_is_not_opened_by_a_worker_that_finds_none() -> None:
    told: list[tuple[str, Event | str]] = []
    opened: list[Notes] = []

    def open_it() -> Notes:
        opened.append(Notes(told, "history"))
        return opened[-1]

    sink = AtFirstJob(open_it)
    sink(END)
    sink.close()
    assert opened == []
    sink(JOB)
    sink(END)
    sink.close()
    assert len(opened) == 1
    assert told == [("history", JOB), ("history", END), ("history", "closed")]
