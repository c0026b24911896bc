"""One Postgres that flushes, databases in it, and sites with small remotes."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from benchmarks.lab import post_path, remove
from briter_worker.cluster import sites
from briter_worker.job import format_time
from briter_worker.queues.postgres.database import Database
from briter_worker.queues.postgres.payloads import PayloadSource, submit
from briter_worker.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.lab import Lab
    from briter_worker.settings import Settings

_DEBIAN = Path("/usr/lib/postgresql")
POSTS = 50
"""Of a small site."""


@contextmanager
def server(lab: Lab) -> Iterator[Path]:
    """Yield the folder of its socket. It flushes as Postgres does by default (fsync, synchronous_commit)."""
    programs = _find_programs()
    is_root = os.geteuid() == 0
    folder = Path(tempfile.mkdtemp(prefix="briter-bench-pg-"))
    try:
        if is_root:  # Postgres refuses to run as root
            shutil.chown(folder, "postgres", "postgres")

        def run(program: str, *arguments: str) -> None:
            before = ["runuser", "-u", "postgres", "--"] if is_root else []
            command = [*before, str(programs / program), "-D", str(folder / "data"), *arguments]
            done = subprocess.run(command, env=lab.env, cwd="/", stdout=subprocess.DEVNULL, check=False)
            if done.returncode:
                raise RuntimeError(f"{program} failed")

        run("initdb", "-A", "trust", "-U", "bench", "-E", "UTF8", "--no-locale")
        options = f"-c listen_addresses= -c unix_socket_directories={folder}"
        run("pg_ctl", "start", "-w", "-l", str(folder / "log"), "-o", options)
        try:
            yield folder
        finally:
            run("pg_ctl", "stop", "-w", "-m", "fast")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _find_programs() -> Path:
    for initdb in sorted(_DEBIAN.glob("*/bin/initdb"), reverse=True):
        return initdb.parent
    if path := shutil.which("initdb"):
        return Path(path).parent
    raise RuntimeError("there is no Postgres: apt-get install postgresql")


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
        with self.database() as url, closing(Database(url)) as database:
            database.upgrade()
            cluster = Cluster(self.lab, url, database)
            settings = cluster.settings()
            for name in names:
                site = sites.Site(name, str(remotes / f"{name}.git"), "main", "local-mdx")
                sites.add(database, site, settings)
            yield cluster
        remove(cluster.home)


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
