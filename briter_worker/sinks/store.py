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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, LiteralString

from briter_worker.errors import FixableError, os_error_fix, os_error_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    import psycopg
    from psycopg.rows import TupleRow

    Connection = psycopg.Connection[TupleRow]

_BUSY_TIMEOUT_S = 1.0
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


class StoreError(FixableError):
    """The store cannot be used at the moment."""


@dataclass(frozen=True, slots=True)
class Transaction:
    """A transaction: committed at the end of its `with`, rolled back by an exception."""

    _run: Callable[[str, Sequence[Any]], Any]

    def execute(self, statement: str, values: Sequence[Any] = ()) -> Any:  # noqa: ANN401 - a cursor of either dialect
        """Run one statement, with `?` for each value."""
        return self._run(statement, [_storable(each) if isinstance(each, str) else each for each in values])


class SqliteStore:
    """A SQLite file in `storage/`, which is input: links are not followed, a damaged file is set aside."""

    like = "LIKE"
    """The operator that ignores the case of letters."""
    skip_locked = ""
    """The clause that locks the selected rows and leaves out rows that another sender has locked."""
    try_lock = "SELECT 1"
    """The statement that returns true if no other process deletes old rows at the moment."""

    def __init__(self, path: Path, tables: str = HISTORY_TABLES, *, mode: int = 0o644) -> None:
        self.path = path
        self._tables = tables
        self._mode = mode
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
            try:
                yield Transaction(connection.execute)
                connection.execute("COMMIT")
            except BaseException as error:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                if isinstance(error, sqlite3.Error) and _is_damage(error):
                    self._set_aside()
                raise

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
            os.close(os.open(self.path, flags, self._mode))
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
        is_odd = connection.execute(
            "SELECT 1 FROM sqlite_master WHERE type IN ('view', 'trigger')"
        ).fetchone()
        if is_odd or version not in (0, _VERSION):
            raise sqlite3.DatabaseError("another program or another version of this program made it")
        if version == 0:
            # Readers never wait for the writer, nor the writer for them. The file keeps this mode.
            connection.execute("PRAGMA journal_mode=WAL")
            connection.executescript(
                f"BEGIN IMMEDIATE; {self._tables} PRAGMA user_version = {_VERSION}; COMMIT;"
            )

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
        """Return a transaction. Raises StoreError.

        One that names its site waits for the site's other writers, so that ids become visible in order.
        """
        try:
            with self._connect() as connection:
                if site:
                    connection.execute(self._SITE_LOCK, (site,))
                yield Transaction(
                    lambda statement, values: connection.execute(
                        statement.replace("?", "%s").encode(), values or None
                    )
                )
        except OSError as error:
            raise StoreError(
                f"the history in Postgres cannot be used: {error}", getattr(error, "fix", "")
            ) from error

    def query(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        """Return the rows. Raises StoreError."""
        with self.transaction() as transaction:
            rows: list[Any] = transaction.execute(statement, values).fetchall()
            return rows

    def close(self) -> None:
        """Do nothing: the connections are the caller's."""


Store = SqliteStore | PostgresStore
"""Where the sinks keep what they know. Safe in several threads."""


def _storable(text: str) -> str:
    """Return the text without what a database cannot hold: a file name may be bytes that are no text."""
    if text.isascii() and "\0" not in text:
        return text
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
