"""What many jobs on hold cost while nothing happens."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.lab import daemon, memory_of, say, timed, worker
from benchmarks.report import Check, Section, Series, ratio

if TYPE_CHECKING:
    from benchmarks.lab import Lab, Site

_WHAT = """\
{jobs:,} jobs on hold, the worker as a service, the folder polled each second for {seconds} s after it had \
read them all. The cold start is `run --once` with these jobs, less an empty one, beside reading and parsing \
the files in plain Python."""
_POSTS = 100
_TICK = os.sysconf("SC_CLK_TCK")
_SETTLED = 0.05
_LONGEST = 60.0


def measure(lab: Lab) -> Section:
    """See `_WHAT`."""
    seconds = 10 if lab.scale.quick else 60
    jobs = 20_000 if lab.scale.quick else 100_000
    with lab.site(_POSTS) as site:
        empty = [timed(worker("run", "--once"), site.root, site.environment()) for _ in range(3)]
        say(f"held, writing {jobs:,} jobs")
        for number in range(jobs):
            partial = site.save(number, scheduledFor="2100-01-01T00:00:00Z")
            partial.rename(partial.with_suffix(".json"))
        os.sync()
        say("held, cold starts")
        full = [timed(worker("run", "--once"), site.root, site.environment()) for _ in range(3)]
        cold = [a - b for a, b in zip(full, empty, strict=True)]
        plain = [_read_all(site) for _ in range(3)]
        with daemon(site, BRITER_WORKER_POLL_INTERVAL_MS="1000") as process:
            settle(process.pid)
            say(f"held, watching for {seconds} s")
            before, began = _cpu(process.pid), time.perf_counter()
            time.sleep(seconds)
            minute = 60 * (_cpu(process.pid) - before) / (time.perf_counter() - began)
            memory = memory_of(process.pid, "VmRSS")
            peak = memory_of(process.pid, "VmHWM")
    return Section(
        f"Held: {jobs:,} jobs, polled each second",
        _WHAT.format(jobs=jobs, seconds=seconds),
        [
            Check("processor time of an idle minute", minute, " s", 0.5),
            Check("resident memory", memory, " MiB", 200),
            Check("cold start, of reading and json.loads", ratio(cold, plain), "×", 3),
        ],
        [
            Series("cold start", "ms", [1000 * each for each in cold]),
            Series("reading and json.loads", "ms", [1000 * each for each in plain]),
            Series("resident memory at most", "MiB", [peak]),
        ],
    )


def _read_all(site: Site) -> float:
    began = time.perf_counter()
    jobs = []
    with os.scandir(site.queue) as entries:
        for entry in entries:
            if entry.name.endswith(".json"):
                entry.stat(follow_symlinks=False)
                jobs.append(json.loads(Path(entry.path).read_bytes()))
    return time.perf_counter() - began


def settle(pid: int) -> None:
    """Wait until it has read them all: until half a second costs next to nothing."""
    deadline = time.monotonic() + _LONGEST
    time.sleep(2)
    while time.monotonic() < deadline:
        before = _cpu(pid)
        time.sleep(1)
        if _cpu(pid) - before <= _SETTLED:
            return


def _cpu(pid: int) -> float:
    """Seconds of processor time so far, those of its ended children included."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICK
