"""What the files of a site's CMS started from, kept in the database: any host may publish their next save."""

from __future__ import annotations

from typing import TYPE_CHECKING

from briter_worker.git.bases import Base, Conflict
from briter_worker.queues.postgres import tokens
from briter_worker.queues.postgres.deliveries import as_bytes, as_path

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from briter_worker.queues.postgres.database import Database

_KEEP = """
INSERT INTO starts (site, path, start, is_conflict, ours, theirs)
SELECT %s, * FROM unnest(%s::bytea[], %s::text[], %s::boolean[], %s::text[], %s::text[])
ON CONFLICT (site, path) DO UPDATE
SET start = excluded.start, is_conflict = excluded.is_conflict, ours = excluded.ours, theirs = excluded.theirs
"""


class Starts:
    """Implements git's `Versions` for one drain of one site."""

    def __init__(self, database: Database, site: str, *, token: int) -> None:
        self._database = database
        self._site = site
        self._token = token

    def bases(self, paths: Collection[str]) -> Mapping[str, Base]:
        """What is known of these paths."""
        with self._database.transaction() as connection:
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
        # Flushed: the posts leave the queue after this, and should the server crash in between, they do so on
        # another connection, which knows nothing of what was lost with it.
        with self._database.transaction() as connection:
            tokens.lock(connection, self._site, self._token)
            before = connection.execute(
                "SELECT DISTINCT blob FROM start_contents JOIN starts USING (site)"
                " WHERE site = %s AND start = blob AND path = ANY(%s)",
                (self._site, [as_bytes(path) for path in bases]),
            ).fetchall()
            connection.execute(
                _KEEP,
                (
                    self._site,
                    [as_bytes(path) for path in bases],
                    [base.start for base in kept],
                    [conflict is not None for conflict in conflicts],
                    [conflict and conflict.ours for conflict in conflicts],
                    [conflict and conflict.theirs for conflict in conflicts],
                ),
            )
            for blob, content in contents.items():
                connection.execute(
                    "INSERT INTO start_contents (site, blob, bytes) VALUES (%s, %s, %b)"
                    " ON CONFLICT DO NOTHING",
                    (self._site, blob, content),
                )
            connection.execute(
                "DELETE FROM start_contents c WHERE c.site = %s AND c.blob = ANY(%s)"
                " AND NOT EXISTS (SELECT FROM starts s WHERE s.site = c.site AND s.start = c.blob)",
                (self._site, [blob for (blob,) in before]),
            )

    def content(self, blob: str) -> bytes | None:
        """What was kept of a start's content, if anything was."""
        with self._database.transaction() as connection:
            row = connection.execute(
                "SELECT bytes FROM start_contents WHERE site = %s AND blob = %s", (self._site, blob)
            ).fetchone()
        return None if row is None else bytes(row[0])
