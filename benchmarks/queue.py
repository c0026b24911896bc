"""The queue alone: a job put in, taken and done, without git."""  # noqa: A005 - in a package of its own

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from benchmarks.lab import PROJECT, say
from benchmarks.report import Check, Section, Series, ratio
from briter_worker.client import enqueue
from briter_worker.queues.disk import DiskQueue

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.lab import Lab

_WHAT = """\
{jobs} jobs each, in turns, in fresh folders of one file system: put in, taken, done. Ours flushes each job \
and each folder to the disk, counts the attempt durably before the work, and keeps one job per post, which \
no other does. The limit of `enqueue()` is writing, flushing and renaming one file; the second one flushes \
its folder as well, as `enqueue()` does, so that the name survives a power cut, too."""


def measure(lab: Lab) -> Section:
    """See `_WHAT`."""
    jobs, times = (50, 3) if lab.scale.quick else (200, 7)
    python = _peers(lab)
    ways: dict[str, Callable[[Path, int], float]] = {
        "write + fsync + rename": lambda folder, count: _limit(folder, count, sync_folder=False),
        "write + fsync + rename + fsync of the folder": lambda folder, count: _limit(
            folder, count, sync_folder=True
        ),
        "enqueue()": _enqueue,
        "ours, job by job": _one_by_one,
        "ours, all at once": _at_once,
    }
    taken: dict[str, list[float]] = {}
    say(f"queue, {times} times {jobs} jobs each")
    for turn in range(times):
        for number, (name, way) in enumerate(ways.items()):
            folder = lab.root / f"queue-{turn}-{number}"
            folder.mkdir()
            taken.setdefault(name, []).append(1000 * way(folder, jobs) / jobs)
        folder = lab.root / f"peers-{turn}"
        folder.mkdir()
        told = _run([python, str(PROJECT / "benchmarks" / "peers.py"), str(folder), str(jobs)], lab)
        for name, seconds in json.loads(told).items():
            taken.setdefault(name, []).append(1000 * seconds / jobs)
    bare, durable = taken["write + fsync + rename"], taken["write + fsync + rename + fsync of the folder"]
    batched, rows = taken["ours, all at once"], taken["persist-queue, SQLite"]
    return Section(
        "Queue: put in, taken, done, without git",
        _WHAT.format(jobs=jobs),
        [
            Check("enqueue(), of write + fsync + rename", ratio(taken["enqueue()"], bare), "×", 1.5),
            Check("enqueue(), with the folder flushed as well", ratio(taken["enqueue()"], durable), "×", 1.5),
            Check("all at once, of persist-queue on SQLite", ratio(batched, rows), "×", 1),
        ],
        [Series(name, "ms a job", values) for name, values in taken.items()],
    )


def _peers(lab: Lab) -> str:
    """The Python of an environment that has them, in the bench's folder; gone with it."""
    say("queue, installing what it is compared with")
    place = lab.root / "peers"
    _run([sys.executable, "-m", "venv", str(place)], lab)
    python = str(place / "bin" / "python")
    wanted = ["--requirement", str(PROJECT / "benchmarks" / "peers.txt")]
    # pip's own settings (an index of one's own) are the user's to have.
    _run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted], None)
    return python


def _run(command: list[str], lab: Lab | None) -> str:
    env = dict(os.environ) if lab is None else lab.env
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def _limit(folder: Path, jobs: int, *, sync_folder: bool) -> float:
    data = json.dumps({"id": "job", "slug": "post", "paths": ["content/posts/post.md"]}, indent=2).encode()
    began = time.perf_counter()
    for number in range(jobs):
        descriptor = os.open(folder / f".{number}.tmp", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        os.write(descriptor, data)
        os.fsync(descriptor)
        os.close(descriptor)
        os.rename(folder / f".{number}.tmp", folder / f"{number}.json")  # noqa: PTH104 - the bare limit
        if sync_folder:
            descriptor = os.open(folder, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    return time.perf_counter() - began


def _enqueue(folder: Path, jobs: int) -> float:
    began = time.perf_counter()
    for number in range(jobs):
        enqueue(f"post-{number}", [f"content/posts/{number}.md"], message="Publish", queue=folder)
    return time.perf_counter() - began


def _one_by_one(folder: Path, jobs: int) -> float:
    queue = _queue(folder)
    began = time.perf_counter()
    for number in range(jobs):
        enqueue(f"post-{number}", [f"content/posts/{number}.md"], message="Publish", queue=folder / "queue")
        _take(queue, 1)
    return time.perf_counter() - began


def _at_once(folder: Path, jobs: int) -> float:
    queue = _queue(folder)
    began = time.perf_counter()
    _enqueue(folder / "queue", jobs)
    _take(queue, jobs)
    return time.perf_counter() - began


def _queue(folder: Path) -> DiskQueue:
    (folder / "queue").mkdir()
    return DiskQueue(folder / "queue", folder / "quarantine", max_attempts=8, longest_delay=1800.0)


def _take(queue: DiskQueue, jobs: int) -> None:
    queue.notice()
    batch = queue.claim(time.time()).batch
    if batch is None or len(batch.claims) != jobs:
        raise RuntimeError("a job is lost")
    queue.finish(batch, batch.claims)
    queue.close(batch)
