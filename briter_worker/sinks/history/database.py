"""The history's file: its tables, and how it is opened by its one writer and by its readers."""

from __future__ import annotations

import sqlite3
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

VERSION = 1
_PATIENCE = 0.25
"""How long the writer waits for a lock before it keeps its events for later; a reader's is its caller's."""

_TABLES = """
-- One drain: what its attempts share.
CREATE TABLE IF NOT EXISTS drains (
  id INTEGER PRIMARY KEY,
  began REAL NOT NULL,
  phase TEXT NOT NULL,
  done INTEGER NOT NULL DEFAULT 0,
  total INTEGER NOT NULL DEFAULT 0,
  -- [[phase, began, ended or null], ...] in order
  phases TEXT NOT NULL
) STRICT;

-- One attempt; a receipt once it has an outcome.
CREATE TABLE IF NOT EXISTS attempts (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  drain INTEGER REFERENCES drains (id),
  job_id TEXT NOT NULL,
  slug TEXT NOT NULL,
  title TEXT NOT NULL DEFAULT '',
  attempt INTEGER NOT NULL DEFAULT 0,
  saved_at REAL,
  due_at REAL,
  began REAL,
  ended REAL,
  outcome TEXT,
  duration_ms INTEGER,
  "commit" TEXT,
  branch TEXT,
  remote TEXT,
  dry_run INTEGER NOT NULL DEFAULT 0,
  href TEXT,
  error TEXT,
  failure TEXT,
  retry_at REAL,
  rejected_paths TEXT NOT NULL DEFAULT '[]',
  superseded_by TEXT,
  stale INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX IF NOT EXISTS attempts_open ON attempts (job_id) WHERE outcome IS NULL;
CREATE INDEX IF NOT EXISTS attempts_by_slug ON attempts (slug, id);
CREATE INDEX IF NOT EXISTS attempts_by_job ON attempts (job_id, id);
CREATE INDEX IF NOT EXISTS attempts_by_outcome ON attempts (outcome, id);
CREATE INDEX IF NOT EXISTS attempts_by_end ON attempts (stale, ended);

-- Everything that happened lately, in order: the live stream.
CREATE TABLE IF NOT EXISTS moments (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  at REAL NOT NULL,
  event TEXT NOT NULL,
  data TEXT NOT NULL
) STRICT;
"""


def open_to_write(path: Path) -> sqlite3.Connection:
    """The writer's connection; the file is made when there is none. Raises sqlite3.Error and OSError.

    A file that is no database, or one of a newer program, is put aside under a name that says when.
    """
    try:
        return _prepared(path)
    except sqlite3.DatabaseError as error:
        if not is_damage(error):
            raise
        put_aside(path)
        return _prepared(path)


def _prepared(path: Path) -> sqlite3.Connection:
    # One connection, used by one thread after another: the sink's lock sees to that.
    connection = sqlite3.connect(path, timeout=_PATIENCE, isolation_level=None, check_same_thread=False)
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        _check(version)
        # Readers never wait for the writer, nor the writer for them. A power cut may cost the last rows;
        # it never costs a post: what the remote has is there.
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        if version < VERSION:
            connection.executescript(f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version = {VERSION}; COMMIT;")
    except BaseException:
        connection.close()
        raise
    return connection


def _check(version: int) -> None:
    if version > VERSION:
        raise sqlite3.DatabaseError(f"its version is {version}, this program's is {VERSION}")


def open_to_read(path: Path, *, patience: float = 1.0) -> sqlite3.Connection:
    """A reader's connection, which can change nothing. Raises sqlite3.Error."""
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=ro",
        uri=True,
        timeout=patience,
        isolation_level=None,
        check_same_thread=False,
    )
    connection.row_factory = sqlite3.Row
    return connection


def is_damage(error: sqlite3.Error) -> bool:
    """Whether the file itself is spoilt: waiting, space or rights would not help."""
    return isinstance(error, sqlite3.DatabaseError) and not isinstance(
        error, sqlite3.OperationalError | sqlite3.IntegrityError | sqlite3.ProgrammingError
    )


def put_aside(path: Path) -> None:
    """Keep the spoilt file under another name, so that a new one can begin. Raises OSError."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    path.replace(path.with_name(f"{path.name}.spoilt-{stamp}"))
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
