"""One publication in a large site whose posts lie in folders by year."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from benchmarks.lab import daemon, say, timed, wait_for, worker
from benchmarks.report import Check, Section, Series, ratio

if TYPE_CHECKING:
    import subprocess

    from benchmarks.lab import Lab, Site

_WHAT = """\
Posts as `content/posts/<year>/<slug>/index.md`, {large:,} of them beside {small:,}. One post is saved, \
until it is published and settled, by a service and by `run --once`, start-up included; beside it `git add`, \
`git commit` and `git push` of one post, whole. They take turns."""
_SMALL, _LARGE = 1_000, 100_000


def measure(lab: Lab) -> Section:
    """See `_WHAT`."""
    times = 5 if lab.scale.quick else 20
    served: dict[int, list[float]] = {_SMALL: [], _LARGE: []}
    bare: dict[int, list[float]] = {_SMALL: [], _LARGE: []}
    once: dict[int, list[float]] = {_SMALL: [], _LARGE: []}
    with lab.site(_SMALL, nested=True) as small, lab.site(_LARGE, nested=True) as large:
        sites = {_SMALL: small, _LARGE: large}
        say(f"nested folders, {times} times each")
        for turn in range(times + 1):
            for posts, site in sites.items():
                once[posts].append(1000 * _once(site, 3 * turn))
                bare[posts].append(1000 * _bare(site, 3 * turn + 1))
        with daemon(small) as one, daemon(large) as other:
            processes = {_SMALL: one, _LARGE: other}
            for turn in range(times + 1):
                for posts, site in sites.items():
                    served[posts].append(1000 * _served(site, processes[posts], 3 * turn + 2))
    for series in (served, bare, once):
        for values in series.values():
            del values[0]  # the first one warms up
    return Section(
        f"Nested folders: {_LARGE:,} posts",
        _WHAT.format(small=_SMALL, large=_LARGE),
        [
            Check(f"a save, of one in {_SMALL:,} posts", ratio(served[_LARGE], served[_SMALL]), "×", 3, 2),
            Check("a save, of git add, commit, push", ratio(served[_LARGE], bare[_LARGE]), "×", 1.5, 1),
            Check(f"run --once, of one in {_SMALL:,} posts", ratio(once[_LARGE], once[_SMALL]), "×", 3, 2),
            Check("run --once, of git add, commit, push", ratio(once[_LARGE], bare[_LARGE]), "×", 1.5, 1),
        ],
        [
            Series(f"{name}, {posts:,} posts", "ms", values)
            for name, series in (("a save", served), ("run --once", once), ("git add, commit, push", bare))
            for posts, values in series.items()
        ],
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
