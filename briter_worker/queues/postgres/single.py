"""The everyday save, in one statement: one post, with small files, of which no other save waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from briter_worker.job import Status
from briter_worker.queues.postgres import contents, rows
from briter_worker.queues.postgres.joining import WAITING
from briter_worker.queues.postgres.tokens import SiteMissingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from briter_worker.queues.postgres.contents import Source
    from briter_worker.queues.postgres.database import Database
    from briter_worker.queues.postgres.rows import Save

# In the order in which all writers take what they lock: contents by their names, then the site.
_SAVE = f"""
WITH brought AS (
    SELECT * FROM unnest(%(blobs)s::text[], %(contents)b::bytea[]) AS brought (blob, bytes)
),
kept AS (
    SELECT blob FROM contents WHERE blob = ANY(%(blobs)s::text[]) ORDER BY blob FOR KEY SHARE
),
added AS (
    INSERT INTO contents (blob, size)
    SELECT blob, length(bytes) FROM brought WHERE blob NOT IN (SELECT blob FROM kept) ORDER BY blob
    ON CONFLICT (blob) DO UPDATE SET size = excluded.size RETURNING blob, xmax = 0 AS is_new
),
parts AS (
    INSERT INTO content_parts (blob, part, bytes)
    SELECT blob, 0, bytes FROM brought JOIN added USING (blob) WHERE is_new AND length(bytes) > 0
),
held AS (
    SELECT name FROM sites WHERE name = %(site)s AND NOT removed AND (SELECT count(*) FROM added) >= 0
    FOR NO KEY UPDATE
),
saved AS (
    INSERT INTO publications (site, {rows.NEW}) SELECT name, {rows.NEW_VALUES} FROM held
    ON CONFLICT (site, slug) WHERE state = 'waiting' DO NOTHING RETURNING id
),
files AS (
    INSERT INTO delivered (publication, path, mode, blob, base, knows_base, saved_at)
    SELECT id, file.* FROM saved, unnest(%(paths)s::bytea[], %(modes)s::text[], %(names)s::text[],
        %(bases)s::text[], %(knows)s::bool[], %(times)s::float8[]) AS file
),
below AS (
    INSERT INTO folders (publication, path, saved_at)
    SELECT id, folder.* FROM saved, unnest(%(folders)s::bytea[], %(since)s::float8[]) AS folder
)
SELECT EXISTS (SELECT FROM held), EXISTS (SELECT FROM saved)
""".encode()  # noqa: S608 - names of our own


def save(
    database: Database,
    site: str,
    save: Save,
    source: Source | None,
    files: Sequence[tuple[object, ...]],
    folders: Sequence[tuple[object, ...]],
) -> bool:
    """Whether it is saved; else it is not an everyday one, and nothing of it is.

    The rows of `files` and `folders` are those of their tables. Raises SiteMissingError, ContentChangedError.
    """
    brought = {} if source is None else small(source)
    if save.job.status is not Status.PENDING or brought is None:
        return False
    columns = [[row[number] for row in files] for number in range(1, 7)]
    values = {
        "site": site,
        "blobs": sorted(brought),
        "contents": [brought[blob] for blob in sorted(brought)],
        **dict(zip(("paths", "modes", "names", "bases", "knows", "times"), columns, strict=True)),
        "folders": [path for _, path, _ in folders],
        "since": [since for _, _, since in folders],
        **{f"job_{name}": value for name, value in rows.values_as_new(save, WAITING).items()},
    }
    with database.asking() as connection:
        is_there, is_saved = connection.execute(_SAVE, values).fetchone() or (False, False)
    if not is_there:
        raise SiteMissingError(site)
    return bool(is_saved)


def small(source: Source) -> dict[str, bytes] | None:
    """All that comes along, if that is little. Raises ContentChangedError."""
    if sum(source.sizes.values()) > contents.SMALL or len(source.sizes) > contents.FEW:
        return None
    blobs = {file.blob for file in source.delivery.files if file.blob is not None}
    return {blob: b"".join(contents.checked(blob, source)) for blob in blobs}
