"""The store of the sinks: receipts, live stream, site condition and webhook outbox, in SQLite or Postgres.

Both dialects have the same tables and take the same statements, with `?` for values. A site with a folder of
its own has two SQLite files: the history, and the outbox, which holds secrets. A cluster has one database.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Generic, LiteralString, Protocol, TypeVar

from briter_worker.errors import FixableError, os_error_fix, os_error_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    import psycopg
    from psycopg.rows import TupleRow

    Connection = psycopg.Connection[TupleRow]

Item = TypeVar("Item")
_BUSY_TIMEOUT_S = 1.0
_RETRY_AFTER_S = 10.0
_MAX_UNWRITTEN = 50_000
_VERSION = 2
_SIDE_FILES = ("", "-wal", "-shm", "-journal")

HISTORY_TABLES = """
-- One drain: what its attempts share. Phases: [[phase, began, ended or null], ...] in order.
CREATE TABLE IF NOT EXISTS drains (
  id INTEGER PRIMARY KEY, began REAL NOT NULL, phase TEXT NOT NULL, done INTEGER NOT NULL DEFAULT 0,
  total INTEGER NOT NULL DEFAULT 0, phases TEXT NOT NULL
) STRICT;

-- One attempt; a receipt once it has an outcome.
CREATE TABLE IF NOT EXISTS attempts (
  id INTEGER PRIMARY KEY AUTOINCREMENT, site TEXT NOT NULL DEFAULT '', drain INTEGER,
  job_id TEXT NOT NULL, slug TEXT NOT NULL,
  title TEXT NOT NULL DEFAULT '', attempt INTEGER NOT NULL DEFAULT 0, saved_at REAL, due_at REAL,
  began REAL, ended REAL, outcome TEXT, duration_ms INTEGER, "commit" TEXT, branch TEXT, remote TEXT,
  dry_run INTEGER NOT NULL DEFAULT 0, href TEXT, error TEXT, failure TEXT, fix TEXT, retry_at REAL,
  rejected_paths TEXT NOT NULL DEFAULT '[]', superseded_by TEXT, stale INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX IF NOT EXISTS attempts_open ON attempts (job_id) WHERE outcome IS NULL;
CREATE INDEX IF NOT EXISTS attempts_by_slug ON attempts (slug, id);
CREATE INDEX IF NOT EXISTS attempts_by_job ON attempts (job_id, id);
CREATE INDEX IF NOT EXISTS attempts_by_outcome ON attempts (outcome, id);
CREATE INDEX IF NOT EXISTS attempts_by_end ON attempts (stale, ended);

-- The live stream: events of the last days, in order.
CREATE TABLE IF NOT EXISTS moments (
  id INTEGER PRIMARY KEY AUTOINCREMENT, site TEXT NOT NULL DEFAULT '', at REAL NOT NULL,
  event TEXT NOT NULL, data TEXT NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS moments_by_time ON moments (at);

-- Counters that only grow, for the metrics.
CREATE TABLE IF NOT EXISTS tallies (
  site TEXT NOT NULL, kind TEXT NOT NULL, outcome TEXT NOT NULL, number INTEGER NOT NULL,
  waits INTEGER NOT NULL DEFAULT 0, waited REAL NOT NULL DEFAULT 0, PRIMARY KEY (site, kind, outcome)
) STRICT;

-- The site condition; without a failure, the last one has ended.
CREATE TABLE IF NOT EXISTS conditions (
  site TEXT PRIMARY KEY, failure TEXT, condition TEXT, fix TEXT NOT NULL DEFAULT '', changed_at REAL NOT NULL
) STRICT;
"""
OUTBOX_TABLES = """
-- Messages that are not received yet. Addresses hold secrets. `lease`: the sender that is sending it.
CREATE TABLE IF NOT EXISTS messages (
  id INTEGER PRIMARY KEY AUTOINCREMENT, message TEXT NOT NULL, url TEXT NOT NULL,
  build INTEGER NOT NULL DEFAULT 0, content_type TEXT NOT NULL DEFAULT '', body TEXT NOT NULL DEFAULT '',
  created REAL NOT NULL, due REAL NOT NULL, attempts INTEGER NOT NULL DEFAULT 0, lease TEXT,
  error TEXT NOT NULL DEFAULT ''
) STRICT;
CREATE INDEX IF NOT EXISTS messages_by_due ON messages (due, id);
CREATE INDEX IF NOT EXISTS messages_by_url ON messages (url, id);

-- When each build hook was last called.
CREATE TABLE IF NOT EXISTS builds (url TEXT PRIMARY KEY, called REAL NOT NULL) STRICT;
"""
_ADDED_COLUMNS = {
    "attempts": {"fix": "TEXT", "site": "TEXT NOT NULL DEFAULT ''"},
    "moments": {"site": "TEXT NOT NULL DEFAULT ''"},
}
_OLD_OUTBOX = """
INSERT INTO messages (message, url, build, content_type, body, created, due, attempts, error)
  SELECT message, url, build, content_type, body, created, due, attempts, error FROM deliveries;
DROP TABLE deliveries;
"""


class StoreError(FixableError):
    """The store cannot be used at the moment."""


class Rows(Protocol):
    """The result of a statement."""

    @property
    def rowcount(self) -> int:
        """Number of changed rows."""
        ...

    def fetchone(self) -> Any:  # noqa: ANN401 - a tuple of any values, or None
        """Return the next row."""
        ...

    def fetchall(self) -> list[Any]:
        """Return all rows."""
        ...


class Transaction(Protocol):
    """A connection within a transaction."""

    def execute(self, statement: str, values: Sequence[Any] = (), /) -> Rows:
        """Run one statement, with `?` for each value."""
        ...


class Store(Protocol):
    """Where the sinks keep what they know. Safe in several threads. Raises StoreError."""

    like: str
    """The operator that ignores the case of letters."""
    skip_locked: str
    """The clause that locks the selected rows and leaves out rows that another sender has locked."""
    try_lock: str
    """The statement that returns true if no other process deletes old rows at the moment."""

    def transaction(self, site: str = "") -> AbstractContextManager[Transaction]:
        """Return a transaction: committed at the end, rolled back by an exception.

        One that names its site waits for the site's other writers, so that ids become visible in order.
        """
        ...

    def query(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        """Return the rows; none if the store does not exist yet."""
        ...

    def close(self) -> None:
        """Close the connection. The next call opens a new one."""
        ...


class SqliteStore:
    """A SQLite file in `storage/`, which is input: links are not followed, a damaged file is set aside."""

    like = "LIKE"
    skip_locked = ""
    try_lock = "SELECT 1"

    def __init__(self, path: Path, tables: str = HISTORY_TABLES, *, mode: int = 0o644) -> None:
        self.path = path
        self._tables = tables
        self._mode = mode
        self._guard = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._inode = 0

    @contextmanager
    def transaction(self, site: str = "") -> Iterator[Transaction]:  # noqa: ARG002 - the file has one writer at a time
        """Return a transaction, as `Store` describes it. The file is created if there is none."""
        with self._guard, self._translated("written"):
            try:
                connection = self._open()
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
                self._set_aside()
                connection = self._open()
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException as error:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                if isinstance(error, sqlite3.Error) and _is_damage(error):
                    self._set_aside()
                raise

    def query(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        """Return the rows, without waiting for the writer; none if there is no file yet."""
        with self._guard, self._translated("read"):
            if self._check_files() is None:
                return []
            return self._open().execute(statement, values).fetchall()

    def close(self) -> None:
        """Close the file."""
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
            os.close(os.open(self.path, flags, self._mode))
            inode = self.path.lstat().st_ino
        # A reader without the right to write gets a connection that can only read.
        connection = sqlite3.connect(
            self.path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        try:
            connection.execute("PRAGMA trusted_schema=OFF")
            _check_origin(connection)
            self._upgrade(connection)
        except BaseException:
            connection.close()
            raise
        self._connection, self._inode = connection, inode
        return connection

    def _upgrade(self, connection: sqlite3.Connection) -> None:
        # A power cut may cost the last receipts; it never costs a post.
        connection.execute("PRAGMA synchronous=NORMAL")
        if connection.execute("PRAGMA user_version").fetchone()[0] == _VERSION:
            return
        # Readers never wait for the writer, nor the writer for them. The file keeps this mode.
        connection.execute("PRAGMA journal_mode=WAL")
        script = ["BEGIN IMMEDIATE;", self._tables]
        for table, columns in _ADDED_COLUMNS.items():
            known = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
            script += [
                f"ALTER TABLE {table} ADD COLUMN {name} {definition};"
                for name, definition in columns.items()
                if known and name not in known
            ]
        if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'deliveries'").fetchone():
            script.append(_OLD_OUTBOX)
        connection.executescript("\n".join([*script, f"PRAGMA user_version = {_VERSION}; COMMIT;"]))

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
        except sqlite3.OperationalError as error:
            self.close()
            raise StoreError(
                f"{self.path} cannot be {done}: {error}",
                "free some space, give the worker's user write access, or move the file away",
            ) from error
        except sqlite3.DatabaseError as error:
            self.close()
            if not _is_damage(error):
                raise
            raise StoreError(f"{self.path} cannot be {done}: {error}", "move the file away") from error
        except OSError as error:
            raise StoreError(
                f"{self.path} cannot be {done}: {os_error_text(error, with_path=False)}", os_error_fix(error)
            ) from error


def _check_origin(connection: sqlite3.Connection) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > _VERSION:
        raise sqlite3.DatabaseError(f"its version is {version}, and this program knows {_VERSION}")
    if connection.execute("SELECT 1 FROM sqlite_master WHERE type IN ('view', 'trigger')").fetchone():
        raise sqlite3.DatabaseError("it has views or triggers, so another program made it")


def _is_damage(error: sqlite3.Error) -> bool:
    """Return True if the file itself is at fault: neither waiting nor space nor rights would help."""
    return type(error) is sqlite3.DatabaseError


class PostgresStore:
    """The cluster's database, with all sites. `connect` returns a connection within a transaction."""

    like = "ILIKE"
    skip_locked = " FOR UPDATE SKIP LOCKED"
    try_lock = "SELECT pg_try_advisory_xact_lock(7093859213437861890)"
    _SITE_LOCK: LiteralString = "SELECT pg_advisory_xact_lock(1651666292, hashtext(%s))"

    def __init__(self, connect: Callable[[], AbstractContextManager[Connection]]) -> None:
        self._connect = connect

    @contextmanager
    def transaction(self, site: str = "") -> Iterator[Transaction]:
        """Return a transaction, as `Store` describes it."""
        try:
            with self._connect() as connection:
                if site:
                    connection.execute(self._SITE_LOCK, (site,))
                yield _PostgresTransaction(connection)
        except OSError as error:
            raise StoreError(
                f"the history in Postgres cannot be used: {error}", getattr(error, "fix", "")
            ) from error

    def query(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        """Return the rows."""
        with self.transaction() as transaction:
            return transaction.execute(statement, values).fetchall()

    def close(self) -> None:
        """Do nothing: the connections are the caller's."""


class _PostgresTransaction:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def execute(self, statement: str, values: Sequence[Any] = (), /) -> Rows:
        """Run one statement, with `?` for each value."""
        query = statement.replace("?", "%s").encode()
        return self._connection.execute(query, values or None)


def storable(text: str) -> str:
    """Return the text without what a database cannot hold: a file name may be bytes that are no text."""
    if text.isascii() and "\0" not in text:
        return text
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


class WriteBuffer(Generic[Item]):
    """Writes items in one transaction. Items that the store does not accept are offered again later."""

    def __init__(
        self, write: Callable[[Sequence[Item]], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._write = write
        self._clock = clock
        self._items: deque[Item] = deque(maxlen=_MAX_UNWRITTEN)
        self._guard = threading.Lock()
        self._error: StoreError | None = None
        self._retry_at = 0.0

    def add(self, items: Sequence[Item]) -> None:
        """Add items for the next `flush`; of too many, the oldest are lost."""
        with self._guard:
            self._items.extend(items)

    def flush(self, *, last: bool = False) -> None:
        """Write all items.

        Raises StoreError; then the store is left alone for a while, unless it is the `last` chance. Any other
        exception is about a single item, which is dropped: it must not stand in the way of the others.
        """
        with self._guard:
            if not self._items:
                return
            if self._error is not None and not last and self._clock() < self._retry_at:
                raise self._error
            try:
                self._write(tuple(self._items))
                self._items.clear()
            except StoreError as error:
                self._error, self._retry_at = error, self._clock() + _RETRY_AFTER_S
                raise
            except Exception:  # noqa: BLE001 - whatever is wrong with one item
                self._write_singly()
            self._error = None

    def _write_singly(self) -> None:
        fault: Exception | None = None
        while self._items:
            try:
                self._write((self._items[0],))
            except StoreError:
                raise
            except Exception as error:  # noqa: BLE001 - as above
                fault = error
            self._items.popleft()
        if fault is not None:
            raise fault
