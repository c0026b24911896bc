"""From the save of one post to its commit on the remote, on a service that had nothing to do."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from typing import TYPE_CHECKING

from benchmarks.lab import FOLDER, daemon, say, wait_for
from benchmarks.report import Check, Plot, Section, Series, ratio

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.lab import Lab, Site

_WHAT = """\
One post saved (the rename of its job file) in a folder of {posts:,} posts, until the bare remote's branch \
has moved; the worker runs as a service and is idle. Bare git is `git add`, `git commit`, `git push`, from \
the start of the first command until the branch has moved. They take turns. gitwatch, where it is installed, \
is told to wait for nothing (`-s 0`; by default it waits for two seconds), and is given the post alone."""
_LONGEST = 60.0
_FEW = 20
OURS, BARE, WATCHED = "save to remote", "git add, commit, push", "gitwatch -s 0"


def measure(lab: Lab) -> Section:
    """See `_WHAT`."""
    posts = lab.scale.posts
    saves = 10 if lab.scale.quick else 100
    say(f"latency, {saves} saves each")
    taken: dict[str, list[float]] = {OURS: [], BARE: []}
    with lab.site(posts) as served, lab.site(posts) as plain, daemon(served) as process:
        for number in range(saves + 2):
            taken[OURS].append(1000 * save(served, process, number))
            time.sleep(0.2)
            taken[BARE].append(1000 * commit(plain, number))
            time.sleep(0.2)
    notes = []
    gitwatch = shutil.which("gitwatch") or shutil.which("gitwatch.sh")
    if gitwatch and shutil.which("inotifywait"):
        say("latency, gitwatch")
        with lab.site(posts) as watched:
            taken[WATCHED] = _watched(watched, gitwatch, min(saves, _FEW) + 2)
    else:
        notes.append(
            "gitwatch: not measured: it is in neither Debian, PyPI nor npm (what is called so there is "
            "something else); put its script and inotify-tools on the PATH to have it measured."
        )
    # The first ones warm up: imports here, packed refs there.
    series = {name: Series(name, "ms", values[2:]) for name, values in taken.items()}
    mine, theirs = series[OURS], series[BARE]
    return Section(
        "Latency: one save, idle service",
        _WHAT.format(posts=posts),
        [
            Check("median, of bare git's", ratio(mine.values, theirs.values), "×", 1.3, headline=True),
            Check("99th percentile, of bare git's", mine.p99 / theirs.p99, "×", 2, headline=True),
        ],
        [
            *series.values(),
            *(Series(f"{name}, 99th percentile", "ms", [each.p99]) for name, each in series.items()),
        ],
        notes,
        [
            Plot(
                "bench-latency",
                f"From save to remote, {posts:,} posts",
                "milliseconds",
                "% of saves done by then",
                {name: _shares(each.values) for name, each in series.items()},
            )
        ],
    )


def _shares(values: Sequence[float]) -> list[tuple[float, float]]:
    ordered = sorted(values)
    return [(value, 100 * (number + 1) / len(ordered)) for number, value in enumerate(ordered)]


def _watched(site: Site, gitwatch: str, saves: int) -> list[float]:
    """Milliseconds from the edit of a post to the remote."""
    command = [gitwatch, "-s", "0", "-r", "origin", "-b", "main", str(site.worktree / FOLDER)]
    process = subprocess.Popen(
        command,
        cwd=site.worktree,
        env=site.env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        time.sleep(2)  # it says nothing when its watch stands
        taken = []
        for number in range(saves):
            before, began = tip(site.remote), time.perf_counter()
            site.edit(number)
            taken.append(1000 * (moved(site.remote, before) - began))
            time.sleep(0.5)  # until it waits again
        return taken
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def save(site: Site, process: subprocess.Popen[str], number: int) -> float:
    """Seconds from the save to the remote, by the service."""
    site.edit(number)
    partial = site.save(number)
    before = tip(site.remote)
    began = time.perf_counter()
    partial.rename(partial.with_suffix(".json"))
    took = moved(site.remote, before) - began
    wait_for(process, "published")
    return took


def commit(site: Site, number: int) -> float:
    """Seconds from the first command to the remote, by git."""
    path = site.edit(number)
    before = tip(site.remote)
    began = time.perf_counter()
    site.git("add", "--", path)
    site.git("commit", "--quiet", f"--message=Publish post {number}")
    push = ["git", "push", "--quiet", "origin", "main"]
    with subprocess.Popen(push, cwd=site.worktree, env=site.env):
        return moved(site.remote, before) - began


def tip(remote: Path) -> bytes:
    """What the branch is, at the remote."""
    try:
        return (remote / "refs" / "heads" / "main").read_bytes()
    except FileNotFoundError:
        return b""  # packed, until the first push


def moved(remote: Path, before: bytes) -> float:
    """The moment at which the branch is another."""
    began = time.perf_counter()
    while tip(remote) == before:
        time.sleep(0.0005)
        if time.perf_counter() - began > _LONGEST:
            raise RuntimeError("the save did not reach the remote")
    return time.perf_counter()
