"""What the worker keeps in memory, against the jobs on hold and the jobs that are due."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from benchmarks.held import settle
from benchmarks.lab import PROJECT, daemon, memory_of, say
from benchmarks.report import Check, Section, Series

if TYPE_CHECKING:
    from benchmarks.lab import Lab, Site

_WHAT = """\
Resident memory of the service with jobs on hold, once it has read them all; and the most that a \
`run --once` (the worker itself, not its git processes) takes for jobs that are all due at once."""
_POSTS = 100
_PEAK = """\
import resource, runpy, sys
sys.argv[1:] = ["run", "--once"]
try:
    runpy.run_module("briter_worker", run_name="__main__", alter_sys=True)
finally:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""


def measure(lab: Lab) -> Section:
    """See `_WHAT`."""
    held = (0, 1_000, 20_000) if lab.scale.quick else (0, 1_000, 10_000, 100_000)
    due = (1, 1_000) if lab.scale.quick else (1, 1_000, 10_000)
    resident = {count: _resident(lab, count) for count in held}
    peaks = {count: _peak(lab, count) for count in due}
    most_held, most_due = held[-1], due[-1]
    return Section(
        "Memory: jobs on hold, and jobs due at once",
        _WHAT,
        [
            Check(f"{most_held:,} jobs on hold", resident[most_held], " MiB", 200),
            Check(f"{most_due:,} jobs due at once", peaks[most_due], " MiB", 200),
        ],
        [
            *(Series(f"{count:,} on hold", "MiB", [value]) for count, value in resident.items()),
            *(Series(f"{count:,} due", "MiB", [value]) for count, value in peaks.items()),
        ],
    )


def _resident(lab: Lab, count: int) -> float:
    say(f"memory, {count:,} jobs on hold")
    with lab.site(_POSTS) as site:
        _write(site, count, scheduledFor="2100-01-01T00:00:00Z")
        with daemon(site) as process:
            settle(process.pid)
            return memory_of(process.pid, "VmRSS")


def _peak(lab: Lab, count: int) -> float:
    say(f"memory, {count:,} jobs due")
    with lab.site(max(_POSTS, count)) as site:
        for number in range(count):
            site.edit(number)
        _write(site, count)
        done = subprocess.run(
            [sys.executable, "-c", _PEAK],
            cwd=PROJECT,
            env=site.environment(),
            capture_output=True,
            text=True,
            check=True,
        )
        return int(done.stderr.split()[-1]) / 1024


def _write(site: Site, count: int, **keys: str) -> None:
    for number in range(count):
        partial = site.save(number, **keys)
        partial.rename(partial.with_suffix(".json"))
    os.sync()
