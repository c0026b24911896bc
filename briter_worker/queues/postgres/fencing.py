"""The fencing token of a site: each drain takes the next one, and only the holder of the last one may write.

A node that was suspended, taken for dead and replaced may wake up at any line. Each of its writes is in a
transaction that checks the token first, and therefore changes nothing.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from psycopg.rows import dict_row

from briter_worker.errors import DeclinedError, LockLostError
from briter_worker.queues.postgres.database import DatabaseError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from briter_worker.queues.postgres.database import Connection, Database

_LOCK = "SELECT token, removed FROM sites WHERE name = %s FOR NO KEY UPDATE"


class SiteMissingError(DeclinedError):
    """The cluster has no site of this name."""

    def __init__(self, site: str) -> None:
        super().__init__(
            f"there is no site {site!r}", "briter-worker site list, or briter-worker site add NAME"
        )


def take_site(database: Database, site: str, worker: str, now: float) -> dict[str, Any]:
    """Take the site's next token for `worker`. Return the site's row, with the token.

    Waits until the previous holder's running transaction ends. Raises LockLostError if there is no site.
    """
    with database.connection() as connection:
        row = (
            connection.cursor(row_factory=dict_row)
            .execute(
                "UPDATE sites SET token = token + 1, worker = %s, taken_at = %s"
                " WHERE name = %s AND NOT removed RETURNING *",
                (worker, now, site),
            )
            .fetchone()
        )
    if row is None:
        raise _missing(site)
    return row


@contextlib.contextmanager
def fenced(database: Database, site: str, token: int) -> Iterator[Connection]:
    """Yield a transaction of the worker that holds the token; nobody else changes the site's rows meanwhile.

    Raises LockLostError.
    """
    with database.transaction() as connection:
        lock_for_worker(connection, site, token)
        yield connection


def lock_for_worker(connection: Connection, site: str, token: int) -> None:
    """Lock the site until the transaction ends. Raises LockLostError unless the token is the last one."""
    row = connection.execute(_LOCK, (site,)).fetchone()
    if row is None or row[1]:
        raise _missing(site)
    if row[0] != token:
        raise LockLostError(f"another worker has the site {site} now; this drain ends", "")


def lock_site(connection: Connection, site: str) -> None:
    """Lock the site until the transaction ends, for producers and commands. Raises SiteMissingError."""
    row = connection.execute(_LOCK, (site,)).fetchone()
    if row is None or row[1]:
        raise SiteMissingError(site)


def check_token(database: Database, site: str, token: int) -> None:
    """Raise LockLostError unless the token is the site's last one, or if the database cannot be asked."""
    try:
        with fenced(database, site, token):
            pass
    except DatabaseError as error:
        message = f"the worker cannot check whether it still has the site {site}: {error.message}"
        raise LockLostError(message, error.fix, in_doubt=True) from error


def _missing(site: str) -> LockLostError:
    return LockLostError(f"there is no site {site} any more", "")
