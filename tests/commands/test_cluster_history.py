"""The history of a cluster: many nodes write and send at once, each for many sites."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
from postgres import free_port

from briter_worker.events import (
    Cancelled,
    Event,
    JobStarted,
    Published,
    Warned,
)
from briter_worker.sinks.history import History
from briter_worker.sinks.recorder import FanOut, HistorySink, Target
from briter_worker.sinks.store import PostgresStore, StoreError

if TYPE_CHECKING:
    from postgres import Server
    from sites import Site

    from briter_worker.queues.postgres.database import Database
    from briter_worker.sinks.store import Store

NOW = 1_000_000.0
SHA = "52ed5b9c2a5b45b9a7a0a6f8f1f7be9bd5b2d6b1"
TARGET = Target("main", "origin", "https://example.org/notes/{slug}")


def start(job: str = "j1", attempt: int = 1) -> JobStarted:
    return JobStarted(
        job_id=job,
        slug=f"post-{job}",
        attempt=attempt,
        dry_run=False,
        title="",
        saved_at=NOW - 10,
        due_at=None,
    )


def ended(job: str = "j1", attempt: int = 1) -> dict[str, Any]:
    return {"job_id": job, "slug": f"post-{job}", "attempt": attempt, "dry_run": False, "duration_ms": 7}


@pytest.fixture
def store(database: Database) -> PostgresStore:
    return PostgresStore(database.connection)


def record(store: Store, *events: Event, site: str = "blog", now: float = NOW) -> list[Event]:
    """Record the events of one drain, one by one. Return what was logged."""
    logged: list[Event] = []
    sinks = FanOut([HistorySink(store, TARGET, site=site, clock=lambda: now)], logged.append)
    for event in events:
        sinks(event)
    sinks.close()
    return logged


def test_moments_of_a_site_become_visible_in_the_order_of_their_ids(store: PostgresStore) -> None:
    """A reader who has seen a moment asks for later ids only."""
    history = History(store, "blog")
    writer = threading.Thread(target=record, args=(store, Cancelled(job_id="2", slug="post")))
    with store.transaction("blog") as slow:
        slow.execute("INSERT INTO moments (site, at, event, data) VALUES ('blog', 1, 'first', '{}')")
        writer.start()
        record(store, Cancelled(job_id="3", slug="post"), site="shop")
        writer.join(0.3)
        assert history.moments(0) == []
    writer.join()
    assert [moment.event for moment in history.moments(0)] == ["first", "cancelled"]


def test_a_database_that_is_away_costs_receipts(postgres_server: Server, store: PostgresStore) -> None:
    postgres_server.stop()
    try:
        logged = record(store, start("j1"), Published(**ended("j1"), commit=SHA))
        with pytest.raises(StoreError) as unreadable:
            History(store, "blog").receipts()
    finally:
        postgres_server.start()
    record(store, Cancelled(job_id="j2", slug="b"))
    assert [each.job_id for each in History(store, "blog").receipts()] == ["j2"]
    (warning,) = [event for event in logged if isinstance(event, Warned)]
    assert "the history in Postgres cannot be used" in warning.error
    assert warning.fix == unreadable.value.fix != ""


# --- the program


def test_the_commands_show_what_became_of_a_post_on_one_site(site: Site, database_url: str) -> None:
    site.env["BRITER_DATABASE_URL"] = database_url
    for name in ("blog", "shop"):
        assert site.command("site", "add", name, "--remote", str(site.remote)).returncode == 0
    site.write_post("content/posts/hello.md", "# Hello\n")
    for name, paths in (("blog", "content/posts/hello.md"), ("shop", "content/posts/welcome.md")):
        assert site.command("enqueue", "hello", paths, "--site", name).returncode == 0
    done = site.command("run", "--once", "--workers", "2", "--metrics-port", str(free_port()))
    assert done.returncode == 0, done.stderr
    (receipt,) = json.loads(site.command("history", "--site", "blog", "--json").stdout)
    files = [{"path": "content/posts/hello.md", "added": None, "removed": None, "deleted": False}]
    assert (receipt["changes"], receipt["filesChanged"]) == (files, 1)
    assert (receipt["outcome"], receipt["slug"], receipt["attempt"]) == ("published", "hello", 1)
    assert receipt["commit"] == site.git("rev-parse", "main", cwd=site.remote)
    assert [phase["name"] for phase in receipt["phases"]][-1] in ("push", "settle")
    assert receipt["saveToRemoteMs"] > 0
    shown = json.loads(site.command("show", "hello", "--site", "blog", "--json").stdout)
    assert shown["receipts"] == [receipt]
    (other,) = json.loads(site.command("history", "--site", "shop", "--json").stdout)
    assert other["outcome"] == "nochange"
