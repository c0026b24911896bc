"""How long receipts are kept: finished, then stale (out of sight), then deleted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlite3

DAY = 86400.0
STEP = 1000
"""As many rows in one transaction: a reader or a save never waits long."""
_MOMENTS = 20_000
"""The live stream goes back so far; who was away for longer starts afresh."""


@dataclass(frozen=True, slots=True)
class Retention:
    """After how many days a receipt is stale, and after how many it is deleted."""

    stale_days: int
    keep_days: int


@dataclass(frozen=True, slots=True)
class Retired:
    """What one step of retention has done."""

    stale: int
    deleted: int
    is_whole: bool
    """Whether nothing more is to be done for now."""


def retire(connection: sqlite3.Connection, retention: Retention, now: float) -> Retired:
    """One step, in one transaction. Raises sqlite3.Error; then nothing was changed."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        deleted = connection.execute(
            "DELETE FROM attempts WHERE id IN (SELECT id FROM attempts WHERE ended < ? AND stale IN (0, 1) "
            "AND outcome IS NOT NULL LIMIT ?)",
            (now - retention.keep_days * DAY, STEP),
        ).rowcount
        stale = connection.execute(
            "UPDATE attempts SET stale = 1 WHERE id IN (SELECT id FROM attempts WHERE stale = 0 "
            "AND ended < ? AND outcome IS NOT NULL LIMIT ?)",
            (now - retention.stale_days * DAY, STEP),
        ).rowcount
        if deleted:
            connection.execute(
                "DELETE FROM drains WHERE id < coalesce((SELECT min(drain) FROM attempts), id)",
            )
        connection.execute(
            "DELETE FROM moments WHERE id <= (SELECT max(id) FROM moments) - ?",
            (_MOMENTS,),
        )
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return Retired(stale, deleted, is_whole=max(stale, deleted) < STEP)
