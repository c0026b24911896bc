"""The queue alone: a job put in, taken and done, without git."""  # noqa: A005 - in a package of its own

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from benchmarks import others, postgres
from benchmarks.lab import say
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
its folder as well, as `enqueue()` does, so that the name survives a power cut, too. Procrastinate's jobs \
are put in one by one, then taken by one worker, in a Postgres that flushes. Looking at a folder is beside \
`scandir` alone, for {many:,} jobs on hold of which none has changed."""
_BARE = "write + fsync + rename"
_DURABLE = "write + fsync + rename + fsync of the folder"
_ROWS = "persist-queue, SQLite"
_POSTGRES = "Procrastinate, Postgres"


def measure(lab: Lab) -> Section:
    """See `_WHAT`."""
    jobs, times, many = (20, 2, 2_000) if lab.scale.quick else (200, 5, 20_000)
    ways: dict[str, Callable[[Path, int], float]] = {
        _BARE: lambda folder, count: _limit(folder, count, sync_folder=False),
        _DURABLE: lambda folder, count: _limit(folder, count, sync_folder=True),
        "enqueue()": _enqueue,
        "ours, job by job": _one_by_one,
        "ours, all at once": _at_once,
    }
    taken: dict[str, list[float]] = {}
    notes: list[str] = []
    with ExitStack() as stack:
        others.python(lab)
        try:
            connection = stack.enter_context(postgres.server(lab))
        except postgres.MissingError as why:
            connection = None
            notes.append(f"Procrastinate: not measured: {why}")
        say(f"queue, {times} times {jobs} jobs each")
        for turn in range(times):
            for number, (name, way) in enumerate(ways.items()):
                folder = lab.root / f"queue-{turn}-{number}"
                folder.mkdir()
                taken.setdefault(name, []).append(1000 * way(folder, jobs) / jobs)
            folder = lab.root / f"peers-{turn}"
            folder.mkdir()
            told = json.loads(others.script(lab, "peers.py", folder, jobs))
            if connection is not None:
                told[_POSTGRES] = float(others.script(lab, "procrastinated.py", connection, jobs))
            for name, seconds in told.items():
                taken.setdefault(name, []).append(1000 * seconds / jobs)
    looks = _looks(lab, many, times)
    batched = taken["ours, all at once"]
    checks = [
        Check("enqueue(), of write + fsync + rename", ratio(taken["enqueue()"], taken[_BARE]), "×", 1.5),
        Check(
            "enqueue(), of the same with the folder flushed, too",
            ratio(taken["enqueue()"], taken[_DURABLE]),
            "×",
            1.5,
            headline=True,
        ),
        Check("all at once, of persist-queue on SQLite", ratio(batched, taken[_ROWS]), "×", 1),
    ]
    if _POSTGRES in taken:
        checks.append(Check("all at once, of Procrastinate", ratio(batched, taken[_POSTGRES]), "×", 1))
    return Section(
        "Queue: put in, taken, done, without git",
        _WHAT.format(jobs=jobs, many=many),
        checks,
        [
            *(Series(name, "ms a job", values) for name, values in taken.items()),
            *(Series(f"{name}, {many:,} jobs", "ms", values) for name, values in looks.items()),
        ],
        notes,
    )


def _looks(lab: Lab, jobs: int, times: int) -> dict[str, list[float]]:
    """Milliseconds that a look at a folder takes."""
    folder = lab.root / "queue-looks"
    folder.mkdir()
    queue = _queue(folder)
    for number in range(jobs):
        document = {
            "slug": f"post-{number}",
            "paths": ["content/posts/post.md"],
            "scheduledFor": "2100-01-01",
        }
        (folder / "queue" / f"{number}.json").write_text(json.dumps(document), encoding="utf-8")
    time.sleep(0.1)  # what has just been written is looked at again
    queue.claim(time.time())
    ways: dict[str, Callable[[], object]] = {
        "a poll, nothing noticed": lambda: queue.claim(time.time()),
        "a look at every file, none changed": lambda: _look(queue),
        "scandir and a stat of each": lambda: [
            entry.stat(follow_symlinks=False) for entry in os.scandir(folder / "queue")
        ],
        "scandir alone": lambda: list(os.scandir(folder / "queue")),
    }
    taken: dict[str, list[float]] = {}
    for _ in range(times):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            taken.setdefault(name, []).append(1000 * (time.perf_counter() - began))
    return taken


def _look(queue: DiskQueue) -> None:
    queue.notice()
    queue.claim(time.time())


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
