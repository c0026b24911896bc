"""What a person at a terminal reads: the log's entries as lines."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import pytest

from briter_worker import events
from briter_worker.commands.output import event_text
from briter_worker.sinks.log import log_entry

if TYPE_CHECKING:
    from collections.abc import Iterator

NOW = 1_769_850_000.0
"""2026-01-31T09:00:00Z."""
OUTCOME: dict[str, Any] = {"job_id": "j1", "slug": "hello", "attempt": 1, "dry_run": False, "duration_ms": 96}


@pytest.fixture(autouse=True)
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine on which it is an hour later than UTC."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def line(event: events.Event) -> str:
    return event_text(log_entry(event, NOW))


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (
            events.Published(**OUTCOME, commit="52ed5b", rejected_paths=(".env", "b c")),
            "10:00:00 published hello 52ed5b in 96 ms without .env, b c",
        ),
        (
            events.Failed(**OUTCOME, error="down.", failure="network", retry_at=NOW + 60, fix="w"),
            "10:00:00 failed hello down. in 96 ms (network) next try in 1 min (31 Jan, 10:01:00)\n Fix: w",
        ),
        (
            events.Steered(action="cancel", by="root", job_id="j1", slug="tomorrow"),
            "10:00:00 cancel tomorrow by root",
        ),
        (events.Steered(action="pause", by="root", job_id=None, slug=None), "10:00:00 pause by root"),
        (events.Paused(reason="Lunch", until=NOW + 60), "10:00:00 paused (Lunch) until 31 Jan, 10:01:00"),
        (events.WorkerStarted(pid=7, dry_run=True), "10:00:00 worker-started (dry run) as PID 7"),
        (events.WorkerStopped(drained=1, once=True), "10:00:00 worker-stopped after 1 completed job"),
        (events.WorkerStopped(drained=2), "10:00:00 worker-stopped after 2 completed jobs"),
        (
            events.WorkerSkipped(message="another worker instance is active, skipping", holder_pid=7),
            "10:00:00 worker-skipped another worker instance is active, skipping (PID 7)",
        ),
        (events.WorkerStopping(signal="SIGINT"), "10:00:00 worker-stopping by SIGINT"),
        (
            events.Superseded(job_id="j1", slug="hello", superseded_by="j2"),
            "10:00:00 superseded hello by job j2",
        ),
        (
            events.SiteUpdated.of("52ed5b", ["content/a.md"]),
            "10:00:00 site-updated 52ed5b content/a.md (1 file)",
        ),
        (
            events.Enqueued(job_id="j1", slug="hello", paths=("content/a.md",)),
            "10:00:00 enqueued hello content/a.md",
        ),
        (events.ConditionChanged(condition=None, failure=None), "10:00:00 condition publishing works again"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_an_event_reads_as_a_line(event: events.Event, text: str) -> None:
    assert re.sub(" +", " ", line(event)) == text


def test_no_line_shows_brackets_or_a_time_for_machines() -> None:
    many: list[events.Event] = [
        events.NoPaths(**OUTCOME, error="none", rejected_paths=("a",)),
        events.DeadLettered(**OUTCOME, error="none", failure="rejected"),
        events.Quarantined(job_id="j1", slug="x", error="not JSON", file="storage/quarantine/x"),
        events.Reaped(site="shop", worker="node-1"),
        events.Paused(reason="", until=1e15),
    ]
    for event in many:
        assert not re.search(r"\[|\]|T\d\d:|[a-z][A-Z]", line(event)), line(event)
