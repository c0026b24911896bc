"""The cluster's figures and their targets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.cluster import saving, takeover, throughput
from benchmarks.cluster.ground import POSTS, Ground, server
from benchmarks.cluster.throughput import OURS, PUSH_EACH, PUSH_ONCE, WORKERS, Size, single
from benchmarks.report import Check, Section, Series, ratio

if TYPE_CHECKING:
    from benchmarks.lab import Lab

_WHAT = """\
One Postgres on this machine with `fsync` and `synchronous_commit` on, over its socket; posts of 1.5 KB. \
Stored: one call, until Postgres has flushed the post and the node's wake-up is sent. Takeover: from SIGKILL \
of a `run` that is pushing until another `run` has published the post. Publications per second: {sites} \
sites of {files} posts, {posts} posts waiting in each (or one), four workers (or fewer) that do one thing at \
a time and were started before, real pushes to bare remotes on the same disk, until the last row is gone. A \
job of Procrastinate writes the post, then runs `git add`, `git commit` and `git push` in a clone of the \
site that its workers share, as our nodes share their clones. The batching peer keeps posts in a table, and \
its one job per site commits each and pushes once. An idle save: from the stored post to the remote's \
branch, one worker."""


def measure(lab: Lab) -> Section:
    """Measure all four."""
    size, times, saves, deaths = (Size(6, 5), 1, 50, 1) if lab.quick else (Size(100, 20), 3, 500, 3)
    with server(lab) as folder:
        place = Ground(lab, folder)
        stored = saving.measure(place, saves)
        rates, idle = throughput.measure(place, size, times)
        waits = takeover.measure(place, deaths)
    higher = "(higher is better)"
    return Section(
        f"Cluster: one Postgres, {max(WORKERS)} workers, {size.sites} sites",
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
            *(
                Check(
                    f"{size.posts} waiting per site: publications per second, relative to {peer} {higher}",
                    ratio(rates[OURS], rates[peer]),
                    "×",
                    target,
                    at_least=True,
                )
                for peer, target in ((PUSH_EACH, 1), (PUSH_ONCE, 2))
            ),
            *(
                Check(
                    f"one waiting per site, workers: {number}: publications per second, relative to "
                    f"{PUSH_EACH} {higher}",
                    ratio(rates[single(OURS, number)], rates[single(PUSH_EACH, number)]),
                    "×",
                    1,
                    at_least=True,
                )
                for number in WORKERS
            ),
            Check(
                f"time of an idle save until it is on the remote, relative to {PUSH_ONCE} (lower is better)",
                ratio(idle[OURS], idle[PUSH_ONCE]),
                "×",
                1.2,
            ),
        ],
        [
            *(Series(f"stored: {name}", "ms", values) for name, values in stored.items()),
            Series(
                "seconds from SIGKILL to the next publication by another node (lower is better)", "s", waits
            ),
            *(Series(f"publications: {name}", "/s", values) for name, values in rates.items()),
            *(Series(f"idle save: {name}", "ms", values) for name, values in idle.items()),
        ],
    )
