"""What producers do: store jobs with their files, and wake a node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

from briter_worker.job import MalformedJobError
from briter_worker.ports import Payload
from briter_worker.queues.postgres.blobs import store_blobs
from briter_worker.queues.postgres.fencing import lock_site
from briter_worker.queues.postgres.rows import Row, encode_path, insert, join_saves, path_field

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from briter_worker.job import Job
    from briter_worker.queues.postgres.blobs import PayloadSource
    from briter_worker.queues.postgres.database import Connection, Database

DRAIN_QUEUE = "drains"
DRAIN_TASK = "drain_site"
_MAX_PATH_BYTES = 2_000  # an index entry has at most 2,700 bytes

# Procrastinate's own function fails for all sites if one has a drain waiting already. In one order, so that
# two producers that wake the same sites never wait for each other. A wake-up that a crash of the server loses
# is repeated by the node's sweep, so it need not wait for the disk.
_WAKE = f"""
INSERT INTO procrastinate_jobs (queue_name, task_name, lock, queueing_lock, args)
SELECT '{DRAIN_QUEUE}', '{DRAIN_TASK}', site, site, jsonb_build_object('site', site)
FROM unnest(%s::text[]) AS site
WHERE set_config('synchronous_commit', 'off', true) = 'off'
ORDER BY site
ON CONFLICT DO NOTHING
"""  # noqa: S608 - constants only


def submit(
    connection: Connection,
    site: str,
    document: Mapping[str, Any],
    source: PayloadSource | None = None,
    *,
    now: float,
) -> Job:
    """Store a job with its files, in the caller's transaction. Call `wake_sites` after the commit.

    The newest `createdAt` of a slug wins, in whatever order they are stored. A job without an id gets one.
    To submit the same job again, after an error in the commit, does no harm.

    Raises MalformedJobError, UnreadableJobError, ContentChangedError and SiteMissingError.
    """
    return submit_many(connection, site, [(document, source)], now=now)[0]


def submit_many(
    connection: Connection,
    site: str,
    saves: Sequence[tuple[Mapping[str, Any], PayloadSource | None]],
    *,
    now: float,
) -> list[Job]:
    """Store jobs as `submit` does."""
    rows = [Row.from_document(document, name=uuid4().hex, now=now) for document, _ in saves]
    sources = [source for _, source in saves if source is not None]
    for each in sources:
        _check_paths(each.payload)
    if not rows:
        return []
    store_blobs(connection, sources)
    lock_site(connection, site)
    numbers = insert(connection, "publications", [row.fields(site) for row in rows], "id")
    files: list[dict[str, object]] = []
    folders: list[dict[str, object]] = []
    for row, number, (_, source) in zip(rows, numbers, saves, strict=True):
        payload = Payload() if source is None else source.payload
        files += _file_records(number, payload)
        folders += _folder_records(number, payload, row.job.created_at)
    insert(connection, "files", files)
    insert(connection, "folders", folders)
    join_saves(connection, site, rows, now)
    return [row.job for row in rows]


def wake_sites(database: Database, sites: Collection[str]) -> None:
    """Have these sites drained by whichever node comes first. Call it when their jobs are committed.

    In the same transaction, a drain that waits already could start before the commit and miss the jobs.
    """
    with database.connection() as connection:
        connection.execute(_WAKE, (list(sites),))


def _file_records(publication: int, payload: Payload) -> list[dict[str, object]]:
    return [
        {
            "publication": publication,
            "path": path_field(file.path),
            "mode": file.mode,
            "blob": file.blob,
            "base": file.base,
            "has_base": file.has_base,
            "saved_at": file.saved_at,
        }
        for file in payload.files
    ]


def _folder_records(publication: int, payload: Payload, created_at: float) -> list[dict[str, object]]:
    records: list[dict[str, object]] = []
    for path in dict.fromkeys(payload.folders):
        below = f"{path.rstrip('/')}/"
        times = [file.saved_at for file in payload.files if file.path.startswith(below)]
        # An older file that is not among these was not in the folder any more.
        saved_at = min(times, default=created_at)
        records.append({"publication": publication, "path": path_field(path), "saved_at": saved_at})
    return records


def _check_paths(payload: Payload) -> None:
    paths = [file.path for file in payload.files]
    if len(set(paths)) != len(paths):
        raise MalformedJobError("a path is submitted twice")
    for path in (*paths, *payload.folders):
        if len(encode_path(path)) > _MAX_PATH_BYTES or "\0" in path:
            raise MalformedJobError(f"the path {path[:40]}… has a NUL, or more than {_MAX_PATH_BYTES} bytes")
