"""One publication in a large site whose posts lie in folders by year."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.lab import daemon, git, say, timed, wait_for, worker
from benchmarks.report import Check, Section, Series, ratio

if TYPE_CHECKING:
    import subprocess

    from benchmarks.lab import Lab, Site

_WHAT = """\
Posts as `content/posts/<year>/<slug>/index.md`, {large:,} of them beside {small:,}. One post is saved, \
until it is published and settled, by a service and by `run --once`, start-up included; beside it `git add`, \
`git commit` and `git push` of one post, whole. They take turns. The floor is what nobody can avoid who \
publishes by git: `git push` of one commit alone. In a large site nearly all of it is the remote's \
`rev-list`, by which receive-pack checks that nothing is missing: it reads all folders of its last commit. \
`git update-index` reads and writes the index whole, after the push."""


def measure(lab: Lab) -> Section:
    """See `_WHAT`."""
    times = 3 if lab.scale.quick else 20
    few, many = (200, 5_000) if lab.scale.quick else (1_000, 100_000)
    served: dict[int, list[float]] = {few: [], many: []}
    bare: dict[int, list[float]] = {few: [], many: []}
    once: dict[int, list[float]] = {few: [], many: []}
    pushed: dict[int, list[float]] = {few: [], many: []}
    checked: dict[int, list[float]] = {few: [], many: []}
    indexed: dict[int, list[float]] = {few: [], many: []}
    with lab.site(few, nested=True) as small, lab.site(many, nested=True) as large:
        sites = {few: small, many: large}
        say(f"nested folders, {times} times each")
        for turn in range(times + 1):
            for posts, site in sites.items():
                once[posts].append(1000 * _once(site, 3 * turn))
                bare[posts].append(1000 * _bare(site, 3 * turn + 1))
                for series, took in zip((indexed, pushed, checked), _floor(site, 3 * turn + 1), strict=True):
                    series[posts].append(1000 * took)
        with daemon(small) as one, daemon(large) as other:
            processes = {few: one, many: other}
            for turn in range(times + 1):
                for posts, site in sites.items():
                    served[posts].append(1000 * _served(site, processes[posts], 3 * turn + 2))
    for series in (served, bare, once, pushed, checked, indexed):
        for values in series.values():
            del values[0]  # the first one warms up
    least = median(pushed[many]) / median(served[few])

    def own(posts: int) -> float:
        return median(served[posts]) - median(pushed[posts]) - median(indexed[posts])

    return Section(
        f"Nested folders: {many:,} posts",
        _WHAT.format(small=few, large=many),
        [
            Check(
                f"a save, of one in {few:,} posts", ratio(served[many], served[few]), "×", 2, headline=True
            ),
            Check("a save, of git add, commit, push", ratio(served[many], bare[many]), "×", 1, headline=True),
            Check(f"run --once, of one in {few:,} posts", ratio(once[many], once[few]), "×", 2),
            Check("run --once, of git add, commit, push", ratio(once[many], bare[many]), "×", 1),
            Check(
                f"a save less git push and git update-index alone, of one in {few:,} posts",
                own(many) / own(few),
                "×",
                2,
                headline=True,
            ),
        ],
        [
            Series(f"{name}, {posts:,} posts", "ms", values)
            for name, series in (
                ("a save", served),
                ("run --once", once),
                ("git add, commit, push", bare),
                ("the floor: git push alone", pushed),
                ("of it, the remote's rev-list", checked),
                ("git update-index alone", indexed),
            )
            for posts, values in series.items()
        ],
        [_limit(least, few, many)],
    )


def _limit(times: float, few: int, many: int) -> str:
    return (
        f"nested: git push alone takes {times:.2g} times as long in {many:,} posts as a whole save in "
        f"{few:,}; no save over git's own protocol can take less."
    )


def _save(site: Site, number: int) -> None:
    site.edit(number)
    partial = site.save(number)
    partial.rename(partial.with_suffix(".json"))


def _once(site: Site, number: int) -> float:
    _save(site, number)
    return timed(worker("run", "--once"), site.root, site.environment())


def _served(site: Site, process: subprocess.Popen[str], number: int) -> float:
    time.sleep(0.2)
    began = time.perf_counter()
    _save(site, number)
    wait_for(process, "published")
    return time.perf_counter() - began


def _bare(site: Site, number: int) -> float:
    path = site.edit(number)
    began = time.perf_counter()
    site.git("add", "--", path)
    site.git("commit", "--quiet", f"--message=Publish post {number}")
    site.git("push", "--quiet", "origin", "main")
    return time.perf_counter() - began


def _floor(site: Site, number: int) -> tuple[float, float, float]:
    """Seconds of `update-index`, of `push` of a commit that is there, and of the remote's check of it."""
    path = site.edit(number)
    blob = site.git("hash-object", "-w", "--", path)
    began = time.perf_counter()
    site.git("update-index", "--cacheinfo", f"100644,{blob},{path}")
    indexed = time.perf_counter() - began
    before = site.git("rev-parse", "HEAD")
    site.git("commit", "--quiet", f"--message=Publish post {number} again")
    began = time.perf_counter()
    site.git("push", "--quiet", "origin", "main")
    pushed = time.perf_counter() - began
    began = time.perf_counter()
    git(("rev-list", "--objects", "--quiet", "main", "--not", before), site.remote, site.env)
    return indexed, pushed, time.perf_counter() - began
