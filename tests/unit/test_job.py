"""The job file: what is read, what is refused, what a rewrite keeps; and `enqueue`, which writes one."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from briter_worker.client import enqueue
from briter_worker.job import (
    Job,
    MalformedJobError,
    Status,
    UnreadableJobError,
    format_time,
    parse_time,
    read_document,
    with_state,
)

if TYPE_CHECKING:
    from pathlib import Path


LEAST: dict[str, Any] = {"slug": "a", "paths": ["a.md"]}


def parse(document: object) -> Job:
    return Job.from_document(document, name="file.json", modified=7.0)


def test_what_a_job_does_not_say_has_its_default() -> None:
    job = parse(LEAST)
    assert (job.id, job.type, job.created_at, job.status, job.attempts) == (
        "file", "git-sync", 7.0, Status.PENDING, 0,
    )  # fmt: skip
    assert job.commit_message == "Publish a"
    assert parse({**LEAST, "message": ""}).commit_message == "Publish a"
    assert parse({**LEAST, "id": None, "scheduledFor": None, "attempts": None}) == job


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


def test_a_byte_order_mark_and_texts_about_json_are_no_offence() -> None:
    value = {"text": "[" * 500, "emoji": "\N{GRINNING FACE}", "escapes": ["\\u0000 \\ud800", "\\\\u0000"]}
    assert read_document(b"\xef\xbb\xbf" + json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"paths": "x"}, 'paths: must be a list of texts, such as ["content/posts/hello.md"]'),
        ({"paths": ["x", 3]}, "paths.1: must be a text"),
        ({"paths": None}, "paths: is missing; it must be a list"),
        ({"slug": ""}, "slug: must be one line of text, and not empty"),
        ({"slug": "a\nb"}, "slug: must be one line of text"),
        ({"slug": 7}, "slug: must be one line of text"),
        ({"id": 7}, "id: must be one line of text"),
        ({"type": ["git-sync"]}, "type: must be one line of text"),
        ({"message": "a\0b"}, "message: must be a text"),
        ({"attempts": 1.5}, "attempts: must be a whole number"),
        ({"attempts": True}, "attempts: must be a whole number"),
        ({"attempts": -1}, "attempts: must be a whole number"),
        ({"status": "done"}, "status: must be 'pending' or 'failed'"),
        ({"status": {}}, "status: must be 'pending' or 'failed'"),
        ({"author": "Ada"}, 'author: needs a name and an e-mail address: {"name": "Ada Author"'),
        ({"author": {"name": "Ada"}}, "author: needs a name and an e-mail address"),
        ({"author": {"name": "<a>", "email": "a@b"}}, "author.name: must be one line of text, without <"),
        ({"coAuthors": [{"name": "A\nSigned-off-by: B", "email": "a@b.c"}]}, "coAuthors.0.name: must be one"),
        ({"coAuthors": [{"name": "A", "email": "a@b.c>\n"}]}, "coAuthors.0.email: must be an address"),
        ({"coAuthors": ["A <a@b.c>"]}, "coAuthors.0: must be a JSON object"),
        ({"lastError": 7}, "lastError: must be a text"),
        ({"fix": []}, "fix: must be a text"),
        ({"createdAt": 7}, "createdAt: expected an ISO-8601 time"),
        ({"scheduledFor": "soon"}, "scheduledFor: 'soon' is no ISO-8601 time"),
    ],
)
def test_a_malformed_job_names_the_key_and_what_is_expected(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(MalformedJobError) as refused:
        parse({**LEAST, "note": 1, **change})
    assert refused.value.reason.startswith(reason)
    assert not re.search("instance|[Ii]nput|[Ff]ield|tuple|valid |String", refused.value.reason)
    assert "note" in refused.value.document
    usable = refused.value.document.keys() - {"paths"}  # which are those that it still names
    assert not change.keys() & usable or None in change.values()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", []),
        ("[1", []),
        ('{"slug": "a", "paths": ["x", "a\\/b", "cut', ["x", "a/b"]),
        ('{"paths": ["x"], "scheduledFor": "2099', ["x"]),
        ('{"paths": ["x"], "paths": ["y"]}', ["x", "y"]),
        ('{"slug": NaN, "paths": ["x", "\\u0000", 7]}', ["x"]),
        ('{"slug": "a", "path": "x", "message": 7}', ["x"]),
    ],
)
def test_what_is_no_job_still_names_its_paths(text: str, named: list[str]) -> None:
    with pytest.raises(UnreadableJobError) as refused:
        Job.from_document(read_document(text.encode()), name="a.json", modified=0.0)
    assert refused.value.document["paths"] == named


@pytest.mark.parametrize("value", ["x" * 60_000, f"https://u:{'x' * 80}@h"], ids=["long", "half a secret"])
def test_of_a_long_bad_value_no_part_of_a_secret_is_shown(value: str) -> None:
    with pytest.raises(MalformedJobError) as refused:
        parse({**LEAST, "createdAt": value})
    assert refused.value.reason.startswith("createdAt: '")
    assert "xxx" not in refused.value.reason


def test_of_two_spellings_the_new_one_counts_and_is_kept() -> None:
    document = {**LEAST, "commitMessage": "old", "message": "new", "attempts": 3, "attempt": 7}
    assert (parse(document).attempts, parse(document).message) == (3, "new")
    written = with_state(document, 0.0, status=Status.PENDING, attempts=2)
    assert (written["message"], written["attempts"]) == ("new", 2)
    assert not {"commitMessage", "attempt"} & written.keys()


# `enqueue`: what a producer in Python may rely on


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"paths": "content/a.md"}, "paths is a list of paths, not 'content/a.md'"),
        ({"paths": b"content/a.md"}, "paths is a list"),
        ({"paths": [5]}, "paths"),
        ({"slug": ""}, "slug: must be one line of text, and not empty"),
        ({"slug": "a\nb"}, "slug: must be one line of text"),
        ({"message": "a\0b"}, "a NUL character"),
        ({"at": "tomorrow"}, "'tomorrow' is no ISO-8601 time"),
        ({"author": "Ada"}, "'Ada' is no author such as"),
        ({"author": "<a@b.c>"}, "no author"),
        ({"author": ("Ada", "")}, "author"),
        ({"attempts": 3, "id": "x"}, "attempts, id: set by the worker or by an argument of its own"),
        ({"status": "failed"}, "status: set by the worker"),
        ({"odd": object()}, "cannot be written as JSON"),
        ({"odd": float("nan")}, "JSON"),
        ({"odd": "x" * (1 << 20)}, "at most"),
        ({"odd": json.loads("[" * 70 + "]" * 70)}, "nested"),
        ({"odd": "\ud800"}, "half of a surrogate pair"),
    ],
)
def test_what_the_worker_would_refuse_is_refused_at_once_and_leaves_nothing(
    tmp_path: Path, keys: dict[str, Any], reason: str
) -> None:
    queue = tmp_path / "queue"
    with pytest.raises(ValueError, match=reason):
        enqueue(**{"slug": "a", "paths": ["content/a.md"], "queue": queue, **keys})
    assert not queue.exists() or not list(queue.iterdir())


def test_no_job_is_written_where_nobody_would_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRITER_APP_ROOT", str(tmp_path))
    monkeypatch.setenv("BRITER_DATABASE_URL", "postgresql://db/briter")
    with pytest.raises(ValueError, match=r"briter_worker\.cluster\.submit"):
        enqueue("a", ["content/a.md"])
    assert list(tmp_path.iterdir()) == []
    assert enqueue("a", ["content/a.md"], queue=tmp_path / "queue").path.exists()
