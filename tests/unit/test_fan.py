"""Many sinks behind one: none harms another, and none harms the publication."""

from __future__ import annotations

from typing import TYPE_CHECKING

from briter_worker.events import Cancelled, Event, Warned, WorkerStopped
from briter_worker.sinks.fan import AtFirstJob, Fan

if TYPE_CHECKING:
    from collections.abc import Sequence

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


class Book(Notes):
    """A sink that can say when it has stored something."""

    def keep(self, events: Sequence[Event]) -> None:
        for event in events:
            self(event)
        self.told.append((self.name, "kept"))


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
    opened: list[Book] = []

    def open_it() -> Book:
        opened.append(Book(told, "history"))
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


def test_who_keeps_what_will_be_told_is_not_told_it_again() -> None:
    told: list[tuple[str, Event | str]] = []
    fan = Fan([AtFirstJob(lambda: Book(told, "history")), Notes(told, "webhooks")], Notes(told, "log"))
    fan.keep([JOB])
    fan(JOB)
    fan(JOB)
    assert told == [
        ("history", JOB),
        ("history", "kept"),
        ("webhooks", JOB),
        ("log", JOB),
        ("history", JOB),
        ("webhooks", JOB),
        ("log", JOB),
    ]


def test_a_sink_that_cannot_keep_anything_is_told_of_once() -> None:
    told: list[tuple[str, Event | str]] = []
    fan = Fan([Book(told, "broken", broken=True)], Notes(told, "log"))
    fan.keep([JOB])
    fan(JOB)
    assert [event for _, event in told if not isinstance(event, Warned)] == [JOB]
    assert len(told) == 2
