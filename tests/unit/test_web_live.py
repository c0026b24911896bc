"""The live stream's readers: batches, pings, slow readers, and the events that a reader missed."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import pytest

from briter_worker.sinks.history import Moment
from briter_worker.web.live import MAX_MISSED, Feed, News
from briter_worker.web.problems import ProblemError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sse_starlette import EventSourceResponse
    from starlette.types import Message


class Past:
    """A history for `Feed`."""

    def __init__(self, number: int = 0) -> None:
        self.moments: list[Moment] = []
        self.happen(number)

    def happen(self, number: int) -> None:
        first = len(self.moments) + 1
        self.moments += [Moment(first + each, 0.0, "published", {}) for each in range(number)]

    def read(self, after: int | None) -> News:
        new = [] if after is None else [each for each in self.moments if each.id > after][:MAX_MISSED]
        return News({"jobs": 1}, len(self.moments), new)

    def feed(self, **options: Any) -> Feed:  # noqa: ANN401 - any option of a Feed
        return Feed(self.read, lambda: {"jobs": 1}, **{"poll": 0.01, **options})


async def chunks(answer: EventSourceResponse) -> AsyncIterator[bytes]:
    async for chunk in answer.body_iterator:
        assert isinstance(chunk, bytes)
        yield chunk


def ids(data: bytes) -> list[int]:
    return [int(number) for number in re.findall(rb"^id: (\d+)$", data, re.MULTILINE)]


def test_readers_get_what_comes_together_in_one_chunk() -> None:
    past = Past()

    async def follow() -> list[bytes]:
        feed = past.feed()
        streams = [chunks(feed.stream()) for _ in range(50)]
        for stream in streams:
            assert b"retry" in await anext(stream)
            assert b"snapshot" in await anext(stream)
        past.happen(6)
        return [await anext(stream) for stream in streams]

    assert [ids(chunk) for chunk in asyncio.run(follow())] == [[1, 2, 3, 4, 5, 6]] * 50


@pytest.mark.parametrize(
    ("last", "expected"),
    [("7", [8, 9, 10]), ("10", []), ("11", [10]), ("x", [10]), (None, [10])],
)
def test_a_reader_gets_the_events_that_it_missed_or_a_snapshot(last: str | None, expected: list[int]) -> None:
    async def connect() -> bytes:
        stream = chunks(Past(10).feed().stream(last))
        await anext(stream)
        return await anext(stream)

    first = asyncio.run(connect())
    assert ids(first) == expected
    assert (b"event: snapshot" in first) == (expected == [10])
    assert (b"event: status" in first) == (expected != [10])


def test_a_reader_that_does_not_read_is_dropped() -> None:
    past = Past()

    async def follow() -> int:
        feed = past.feed(poll=0.0)
        slow = chunks(feed.stream())
        await anext(slow)
        await anext(slow)
        for _ in range(1000):
            if not len(feed):
                return len([chunk async for chunk in slow])
            past.happen(1)
            await asyncio.sleep(0.002)
        raise AssertionError("the reader is still there")

    assert asyncio.run(asyncio.wait_for(follow(), 20)) == 0


def test_a_quiet_stream_is_pinged_and_a_reader_that_leaves_is_forgotten() -> None:
    async def follow() -> bytes:
        feed = Past().feed(ping=0.01)
        sent = b""
        gone = asyncio.Event()

        async def receive() -> Message:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal sent
            sent += message.get("body", b"")
            if sent.count(b"event: ping") == 2:
                gone.set()

        await feed.stream()({"type": "http", "method": "GET"}, receive, send)
        assert len(feed) == 0
        return sent

    sent = asyncio.run(asyncio.wait_for(follow(), 20))
    assert sent.index(b"event: snapshot") < sent.index(b"event: ping\ndata: {}\n\n")


def test_a_full_stream_takes_no_more_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("briter_worker.web.live.MAX_READERS", 0)
    with pytest.raises(ProblemError, match="has 0 readers already"):
        Past().feed().stream()
