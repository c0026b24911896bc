"""What the pages say."""

from __future__ import annotations

import time
from datetime import datetime
from typing import TYPE_CHECKING

import pytest

from briter_worker.errors import Failure
from briter_worker.events import Published
from briter_worker.sinks.history.reading import FileHistory
from briter_worker.sinks.history.recording import Target
from briter_worker.sinks.history.retention import Retention
from briter_worker.sinks.history.sink import HistorySink
from briter_worker.web import plots, words

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def test_every_failure_has_words_for_an_editor() -> None:
    assert set(words.HEADLINES) == set(Failure)


def test_a_reason_is_a_headline_what_was_said_and_what_to_do() -> None:
    why = words.reason("auth", "the remote said no. Fix: renew the key")
    assert why == words.Reason(
        "the remote refused the password or key", "The remote said no", "Renew the key"
    )
    assert words.reason("a-word-from-later", "it broke.").headline == "it broke"
    assert words.reason(None, None).headline == "it did not work"


@pytest.mark.parametrize("commit", [None, "", "x", "abc", "a" * 40 + "/../..", "<script>", "A" * 40])
def test_only_a_commit_becomes_a_link(commit: str | None) -> None:
    assert words.commit_href("https://example.org/{commit}", commit) is None
    assert words.commit_href("https://example.org/{commit}", "a" * 40) == f"https://example.org/{'a' * 40}"
    assert words.commit_href("", "a" * 40) is None


@pytest.mark.parametrize("seconds", [-1e30, 0.0, 1e30, float("inf")])
def test_no_time_is_beyond_words(seconds: float) -> None:
    assert words.moment(seconds)
    assert words.day_of(seconds)


@pytest.fixture
def zone(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """The server's time zone, for one test."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", request.param)
        time.tzset()
        yield request.param
    time.tzset()


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Kolkata", "Pacific/Auckland"], indirect=True)
def test_figures_count_by_the_days_and_hours_of_the_servers_zone(zone: str, tmp_path: Path) -> None:
    late = datetime.fromisoformat("2026-01-15T22:10").astimezone().timestamp()
    sink = HistorySink(
        tmp_path / "history.db",
        Target("main", "origin"),
        Retention(30, 365),
        announce=print,
        complain=pytest.fail,
        clock=lambda: late,
    )
    sink(Published(job_id="1", slug="a", attempt=1, dry_run=False, duration_ms=1, commit="c"))
    sink.close()
    history = FileHistory(tmp_path / "history.db")
    figures = plots.figures_of(history, late + 3 * 3600)
    history.close()
    assert [each.label for each in figures.month if each.published] == ["15 Jan"], zone
    assert [each.label for each in figures.day if each.published] == ["22:00"]
    assert [each.label for each in figures.month][-2:] == ["15 Jan", "16 Jan"]
