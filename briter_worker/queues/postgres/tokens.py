"""The fence: each drain of a site takes its next token, and only who has the last one may write.

A worker that was stopped, taken for dead and replaced may wake at any line. Whatever it writes then, it
writes in a transaction that first looks at the token, and so does nothing.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, LiteralString

from psycopg.rows import dict_row

from briter_worker.errors import LockLostError, Loss
from briter_worker.queues.postgres.database import DatabaseError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from briter_worker.queues.postgres.database import Connection, Database


class SiteMissingError(Exception):
    """There is no such site; the text says what to do."""

    def __init__(self, site: str) -> None:
        super().__init__(f"there is no site {site!r}. Fix: briter-worker site add {site}, or see site list")


_LOCK: LiteralString = "SELECT token, removed FROM sites WHERE name = %s FOR NO KEY UPDATE"
FENCED: LiteralString = """
WITH fence AS (
    SELECT CASE WHEN %(flushed)s THEN '' ELSE set_config('synchronous_commit', 'off', true) END FROM sites
    WHERE name = %(site)s AND token = %(token)s AND NOT removed FOR NO KEY UPDATE
)
"""
"""Begins a statement that is a transaction of its own: it has rows only for whoever has this token.

The statement sees what there was when it began, not what others wrote while it waited for the lock: it is for
what none but the site's drains write.
"""


def take(database: Database, site: str, worker: str) -> int:
    """The site's next token: from now on, `worker` has it, and whoever had it before writes nothing more.

    What its predecessor is writing at this moment is finished first. Raises LockLostError (missing).
    """
    return int(taken(database, site, worker)["token"])


def taken(database: Database, site: str, worker: str) -> dict[str, Any]:
    """As `take`; all of the site's row, with the new token.

    What its predecessor is writing at this moment is finished first. Raises LockLostError (missing).
    """
    # Flushed: were it lost with the server, the next one would be the same, and two would have it.
    with database.asking() as connection:
        row = (
            connection.cursor(row_factory=dict_row)
            .execute(
                "UPDATE sites SET token = token + 1, worker = %s, taken_at = %s"
                " WHERE name = %s AND NOT removed RETURNING *",
                (worker, time.time(), site),
            )
            .fetchone()
        )
    if row is None:
        raise _lost(site, Loss.MISSING)
    return row


def write(
    database: Database,
    site: str,
    token: int,
    statement: LiteralString,
    values: Mapping[str, object],
    *,
    flushed: bool,
) -> None:
    """Change what only the site's drains change, by what follows `FENCED`; each part of it is FROM `fence`.

    It returns a row where it changed something. Raises LockLostError where the site is another's.
    """
    known = {**values, "site": site, "token": token, "flushed": flushed}
    with database.asking() as connection:
        done = connection.execute(FENCED + statement, known).fetchone()
        if done is None:
            row = connection.execute("SELECT token, removed FROM sites WHERE name = %s", (site,)).fetchone()
            _compare(site, token, row)


@contextlib.contextmanager
def working(database: Database, site: str, token: int, *, flushed: bool = True) -> Iterator[Connection]:
    """A transaction in which the site is this worker's, and nobody else changes its rows.

    Raises LockLostError.
    """
    with database.begun(_LOCK, site, flushed=flushed) as (connection, row):
        _compare(site, token, row)
        yield connection


def still(database: Database, site: str, token: int) -> bool:
    """Whether the site is still with whoever has this token. Raises DatabaseError."""
    with database.asking() as connection:
        row = connection.execute("SELECT token, removed FROM sites WHERE name = %s", (site,)).fetchone()
    return row is not None and row == (token, False)


def hold(database: Database, site: str, token: int) -> None:
    """The site is still with whoever has this token. Raises LockLostError, also where nobody can be asked."""
    try:
        with database.asking() as connection:
            row = connection.execute("SELECT token, removed FROM sites WHERE name = %s", (site,)).fetchone()
    except DatabaseError as error:
        raise _lost(site, Loss.ERROR, str(error)) from error
    _compare(site, token, row)


def lock(connection: Connection, site: str, token: int | None) -> None:
    """Until the transaction ends, nobody else changes the site's rows; a worker has to have the token.

    Raises LockLostError for a worker, SiteMissingError for anybody else (`token` None).
    """
    row = connection.execute(_LOCK, (site,)).fetchone()
    if token is not None:
        _compare(site, token, row)
    elif row is None or row[1]:
        raise SiteMissingError(site)


def _compare(site: str, token: int, row: tuple[int, bool] | tuple[object, ...] | None) -> None:
    if row is None or row[1]:
        raise _lost(site, Loss.MISSING)
    if row[0] != token:
        raise _lost(site, Loss.TAKEN)


def _lost(site: str, reason: Loss, why: str = "") -> LockLostError:
    text = {
        Loss.TAKEN: f"another worker has the site {site} now; this one leaves it alone",
        Loss.DONE: f"what this worker was doing for the site {site} has been done by another",
        Loss.MISSING: f"there is no site {site} any more",
        Loss.ERROR: f"it cannot be found out whether this worker still has the site {site}: {why}",
    }[reason]
    return LockLostError(reason, text)
