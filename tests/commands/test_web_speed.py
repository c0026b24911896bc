"""The CPU time and memory of the dashboard, with many jobs and many readers."""

from __future__ import annotations

import json
import sqlite3
import time
from typing import TYPE_CHECKING

import psutil
import pytest
from dashboards import serving
from sites import Site, eventually

from briter_worker.sinks.store import SqliteStore

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
    """Write many scheduled jobs and many receipts."""
    for number in range(HELD):
        job = {"id": f"job-{number}", "slug": f"post-{number}", "paths": ["content/a.md"]}
        job |= {"scheduledFor": f"2099-{1 + number % 12:02}-01T00:00:00Z", "createdAt": "2026-01-01"}
        (site.queue / f"{number}.json").write_text(json.dumps(job))
    now = time.time()
    store = SqliteStore(site.storage / "history.db")
    with store.transaction():
        pass  # creates the tables
    store.close()
    connection = sqlite3.connect(site.storage / "history.db")
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
    connection.commit()
    connection.close()


def used(process: subprocess.Popen[str]) -> float:
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system


@pytest.mark.slow
def test_a_page_costs_little_with_many_jobs(site: Site) -> None:
    fill(site)
    with serving(site) as dashboard:
        eventually(lambda: dashboard.api.get("/readyz").status_code == 200, within=60)
        assert dashboard.json("/api/status")["jobs"]["scheduled"] == HELD
        eventually(lambda: "<rect" in dashboard.page.get("/figures").text, within=60)
        costs = {}
        for path in PAGES:
            assert dashboard.page.get(path).status_code == 200, path
            before = used(dashboard.process)
            for _ in range(10):
                dashboard.page.get(path)
            costs[path] = (used(dashboard.process) - before) / 10
        assert max(costs.values()) < 0.05, costs


def test_an_answer_is_not_delayed_by_nagles_algorithm(site: Site) -> None:
    with serving(site) as dashboard:
        took = []
        for _ in range(30):
            began = time.perf_counter()
            dashboard.api.get("/healthz")
            took.append(time.perf_counter() - began)
        assert min(took) < 0.035, "TCP_NODELAY is off: each answer waits 40 ms"
