"""The ledger: the version of each file that was handed over last, in a SQLite file in the git folder.

The worker trusts the git folder. A ledger that is lost or damaged is rebuilt from the remote's tip.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from briter_worker.errors import FixableError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path

_FORMAT = 1
_BUSY_TIMEOUT_S = 10.0
_SIDE_FILES = ("", "-wal", "-shm", "-journal")
_DAMAGE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_SCHEMA})
_SCHEMA = """
CREATE TABLE files (
    folder TEXT NOT NULL,
    name TEXT NOT NULL,
    blob TEXT NOT NULL,
    executable INTEGER NOT NULL,
    stamp BLOB NOT NULL,
    PRIMARY KEY (folder, name)
) WITHOUT ROWID
"""
_PUT = "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?)"
UNPROVEN = b""
"""The stamp of a version that nobody has compared with the file yet, or that may change without a trace."""


class LedgerDamagedError(Exception):
    """The ledger cannot be read, or it is another program's file."""


class LedgerUnusableError(FixableError):
    """The ledger cannot be read or written now: a full disk, a lock, missing permissions."""


class Version(NamedTuple):
    """Content and mode of a file."""

    blob: str
    """Git's id of the file's bytes; of a version that git wrote, of the content before its filters."""
    is_executable: bool = False


class Known(NamedTuple):
    """Entry of one path in the ledger."""

    version: Version
    stamp: bytes = UNPROVEN
    """The stat data of the file that was seen to have this version."""


class Ledger:
    """The versions that were handed over. For one thread; other processes may record beside it."""

    def __init__(self, path: Path) -> None:
        """Open the ledger, and create an empty one if there is none. Raises LedgerDamagedError."""
        self._path = path
        try:
            self._connection = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
        except sqlite3.DatabaseError as error:
            raise _translated(error, path) from error
        try:
            self._prepare()
            status = path.stat()
            self._inode, self._size = status.st_ino, status.st_size
        except sqlite3.DatabaseError as error:
            self._connection.close()
            raise _translated(error, path) from error
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self) -> None:
        connection = self._connection
        connection.execute("PRAGMA synchronous=NORMAL")  # a power cut may cost a job without changes
        connection.execute("PRAGMA journal_mode=WAL")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version == _FORMAT:
            connection.execute("SELECT folder, name, blob, executable, stamp FROM files LIMIT 1")
            return
        if version or connection.execute("SELECT 1 FROM sqlite_master").fetchone():
            raise sqlite3.DatabaseError("another program or another version of this program made it")

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def is_there(self) -> bool:
        """Return True if the file that was opened still is the ledger. Raises LedgerDamagedError."""
        try:
            status = self._path.stat()
        except OSError:
            return False
        if status.st_ino != self._inode:
            return False
        if status.st_size < self._size:  # SQLite itself only lets it grow
            raise LedgerDamagedError("it was truncated")
        self._size = status.st_size
        return True

    def is_filled(self) -> bool:
        """Return True once `fill` has succeeded."""
        version = self._query("PRAGMA user_version")[0][0]
        return bool(version == _FORMAT)

    def fill(self, versions: Iterable[tuple[str, Version]]) -> None:
        """Replace everything by these versions, all or nothing."""
        rows = [_row(path, Known(version)) for path, version in versions]
        self._change("DROP TABLE IF EXISTS files", _SCHEMA, f"PRAGMA user_version={_FORMAT}", rows=rows)

    def known(self, paths: Collection[str]) -> dict[str, Known]:
        """Return what is known of these paths."""
        found = {}
        select = "SELECT blob, executable, stamp FROM files WHERE folder = ? AND name = ?"
        for path in paths:
            for blob, executable, stamp in self._query(select, _split(path)):
                found[path] = Known(Version(blob, bool(executable)), stamp)
        return found

    def stamps(self, folder: str) -> dict[str, bytes]:
        """Return the stamp of each file in this folder, by name."""
        return dict(self._query("SELECT name, stamp FROM files WHERE folder = ?", (folder,)))

    def names(self, folder: str) -> list[str]:
        """Return the names of the files in this folder."""
        return [name for (name,) in self._query("SELECT name FROM files WHERE folder = ?", (folder,))]

    def folders(self, top: str) -> list[str]:
        """Return `top` and the folders below it that have files."""
        # "0" follows "/": all that begins with the folder's name and a slash lies between.
        select = "SELECT DISTINCT folder FROM files WHERE folder = ? OR folder >= ? AND folder < ?"
        return [folder for (folder,) in self._query(select, (top, f"{top}/", f"{top}0"))]

    def has_files_below(self, folder: str, more_than: int = 0) -> bool:
        """Return True if more than so many files are known in the folder and below it."""
        select = "SELECT 1 FROM files WHERE folder = ? OR folder >= ? AND folder < ? LIMIT ?"
        return len(self._query(select, (folder, f"{folder}/", f"{folder}0", more_than + 1))) > more_than

    def put(self, changes: Mapping[str, Known | None]) -> None:
        """Store what was handed over; None for a file that is gone."""
        gone = [_split(path) for path, known in changes.items() if known is None]
        # Not in a list: the first start stores the stamps of all files.
        rows = (_row(path, known) for path, known in changes.items() if known is not None)
        self._change(rows=rows, gone=gone)

    def _query(self, statement: str, values: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(statement, values).fetchall()
        except sqlite3.DatabaseError as error:
            raise _translated(error, self._path) from error

    def _change(
        self,
        *statements: str,
        rows: Iterable[tuple[object, ...]] = (),
        gone: Collection[tuple[str, str]] = (),
    ) -> None:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            with self._connection:  # commits, or rolls back
                for statement in statements:
                    self._connection.execute(statement)
                self._connection.executemany("DELETE FROM files WHERE folder = ? AND name = ?", gone)
                self._connection.executemany(_PUT, rows)
        except sqlite3.DatabaseError as error:
            raise _translated(error, self._path) from error


def record(path: Path, versions: Mapping[str, Version | None]) -> None:
    """Note in the ledger what the worker is about to write itself; None for a file that it removes.

    Without a ledger, nobody watches. A ledger that cannot be written costs jobs without changes, and the
    watcher reports and rebuilds it.
    """
    if not path.exists():
        return
    changes = {name: None if version is None else Known(version) for name, version in versions.items()}
    with suppress(LedgerDamagedError, LedgerUnusableError), closing(Ledger(path)) as ledger:
        if ledger.is_filled():
            ledger.put(changes)


def remove(path: Path) -> None:
    """Remove the ledger, so that a new one is filled."""
    for suffix in _SIDE_FILES:
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _translated(error: sqlite3.DatabaseError, path: Path) -> Exception:
    """Return what an error of SQLite means: damage, or trouble that may pass."""
    code = getattr(error, "sqlite_errorcode", None)
    if isinstance(error, sqlite3.OperationalError) and (code is None or code & 0xFF not in _DAMAGE):
        if "no such table" in str(error):
            return LedgerDamagedError(str(error))
        fix = f"free disk space, or let the worker's user write {path}"
        return LedgerUnusableError(f"the ledger of watch cannot be used: {error}", fix)
    return LedgerDamagedError(str(error))


def _split(path: str) -> tuple[str, str]:
    folder, _, name = path.rpartition("/")
    return folder, name


def _row(path: str, known: Known) -> tuple[object, ...]:
    return (*_split(path), known.version.blob, int(known.version.is_executable), known.stamp)
