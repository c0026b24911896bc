"""The dashboard's pages with very many jobs."""

from __future__ import annotations

import http.client
import json
import os
import statistics
import subprocess
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from benchmarks.held import memory_of, settle
from benchmarks.lab import commit_job, post_path, say, wait_until, worker
from benchmarks.report import Check, Section, Series
from briter_worker.sinks.store import SqliteStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.lab import Lab, Site

_WHAT = """\
`serve` alone, {jobs:,} scheduled jobs and {jobs:,} receipts in the history. Each page is requested {times} \
times over one connection, with the dashboard's token, until its last byte."""
_POSTS = 100
_SLOWEST_MS = 200
_PAGES = (
    *("/", "/scheduled", "/scheduled?start={late}", "/failed", "/published", "/published?show=failed"),
    *("/search?q=nothing-like-it", "/post?id=job-77", "/site"),
)
_RECEIPT = """
INSERT INTO attempts (job_id, slug, title, attempt, saved_at, began, ended, outcome, duration_ms, "commit",
  branch, remote) VALUES (?, ?, 'Update', 1, ?, ?, ?, ?, 400, ?, 'main', 'origin')
"""


def measure(lab: Lab) -> Section:
    """Measure every page."""
    jobs, times = (10_000, 5) if lab.quick else (100_000, 20)
    say(f"web, {jobs:,} jobs and as many receipts")
    pages = [page.format(late=jobs * 9 // 10) for page in _PAGES]
    taken: dict[str, list[float]] = {page: [] for page in pages}
    with lab.site(_POSTS) as site:
        _fill(site, jobs)
        os.sync()
        with _serving(site) as (process, browser):
            for page in pages:
                browser.get(page)
            settle(process.pid)
            counted = json.loads(browser.get("/api/status"))["jobs"]["scheduled"]
            if counted != jobs:
                raise RuntimeError(f"the dashboard counts {counted} scheduled jobs instead of {jobs}")
            for _ in range(times):
                for page in pages:
                    began = time.perf_counter()
                    browser.get(page)
                    taken[page].append(1000 * (time.perf_counter() - began))
            memory = memory_of(process.pid, "VmRSS")
    slowest = max(pages, key=lambda page: statistics.median(taken[page]))
    median = statistics.median(taken[slowest])
    return Section(
        f"Dashboard: {jobs:,} scheduled jobs, {jobs:,} receipts",
        _WHAT.format(jobs=jobs, times=times),
        [Check(f"slowest page, {slowest}", median, " ms", _SLOWEST_MS)],
        [
            *(Series(f"page {page}", "ms", values) for page, values in taken.items()),
            Series("resident memory after the pages", "MiB", [memory]),
        ],
    )


def _fill(site: Site, count: int) -> None:
    """Write scheduled jobs, and a history in which one attempt in fifty failed."""
    for number in range(count):
        day = f"2099-{1 + number % 12:02}-{1 + number % 28:02}T00:00:00Z"
        commit_job(site.prepare_job(number, scheduledFor=day))
    now = time.time()
    store = SqliteStore(site.storage / "history.db")
    with store.transaction() as transaction:
        for age in range(count, 0, -1):
            times = (now - age - 1, now - age - 0.5, now - age)
            outcome = "nopaths" if age % 50 == 0 else "published"
            transaction.execute(_RECEIPT, (f"old-{age}", post_path(age), *times, outcome, f"{age:040x}"))
    store.close()


class _Browser:
    """One connection that sends the dashboard's token."""

    def __init__(self, port: int, token: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._headers = {"Authorization": f"Bearer {token}", "Accept": "text/html"}

    def get(self, page: str) -> bytes:
        """Return the page. Raises RuntimeError for every status but 200."""
        self._connection.request("GET", page, headers=self._headers)
        answer = self._connection.getresponse()
        body = answer.read()
        if answer.status != http.client.OK:
            raise RuntimeError(f"{page}: {answer.status} {body[:300]!r}")
        return body

    def is_ready(self) -> bool:
        with suppress(RuntimeError):
            return bool(self.get("/readyz"))
        return False


@contextmanager
def _serving(site: Site) -> Iterator[tuple[subprocess.Popen[str], _Browser]]:
    """Yield the dashboard as a service that is ready, and end it."""
    with subprocess.Popen(
        worker("serve"),
        cwd=site.root,
        env=site.environment(BRITER_DASHBOARD_PORT="0"),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None  # noqa: S101 - asked for
            line = process.stdout.readline()
            if "http://" not in line:
                raise RuntimeError(f"the dashboard did not start: {line.strip()}")
            threading.Thread(target=process.stdout.read, daemon=True).start()
            token = (site.worktree / ".git" / "briter" / "dashboard.token").read_text(encoding="utf-8")
            browser = _Browser(int(line.split()[-1].rpartition(":")[2]), token.strip())
            wait_until(browser.is_ready, 0.2)
            yield process, browser
            process.terminate()
            process.wait(timeout=60)
        finally:
            process.kill()
