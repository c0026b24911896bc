"""A reader holds no more than its queue, and whoever guesses waits no longer than is said."""

from __future__ import annotations

import asyncio

from briter_worker.web.live import Hub, Reader
from briter_worker.web.sessions import LASTS, TRIES, WITHIN, Sessions, Tries


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
