"""The words and times of the pages."""

from __future__ import annotations

import time
from datetime import datetime
from typing import TYPE_CHECKING

import pytest

from briter_worker.status import Headline
from briter_worker.web import labels

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_a_reason_is_a_headline_the_message_and_the_fix_verbatim() -> None:
    why = labels.reason("auth", "the remote said no.", "git remote set-url origin ...")
    assert why == Headline(
        "bad", "the remote refused the password or key", "The remote said no", "git remote set-url origin ..."
    )
    assert labels.reason("a-word-from-later", "it broke.").text == "it broke"
    assert labels.reason(None, None).text == "it failed"


@pytest.mark.parametrize("commit", [None, "", "x", "abc", "a" * 40 + "/../..", "<script>", "A" * 40])
def test_only_a_commit_becomes_a_link(commit: str | None) -> None:
    assert labels.commit_href("https://example.org/{commit}", commit) is None
    assert labels.commit_href("https://example.org/{commit}", "a" * 40) == f"https://example.org/{'a' * 40}"
    assert labels.commit_href("", "a" * 40) is None


@pytest.mark.parametrize("seconds", [-1e30, 0.0, 1e30, float("inf")])
def test_no_time_is_beyond_words(seconds: float) -> None:
    assert labels.moment(seconds)
    assert labels.day_ahead(seconds)


@pytest.fixture
def zone(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """The server's time zone, for one test."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", request.param)
        time.tzset()
        yield request.param
    time.tzset()


@pytest.mark.parametrize("zone", ["Europe/Berlin"], indirect=True)
def test_a_time_on_the_other_side_of_a_change_of_the_clocks_names_its_zone(zone: str) -> None:
    winter, july = (
        datetime.fromisoformat(f"{day}T09:00:00+00:00").timestamp() for day in ("2026-11-19", "2027-07-01")
    )
    assert labels.clock(winter, winter) == "10:00", zone
    assert labels.clock(july, winter) == "11:00 CEST"
    assert labels.moment(july, winter) == "1 Jul 2027, 11:00 CEST"
    assert labels.moment(winter, july) == "19 Nov 2026, 10:00 CET"


@pytest.mark.parametrize("zone", ["Pacific/Auckland"], indirect=True)
def test_a_calendar_says_which_day_is_today_and_which_tomorrow(zone: str) -> None:
    eve = datetime.fromisoformat("2026-11-19T23:30").astimezone().timestamp()
    assert labels.day_ahead(eve + 60, eve) == "Today, Thursday, 19 November 2026", zone
    assert labels.day_ahead(eve + 3600, eve) == "Tomorrow, Friday, 20 November 2026"
    assert labels.day_ahead(eve + 2 * 86400, eve) == "Saturday, 21 November 2026"
