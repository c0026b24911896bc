"""The contents that jobs carry: each blob once, by the id that git gives it, in parts of 1 MiB.

No statement carries much more than one part, so that large files need little memory, here and in the server.
The garbage collection deletes a blob when no job and no base version needs it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from briter_worker.ports import BaseVersion, Conflict, Payload, SubmittedFile
from briter_worker.queues.postgres.fencing import lock_for_worker
from briter_worker.queues.postgres.rows import decode_path, encode_path, insert, path_field

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from briter_worker.queues.postgres.database import Connection, Database

PART_BYTES = 1 << 20
_COLLECTED_AT_ONCE = 500
# The lock keeps the garbage collection away from the known blobs. Each producer inserts in one order, and
# only once, so that two never wait for each other in a circle. xmax is not 0 where another producer has
# inserted the blob, with its parts, meanwhile.
_INSERT_BLOBS = """
WITH known AS (SELECT blob FROM blobs WHERE blob = ANY(%(blobs)s::text[]) ORDER BY blob FOR KEY SHARE)
INSERT INTO blobs (blob, size)
SELECT blob, size FROM unnest(%(blobs)s::text[], %(sizes)s::bigint[]) AS wanted (blob, size)
WHERE blob NOT IN (SELECT blob FROM known) ORDER BY blob
ON CONFLICT (blob) DO UPDATE SET size = excluded.size RETURNING blob, xmax = 0
"""


class ContentChangedError(Exception):
    """A file changed while it was read, so that its content does not match its blob id. Read it again."""

    def __init__(self, blob: str) -> None:
        self.blob = blob
        super().__init__(f"a file changed while it was read: its content is not {blob} any more")


class PayloadSource(Protocol):
    """The payload of a new job, and the contents, read when they are needed."""

    @property
    def payload(self) -> Payload:
        """Return the files and folders."""
        ...

    @property
    def sizes(self) -> Mapping[str, int]:
        """Return the size of each blob in bytes."""
        ...

    def content(self, blob: str) -> Iterator[bytes]:
        """Yield the content of a blob in pieces."""
        ...


@dataclass(frozen=True)
class PayloadValues:
    """A `PayloadSource` with all contents in memory."""

    payload: Payload
    contents: Mapping[str, bytes]
    """By blob id."""

    @classmethod
    def of(
        cls,
        files: Mapping[str, bytes | None],
        *,
        saved_at: float,
        folders: Sequence[str] = (),
        mode: str = "100644",
    ) -> PayloadValues:
        """Return the source of files with these contents; None: the file was deleted."""
        contents = {blob_id(content): content for content in files.values() if content is not None}
        submitted = tuple(
            SubmittedFile(path, "", None, saved_at)
            if content is None
            else SubmittedFile(path, mode, blob_id(content), saved_at)
            for path, content in files.items()
        )
        return cls(Payload(submitted, tuple(folders)), contents)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Return the size of each blob in bytes."""
        return {blob: len(content) for blob, content in self.contents.items()}

    def content(self, blob: str) -> Iterator[bytes]:
        """Yield the content of a blob."""
        yield self.contents[blob]


def blob_id(content: bytes) -> str:
    """Return the id that git gives a blob of this content."""
    return _digest(len(content), content).hexdigest()


def _digest(size: int, content: bytes = b"") -> hashlib._Hash:
    return hashlib.sha1(b"blob %d\0" % size + content, usedforsecurity=False)


def store_blobs(connection: Connection, sources: Iterable[PayloadSource]) -> None:
    """Store all contents of the sources; they stay at least until the transaction ends.

    Call it before the site is locked, because large contents take long. Raises ContentChangedError.
    """
    wanted = {
        file.blob: source for source in sources for file in source.payload.files if file.blob is not None
    }
    inserted = connection.execute(
        _INSERT_BLOBS, {"blobs": list(wanted), "sizes": [wanted[blob].sizes[blob] for blob in wanted]}
    )
    new = [blob for blob, is_new in inserted if is_new]
    _insert_parts(connection, ((blob, *part) for blob in new for part in _parts(blob, wanted[blob])))


def _parts(blob: str, source: PayloadSource) -> Iterator[tuple[int, bytes]]:
    """Yield the content in parts of one size, except for the last, and compare it with the blob id."""
    digest = _digest(source.sizes[blob])
    pending = bytearray()
    number = 0
    for piece in source.content(blob):
        digest.update(piece)
        pending += piece
        while len(pending) >= PART_BYTES:
            yield number, bytes(pending[:PART_BYTES])
            del pending[:PART_BYTES]
            number += 1
    if digest.hexdigest() != blob:
        raise ContentChangedError(blob)
    if pending:
        yield number, bytes(pending)


def _insert_parts(connection: Connection, parts: Iterable[tuple[str, int, bytes]]) -> None:
    """Insert the parts, about `PART_BYTES` in a statement."""
    batch: list[tuple[str, int, bytes]] = []
    size = 0
    for part in itertools.chain(parts, [None]):
        if batch and (part is None or size + len(part[2]) > PART_BYTES):
            connection.execute(
                "INSERT INTO blob_parts (blob, part, bytes)"
                " SELECT * FROM unnest(%s::text[], %s::int[], %b::bytea[])",
                [list(column) for column in zip(*batch, strict=True)],
            )
            batch, size = [], 0
        if part is not None:
            batch.append(part)
            size += len(part[2])


def collect_blobs(database: Database) -> int:
    """Delete the blobs that no job and no base version needs; return how many.

    A blob that a producer is about to use is locked, and stays.
    """
    unused = (
        "NOT EXISTS (SELECT FROM files f WHERE f.blob = b.blob)"
        " AND NOT EXISTS (SELECT FROM base_versions v WHERE v.kept = b.blob)"
    )
    collected = 0
    while True:
        with database.transaction() as connection:
            locked = connection.execute(
                f"SELECT blob FROM blobs b WHERE {unused} ORDER BY blob LIMIT %s FOR UPDATE SKIP LOCKED",  # noqa: S608
                (_COLLECTED_AT_ONCE,),
            ).fetchall()
            # A second statement, because the first does not see what was committed before it had the locks.
            deleted = connection.execute(
                f"DELETE FROM blobs b WHERE blob = ANY(%s) AND {unused}",  # noqa: S608
                ([blob for (blob,) in locked],),
            ).rowcount
        collected += deleted
        if not deleted:
            return collected


class PostgresPayloads:
    """Implements `ports.Payloads` for one site."""

    def __init__(self, database: Database, site: str) -> None:
        self._database = database
        self._site = site

    def of(self, keys: Collection[str]) -> Mapping[str, Payload]:
        """Return the payload of each claim, by key."""
        publications = [int(key) for key in keys]
        files: dict[int, list[SubmittedFile]] = defaultdict(list)
        folders: dict[int, list[str]] = defaultdict(list)
        with self._database.transaction() as connection:
            for number, path, *rest in connection.execute(
                "SELECT publication, path, mode, blob, saved_at, base, has_base FROM files"
                " WHERE publication = ANY(%s) ORDER BY publication, path",
                (publications,),
            ):
                files[number].append(SubmittedFile(decode_path(path), *rest))
            for number, path in connection.execute(
                "SELECT publication, path FROM folders WHERE publication = ANY(%s) ORDER BY path",
                (publications,),
            ):
                folders[number].append(decode_path(path))
        return {str(number): Payload(tuple(files[number]), tuple(folders[number])) for number in publications}

    def content(self, blob: str) -> Iterator[bytes]:
        """Yield the content of a blob in parts. Raises LookupError if the database does not have the blob."""
        number, size = 0, 1
        while number * PART_BYTES < size:
            # No transaction is open between two parts, because the caller may take long.
            with self._database.connection() as connection:
                row = (
                    connection.cursor(binary=True)
                    .execute(
                        "SELECT size, bytes FROM blobs b"
                        " LEFT JOIN blob_parts p ON p.blob = b.blob AND part = %s WHERE b.blob = %s",
                        (number, blob),
                    )
                    .fetchone()
                )
            if row is None:
                raise LookupError(f"the database has no blob {blob}: the job that it belonged to is gone")
            size, content = row
            if content:
                yield bytes(content)
            number += 1

    def published(self, paths: Collection[str]) -> Mapping[str, float]:
        """Return when the version was saved that was published last, for the paths that ever were."""
        with self._database.connection() as connection:
            rows = connection.execute(
                "SELECT path, saved_at FROM published WHERE site = %s AND path = ANY(%s)",
                (self._site, [encode_path(path) for path in paths]),
            )
            return {decode_path(path): saved_at for path, saved_at in rows}


class PostgresBases:
    """Implements `ports.BaseVersions` for one drain of one site."""

    def __init__(self, database: Database, site: str, *, token: int) -> None:
        self._database = database
        self._site = site
        self._token = token

    def bases(self, paths: Collection[str]) -> Mapping[str, BaseVersion]:
        """Return what is known of these paths."""
        with self._database.connection() as connection:
            rows = connection.execute(
                "SELECT path, base, conflict FROM base_versions WHERE site = %s AND path = ANY(%s)",
                (self._site, [encode_path(path) for path in paths]),
            )
            return {
                decode_path(path): BaseVersion(base, conflict and Conflict(**json.loads(conflict)))
                for path, base, conflict in rows
            }

    def remember(self, versions: Mapping[str, BaseVersion], contents: Mapping[str, bytes]) -> None:
        """Store the versions, each in place of what was known of its path. Raises LockLostError.

        `contents`: by blob, the contents of base versions that the remote does not have.
        """
        files = tuple(SubmittedFile("", "", blob, 0.0) for blob in contents)
        records = [
            {
                "site": self._site,
                "path": path_field(path),
                "base": version.blob,
                "conflict": json.dumps(version.conflict._asdict()) if version.conflict else None,
                "kept": version.blob if version.blob in contents else None,
            }
            for path, version in versions.items()
        ]
        with self._database.transaction() as connection:
            # Before the lock, as producers do: two that wait for each other would deadlock.
            store_blobs(connection, [PayloadValues(Payload(files), contents)])
            lock_for_worker(connection, self._site, self._token)
            connection.execute(
                "DELETE FROM base_versions WHERE site = %s AND path = ANY(%s)",
                (self._site, [encode_path(path) for path in versions]),
            )
            insert(connection, "base_versions", records)
