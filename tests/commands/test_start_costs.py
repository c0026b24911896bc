"""System calls of an idle worker and of a producer, counted rather than timed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from requirements import provide
from sites import Site, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HELD = 40


def test_a_save_has_no_scheduled_job_read_again(site: Site, tmp_path: Path) -> None:
    provide("strace", package="strace")
    for number in range(HELD):
        site.save(f"late-{number}", [f"content/posts/{number}.md"], scheduledFor="2099-01-01")
    calls = tmp_path / "calls"
    traced = "openat,getdents64,/stat,inotify_add_watch"
    with tracing(site, calls, traced, BRITER_WORKER_POLL_INTERVAL_MS="100"):
        eventually(lambda: "inotify_add_watch" in calls.read_text(), within=60)
        eventually(partial(has_polled_since, calls, site.queue, calls.read_text()))
        before = calls.read_text()
        site.write_post("content/posts/a.md", "# A\n")
        file = site.save("a", ["content/posts/a.md"])
        eventually(partial(is_settled, site, "a"), within=60)
        eventually(partial(has_polled_since, calls, site.queue, calls.read_text()))
    text = calls.read_text().removeprefix(before)
    assert str(file) in text
    assert not re.search(r'openat\([^\n]*"late-', text)


def test_a_worker_at_rest_is_woken_by_the_kernel_and_looks_for_nothing_by_itself(
    site: Site, tmp_path: Path
) -> None:
    provide("strace", package="strace")
    calls = tmp_path / "calls"
    with tracing(site, calls, "/stat,/poll,/sleep,/select", BRITER_WORKER_POLL_INTERVAL_MS="100"):
        eventually(lambda: polls(calls, site.queue) >= 5, within=60)
        before = calls.read_text()
        eventually(lambda: polls(calls, site.queue) >= 30, within=60)
        text = calls.read_text().removeprefix(before)
    waits = re.findall(r"^\d+\s+(?:\w*poll|\w*sleep|\w*select)\w*\(", text, re.MULTILINE)
    assert len(waits) <= 3 * 25, "a hundred times a second is what it was"


def test_a_worker_without_work_loads_nothing_that_only_others_need(site: Site) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "briter_worker", "run", "--once"],
        env=site.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "git" in loaded
    assert not loaded & {
        "rich",
        "fastapi",
        "jinja2",
        "uvicorn",
        "psycopg",
        "procrastinate",
        "prometheus_client",
    }


def is_settled(site: Site, slug: str) -> bool:
    return site.remote_log()[0][1] == f"Publish {slug}" and not [*(site.queue / ".claimed").glob("*.json")]


@contextmanager
def tracing(site: Site, calls: Path, traced: str, **env: str) -> Iterator[None]:
    """A service under `strace`, which writes these calls of its to `calls`."""
    with subprocess.Popen(
        [
            *("strace", "-f", "-y", "-e", f"trace={traced}", "-o", str(calls)),
            *(sys.executable, "-m", "briter_worker", "run"),
        ],
        env=site.environment(**env),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    ) as worker:
        try:
            eventually(calls.exists)
            yield
        finally:
            os.killpg(worker.pid, signal.SIGKILL)  # strace alone would leave the worker behind


def has_polled_since(calls: Path, queue: Path, before: str) -> bool:
    return polls(calls, queue) >= before.count(f'"{queue}"') + 5


def polls(calls: Path, queue: Path) -> int:
    """How often the folder itself was asked for its time stamp."""
    return calls.read_text().count(f'"{queue}"')
