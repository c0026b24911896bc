"""The live stream: readers that connect again, leave, do not read, and see the dashboard end."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from dashboards import Dashboard, events, serving

from briter_worker.events import Superseded
from briter_worker.sinks.recorder import HistorySink, Target
from briter_worker.sinks.store import SqliteStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sites import Site


@pytest.fixture
def dashboard(site: Site) -> Iterator[Dashboard]:
    with serving(site) as served:
        yield served


def publish(site: Site, slug: str) -> None:
    site.save_post(slug, f"# {slug}\n")
    assert site.run_once().returncode == 0


def until(stream: Iterator[tuple[str, int | None, Any]], name: str) -> list[tuple[str, int | None, Any]]:
    """Return the events up to the first one of this name."""
    found = []
    for each in stream:
        found.append(each)
        if each[0] == name:
            return found
    raise AssertionError(found)


def happen(site: Site, number: int, size: int = 10) -> None:
    """Fill the history as a worker does."""
    sink = HistorySink(SqliteStore(site.storage / "history.db"), Target("main", "origin"))
    for first in range(0, number, 500):
        sink.store(
            [
                Superseded(job_id=str(index), slug="a".ljust(size, "x"), superseded_by="b")
                for index in range(first, min(number, first + 500))
            ]
        )
    sink.close()


def test_a_reader_gets_a_snapshot_then_each_event_with_its_id(site: Site, dashboard: Dashboard) -> None:
    with dashboard.api.stream("GET", "/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        stream = events(response)
        name, number, data = next(stream)
        assert (name, number) == ("snapshot", 0)
        assert data["jobs"]["pending"] == 0
        publish(site, "hello")
        seen = until(stream, "worker-stopped")
        site.save("later", ["content/posts/a.md"], scheduledFor="2099-01-01")
        status = next(data for name, _, data in stream if name == "status" and data["jobs"]["scheduled"])
    ids = [number for _, number, _ in seen if number is not None]
    assert ids == sorted(set(ids))
    told = {name: data for name, _, data in seen}
    assert told["published"]["slug"] == "hello"
    assert told["published"]["commit"] == site.remote_log()[0][0]
    assert status["jobs"]["scheduled"] == 1


def test_a_reader_that_reconnects_gets_what_it_missed_also_after_a_restart(site: Site) -> None:
    with serving(site) as first, first.api.stream("GET", "/events") as response:
        stream = events(response)
        next(stream)
        publish(site, "one")
        last = until(stream, "worker-stopped")[-1][1]
    publish(site, "two")
    with serving(site) as second:
        headers = {"Last-Event-ID": str(last)}
        with second.api.stream("GET", "/events", headers=headers) as response:
            stream = events(response)
            missed = until(stream, "status")
            names = [name for name, _, _ in missed]
            assert names[0] == "start"
            assert "snapshot" not in names
            assert [data["slug"] for name, _, data in missed if name == "published"] == ["two"]
            ids = [number for _, number, _ in missed if number is not None]
            assert ids == list(range(last + 1, last + 1 + len(ids)))  # type: ignore[operator]
            publish(site, "three")
            assert until(stream, "published")[-1][2]["slug"] == "three"


def readers(dashboard: Dashboard) -> int:
    return int(dashboard.json("/api/status")["readers"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_dashboard_ends_at_once_also_with_readers(dashboard: Dashboard, number: signal.Signals) -> None:
    with dashboard.api.stream("GET", "/events") as response:
        stream = events(response)
        next(stream)
        began = time.monotonic()
        dashboard.process.send_signal(number)
        with suppress(httpx.RemoteProtocolError):  # cut off between two chunks
            assert list(stream) == []
        assert dashboard.process.wait(10) == 0
        assert time.monotonic() - began < 5
    assert dashboard.process.stderr is not None
    assert dashboard.process.stderr.read() == ""
