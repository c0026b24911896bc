"""The log: whole lines, only keys that apply, and no failure of the stream stops a publication."""

from __future__ import annotations

import json
from inspect import get_annotations
from typing import Any

import pytest

from briter_worker import events
from briter_worker.sinks.log import PREFIX, json_line, log_entry

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


def parsed(text: str) -> dict[str, Any]:
    assert text.startswith(PREFIX)
    entry: dict[str, Any] = json.loads(text.removeprefix(PREFIX))
    return entry


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
