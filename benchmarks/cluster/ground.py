"""Where a cluster is measured: a Postgres that flushes, sites with small remotes, and processes in a race."""

from __future__ import annotations

import shutil
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import conninfo, sql

from benchmarks import postgres
from benchmarks.cluster.racing import processor_of
from benchmarks.lab import FOLDER, git, remove, say
from briter_worker.cluster import sites
from briter_worker.job import format_time
from briter_worker.queues.postgres.contents import Values
from briter_worker.queues.postgres.database import Database
from briter_worker.queues.postgres.writing import submit_many
from briter_worker.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benchmarks.lab import Lab
    from briter_worker.settings import Settings

POSTS = 50
"""Of a small site."""


@dataclass
class Ground:
    """One Postgres, and how many sites' remotes as are needed, made once."""

    lab: Lab
    connection: str
    server: psycopg.Connection[Any]
    """One connection for all that is asked: each new one would take some of the time that is measured."""
    _databases: int = 0

    @contextmanager
    def database(self, *, ours: bool) -> Iterator[str]:
        """The URL of a fresh database, with the worker's tables or with none."""
        self._databases += 1
        name = f"bench_{self._databases}"
        self.server.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        url = f"postgresql://bench@/{name}?host={self._folder}"
        try:
            if ours:
                with Database(url) as database:
                    database.upgrade()
            yield url
        finally:
            self.server.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))

    @contextmanager
    def remotes(self, names: Sequence[str]) -> Iterator[Path]:
        """A folder with a bare remote of `POSTS` posts for each of these."""
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

    def processor(self) -> float:
        """Seconds of processor time that Postgres has taken so far."""
        return processor_of(int((self._folder / "data" / "postmaster.pid").read_text().split()[0]))

    def log_written(self) -> int:
        """Bytes of Postgres's log of changes so far."""
        row = self.server.execute("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn").fetchone()
        return int(row[0]) if row else 0

    @property
    def _folder(self) -> Path:
        return Path(str(conninfo.conninfo_to_dict(self.connection)["host"]))


@contextmanager
def ground(lab: Lab) -> Iterator[Ground]:
    """Where to measure. Raises postgres.MissingError."""
    with postgres.server(lab) as connection, psycopg.connect(connection, autocommit=True) as server:
        yield Ground(lab, connection, server)


@dataclass
class Cluster:
    """Our worker's database, with sites in it."""

    ground: Ground
    url: str
    database: Database
    saves: int = 0

    @classmethod
    @contextmanager
    def made(cls, ground: Ground) -> Iterator[Cluster]:
        """One of its own, gone on leaving."""
        with ground.database(ours=True) as url, Database(url) as database:
            yield cls(ground, url, database)
        remove(ground.lab.root / "caches")

    def environment(self, **env: str) -> dict[str, str]:
        """For its hosts; they share their caches, as the others share their clones."""
        home = self.ground.lab.root / "host"
        home.mkdir(exist_ok=True)
        return {
            **self.ground.lab.env,
            "BRITER_APP_ROOT": str(home),
            "BRITER_STORAGE_ROOT": str(home),
            "BRITER_CACHE_ROOT": str(self.ground.lab.root / "caches"),
            "BRITER_DATABASE_URL": self.url,
            "BRITER_WORKER_DRY_RUN": "false",
            **env,
        }

    def idle(self) -> dict[str, str]:
        """For hosts that look for nothing by themselves: they do what they are told."""
        return self.environment(BRITER_WORKER_POLL_INTERVAL_MS="600000")

    def settings(self) -> Settings:
        """As its hosts have them."""
        return load_settings(self.environment())

    def add(self, names: Sequence[str], remotes: Path) -> None:
        """These sites, each with its remote in that folder."""
        settings = self.settings()
        for name in names:
            sites.add(
                self.database,
                sites.Site(name, str(remotes / f"{name}.git"), "main", "local-mdx"),
                settings,
            )

    def save(self, site: str, count: int) -> None:
        """So many posts of the site, saved and due; nobody is told."""
        saves = []
        for number in range(count):
            self.saves += 1
            path, content, now = path_of(number), content_of(self.saves), time.time()
            document = {
                "id": f"job-{self.saves}",
                "slug": f"post-{number:06}",
                "paths": [path],
                "message": f"Publish post {number}",
                "createdAt": format_time(now),
            }
            saves.append((document, Values.of({path: content}, saved_at=now)))
        submit_many(self.database, site, saves)

    def ask(self, query: str, *values: object) -> Any:  # noqa: ANN401 - what a database answers
        """The first column of the first row."""
        with self.database.asking() as connection:
            row = connection.execute(query.encode(), values or None).fetchone()
        return row[0] if row else None

    def do(self, query: str, *values: object) -> None:
        """Change something by hand."""
        with self.database.asking() as connection:
            connection.execute(query.encode(), values or None)


def path_of(number: int) -> str:
    """A post's."""
    return f"{FOLDER}/post-{number:06}.md"


def content_of(number: int) -> bytes:
    """A post of 1.5 KB that nobody has written before."""
    line = f"Paragraph of save {number}, {time.time_ns()}: the garden, the river and the mountain.\n"
    return f"# Save {number}\n\n{line * 17}".encode()


def clone(names: Sequence[str], remotes: Path, place: Path, env: Mapping[str, str]) -> None:
    """A clone of each, as who publishes job by job has it."""
    say(f"cloning {len(names)} sites, for who publishes job by job")
    place.mkdir()
    for name in names:
        git(("clone", "--quiet", str(remotes / f"{name}.git"), str(place / name)), place, env)
