"""Many sinks behind one: no sink harms another one, or a publication."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from briter_worker.events import Cancelled, Event
from briter_worker.sinks.recorder import FanOut

if TYPE_CHECKING:
    from collections.abc import Sequence

JOB = Cancelled(job_id="1", slug="a")
OTHER_JOB = Cancelled(job_id="2", slug="b")
Told = list[tuple[str, Event | str]]


class Sink:
    """A sink or log that notes what it gets, or fails."""

    def __init__(self, told: Told, name: str, error: Exception | None = None) -> None:
        self.told, self.name, self.error = told, name, error

    def __call__(self, event: Event, /) -> None:
        self._note(event)

    def store(self, events: Sequence[Event], /) -> None:
        for event in events:
            self._note(event)

    def close(self) -> None:
        self._note("closed")

    def _note(self, what: Event | str) -> None:
        if self.error is not None:
            raise self.error
        self.told.append((self.name, what))


def test_jobs_are_acknowledged_after_their_receipts_and_before_their_log_lines() -> None:
    told: Told = []
    fan_out = FanOut([Sink(told, "history")], Sink(told, "log"))
    fan_out.deliver([JOB, OTHER_JOB], lambda: told.append(("queue", "acknowledged")))
    assert told == [
        ("history", JOB),
        ("history", OTHER_JOB),
        ("queue", "acknowledged"),
        ("log", JOB),
        ("log", OTHER_JOB),
    ]


def test_an_outcome_that_cannot_be_acknowledged_is_not_announced() -> None:
    told: Told = []

    def fail() -> None:
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        FanOut([Sink(told, "history")], Sink(told, "log")).deliver([JOB], fail)
    assert told == [("history", JOB)]
