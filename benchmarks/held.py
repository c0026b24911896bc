"""The cost of many scheduled jobs while nothing happens."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from benchmarks.lab import commit_job, daemon, say
from benchmarks.report import Check, Section, Series
from briter_worker.queues.disk.queue import DiskQueue

if TYPE_CHECKING:
    from benchmarks.lab import Lab, Site

_WHAT = """\
{jobs:,} scheduled jobs, the worker as a service with its default settings, left alone for {seconds} s after \
it has read all of them. The worker reads the whole folder again once in five minutes: a fifth of such a \
scan, measured in a process of its own, is added to the minute."""
_POSTS = 100
_SETTLED_S = 0.05
_LONGEST_S = 60.0
_SCANS_PER_MINUTE = 1 / 5


def measure(lab: Lab) -> Section:
    """Measure CPU time and memory of an idle minute."""
    jobs, seconds = (10_000, 10) if lab.quick else (100_000, 60)
    with lab.site(_POSTS) as site:
        say(f"held, {jobs:,} jobs")
        for number in range(jobs):
            commit_job(site.prepare_job(number, scheduledFor="2100-01-01T00:00:00Z"))
        os.sync()
        with daemon(site.root, site.environment()) as process:
            minute = idle_minute(process.pid, seconds)
            resident, peak = memory_of(process.pid, "VmRSS"), memory_of(process.pid, "VmHWM")
        scan = _scan(site)
    return Section(
        f"Held: {jobs:,} scheduled jobs",
        _WHAT.format(jobs=jobs, seconds=seconds),
        [
            Check("CPU time of an idle minute", minute + scan * _SCANS_PER_MINUTE, " s", 0.6),
            Check("resident memory", resident, " MiB", 200),
        ],
        [
            Series("CPU time of a minute without a scan", "s", [minute]),
            Series("CPU time of a scan", "s", [scan]),
            Series("resident memory at most", "MiB", [peak]),
        ],
    )


def _scan(site: Site) -> float:
    """Return the CPU seconds of a scan that finds no change."""
    queue = DiskQueue(site.queue, site.root / "quarantine", longest_delay=1800.0, dry_run=False)
    queue.next_due(time.time())
    queue.watcher.close()  # a folder that is watched anew is scanned
    before = time.process_time()
    queue.next_due(time.time())
    return time.process_time() - before


def idle_minute(pid: int, seconds: float) -> float:
    """Return the CPU seconds of a minute, measured for `seconds` once the process is idle."""
    settle(pid)
    before, began = cpu_time(pid), time.perf_counter()
    time.sleep(seconds)
    return 60 * (cpu_time(pid) - before) / (time.perf_counter() - began)


def settle(pid: int) -> None:
    """Wait until the process is idle: until a second costs next to nothing."""
    deadline = time.monotonic() + _LONGEST_S
    time.sleep(2)
    while time.monotonic() < deadline:
        before = cpu_time(pid)
        time.sleep(1)
        if cpu_time(pid) - before <= _SETTLED_S:
            return


def cpu_time(pid: int) -> float:
    """Return the CPU seconds so far, those of ended children included."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)


def memory_of(pid: int, name: str) -> float:
    """Return MiB as the kernel counts them: `VmRSS` now, `VmHWM` at most so far."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(status.partition(f"{name}:")[2].split()[0]) / 1024
