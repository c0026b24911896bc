"""What a publication costs among few sites and among thousands."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.cluster.ground import Cluster
from benchmarks.cluster.racing import Race, host
from benchmarks.lab import say
from briter_worker.cluster.waking import wake

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.cluster.ground import Ground

EACH = 5
"""Publications that wait in a site, and as many on hold in each that is not measured."""
SLOTS = 2
_REST = 1.0
_HELD = """
INSERT INTO publications (site, job_id, slug, document, paths, created_at, scheduled_for, state)
SELECT name, 'held-' || number, 'held-' || number, '{"slug": "held"}', '{content/posts/held.md}', 1,
    4102444800, 'waiting'
FROM sites, generate_series(1, %s) AS number WHERE name LIKE 'other-%%'
"""


@dataclass
class Costs:
    """Milliseconds a publication: by the clock, and of processor time, the hosts' and Postgres's together."""

    clock: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)


def measure(
    ground: Ground, counts: Sequence[int], *, drains: int, times: int, publishes: bool
) -> dict[int, Costs]:
    """For each number of sites, in turns: the first so many drains of all that are told."""
    found = {count: Costs() for count in counts}
    kind = "real pushes" if publishes else "no-op"
    names = [f"a-{number:04}" for number in range(drains)]
    with ground.remotes(names) as remotes, Cluster.made(ground) as cluster:
        cluster.add(names, remotes)
        _drained(cluster, names, [names], publishes=publishes)  # caches are made
        for turn in range(times):
            for count in counts if turn % 2 else reversed(counts):
                say(f"cluster, {count:,} sites, {kind}, repetition {turn + 1} of {times}")
                groups = [names[at : at + count] for at in range(0, drains, count)]
                others = [f"other-{number:04}" for number in range(count - len(groups[0]))]
                _populate(cluster, others)
                clock, processor = _drained(cluster, others, groups, publishes=publishes)
                found[count].clock.append(clock)
                found[count].processor.append(processor)
    return found


def _populate(cluster: Cluster, others: Sequence[str]) -> None:
    """These are the other sites, with posts on hold; Postgres knows its tables."""
    cluster.do("DELETE FROM publications")
    cluster.do("DELETE FROM sites WHERE name LIKE 'other-%'")
    cluster.do("INSERT INTO sites (name) SELECT unnest(%s::text[])", list(others))
    cluster.do(_HELD, EACH)
    cluster.do("VACUUM ANALYZE")


def _drained(
    cluster: Cluster, others: Sequence[str], groups: Sequence[Sequence[str]], *, publishes: bool
) -> tuple[float, float]:
    """Milliseconds a publication. The groups have their turns one after the other."""
    ground, taken, used = cluster.ground, 0.0, 0.0
    with Race([host(publishes=publishes, slots=SLOTS)], cluster.idle(), ground.lab.root) as race:
        race.go()
        race.until(lambda: cluster.ask("SELECT count(*) FROM procrastinate_workers") == 1)
        time.sleep(_REST)
        cluster.do("UPDATE sites SET removed = name LIKE 'a-%'")
        for group in groups:
            cluster.do("UPDATE sites SET removed = false WHERE name = ANY(%s)", list(group))
            for name in group:
                cluster.save(name, EACH)
            server, hosts, began = ground.processor(), race.processor(), time.perf_counter()
            # Words go in the order of the names: these before the others, which stand behind them.
            wake(cluster.database, [*group, *others])
            ended = race.until(
                lambda: not cluster.ask("SELECT EXISTS (SELECT FROM publications WHERE site < 'b')")
            )
            taken += ended - began
            used += ground.processor() - server + race.processor() - hosts
            cluster.do("UPDATE sites SET removed = true WHERE name = ANY(%s)", list(group))
    cluster.do("DELETE FROM procrastinate_jobs")
    count = EACH * sum(len(group) for group in groups)
    return 1000 * taken / count, 1000 * used / count
