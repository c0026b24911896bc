"""From the save of one post to its commit on the remote, with an idle service."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import TYPE_CHECKING

from benchmarks.lab import FOLDER, commit_job, daemon, say, wait_for, wait_until
from benchmarks.report import Check, Section, Series, ratio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from benchmarks.lab import Lab, Site

_WHAT = """\
One post saved (the rename of its job file) until the bare remote's branch has moved; the worker runs as a \
service and is idle. Bare git is `git add`, `git commit` and `git push`, from the start of the first command \
until the branch has moved. An edit changes a post; a new post is a file that the branch does not have. All \
take turns, each in a site of its own. `run --watch` and gitwatch (gitwatch.sh with inotify-tools, `-s 0`) \
are measured from the edit of the post, and only where gitwatch is on the PATH."""
_REST_S = 0.2
"""Time between two saves, after which a service has nothing left to do."""
_WARM_UP = 2
TARGETS = {1_000: 1.1, 10_000: 1.0}
OURS, BARE, WATCHED, OURS_WATCHED = "ours", "git add, commit, push", "gitwatch -s 0", "run --watch"
_COMPARED = (
    (OURS, ": time relative to bare git (lower is better)", BARE, TARGETS),
    (OURS_WATCHED, ", watch of gitwatch's", WATCHED, dict.fromkeys(TARGETS, 1.0)),
)


def measure(lab: Lab) -> Section:
    """Measure edits and new posts in a small and a large site."""
    saves = 5 if lab.quick else 50
    taken: dict[tuple[int, str, str], list[float]] = {}
    with ExitStack() as stack:
        ways: list[tuple[int, str, Callable[[int], float]]] = []
        for posts in TARGETS:
            ways += [(posts, name, way) for name, way in _ways(lab, posts, stack).items()]
        edited, created = count(), count(100_000)
        for turn in range(saves + _WARM_UP):
            say(f"latency, save {turn + 1} of {saves + _WARM_UP}")
            for kind, number in (("edit", next(edited)), ("new post", next(created))):
                for posts, name, way in ways:
                    took = 1000 * way(number)
                    if turn >= _WARM_UP:  # imports in the service, packed refs in the sites
                        taken.setdefault((posts, kind, name), []).append(took)
                    time.sleep(_REST_S)
                ways.append(ways.pop(0))
    return Section(
        "Latency: one save, idle service",
        _WHAT,
        [
            Check(f"{kind}, {posts:,} posts{text}", ratio(values, taken[posts, kind, peer]), "×", most[posts])
            for ours, text, peer, most in _COMPARED
            for (posts, kind, name), values in sorted(taken.items())
            if name == ours
        ],
        [
            Series(f"{kind}, {posts:,} posts: {name}", "ms", values)
            for (posts, kind, name), values in sorted(taken.items())
        ],
    )


def _ways(lab: Lab, posts: int, stack: ExitStack) -> dict[str, Callable[[int], float]]:
    served, plain = (stack.enter_context(lab.site(posts)) for _ in range(2))
    process = stack.enter_context(daemon(served.root, served.environment()))
    ways: dict[str, Callable[[int], float]] = {
        OURS: lambda number: save(served, process, number),
        BARE: lambda number: commit(plain, number),
    }
    script = shutil.which("gitwatch") or shutil.which("gitwatch.sh")
    if script and shutil.which("inotifywait"):
        watched = stack.enter_context(lab.site(posts))
        stack.enter_context(gitwatch(watched, script))
        ways[WATCHED] = lambda number: watch(watched, number)
        watching = stack.enter_context(lab.site(posts))
        stack.enter_context(daemon(watching.root, watching.environment(), "--watch", is_read=True))
        ways[OURS_WATCHED] = lambda number: watch(watching, number)
    return ways


def save(site: Site, process: subprocess.Popen[str], number: int) -> float:
    """Return the seconds from the save to the remote, by the service."""
    site.edit(number)
    partial = site.prepare_job(number)
    before = tip(site.remote)
    began = time.perf_counter()
    commit_job(partial)
    took = wait_until_moved(site.remote, before) - began
    wait_for(process, "published")
    return took


def commit(site: Site, number: int) -> float:
    """Return the seconds from the first command to the remote, by git."""
    path = site.edit(number)
    before = tip(site.remote)
    began = time.perf_counter()
    site.git("add", "--", path)
    site.git("commit", "--quiet", f"--message=Publish post {number}")
    with subprocess.Popen(["git", "push", "--quiet", "origin", "main"], cwd=site.worktree, env=site.env):
        return wait_until_moved(site.remote, before) - began


@contextmanager
def gitwatch(site: Site, script: str) -> Iterator[None]:
    """Have gitwatch publish what is edited."""
    process = subprocess.Popen(
        [script, "-s", "0", "-r", "origin", "-b", "main", str(site.worktree / FOLDER)],
        cwd=site.worktree,
        env=site.env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        time.sleep(2)  # gitwatch does not report when it watches
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def watch(site: Site, number: int) -> float:
    """Return the seconds from the edit to the remote, by what watches the site."""
    before, began = tip(site.remote), time.perf_counter()
    site.edit(number)
    return wait_until_moved(site.remote, before) - began


def tip(remote: Path) -> bytes:
    """Return the tip of the remote's branch; nothing while the ref is packed."""
    try:
        return (remote / "refs" / "heads" / "main").read_bytes()
    except FileNotFoundError:
        return b""


def wait_until_moved(remote: Path, before: bytes) -> float:
    """Return the time at which the branch has moved."""
    return wait_until(lambda: tip(remote) != before, 0.0005)
