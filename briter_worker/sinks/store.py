"""The store of the sinks: receipts, live stream, site condition and webhook outbox, in SQLite or Postgres.

Both dialects have the same tables (`sql/` beside this file and beside the Postgres queue) and take the same
statements, with `?` for values. A site with a folder of its own has two SQLite files: the history, and the
outbox, which holds secrets. A cluster has one database.
"""

from __future__ import annotations

import math
import os
import sqlite3
import stat
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, LiteralString
from uuid import uuid4

from briter_worker.errors import FixableError, os_error_fix, os_error_text, storable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    import psycopg
    from psycopg.rows import TupleRow

    Connection = psycopg.Connection[TupleRow]

_BUSY_TIMEOUT_S = 1.0
_VERSION = 3
LEASE_S = 60.0
"""How long a message in delivery belongs to its sender."""
_MAX_DELAY_S = 2 * 86400.0
"""A message that is due later than this was deferred before the clock was set back."""
_NEXT = (
    "SELECT message, url, created, content_type, body, build, id, attempts + 1 FROM messages"
    " WHERE (due <= ? OR due > ?){} ORDER BY due, id LIMIT 1"
)
_SIDE_FILES = ("", "-wal", "-shm", "-journal")


class StoreError(FixableError):
    """The store cannot be used at the moment."""


@dataclass(frozen=True, slots=True)
class Transaction:
    """A transaction: committed at the end of its `with`, rolled back by an exception."""

    _run: Callable[[str, Sequence[Any]], Any]

    def execute(self, statement: str, values: Sequence[Any] = ()) -> Any:  # noqa: ANN401 - a cursor of either dialect
        """Run one statement, with `?` for each value."""
        return self._run(statement, [storable(each) if isinstance(each, str) else each for each in values])


class SqliteStore:
    """A SQLite file in `storage/`, which is input: links are not followed, a damaged file is set aside."""

    skip_locked = ""
    """The clause that locks the selected rows and leaves out rows that another process has locked."""

    def __init__(self, path: Path, schema: Literal["history", "outbox"] = "history") -> None:
        self.path = path
        self._schema = schema
        self._guard = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._inode = 0

    @contextmanager
    def transaction(self, site: str = "") -> Iterator[Transaction]:  # noqa: ARG002 - the file has one writer at a time
        """Return a transaction. The file is created if there is none. Raises StoreError."""
        with self._guard, self._translated("written"):
            try:
                connection = self._open()
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
                self._set_aside()
                connection = self._open()
            connection.execute("BEGIN IMMEDIATE")
            with connection:  # commits, or rolls back
                yield Transaction(connection.execute)

    def query(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        """Return the rows, without waiting for the writer; none if there is no file. Raises StoreError."""
        with self._guard, self._translated("read"):
            if self._check_files() is None:
                return []
            rows: list[Any] = Transaction(self._open().execute).execute(statement, values).fetchall()
            return rows

    def close(self) -> None:
        """Close the file. The next call opens it again."""
        with self._guard:
            connection, self._connection = self._connection, None
            if connection is not None:
                with suppress(sqlite3.Error):
                    connection.close()

    def _open(self) -> sqlite3.Connection:
        inode = self._check_files()
        if self._connection is not None:
            return self._connection
        if inode is None:
            # Created here and not by SQLite, which knows no mode; its side files get the same mode.
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            os.close(os.open(self.path, flags, 0o600 if self._schema == "outbox" else 0o644))
            inode = self.path.lstat().st_ino
        # A reader without the right to write gets a connection that can only read.
        connection = sqlite3.connect(
            self.path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        self._connection, self._inode = connection, inode
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Create the tables in a new file. Raises sqlite3.DatabaseError for the file of another program."""
        connection.execute("PRAGMA trusted_schema=OFF")
        # A power cut may cost the last receipts; it never costs a post.
        connection.execute("PRAGMA synchronous=NORMAL")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > _VERSION:
            # Not set aside as a damaged one is: the later program goes on with it.
            raise StoreError(
                f"{self.path} was written by a later version of Briter Worker (version {version} of its "
                f"tables; this one knows {_VERSION})",
                "install the later version again, or move the file away: its receipts are then not shown",
            )
        is_odd = connection.execute(
            "SELECT 1 FROM sqlite_master WHERE type IN ('view', 'trigger')"
        ).fetchone()
        if is_odd or version not in (0, _VERSION):
            raise sqlite3.DatabaseError("another program or another version of this program made it")
        if version == 0:
            # Readers never wait for the writer, nor the writer for them. The file keeps this mode.
            connection.execute("PRAGMA journal_mode=WAL")
            self._create_tables(connection)
        elif self._schema == "history" and not _has_table(connection, "declared"):
            with suppress(sqlite3.OperationalError):  # a reader may not; the worker will
                self._create_tables(connection)

    def _create_tables(self, connection: sqlite3.Connection) -> None:
        """Create the tables that the file lacks."""
        tables = Path(__file__).with_name("sql") / f"{self._schema}.sql"
        script = tables.read_text("utf-8")
        try:
            connection.executescript(f"BEGIN IMMEDIATE; {script} PRAGMA user_version = {_VERSION}; COMMIT;")
        except sqlite3.Error:
            if connection.in_transaction:
                connection.rollback()
            raise

    def _check_files(self) -> int | None:
        """Return the file's inode, or None if there is no file. Raises StoreError for a link or a folder."""
        inode = None
        for suffix in _SIDE_FILES:
            file = self.path.with_name(self.path.name + suffix)
            try:
                found = file.lstat()
            except FileNotFoundError:
                continue
            if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
                raise StoreError(
                    f"{self.path} cannot be read: {file.name} is no regular file", f"remove {file}"
                )
            inode = inode if suffix else found.st_ino
        if inode != self._inode:
            self.close()  # it was removed or set aside
        return inode

    def _set_aside(self) -> None:
        """Keep the damaged file under another name, so that a new one can begin."""
        self.close()
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self.path.replace(self.path.with_name(f"{self.path.name}.damaged-{stamp}"))
        for suffix in _SIDE_FILES[1:]:
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)

    @contextmanager
    def _translated(self, done: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            self.close()
            if not isinstance(error, sqlite3.OperationalError) and not _is_damage(error):
                raise  # one value is at fault, not the file
            fix = "free some space, give the worker's user write access, or move the file away"
            raise StoreError(f"{self.path} cannot be {done}: {error}", fix) from error
        except OSError as error:
            raise StoreError(
                f"{self.path} cannot be {done}: {os_error_text(error, with_path=False)}", os_error_fix(error)
            ) from error


def _has_table(connection: sqlite3.Connection, name: str) -> bool:
    query = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
    return connection.execute(query, (name,)).fetchone() is not None


def _is_damage(error: sqlite3.Error) -> bool:
    """Return True if the file itself is at fault: neither waiting nor space nor rights would help."""
    return type(error) is sqlite3.DatabaseError


class PostgresStore:
    """The cluster's database, with all sites.

    `connect` returns a connection that commits each statement, and `begin` one in a transaction.
    """

    skip_locked = " FOR UPDATE SKIP LOCKED"
    # A receipt reaches the disk with the acknowledgement that follows it, at the latest.
    _SITE_LOCK: LiteralString = (
        "SELECT pg_advisory_xact_lock(1651666292, hashtext(%s)),"
        " set_config('synchronous_commit', 'off', true)"
    )

    def __init__(
        self,
        connect: Callable[[], AbstractContextManager[Connection]],
        begin: Callable[..., AbstractContextManager[Connection]],
    ) -> None:
        self._connect, self._begin = connect, begin

    @contextmanager
    def transaction(self, site: str = "") -> Iterator[Transaction]:
        """Return a transaction. Raises StoreError.

        One that names its site waits for the site's other writers, so that ids become visible in order.
        """
        # With a site, nobody asks how many rows changed: statements share round trips.
        with _translated(), self._begin(is_pipelined=bool(site)) as connection:
            if site:
                connection.execute(self._SITE_LOCK, (site,))
            yield Transaction(partial(self._run, connection))

    def query(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        """Return the rows. Raises StoreError."""
        with _translated(), self._connect() as connection:
            return self._run(connection, statement, values).fetchall()

    @staticmethod
    def _run(connection: Connection, statement: str, values: Sequence[Any]) -> psycopg.Cursor[TupleRow]:
        return connection.execute(statement.replace("?", "%s").encode(), values or None)

    def close(self) -> None:
        """Do nothing: the connections are the caller's."""


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        text = f"the history in Postgres cannot be used: {error}"
        raise StoreError(text, getattr(error, "fix", "")) from error


Store = SqliteStore | PostgresStore
"""Where the sinks keep what they know. Safe in several threads."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message for one receiver, or one call of a build hook. `attempts` includes the running one."""

    message: str
    url: str
    created: float
    content_type: str = ""
    body: str = ""
    build: bool = False
    id: int = 0
    attempts: int = 0


@dataclass(eq=False)
class Outbox:
    """Messages that are not received yet. Raises StoreError; then nothing was changed."""

    store: Store
    build_interval: float = 60.0
    lease: str = field(default_factory=lambda: uuid4().hex)

    def add(self, deliveries: Sequence[Delivery]) -> None:
        """Add messages, each once for each address. A build that waits already covers another one."""
        with self.store.transaction() as transaction:
            for each in deliveries:
                due = self._build_due(transaction, each) if each.build else each.created
                transaction.execute(
                    "INSERT INTO messages (message, url, build, content_type, body, created, due)"
                    " SELECT ?, ?, ?, ?, ?, ?, ? WHERE NOT EXISTS (SELECT 1 FROM messages"
                    " WHERE url = ? AND (message = ? OR (build AND lease IS NULL)))",
                    (
                        *(each.message, each.url, each.build, each.content_type, each.body),
                        *(each.created, due, each.url, each.message),
                    ),
                )

    def _build_due(self, transaction: Transaction, build: Delivery) -> float:
        """Return when the build hook may be called again."""
        found = transaction.execute("SELECT called FROM builds WHERE url = ?", (build.url,)).fetchone()
        # A last call in the future was made before the clock was set back.
        if found is None or found[0] > build.created:
            return build.created
        return max(build.created, float(found[0]) + self.build_interval)

    def take(self, now: float, besides: Sequence[str] = ()) -> Delivery | None:
        """Return the next message that is due, leased, with its attempt counted; None if nothing is due.

        Messages for addresses that begin with one of `besides` stay.
        """
        others, values = _not_to(besides)
        with self.store.transaction() as transaction:
            statement = _NEXT.format(others) + self.store.skip_locked
            row = transaction.execute(statement, (now, now + _MAX_DELAY_S, *values)).fetchone()
            if row is None:
                return None
            taken = Delivery(*row)
            transaction.execute(
                "UPDATE messages SET lease = ?, attempts = ?, due = ? WHERE id = ?",
                (self.lease, taken.attempts, now + LEASE_S, taken.id),
            )
            if taken.build:  # the call is for every build that waits
                transaction.execute(
                    "INSERT INTO builds (url, called) VALUES (?, ?)"
                    " ON CONFLICT (url) DO UPDATE SET called = excluded.called",
                    (taken.url, now),
                )
                transaction.execute(
                    "DELETE FROM messages WHERE url = ? AND build AND lease IS NULL", (taken.url,)
                )
        return taken

    def remove(self, delivery: Delivery, *, also_before: float = -math.inf) -> int:
        """Remove the message, and older ones that wait for the same receiver. Return their number."""
        with self.store.transaction() as transaction:
            statement = "DELETE FROM messages WHERE id = ? OR (url = ? AND created < ? AND lease IS NULL)"
            return int(transaction.execute(statement, (delivery.id, delivery.url, also_before)).rowcount)

    def retry_later(self, delivery: Delivery, due: float, error: str, *, all_of_url: bool) -> None:
        """Defer the message; with `all_of_url`, everything else for the receiver, too."""
        with self.store.transaction() as transaction:
            # Not a message that another node has leased since, because this one was too slow.
            transaction.execute(
                "UPDATE messages SET lease = NULL, due = ?, error = ? WHERE id = ? AND lease = ?",
                (due, error, delivery.id, self.lease),
            )
            if all_of_url:
                transaction.execute(
                    "UPDATE messages SET due = ? WHERE url = ? AND lease IS NULL AND due < ?",
                    (due, delivery.url, due),
                )

    def next_due(self, besides: Sequence[str] = ()) -> float:
        """Return when the next of these messages is due; infinity if there is none."""
        others, values = _not_to(besides)
        rows = self.store.query(f"SELECT min(due) FROM messages WHERE true{others}", values)  # noqa: S608 - marks only
        return math.inf if not rows or rows[0][0] is None else float(rows[0][0])


def _not_to(beginnings: Sequence[str]) -> tuple[str, list[int | str]]:
    values = [value for each in beginnings for value in (len(each), each)]
    return " AND substr(url, 1, ?) <> ?" * len(beginnings), values


def unsent(store: Store) -> list[tuple[str, int, str]]:
    """Return what could not be sent so far: address, number of messages, error of the last attempt."""
    query = "SELECT url, count(*), max(error) FROM messages WHERE attempts > 0 GROUP BY url ORDER BY url"
    return [(url, number, error) for url, number, error in store.query(query)]
