"""What jobs carry: each content once, by the id that git would give it, in parts.

No statement carries more than one part, so that a large file takes no more memory than a small one, neither
here nor in the server. A content goes away with the last publication that needs it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from briter_worker.ports import Delivered, Delivery

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from briter_worker.queues.postgres.database import Connection, Database

PART = 1 << 20
SMALL = 1 << 16
"""Contents up to this size are sent and fetched many at a time."""
FEW = 20
"""From so many rows on, they are copied in bulk."""
_MANY = 500
"""So many rows go or come in one statement."""


class ContentChangedError(Exception):
    """A content was not what its id says: the file changed while it was read. To be read again."""

    def __init__(self, blob: str) -> None:
        self.blob = blob
        super().__init__(f"a file changed while it was read, so that its content is not {blob} any more")


class Source(Protocol):
    """What a job brings along, and where its contents come from, read when they are needed."""

    @property
    def delivery(self) -> Delivery:
        """Its files and folders."""
        ...

    @property
    def sizes(self) -> Mapping[str, int]:
        """How large each content is, by its blob id."""
        ...

    def content(self, blob: str) -> Iterator[bytes]:
        """A content, part by part."""
        ...


@dataclass(frozen=True)
class Values:
    """A `Source` of contents that are at hand."""

    delivery: Delivery
    contents: Mapping[str, bytes]
    """By their blob ids."""

    @staticmethod
    def of(
        files: Mapping[str, bytes | None],
        *,
        saved_at: float,
        folders: Sequence[str] = (),
        mode: str = "100644",
    ) -> Values:
        """These paths have these contents; None: there is nothing there any more."""
        contents = {blob_of(content): content for content in files.values() if content is not None}
        delivered = [
            Delivered(path, mode, blob_of(content), saved_at)
            if content is not None
            else Delivered(path, "", None, saved_at)
            for path, content in files.items()
        ]
        return Values(Delivery(tuple(delivered), tuple(folders)), contents)

    @property
    def sizes(self) -> Mapping[str, int]:
        """How large each content is."""
        return {blob: len(content) for blob, content in self.contents.items()}

    def content(self, blob: str) -> Iterator[bytes]:
        """A content."""
        yield self.contents[blob]


def blob_of(content: bytes) -> str:
    """The id that git gives this content."""
    return _digest(len(content), content).hexdigest()


def store(connection: Connection, sources: Iterable[Source]) -> None:
    """All contents are in the database, and stay there at least until this transaction ends.

    Raises ContentChangedError.
    """
    wanted: dict[str, Source] = {}
    for source in sources:
        wanted.update({file.blob: source for file in source.delivery.files if file.blob is not None})
    blobs = sorted(wanted)
    kept = connection.execute(
        "SELECT blob FROM contents WHERE blob = ANY(%s) ORDER BY blob FOR KEY SHARE", (blobs,)
    )
    have = {str(blob) for (blob,) in kept}
    left = [blob for blob in blobs if blob not in have]
    if left:
        new = _add(connection, {blob: wanted[blob].sizes[blob] for blob in left})
        _send(connection, [blob for blob in left if blob in new], wanted)


def _add(connection: Connection, sizes: Mapping[str, int]) -> set[str]:
    """Rows for these contents; which of them nobody has brought meanwhile.

    Here writers wait for one another. They all go through the contents in one order, and only once: a second
    look at what another has brought would be out of that order, and end in a circle.
    """
    rows = connection.execute(
        "INSERT INTO contents (blob, size) SELECT * FROM unnest(%s::text[], %s::bigint[])"
        " ON CONFLICT (blob) DO UPDATE SET size = excluded.size RETURNING blob, xmax = 0",
        (list(sizes), list(sizes.values())),
    )
    return {str(blob) for blob, is_new in rows if is_new}


def _send(connection: Connection, blobs: Sequence[str], wanted: Mapping[str, Source]) -> None:
    small = [blob for blob in blobs if wanted[blob].sizes[blob] <= SMALL]
    if len(small) < FEW:
        rows = [(blob, n, part) for blob in small for n, part in enumerate(checked(blob, wanted[blob]))]
        connection.execute(
            "INSERT INTO content_parts (blob, part, bytes)"
            " SELECT * FROM unnest(%s::text[], %s::int[], %b::bytea[])",
            [[row[column] for row in rows] for column in range(3)],
        )
    else:
        for start in range(0, len(small), _MANY):
            _copy(connection, small[start : start + _MANY], wanted)
    for blob in blobs:
        if wanted[blob].sizes[blob] > SMALL:
            for number, part in enumerate(checked(blob, wanted[blob])):
                connection.execute(
                    "INSERT INTO content_parts (blob, part, bytes) VALUES (%s, %s, %b)", (blob, number, part)
                )


def _copy(connection: Connection, blobs: Sequence[str], wanted: Mapping[str, Source]) -> None:
    # Not all in one: the server ends a statement that takes too long.
    with connection.cursor().copy(
        "COPY content_parts (blob, part, bytes) FROM STDIN (FORMAT BINARY)"
    ) as copy:
        copy.set_types(["text", "int4", "bytea"])
        for blob in blobs:
            for number, part in enumerate(checked(blob, wanted[blob])):
                copy.write_row((blob, number, part))


def checked(blob: str, source: Source) -> Iterator[bytes]:
    """The content in parts of one size but the last, for which the id has proved right in the end."""
    digest = _digest(source.sizes[blob])
    pending = bytearray()
    for piece in source.content(blob):
        digest.update(piece)
        pending += piece
        while len(pending) >= PART:
            yield bytes(pending[:PART])
            del pending[:PART]
    if digest.hexdigest() != blob:
        raise ContentChangedError(blob)
    if pending:
        yield bytes(pending)


def _digest(size: int, content: bytes = b"") -> hashlib._Hash:
    return hashlib.sha1(b"blob %d\0" % size + content, usedforsecurity=False)


def read(database: Database, blob: str) -> Iterator[bytes]:
    """A content, part by part, with no transaction open in between. Raises LookupError where it is not."""
    number = 0
    while True:
        with database.asking() as connection:
            row = (
                connection.cursor(binary=True)
                .execute(
                    "SELECT size, bytes FROM contents LEFT JOIN content_parts USING (blob)"
                    " WHERE blob = %s AND part IS NOT DISTINCT FROM CASE WHEN size = 0 THEN NULL ELSE %s END",
                    (blob, number),
                )
                .fetchone()
            )
        if row is None:
            raise LookupError(
                f"the database has no content {blob}: the post it belonged to is not there any more"
            )
        size, part = row
        if part:
            yield part
        number += 1
        if number * PART >= size:
            return


def read_small(database: Database, blobs: Sequence[str]) -> dict[str, bytes]:
    """Those of the contents that are small, at once."""
    with database.asking() as connection:
        rows = connection.cursor(binary=True).execute(
            "SELECT blob, coalesce(bytes, '') FROM contents LEFT JOIN content_parts USING (blob)"
            " WHERE blob = ANY(%s) AND size <= %s",
            (list(blobs), SMALL),
        )
        return {str(blob): bytes(content) for blob, content in rows}


def forget(connection: Connection, blobs: Iterable[str]) -> int:
    """Those of the contents that nothing needs any more are gone; how many.

    A content that a writer is just about to need is locked by it, and stays.
    """
    candidates = sorted(set(blobs))
    if not candidates:
        return 0
    # Two statements: what a writer has committed before we had the lock, only the second one sees.
    free = connection.execute(
        "SELECT blob FROM contents WHERE blob = ANY(%s) ORDER BY blob FOR UPDATE SKIP LOCKED", (candidates,)
    ).fetchall()
    return drop(connection, [blob for (blob,) in free])


def drop(connection: Connection, locked: Sequence[str]) -> int:
    """Of these contents, which an earlier statement has locked, what nothing needs is gone; how many."""
    if not locked:
        return 0
    return connection.execute(
        "DELETE FROM contents c WHERE blob = ANY(%s)"
        " AND NOT EXISTS (SELECT FROM delivered d WHERE d.blob = c.blob)",
        (list(locked),),
    ).rowcount


def tidy(database: Database) -> int:
    """Contents that nothing needs, as something took the publication away by itself, are gone; how many."""
    gone = 0
    while True:
        with database.transaction() as connection:
            rows = connection.execute(
                "SELECT blob FROM contents c WHERE NOT EXISTS (SELECT FROM delivered d WHERE d.blob = c.blob)"
                " LIMIT %s",
                (_MANY,),
            ).fetchall()
            removed = forget(connection, [blob for (blob,) in rows])
        gone += removed
        if not removed:
            return gone
