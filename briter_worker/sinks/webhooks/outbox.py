"""What is still to be sent, in a file that outlives the worker: there until it is received or given up.

One that is taken is leased: should its sender die, it is due again, with the attempt counted. Beside the file
stands an empty one, the mark, while anything is unsent; its time stamp is when the next one is due. So a run
of cron sees with one look whether it has anything to do here.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from briter_worker.sinks.sqlite import Schema, open_to_write

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator
    from pathlib import Path

LEASE = 60.0
FURTHEST = 2 * 86400.0
"""Nothing is put off for longer: what seems to be was put off before the clock was set back."""
_TABLES = """
CREATE TABLE IF NOT EXISTS deliveries (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  -- The same at each attempt, and for each receiver.
  message TEXT NOT NULL,
  url TEXT NOT NULL,
  -- A build hook has no body; several that wait for one site are one.
  build INTEGER NOT NULL DEFAULT 0,
  content_type TEXT NOT NULL DEFAULT '',
  body TEXT NOT NULL DEFAULT '',
  created REAL NOT NULL,
  due REAL NOT NULL,
  attempts INTEGER NOT NULL DEFAULT 0,
  leased INTEGER NOT NULL DEFAULT 0,
  error TEXT NOT NULL DEFAULT ''
) STRICT;
CREATE INDEX IF NOT EXISTS deliveries_by_due ON deliveries (due, id);
CREATE INDEX IF NOT EXISTS deliveries_by_url ON deliveries (url, id);

-- When each build hook was last called.
CREATE TABLE IF NOT EXISTS builds (
  url TEXT PRIMARY KEY,
  called REAL NOT NULL
) STRICT;
"""
SCHEMA = Schema(1, _TABLES)
MODE = 0o600
"""Addresses hold secrets."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message for one receiver."""

    message: str
    url: str
    created: float
    content_type: str = ""
    body: str = ""
    build: bool = False
    id: int = 0
    attempts: int = 0
    """With the running one."""


def add(connection: sqlite3.Connection, delivery: Delivery) -> None:
    """To be sent. A build that waits already is not asked for twice."""
    if delivery.build:
        waiting = "SELECT 1 FROM deliveries WHERE url = ? AND build = 1 AND leased = 0"
        if connection.execute(waiting, (delivery.url,)).fetchone():
            return
    connection.execute(
        "INSERT INTO deliveries (message, url, build, content_type, body, created, due) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            delivery.message,
            delivery.url,
            int(delivery.build),
            delivery.content_type,
            delivery.body,
            delivery.created,
            delivery.created,
        ),
    )


class Outbox:
    """The sender's side. Raises sqlite3.Error and OSError; then nothing was changed."""

    def __init__(self, path: Path, mark: Mark, *, build_interval: float) -> None:
        self._path = path
        self._connection = open_to_write(path, SCHEMA, mode=MODE)
        self._opened = path.stat().st_ino
        # Others write in the same file, and never for long.
        self._connection.execute("PRAGMA busy_timeout = 5000")
        self._mark = mark
        self._build_interval = build_interval

    def is_current(self) -> bool:
        """Whether the file is still the one that was opened: a spoilt one is put aside."""
        return self._path.stat().st_ino == self._opened

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()

    def take(self, now: float) -> Delivery | None:
        """The next that is due, leased, its attempt counted; None when nothing is due."""
        with _transaction(self._connection) as connection:
            for row in connection.execute(
                "SELECT id, message, url, created, content_type, body, build, attempts FROM deliveries "
                "WHERE due <= ? OR due > ? ORDER BY due, id LIMIT 100",
                (now, now + FURTHEST),
            ).fetchall():
                number, message, url, created, content_type, body, build, attempts = row
                if build and not self._may_build(connection, number, url, now):
                    continue
                connection.execute(
                    "UPDATE deliveries SET leased = 1, attempts = attempts + 1, due = ? WHERE id = ?",
                    (now + LEASE, number),
                )
                return Delivery(message, url, created, content_type, body, bool(build), number, attempts + 1)
        return None

    def _may_build(self, connection: sqlite3.Connection, number: int, url: str, now: float) -> bool:
        """Whether it is time; if so, this call is for all that wait, as each build is of all there is."""
        row = connection.execute("SELECT called FROM builds WHERE url = ?", (url,)).fetchone()
        again = (row[0] + self._build_interval) if row else now
        # A call that is further away than the interval: the clock was set back.
        if now < again <= now + self._build_interval:
            connection.execute("UPDATE deliveries SET due = ? WHERE id = ?", (again, number))
            return False
        connection.execute(
            "DELETE FROM deliveries WHERE url = ? AND build = 1 AND leased = 0 AND id <> ?", (url, number)
        )
        connection.execute(
            "INSERT INTO builds (url, called) VALUES (?, ?) "
            "ON CONFLICT (url) DO UPDATE SET called = excluded.called",
            (url, now),
        )
        return True

    def remove(self, delivery: Delivery) -> None:
        """It was received, or is given up."""
        with _transaction(self._connection) as connection:
            connection.execute("DELETE FROM deliveries WHERE id = ?", (delivery.id,))

    def give_up(self, delivery: Delivery, *, also_before: float) -> int:
        """It, and what has waited for its receiver since before then, is not sent; how many those are."""
        with _transaction(self._connection) as connection:
            return connection.execute(
                "DELETE FROM deliveries WHERE id = ? OR (url = ? AND created < ? AND leased = 0)",
                (delivery.id, delivery.url, also_before),
            ).rowcount

    def put_off(self, delivery: Delivery, due: float, error: str, *, all_of_url: bool) -> None:
        """To be tried again then; with `all_of_url`, nothing else is sent there before."""
        with _transaction(self._connection) as connection:
            connection.execute(
                "UPDATE deliveries SET leased = 0, due = ?, error = ? WHERE id = ?", (due, error, delivery.id)
            )
            if all_of_url:
                connection.execute(
                    "UPDATE deliveries SET due = ? WHERE url = ? AND leased = 0 AND due < ?",
                    (due, delivery.url, due),
                )

    def next_due(self) -> float | None:
        """When there is something to send; None when nothing is left, and the mark is gone."""
        with _transaction(self._connection) as connection:
            due: float | None = connection.execute("SELECT min(due) FROM deliveries").fetchone()[0]
            self._mark.set(due)
            return due


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


class Mark:
    """Stands beside the outbox while anything in it is unsent. Set within the outbox's transactions."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def set(self, due: float | None) -> None:
        """There is something to send then; None: there is nothing. Raises OSError."""
        if due is None:
            self._path.unlink(missing_ok=True)
        else:
            os.close(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, MODE))
            os.utime(self._path, (due, due))


def waiting(connection: sqlite3.Connection) -> Iterator[tuple[str, int, str]]:
    """What could not be sent so far: address, how many messages, and what the last attempt met."""
    yield from connection.execute(
        "SELECT url, count(*), max(error) FROM deliveries WHERE attempts > 0 GROUP BY url"
    )
