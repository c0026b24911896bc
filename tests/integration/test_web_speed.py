"""What a page costs, however much waits: measured by the processor time of the dashboard itself."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest
from dashboards import events, serving
from sites import Site, eventually

from briter_worker.sinks.history.database import SCHEMA
from briter_worker.sinks.sqlite import open_to_write

if TYPE_CHECKING:
    import subprocess

HELD = 10_000
RECEIPTS = 30_000
READERS = 100
PAGES = (
    *("/", "/scheduled", "/scheduled?start=9000", "/failed", "/published", "/published?show=failed"),
    *("/published?q=nothing-like-it&show=all", "/post?id=job-777", "/figures", "/site"),
    *("/api/queue", "/api/jobs?offset=9000", "/api/history", "/api/status"),
)


def fill(site: Site) -> None:
    """Many jobs on hold, and many receipts."""
    for number in range(HELD):
        job = {"id": f"job-{number}", "slug": f"post-{number}", "paths": ["content/a.md"]}
        job |= {"scheduledFor": f"2099-{1 + number % 12:02}-01T00:00:00Z", "createdAt": "2026-01-01"}
        (site.queue / f"{number}.json").write_text(json.dumps(job))
    now = time.time()
    connection = open_to_write(site.storage / "history.db", SCHEMA)
    connection.execute("BEGIN")
    connection.executemany(
        'INSERT INTO attempts (job_id, slug, title, attempt, saved_at, began, ended, outcome, "commit") '
        "VALUES (?, ?, 'Update', 1, ?, ?, ?, ?, ?)",
        [
            (
                f"old-{n}",
                f"old-{n}",
                now - n,
                now - n,
                now - n,
                "nopaths" if n % 50 == 0 else "published",
                f"{n:040x}",
            )
            for n in range(RECEIPTS, 0, -1)
        ],
    )
    connection.execute("COMMIT")
    connection.close()


def used(process: subprocess.Popen[str]) -> float:
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system


@pytest.mark.slow
def test_a_page_costs_little_however_much_waits(site: Site) -> None:
    fill(site)
    with serving(site) as dashboard:
        eventually(lambda: dashboard.api.get("/readyz").status_code == 200, within=60)
        assert dashboard.json("/api/status")["jobs"]["scheduled"] == HELD
        # What it does by itself, it has done: the figures are counted.
        eventually(lambda: "<rect" in dashboard.page.get("/figures").text, within=60)
        costs = {}
        for path in PAGES:
            assert dashboard.page.get(path).status_code == 200, path
            before = used(dashboard.process)
            for _ in range(10):
                dashboard.page.get(path)
            costs[path] = (used(dashboard.process) - before) / 10
        assert max(costs.values()) < 0.05, costs


def test_idle_it_is_small_and_does_next_to_nothing_also_with_readers(site: Site) -> None:
    with serving(site) as dashboard, ExitStack() as stack:
        for path in PAGES:
            dashboard.page.get(path)
        assert psutil.Process(dashboard.process.pid).memory_info().rss < 80 << 20
        limits = httpx.Limits(max_connections=READERS)
        client = stack.enter_context(httpx.Client(base_url=dashboard.base, timeout=60, limits=limits))
        streams = []
        for _ in range(READERS):
            streams.append(events(stack.enter_context(client.stream("GET", "/events"))))
            assert next(streams[-1])[0] == "snapshot"
        assert dashboard.json("/api/status")["readers"] == READERS
        site.save("held", ["content/a.md"], scheduledFor="2099-01-01")
        before = used(dashboard.process)
        for stream in streams:
            name, _, data = next(stream)
            assert name == "status"
            assert data["jobs"]["scheduled"] == 1
        assert used(dashboard.process) - before < 2


def test_an_answer_waits_for_no_acknowledgement(site: Site) -> None:
    with serving(site) as dashboard:
        took = []
        for _ in range(30):
            began = time.perf_counter()
            dashboard.api.get("/healthz")
            took.append(time.perf_counter() - began)
        assert min(took) < 0.035, "TCP_NODELAY is off: each answer waits 40 ms"
