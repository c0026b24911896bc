"""Short ways to a site's queue in Postgres, for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from briter_worker.job import NO_QUIET_TIME
from briter_worker.queues.postgres.payloads import submit
from briter_worker.queues.postgres.queue import PostgresQueue
from briter_worker.queues.postgres.rows import take_site

if TYPE_CHECKING:
    from collections.abc import Mapping

    from briter_worker.job import QuietTime
    from briter_worker.queues.postgres.database import Database
    from briter_worker.queues.postgres.payloads import PayloadSource

NOW = 1_800_000_000.0
LONGEST_DELAY = 1800.0


def take_queue(
    database: Database, site: str = "site", *, dry_run: bool = False, limit: int = 500
) -> PostgresQueue:
    """Return the queue of a worker that has just taken the site."""
    return PostgresQueue(
        database,
        site,
        token=take_site(database, site, "worker")["token"],
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
