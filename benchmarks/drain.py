"""Many due jobs at once: the worker, GitPython's textbook loop, and the limit that git sets."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from benchmarks.lab import commit_job, say, timed, worker
from benchmarks.report import Check, Section, Series, ratio

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.lab import Lab, Site

_WHAT = """\
{jobs} due jobs, each an edit of one post, in one folder of {posts:,} posts; a bare remote on the same disk; \
each repetition in a fresh copy. Ours is the whole process `python -m briter_worker run --once`, start-up \
included; the others are measured without the start of Python. The textbook loop is `index.add`, \
`index.commit` and `push` of GitPython for each job, on {few} jobs. The limit is one `git hash-object`, one \
`git fast-import` and one `git push`: the fewest commands that write one commit per job."""
OURS = "ours: run --once"
TEXTBOOK = "textbook: GitPython add, commit, push per job"
LIMIT = "limit: hash-object, fast-import, one push"


def measure(lab: Lab) -> Section:
    """Measure each way in turns."""
    posts, jobs, few, times = (1_000, 100, 3, 2) if lab.quick else (10_000, 200, 10, 5)
    ways: dict[str, tuple[Callable[[Site, int], float], int]] = {
        OURS: (run_worker, jobs),
        TEXTBOOK: (run_textbook, few),
        LIMIT: (run_limit, jobs),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    for repetition in range(times):
        say(f"drain, repetition {repetition + 1} of {times}")
        for name in order:
            way, count = ways[name]
            with lab.site(posts) as site:
                before = site.count_commits()
                taken[name].append(1000 * way(site, count) / count)
                if site.count_commits() != before + count:
                    raise RuntimeError(f"{name}: not every job became a commit on the remote")
        order.append(order.pop(0))
    return Section(
        f"Drain: {jobs} jobs in {posts:,} posts",
        _WHAT.format(jobs=jobs, posts=posts, few=few),
        [
            Check(
                "jobs per second, relative to the textbook loop (higher is better)",
                ratio(taken[TEXTBOOK], taken[OURS]),
                "×",
                40,
                at_least=True,
            ),
            Check(
                "drain time, relative to hash-object + fast-import + push (lower is better)",
                ratio(taken[OURS], taken[LIMIT]),
                "×",
                1.3,
            ),
        ],
        [Series(name, "ms/job", values) for name, values in taken.items()],
    )


def run_worker(site: Site, jobs: int, **env: str) -> float:
    """Publish with the worker, as cron starts it, with `env` on top of the settings."""
    for number in range(jobs):
        site.edit(number)
        commit_job(site.prepare_job(number, message=f"Publish post {number}"))
    return timed(worker("run", "--once"), site.root, site.environment(**env))


def run_limit(site: Site, jobs: int) -> float:
    """Publish the same commits with the fewest commands that respect filters."""
    paths = [site.edit(number) for number in range(jobs)]
    tip = site.git("rev-parse", "main")
    began = time.perf_counter()
    blobs = site.git("hash-object", "-w", "--stdin-paths", stdin="\n".join(paths)).split()
    stream = []
    for number, (blob, path) in enumerate(zip(blobs, paths, strict=True)):
        message = f"Publish post {number}"
        person = f"A Person <person@example.org> {int(time.time())} +0000"
        start = f"from {tip}\n" if number == 0 else ""
        stream.append(
            f"commit refs/heads/new\nauthor {person}\ncommitter {person}\n"
            f"data {len(message)}\n{message}\n{start}M 100644 {blob} {path}\n"
        )
    site.git("fast-import", "--quiet", stdin="".join(stream))
    site.git("push", "--quiet", "origin", "refs/heads/new:refs/heads/main")
    return time.perf_counter() - began


def run_textbook(site: Site, jobs: int) -> float:
    """Publish as GitPython's tutorial teaches."""
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
