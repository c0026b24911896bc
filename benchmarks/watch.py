"""The cost of `watch` in a large site, and of a signature on each commit."""

from __future__ import annotations

import statistics
import time
from contextlib import closing
from typing import TYPE_CHECKING

from benchmarks.drain import run_worker
from benchmarks.held import idle_minute, memory_of
from benchmarks.lab import FOLDER, daemon, say, timed
from benchmarks.report import Check, Section, Series, ratio
from briter_worker.settings import load_settings
from briter_worker.watch.kernel import KernelEvents
from briter_worker.wiring import open_post_watcher

if TYPE_CHECKING:
    from benchmarks.lab import Lab, Site

_WHAT = """\
`watch` in an unchanged site of {posts:,} posts: its start without Python's imports beside a `find` that \
looks at each file, in turns, and {seconds} s of doing nothing with `run --watch`. Then `run --once` of \
{jobs} jobs in a site of 1,000 posts, without signatures and with ssh, in turns."""
_JOBS = 50
_FIND = ["find", FOLDER, "-type", "f", "-size", "-1000k"]
"""Looks at each file, as `watch` does."""


def measure(lab: Lab) -> Section:
    """Measure the start and an idle minute of `watch`, and what signatures add."""
    posts, seconds, times = (10_000, 10, 3) if lab.quick else (100_000, 60, 9)
    taken: dict[str, list[float]] = {"watch": [], "find": []}
    with lab.site(posts) as site:
        say(f"watch, {posts:,} posts")
        _start(site)  # the first one reads all files, and fills the ledger
        for _ in range(times):
            taken["watch"].append(1000 * _start(site))
            taken["find"].append(1000 * timed(_FIND, site.worktree, site.env))
        with daemon(site.root, site.environment(), "--watch") as process:
            minute, resident = idle_minute(process.pid, seconds), memory_of(process.pid, "VmRSS")
    added = [_signature(lab) for _ in range(times)]
    return Section(
        f"Watch: {posts:,} posts, and signatures",
        _WHAT.format(posts=posts, seconds=seconds, jobs=_JOBS),
        [
            Check("start, relative to `find -size`", ratio(taken["watch"], taken["find"]), "×", 2),
            Check("CPU time of an idle minute", minute, " s", 0.3),
            Check("resident memory", resident, " MiB", 150),
            Check(f"ssh signature: added to each of {_JOBS} commits", statistics.median(added), " ms", 25),
        ],
        [
            *(Series(f"start: {name}", "ms", values) for name, values in taken.items()),
            Series("ssh signature", "ms/commit", added),
        ],
    )


def _start(site: Site) -> float:
    """Return the seconds until all folders are watched and every file is compared with the ledger."""
    watcher = open_post_watcher(load_settings(site.environment()), lambda _: None)
    if not watcher.acquire():
        raise RuntimeError("another watch is active")
    began = time.perf_counter()
    with closing(watcher), closing(KernelEvents(site.worktree, [FOLDER])):
        watcher.look_everywhere()
        watcher.step(time.monotonic(), time.time())
        return time.perf_counter() - began


def _signature(lab: Lab) -> float:
    """Return the milliseconds that a signature adds to each commit, by a pair of runs."""
    took = []
    for is_signed in (False, True):
        with lab.site(1000) as site:
            key = site.root / "key"
            timed(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], site.root, site.env)
            env = {"BRITER_GIT_SIGNING_KEY": str(key)} if is_signed else {}
            took.append(run_worker(site, _JOBS, **env))
    return 1000 * (took[1] - took[0]) / _JOBS
