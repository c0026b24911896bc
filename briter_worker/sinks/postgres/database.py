"""What these sinks need of the database that they are given, and the thread that writes into it."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Protocol, TypeVar

from briter_worker.sinks.sqlite import storable
from briter_worker.sinks.storing import Storing

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import psycopg
    from psycopg.rows import TupleRow

    Connection = psycopg.Connection[TupleRow]

Item = TypeVar("Item")


class Database(Protocol):
    """Connections to the cluster's Postgres. What the server or the network does is an OSError."""

    def transaction(self, *, flushed: bool = True) -> AbstractContextManager[Connection]:
        """A connection in a transaction; if not flushed, it waits for no disk, and may be lost by a crash."""
        ...

    def asking(self) -> AbstractContextManager[Connection]:
        """A connection in which each statement is a transaction of its own."""
        ...


class RowStoring(Storing[Item]):
    """Stores in the database: what cannot be stored as it is away waits for it to come back."""

    def __init__(self, database: Database, *, what: str, complain: Callable[[str], None]) -> None:
        super().__init__(what=what, where=" in Postgres", complain=complain)
        self._database = database

    @abstractmethod
    def record(self, connection: Connection, items: list[Item]) -> None:
        """Store these, in order, within a transaction that the caller holds."""

    def is_lasting(self, item: Item) -> bool:  # noqa: ARG002 - for who knows better
        """Whether it must outlive a crash of the server that comes right after it."""
        return True

    def commit(self, items: list[Item]) -> None:
        """All of these are stored when it returns; none, when it raises."""
        with self._database.transaction(flushed=any(map(self.is_lasting, items))) as connection:
            self.record(connection, items)


def storable_row(text: str) -> str:
    """As Postgres can take it: its texts have no NUL."""
    return storable(text).replace("\0", "\\x00")
