"""Many due jobs at once: ours, what a user would pick instead, and the limit that git sets."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from benchmarks.lab import say, timed, worker
from benchmarks.report import Check, Section, Series, ratio

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.lab import Lab, Site

_WHAT = """\
{jobs} due jobs in one folder of {posts:,} posts, a bare remote on the same disk, each repetition in a \
fresh copy. Ours is the whole process `python -m briter_worker run --once`, start-up included. The ways \
that push per job are measured on {few} jobs, without start-up, and compared per job."""


def measure(lab: Lab) -> Section:
    """See `_WHAT`."""
    scale = lab.scale
    few = 8 if scale.quick else 20
    ways: dict[str, tuple[Callable[[Site, int], float], int]] = {
        "ours: run --once": (ours, scale.jobs),
        "the limit: hash-object, fast-import, push": (limit, scale.jobs),
        "the same, contents inlined: fast-import, push": (limit_inlined, scale.jobs),
        "GitPython's textbook loop": (textbook, few),
        "git add, commit, push per job": (commands, few),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    for repetition in range(scale.repetitions):
        say(f"drain, repetition {repetition + 1} of {scale.repetitions}")
        for name in order:
            way, jobs = ways[name]
            with lab.site(scale.posts) as site:
                before = site.published()
                taken[name].append(1000 * way(site, jobs) / jobs)
                if site.published() != before + jobs:
                    raise RuntimeError(f"{name}: not every job became a commit on the remote")
        order.append(order.pop(0))
    mine, bare, inlined, loop, cli = taken.values()
    return Section(
        f"Drain: {scale.jobs} jobs, {scale.posts:,} posts",
        _WHAT.format(jobs=scale.jobs, posts=scale.posts, few=few),
        [
            Check(
                "faster per job than GitPython's textbook loop", ratio(loop, mine), "×", 40, 45, at_least=True
            ),
            Check(
                "faster per job than git commands, push per job", ratio(cli, mine), "×", 8, 12, at_least=True
            ),
            Check("time, of the limit's (hash-object)", ratio(mine, bare), "×", 2, 1.15),
            Check("time, of the limit's with contents inlined", ratio(mine, inlined), "×", 3, 1.5),
        ],
        [Series(name, "ms/job", values) for name, values in taken.items()],
    )


def ours(site: Site, jobs: int) -> float:
    """The worker, as cron starts it."""
    enqueue(site, jobs)
    return timed(worker("run", "--once"), site.root, site.environment())


def enqueue(site: Site, jobs: int) -> None:
    """That many posts edited, and due."""
    for number in range(jobs):
        site.edit(number)
        partial = site.save(number, message=f"Publish post {number}")
        partial.rename(partial.with_suffix(".json"))


def limit(site: Site, jobs: int) -> float:
    """The same commits by the fewest commands that respect filters."""
    paths = [site.edit(number) for number in range(jobs)]
    tip = site.git("rev-parse", "main")
    began = time.perf_counter()
    blobs = site.git("hash-object", "-w", "--stdin-paths", stdin="\n".join(paths)).split()
    changes = [f"M 100644 {blob} {path}\n" for blob, path in zip(blobs, paths, strict=True)]
    site.git("fast-import", "--quiet", stdin=_stream(tip, [("", change) for change in changes]))
    site.git("push", "--quiet", "origin", "refs/heads/new:refs/heads/main")
    return time.perf_counter() - began


def limit_inlined(site: Site, jobs: int) -> float:
    """The same commits, their contents in fast-import's stream: no loose object, no filter."""
    paths = [site.edit(number) for number in range(jobs)]
    tip = site.git("rev-parse", "main")
    began = time.perf_counter()
    parts = []
    for number, path in enumerate(paths, 1001):
        text = (site.worktree / path).read_text(encoding="utf-8")
        blob = f"blob\nmark :{number}\ndata {len(text.encode())}\n{text}\n"
        parts.append((blob, f"M 100644 :{number} {path}\n"))
    site.git("fast-import", "--quiet", stdin=_stream(tip, parts))
    site.git("push", "--quiet", "origin", "refs/heads/new:refs/heads/main")
    return time.perf_counter() - began


def _stream(tip: str, parts: list[tuple[str, str]]) -> str:
    commits = []
    for number, (before, change) in enumerate(parts):
        message = f"Publish post {number}"
        person = f"A Person <person@example.org> {int(time.time())} +0000"
        start = f"from {tip}\n" if number == 0 else ""
        commits.append(
            f"{before}commit refs/heads/new\nauthor {person}\ncommitter {person}\n"
            f"data {len(message)}\n{message}\n{start}{change}"
        )
    return "".join(commits)


def textbook(site: Site, jobs: int) -> float:
    """What GitPython's tutorial teaches."""
    import git  # noqa: PLC0415 - its import is not measured

    paths = [site.edit(number) for number in range(jobs)]
    with git.Repo(site.worktree) as repo:
        repo.git.update_environment(**site.env)
        began = time.perf_counter()
        for number, path in enumerate(paths):
            repo.index.add([path])
            repo.index.commit(f"Publish post {number}")
            repo.remote("origin").push("main").raise_if_error()
        return time.perf_counter() - began


def commands(site: Site, jobs: int) -> float:
    """What a shell script does."""
    paths = [site.edit(number) for number in range(jobs)]
    began = time.perf_counter()
    for number, path in enumerate(paths):
        site.git("add", "--", path)
        site.git("commit", "--quiet", f"--message=Publish post {number}")
        site.git("push", "--quiet", "origin", "main")
    return time.perf_counter() - began
