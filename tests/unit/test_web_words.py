"""What the pages say."""

from __future__ import annotations

import pytest

from briter_worker.errors import Failure
from briter_worker.web import words


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
