"""What the worker keeps in memory, against the jobs that are due; `held` has those on hold."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from benchmarks.lab import PROJECT, say
from benchmarks.report import Check, Plot, Section, Series

if TYPE_CHECKING:
    from benchmarks.lab import Lab, Site

_WHAT = """\
The most that a `run --once` (the worker itself, not its git processes) has resident for jobs that are all \
due at once."""
_POSTS = 100
_PEAK = """\
import re, runpy, sys
sys.argv[1:] = ["run", "--once"]
try:
    runpy.run_module("briter_worker", run_name="__main__", alter_sys=True)
finally:
    # Not ru_maxrss: that is also what the process had that started this one.
    with open("/proc/self/status") as status:
        print(re.search("VmHWM:\\s+([0-9]+) kB", status.read())[1], file=sys.stderr)
"""


def measure(lab: Lab) -> Section:
    """See `_WHAT`."""
    due = (1, 100, 500) if lab.scale.quick else (1, 100, 1_000, 3_000)
    peaks = {count: _peak(lab, count) for count in due}
    return Section(
        "Memory: jobs due at once",
        _WHAT,
        [Check(f"{due[-1]:,} jobs due at once", peaks[due[-1]], " MiB", 200)],
        [Series(f"{count:,} due", "MiB", [value]) for count, value in peaks.items()],
        plots=[
            Plot(
                "bench-memory",
                "Memory of one drain, at most",
                "due jobs",
                "MiB resident",
                {"the worker": list(peaks.items())},
            )
        ],
    )


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
