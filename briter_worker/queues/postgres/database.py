"""Connections to one Postgres, its errors with a fix, and its schema.

All tables are in the schema `briter`, the search path of every connection. The migrations are the numbered
files in `sql/`; they only add, so that older nodes go on beside an upgrade. No message contains the URL,
because a password is in it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import select
import socket
import threading
import time
from importlib import resources
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import conninfo
from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout

from briter_worker.errors import UnavailableError, conceal, one_line

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping

    from psycopg.rows import TupleRow

    Connection = psycopg.Connection[TupleRow]

_CONNECT_TIMEOUT_S = 10.0
_ANSWER_S = 60.0
_GRACE_S = 2.0
"""A statement's error message may take so long to arrive."""
_SESSION = {
    "search_path": "briter",
    # A node that was suspended or cut off in the middle of a transaction holds locks that others wait for.
    "idle_in_transaction_session_timeout": "10s",
    "lock_timeout": "30s",
    "synchronous_commit": "on",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "2",
}
# A cut cable says nothing: without these, an answer is awaited for a quarter of an hour. `_BoundedConnection`
# also ends the wait for a middlebox that acknowledges everything and answers nothing.
_CLIENT = {
    "application_name": "briter-worker",
    "connect_timeout": "5",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
}
_UPGRADE = "briter-worker db upgrade"
_UPGRADE_PATIENCE_S = 30.0
_ADVISORY_LOCK = 0x6272697465720001
_OLDEST_SERVER = 140000
_SETUP = """
CREATE SCHEMA IF NOT EXISTS briter;
CREATE TABLE IF NOT EXISTS migrations (
    name text PRIMARY KEY,
    version integer NOT NULL DEFAULT 0,
    applied_at timestamptz NOT NULL DEFAULT now()
);
"""
# A prepared statement fails once its table has another column: running nodes connect again.
_RECONNECT = """
SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
WHERE datname = current_database() AND usename = current_user AND application_name = 'briter-worker'
AND pid <> pg_backend_pid()
"""
_FIX = "start Postgres, or correct BRITER_DATABASE_URL"
_BLOCKED = "try again; if it happens again, find the blocking session in pg_stat_activity"
_FIXES = {
    psycopg.errors.InsufficientPrivilege: (
        "give the database's user the right to create the schema briter, or create it"
    ),
    psycopg.errors.LockNotAvailable: _BLOCKED,
    psycopg.errors.QueryCanceled: _BLOCKED,
    psycopg.errors.IdleInTransactionSessionTimeout: "try again",
    psycopg.errors.DeadlockDetected: "try again",
    psycopg.errors.DiskFull: "free some space on the database's disk",
    psycopg.errors.ReadOnlySqlTransaction: "let BRITER_DATABASE_URL name the primary server, not a standby",
    psycopg.NotSupportedError: "upgrade Postgres to version 14 or newer",
}
# Other psycopg errors are mistakes in our own statements.
_ENVIRONMENT_ERRORS = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    psycopg.InternalError,
    psycopg.errors.InsufficientPrivilege,
)

# The pool logs each failed attempt to reconnect, unredacted; our error has the last one.
logging.getLogger("psycopg").addHandler(logging.NullHandler())


class DatabaseError(UnavailableError):
    """Postgres cannot be used. The message and the fix contain no credentials."""

    def __init__(self, message: str, fix: str) -> None:
        self.message, self.fix = one_line(message), fix
        super().__init__(self.message)


class VersionError(DatabaseError):
    """The schema is older than this program, later than the program can work with, or missing."""


class NoTablesError(VersionError):
    """The schema is missing."""


class _BoundedConnection(psycopg.Connection[Any]):
    """A connection that breaks when the server has been silent for too long.

    psycopg and libpq wait for an answer without limit, and the server's own time limits end nothing where its
    messages get lost. Everything that awaits the server goes through `wait`.
    """

    silence = _ANSWER_S + _GRACE_S
    """Seconds in which a byte has to arrive, or to leave."""

    def wait(self, gen: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - as each version of psycopg has it
        """Run psycopg's generator. Raises OperationalError when the server is silent for too long."""
        return super().wait(_bounded(gen, self.silence), *args, **options)


class _SilentError(psycopg.OperationalError):
    """The server has not answered in time, and may never do."""


def _bounded(statement: Generator[Any, int, Any], silence: float) -> Generator[Any, int, Any]:
    """Run a generator of psycopg's, which is resumed with 0 every 0.1 s while the connection is silent."""
    deadline = time.monotonic() + silence
    try:
        wanted = next(statement)
        while True:
            ready = yield wanted
            now = time.monotonic()
            if ready:
                deadline = now + silence
            elif now >= deadline:
                raise _SilentError(f"the server has been silent for {silence:.0f} s")
            wanted = statement.send(ready)
    except StopIteration as end:
        return end.value


def _cut(connection: Connection) -> None:
    """Break a connection that another thread waits for."""
    with (
        contextlib.suppress(OSError, psycopg.Error),
        socket.socket(fileno=os.dup(connection.fileno())) as twin,
    ):
        twin.shutdown(socket.SHUT_RDWR)


class Database:
    """Connections to one Postgres, opened when they are first needed. Safe to share among threads.

    Every statement ends in time, whatever the server and the network do. Their failures raise DatabaseError;
    the next call connects again.
    """

    def __init__(
        self,
        url: str,
        *,
        connections: int = 4,
        patience: float = _CONNECT_TIMEOUT_S,
        answer_within: float = _ANSWER_S,
        **session: str,
    ) -> None:
        """`session`: more of Postgres's settings, for each connection."""
        self._url, self._session = url, session
        self._in_use: set[Connection] = set()
        self._pool: ConnectionPool[Connection] | None = None
        self._guard = threading.Lock()
        self.limit(connections=connections, patience=patience, answer_within=answer_within)
        self._shared = threading.local()
        self._ahead: float | None = None
        """How far Postgres's clock is ahead of this process's monotonic one."""

    def limit(self, *, connections: int, patience: float, answer_within: float) -> None:
        """Set the number of connections, and the seconds to wait for one and for the end of a statement."""
        self._connections = max(1, connections)
        self._patience = patience
        self._silence = answer_within + min(_GRACE_S, answer_within)
        limits = {"statement_timeout": f"{round(answer_within * 1000)}ms"}
        self.conninfo = _conninfo(self._url, _SESSION | limits | self._session)
        """For a connection beside the pool: the same schema and time limits of the server."""
        self.close(timeout=0)

    @contextlib.contextmanager
    def transaction(self, *, is_pipelined: bool = False) -> Iterator[Connection]:
        """Yield a connection in a transaction, which is committed at the end or rolled back on an exception.

        `is_pipelined`: a statement whose result nobody awaits shares a round trip with the next one, and has
        no `rowcount`. Raises DatabaseError. If the connection breaks in the commit, that may have succeeded.
        """
        with self.connection() as connection:
            if hasattr(self._shared, "connection"):
                yield connection  # of `joined`
            else:
                with _pipelined(connection) if is_pipelined else connection.transaction():
                    yield connection

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Have everything that this thread does inside be one transaction. Raises DatabaseError."""
        with self.transaction(is_pipelined=True) as self._shared.connection:
            try:
                yield
            finally:
                del self._shared.connection

    @contextlib.contextmanager
    def connection(self) -> Iterator[Connection]:
        """Yield a connection in which each statement is a transaction of its own. Raises DatabaseError."""
        if hasattr(self._shared, "connection"):
            yield self._shared.connection
            return
        try:
            pool, connection = self._take_connection()
            self._in_use.add(connection)
            try:
                yield connection
            finally:
                self._in_use.discard(connection)
                pool.putconn(connection)  # rolls back what is left
        except _SilentError as error:
            self.close(timeout=0)  # the other connections go through the same network
            raise _explain(error) from error
        except _ENVIRONMENT_ERRORS as error:
            raise _explain(error) from error
        except psycopg.errors.UndefinedTable as error:
            raise NoTablesError("the database has no tables of Briter Worker", _UPGRADE) from error

    def _take_connection(self) -> tuple[ConnectionPool[Connection], Connection]:
        deadline = time.monotonic() + self._patience
        while True:  # waits shortly each time, so that `give_up` ends the waiting
            pool = self._open_pool()
            try:
                return pool, pool.getconn(min(self._patience, 1.0))
            except (PoolTimeout, PoolClosed):
                if time.monotonic() < deadline:
                    continue
                self._try_to_connect()
                message = f"all {self._connections} connections to Postgres are in use"
                raise DatabaseError(message, "try again") from None

    def upgrade(self) -> list[str]:
        """Create or upgrade the schema; return the names of the applied migrations. Safe beside old nodes."""
        try:
            # By another name: an upgrade that waits for this one is not told to connect again.
            name = "briter-worker-upgrade"
            with psycopg.connect(self.conninfo, autocommit=True, application_name=name) as connection:
                _check_encoding(connection)
                _check_needs(connection)
                return _upgrade(connection)
        except psycopg.Error as error:
            raise _explain(error) from error

    def version(self) -> int:
        """Return the version of the schema; 0 where there is none."""
        with contextlib.suppress(NoTablesError), self.connection() as connection:
            found = connection.execute("SELECT max(version) FROM migrations").fetchone()
            return int(found[0] or 0) if found else 0
        return 0

    def check(self) -> None:
        """Raise VersionError if the schema is too old for this program, or too new."""
        version, needed = self.version(), needed_version()
        if version < needed:
            has = f"version {version}" if version else "no tables of Briter Worker"
            raise VersionError(f"the database has {has}, and this program needs version {needed}", _UPGRADE)

    def now(self) -> float:
        """Return the time by Postgres's clock, as read last. No node's own clock decides anything.

        While Postgres has never answered, nothing can be decided, and the time is this machine's.
        """
        if self._ahead is None:
            with contextlib.suppress(DatabaseError):
                return self.read_clock()
        return time.time() if self._ahead is None else self._ahead + time.monotonic()

    def read_clock(self) -> float:
        """Return the time by Postgres's clock. Raises DatabaseError."""
        with self.connection() as connection:
            row = connection.execute("SELECT extract(epoch FROM clock_timestamp())::float8").fetchone()
        return self.set_clock(row[0] if row else math.nan)

    def set_clock(self, now: float) -> float:
        """Note and return the time that Postgres has just returned."""
        self._ahead = now - time.monotonic()
        return now

    def value_or_set(self, key: str, value: str) -> str:
        """Store a value that all nodes share, unless there is one. Return the stored value."""
        with self.transaction() as connection:
            connection.execute(
                "INSERT INTO shared_values (key, value) VALUES (%s, %s) ON CONFLICT DO NOTHING", (key, value)
            )
            row = connection.execute("SELECT value FROM shared_values WHERE key = %s", (key,)).fetchone()
        return str(row[0]) if row else value

    def close(self, timeout: float = 5.0) -> None:
        """Close the connections, and wait so long for attempts to connect. The next call opens new ones."""
        with self._guard:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close(timeout)

    def give_up(self, *others: Database) -> None:
        """If Postgres cannot be used now, let nobody wait for it any longer, here and in the others."""
        try:
            self._try_to_connect()
        except DatabaseError:
            for each in (self, *others):
                each.abort()

    def abort(self) -> None:
        """Break every connection: whoever waits for Postgres gets a DatabaseError."""
        self.close(timeout=0)
        for connection in list(self._in_use):
            _cut(connection)

    @contextlib.contextmanager
    def connected(self) -> Iterator[Connection]:
        """Yield a connection beside the pool, with the same limits. Raises DatabaseError."""
        try:
            with _BoundedConnection.connect(self.conninfo, autocommit=True) as connection:
                self._configure(connection)
                yield connection
        except _ENVIRONMENT_ERRORS as error:
            raise _explain(error) from error

    def _configure(self, connection: Connection) -> None:
        if isinstance(connection, _BoundedConnection):
            connection.silence = self._silence

    def _try_to_connect(self) -> None:
        """Raise DatabaseError with the reason, which the pool does not report, if Postgres cannot be used."""
        try:
            with _BoundedConnection.connect(self.conninfo, autocommit=True) as connection:
                connection.silence = min(self._silence, _CONNECT_TIMEOUT_S)
                _check_encoding(connection)
                _check_needs(connection)
        except _ENVIRONMENT_ERRORS as error:
            raise _explain(error) from error

    def _open_pool(self) -> ConnectionPool[Connection]:
        with self._guard:
            if self._pool is None:
                self._try_to_connect()
                self._pool = ConnectionPool(
                    self.conninfo,
                    connection_class=_BoundedConnection,
                    configure=self._configure,
                    # A drain asks the same as the last one did.
                    kwargs={"autocommit": True, "prepare_threshold": 0},
                    min_size=0,
                    max_size=self._connections,
                    open=True,
                    reconnect_timeout=self._patience,
                    num_workers=1,
                    check=_check_connection,
                )
            return self._pool


@contextlib.contextmanager
def _pipelined(connection: Connection) -> Iterator[None]:
    """Begin and end a transaction in its statements' round trips: psycopg's own waits at both ends."""
    try:
        with connection.pipeline():
            connection.execute("BEGIN")
            yield
            connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(psycopg.Error):  # a broken connection has no transaction
            connection.rollback()
        raise


def needed_version() -> int:
    """Return the schema version that this program is written for."""
    return max(int(name[:4]) for name in _scripts())


def _scripts() -> dict[str, str]:
    folder = resources.files("briter_worker.queues.postgres") / "sql"
    return {file.name.removesuffix(".sql"): file.read_text("utf-8") for file in folder.iterdir()}


def _upgrade(connection: Connection) -> list[str]:
    """Apply the missing migrations, one upgrade at a time. Return their names."""
    if connection.info.server_version < _OLDEST_SERVER:
        raise psycopg.NotSupportedError("this server is too old: version 14 or newer is needed")
    # A waiting ALTER TABLE blocks every later statement on the table, so the lock_timeout stays.
    connection.execute("SET statement_timeout = 0")
    _wait_for_other_upgrades(connection)
    connection.execute(_SETUP)
    applied = {name for (name,) in connection.execute("SELECT name FROM migrations")}
    missing = [(name, script) for name, script in sorted(_scripts().items()) if name not in applied]
    for name, script in missing:
        is_one_transaction = " CONCURRENTLY " not in script
        if not is_one_transaction:
            for statement in script.split(";\n"):
                connection.execute(statement.encode())
        with connection.transaction():
            if is_one_transaction:
                connection.execute(script.encode())
            connection.execute(
                "INSERT INTO migrations (name, version) VALUES (%s, %s)", (name, int(name[:4]))
            )
            if found := re.search(r"^-- needs: (\d+)$", script, re.MULTILINE):
                connection.execute("UPDATE migrations SET needs = %s WHERE name = %s", (found[1], name))
    if missing:
        connection.execute(_RECONNECT)
    return [name for name, _ in missing]


def _wait_for_other_upgrades(connection: Connection) -> None:
    """Take the lock of upgrades, which is held until the connection ends. Raises LockNotAvailable.

    A statement that waits for the lock would have a snapshot, for which CREATE INDEX CONCURRENTLY waits.
    """
    deadline = time.monotonic() + _UPGRADE_PATIENCE_S
    while True:
        row = connection.execute("SELECT pg_try_advisory_lock(%s)", (_ADVISORY_LOCK,)).fetchone()
        if row and row[0]:
            return
        if time.monotonic() > deadline:
            raise psycopg.errors.LockNotAvailable("another upgrade of the database is running")
        time.sleep(0.1)


def _check_connection(connection: Connection) -> None:
    """Raise OperationalError if the connection is broken; without a round trip while the server is silent."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    if poll.poll(0):  # as a rule the server's last message
        ConnectionPool.check_connection(connection)


def _check_encoding(connection: Connection) -> None:
    """Raise DatabaseError unless the database stores UTF-8: other encodings cannot store every post."""
    encoding = connection.info.parameter_status("server_encoding")
    if encoding != "UTF8":
        raise DatabaseError(
            f"the database has the encoding {encoding}, and Briter Worker needs UTF8",
            "create a database with CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0, and name it in "
            "BRITER_DATABASE_URL",
        )


def _check_needs(connection: Connection) -> None:
    """Raise VersionError if a later program has changed the schema so that this one would misread it."""
    try:
        row = connection.execute("SELECT max(needs), max(version) FROM migrations").fetchone()
    except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn):
        return  # no tables yet, or those of a program before there was a number
    needs, version = row or (0, 0)
    if needs is not None and needs > needed_version():
        raise VersionError(
            f"the database has version {version}, which needs a program that knows version {needs}; "
            f"this one knows {needed_version()}, and changed nothing",
            "install on this machine the version of Briter Worker that the other nodes have",
        )


def _conninfo(url: str, session: Mapping[str, str]) -> str:
    try:
        parts = conninfo.conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        # libpq's message may contain the password.
        raise DatabaseError(
            "BRITER_DATABASE_URL cannot be read: it is not a Postgres URL",
            "BRITER_DATABASE_URL=postgresql://USER:PASSWORD@HOST/NAME, with %-escapes for characters such "
            "as @ and / in the password",
        ) from None
    conceal([str(parts.get("password") or "")])
    options = " ".join(f"-c {key}={value}" for key, value in session.items())
    parts["options"] = f"{options} {parts.get('options') or ''}".strip()
    parts["client_encoding"] = "UTF8"  # whatever PGCLIENTENCODING or the URL says
    return conninfo.make_conninfo("", **(_CLIENT | parts))


def _explain(error: Exception) -> DatabaseError:
    fix = next((fix for kind, fix in _FIXES.items() if isinstance(error, kind)), _FIX)
    if "idle-in-transaction" in str(error):  # its code is lost if the connection's end is read with it
        fix = _FIXES[psycopg.errors.IdleInTransactionSessionTimeout]
    return DatabaseError(f"Postgres: {one_line(str(error)) or type(error).__name__}", fix)
