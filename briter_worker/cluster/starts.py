"""What the files of a site's CMS started from, kept in the database: any host may publish their next save."""

from __future__ import annotations

from typing import TYPE_CHECKING, LiteralString

from briter_worker.git.bases import Base, Conflict
from briter_worker.queues.postgres import tokens
from briter_worker.queues.postgres.deliveries import as_bytes, as_path

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from briter_worker.queues.postgres.database import Database

# A content goes with the last start that is it.
_KEEP: LiteralString = """
, kept AS (
    INSERT INTO starts (site, path, start, is_conflict, ours, theirs)
    SELECT %(site)s, new.* FROM fence, unnest(
        %(paths)s::bytea[], %(starts)s::text[], %(conflicts)s::boolean[], %(ours)s::text[], %(theirs)s::text[]
    ) AS new
    ON CONFLICT (site, path) DO UPDATE SET start = excluded.start, is_conflict = excluded.is_conflict,
        ours = excluded.ours, theirs = excluded.theirs
),
stored AS (
    INSERT INTO start_contents (site, blob, bytes)
    SELECT %(site)s, new.* FROM fence, unnest(%(blobs)s::text[], %(contents)b::bytea[]) AS new
    ON CONFLICT DO NOTHING
),
dropped AS (
    DELETE FROM start_contents c USING fence
    WHERE c.site = %(site)s AND c.blob <> ALL (coalesce(array_remove(%(starts)s::text[], NULL), '{}'))
    AND c.blob = ANY(ARRAY(SELECT start FROM starts WHERE site = %(site)s AND path = ANY(%(paths)s::bytea[])))
    AND NOT EXISTS (
        SELECT FROM starts s
        WHERE s.site = c.site AND s.start = c.blob AND s.path <> ALL (%(paths)s::bytea[])
    )
)
SELECT FROM fence
"""


class Starts:
    """Implements git's `Versions` for one drain of one site."""

    def __init__(self, database: Database, site: str, *, token: int) -> None:
        self._database = database
        self._site = site
        self._token = token

    def bases(self, paths: Collection[str]) -> Mapping[str, Base]:
        """What is known of these paths."""
        with self._database.asking() as connection:
            rows = connection.execute(
                "SELECT path, start, is_conflict, ours, theirs FROM starts"
                " WHERE site = %s AND path = ANY(%s)",
                (self._site, [as_bytes(path) for path in paths]),
            )
            return {
                as_path(path): Base(start, Conflict(ours, theirs) if is_conflict else None)
                for path, start, is_conflict, ours, theirs in rows
            }

    def remember(self, bases: Mapping[str, Base], contents: Mapping[str, bytes]) -> None:
        """Keep these, each in the place of what was known of its path. Raises LockLostError."""
        kept = list(bases.values())
        conflicts = [base.conflict for base in kept]
        values = {
            "paths": [as_bytes(path) for path in bases],
            "starts": [base.start for base in kept],
            "conflicts": [conflict is not None for conflict in conflicts],
            "ours": [conflict and conflict.ours for conflict in conflicts],
            "theirs": [conflict and conflict.theirs for conflict in conflicts],
            "blobs": list(contents),
            "contents": list(contents.values()),
        }
        # Flushed: the posts leave the queue after this, and should the server crash in between, they do so on
        # another connection, which knows nothing of what was lost with it.
        tokens.write(self._database, self._site, self._token, _KEEP, values, flushed=True)

    def content(self, blob: str) -> bytes | None:
        """What was kept of a start's content, if anything was."""
        with self._database.asking() as connection:
            row = connection.execute(
                "SELECT bytes FROM start_contents WHERE site = %s AND blob = %s", (self._site, blob)
            ).fetchone()
        return None if row is None else bytes(row[0])
