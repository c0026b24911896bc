"""The cost of a command that finds nothing to do, as cron starts it each minute."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from benchmarks.lab import say, timed, worker
from benchmarks.report import Check, Section, Series, ratio

if TYPE_CHECKING:
    from benchmarks.lab import Lab

_WHAT = """\
Whole processes of one interpreter, in turns, in a site of {posts} posts with an empty queue. The reference \
imports the libraries that the worker is asked to use, and ends."""
_POSTS = 100
OURS = "ours: run --once, nothing due"
REFERENCE = "python -c 'import git, filelock, pydantic_settings, psutil, typer'"


def measure(lab: Lab) -> Section:
    """Measure both in turns."""
    times = 5 if lab.quick else 25
    say(f"start, {times} times each")
    imports = "import git, filelock, pydantic_settings, psutil, typer"
    ways = {OURS: worker("run", "--once"), REFERENCE: [sys.executable, "-c", imports]}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    with lab.site(_POSTS) as site:
        for turn in range(times + 1):
            for name, command in ways.items():
                took = 1000 * timed(command, site.root, site.environment())
                if turn:  # the first run compiles
                    taken[name].append(took)
    return Section(
        "Start: nothing to do",
        _WHAT.format(posts=_POSTS),
        [
            Check(
                "run --once: time relative to importing the libraries (lower is better)",
                ratio(taken[OURS], taken[REFERENCE]),
                "×",
                1.3,
            )
        ],
        [Series(name, "ms", values) for name, values in taken.items()],
    )
