"""From the save of one post to its commit on the remote, on a service that had nothing to do."""

from __future__ import annotations

import subprocess
import time
from typing import TYPE_CHECKING

from benchmarks.lab import daemon, say, wait_for
from benchmarks.report import Check, Section, Series, ratio

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.lab import Lab, Site

_WHAT = """\
One post saved (the rename of its job file) in a folder of {posts:,} posts, until the bare remote's branch \
has moved; the worker runs as a service and is idle. Bare git is `git add`, `git commit`, `git push`, from \
the start of the first command until the branch has moved. They take turns."""
_LONGEST = 60.0


def measure(lab: Lab) -> Section:
    """See `_WHAT`."""
    posts = lab.scale.posts
    saves = 20 if lab.scale.quick else 100
    say(f"latency, {saves} saves each")
    ours: list[float] = []
    bare: list[float] = []
    with lab.site(posts) as served, lab.site(posts) as plain, daemon(served) as process:
        for number in range(saves + 2):
            ours.append(1000 * _save(served, process, number))
            time.sleep(0.2)
            bare.append(1000 * _commit(plain, number))
            time.sleep(0.2)
    # The first ones warm up: imports here, packed refs there.
    mine, theirs = Series("save to remote", "ms", ours[2:]), Series("git add, commit, push", "ms", bare[2:])
    return Section(
        "Latency: one save, idle service",
        _WHAT.format(posts=posts),
        [
            Check("median, of bare git's", ratio(mine.values, theirs.values), "×", 2, 1.3),
            Check("99th percentile, of bare git's", mine.p99 / theirs.p99, "×", 3, 2),
        ],
        [
            mine,
            theirs,
            Series("save to remote, 99th percentile", "ms", [mine.p99]),
            Series("git add, commit, push, 99th percentile", "ms", [theirs.p99]),
        ],
    )


def _save(site: Site, process: subprocess.Popen[str], number: int) -> float:
    site.edit(number)
    partial = site.save(number)
    before = _tip(site.remote)
    began = time.perf_counter()
    partial.rename(partial.with_suffix(".json"))
    took = _moved(site.remote, before) - began
    wait_for(process, "published")
    return took


def _commit(site: Site, number: int) -> float:
    path = site.edit(number)
    before = _tip(site.remote)
    began = time.perf_counter()
    site.git("add", "--", path)
    site.git("commit", "--quiet", f"--message=Publish post {number}")
    push = ["git", "push", "--quiet", "origin", "main"]
    with subprocess.Popen(push, cwd=site.worktree, env=site.env):
        return _moved(site.remote, before) - began


def _tip(remote: Path) -> bytes:
    try:
        return (remote / "refs" / "heads" / "main").read_bytes()
    except FileNotFoundError:
        return b""  # packed, until the first push


def _moved(remote: Path, before: bytes) -> float:
    """The moment at which the branch is another."""
    began = time.perf_counter()
    while _tip(remote) == before:
        time.sleep(0.0005)
        if time.perf_counter() - began > _LONGEST:
            raise RuntimeError("the save did not reach the remote")
    return time.perf_counter()
