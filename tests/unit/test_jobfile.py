"""A plain job file is read without the model of the contract, and as the model would read it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from briter_worker.contract import JobFile, parse_strictly
from briter_worker.jobfile import parse_job, plain_job
from briter_worker.strictjson import MalformedJobError, Number, read_document

PLAIN: dict[str, Any] = {
    "id": "4f1c9b0e",
    "type": "git-sync",
    "slug": "hello",
    "paths": ["content/posts/hello.md", "content/images/hello/"],
    "message": "Grüße\n\nmore",
    "scheduledFor": "2099-01-31T09:00:00Z",
    "createdAt": "2026-01-30",
    "author": {"name": "Ada Lovelace", "email": "ada@example.org", "web": "https://example.org"},
    "status": "failed",
    "attempts": 3,
    "nextAttemptAt": "2026-01-31T09:00:00.250+02:00",
    "lastError": "no\nsuch remote",
    "failure": "network",
    "updatedAt": "2026-01-31T09:00:00Z",
    "webhook": "https://example.org/hook",
    "priority": {"high": True},
}
KEYS = sorted({*PLAIN, "commitMessage", "attempt", "scheduled_for", "created_at"})
# As `read_document` gives them: no half of a surrogate pair, no NaN.
TEXTS = (
    st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
    | st.sampled_from(
        ["pending", "failed", "PENDING", "2026-01-31", "2026-01-31T09:00Z", "a\nb", "a\x7f", "\0"]
    )
    | st.sampled_from(["Ada", "<a>", "a@b.c", "a b", " ", "\u2028", "\u0085"])
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.sampled_from([2**53 - 1, 2**53, 10**30, Number("1.0"), Number("9" * 400)])
    | TEXTS
)
AUTHORS = st.fixed_dictionaries({"name": SCALARS, "email": SCALARS}, optional={"web": SCALARS})
VALUES = st.recursive(
    SCALARS | AUTHORS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=2)
)
CHANGES = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4)


def outcome(read: Any, document: object) -> object:  # noqa: ANN401 - either of the two readers
    try:
        return read(document, name="the-file.json", modified=7.0)
    except MalformedJobError as error:
        return error.reason


@settings(max_examples=500, deadline=None)
@given(changes=CHANGES, left_out=st.sets(st.sampled_from(KEYS)))
@example(changes={}, left_out=set())
@example(changes={"slug": ""}, left_out=set())
@example(changes={"createdAt": ""}, left_out=set())
@example(changes={"status": []}, left_out=set())
@example(changes={"attempts": True}, left_out=set())
def test_what_is_read_at_once_is_what_the_model_reads(changes: dict[str, Any], left_out: set[str]) -> None:
    document = {key: value for key, value in {**PLAIN, **changes}.items() if key not in left_out}
    at_once = plain_job(document, name="the-file.json", modified=7.0)
    by_the_model = outcome(parse_strictly, document)
    if at_once is not None:
        assert at_once == by_the_model
    assert outcome(parse_job, document) == by_the_model


@pytest.mark.parametrize("value", [None, [], "x", 1, math.pi, True])
def test_what_is_no_object_is_for_the_model_to_refuse(value: object) -> None:
    assert plain_job(value, name="f.json", modified=0) is None
    assert outcome(parse_job, value) == outcome(parse_strictly, value)


def test_a_plain_job_is_read_at_once_whatever_its_writer_leaves_out() -> None:
    assert {field.alias or name for name, field in JobFile.model_fields.items()} <= set(PLAIN)
    for left_out in set(PLAIN) - {"slug", "paths"}:
        document = {key: value for key, value in PLAIN.items() if key != left_out}
        assert plain_job(document, name="f.json", modified=0) is not None, left_out
        assert plain_job({**PLAIN, left_out: None}, name="f.json", modified=0) is not None, left_out
    assert plain_job(read_document(b'{"slug":"a","paths":["a.md"]}'), name="f.json", modified=0) is not None


def test_a_message_with_nothing_in_it_that_git_cannot_keep() -> None:
    with pytest.raises(MalformedJobError, match="message"):
        parse_job({"slug": "s", "paths": [], "message": "a\0b"}, name="x.json", modified=0.0)
