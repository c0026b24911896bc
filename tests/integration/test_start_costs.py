"""What a run that finds nothing to do must not load, and what a poll must not touch.

Counted, not timed: the machine's noise changes nothing here, a careless import does. The times are
`scripts/bench start` and `scripts/bench held`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from machine import provide
from sites import Site, eventually

if TYPE_CHECKING:
    from pathlib import Path

HEAVY = {
    "pydantic",
    "pydantic_core",
    "typer",
    "click",
    "rich",
    "git",
    "gitdb",
    "psutil",
    "watchfiles",
    "httpx",
}
SLOW = {
    "asyncio",
    "sqlite3",
    "subprocess",
    "shutil",
    "multiprocessing",
    "email",
    "http",
    "importlib.metadata",
}
"""Of the standard library, what takes milliseconds, and no start has needed yet."""
HELD = 40
_IMPORTED = re.compile(r"^import time:\s*\d+ \|\s*\d+ \|\s*(\S+)$", re.MULTILINE)


def imported(site: Site, *arguments: str, **env: str) -> set[str]:
    """Every module that the command has loaded."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "briter_worker", *arguments],
        cwd=site.root,
        env=site.environment(**env),
        capture_output=True,
        text=True,
        check=True,
    )
    return set(_IMPORTED.findall(done.stderr))


def ours(modules: set[str]) -> set[str]:
    return {name for name in modules if name.split(".")[0] == "briter_worker"}


def installed(modules: set[str]) -> set[str]:
    """Packages that are neither ours nor Python's own; what a `.pth` file loads is there for any program."""
    always = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", ""], capture_output=True, text=True, check=True
    ).stderr
    packages = {name.split(".")[0] for name in modules - set(_IMPORTED.findall(always))}
    # `copy` looks for Jython's `org`.
    return packages - sys.stdlib_module_names - {"briter_worker", "org"}


def test_a_run_that_finds_nothing_loads_the_lock_and_little_else(site: Site) -> None:
    site.save("late", ["content/posts/late.md"], scheduledFor="2099-01-01")
    for dry_run in ("true", "false"):
        modules = imported(site, "run", "--once", BRITER_WORKER_DRY_RUN=dry_run)
        assert not modules & (HEAVY | SLOW)
        assert installed(modules) == {"filelock"}
        assert len(ours(modules)) <= 46, sorted(ours(modules))


def test_a_plain_enqueue_loads_no_package_at_all(site: Site) -> None:
    modules = imported(site, "enqueue", "hello", "content/posts/hello.md", "-m", "Hello", "--json")
    assert not modules & (HEAVY | SLOW)
    assert installed(modules) == set()
    assert not {name for name in modules if name.startswith(("briter_worker.git", "briter_worker.wiring"))}
    assert len(ours(modules)) <= 20, sorted(ours(modules))


def test_health_does_not_load_git(site: Site) -> None:
    modules = imported(site, "health", "--no-worker")
    assert not modules & {"git", "gitdb", "briter_worker.git.command"}


def test_jobs_on_hold_are_read_once_and_their_folder_is_not_listed_while_nothing_changes(
    site: Site, tmp_path: Path
) -> None:
    provide("strace", package="strace")
    for number in range(HELD):
        site.save(f"late-{number}", [f"content/posts/{number}.md"], scheduledFor="2099-01-01")
    calls = tmp_path / "calls"
    traced = ("-f", "-y", "-e", "trace=openat,getdents64,/stat", "-o", str(calls), sys.executable)
    with subprocess.Popen(
        ["strace", *traced, "-m", "briter_worker", "run"],
        env=site.environment(BRITER_WORKER_POLL_INTERVAL_MS="20"),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    ) as worker:
        try:
            eventually(lambda: calls.exists() and polls(calls, site.queue) >= 50, within=60)
        finally:
            os.killpg(worker.pid, signal.SIGKILL)  # strace alone would leave the worker behind
    text = calls.read_text()
    assert len(re.findall(r'openat\([^\n]*/queue/[^\n]*\.json"', text)) == HELD
    # After the first look, and once more when the watch stands: what was saved between was seen by nobody.
    listings = [line for line in text.splitlines() if "getdents64(" in line and f"<{site.queue}>" in line]
    assert len(listings) <= 2 * 2, listings
    stats = re.findall(r'stat[^\n]*\.json"', text)
    assert len(stats) <= 4 * HELD


def polls(calls: Path, queue: Path) -> int:
    """How often the folder itself was asked for its time stamp."""
    return calls.read_text().count(f'"{queue}"')
