"""A cluster for tests of its dispatch: sites and rows in a fresh database, and hosts as processes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

import psycopg
from psycopg.sql import SQL, Identifier

from briter_worker.cluster.waking import wake

if TYPE_CHECKING:
    from collections.abc import Callable

    from briter_worker.queues.postgres.database import Database

_PROGRAM = Path(__file__).with_name("cluster_host.py")


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait for it."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.01)


@dataclass
class Cluster:
    """What is in the database, as a test writes and reads it."""

    database: Database
    url: str
    saves: int = 0
    worker_before: int | None = None

    @classmethod
    def make(cls, database: Database, url: str) -> Cluster:
        """A table more, for what the tests' drains have done."""
        cluster = cls(database, url)
        cluster.execute("CREATE TABLE drained (publication bigint, site text, host int, at float8)")
        return cluster

    @property
    def conninfo(self) -> str:
        """As a host gets it."""
        return self.database.conninfo

    def execute(self, query: str, *values: object) -> None:
        with self.database.transaction() as connection:
            connection.execute(query.encode(), values or None)

    def one(self, query: str, *values: object) -> Any:  # noqa: ANN401 - what a database answers
        with self.database.transaction() as connection:
            row = connection.execute(query.encode(), values or None).fetchone()
        return row[0] if row else None

    def vacuum(self, table: str) -> None:
        """What Postgres knows of the table is what is in it."""
        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            connection.execute(SQL("VACUUM ANALYZE {}").format(Identifier(table)))

    def add_sites(self, *names: str) -> None:
        for name in names:
            self.execute("INSERT INTO sites (name) VALUES (%s)", name)

    def save(self, site: str, count: int = 1, *, word: bool = True) -> None:
        """Posts of the site that are due; without the `word`, their writer dies before it."""
        for _ in range(count):
            self._insert(site, 0.0)
        if word:
            wake(self.database, [site])

    def hold(self, site: str, *, until: float) -> None:
        """A post that is due later."""
        self._insert(site, until)

    def _insert(self, site: str, scheduled_for: float) -> None:
        self.saves += 1
        name = f"post{self.saves}"
        self.execute(
            "INSERT INTO publications (site, job_id, slug, document, created_at, scheduled_for, state)"
            " VALUES (%s, %s, %s, '{}', %s, %s, 'waiting')",
            site,
            name,
            name,
            time.time(),
            scheduled_for,
        )

    def begin(self, site: str) -> None:
        """A drain of the site is under way on the only host there is."""
        self.save(site)
        until(lambda: self.one("SELECT count(*) FROM publications WHERE state = 'claimed'") == 1)
        self.worker_before = self.worker_of(site)

    def waiting(self) -> int:
        """Rows that are still there."""
        return int(self.one("SELECT count(*) FROM publications"))

    def drained(self, *, distinct: bool = False) -> int:
        return int(self.one(f"SELECT count({'DISTINCT publication' if distinct else '*'}) FROM drained"))  # noqa: S608 - ours

    def drained_sites(self) -> set[str]:
        return set(self.one("SELECT coalesce(array_agg(DISTINCT site), '{}') FROM drained"))

    def drained_by(self) -> set[int]:
        return set(self.one("SELECT coalesce(array_agg(DISTINCT host), '{}') FROM drained"))

    def last_drained(self) -> float:
        return float(self.one("SELECT max(at) FROM drained"))

    def words(self) -> dict[str, int]:
        """What is dispatched: how many words wait, and how many are being done."""
        with self.database.transaction() as connection:
            rows = connection.execute("SELECT status::text, count(*) FROM procrastinate_jobs GROUP BY 1")
            return dict(rows.fetchall())

    def worker_of(self, site: str) -> int | None:
        """The number of the host that drains the site."""
        number = self.one(
            "SELECT worker_id FROM procrastinate_jobs WHERE lock = %s AND status = 'doing'", site
        )
        return None if number is None else int(number)

    def hosts(self) -> int:
        return int(self.one("SELECT count(*) FROM procrastinate_workers"))

    def beats(self) -> float:
        """The oldest heartbeat."""
        return float(
            self.one("SELECT extract(epoch FROM min(last_heartbeat))::float8 FROM procrastinate_workers")
        )

    def silence(self) -> float:
        """For how long the host that was heard longest ago has not been heard."""
        return float(
            self.one(
                "SELECT extract(epoch FROM clock_timestamp() - min(last_heartbeat))::float8"
                " FROM procrastinate_workers"
            )
        )

    def connections(self) -> int:
        """Those of hosts' dispatch."""
        return int(
            self.one(
                "SELECT count(*) FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name = 'briter-worker dispatch'"
            )
        )

    def listeners(self) -> int:
        """Hosts that hear words."""
        return int(
            self.one(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                " AND application_name = 'briter-worker dispatch' AND query LIKE 'LISTEN%'"
            )
        )


class Process:
    """A host as a process of its own, which is told to stop at the end."""

    def __init__(self, cluster: Cluster, **options: object) -> None:
        self._cluster = cluster
        self._options = options
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - until it has ended

    def __enter__(self) -> Self:
        known = self._cluster.hosts()
        self.process = subprocess.Popen(
            [sys.executable, str(_PROGRAM), self._cluster.url, json.dumps(self._options)],
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        until(lambda: self._cluster.hosts() > known or self.process.poll() is not None)
        assert self.process.poll() is None, self.output()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._text = self.output()
        self._output.close()

    def ended(self) -> int:
        """Its exit status, when it was told to stop."""
        self.process.terminate()
        return self.process.wait(30)

    def output(self) -> str:
        """What it has written so far."""
        if self._output.closed:
            return self._text
        self._output.seek(0)
        return self._output.read().decode()
