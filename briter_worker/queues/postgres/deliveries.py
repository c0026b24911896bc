"""What came with the jobs of a site, for its publisher."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from briter_worker.ports import Delivered, Delivery
from briter_worker.queues.postgres import contents

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from briter_worker.queues.postgres.database import Database

_AHEAD = 64
"""So many small contents are fetched with the one that is asked for."""
# The first contents come along: of one post's drain, all.
_DELIVERED = """
SELECT publication, path, mode, d.blob, bytes, saved_at, base, knows_base FROM (
    SELECT *, row_number() OVER (ORDER BY publication, path) AS number FROM delivered
    WHERE publication = ANY(%(publications)s::bigint[])
) AS d
LEFT JOIN contents c ON number <= %(ahead)s AND c.blob = d.blob AND size BETWEEN 1 AND %(small)s
LEFT JOIN content_parts p ON p.blob = c.blob AND part = 0
UNION ALL
SELECT publication, path, NULL, NULL, NULL, 0, NULL, false FROM folders
WHERE publication = ANY(%(publications)s::bigint[])
ORDER BY publication, path
"""


class PostgresDeliveries:
    """Implements `ports.Deliveries` for one site. For one thread at a time."""

    def __init__(self, database: Database, site: str) -> None:
        self._database = database
        self._site = site
        self._order: list[str] = []
        self._place: dict[str, int] = {}
        self._fetched: dict[str, bytes] = {}

    def of(self, keys: Collection[str]) -> Mapping[str, Delivery]:
        """What came with these claims."""
        publications = [int(key) for key in keys]
        files: dict[int, list[Delivered]] = defaultdict(list)
        folders: dict[int, list[str]] = defaultdict(list)
        fetched: dict[str, bytes] = {}
        with self._database.asking() as connection:
            for number, path, mode, blob, content, *rest in connection.cursor(binary=True).execute(
                _DELIVERED, {"publications": publications, "small": contents.SMALL, "ahead": _AHEAD}
            ):
                if mode is None:
                    folders[number].append(as_path(path))
                    continue
                files[number].append(Delivered(as_path(path), mode, blob, *rest))
                if content is not None:
                    fetched[blob] = bytes(content)
        found = {
            str(number): Delivery(tuple(files[number]), tuple(folders[number])) for number in publications
        }
        self._order = list(
            dict.fromkeys(
                file.blob for delivery in found.values() for file in delivery.files if file.blob is not None
            )
        )
        self._place = {blob: place for place, blob in enumerate(self._order)}
        self._fetched = fetched
        return found

    def content(self, blob: str) -> Iterator[bytes]:
        """A content, part by part; small ones are fetched many at a time, in the order of `of`."""
        content = self._fetched.get(blob)
        if content is None:
            place = self._place.get(blob)
            ahead = [blob] if place is None else self._order[place : place + _AHEAD]
            self._fetched = contents.read_small(self._database, ahead)
            content = self._fetched.get(blob)
        if content is not None:
            yield content
        else:
            yield from contents.read(self._database, blob)

    def published(self, paths: Collection[str]) -> Mapping[str, float]:
        """When the version was saved that was published last, of those paths that ever were."""
        with self._database.asking() as connection:
            rows = connection.execute(
                "SELECT path, saved_at FROM versions WHERE site = %s AND path = ANY(%s)",
                (self._site, [as_bytes(path) for path in paths]),
            )
            return {as_path(path): saved_at for path, saved_at in rows}


def as_bytes(path: str) -> bytes:
    """The path as git has it; what is no text in it survives."""
    return path.encode("utf-8", "surrogateescape")


def as_path(path: bytes) -> str:
    """The path as the worker has it."""
    return bytes(path).decode("utf-8", "surrogateescape")
