"""Moves a site's jobs between its queue folder and the cluster: schedules, retries and dead letters too.

A job is durably in its new place before it leaves the old one. The same command continues an interrupted
move; at worst a job is in both places, and the second publication finds nothing left to do.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from briter_worker.cluster.submit import send
from briter_worker.errors import DeclinedError, UnavailableError
from briter_worker.git.payloads import GatherError, write_files
from briter_worker.git.plans import FilePlans
from briter_worker.job import SUFFIX, MalformedJobError, encode_document, format_time
from briter_worker.lock import AnotherWorkerError
from briter_worker.ports import RESTORE
from briter_worker.queues.disk.files import Folder, unused_name
from briter_worker.queues.postgres.payloads import NewerSaveError, PostgresPayloads
from briter_worker.queues.postgres.rows import delete, locked, select
from briter_worker.wiring import open_database, open_disk_queue, open_git, open_lock, open_postgres_queue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from briter_worker.queues.disk.queue import DiskQueue
    from briter_worker.queues.postgres.rows import Row
    from briter_worker.settings import Settings

_AT_ONCE = 100
"""Jobs per transaction."""
_MAX_NAME = 60


@dataclass(slots=True)
class Migrated:
    """Result of a move."""

    jobs: int = 0
    stayed: dict[str, str] = field(default_factory=dict)
    """The reason for each slug whose job stayed where it was."""
    remarks: dict[str, str] = field(default_factory=dict)
    """The reason for each path whose file was not moved."""


def import_jobs(settings: Settings, now: float) -> Migrated:
    """Move every job of the settings' queue folder to the site, with the files as they are now.

    Raises DeclinedError where that would lose something.
    """
    moved = Migrated()
    with _worker_lock(settings, now):
        queue = open_disk_queue(settings)
        _release_claims(queue, settings, now)
        if (pause := queue.active_pause(now)) is not None:
            open_postgres_queue(settings).pause(now, until=pause.until, reason=pause.reason)
        queue.join_saves(now)
        # Oldest first: of two dead letters of one post, the newer one wins.
        for each in sorted(queue.jobs(now), key=lambda listed: listed.job.created_at):
            try:
                document = each.read()
                if not each.job.attempts:
                    del document["attempts"]  # the listing's, not the producer's
                # Without the key, the file's age says it.
                document["createdAt"] = document.get("createdAt") or format_time(each.job.created_at)
                sent = send(settings, document, saved_at=each.job.created_at)
            except UnavailableError:
                raise
            except (GatherError, MalformedJobError, NewerSaveError, OSError) as error:
                moved.stayed[each.job.slug] = str(error)
                continue
            queue.remove([each], now)
            moved.remarks |= sent.left_out
            moved.jobs += 1
        moved.stayed |= queue.unusable_files(now)
    return moved


def _release_claims(queue: DiskQueue, settings: Settings, now: float) -> None:
    """Put back what a dead worker left in flight, unless it may be published already."""
    claims = queue.recover(now)
    if claims and FilePlans(open_git(settings).state_dir, settings.git_branch).plans():
        raise DeclinedError(
            "a worker died while it pushed some of these jobs, so that they may be published already",
            "run briter-worker run --once without BRITER_DATABASE_URL, then import again",
        )
    queue.release(claims)


def export_jobs(settings: Settings, now: float) -> Migrated:
    """Move every job of the site to the settings' queue folder, and its files to the work tree.

    The site is paused first and stays paused. Raises DeclinedError where that would lose something.
    """
    moved = Migrated()
    with _worker_lock(settings, now):
        queue, rows = open_disk_queue(settings), open_postgres_queue(settings)
        settings.queue_root.mkdir(parents=True, exist_ok=True)
        if (pause := rows.active_pause(now)) is not None:
            queue.pause(now, until=pause.until, reason=pause.reason)
        else:
            rows.pause(now, reason=f"moved to {settings.queue_root}")
        while _export_some(settings, moved):
            pass
        for each in rows.jobs(now):
            moved.stayed[each.job.slug] = "it is in flight, or an undo: export again when it is published"
    return moved


def _export_some(settings: Settings, moved: Migrated) -> bool:
    """Move the next jobs that are not in flight; return False if there are none."""
    database, site = open_database(settings), settings.site
    condition = (
        "site = %(site)s AND state <> 'claimed' AND NOT EXISTS (SELECT FROM files f WHERE f.publication ="
        " publications.id AND f.mode LIKE %(undo)s) ORDER BY created_at, id LIMIT %(limit)s"
    )
    with database.connection() as connection:
        rows = select(connection, condition, {"site": site, "limit": _AT_ONCE, "undo": f"{RESTORE} %"})
    payloads = PostgresPayloads(database, site)
    carried = payloads.of([str(row.id) for row in rows]).values()
    files = [file for payload in carried for file in payload.files]
    moved.remarks |= write_files(settings.git_worktree, settings.allowlist(), payloads, files)
    with locked(database, site) as connection:
        ids = [row.id for row in rows]
        still = select(connection, "id = ANY(%(ids)s) AND state <> 'claimed'", {"ids": ids})
        texts = {(row.id, row.text) for row in still}
        leaving = [row for row in rows if (row.id, row.text) in texts]  # the others were saved again
        with Folder.open(settings.queue_root) as folder:
            for row in leaving:
                _write_job_file(folder, row)
            folder.sync()
        delete(connection, [row.id for row in leaving])
    moved.jobs += len(leaving)
    return bool(rows)


def _write_job_file(queue: Folder, row: Row) -> None:
    """Write the job into the folder, beside whatever is there by that name."""
    # Without the key, the file's age would make the save the newest of its post.
    arrived = format_time(row.job.created_at)
    document = {"id": row.job.id, **row.document}
    document["createdAt"] = document.get("createdAt") or arrived
    with queue.written(encode_document(document), mode=0o666) as temporary:
        name = row.job.id.replace("/", "_").lstrip(".") or "job"
        try:
            queue.link(temporary, queue, f"{name[:_MAX_NAME]}{SUFFIX}")
        except FileExistsError:
            queue.link(temporary, queue, unused_name())


@contextmanager
def _worker_lock(settings: Settings, now: float) -> Iterator[None]:
    """Hold the site's lock inside, so that no worker publishes from the folder."""
    settings.storage_root.mkdir(parents=True, exist_ok=True)
    lock = open_lock(settings)
    try:
        lock.acquire(now)
    except AnotherWorkerError as other:
        pid = f" (PID {other.holder.pid})" if other.holder else ""
        raise DeclinedError(
            f"a worker{pid} publishes from {settings.queue_root}", "stop the worker, then try again"
        ) from None
    try:
        yield
    finally:
        lock.release()
