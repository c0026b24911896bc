"""What readers ask of the history of one site of a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from briter_worker.sinks.history.reading import History, HistoryUnreadableError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from briter_worker.sinks.postgres.database import Database


class RowHistory(History):
    """One site's. Safe in several threads: each question takes a connection for itself."""

    _like = "ILIKE"
    _fresh = "a.stale = 0"
    _number = "floor((a.ended - ?) / ?)::integer"
    _later = "greatest"

    def __init__(self, database: Database, site: str) -> None:
        self._database = database
        self._site = site

    def close(self) -> None:
        """Nothing is held."""

    def _ours(self) -> tuple[list[str], list[object]]:
        return ["a.site = ?"], [self._site]

    def _ask(self, query: str, values: Sequence[object]) -> Sequence[_Row]:
        try:
            with self._database.transaction() as connection:
                found = connection.execute(query.replace("?", "%s").encode(), values)
                names = {column.name: number for number, column in enumerate(found.description or ())}
                return [_Row(names, row) for row in found]
        except OSError as error:
            raise HistoryUnreadableError(f"the history cannot be read: {error}") from error


class _Row:
    """A row with its values by name and in order."""

    __slots__ = ("_names", "_values")

    def __init__(self, names: dict[str, int], values: tuple[Any, ...]) -> None:
        self._names = names
        self._values = values

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - any value
        return self._values[self._names[name]]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)
