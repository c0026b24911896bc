"""Each queue behind one interface, so that one suite of behaviours runs against all of them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from psycopg.rows import dict_row

from briter_worker.job import NO_QUIET_TIME, State, format_time
from briter_worker.queues.disk.queue import DiskQueue
from briter_worker.queues.postgres.payloads import submit
from briter_worker.queues.postgres.queue import PostgresQueue

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from briter_worker.job import QuietTime
    from briter_worker.ports import ListedJob
    from briter_worker.queues.postgres.database import Database
    from briter_worker.queues.postgres.payloads import PayloadSource


NOW = 1_800_000_000.0
LONGEST_DELAY = 1800.0


class _Looking:
    queue: Any
    saves: int

    def _job(self, slug: str, paths: list[str], created: float, keys: dict[str, object]) -> dict[str, object]:
        self.saves += 1
        job = {"id": f"job{self.saves:05}", "slug": slug, "paths": paths, "createdAt": format_time(created)}
        return {**job, **keys}

    def _listed(self, slug: str, now: float) -> list[ListedJob]:
        return [row for row in self.queue.jobs(now) if row.job.slug == slug]

    def rows(self, slug: str, now: float = NOW) -> list[tuple[State, tuple[str, ...]]]:
        return [(row.state, row.job.paths) for row in self._listed(slug, now)]

    def document(self, slug: str, now: float = NOW) -> dict[str, Any]:
        (row,) = self._listed(slug, now)
        return row.read()


@dataclass
class Disk(_Looking):
    """The folder of files; a CMS may name them after ids, or after slugs and so write one over another."""

    folder: Path
    named_after_slugs: bool = False
    queue: DiskQueue = field(init=False)
    saves: int = 0

    def __post_init__(self) -> None:
        self.root = self.folder / "queue"
        self.root.mkdir(parents=True, exist_ok=True)
        self.restart()

    def restart(self, *, dry_run: bool = False, quiet: QuietTime = NO_QUIET_TIME) -> None:
        """Kill the worker and start another one: only what was durable is left."""
        self.queue = DiskQueue(
            self.root,
            self.folder / "quarantine",
            longest_delay=LONGEST_DELAY,
            quiet=quiet,
            dry_run=dry_run,
            clock=lambda: NOW,
        )

    def save(
        self,
        slug: str,
        paths: list[str],
        *,
        created: float = NOW,
        arrived: float = NOW,
        name: str = "",
        **keys: object,
    ) -> str:
        """Save the post as a CMS does; return the job's id. `name`: beside the other saves, not over one.

        `created` is the time of the CMS's clock, `arrived` that of the queue's.
        """
        document = self._job(slug, paths, created, keys)
        job_id = str(document["id"])
        temp = self.root / f".{job_id}.tmp"
        temp.write_text(json.dumps(document))
        if arrived != NOW:
            os.utime(temp, (arrived, arrived))
        temp.rename(self.root / f"{name or (slug if self.named_after_slugs else job_id)}.json")
        return job_id

    def put(self, name: str | bytes, data: bytes, *, age: float = 10.0) -> Path:
        """Write a file as a careless writer leaves it, last written `age` seconds ago."""
        path = self.root / os.fsdecode(name)
        path.write_bytes(data)
        os.utime(path, (NOW - age, NOW - age))
        return path


@dataclass
class Postgres(_Looking):
    """The rows of one site, beside another site's."""

    database: Database
    site: str = "site"
    queue: PostgresQueue = field(init=False)
    saves: int = 0

    def __post_init__(self) -> None:
        self.restart()

    def restart(self, *, dry_run: bool = False, quiet: QuietTime = NO_QUIET_TIME) -> None:
        self._quiet = quiet
        self.queue = take_queue(self.database, self.site, dry_run=dry_run)

    def save(
        self,
        slug: str,
        paths: list[str],
        *,
        created: float = NOW,
        arrived: float = NOW,
        name: str = "",  # noqa: ARG002 - there are no files
        **keys: object,
    ) -> str:
        document = self._job(slug, paths, created, keys)
        return store(self.database, document, site=self.site, now=arrived, quiet=self._quiet)


Backend = Disk | Postgres


# Short ways to a site's queue in Postgres


def take_queue(
    database: Database, site: str = "site", *, dry_run: bool = False, limit: int = 500
) -> PostgresQueue:
    """Return the queue of a worker that has just taken the site."""
    return PostgresQueue(
        database,
        site,
        token=take_site(database, site)["token"],
        longest_delay=LONGEST_DELAY,
        dry_run=dry_run,
        limit=limit,
        clock=lambda: NOW,
    )


def control_queue(database: Database, site: str = "site") -> PostgresQueue:
    """Return the queue of a command or a page, which takes nothing from anybody."""
    return PostgresQueue(database, site, longest_delay=LONGEST_DELAY, dry_run=False)


def store(
    database: Database,
    document: Mapping[str, Any],
    source: PayloadSource | None = None,
    *,
    site: str = "site",
    now: float = NOW,
    quiet: QuietTime = NO_QUIET_TIME,
) -> str:
    """Submit a job in a transaction of its own; return its id."""
    with database.transaction() as connection:
        return submit(connection, site, document, source, now=now, quiet=quiet).id


def take_site(database: Database, name: str = "site") -> dict[str, Any]:
    """A worker takes the site's next fencing token; the site's row."""
    command = (
        "UPDATE sites SET token = token + 1, worker = 'worker',"
        " taken_at = extract(epoch FROM clock_timestamp()) WHERE name = %s RETURNING *"
    )
    with database.connection() as connection:
        row = connection.cursor(row_factory=dict_row).execute(command, (name,)).fetchone()
    assert row is not None
    database.set_clock(row["taken_at"])
    return row
