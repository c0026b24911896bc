"""A thread that stores what it is handed, in a file of SQLite's or elsewhere. Publishing never waits for it.

All that has gathered is stored in one transaction: one save costs one small write, and a drain of thousands a
few large ones. What cannot be stored (the file is locked, the disk is full, the database is away) is kept for
the next try, up to a limit; the first failure is told. What no store could take is told and left out, whoever
handed it in: it must not stand in the way of what comes after it.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from briter_worker.sinks.sqlite import is_damage, open_to_write, put_aside

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from briter_worker.sinks.sqlite import Schema

Item = TypeVar("Item")
_KEPT = 50_000
"""As many items wait in memory for a store that cannot be written; older ones are given up."""
_AGAIN = 1.0
NEVER = float("inf")
_LAST_WAIT = 10.0
_AT_ONCE = 5000
_REST_EVERY = 3600.0


class Storing(ABC, Generic[Item]):
    """One for each store and process."""

    def __init__(self, *, what: str, where: str, complain: Callable[[str], None]) -> None:
        self._what = what
        self._where = where
        self._complain = complain
        self._items: deque[Item] = deque(maxlen=_KEPT)
        lock = threading.RLock()
        self._wake = threading.Condition(lock)
        self._stored = threading.Condition(lock)
        self._busy = False
        self._due = NEVER
        """When what has gathered is to be stored, by the monotonic clock."""
        self._closing = False
        self._thread: threading.Thread | None = None
        self._complained = False

    def start(self) -> None:
        """Be there even before the first item."""
        with self._wake:
            self._be_there()

    def put(self, item: Item, *, within: float = 0.0) -> None:
        """Have it stored at the latest in so many seconds; `NEVER`: with what comes next."""
        with self._wake:
            self._items.append(item)
            self._be_there()
            due = time.monotonic() + within
            if due < self._due:
                self._due = due
                self._wake.notify()

    def settle(self, within: float) -> None:
        """Wait until all that was handed in is stored: at most so long, and not while nothing can be."""
        with self._wake:
            self._stored.wait_for(lambda: self._complained or not (self._items or self._busy), within)

    def close(self) -> None:
        """Store what is left, within a bounded time, and let go of the store."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(_LAST_WAIT)

    @abstractmethod
    def commit(self, items: list[Item]) -> None:
        """All of these are stored when it returns; none, when it raises."""

    def rest(self) -> None:
        """Everything is stored for now; called every hour in any case. May raise as `commit` does."""

    def may_pass(self, error: Exception) -> bool:
        """Whether the store could not take anything now, rather than these items ever."""
        return isinstance(error, OSError)

    def let_go(self, error: Exception | None = None) -> None:
        """Nothing more is stored for now, or because of this error."""

    def _be_there(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name=self._what, daemon=True)
            self._thread.start()

    def _write(self) -> None:
        while True:
            with self._wake:
                rests = time.monotonic() + _REST_EVERY
                while not self._closing and (left := min(self._due, rests) - time.monotonic()) > 0:
                    self._wake.wait(left)
                closing = self._closing
                gathered = [self._items.popleft() for _ in range(min(_AT_ONCE, len(self._items)))]
                self._due = time.monotonic() if self._items else NEVER
                self._busy = True
            refused = self._store(gathered)
            with self._wake:
                self._busy = False
                self._stored.notify_all()
            if refused:
                with self._wake:
                    room = _KEPT - len(self._items)
                    self._items.extendleft(reversed(refused[max(0, len(refused) - room) :]))
                    if closing:
                        break
                    self._wake.wait(_AGAIN)
                    self._due = time.monotonic()
            elif not self._items:
                self._rest()
                if closing:
                    break
        self.let_go()

    def _store(self, items: list[Item]) -> list[Item]:
        """What is to be tried again: nothing, or all from the first that the store did not take."""
        if not items:
            return []
        try:
            self.commit(items)
        except Exception as error:  # noqa: BLE001 - the thread's end would be the end of all receipts
            if self.may_pass(error):
                self._give_up(error)
                return items
            return self._without_the_one_at_fault(items, error)
        self._complained = False
        return []

    def _without_the_one_at_fault(self, items: list[Item], error: Exception) -> list[Item]:
        if len(items) == 1:
            self._complain(f"the {self._what}{self._where} misses something: {type(error).__name__}: {error}")
            return []
        middle = len(items) // 2
        left = self._store(items[:middle])
        return left + items[middle:] if left else self._store(items[middle:])

    def _rest(self) -> None:
        try:
            self.rest()
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Let go of the store, so that the next try opens it anew; tell the first of several failures."""
        if not self._complained:
            self._complained = True
            text = f"the {self._what}{self._where} cannot be written: {error}; publishing goes on without it"
            # Some errors bring their remedy with them.
            remedy = "" if " Fix: " in text else ". Fix: free space, or give the worker's user write access"
            self._complain(text + remedy)
        self.let_go(error)


class FileStoring(Storing[Item]):
    """Stores in a file, which is opened with the first item."""

    def __init__(
        self, path: Path, schema: Schema, *, what: str, complain: Callable[[str], None], mode: int = 0o644
    ) -> None:
        super().__init__(what=what, where=f" {path}", complain=complain)
        self.path = path
        self._schema = schema
        self._mode = mode
        self._connection: sqlite3.Connection | None = None

    @abstractmethod
    def record(self, connection: sqlite3.Connection, items: list[Item]) -> None:
        """Store these, in order, within a transaction that the caller holds."""

    def forget(self) -> None:
        """The transaction was given up: what it began does not exist."""

    def tidy(self, connection: sqlite3.Connection) -> None:
        """Everything is stored for now. Raises sqlite3.Error."""

    def commit(self, items: list[Item]) -> None:
        """All of these are in the file when it returns; none, when it raises."""
        if self._connection is None:
            self._connection = open_to_write(self.path, self._schema, mode=self._mode)
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            self.record(connection, items)
            connection.execute("COMMIT")
        except BaseException:
            self.forget()
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def rest(self) -> None:
        """Everything is stored for now."""
        if self._connection is not None:
            self.tidy(self._connection)

    def may_pass(self, error: Exception) -> bool:
        """Whether waiting, space or rights would help, or another file."""
        return isinstance(error, OSError | sqlite3.OperationalError) or (
            isinstance(error, sqlite3.Error) and is_damage(error)
        )

    def let_go(self, error: Exception | None = None) -> None:
        """Close the file; put a spoilt one aside."""
        connection, self._connection = self._connection, None
        try:
            if connection is not None:
                connection.close()
            if isinstance(error, sqlite3.Error) and is_damage(error):
                put_aside(self.path)
        except (sqlite3.Error, OSError):
            pass  # told already; the next try meets the same
