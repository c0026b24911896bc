"""What a command costs that finds nothing to do, as cron starts it each minute."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from benchmarks.lab import FOLDER, say, timed, worker
from benchmarks.report import Check, Section, Series, ratio

if TYPE_CHECKING:
    from benchmarks.lab import Lab

_WHAT = """\
Whole processes, taking turns, in a site of {posts} posts whose queue is empty (but for what `enqueue` puts \
there, on hold). The imports show what a command pays for a library: `run --once` loads filelock alone, and \
`enqueue` none."""
_LIBRARIES = ("filelock", "typer", "pydantic", "git")
_POSTS = 100


def measure(lab: Lab) -> Section:
    """See `_WHAT`."""
    times = 5 if lab.scale.quick else 25
    say(f"start, {times} times each")
    with lab.site(_POSTS) as site:
        live, dry = site.environment(), site.environment(BRITER_WORKER_DRY_RUN="true")
        queued = site.environment(BRITER_QUEUE_ROOT=str(site.root / "queued"))
        job = ("enqueue", "some-post", f"{FOLDER}/post-000001.md", "-m", "Publish", "--at", "2100-01-01")
        ways = {
            "python -c pass": ([sys.executable, "-c", "pass"], live),
            "run --once, live, nothing due": (worker("run", "--once"), live),
            "run --once, dry, nothing due": (worker("run", "--once"), dry),
            "enqueue": (worker(*job), queued),
            **{f"import {name}": ([sys.executable, "-c", f"import {name}"], live) for name in _LIBRARIES},
        }
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(times + 1):
            for name, (command, env) in ways.items():
                took = 1000 * timed(command, site.root, env)
                if turn:  # the first one compiles
                    taken[name].append(took)
    floor = taken["python -c pass"]
    ours = [name for name in taken if name.startswith(("run", "enqueue"))]
    return Section(
        "Start: nothing to do",
        _WHAT.format(posts=_POSTS),
        [Check(f"{name}, of python -c pass", ratio(taken[name], floor), "×", 10) for name in ours],
        [Series(name, "ms", values) for name, values in taken.items()],
    )
