"""The cluster's figures: what was measured, what it has to reach, what it means for one Postgres."""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.cluster import saving, spread, throughput, waking
from benchmarks.cluster.ground import POSTS, ground
from benchmarks.cluster.throughput import ENGINE, LOOP, OURS, SINGLE, WORKERS, Size
from benchmarks.report import Check, Plot, Section, Series, ratio

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.cluster.throughput import Rates
    from benchmarks.lab import Lab

_WHAT = """\
One Postgres on this machine, which flushes (`fsync` and `synchronous_commit` on, as by default), over its \
socket; posts of 1.5 KB. Publications per second: {noop.sites} sites with {noop.each} posts waiting in \
each (no-op), {push.sites} sites of {posts} posts with {push.each} (real pushes, to bare remotes on the \
same disk); a worker is a process that does one thing at a time, started and loaded before the clock, \
which runs until the last row is gone. A no-op of ours is the whole drain but git: rows, contents, \
journal, fence, history. Who publishes job by job has git write, add, commit and push, {push.few} posts a \
site, in a clone of each site that all its workers share, as ours share their caches; Procrastinate locks \
a job's site, and looks every 0.1 s; the bare loop has neither retry nor reason nor fence, and with pushes \
gives each worker its share of the sites. Saved: until Postgres has flushed it; one by one, and {batch:,} \
at once. Taken up: from the call of `enqueue()` to an idle `run` until its drain of the site begins. \
Death: SIGKILL of a `run` that is pushing, until another `run` begins to drain its site. Cost by sites: \
the first {drains} drains, {each} posts in each, when so many sites are told to drain and each of the \
others has {each} posts on hold; one host of {slots} slots."""
_BUSY = 1.5
"""More runnable processes than this for each core, and the figures are a loaded machine's."""
_DAY = 86_400
_HOLDS = 0.5
"""The share of a Postgres that may be busy by plan."""


@dataclass(frozen=True, slots=True)
class _Amount:
    """How much is measured."""

    noop: Size
    push: Size
    singles: int
    batch: int
    times: int
    saves: int
    deaths: int
    counts: tuple[int, ...]
    drains: int


_FULL = _Amount(Size(20, 50, 50, 3), Size(20, 20, 3, 3), 200, 1_000, 5, 100, 5, (10, 100, 500, 2_000), 50)
_QUICK = _Amount(Size(10, 20, 20, 1), Size(6, 5, 1, 1), 20, 200, 2, 10, 1, (10, 200), 10)


def measure(lab: Lab) -> Section:
    """See `_WHAT`."""
    amount = _QUICK if lab.scale.quick else _FULL
    load = os.getloadavg()[0]
    with ground(lab) as place:
        noop = throughput.measure(place, amount.noop, publishes=False)
        push = throughput.measure(place, amount.push, publishes=True)
        saved = saving.measure(place, singles=amount.singles, batch=amount.batch, times=amount.times)
        woken = waking.saves(place, amount.saves)
        dead = waking.deaths(place, amount.deaths)
        costs = {
            kind: spread.measure(
                place,
                amount.counts,
                drains=amount.drains,
                times=2 if lab.scale.quick else 3,
                publishes=kind == "real pushes",
            )
            for kind in ("no-op", "real pushes")
        }
    rates = {"no-op": noop, "real pushes": push}
    begun = Series("enqueue() to the drain's begin", "ms", woken.begun)
    few, many = amount.counts[0], amount.counts[-1]
    return Section(
        f"Cluster: one Postgres, {', '.join(map(str, WORKERS))} workers, up to {many:,} sites",
        _WHAT.format(
            noop=amount.noop,
            push=amount.push,
            posts=POSTS,
            batch=amount.batch,
            drains=amount.drains,
            each=spread.EACH,
            slots=spread.SLOTS,
        ),
        [
            *_faster(rates),
            Check(
                f"submit_many() of {amount.batch:,}, of Procrastinate's batch_defer",
                ratio(saved[saving.MANY], saved[saving.BATCH]),
                "×",
                2,
            ),
            Check(
                "enqueue(), of Procrastinate's defer",
                ratio(saved[saving.ENQUEUE], saved[saving.DEFER]),
                "×",
                3,
            ),
            Check("save to an idle host until its drain begins", begun.median, " ms", 100, headline=True),
            Check("the same, 99th percentile", begun.p99, " ms", 100, headline=True),
            Check(
                "SIGKILL of a host until another drains its site",
                max(dead.begun) / 1000,
                " s",
                15,
                headline=True,
            ),
            *(
                Check(
                    f"{kind}: {what} a publication among {many:,} sites, of that among {few}",
                    ratio(getattr(cost[many], each), getattr(cost[few], each)),
                    "×",
                    1.2,
                    headline=each == "clock",
                )
                for kind, cost in costs.items()
                for what, each in (("time", "clock"), ("processor time", "processor"))
            ),
        ],
        [
            *(
                Series(f"{kind}, {_of(workers)}: {way}", "/s", values)
                for kind, found in rates.items()
                for (way, workers), values in sorted(found.rates.items(), key=lambda each: each[0][1])
            ),
            *(
                Series(f"{kind}, a publication: {what}, {way}", unit, values)
                for kind, found in rates.items()
                for way, cost in found.costs.items()
                for what, unit, values in (
                    ("processor time of Postgres", "ms", cost.server),
                    ("processor time of the workers", "ms", cost.hosts),
                    ("log of changes", "KiB", cost.log),
                )
            ),
            *(Series(f"saved: {name}", "ms a post", values) for name, values in saved.items()),
            begun,
            Series("the same, 99th percentile", "ms", [begun.p99]),
            Series("enqueue() to the remote", "ms", woken.published),
            Series("SIGKILL to the next drain's begin", "ms", dead.begun),
            Series("SIGKILL to the remote", "ms", dead.published),
            *(
                Series(f"{kind}, {count:,} sites: {what} a publication", "ms", getattr(cost, each))
                for kind, found in costs.items()
                for what, each in (("time", "clock"), ("processor time", "processor"))
                for count, cost in found.items()
            ),
        ],
        [*_said_of_load(load), *_reckoned(rates, saved)],
        [
            Plot(
                "bench-cluster-workers",
                "Published per second, by workers",
                "workers",
                "publications/s",
                {
                    f"{_short(way)}, {kind}": [
                        (count, statistics.median(found.rates[way, count])) for count in WORKERS
                    ]
                    for kind, found in rates.items()
                    for way in (OURS, ENGINE, LOOP)
                },
                "xy",
            ),
            Plot(
                "bench-cluster-sites",
                "What a publication costs, by the number of sites",
                "sites",
                "milliseconds of processor time",
                {
                    kind: [(count, statistics.median(cost.processor)) for count, cost in found.items()]
                    for kind, found in costs.items()
                },
                "xy",
            ),
        ],
    )


def _faster(rates: Mapping[str, Rates]) -> list[Check]:
    """Without git, a bare loop does next to nothing: it is shown, and nobody has to be faster."""
    return [
        Check(
            f"{kind}, {_of(workers)}: publications/s, of {other}",
            ratio(found.rates[OURS, workers], found.rates[other, workers]),
            "×",
            1,
            at_least=True,
            headline=workers == WORKERS[-1],
        )
        for kind, found in rates.items()
        for other in ((ENGINE,) if kind == "no-op" else (ENGINE, LOOP))
        for workers in WORKERS
    ]


def _said_of_load(load: float) -> list[str]:
    """A figure of a machine that others used as it began is called one: later, most of the load is ours."""
    if load <= _BUSY * (os.cpu_count() or 1):
        return []
    text = (
        f"cluster: LOADED MACHINE: {load:.1f} processes wanted to run on {os.cpu_count()} cores "
        "before it began. Ratios of ways that took turns hold roughly; times and rates are too bad by that."
    )
    return [text]


def _reckoned(rates: Mapping[str, Rates], saved: Mapping[str, list[float]]) -> list[str]:
    """What one Postgres carries, by these figures."""
    middle = statistics.median
    push = rates["real pushes"].costs
    batched, single, bare = push[OURS], push[SINGLE], rates["no-op"].costs[OURS]
    notes = []
    for about, cost in (("in batches", batched), ("one by one, each a drain of its own", single)):
        server = middle(cost.server)
        each = 1000 / server * _HOLDS
        notes.append(
            f"cluster, on paper: with real pushes {about}, a publication takes {server:.2f} ms of Postgres's "
            f"processor time, and {middle(cost.hosts):.0f} ms of the hosts'. A core of Postgres that is "
            f"{_HOLDS:.0%} busy carries {each:,.0f} a second, {each * _DAY / 1e6:.1f} million a day, and "
            f"{middle(cost.hosts) / server * _HOLDS:.0f} cores of hosts that do nothing but publish."
        )
    log = middle(single.log)
    notes.append(
        f"cluster, on paper: a publication on its own writes {log:.1f} KiB of Postgres's log of changes, "
        f"without its save; {100 * log / 1024:.1f} MiB a second at a hundred of them. All but git (no-op, in "
        f"batches) is {middle(bare.server):.2f} ms of Postgres and {middle(bare.hosts):.2f} ms of the hosts; "
        f"`enqueue()` is {middle(saved[saving.ENQUEUE]):.1f} ms by the clock, and a bare INSERT, "
        f"flushed as well, {middle(saved[saving.INSERT]):.1f} ms."
    )
    found = rates["real pushes"].rates
    for other in (ENGINE, LOOP):
        shares = [
            f"{ratio(found[SINGLE, count], found[other, count]):.2f}× at {_of(count)}" for count in WORKERS
        ]
        notes.append(
            "cluster: with real pushes and only one post waiting in each site, ours are "
            f"{', '.join(shares)} of the publications per second of {other}."
        )
    return notes


def _of(workers: int) -> str:
    return f"{workers} worker{'s' if workers > 1 else ''}"


def _short(way: str) -> str:
    return {OURS: "ours", ENGINE: "Procrastinate", LOOP: "SKIP LOCKED"}.get(way, way)
