"""The drain and one new post where everything shares one processor, as in the smallest container."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from benchmarks import drain, latency
from benchmarks.lab import daemon, say
from benchmarks.report import Check, Section, Series, ratio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.lab import Lab

_WHAT = """\
The drain of {jobs} jobs and the latency of a new post, each in one folder of {posts:,} posts, measured as \
above with one difference: the worker, git and the remote share one processor. With two, git's processes and \
the remote's run beside the worker, which starts some of them ahead; on one, they wait for each other. Loose \
or packed objects, a disk or a file system in memory make no such difference."""
_REST_S = 0.2
_WARM_UP = 2


def measure(lab: Lab) -> Section:
    """Measure on the first processor of this process's."""
    posts, jobs, few, times, saves = (1_000, 100, 3, 2, 5) if lab.quick else (10_000, 200, 10, 3, 20)
    with _one_core():
        drained = _drains(lab, posts, {drain.OURS: jobs, drain.TEXTBOOK: few, drain.LIMIT: jobs}, times)
        saved = _saves(lab, posts, saves)
    series = [Series(name, "ms/job", values) for name, values in drained.items()]
    series += [Series(f"new post: {name}", "ms", values) for name, values in saved.items()]
    return Section(
        f"One processor: {jobs} jobs, or one new post, in {posts:,} posts",
        _WHAT.format(posts=posts, jobs=jobs),
        [
            Check(
                "jobs per second, relative to the textbook loop (higher is better)",
                ratio(drained[drain.TEXTBOOK], drained[drain.OURS]),
                "×",
                40,
                at_least=True,
            ),
            Check(
                "drain time, relative to hash-object + fast-import + push (lower is better)",
                ratio(drained[drain.OURS], drained[drain.LIMIT]),
                "×",
                1.3,
            ),
            Check(
                "new post: time relative to bare git (lower is better)",
                ratio(saved[latency.OURS], saved[latency.BARE]),
                "×",
                1.0,
            ),
        ],
        series,
    )


@contextmanager
def _one_core() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _drains(lab: Lab, posts: int, jobs: dict[str, int], times: int) -> dict[str, list[float]]:
    """Return the milliseconds per job of each way."""
    ways = {drain.OURS: drain.run_worker, drain.TEXTBOOK: drain.run_textbook, drain.LIMIT: drain.run_limit}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    for repetition in range(times):
        say(f"one processor, drain {repetition + 1} of {times}")
        for name in order:
            with lab.site(posts) as site:
                taken[name].append(1000 * ways[name](site, jobs[name]) / jobs[name])
        order.append(order.pop(0))
    return taken


def _saves(lab: Lab, posts: int, saves: int) -> dict[str, list[float]]:
    """Return the milliseconds of each new post, by the service and by git."""
    taken: dict[str, list[float]] = {latency.OURS: [], latency.BARE: []}
    with (
        lab.site(posts) as served,
        lab.site(posts) as plain,
        daemon(served.root, served.environment()) as process,
    ):
        ways: dict[str, Callable[[int], float]] = {
            latency.OURS: lambda number: latency.save(served, process, number),
            latency.BARE: lambda number: latency.commit(plain, number),
        }
        order = list(ways)
        for turn in range(saves + _WARM_UP):
            for name in order:
                took = 1000 * ways[name](posts + turn)
                if turn >= _WARM_UP:
                    taken[name].append(took)
                time.sleep(_REST_S)
            order.append(order.pop(0))
    return taken
