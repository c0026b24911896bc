"""From the save of one post to its commit on the remote, on a service that had nothing to do."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from benchmarks.lab import FOLDER, daemon, git, say, wait_for
from benchmarks.report import Check, Plot, Section, Series, ratio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from benchmarks.lab import Lab, Site

_WHAT = """\
One post saved (the rename of its job file) in a folder of {posts:,} posts, until the bare remote's branch \
has moved; the worker runs as a service and is idle. Bare git is `git add`, `git commit`, `git push`, from \
the start of the first command until the branch has moved. gitwatch (`gitwatch.sh` of \
github.com/gitwatch/gitwatch, with inotify-tools), where it is on the PATH, watches the folder of posts and \
is told to wait for nothing (`-s 0`; by default it waits for two seconds); its time begins with the edit of \
the post, as it needs no job. They take turns, each in a site of its own."""
_LONGEST = 60.0
_REST = 0.2
"""Seconds between two saves. A service has then nothing to do, nor has gitwatch: it is quiet after a push."""
_NO_GITWATCH = (
    "gitwatch: not measured: it is in neither Debian, PyPI nor npm (what is called so there is something "
    "else). With gitwatch.sh of github.com/gitwatch/gitwatch and with inotify-tools on the PATH, it is."
)
OURS, BARE, WATCHED = "ours: save to remote", "git add, commit, push", "gitwatch -s 0"


def measure(lab: Lab) -> Section:
    """See `_WHAT`."""
    posts = lab.scale.posts
    saves = 10 if lab.scale.quick else 100
    say(f"latency, {saves} saves each")
    taken: dict[str, list[float]] = {OURS: [], BARE: []}
    notes: list[str] = []
    with ExitStack() as stack:
        served, plain = (stack.enter_context(lab.site(posts)) for _ in range(2))
        process = stack.enter_context(daemon(served))
        ways: dict[str, Callable[[int], float]] = {
            OURS: lambda number: save(served, process, number),
            BARE: lambda number: commit(plain, number),
        }
        if gitwatch := _gitwatch():
            watched = stack.enter_context(lab.site(posts))
            stack.enter_context(_watching(watched, gitwatch))
            ways[WATCHED] = lambda number: _watch(watched, number)
            notes.append(f"gitwatch: its script is git's blob {plain.git('hash-object', gitwatch)[:12]}.")
        else:
            notes.append(_NO_GITWATCH)
        for number in range(saves + 2):
            for name, way in ways.items():
                taken.setdefault(name, []).append(1000 * way(number))
                time.sleep(_REST)
    # The first ones warm up: imports here, packed refs there.
    series = {name: Series(name, "ms", values[2:]) for name, values in taken.items()}
    mine, theirs = series[OURS], series[BARE]
    beside = []
    if WATCHED in series:
        beside = [Check("median, of gitwatch's", ratio(mine.values, series[WATCHED].values), "×", 1)]
    return Section(
        "Latency: one save, idle service",
        _WHAT.format(posts=posts),
        [
            Check("median, of bare git's", ratio(mine.values, theirs.values), "×", 1.3, headline=True),
            Check("99th percentile, of bare git's", mine.p99 / theirs.p99, "×", 2, headline=True),
            *beside,
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


def _gitwatch() -> str | None:
    """Its script, where it and what it needs are installed."""
    script = shutil.which("gitwatch") or shutil.which("gitwatch.sh")
    return script if shutil.which("inotifywait") else None


@contextmanager
def _watching(site: Site, gitwatch: str) -> Iterator[None]:
    """It watches the site's posts."""
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
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def _watch(site: Site, number: int) -> float:
    """Seconds from the edit of a post to the remote, by gitwatch; the whole edit must be there, at once."""
    before, began = tip(site.remote), time.perf_counter()
    path = site.edit(number)
    took = moved(site.remote, before) - began
    written = (site.worktree / path).read_text(encoding="utf-8").strip()
    if git(("show", f"main:{path}"), site.remote, site.env) != written:
        raise RuntimeError("gitwatch pushed half of an edit")
    return took


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
