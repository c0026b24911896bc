"""One Postgres that flushes, databases in it, and sites with small remotes."""

from __future__ import annotations

import shutil
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from benchmarks import postgres
from benchmarks.lab import post_path, remove
from briter_worker.cluster import sites
from briter_worker.job import format_time
from briter_worker.queues.postgres.database import Database
from briter_worker.queues.postgres.payloads import PayloadSource, submit
from briter_worker.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from benchmarks.lab import Lab
    from briter_worker.settings import Settings

POSTS = 50
"""Of a small site."""
_LONGEST_S = 600.0


@dataclass
class Ground:
    """The server, and what is made on it."""

    lab: Lab
    folder: Path
    _databases: int = 0

    @contextmanager
    def database(self) -> Iterator[str]:
        """Yield the URL of a new, empty database."""
        self._databases += 1
        name = f"bench_{self._databases}"
        with psycopg.connect(f"host={self.folder} user=bench dbname=postgres", autocommit=True) as server:
            server.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        yield f"postgresql://bench@/{name}?host={self.folder}"

    @contextmanager
    def remotes(self, names: Sequence[str]) -> Iterator[Path]:
        """Yield a folder with a bare remote of `POSTS` posts for each name."""
        template = self.lab.template(POSTS) / "remote.git"
        shutil.rmtree(template / "hooks", ignore_errors=True)
        place = self.lab.root / "remotes"
        place.mkdir()
        try:
            for name in names:
                shutil.copytree(template, place / f"{name}.git")
            yield place
        finally:
            remove(place)

    @contextmanager
    def cluster(self, names: Sequence[str], remotes: Path) -> Iterator[Cluster]:
        """Yield a worker's database with these sites."""
        with self.database() as url, Database(url) as database:
            database.upgrade()
            cluster = Cluster(self.lab, url, database)
            settings = cluster.settings()
            for name in names:
                sites.add(
                    database,
                    sites.Site(name, str(remotes / f"{name}.git"), "main", "local-mdx"),
                    settings,
                )
            yield cluster
        remove(cluster.home)


@contextmanager
def ground(lab: Lab) -> Iterator[Ground]:
    """Yield a server. Raises RuntimeError if there is no Postgres."""
    with postgres.server(lab) as folder:
        yield Ground(lab, folder)


@dataclass
class Cluster:
    """The worker's database."""

    lab: Lab
    url: str
    database: Database
    _saves: int = 0

    @property
    def home(self) -> Path:
        """The storage that the nodes share, as the other workers share their clones."""
        return self.lab.root / "nodes"

    def environment(self) -> dict[str, str]:
        """Return the environment of a node that publishes one site at a time."""
        self.home.mkdir(exist_ok=True)
        return {
            **self.lab.env,
            "BRITER_APP_ROOT": str(self.home),
            "BRITER_STORAGE_ROOT": str(self.home),
            "BRITER_CACHE_ROOT": str(self.home / "clones"),
            "BRITER_DATABASE_URL": self.url,
            "BRITER_WORKER_CONCURRENCY": "1",
            "BRITER_WORKER_DRY_RUN": "false",
        }

    def settings(self) -> Settings:
        """Return the nodes' settings."""
        return load_settings(self.environment())

    def save(self, site: str, count: int) -> None:
        """Store posts of the site that are due, and wake no node."""
        for number in range(count):
            self._saves += 1
            path, now = post_path(number), time.time()
            document = {
                "id": f"job-{self._saves}",
                "slug": f"post-{number:06}",
                "paths": [path],
                "message": f"Publish post {number}",
                "createdAt": format_time(now),
            }
            values = PayloadSource.of({path: make_post(self._saves)})
            with self.database.transaction() as connection:
                submit(connection, site, document, values)

    def ask(self, query: str, *values: object) -> Any:  # noqa: ANN401 - what a database answers
        """Return the first column of the first row."""
        with self.database.connection() as connection:
            row = connection.execute(query.encode(), values or None).fetchone()
        return row[0] if row else None

    def is_drained(self) -> bool:
        """Return True if no job waits."""
        return not self.ask("SELECT EXISTS (SELECT FROM publications)")


def make_post(number: int) -> bytes:
    """Return a post of 1.5 KB that no save has brought before."""
    line = f"Paragraph of save {number}, {time.time_ns()}: the garden, the river and the mountain.\n"
    return f"# Save {number}\n\n{line * 17}".encode()


def wait_until(is_so: Callable[[], bool], pause: float = 0.01) -> float:
    """Return the time at which the condition holds."""
    deadline = time.monotonic() + _LONGEST_S
    while not is_so():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {_LONGEST_S:.0f} s")
        time.sleep(pause)
    return time.perf_counter()
