"""The live stream's readers: batches, pings, slow readers, and the events that a reader missed."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import pytest

from briter_worker.sinks.history import Moment
from briter_worker.web.live import (
    MAX_KEPT,
    MAX_READERS_PER_ADDRESS,
    MAX_READERS_PER_SESSION,
    Feed,
    News,
)
from briter_worker.web.responses import ProblemError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sse_starlette import EventSourceResponse


class Past:
    """A history for `Feed`."""

    def __init__(self, number: int = 0) -> None:
        self.moments: list[Moment] = []
        self.happen(number)

    def happen(self, number: int) -> None:
        first = len(self.moments) + 1
        self.moments += [Moment(first + each, 0.0, "published", {}) for each in range(number)]

    def read(self, after: int) -> News:
        since = max(after, len(self.moments) - MAX_KEPT)
        return News({"jobs": 1}, len(self.moments), since, self.moments[since:])

    def feed(self, **options: Any) -> Feed:  # noqa: ANN401 - any option of a Feed
        return Feed(self.read, **{"poll": 0.01, **options})


async def chunks(answer: EventSourceResponse) -> AsyncIterator[bytes]:
    async for chunk in answer.body_iterator:
        assert isinstance(chunk, bytes)
        yield chunk


def ids(data: bytes) -> list[int]:
    return [int(number) for number in re.findall(rb"^id: (\d+)$", data, re.MULTILINE)]


def test_a_late_reader_gets_what_is_kept_or_a_snapshot() -> None:
    past = Past()

    async def follow(number: int) -> bytes:
        feed = past.feed()
        quick, slow = chunks(feed.stream()), chunks(feed.stream())
        for stream in (quick, slow):
            await anext(stream)
            await anext(stream)
        for _ in range(2):
            past.happen(number)
            await anext(quick)
        return await anext(slow)

    late = asyncio.run(follow(2))
    assert ids(late) == [1, 2, 3, 4]
    assert b"event: snapshot" in asyncio.run(follow(MAX_KEPT))


def test_a_stream_ends_with_its_session_and_a_session_has_few_streams() -> None:
    now_open = [True]

    async def is_open() -> bool:
        return now_open[0]

    async def follow() -> list[bytes]:
        feed = Past().feed()
        streams = [
            chunks(feed.stream(session="one", is_open=is_open)) for _ in range(MAX_READERS_PER_SESSION)
        ]
        for stream in streams:
            await anext(stream)
        with pytest.raises(ProblemError, match="has 20 readers already"):
            feed.stream(session="one")
        feed.stream(session="another")
        await anext(streams[0])
        now_open[0] = False
        return [chunk async for chunk in streams[0]]

    assert asyncio.run(asyncio.wait_for(follow(), 20)) == []


def test_one_client_does_not_hold_every_stream() -> None:
    async def follow() -> None:
        feed = Past().feed()
        readers = [feed.stream(address="192.0.2.1").body_iterator for _ in range(MAX_READERS_PER_ADDRESS)]
        for reader in readers:
            await anext(aiter(reader))
        with pytest.raises(ProblemError, match="has 100 readers already"):
            feed.stream(address="192.0.2.1", session="new")
        feed.stream(address="192.0.2.2")
        await readers[0].aclose()  # type: ignore[attr-defined]
        feed.stream(address="192.0.2.1")

    asyncio.run(asyncio.wait_for(follow(), 20))
