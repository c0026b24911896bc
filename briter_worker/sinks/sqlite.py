"""How the sinks' files are opened, and what is done about one that is spoilt."""

from __future__ import annotations

import os
import sqlite3
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_PATIENCE = 0.25
"""How long a writer waits for a lock before it keeps what it has for later; a reader's is its caller's."""


@dataclass(frozen=True, slots=True)
class Schema:
    """The tables of one file, and the version that they are."""

    version: int
    tables: str


def open_to_write(path: Path, schema: Schema, *, mode: int = 0o644) -> sqlite3.Connection:
    """A writer's connection; the file is made when there is none. Raises sqlite3.Error and OSError.

    A file that is no database, or one of a newer program, is put aside under a name that says when.
    """
    try:
        return _prepared(path, schema, mode)
    except sqlite3.DatabaseError as error:
        if not is_damage(error):
            raise
        put_aside(path)
        return _prepared(path, schema, mode)


def _prepared(path: Path, schema: Schema, mode: int) -> sqlite3.Connection:
    # Made here rather than by SQLite, which knows no mode; the files beside it get the same.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode))
    # One connection, used by one thread after another: its owner sees to that.
    connection = sqlite3.connect(path, timeout=_PATIENCE, isolation_level=None, check_same_thread=False)
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        _check(version, schema)
        # Readers never wait for the writer, nor the writer for them. A power cut may cost the last rows;
        # it never costs a post: what the remote has is there.
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        if version < schema.version:
            connection.executescript(
                f"BEGIN IMMEDIATE; {schema.tables} PRAGMA user_version = {schema.version}; COMMIT;"
            )
    except BaseException:
        connection.close()
        raise
    return connection


def _check(version: int, schema: Schema) -> None:
    if version > schema.version:
        raise sqlite3.DatabaseError(f"its version is {version}, this program's is {schema.version}")


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


def storable(text: str) -> str:
    """As SQLite can take it: a job's id may be a file's name, and that may be bytes that are no text."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def is_damage(error: sqlite3.Error) -> bool:
    """Whether the file itself is spoilt: waiting, space or rights would not help."""
    return isinstance(error, sqlite3.DatabaseError) and not isinstance(
        error,
        sqlite3.OperationalError | sqlite3.IntegrityError | sqlite3.ProgrammingError | sqlite3.DataError,
    )


def put_aside(path: Path) -> None:
    """Keep the spoilt file under another name, so that a new one can begin. Raises OSError."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    path.replace(path.with_name(f"{path.name}.spoilt-{stamp}"))
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
