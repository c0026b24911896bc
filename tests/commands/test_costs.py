"""What a drain costs, counted, so that a regression shows on any machine however busy it is.

The bounds are what was counted when this was written; lower them when something becomes cheaper.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from requirements import provide
from sites import Site

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_GIT = {
    "check-attr": 1,
    "diff-tree": 2,  # one for the mirror, one for the receipts' lists of files
    "fast-import": 1,
    "fetch": 1,  # the first drain of a site alone
    "for-each-ref": 1,
    "ls-files": 1,
    "ls-tree": 1,
    "push": 1,
    "update-index": 1,
    "update-ref": 3,
}
"""The git commands that the worker starts for a site's first drain, and how many of each."""
_CALLS, _CALLS_PER_JOB = 129, 16
"""System calls that touch the queue's folder."""
_SYNCS = 3
"""Times that something of the queue is forced to the disk."""
_LOOKS, _LOOKS_PER_JOB = 20, 11
"""System calls that look at, or read, the work tree's posts."""
_BEATS = 10
"""Calls that come from looking again after a while, as strace makes everything slow."""
_TRACED = "trace=%file,fsync,fdatasync,write,pwrite64,getdents64"
_UNFINISHED = " <unfinished ...>"
_RESUMED = re.compile(r"\d+\s+<\.\.\. \w+ resumed>(.*)")
_CALL = re.compile(r"^\d+\s+(\w+)\(.*= (-?\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Cost:
    """What one drain took."""

    git: Counter[str]
    calls: int
    written: int
    syncs: int
    looks: int


def costs(root: Path, *, jobs: int, posts: int) -> Cost:
    """Drain so many jobs in a folder of so many posts, under `strace`."""
    provide("strace", package="strace")
    root.mkdir()
    site = Site.make(root)
    for number in range(posts):
        # Older than the index: git reads those again that might have changed in the second it was written in.
        os.utime(site.write_post(f"content/posts/{number}.md", f"# {number}\n"), (1e9, 1e9))
    site.git("add", "--all")
    site.git("commit", "--quiet", "--message=Many")
    site.git("repack", "-a", "-d", "-q")
    site.git("push", "--quiet")
    for number in range(jobs):
        site.write_post(f"content/posts/{number}.md", f"# {number}, edited\n")
        site.save(f"p{number:04}", [f"content/posts/{number}.md"])
    traces, calls = root / "traces", root / "calls"
    traces.mkdir()
    (root / "home").mkdir()
    (root / "home" / ".gitconfig").write_text(f"[trace2]\n\teventTarget = {traces}\n", encoding="utf-8")
    env = site.environment(HOME=str(root / "home"))
    del env["GIT_CONFIG_GLOBAL"]
    command = [sys.executable, "-m", "briter_worker", "run", "--once"]
    done = subprocess.run(
        ["strace", "-f", "-y", "-s", "4096", "-e", _TRACED, "-o", str(calls), *command],
        cwd=root,
        env=env,
        capture_output=True,
        check=False,
    )
    if b"ptrace" in done.stderr or b"Operation not permitted" in done.stderr:
        pytest.skip("strace may not trace here")
    assert done.returncode == 0, done.stderr
    assert len(site.remote_log()) == 2 + jobs
    lines = list(_whole(calls.read_text(errors="replace").splitlines()))
    stored = [found for line in lines if str(site.queue) in line and (found := _CALL.match(line))]
    return Cost(
        git=Counter(name for trace in traces.iterdir() if (name := _command(trace))),
        calls=len(stored),
        written=sum(int(call[2]) for call in stored if "write" in call[1]),
        syncs=sum(1 for call in stored if "sync" in call[1]),
        looks=sum(
            1 for line in lines if re.search(r"\d+\.md", line) and "write" not in line.partition("(")[0]
        ),
    )


def _whole(lines: Iterable[str]) -> Iterator[str]:
    """The calls, each on one line: strace tells one in two parts where another thread's came in between."""
    begun: dict[str, str] = {}
    for line in lines:
        thread = line.partition(" ")[0]
        if line.endswith(_UNFINISHED):
            begun[thread] = line.removesuffix(_UNFINISHED)
        elif found := _RESUMED.match(line):
            yield begun.pop(thread, f"{thread} ") + found[1]
        else:
            yield line


def _command(trace: Path) -> str | None:
    """The git command that the worker started; None for one that another git started."""
    events = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
    if "/" in events[0]["sid"]:
        return None
    return next((event["name"] for event in events if event["event"] == "cmd_name"), "?")


@pytest.fixture(scope="module")
def drains(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Cost]:
    """Drains of 1, 10 and 200 jobs, in 1,000 posts."""
    root = tmp_path_factory.mktemp("drains")
    return {jobs: costs(root / str(jobs), jobs=jobs, posts=1_000) for jobs in (1, 10, 200)}


def test_a_drain_starts_the_same_git_commands_for_one_job_and_for_many(drains: dict[int, Cost]) -> None:
    # The configuration is read again while its files are younger than a second: this site is new.
    assert all(1 <= cost.git["config"] <= 3 for cost in drains.values())
    found = {
        jobs: {name: n for name, n in cost.git.items() if name != "config"} for jobs, cost in drains.items()
    }
    few = {name: n for name, n in _GIT.items() if name != "ls-tree"}  # fast-import itself looks up one post
    assert found == {1: few, 10: _GIT, 200: _GIT}


def test_each_job_costs_the_queue_a_few_calls_and_no_bytes(drains: dict[int, Cost]) -> None:
    for jobs, cost in drains.items():
        # The heartbeat writes when it is time, not when a job asks for it.
        assert cost.calls <= _CALLS + _BEATS + _CALLS_PER_JOB * (jobs - 1)
        assert cost.written == 0, "jobs are moved, not written"
        assert cost.looks <= _LOOKS + _LOOKS_PER_JOB * jobs


def test_how_often_the_disk_is_waited_for_does_not_grow_with_the_jobs(drains: dict[int, Cost]) -> None:
    assert max(cost.syncs for cost in drains.values()) <= _SYNCS


def test_a_site_five_times_as_large_costs_no_more_calls(drains: dict[int, Cost], tmp_path: Path) -> None:
    large, small = costs(tmp_path / "large", jobs=10, posts=5_000), drains[10]
    assert {**large.git, "config": 0} == {**small.git, "config": 0}
    assert abs(large.calls - small.calls) <= _BEATS
    assert large.written == 0
    assert large.looks <= _LOOKS + _LOOKS_PER_JOB * 10
