"""How many git processes one drain takes, which must not depend on how many jobs it publishes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from benchmarks.drain import enqueue
from benchmarks.lab import say, timed, worker
from benchmarks.report import Check, Section, Series

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.lab import Lab

_WHAT = """\
Counted by git itself (`trace2.eventTarget`), for drains of {sizes} jobs: the commands that the worker \
starts, and with them those that git starts in turn, on both sides of the push."""
_SIZES = (1, 10, 200)
_POSTS = 1_000


def measure(lab: Lab) -> Section:
    """See `_WHAT`."""
    say("processes")
    counts = {size: _count(lab, size) for size in _SIZES}
    started = [len(commands) for commands, _ in counts.values()]
    everything = [total for _, total in counts.values()]
    return Section(
        "Git processes of one drain",
        _WHAT.format(sizes=", ".join(map(str, _SIZES))),
        [
            Check("grown by, commands started", max(started) - started[0], "", 0),
            Check("commands started for one job", started[0], "", 12, 6),
        ],
        [
            each
            for size, ours, total in zip(_SIZES, started, everything, strict=True)
            for each in (
                Series(f"{size} jobs, commands started", "", [ours]),
                Series(f"{size} jobs, with what git starts in turn", "", [total]),
            )
        ],
    )


def _count(lab: Lab, jobs: int) -> tuple[list[str], int]:
    with lab.site(_POSTS) as site:
        enqueue(site, jobs)
        traces = site.root / "traces"
        traces.mkdir()
        home = site.root / "home"
        home.mkdir()
        (home / ".gitconfig").write_text(f"[trace2]\n\teventTarget = {traces}\n", encoding="utf-8")
        timed(worker("run", "--once"), site.root, site.environment(HOME=str(home)))
        commands = [command for file in traces.iterdir() if (command := _command(file))]
        return commands, len(list(traces.iterdir()))


def _command(trace: Path) -> str | None:
    """The git command that the worker started; None for one that another git started."""
    events = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
    if "/" in events[0]["sid"]:
        return None
    return next((event["name"] for event in events if event["event"] == "cmd_name"), "?")
