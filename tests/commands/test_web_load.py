"""What one sender cannot do to the others: take the dashboard's memory, its threads or its database."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import httpx
import psutil
import psycopg
import pytest
from dashboards import TOKEN, Dashboard, serving, sign_in

from briter_worker.cluster import tokens
from briter_worker.cluster.sites import Site as Registered
from briter_worker.cluster.sites import add
from briter_worker.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sites import Site

    from briter_worker.queues.postgres.database import Database

MIB = 1 << 20
UPLOAD = "/api/sites/blog/jobs"


@pytest.fixture
def dashboard(site: Site, database: Database, database_url: str) -> Iterator[Dashboard]:
    site.env["BRITER_DATABASE_URL"] = database_url
    for name in ("blog", "shop"):
        add(database, Registered(name, "https://example.org/r.git", "main", "local-mdx"), load_settings({}))
    with serving(site) as dashboard:
        yield dashboard


def create_token(database: Database, may: str) -> dict[str, str]:
    token = tokens.create(database, f"{may}-blog", sites_of=["blog"], rights=[may], by="test")
    return {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}


_ASK = """
import http.client, sys, threading, time
slowest, over = 0.0, threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
while not over.is_set():
    began = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=60)
    connection.request("GET", "/healthz")
    assert connection.getresponse().status == 200
    connection.close()
    slowest = max(slowest, time.monotonic() - began)
    over.wait(0.02)
print(slowest)
"""


class Watch:
    """Asks for /healthz, in a process of its own, and looks at the memory, until it is closed."""

    def __init__(self, dashboard: Dashboard) -> None:
        self._process = psutil.Process(dashboard.process.pid)
        self._before = self._process.memory_info().rss
        command = [sys.executable, "-c", _ASK, str(dashboard.port)]
        self._asking = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.slowest = 0.0
        self.grown = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self.slowest = float(self._asking.communicate(timeout=60)[0])

    def _look(self) -> None:
        while not self._is_over.wait(0.01):
            self.grown = max(self.grown, self._process.memory_info().rss - self._before)


def _status(visitor: httpx.Client, path: str) -> int:
    try:
        return visitor.get(path).status_code
    except httpx.TransportError:
        return 0


def together(number: int, ask: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(number) as pool:
        return [each.result() for each in [pool.submit(ask) for _ in range(number)]]


def test_four_bombs_of_48_mib_at_once_take_neither_memory_nor_time(
    dashboard: Dashboard, database: Database
) -> None:
    headers = create_token(database, "enqueue")
    bomb = b'{"slug": "x", "contents": {"content/a.md": ""}, "junk": [' + b"[]," * (16 * MIB - 100) + b"0]}"

    def send() -> int | None:
        try:
            return httpx.post(dashboard.base + UPLOAD, content=bomb, headers=headers, timeout=60).status_code
        except httpx.TransportError:
            return 413  # it was refused, and closed, before all of it was sent

    with Watch(dashboard) as watch:
        assert together(4, send) == [413] * 4
    assert watch.grown < 64 * MIB
    assert watch.slowest < 1, "0.1 s, and 0.2 s on a busy machine"


def test_four_large_uploads_at_once_are_stored_in_bounded_memory(
    dashboard: Dashboard, database: Database
) -> None:
    headers = create_token(database, "enqueue")
    picture = base64.b64encode(os.urandom(30 * MIB)).decode()
    job = {"slug": "x", "scheduledFor": "2099-01-01", "contents": {"content/a.png": picture}}
    body = json.dumps(job).encode()

    def send() -> int:
        return httpx.post(dashboard.base + UPLOAD, content=body, headers=headers, timeout=60).status_code

    with Watch(dashboard) as watch:
        assert together(4, send) == [201] * 4
    assert watch.grown < 700 * MIB
    assert watch.slowest < 1, "0.1 s, and 0.2 s on a busy machine"


def test_searches_of_one_token_keep_nobody_else_waiting(dashboard: Dashboard, database: Database) -> None:
    headers = create_token(database, "read")
    search = dashboard.base + "/api/sites/blog/history?search=needle"
    with psycopg.connect(database.conninfo) as slow, ThreadPoolExecutor(24) as pool:
        slow.execute("LOCK TABLE briter.attempts")  # as if each search took so long
        asked = [pool.submit(httpx.get, search, headers=headers, timeout=60) for _ in range(24)]
        time.sleep(0.5)
        with Watch(dashboard) as watch:
            began = time.monotonic()
            assert dashboard.json("/api/sites")["total"] == 2
            assert dashboard.page.get("/").status_code == 200
            assert dashboard.json("/readyz") == {"status": "ok"}
            assert time.monotonic() - began < 3
        assert watch.slowest < 2, "0.1 s where nothing else runs"
        slow.rollback()
        assert {each.result().status_code for each in asked} == {200}


def test_remotes_that_do_not_answer_leave_threads_for_everybody_else(
    dashboard: Dashboard, database: Database
) -> None:
    commit, changes = "a" * 40, '[["content/a.png", 1, 1, false]]'
    with socket.create_server(("127.0.0.1", 0), backlog=50) as silent, database.connection() as connection:
        remote = f"http://127.0.0.1:{silent.getsockname()[1]}/r.git"
        connection.execute("UPDATE sites SET remote = %s WHERE name = 'blog'", (remote,))
        connection.execute(
            "INSERT INTO attempts (site, job_id, slug, outcome, commit, changes)"
            " VALUES ('blog', 'j', 's', 'published', %s, %s)",
            (commit, changes),
        )
        visitors = [dashboard.visitor() for _ in range(3)]
        for each in visitors:
            sign_in(each, TOKEN)
        picture = f"/sites/blog/picture?commit={commit}&file=content/a.png"
        with ThreadPoolExecutor(9) as pool:
            asked = [pool.submit(_status, visitor, picture) for visitor in visitors for _ in range(3)]
            time.sleep(1)
            began = time.monotonic()
            assert dashboard.json("/api/sites")["total"] == 2
            assert dashboard.page.get("/").status_code == 200
            assert time.monotonic() - began < 3
            assert not all(each.done() for each in asked)
            dashboard.process.kill()


def test_a_stranger_who_sends_a_body_byte_by_byte_stops_nobody(dashboard: Dashboard) -> None:
    head = b"POST /sign-in HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"

    def send() -> bytes:
        with socket.create_connection(("127.0.0.1", dashboard.port), timeout=30) as client:
            with suppress(OSError):  # it was refused, and closed, before all of it was sent
                client.sendall(head + b"1\r\na\r\n" * 200_000)
            with suppress(OSError):
                return client.recv(12)
        return b""

    with Watch(dashboard) as watch:
        answers = together(4, send)
    assert set(answers) <= {b"HTTP/1.1 400", b""}
    assert watch.slowest < 1.5, "0.2 s where nothing else runs"
