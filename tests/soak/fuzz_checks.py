"""The promises about random bytes: each check takes some, and raises when a promise does not hold."""

from __future__ import annotations

import json
import math
from typing import Any

from briter_worker.allowlist import Allowlist, PathRefusedError
from briter_worker.errors import MAX_TEXT, Failure, FailureCode, one_line
from briter_worker.job import (
    WORKERS_KEYS,
    Job,
    MalformedJobError,
    State,
    Status,
    UnreadableJobError,
    encode_document,
    read_document,
    with_state,
)

dice_of: Any = None
"""Atheris' way to make choices of bytes; set where it is fuzzed."""
NOW = 1_800_000_000.0
LONGEST = 1800.0
_FOLDERS = ("content", "public/uploads")
_PRODUCERS = {
    "id",
    "slug",
    "paths",
    "message",
    "commitMessage",
    "scheduledFor",
    "createdAt",
    "author",
    "type",
}


def job(data: bytes) -> None:
    """Bytes → job → plan: accepted or refused, and nothing of the producer's is lost."""
    if data[:1] >= b"\x80":
        data = _composed(data[1:])
    try:
        document = read_document(data)
        found = Job.from_document(document, name="the-file.json", modified=NOW)
    except (UnreadableJobError, MalformedJobError) as refusal:
        _check_line(one_line(str(refusal)))
        return
    _plan(found)
    failure = Failure(FailureCode.NETWORK, one_line(found.last_error or found.slug), "wait")
    attempts = min(found.attempts + 1, 2**53 - 1)
    again = with_state(
        document, NOW, status=Status.FAILED, attempts=attempts, failure=failure, next_attempt_at=NOW + LONGEST
    )
    written = encode_document(again)
    read = read_document(written)
    assert encode_document(read) == written, "rewriting what the worker wrote changes it"
    for key, value in document.items():
        if key not in _PRODUCERS | WORKERS_KEYS:
            assert _same(read[key], value), f"the unknown key {key!r} was {value!r} and is {read[key]!r}"
    after = Job.from_document(read, name="the-file.json", modified=NOW)
    assert _producers_part(after) == _producers_part(found)
    assert (after.status, after.attempts, after.last_error) == (
        Status.FAILED,
        attempts,
        failure.message or "",
    )
    assert after.next_attempt_at == NOW + LONGEST


def _plan(found: Job) -> None:
    due = found.due_at(NOW, LONGEST)
    assert math.isfinite(found.created_at)
    assert math.isfinite(due)
    assert found.slug
    assert found.id
    state = found.state(NOW)
    if due > NOW and found.status is Status.PENDING:
        assert state in {State.SCHEDULED, State.RETRYING, State.PENDING, State.TRIED}
    found.commit_message.encode()
    for declared in found.paths:
        _resolve(declared)


def _producers_part(found: Job) -> tuple[object, ...]:
    return (
        *(found.id, found.type, found.slug, found.paths, found.message, found.author),
        *(found.created_at, found.scheduled_for),
    )


def _same(one: object, other: object) -> bool:
    """Return True if both are the same JSON: a truth value is no number."""
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and one == other


def _composed(data: bytes) -> bytes:
    """A document that looks like a job more often than bytes do."""
    dice = dice_of(data)
    document: dict[str, Any] = {"slug": "a", "paths": ["content/a.md"]}
    for _ in range(dice.ConsumeIntInRange(0, 8)):
        known = dice.ConsumeBool()
        key = dice.PickValueInList(sorted(_PRODUCERS | WORKERS_KEYS)) if known else _text(dice)
        document[key] = _value(dice, 3)
    indent = dice.PickValueInList([None, 1, 4])
    made = json.dumps(document, ensure_ascii=dice.ConsumeBool(), indent=indent)
    return made.encode("utf-8", "surrogatepass" if dice.ConsumeBool() else "replace")


_TEXTS = ["2026-01-31T09:00:00Z", "2026-01-31", "pending", "failed", "git-sync", "content/a.md", ""]


def _text(dice: Any) -> str:  # noqa: ANN401 - atheris has no types
    return str(dice.ConsumeUnicode(dice.ConsumeIntInRange(0, 24)))


def _value(dice: Any, depth: int) -> Any:  # noqa: ANN401, PLR0911 - one for each kind of value
    match dice.ConsumeIntInRange(0, 8 if depth else 5):
        case 0:
            return dice.PickValueInList(_TEXTS)
        case 1:
            return _text(dice)
        case 2:
            return dice.PickValueInList([None, True, False])
        case 3:
            return dice.ConsumeInt(9)
        case 4:
            return dice.ConsumeFloat()
        case 5:
            return 10 ** dice.ConsumeIntInRange(0, 400)
        case 6:
            return {"name": _value(dice, 0), "email": _value(dice, 0)}
        case 7:
            return [_value(dice, depth - 1) for _ in range(dice.ConsumeIntInRange(0, 4))]
        case _:
            return {_text(dice): _value(dice, depth - 1) for _ in range(dice.ConsumeIntInRange(0, 4))}


def _check_line(shown: str) -> None:
    assert len(shown) <= MAX_TEXT
    assert shown.isprintable(), f"shown: {shown!r}"
    assert shown == " ".join(shown.split(" ")).strip(" ")


_ALLOWED = Allowlist(_FOLDERS)


def _resolve(declared: str) -> None:
    try:
        resolved = _ALLOWED.resolve(declared)
    except PathRefusedError as refusal:
        _check_line(refusal.reason)
        return
    assert resolved in {declared, declared.removesuffix("/")}
    assert any(resolved == folder or resolved.startswith(folder + "/") for folder in _FOLDERS)
    assert len(resolved.encode()) <= 4096
    assert resolved.isprintable() or not resolved.isascii()
    assert {".git", "..", ""}.isdisjoint(resolved.lower().split("/"))


_FULL = {
    "id": "1",
    "type": "git-sync",
    "slug": "hello",
    "paths": ["content/hello.md", "content/b/"],
    "message": "Say hello\n\nÜ",
    "scheduledFor": "2026-01-31",
    "createdAt": "2026-01-31T09:00:00.123Z",
    "author": {"name": "Ada", "email": "ada@example.org"},
    "status": "pending",
    "attempts": 2,
    "nextAttemptAt": "2026-01-31T10:00:00+02:00",
    "lastError": "x",
    "failure": "network",
    "updatedAt": None,
    "other": [1, 1.50, 1e300, {"deep": [True, None]}],
}
_JSON = json.dumps(_FULL).encode()
SEEDS = (
    _JSON,
    *(b"{}", b"\xef\xbb\xbf{}", b"[" * 70, b"\x80" * 90, b"", b"{", b"[]", b'{"slug":1}', b'{"slug":NaN}'),
    *(b'{"slug":"a","paths":["content/a"]}', b'{"slug":"\\ud800","paths":[]}', b'{"slug":"a","slug":"b"}'),
    *(b'{"slug":1e400}', b'{"slug":"a\\u0000","paths":[]}', b'{"slug":"a","commitMessage":"x","attempt":1}'),
)
WORDS = [*sorted(_PRODUCERS | WORKERS_KEYS), "pending", "failed", "name", "email", "null", "true", "1e999"]
WORDS += ["\\\\u0000", "\\\\ud83d", "content/", ".git", "git~1", ".."]
