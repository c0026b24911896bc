"""Publications per second at one, two and four workers: ours, an engine's job each, a bare loop over rows."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import procrastinate
import psycopg
from psycopg.types.json import Jsonb

from benchmarks.cluster import skip_locked
from benchmarks.cluster.ground import Cluster, clone, content_of, path_of
from benchmarks.cluster.per_job import made
from benchmarks.cluster.racing import Race, host, module
from benchmarks.lab import git, remove, say
from briter_worker.cluster.waking import wake

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.cluster.ground import Ground

OURS, SINGLE = "ours", "ours, one waiting per site"
ENGINE, LOOP, BULK = "Procrastinate, a job each", "SKIP LOCKED, a row each", "SKIP LOCKED, 50 rows each"
WORKERS = (1, 2, 4)
_AT_ONCE = 50
_REST = 1.0
"""Until workers that have just begun wait for something to do."""
_DEFER = """
INSERT INTO procrastinate_jobs (queue_name, task_name, lock, args) VALUES ('default', 'publish', %s, %s)
"""


@dataclass(frozen=True, slots=True)
class Size:
    """So many sites, and how many publications wait in each: for all, and for who pushes job by job."""

    sites: int
    each: int
    few: int
    times: int


@dataclass
class Costs:
    """What a publication takes, in the order it was measured."""

    server: list[float] = field(default_factory=list)
    """Milliseconds of Postgres's processor time."""
    hosts: list[float] = field(default_factory=list)
    log: list[float] = field(default_factory=list)
    """KiB of Postgres's log of changes."""


@dataclass
class Rates:
    """Publications per second, by way and number of workers, and what each cost."""

    rates: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    costs: dict[str, Costs] = field(default_factory=dict)


class _Field:
    """All that take part, over the same sites; each takes its turn."""

    def __init__(self, ground: Ground, stack: ExitStack, size: Size, *, publishes: bool) -> None:
        self._ground = ground
        self._size = size
        self._publishes = publishes
        self._names = [f"site-{number:04}" for number in range(size.sites)]
        self._extra = [f"extra-{number}" for number in range(WORKERS[-1])]
        root = ground.lab.root
        # Each pushes to remotes of its own: nobody finds that another was there.
        self._remotes = stack.enter_context(
            ground.remotes([*self._names, *self._extra, *self._names_of("job")])
        )
        self._clones = root / "clones" if publishes else None
        if self._clones is not None:
            clone(self._names_of("job"), self._remotes, self._clones, ground.lab.env)
            stack.callback(remove, self._clones)
        self._cluster = stack.enter_context(Cluster.made(ground))
        self._cluster.add([*self._names, *self._extra], self._remotes)
        self._engine = stack.enter_context(ground.database(ours=False))
        with made(procrastinate.SyncPsycopgConnector(conninfo=self._engine), None).open() as app:
            app.schema_manager.apply_schema()
        self._rows = stack.enter_context(ground.database(ours=False))
        with psycopg.connect(self._rows) as connection:
            connection.execute(skip_locked.TABLE.encode())
        self.found = Rates()

    def _names_of(self, kind: str) -> list[str]:
        return [f"{kind}-{number:04}" for number in range(self._size.sites)]

    def warm_up(self) -> None:
        """Caches are made, as they are on a host that has been there for a while."""
        self._ours(1, workers=1)

    def turn(self, workers: int) -> None:
        """Each once, with so many workers."""
        few = self._size.few if self._publishes else self._size.each
        ways: dict[str, Callable[[], tuple[float, tuple[float, float, float]]]] = {
            OURS: lambda: self._ours(self._size.each, workers),
            SINGLE: lambda: self._ours(1, workers),
            ENGINE: lambda: self._by_engine(few, workers),
            LOOP: lambda: self._by_loop(few, workers, most=1),
        }
        if not self._publishes:
            ways[BULK] = lambda: self._by_loop(few, workers, most=_AT_ONCE)
        for name, way in ways.items():
            rate, costs = way()
            self.found.rates.setdefault((name, workers), []).append(rate)
            known = self.found.costs.setdefault(name, Costs())
            known.server.append(costs[0])
            known.hosts.append(costs[1])
            known.log.append(costs[2])

    def _ours(self, each: int, workers: int) -> tuple[float, tuple[float, float, float]]:
        cluster = self._cluster
        commands = [host(publishes=self._publishes)] * workers
        with Race(commands, cluster.idle(), self._ground.lab.root) as race:
            race.go()
            race.until(lambda: cluster.ask("SELECT count(*) FROM procrastinate_workers") == workers)
            time.sleep(_REST)
            self._drain_one_each(race, workers)
            for name in self._names:
                cluster.save(name, each)
            found = self._timed(
                race,
                each,
                lambda: wake(cluster.database, self._names),
                lambda: not cluster.ask("SELECT EXISTS (SELECT FROM publications)"),
            )
        if cluster.ask("SELECT count(*) FROM attempts WHERE outcome <> 'published'"):
            raise RuntimeError("not every post was published")
        return found

    def _drain_one_each(self, race: Race, workers: int) -> None:
        """Each host has done something: what it makes once is made."""
        cluster, extra = self._cluster, self._extra[:workers]
        for name in extra:
            cluster.save(name, 1)
        wake(cluster.database, extra)
        race.until(lambda: not cluster.ask("SELECT EXISTS (SELECT FROM publications)"))

    def _by_engine(self, each: int, workers: int) -> tuple[float, tuple[float, float, float]]:
        rows = [
            (
                name,
                Jsonb(
                    {
                        "site": name,
                        "path": path_of(number),
                        "content": content_of(number).decode(),
                        "message": f"Publish post {number}",
                    }
                ),
            )
            for name in self._names_of("job")
            for number in range(each)
        ]
        command = module("per_job", self._engine, str(self._clones or ""))
        return self._raced([command] * workers, self._engine, "procrastinate_jobs", (_DEFER, rows))

    def _by_loop(self, each: int, workers: int, most: int) -> tuple[float, tuple[float, float, float]]:
        rows = [
            (name, share, path_of(number), content_of(number), f"Publish post {number}")
            for share, name in enumerate(self._names_of("job"))
            for number in range(each)
        ]
        commands = [
            module("skip_locked", self._rows, str(self._clones or ""), str(share), str(workers), str(most))
            for share in range(workers)
        ]
        return self._raced(commands, self._rows, "jobs", (skip_locked.PUT, rows))

    def _raced(
        self, commands: Sequence[Sequence[str]], url: str, table: str, put: tuple[str, Sequence[Any]]
    ) -> tuple[float, tuple[float, float, float]]:
        query, rows = put
        before = self._published()
        with (
            psycopg.connect(url, autocommit=True) as asking,
            psycopg.connect(url) as putting,
            Race(commands, self._ground.lab.env, self._ground.lab.root) as race,
        ):

            def is_empty() -> bool:
                row = asking.execute(f"SELECT EXISTS (SELECT FROM {table})".encode()).fetchone()  # noqa: S608 - ours
                return row == (False,)

            race.go()
            time.sleep(_REST)
            putting.cursor().executemany(query.encode(), rows)
            # Nobody has seen any of it so far, and now everybody sees all.
            found = self._timed(race, len(rows) // self._size.sites, putting.commit, is_empty)
        if self._publishes and self._published() - before != len(rows):
            raise RuntimeError("not every job became a commit")
        return found

    def _timed(
        self, race: Race, each: int, start: Callable[[], object], done: Callable[[], bool]
    ) -> tuple[float, tuple[float, float, float]]:
        ground, count = self._ground, each * self._size.sites
        server, hosts, log = ground.processor(), race.processor(), ground.log_written()
        began = time.perf_counter()
        start()
        took = race.until(done) - began
        return count / took, (
            1000 * (ground.processor() - server) / count,
            1000 * (race.processor() - hosts) / count,
            (ground.log_written() - log) / 1024 / count,
        )

    def _published(self) -> int:
        if not self._publishes:
            return 0
        return sum(
            int(git(("rev-list", "--count", "main"), self._remotes / f"{name}.git", self._ground.lab.env))
            for name in self._names_of("job")
        )


def measure(ground: Ground, size: Size, *, publishes: bool) -> Rates:
    """All ways, in turns."""
    with ExitStack() as stack:
        taking = _Field(ground, stack, size, publishes=publishes)
        taking.warm_up()
        for turn in range(size.times):
            for workers in WORKERS:
                kind = "real pushes" if publishes else "no-op"
                say(f"cluster, {kind}, {workers} workers, repetition {turn + 1} of {size.times}")
                taking.turn(workers)
        return taking.found
