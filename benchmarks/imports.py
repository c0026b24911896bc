"""Thousands of due jobs at once: one drain, one push, within bounds of memory."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.drain import enqueue
from benchmarks.lab import say, worker
from benchmarks.report import Check, Section, Series

if TYPE_CHECKING:
    from benchmarks.lab import Lab, Site

_WHAT = """\
{jobs:,} due jobs in {posts:,} posts, by one `run --once`. Memory is the most that the worker's own process \
had resident; its git commands are processes of their own."""
_LOOK = 0.05


def measure(lab: Lab) -> Section:
    """See `_WHAT`."""
    jobs = 500 if lab.scale.quick else 10_000
    with lab.site(lab.scale.posts) as site:
        say(f"import, writing {jobs:,} jobs")
        before = site.published()
        enqueue(site, jobs)
        say("import, draining")
        took, peak = _drain(site)
        published = site.published() - before
    return Section(
        f"Import: {jobs:,} jobs at once",
        _WHAT.format(jobs=jobs, posts=lab.scale.posts),
        [
            Check("jobs that became a commit on the remote", published, "", jobs, at_least=True),
            Check("memory at most", peak, " MiB", 200, headline=True),
        ],
        [Series("time", "ms/job", [1000 * took / jobs]), Series("memory at most", "MiB", [peak])],
    )


def _drain(site: Site) -> tuple[float, float]:
    """Seconds, and MiB."""
    began = time.perf_counter()
    peak = 0.0
    with subprocess.Popen(
        worker("run", "--once"), cwd=site.root, env=site.environment(), stdout=subprocess.DEVNULL
    ) as process:
        while process.poll() is None:
            peak = max(peak, _memory(process.pid))
            time.sleep(_LOOK)
    return time.perf_counter() - began, peak


def _memory(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")), 0.0)
