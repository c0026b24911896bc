"""The Postgres queue behind the face of the contract suite: one site, beside any other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from briter_worker.job import State, format_time
from briter_worker.queues.postgres.fencing import take_site
from briter_worker.queues.postgres.producer import submit
from briter_worker.queues.postgres.queue import PostgresQueue

if TYPE_CHECKING:
    from collections.abc import Mapping

    from briter_worker.queues.postgres.blobs import PayloadSource
    from briter_worker.queues.postgres.database import Database

NOW = 1_800_000_000.0
LONGEST_DELAY = 1800.0


def take_queue(
    database: Database, site: str = "site", *, dry_run: bool = False, limit: int = 500
) -> PostgresQueue:
    """Return the queue of a worker that has just taken the site."""
    return PostgresQueue(
        database,
        site,
        token=take_site(database, site, "worker", NOW)["token"],
        longest_delay=LONGEST_DELAY,
        dry_run=dry_run,
        limit=limit,
        clock=lambda: NOW,
    )


def control_queue(database: Database, site: str = "site") -> PostgresQueue:
    """Return the queue of a command or a page, which takes nothing from anybody."""
    return PostgresQueue(database, site, token=None, longest_delay=LONGEST_DELAY, dry_run=False)


def store(
    database: Database,
    document: Mapping[str, Any],
    source: PayloadSource | None = None,
    *,
    site: str = "site",
    now: float = NOW,
) -> str:
    """Submit a job in a transaction of its own; return its id."""
    with database.transaction() as connection:
        return submit(connection, site, document, source, now=now).id


@dataclass
class PostgresEngine:
    """Implements `queue_engines.Engine`."""

    database: Database
    site: str = "site"
    dry_run: bool = False
    queue: PostgresQueue = field(init=False)
    saves: int = 0

    def __post_init__(self) -> None:
        self.die()

    def die(self) -> None:
        self.queue = take_queue(self.database, self.site, dry_run=self.dry_run)

    def save(
        self,
        slug: str,
        paths: list[str],
        *,
        created: float = NOW,
        name: str = "",  # noqa: ARG002 - there are no files
        **keys: object,
    ) -> str:
        self.saves += 1
        job_id = str(keys.pop("id", f"job{self.saves:05}"))
        document = {"id": job_id, "slug": slug, "paths": paths, "createdAt": format_time(created), **keys}
        return store(self.database, document, site=self.site)

    def rows(self, slug: str, now: float = NOW) -> list[tuple[State, tuple[str, ...]]]:
        return [(row.state, row.job.paths) for row in self.queue.jobs(now) if row.job.slug == slug]

    def document(self, slug: str, now: float = NOW) -> dict[str, Any]:
        (row,) = (row for row in self.queue.jobs(now) if row.job.slug == slug)
        return row.read()
