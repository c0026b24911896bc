"""The cluster's figures and their targets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.cluster import saving, takeover, throughput
from benchmarks.cluster.ground import POSTS, ground
from benchmarks.cluster.throughput import OURS, PROCRASTINATE, WORKERS, Size
from benchmarks.report import Check, Section, Series, ratio

if TYPE_CHECKING:
    from benchmarks.lab import Lab

_WHAT = """\
One Postgres on this machine with `fsync` and `synchronous_commit` on, over its socket; posts of 1.5 KB. \
Stored: one call, until Postgres has flushed the post and the node's wake-up is sent. Takeover: from SIGKILL \
of a `run` that is pushing until another `run` has published the post. Publications per second: {sites} \
sites of {files} posts, {posts} posts waiting in each, four workers that do one thing at a time and were \
started before, real pushes to bare remotes on the same disk, until the last row is gone. A job of \
Procrastinate writes the post, then runs `git add`, `git commit` and `git push` in a clone of the site that \
its workers share, as our nodes share their clones."""


def measure(lab: Lab) -> Section:
    """Measure all three."""
    size, times, saves, deaths = (Size(6, 5), 1, 50, 1) if lab.quick else (Size(20, 20), 3, 500, 3)
    with ground(lab) as place:
        stored = saving.measure(place, saves)
        rates = throughput.measure(place, size, times)
        waits = takeover.measure(place, deaths)
    return Section(
        f"Cluster: one Postgres, {WORKERS} workers, {size.sites} sites",
        _WHAT.format(sites=size.sites, files=POSTS, posts=size.posts),
        [
            Check(
                "time of enqueue(), relative to Procrastinate's defer() (lower is better)",
                ratio(stored[saving.ENQUEUE], stored[saving.DEFER]),
                "×",
                3,
            ),
            Check(
                "seconds from SIGKILL to the next publication by another node (lower is better)",
                max(waits),
                " s",
                30,
            ),
            Check(
                "publications per second, relative to Procrastinate with one job per post (higher is better)",
                ratio(rates[OURS], rates[PROCRASTINATE]),
                "×",
                1,
                at_least=True,
            ),
        ],
        [
            *(Series(f"stored: {name}", "ms", values) for name, values in stored.items()),
            Series(
                "seconds from SIGKILL to the next publication by another node (lower is better)", "s", waits
            ),
            *(Series(f"publications: {name}", "/s", values) for name, values in rates.items()),
        ],
    )
