"""The log: whole lines, only keys that apply, and no failure of the stream stops a publication."""

from __future__ import annotations

import io
import json
import os
from inspect import get_annotations
from typing import Any

import pytest

from briter_worker import events
from briter_worker.sinks.log import PREFIX, LogSink, json_line, log_entry

NOW = 1769850000.4125
HOSTILE = "a\x1b[31mred\x1b[0m\nb\r\x9b2J\u202ec\ud800 https://me:hunter2@example.org/x"
SAMPLES: dict[str, Any] = {
    "str": "text",
    "str | None": "text",
    "bool | None": True,
    "int": 7,
    "int | None": 7,
    "float": NOW,
    "float | None": NOW,
    "bool": False,
    "tuple[str, ...]": ("one", "two"),
    "tuple[FileChange, ...]": (events.FileChange("one", 1, 0),),
}


def every_event() -> list[events.Event]:
    """One of each event that has a name."""
    kinds = [
        value
        for value in vars(events).values()
        if isinstance(value, type) and issubclass(value, events.Event) and "name" in vars(value)
    ]
    found = []
    for kind in kinds:
        types = {name: text for base in kind.__mro__ for name, text in get_annotations(base).items()}
        found.append(kind(**{name: SAMPLES[types[name]] for name in kind.fields}))
    return found


def changed(event: events.Event, **facts: object) -> events.Event:
    return type(event)(**{**vars(event), **facts})


def published(**changed: Any) -> events.Published:  # noqa: ANN401 - any field
    keys: dict[str, Any] = {
        "job_id": "1",
        "slug": "hello",
        "attempt": 1,
        "commit": "c0ffee",
        "dry_run": False,
        "duration_ms": 96,
    }
    return events.Published(**{**keys, **changed})


def parsed(text: str) -> dict[str, Any]:
    assert text.startswith(PREFIX)
    entry: dict[str, Any] = json.loads(text.removeprefix(PREFIX))
    return entry


class Pipe:
    """A pipe as the worker sees its standard output."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        self.stream = io.FileIO(self.writer, "w")

    def read_all(self) -> str:
        self.stream.close()
        with open(self.reader, encoding="utf-8") as file:  # noqa: PTH123 - a descriptor
            return file.read()


def test_a_failure_has_the_time_of_its_retry_and_its_fix_apart_from_the_error() -> None:
    failed = next(event for event in every_event() if isinstance(event, events.Failed))
    entry = parsed(json_line(log_entry(changed(failed, error="no route", fix="plug it in"), NOW)))
    assert entry["retryAt"] == "2026-01-31T09:00:00.412Z"
    assert (entry["error"], entry["fix"]) == ("no route", "plug it in")
    assert "fix" not in parsed(json_line(log_entry(changed(failed, fix=""), NOW)))


@pytest.mark.parametrize("event", every_event(), ids=lambda event: event.name)
def test_no_text_of_any_event_can_forge_a_line_or_show_a_secret(event: events.Event) -> None:
    fields = {name: getattr(event, name) for name in event.fields}
    for name, value in fields.items():
        if isinstance(value, str):
            fields[name] = HOSTILE
        elif isinstance(value, tuple):
            fields[name] = (HOSTILE,)

    text = json_line(log_entry(type(event)(**fields), NOW))

    assert text.isprintable()
    assert "hunter2" not in text
    assert parsed(text.encode().decode())["event"] == event.name


def test_a_closed_pipe_is_reported_once_and_stops_nothing() -> None:
    pipe = Pipe()
    os.close(pipe.reader)
    complaints: list[str] = []
    log = LogSink(pipe.stream, complaints.append)
    for _ in range(3):
        log(published())
    pipe.stream.close()
    assert len(complaints) == 1
    assert "publishing goes on" in complaints[0]
