"""What many jobs on hold cost while nothing happens."""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.lab import daemon, memory_of, say, timed, wait_for, worker
from benchmarks.report import Check, Plot, Section, Series, ratio
from briter_worker.queues.disk import DiskQueue

if TYPE_CHECKING:
    import subprocess

    from benchmarks.lab import Lab, Site

_WHAT = """\
Jobs on hold, the worker as a service, the folder polled each second for {seconds} s after it had read them \
all. Where the kernel tells of every write, all files are looked at once in five minutes; a fifth of such a \
look, measured in a process of its own, is counted as part of a minute. A save of a post that is due, with \
these on hold: what the service and its git take of the processor. The cold start is `run --once` with them, \
less an empty one, beside reading and parsing the files in plain Python, in turns."""
_POSTS = 100
_TICK = os.sysconf("SC_CLK_TCK")
_SETTLED = 0.05
_LONGEST = 60.0
_LOOKS_PER_MINUTE = 1 / 5


def measure(lab: Lab) -> Section:
    """See `_WHAT`."""
    seconds = 5 if lab.scale.quick else 60
    counts = (0, 1_000, 5_000) if lab.scale.quick else (0, 1_000, 10_000, 100_000)
    jobs = counts[-1]
    idle: dict[int, float] = {}
    memory: dict[int, float] = {}
    saves: dict[int, float] = {}
    cold: list[float] = []
    plain: list[float] = []
    with lab.site(_POSTS) as site:
        there = 0
        for count in counts:
            say(f"held, {count:,} jobs")
            for number in range(there, count):
                partial = site.save(number, scheduledFor="2100-01-01T00:00:00Z")
                partial.rename(partial.with_suffix(".json"))
            there = count
            os.sync()
            wait = seconds if count == jobs else seconds / 4
            idle[count], look, saves[count], memory[count], peak = _watched(site, wait)
        say("held, cold starts")
        nowhere = site.environment(BRITER_QUEUE_ROOT=str(site.root / "empty"))
        for _ in range(3 if lab.scale.quick else 5):
            full = timed(worker("run", "--once"), site.root, site.environment())
            cold.append(1000 * (full - timed(worker("run", "--once"), site.root, nowhere)))
            plain.append(1000 * _read_all(site))
    return Section(
        f"Held: {jobs:,} jobs, polled each second",
        _WHAT.format(seconds=seconds),
        [
            Check("processor time of an idle minute", idle[jobs], " s", 0.5, headline=True),
            Check("resident memory", memory[jobs], " MiB", 200, headline=True),
            Check("cold start, of reading and json.loads", ratio(cold, plain), "×", 3, headline=True),
        ],
        [
            Series("cold start", "ms", cold),
            Series("reading and json.loads", "ms", plain),
            Series("a look at all files, processor time", "ms", [1000 * look]),
            Series("resident memory at most", "MiB", [peak]),
            *(Series(f"a save, {count:,} on hold", "s", [value]) for count, value in saves.items()),
            *(Series(f"an idle minute, {count:,} on hold", "s", [value]) for count, value in idle.items()),
            *(Series(f"resident, {count:,} on hold", "MiB", [value]) for count, value in memory.items()),
        ],
        plots=[
            Plot(
                "bench-idle",
                "What an idle minute costs",
                "jobs on hold",
                "seconds of processor time",
                {"the worker, polling each second": list(idle.items())},
            ),
            Plot(
                "bench-held-memory",
                "Memory of a service at rest",
                "jobs on hold",
                "MiB resident",
                {"the worker": list(memory.items())},
            ),
        ],
    )


def _watched(site: Site, seconds: float) -> tuple[float, float, float, float, float]:
    """Of a service: processor seconds of an idle minute, a look at all files, a save; MiB, also at most."""
    with daemon(site, BRITER_WORKER_POLL_INTERVAL_MS="1000") as process:
        settle(process.pid)
        before, began = _cpu(process.pid), time.perf_counter()
        time.sleep(seconds)
        minute = 60 * (_cpu(process.pid) - before) / (time.perf_counter() - began)
        look = _look(site)
        memory = memory_of(process.pid, "VmRSS"), memory_of(process.pid, "VmHWM")
        saves = [_save(site, process) for _ in range(3)]
    return minute + look * _LOOKS_PER_MINUTE, look, statistics.median(saves), *memory


def _look(site: Site) -> float:
    """Processor seconds of a look at all files, none of which has changed."""
    queue = DiskQueue(site.queue, site.root / "quarantine", max_attempts=8, longest_delay=1800.0)
    queue.next_due(time.time())
    queue.notice()
    before = time.process_time()
    queue.next_due(time.time())
    return time.process_time() - before


def _save(site: Site, process: subprocess.Popen[str]) -> float:
    path = site.edit(0)
    partial = site.queue / "due.tmp"
    partial.write_text(json.dumps({"id": "due", "slug": "due", "paths": [path]}), encoding="utf-8")
    before = _cpu(process.pid)
    partial.rename(partial.with_suffix(".json"))
    wait_for(process, "published")
    time.sleep(1)  # what follows its settlement is part of it
    return _cpu(process.pid) - before


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
