"""How long receipts are kept: finished, then stale (out of sight), then deleted, by one host at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from briter_worker.sinks.history.retention import DAY, STEP, Retired

if TYPE_CHECKING:
    from briter_worker.sinks.history.retention import Retention
    from briter_worker.sinks.postgres.database import Connection, Database

_ALONE = 0x6272697465720002
_MOMENTS = 7 * DAY
"""The live stream goes back so far; who was away for longer starts afresh."""
_REQUESTS = 7 * DAY
_DELETE = (
    "DELETE FROM attempts WHERE id IN (SELECT id FROM attempts"
    " WHERE outcome IS NOT NULL AND stale IN (0, 1) AND ended < %s LIMIT %s)"
)
_STALE = (
    "UPDATE attempts SET stale = 1 WHERE id IN (SELECT id FROM attempts"
    " WHERE outcome IS NOT NULL AND stale = 0 AND ended < %s LIMIT %s)"
)


def retire(database: Database, retention: Retention, now: float) -> Retired:
    """All there is to be done, in steps; nothing while another host is at it. Raises OSError."""
    stale = deleted = 0
    while True:
        with database.transaction() as connection:
            row = connection.execute("SELECT pg_try_advisory_xact_lock(%s)", (_ALONE,)).fetchone()
            if row is None or not row[0]:
                break
            step = _step(connection, retention, now)
        stale += step.stale
        deleted += step.deleted
        if step.is_whole:
            break
    return Retired(stale, deleted, is_whole=True)


def _step(connection: Connection, retention: Retention, now: float) -> Retired:
    deleted = connection.execute(_DELETE, (now - retention.keep_days * DAY, STEP)).rowcount
    stale = connection.execute(_STALE, (now - retention.stale_days * DAY, STEP)).rowcount
    others = [
        connection.execute(
            f"DELETE FROM {table} WHERE ctid IN"  # noqa: S608 - names of our own
            f" (SELECT ctid FROM {table} WHERE {column} < %s LIMIT %s)".encode(),
            (before, STEP),
        ).rowcount
        for table, column, before in (
            # A drain ends after it began: its attempts are gone before it.
            ("drains", "began", now - (retention.keep_days + 1) * DAY),
            ("moments", "at", now - _MOMENTS),
            ("requests", "at", now - _REQUESTS),
        )
    ]
    return Retired(stale, deleted, is_whole=max(deleted, stale, *others) < STEP)
