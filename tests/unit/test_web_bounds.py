"""The bounds of a request: its JSON while it arrives, and the requests of one sender at once."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from briter_worker.web.bounds import (
    MAX_DEPTH,
    MAX_STRUCTURE_BYTES,
    MAX_VALUES,
    MAX_WAITING,
    JsonBounds,
    Turns,
    decode_base64,
)
from briter_worker.web.responses import ProblemError
from briter_worker.web.site import _digest, _request_digest

_JSON = st.recursive(
    st.none() | st.floats(allow_nan=False) | st.text(),
    lambda more: st.lists(more) | st.dictionaries(st.text(), more),
)


def fed(data: bytes, size: int) -> JsonBounds:
    """Return the bounds after the data came in parts of this size."""
    bounds = JsonBounds()
    for start in range(0, len(data), size):
        bounds.feed(data[start : start + size])
    return bounds


@given(_JSON, st.integers(1, 9))
def test_a_document_is_counted_alike_however_it_is_split(value: Any, size: int) -> None:  # noqa: ANN401
    data = json.dumps(value).encode()
    counted = vars(fed(data, size))
    assert counted == vars(fed(data, len(data)))
    assert (counted["_is_in_text"], counted["_depth"]) == (False, 0)


@pytest.mark.parametrize(
    ("piece", "status"),
    [
        (b"[],", 413),
        (b"{},", 413),
        (b'"",', 413),
        (b"1,", 413),
        (b"         ", 413),
        (b"[", 422),
        (b'{"a":', 422),
        (b'[{"a":', 422),
    ],
)
def test_a_bomb_is_refused_before_much_of_it_has_arrived(piece: bytes, status: int) -> None:
    begun = b'{"junk": [' + piece * (2 * MAX_STRUCTURE_BYTES // len(piece))
    with pytest.raises(ProblemError) as refused:
        fed(begun, 65_536)
    assert refused.value.status_code == status


def test_texts_cost_only_their_length_whatever_is_in_them() -> None:
    for text in ('[{",' * 10**6, "\\" * 10**6, '"' * 10**6, "\\u0000" * 10**5):
        fed(json.dumps({"contents": {"a": text}}).encode(), 65_536)
    paths = {f"content/{number}.md": "YQ==" for number in range(10_000)}
    fed(json.dumps({"contents": paths, "paths": [*paths]}, indent=8).encode(), 65_536)
    fed(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH, 7)
    fed(json.dumps([0] * (MAX_VALUES - 1)).encode(), 999)


def test_one_sender_waits_for_its_turn_and_another_does_not() -> None:
    async def ask() -> list[int]:
        turns, running, most, released = Turns(), 0, 0, asyncio.Event()

        async def one(sender: str) -> None:
            nonlocal running, most
            async with turns.of(sender, 3):
                running += sender == "greedy"
                most = max(most, running)
                if sender == "greedy":
                    await released.wait()
                running -= sender == "greedy"

        greedy = [asyncio.create_task(one("greedy")) for _ in range(3 + MAX_WAITING)]
        await asyncio.sleep(0)
        await asyncio.wait_for(one("other"), 5)
        with pytest.raises(ProblemError) as refused:
            await one("greedy")
        assert refused.value.headers == {"Retry-After": "1"}
        greedy[-1].cancel()
        released.set()
        for task in greedy:
            with suppress(asyncio.CancelledError):
                await task
        await asyncio.wait_for(one("greedy"), 5)
        return [most, refused.value.status_code, len(vars(turns)["_lines"])]

    assert asyncio.run(ask()) == [3, 429, 0]


def test_a_request_that_is_sent_again_after_an_upgrade_is_known() -> None:
    """The digest is that of one JSON text, as it was when that was made in one piece."""
    contents = {"b": random.Random(5).randbytes(200_000), "a/é": None, "c": b""}
    body = {"slug": "x", "paths": ["b"], "extra": [1, None]}
    files = [[path, None if data is None else data.hex()] for path, data in contents.items()]
    assert _request_digest(body, contents) == _digest(json.dumps([body, files], sort_keys=True).encode())
    assert _request_digest(body, {}) == _digest(json.dumps([body, []], sort_keys=True).encode())


@pytest.mark.parametrize(
    "size", [0, 1, 2, 3, 1000, (3 << 18) - 1, 3 << 18, (3 << 18) + 1, (3 << 18) + 2, 1 << 20]
)
def test_a_content_is_decoded_in_pieces_as_in_one(size: int) -> None:
    content = random.Random(size).randbytes(size)
    assert decode_base64(base64.b64encode(content).decode()) == content


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "abc",
        "YQ=",
        "YQ==YQ==",
        "=",
        "====",
        "YQ= =",
        " YQ==",
        "YQ==\n",
        "é",
        "a-_b",
        "YQ==" + "A" * (1 << 20),
        "A" * ((1 << 20) - 4) + "YQ==YQ==",
        "A" * (1 << 20) + "=",
    ],
)
def test_what_is_no_base64_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_base64(text)


def test_a_large_document_is_counted_in_no_time() -> None:
    """The event loop counts: 48 MiB took 0.2 s, in which nobody else was answered."""
    parts = [b'{"contents": {"a": "', *[b"QUFB" * 16384] * 768, b'"}}']
    bounds, began = JsonBounds(), time.thread_time()
    for part in parts:
        bounds.feed(part)
    assert time.thread_time() - began < 0.05
