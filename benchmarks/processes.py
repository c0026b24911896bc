"""How many git processes one drain takes, which must not depend on how many jobs it publishes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.drain import enqueue
from benchmarks.lab import say, timed, worker
from benchmarks.report import Check, Section, Series

if TYPE_CHECKING:
    from benchmarks.lab import Lab

_WHAT = """\
Counted by git itself (`trace2.eventTarget`), for drains of {sizes} jobs: the commands that the worker \
starts, and with them those that git starts in turn, on both sides of the push. By its clock, too: how long \
each command ran in the drain of {most} jobs in {posts:,} posts, with what it starts in turn; the rest is \
the worker's own. `cat-file` and `update-ref` stand by to be asked, and are part of that rest."""
_STANDING_BY = {"cat-file", "update-ref"}
_SIZES = (1, 10, 200)


@dataclass(frozen=True, slots=True)
class _Trace:
    commands: dict[str, float]
    """Of those that the worker started, milliseconds by name; a repeated one has a number."""
    processes: int
    milliseconds: float
    """Of the whole drain."""


def measure(lab: Lab) -> Section:
    """See `_WHAT`."""
    say("processes")
    traces = {size: _traced(lab, size) for size in _SIZES}
    started = [len(trace.commands) for trace in traces.values()]
    everything = [trace.processes for trace in traces.values()]
    last = traces[_SIZES[-1]]
    ran = {f"git {name}": took for name, took in last.commands.items() if name not in _STANDING_BY}
    ran["the worker itself"] = last.milliseconds - sum(ran.values())
    return Section(
        "Git processes of one drain",
        _WHAT.format(sizes=", ".join(map(str, _SIZES)), most=_SIZES[-1], posts=lab.scale.posts),
        [
            Check("grown by, commands started", max(started) - started[0], "", 0),
            Check("commands started for one job", started[0], "", 12),
        ],
        [
            *(Series(f"ran: {name}", "ms", [took]) for name, took in ran.items()),
            *(
                each
                for size, ours, total in zip(_SIZES, started, everything, strict=True)
                for each in (
                    Series(f"{size} jobs, commands started", "", [ours]),
                    Series(f"{size} jobs, with what git starts in turn", "", [total]),
                )
            ),
        ],
    )


def _traced(lab: Lab, jobs: int) -> _Trace:
    with lab.site(lab.scale.posts) as site:
        enqueue(site, jobs)
        traces = site.root / "traces"
        traces.mkdir()
        home = site.root / "home"
        home.mkdir()
        (home / ".gitconfig").write_text(f"[trace2]\n\teventTarget = {traces}\n", encoding="utf-8")
        took = timed(worker("run", "--once"), site.root, site.environment(HOME=str(home)))
        files = sorted(traces.iterdir())
        commands: dict[str, float] = {}
        for file in files:
            events = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            if "/" in events[0]["sid"]:
                continue  # another git started it
            name = next((event["name"] for event in events if event["event"] == "cmd_name"), "?")
            same = sum(each.split(",")[0] == name for each in commands)
            commands[f"{name}, {same + 1}" if same else name] = 1000 * events[-1].get("t_abs", 0.0)
        return _Trace(commands, len(files), 1000 * took)
