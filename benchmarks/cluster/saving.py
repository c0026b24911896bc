"""What it costs to save: one post, and a thousand at once; until Postgres has flushed them."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import procrastinate
import psycopg
from psycopg.types.json import Jsonb

from benchmarks.cluster.ground import Cluster, content_of, path_of
from benchmarks.cluster.per_job import made
from benchmarks.lab import say
from briter_worker.cluster.asking import enqueue
from briter_worker.cluster.waking import wake
from briter_worker.wiring import open_database

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.cluster.ground import Ground
    from briter_worker.settings import Settings

ENQUEUE, DEFER, INSERT = "enqueue()", "Procrastinate, defer", "bare INSERT"
MANY, BATCH, INSERTS, COPY = (
    "submit_many()",
    "Procrastinate, batch_defer",
    "bare INSERTs, one transaction",
    "bare COPY",
)
_SITE = "site"
_TABLE = "CREATE TABLE jobs (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, job jsonb, content bytea)"
_PUT = "INSERT INTO jobs (job, content) VALUES (%s, %s)"


@dataclass
class _Ways:
    """All the places where a post can be put."""

    cluster: Cluster
    settings: Settings
    publish: Any
    """Procrastinate's task."""
    rows: psycopg.Connection[Any]

    @classmethod
    def made(cls, ground: Ground, stack: ExitStack) -> _Ways:
        cluster = stack.enter_context(Cluster.made(ground))
        cluster.add([_SITE], ground.lab.root)
        settings = cluster.settings()
        stack.callback(open_database(settings).close)
        engine = stack.enter_context(ground.database(ours=False))
        app = stack.enter_context(made(procrastinate.SyncPsycopgConnector(conninfo=engine), None).open())
        app.schema_manager.apply_schema()
        table = stack.enter_context(ground.database(ours=False))
        rows = stack.enter_context(psycopg.connect(table, autocommit=True))
        rows.execute(_TABLE)
        return cls(cluster, settings, app.tasks["publish"].configure(lock=_SITE), rows)

    def enqueue(self, number: int) -> None:
        files = {path_of(number): content_of(number)}
        enqueue(f"post-{number:06}", files=files, site=_SITE, settings=self.settings, message="Publish")

    def defer(self, number: int) -> None:
        self.publish.defer(**_job(number))

    def insert(self, number: int) -> None:
        self.rows.execute(_PUT, _row(number))

    def submit_many(self, count: int) -> None:
        self.cluster.save(_SITE, count)
        wake(self.cluster.database, [_SITE])

    def batch_defer(self, count: int) -> None:
        self.publish.batch_defer(*map(_job, range(count)))

    def insert_many(self, count: int) -> None:
        with self.rows.transaction(), self.rows.cursor() as cursor:
            cursor.executemany(_PUT, [_row(number) for number in range(count)])

    def copy(self, count: int) -> None:
        with self.rows.cursor().copy("COPY jobs (job, content) FROM STDIN") as copy:
            for number in range(count):
                copy.write_row(_row(number))

    def empty(self) -> None:
        """All that comes is new."""
        for table in ("publications", "contents", "procrastinate_jobs"):
            self.cluster.do(f"DELETE FROM {table}")  # noqa: S608 - ours


def measure(ground: Ground, *, singles: int, batch: int, times: int) -> dict[str, list[float]]:
    """Milliseconds a post, by way: of each of `singles` in turns, and of one batch in each turn."""
    taken: dict[str, list[float]] = {}
    with ExitStack() as stack:
        ways = _Ways.made(ground, stack)
        one: dict[str, Callable[[int], None]] = {
            ENQUEUE: ways.enqueue,
            DEFER: ways.defer,
            INSERT: ways.insert,
        }
        many: dict[str, Callable[[int], None]] = {
            MANY: ways.submit_many,
            BATCH: ways.batch_defer,
            INSERTS: ways.insert_many,
            COPY: ways.copy,
        }
        for turn in range(times + 1):
            say(f"cluster, saving, repetition {turn} of {times}" if turn else "cluster, saving, warming up")
            ways.empty()
            steps: list[tuple[str, Callable[[int], None], int, int]]
            steps = [(name, put, number, 1) for number in range(singles) for name, put in one.items()]
            steps += [(name, put, batch, batch) for name, put in many.items()]
            for name, put, argument, posts in steps:
                if name is MANY:
                    ways.empty()
                began = time.perf_counter()
                put(argument)
                if turn:
                    taken.setdefault(name, []).append(1000 * (time.perf_counter() - began) / posts)
    return taken


def _job(number: int) -> dict[str, str]:
    text = content_of(number).decode()
    return {"site": _SITE, "path": path_of(number), "content": text, "message": "Publish"}


def _row(number: int) -> tuple[Jsonb, bytes]:
    about = {"site": _SITE, "path": path_of(number), "message": "Publish"}
    return Jsonb(about), content_of(number)
