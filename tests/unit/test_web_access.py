"""Sessions, one-time links, failed attempts, half of a form, and the cache behind the pages."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import pytest
import uvicorn
from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from uvicorn.server import ServerState

from briter_worker.cluster.tokens import ApiToken
from briter_worker.web import api, cluster, labels, pages, security, server
from briter_worker.web.live import MAX_READERS_PER_ADDRESS, MAX_READERS_PER_SESSION, Feed, News
from briter_worker.web.responses import ProblemError
from briter_worker.web.security import COOKIE, LINK_S, SESSION_S, Access, Guard, client_address, read_form

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sse_starlette import EventSourceResponse
    from starlette.types import Message, Receive, Scope, Send


def test_a_session_ends_by_itself() -> None:
    now = [0.0]
    access = Access("token", clock=lambda: now[0])
    cookie = access.open_session()
    assert access.has_session(cookie)
    assert not access.has_session(cookie + "x")
    assert not access.has_session(None)
    now[0] = SESSION_S
    assert not access.has_session(cookie)


def test_a_link_is_valid_once_and_for_a_quarter_of_an_hour() -> None:
    now = [0.0]
    access = Access("token", clock=lambda: now[0])
    first, second = access.create_link_key(), access.create_link_key()
    assert not access.use_link_key("")
    assert access.use_link_key(first)
    assert not access.use_link_key(first)
    now[0] = LINK_S
    assert not access.use_link_key(second)


def test_failures_are_counted_by_ipv4_address_and_by_ipv6_network() -> None:
    def counted(number: str) -> str:
        return client_address({"client": (number, 4711)})

    assert counted("2001:db8:1:2::3") == counted("2001:db8:1:2:ffff::4") != counted("2001:db8:1:3::3")
    assert counted("192.0.2.1") != counted("192.0.2.2")
    assert counted("::ffff:192.0.2.1") != counted("::ffff:192.0.2.2")


def send_form(*messages: Message) -> tuple[list[str], int]:
    """Send a form through the guard; return which reached the application, and the status of the answer."""
    access = Access("token")
    cookie = access.open_session()
    form = f"csrf={access.csrf_token(cookie)}&id=hello".encode()  # the rest was to be: -world
    headers = {"content-type": "application/x-www-form-urlencoded", "cookie": f"{COOKIE}={cookie}"}
    passed: list[str] = []
    sent: list[Message] = []
    app, left = FastAPI(), [{"type": "http.request", "body": form, "more_body": bool(messages)}, *messages]

    @app.post("/actions/{action}")
    def act(action: str, form: Annotated[dict[str, str], Depends(read_form)]) -> None:
        passed.append(f"{action} {form['id']}")

    async def receive() -> Message:
        await asyncio.sleep(0)
        return left.pop(0) if len(left) > 1 else left[0]

    async def send(message: Message) -> None:
        sent.append(message)

    def refuse(_request: Request, error: Exception) -> Response:
        assert isinstance(error, ProblemError)
        return error.response()

    app.add_exception_handler(ProblemError, refuse)
    app.add_exception_handler(ClientDisconnect, lambda *_: Response(status_code=400))
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/actions/cancel",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    asyncio.run(asyncio.wait_for(Guard(app, access, refuse)(scope, receive, send), 20))
    return passed, sent[0]["status"]


def test_a_visitor_that_does_not_read_the_answer_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "READ_S", 0.1)

    async def answer(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(64 << 20)})

    async def visit() -> None:
        gone = asyncio.Event()

        class Watched(server.Protocol):
            def connection_lost(self, exc: Exception | None) -> None:
                super().connection_lost(exc)
                gone.set()

        config = uvicorn.Config(answer, lifespan="off", log_config=None)
        config.load()
        state = ServerState()
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(lambda: Watched(config, state, {}), "127.0.0.1", 0)
        _, visitor = await asyncio.open_connection(*listener.sockets[0].getsockname(), limit=1)
        visitor.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.wait_for(gone.wait(), 20)
        visitor.close()
        listener.close()

    asyncio.run(visit())


def test_a_form_whose_end_did_not_arrive_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert send_form() == (["cancel hello"], 200)
    assert send_form({"type": "http.disconnect"}) == ([], 400)
    monkeypatch.setattr(security, "BODY_S", 0.01)
    assert send_form({"type": "http.request", "body": b"", "more_body": True}) == ([], 408)


def test_every_change_outside_the_api_is_a_form_that_is_checked() -> None:
    routers = (pages.router, pages.sign_in_router, server.router, api.live_router, cluster.router)
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    changes = [route for route in routes if (route.methods or set()) - {"GET", "HEAD"}]
    assert {route.path for route in changes} == {"/actions/{action}", "/sign-in", "/sign-out"}
    for route in changes:
        assert read_form in [each.call for each in route.dependant.dependencies], route.path


def test_the_uploads_of_one_token_wait_for_their_turn() -> None:
    passed: list[str] = []
    others_wait = asyncio.Event()

    async def app(scope: Scope, _receive: Receive, _send: Send) -> None:
        passed.append(scope["state"]["visit"].token.name)
        if len(passed) == security.MAX_UPLOADS + 1:
            others_wait.set()
        await asyncio.Event().wait()

    async def unused(*_: object) -> Any:  # noqa: ANN401 - never called
        raise AssertionError

    async def upload_all() -> None:
        access = Access("token")
        access.find_api_token = lambda name: ApiToken(name, ("blog",), ("enqueue",), 0.0, "")
        guard = Guard(app, access, lambda _, refused: refused.response())
        tasks = []
        for token in ("a", "b", *("a" for _ in range(4))):
            headers = [(b"authorization", f"Bearer {token}".encode())]
            scope = {"type": "http", "method": "POST", "path": "/api/sites/blog/jobs", "headers": headers}
            tasks.append(asyncio.create_task(guard(scope, unused, unused)))
        await others_wait.wait()
        await asyncio.wait(tasks, timeout=0.2)
        assert (passed.count("a"), passed.count("b")) == (security.MAX_UPLOADS, 1)
        for task in tasks:
            task.cancel()

    asyncio.run(asyncio.wait_for(upload_all(), 20))


# The words and times of the pages


@pytest.mark.parametrize("commit", [None, "", "x", "abc", "a" * 40 + "/../..", "<script>", "A" * 40])
def test_only_a_commit_becomes_a_link(commit: str | None) -> None:
    assert labels.commit_href("https://example.org/{commit}", commit) is None
    assert labels.commit_href("https://example.org/{commit}", "a" * 40) == f"https://example.org/{'a' * 40}"
    assert labels.commit_href("", "a" * 40) is None


def test_a_time_on_the_other_side_of_a_change_of_the_clocks_names_its_zone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    winter, july = (
        datetime.fromisoformat(f"{day}T09:00:00+00:00").timestamp() for day in ("2026-11-19", "2027-07-01")
    )
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    shown = labels.clock(july), *(labels.moment(at, now) for at, now in ((winter, winter), (july, winter)))
    monkeypatch.undo()
    time.tzset()
    assert shown == ("11:00 CEST", "10:00", "1 Jul 2027, 11:00 CEST")


# The live stream's readers


def quiet_feed() -> Feed:
    return Feed(lambda _after: News({"jobs": 1}), poll=0.01)


async def chunks(answer: EventSourceResponse) -> AsyncIterator[bytes]:
    async for chunk in answer.body_iterator:
        assert isinstance(chunk, bytes)
        yield chunk


def test_a_stream_ends_with_its_session_and_a_session_has_few_streams() -> None:
    now_open = [True]

    async def is_open() -> bool:
        return now_open[0]

    async def follow() -> list[bytes]:
        feed = quiet_feed()
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
        feed = quiet_feed()
        readers = [feed.stream(address="192.0.2.1").body_iterator for _ in range(MAX_READERS_PER_ADDRESS)]
        for reader in readers:
            await anext(aiter(reader))
        with pytest.raises(ProblemError, match="has 100 readers already"):
            feed.stream(address="192.0.2.1", session="new")
        feed.stream(address="192.0.2.2")
        await readers[0].aclose()  # type: ignore[attr-defined]
        feed.stream(address="192.0.2.1")

    asyncio.run(asyncio.wait_for(follow(), 20))
