"""A reader holds no more than its queue, half a change is none, and who guesses waits a minute at most."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from starlette.responses import Response

from briter_worker.sinks.history.reading import Moment
from briter_worker.web.live import Hub, Reader
from briter_worker.web.security import Door, Guard, address_of
from briter_worker.web.sessions import LASTS, TRIES, WITHIN, Sessions, Tries

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sse_starlette import EventSourceResponse
    from starlette.types import Message, Receive, Scope, Send


def test_a_reader_whose_queue_is_full_is_dropped_and_gets_no_more() -> None:
    async def follow() -> None:
        reader = Reader()
        taken = 0
        while reader.offer(b"x"):
            taken += 1
            assert taken < 1000
        assert reader.dropped
        assert [chunk async for chunk in reader.chunks()] == []

    asyncio.run(follow())


def test_a_hub_that_is_closed_lets_nobody_in() -> None:
    hub = Hub()
    assert not hub.is_full()
    hub.close()
    assert hub.is_full()


async def chunks_of(answer: EventSourceResponse) -> AsyncIterator[bytes]:
    async for chunk in answer.body_iterator:
        assert isinstance(chunk, bytes)
        yield chunk


def test_many_readers_are_told_at_once_of_what_comes_together() -> None:
    moments = [Moment(number, 0.0, "published", {}) for number in range(1, 7)]

    async def missed(_after: int, _number: int) -> tuple[int, int, list[Moment]]:
        return 0, 0, []

    async def follow() -> list[list[bytes]]:
        hub = Hub()
        hub.open(asyncio.get_running_loop(), 0)
        streams = [chunks_of(hub.stream(None, missed, dict, dict)) for _ in range(50)]
        for stream in streams:
            assert b"retry" in await anext(stream)
            assert b"snapshot" in await anext(stream)
        for moment in moments:
            hub.publish([moment], None)
        told = [[await anext(stream)] for stream in streams]
        hub.publish([Moment(7, 0.0, "published", {})], None)
        hub.close()
        hub.publish([Moment(8, 0.0, "published", {})], None)
        return [
            [*first, *[chunk async for chunk in stream]] for first, stream in zip(told, streams, strict=True)
        ]

    for first, *rest in asyncio.run(follow()):
        assert re.findall(rb"^id: (\d+)$", first, re.MULTILINE) == [b"1", b"2", b"3", b"4", b"5", b"6"]
        assert rest == []


def test_a_reader_of_a_quiet_site_is_pinged_so_that_no_proxy_hangs_up() -> None:
    async def missed(_after: int, _number: int) -> tuple[int, int, list[Moment]]:
        return 0, 0, []

    async def follow() -> bytes:
        hub = Hub(ping=0.01)
        hub.open(asyncio.get_running_loop(), 0)
        told = b""
        gone = asyncio.Event()

        async def receive() -> Message:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal told
            told += message.get("body", b"")
            if told.count(b"event: ping") == 2:
                gone.set()

        await hub.stream(None, missed, dict, dict)({"type": "http", "method": "GET"}, receive, send)
        assert len(hub) == 0
        return told

    told = asyncio.run(asyncio.wait_for(follow(), 20))
    assert told.index(b"event: snapshot") < told.index(b"event: ping\ndata: {}\n\n")


def test_who_was_away_long_gets_what_it_missed_in_portions() -> None:
    past = [Moment(number, 0.0, "published", {"slug": "x" * 100}) for number in range(1, 5001)]

    async def missed(after: int, number: int) -> tuple[int, int, list[Moment]]:
        return 5000, 1, past[after : after + number]

    async def catch_up() -> list[bytes]:
        hub = Hub()
        hub.open(asyncio.get_running_loop(), 5000)
        chunks = []
        async for chunk in hub.stream(0, missed, dict, dict).body_iterator:
            assert isinstance(chunk, bytes)
            chunks.append(chunk)
            if b"event: status" in chunk:
                break
        return chunks

    chunks = asyncio.run(catch_up())
    numbers = [int(number) for number in re.findall(rb"^id: (\d+)$", b"".join(chunks), re.MULTILINE)]
    assert numbers == list(range(1, 5001))
    assert max(map(len, chunks)) < sum(map(len, chunks)) / 5


def test_a_change_whose_sender_left_in_the_middle_is_none() -> None:
    passed, sent = [], []

    async def app(scope: Scope, _receive: Receive, send: Send) -> None:
        passed.append(scope["path"])
        await Response()(scope, _receive, send)

    async def send(message: Message) -> None:
        sent.append(message["type"])

    guard = Guard(app, Door("", "127.0.0.1"), sent.append, lambda status, text: Response(text, status))
    form = f"csrf={guard.sessions.csrf(None)}&id=hello".encode()  # the rest was to be: -world
    headers = [(b"host", b"localhost"), (b"content-type", b"application/x-www-form-urlencoded")]

    def ask(*messages: Message) -> None:
        left = list(messages)

        async def receive() -> Message:
            return left.pop(0)

        scope = {"type": "http", "method": "POST", "path": "/actions/cancel", "headers": headers}
        asyncio.run(guard(scope, receive, send))

    ask({"type": "http.request", "body": form, "more_body": True}, {"type": "http.disconnect"})
    assert (passed, sent) == ([], [])
    ask({"type": "http.request", "body": form, "more_body": False})
    assert passed == ["/actions/cancel"]


def test_a_session_ends_by_itself() -> None:
    now = [0.0]
    sessions = Sessions(clock=lambda: now[0])
    cookie = sessions.open()
    assert sessions.knows(cookie)
    assert not sessions.knows(cookie + "x")
    assert not sessions.knows(None)
    now[0] = LASTS
    assert not sessions.knows(cookie)


def test_each_session_has_a_csrf_token_of_its_own() -> None:
    sessions = Sessions()
    one, two = sessions.open(), sessions.open()
    assert len({sessions.csrf(one), sessions.csrf(two), sessions.csrf(None)}) == 3
    assert sessions.csrf(one) == sessions.csrf(one)
    assert Sessions().csrf(None) != sessions.csrf(None)


def test_who_guessed_too_often_may_try_again_after_a_minute() -> None:
    now = [0.0]
    tries = Tries(clock=lambda: now[0])
    for _ in range(TRIES):
        assert tries.wait("192.0.2.1") == 0
        tries.failed("192.0.2.1")
    assert 0 < tries.wait("192.0.2.1") <= WITHIN + 1
    assert tries.wait("192.0.2.2") == 0
    now[0] = WITHIN
    assert tries.wait("192.0.2.1") == 0


def test_guesses_are_counted_by_what_one_visitor_has_of_addresses() -> None:
    def counted(number: str) -> str:
        return address_of({"client": (number, 4711)})

    assert counted("2001:db8:1:2::3") == counted("2001:db8:1:2:ffff::4") != counted("2001:db8:1:3::3")
    assert counted("192.0.2.1") != counted("192.0.2.2")
    assert counted("::ffff:192.0.2.1") != counted("::ffff:192.0.2.2")
