"""One Postgres: its connections, its errors in plain words, and the version of its tables.

All that is ours, and all that Procrastinate needs, is in the schema `briter`; every connection looks there
first. Nothing here shows the URL: it has a password in it.
"""

from __future__ import annotations

import contextlib
import logging
import select
import threading
from typing import TYPE_CHECKING

import psycopg
from psycopg import conninfo
from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout

from briter_worker.errors import AwayError, conceal, for_people
from briter_worker.queues.postgres import versions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType
    from typing import LiteralString, Self

    from psycopg.rows import TupleRow

    Connection = psycopg.Connection[TupleRow]

SCHEMA = "briter"
_PATIENCE = 10.0
"""Seconds to wait for a connection: to be made, or to come back from another thread."""
_SESSION = {
    "search_path": SCHEMA,
    # A program that was stopped, or its host cut off, in the middle of a transaction holds locks that
    # others wait for. After this long the server ends it.
    "idle_in_transaction_session_timeout": "10s",
    "statement_timeout": "60s",
    "lock_timeout": "30s",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "2",
}

# Nor does it wait for long for a server that is cut off.
_CLIENT = {
    "connect_timeout": "5",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "2",
    "tcp_user_timeout": "20000",
}
_UNFLUSHED = "; SET LOCAL synchronous_commit TO off"
# All but what only a mistake in a statement can cause.
_SURROUNDINGS = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    psycopg.InternalError,
    psycopg.errors.InsufficientPrivilege,
    PoolClosed,
)

# Each attempt of the pool to connect again would be a line on standard error; the last one is in the error.
logging.getLogger("psycopg").addHandler(logging.NullHandler())


class DatabaseError(AwayError):
    """Postgres could not do it; the text says why and what to do, and shows no credentials."""


class VersionError(DatabaseError):
    """The tables are older or newer than this program; the text says how to put that right."""


class Database:
    """Connections to one Postgres, opened when they are first needed, checked each time they are used.

    Safe to share among threads. Whatever the network and the server do is a DatabaseError, after which the
    next call tries anew.
    """

    def __init__(
        self, url: str, *, connections: int = 4, name: str = "briter-worker", patience: float = _PATIENCE
    ) -> None:
        self.conninfo = _conninfo(url, name)
        """For other clients of the same database (Procrastinate): the same schema, the same time limits."""
        self._most = max(1, connections)
        self._patience = patience
        self._guard = threading.Lock()
        self._pool: ConnectionPool[Connection] | None = None

    @contextlib.contextmanager
    def transaction(self, *, flushed: bool = True) -> Iterator[Connection]:
        """A connection in a transaction: committed at the end, undone when an exception leaves it."""
        with self.begun(flushed=flushed) as (connection, _):
            yield connection

    @contextlib.contextmanager
    def begun(
        self, first: LiteralString = "", *values: object, flushed: bool = True
    ) -> Iterator[tuple[Connection, TupleRow | None]]:
        """As `transaction`, with the first row of what is asked first, which goes along with its beginning.

        Each statement waits for its answer: then the server ends a transaction whose program was stopped in
        the middle. In a pipeline it does not, and would hold the site's lock for as long as that one sleeps.

        Not flushed, it does not wait for the server's disk: everybody sees it at once, and the next flushed
        one, of anybody's, flushes it, too. Where the server dies before, it has not taken place; but what
        this program does next, on a new connection, may: so only for what that finds missing, or can miss.

        Raises DatabaseError. Where the connection breaks during the commit, it may have taken place.
        """
        begin = f"BEGIN{'' if flushed else _UNFLUSHED}"
        with self._translated(), self._opened().connection() as connection:
            if not first:
                connection.execute(begin.encode(), prepare=False)
                yield connection, None
                return
            cursor = psycopg.ClientCursor(connection)
            cursor.execute(f"{begin}; {first}".encode(), values)
            for _ in range(begin.count(";") + 1):
                cursor.nextset()
            yield connection, cursor.fetchone()

    @contextlib.contextmanager
    def asking(self) -> Iterator[Connection]:
        """A connection in which each statement is a transaction of its own: for one that stands alone.

        Raises DatabaseError.
        """
        with self._translated(), self._opened().connection() as connection:
            yield connection

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except PoolTimeout as error:
            raise self._unreachable(error) from None
        except _SURROUNDINGS as error:
            raise _explained(error) from error
        except psycopg.errors.UndefinedTable as error:
            raise VersionError(
                "the database lacks tables of the worker's. Fix: briter-worker db upgrade"
            ) from error

    def upgrade(self) -> list[str]:
        """The tables are what this program needs; what was done for it, by name. Safe beside old workers."""
        try:
            with psycopg.connect(self.conninfo, autocommit=True) as connection:
                return versions.upgrade(connection)
        except psycopg.Error as error:
            raise _explained(error) from error

    def version(self) -> int:
        """Which version the tables have; 0 where there are none."""
        with self.transaction() as connection:
            return versions.read(connection).have

    def check(self) -> None:
        """Raises VersionError where the tables are too old or too new for this program."""
        with self.transaction() as connection:
            found = versions.read(connection)
        needed = versions.needed()
        if found.have < needed:
            what = f"version {found.have}" if found.have else "no tables of the worker's"
            raise VersionError(
                f"the database has {what}, and this program needs version {needed}. "
                "Fix: briter-worker db upgrade"
            )
        if found.oldest > needed:
            raise VersionError(
                f"the database has version {found.have}, and this program knows version {needed} "
                "only. Fix: install the briter-worker that upgraded it, or a newer one"
            )

    def close(self) -> None:
        """End its connections. The next call opens new ones."""
        with self._guard:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _opened(self) -> ConnectionPool[Connection]:
        with self._guard:
            if self._pool is None:
                # A pool would try for as long as it may, and not say why it could not.
                psycopg.connect(self.conninfo).close()
                self._pool = ConnectionPool(
                    self.conninfo,
                    kwargs={"autocommit": True},  # `begun` says itself where a transaction begins
                    min_size=0,
                    max_size=self._most,
                    open=True,
                    timeout=self._patience,
                    reconnect_timeout=self._patience,
                    num_workers=1,
                    check=_check,
                )
            return self._pool

    def _unreachable(self, error: PoolTimeout) -> DatabaseError:
        """The pool only says that it took too long."""
        try:
            psycopg.connect(self.conninfo).close()
        except psycopg.OperationalError as reason:
            return _explained(reason)
        return DatabaseError(
            for_people(f"all {self._most} connections to Postgres are in use: {error}. Fix: try again")
        )


def _check(connection: Connection) -> None:
    """Whether it is still good to use; raises psycopg.OperationalError when it is not.

    A server that has ended a connection has said so: only then is there something to read. To ask it each
    time would double what a single statement takes.
    """
    said = select.poll()
    said.register(connection.fileno(), select.POLLIN)
    if said.poll(0):
        ConnectionPool.check_connection(connection)


def _conninfo(url: str, name: str) -> str:
    try:
        parts = conninfo.conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        # What libpq says of it may show the password.
        raise DatabaseError(
            "the database's URL cannot be read. Fix: BRITER_DATABASE_URL=postgresql://USER:PASSWORD@HOST/NAME,"
            " with %-escapes for characters such as @ and / in the password"
        ) from None
    conceal([str(parts.get("password") or "")])
    settings = " ".join(f"-c {key}={value}" for key, value in _SESSION.items())
    parts["options"] = f"{settings} {parts.get('options') or ''}".strip()
    for key, value in _CLIENT.items():
        parts.setdefault(key, value)
    parts.setdefault("application_name", name)
    return conninfo.make_conninfo("", **parts)


def _reason(error: Exception) -> str:
    return for_people(str(error)) or type(error).__name__


def _explained(error: Exception) -> DatabaseError:
    reason = _reason(error)
    match error:
        case psycopg.errors.InsufficientPrivilege():
            remedy = "give the database's user the right to create the schema briter, or create it"
        case psycopg.errors.LockNotAvailable() | psycopg.errors.QueryCanceled():
            remedy = "try again; if it stays so, look in pg_stat_activity for who holds what"
        case psycopg.errors.IdleInTransactionSessionTimeout():
            remedy = "try again; this program stood still for too long"
        case psycopg.errors.DeadlockDetected() | psycopg.errors.SerializationFailure():
            remedy = "try again"
        case psycopg.errors.DiskFull():
            remedy = "free some space on the database's disk"
        case psycopg.errors.ReadOnlySqlTransaction():
            remedy = "let BRITER_DATABASE_URL name the primary, not a standby"
        case _:
            remedy = "start Postgres, or correct BRITER_DATABASE_URL"
    return DatabaseError(f"Postgres: {reason}. Fix: {remedy}")
