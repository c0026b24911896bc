"""The job file: what is read, what is refused, what a rewrite keeps."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from briter_worker.job import Job, State, Status, format_time, joined, parse_time, rewritten
from briter_worker.jobfile import parse_job
from briter_worker.strictjson import MalformedJobError, UnreadableJobError, encode, read_document

_LEAST: dict[str, Any] = {"slug": "a", "paths": ["a.md"]}


def test_what_a_job_does_not_say_has_its_default() -> None:
    job = parse_job(_LEAST, name="file.json", modified=7.0)
    assert (job.id, job.type, job.created_at, job.status, job.attempts) == (
        "file", "git-sync", 7.0, Status.PENDING, 0,
    )  # fmt: skip
    assert job.commit_message == "Publish a"
    assert parse_job({**_LEAST, "message": ""}, name="f.json", modified=0).commit_message == ""


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1970-01-02", 86_400.0),
        ("1970-01-01T00:00:01", 1.0),
        ("1970-01-01T00:00:01.5Z", 1.5),
        ("1970-01-01T02:00:00+02:00", 0.0),
    ],
)
def test_times_are_read_as_the_contract_says(text: str, seconds: float) -> None:
    assert parse_time(text) == seconds
    assert parse_time(format_time(seconds)) == seconds


@pytest.mark.parametrize("text", ["", "soon", "2026-13-01", "12:00", "1767225600"])
def test_what_is_no_time_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="2026-01-31T09:00:00Z"):
        parse_time(text)


def test_a_time_beyond_the_calendar_can_still_be_written() -> None:
    assert format_time(1e18).startswith("9999-")


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"{'a': 1}", b'{"a": 1} x'])
def test_what_is_not_json_may_still_be_being_written(data: bytes) -> None:
    with pytest.raises(UnreadableJobError):
        read_document(data)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'{"a": 1, "a": 1}', "twice"),
        (b'{"a": Infinity}', "Infinity"),
        (b'{"a": "\\ud83d"}', "surrogate"),
        (b'{"a": "\\u0000"}', "NUL"),
        (b"[" * 65 + b"]" * 65, "deep"),
        (b" " * ((1 << 20) + 1), "bytes"),
    ],
)
def test_json_that_no_careful_writer_writes_is_malformed(data: bytes, reason: str) -> None:
    with pytest.raises(MalformedJobError, match=reason):
        read_document(data)


def test_a_byte_order_mark_and_brackets_in_texts_are_no_offence() -> None:
    value = {"text": "[" * 500, "emoji": "\N{GRINNING FACE}"}
    assert read_document(b"\xef\xbb\xbf" + json.dumps(value).encode()) == value


def test_a_text_about_escapes_has_no_nul_in_it() -> None:
    value = {"text": "\\u0000 and \\ud800", "more": ["\\\\u0000"]}
    assert read_document(json.dumps(value).encode()) == value
    with pytest.raises(MalformedJobError, match="NUL"):
        read_document(json.dumps({"text": "\\\0"}).encode())


def test_a_malformed_job_brings_its_document_and_names_the_key() -> None:
    with pytest.raises(MalformedJobError, match="paths") as caught:
        parse_job({"slug": "a", "paths": "x"}, name="f.json", modified=0)
    assert caught.value.document == {"slug": "a", "paths": "x"}


def test_a_rewrite_keeps_what_it_does_not_know_and_drops_old_spellings() -> None:
    document = {**_LEAST, "attempt": 1, "commitMessage": "M", "mine": [1]}
    after = rewritten(document, status=Status.FAILED, attempts=2, now=0, last_error="e", failure="busy")
    assert (after["message"], after["attempts"], after["mine"]) == ("M", 2, [1])
    assert not {"attempt", "commitMessage"} & after.keys()
    again = parse_job(read_document(encode(after)), name="f.json", modified=0)
    assert (again.status, again.attempts, again.message, again.failure) == (Status.FAILED, 2, "M", "busy")


def test_a_new_spelling_counts_more_than_the_old_one() -> None:
    job = parse_job({**_LEAST, "attempts": 3, "attempt": 1}, name="f.json", modified=0)
    assert job.attempts == 3


def test_joined_paths_are_the_newer_ones_first_and_each_once() -> None:
    assert joined(["b", "a"], ["a", "c"], ["c", "d"]) == ("b", "a", "c", "d")


def test_where_a_job_stands_while_it_waits() -> None:
    job = Job(id="j", slug="s", paths=(), created_at=0.0)
    assert job.state(10.0) is State.PENDING
    assert replace(job, scheduled_for=10.0).state(10.0) is State.PENDING
    assert replace(job, scheduled_for=11.0, attempts=1, next_attempt_at=12.0).state(10.0) is State.SCHEDULED
    assert replace(job, attempts=1, next_attempt_at=12.0).state(10.0) is State.RETRYING
    assert replace(job, attempts=1, next_attempt_at=10.0).state(10.0) is State.PENDING
    assert replace(job, next_attempt_at=12.0).state(10.0) is State.RETRYING
    assert replace(job, status=Status.FAILED, scheduled_for=11.0).state(10.0) is State.FAILED


def test_of_two_spellings_in_a_file_a_rewrite_keeps_the_new_one() -> None:
    document = {"commitMessage": "old", "message": "new", "attempt": 7, "slug": "s"}
    written = rewritten(document, status=Status.PENDING, attempts=2, now=0.0)
    assert (written["message"], written["attempts"]) == ("new", 2)
    assert not {"commitMessage", "attempt"} & written.keys()


def test_numbers_are_written_as_their_writer_spelled_them() -> None:
    data = b'{"a": 1.10, "b": 1e400, "c": [-0.0, {"d": 12345678901234567890.5}], "e": 7}'
    written = encode(read_document(data)).decode()
    for spelling in ("1.10", "1e400", "-0.0", "12345678901234567890.5", "7"):
        assert f" {spelling}" in written
    assert read_document(written.encode()) == read_document(data)
