"""A Postgres that falls silent: whoever waits for it stops waiting, says so, and comes back with it."""

from __future__ import annotations

import signal
import socket
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from dashboards import serving
from frozen import FreezingProxy, freezing
from sites import Site, eventually

from briter_worker.cluster.sites import Site as Registered
from briter_worker.cluster.sites import add
from briter_worker.queues.postgres.database import Database, DatabaseError
from briter_worker.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster_farm import Farm
    from postgres import Server

HASTY = {"PYTHONPATH": str(Path(__file__).parents[1] / "hasty")}
"""The surroundings of a process that waits for Postgres for a second or two, where others wait for ten."""


@pytest.fixture
def network(database_url: str, postgres_server: Server) -> Iterator[tuple[FreezingProxy, str]]:
    with freezing(database_url, postgres_server.port) as found:
        yield found


@pytest.mark.parametrize("kind", ["statement", "transaction", "pipeline", "beside"])
def test_no_statement_waits_for_ever(network: tuple[FreezingProxy, str], kind: str) -> None:
    proxy, url = network
    with closing(Database(url, connections=2, patience=1.0, answer_within=0.3)) as database:
        uses = {
            "statement": database.connection,
            "transaction": database.transaction,
            "pipeline": lambda: database.transaction(is_pipelined=True),
            "beside": database.connected,
        }
        database.read_clock()
        began = time.monotonic()

        def ask() -> None:
            with uses[kind]() as connection:
                proxy.freeze()
                connection.execute("SELECT 1").fetchone()

        with pytest.raises(DatabaseError, match="silent") as failed:
            ask()
        assert failed.value.fix
        assert time.monotonic() - began < 5
        proxy.thaw()
        assert database.read_clock() > 0, "the next call connects again"


def test_a_statement_that_takes_long_and_an_answer_that_flows_are_not_silence(database_url: str) -> None:
    with closing(Database(database_url, answer_within=1.0)) as database, database.connection() as connection:
        connection.execute("SET statement_timeout = 0")
        connection.execute("SELECT pg_sleep(1.5)")
        (text,) = connection.execute("SELECT repeat('x', 30000000)").fetchone() or ("",)
        assert len(text) == 30_000_000


def test_whoever_waits_is_released_when_the_process_is_told_to_end(
    network: tuple[FreezingProxy, str],
) -> None:
    proxy, url = network
    failures: list[str] = []
    with closing(Database(url)) as database:
        database.read_clock()
        proxy.freeze()

        def ask() -> None:
            try:
                database.read_clock()
            except DatabaseError as error:
                failures.append(error.message)

        waiting = threading.Thread(target=ask)
        waiting.start()
        time.sleep(0.2)
        database.abort()
        waiting.join(5)
        assert len(failures) == 1


def test_a_dashboard_reports_a_silent_database_and_recovers(
    site: Site, database: Database, network: tuple[FreezingProxy, str]
) -> None:
    proxy, site.env["BRITER_DATABASE_URL"] = network
    add(database, Registered("blog", "https://example.org/r.git", "main", "local-mdx"), load_settings({}))
    with serving(site, **HASTY) as dashboard:
        assert dashboard.json("/api/sites")["total"] == 1
        proxy.freeze()
        assert dashboard.json("/healthz") == {"status": "ok"}
        assert dashboard.api.get("/readyz").status_code == 503
        proxy.thaw()
        eventually(lambda: dashboard.api.get("/readyz").status_code == 200, within=20)
        proxy.freeze()
        dashboard.page.close()
        dashboard.api.close()
        for path in "abc":
            _ask_anything(dashboard.port, path)
        began = time.monotonic()
        dashboard.process.send_signal(signal.SIGTERM)
        assert dashboard.process.wait(30) == 0
        assert time.monotonic() - began < 6


def _ask_anything(port: int, path: str) -> None:
    """Ask with an unknown API token, which is looked up in the database, and await no answer."""
    lines = (
        f"GET /api/sites/blog/jobs/{path} HTTP/1.1",
        "Host: localhost",
        f"Authorization: Bearer briter_{path}",
    )
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall("\r\n".join((*lines, "", "")).encode())
        time.sleep(0.1)


def test_a_node_works_again_when_a_silent_database_answers(
    farm: Farm, network: tuple[FreezingProxy, str]
) -> None:
    proxy, farm.url = network
    farm.add("blog")
    node = farm.start("one", **HASTY)
    farm.save("blog", "first")
    eventually(lambda: farm.published("blog").total() == 1)
    proxy.freeze()
    eventually(lambda: "Postgres does not answer" in node.text(), within=40)
    proxy.thaw()
    farm.save("blog", "second")
    eventually(lambda: farm.published("blog").total() == 2, within=40)
