"""Moves a site's jobs from its folder into the cluster, and back: holds, retries, dead letters and all.

A job is in its new place, durably, before it leaves the old one. So whatever ends a move in the middle, the
same command again goes on with it; at worst a job is in both places, and whichever publishes it second finds
that nothing is left to do.
"""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from briter_worker.allowlist import Allowlist
from briter_worker.cluster.sites import SiteError
from briter_worker.cluster.unpacking import Unpacker
from briter_worker.cluster.waking import wake
from briter_worker.gathering import GatheringError, gather
from briter_worker.git.pending import has_dry_run_commits
from briter_worker.job import State, format_time
from briter_worker.lock import AnotherWorkerError
from briter_worker.queues import files
from briter_worker.queues.postgres import joining, tokens
from briter_worker.queues.postgres.contents import ContentChangedError
from briter_worker.queues.postgres.deliveries import PostgresDeliveries
from briter_worker.queues.postgres.rows import COLUMNS, Save
from briter_worker.queues.postgres.writing import submit_many
from briter_worker.queues.sighting import look
from briter_worker.strictjson import encode
from briter_worker.wiring import open_database, open_folder, open_lock, open_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from briter_worker.queues.disk import DiskQueue
    from briter_worker.queues.postgres.contents import Source
    from briter_worker.queues.postgres.database import Database
    from briter_worker.queues.steering import Listed
    from briter_worker.settings import Settings

_AT_ONCE = 100
"""So many jobs move in one transaction."""
_TRIES = 5
_PATIENCE = 30.0
"""How long a move out waits for what is being published."""
_GLANCE = 0.2
_NAME = 60


@dataclass(slots=True)
class Moved:
    """What became of a move."""

    jobs: int = 0
    stayed: dict[str, str] = field(default_factory=dict)
    """Jobs that are where they were, by their slugs, with the reasons."""
    remarks: dict[str, str] = field(default_factory=dict)
    """Files that were not brought along, by their paths, with the reasons."""


def bring_in(settings: Settings, now: float) -> Moved:
    """Every job of the folder that the settings name is the site's, with its files as they are now.

    Raises SiteError where that would lose something, and what `submit_many` raises.
    """
    with _lone(settings, now):
        queue = open_folder(settings)
        _settle_dead_workers(queue, settings, now)
        pause = queue.paused(now)
        if pause is not None:
            open_rows(settings).pause(now, until=pause.until, reason=pause.reason)
        moved = Moved()
        rows = [row for row in queue.jobs(now) if row.state is not State.CLAIMED]
        # Oldest first: of two dead letters of one post, the newer one has the last word.
        rows.sort(key=lambda row: row.job.created_at)
        for start in range(0, len(rows), _AT_ONCE):
            _bring(settings, queue, rows[start : start + _AT_ONCE], moved, now)
        moved.stayed |= queue.stuck(now)
    if moved.jobs:
        wake(open_database(settings), [settings.site])
    return moved


def _settle_dead_workers(queue: DiskQueue, settings: Settings, now: float) -> None:
    batches = queue.recover(now)
    if any(batch.plans for batch in batches):
        raise SiteError(
            "a worker died while it pushed some of these jobs, so that they may be published already. "
            "Fix: let one look (briter-worker run --once, without BRITER_DATABASE_URL), then import again"
        )
    if has_dry_run_commits(settings.git_worktree, settings.git_branch):
        raise SiteError(
            f"{settings.git_worktree} has commits of dry runs that the remote lacks. Fix: push them "
            "(briter-worker run --once with BRITER_WORKER_DRY_RUN=false, without BRITER_DATABASE_URL), "
            "then import again"
        )
    for batch in batches:
        queue.release(batch, batch.claims)
        queue.close(batch)


def _bring(settings: Settings, queue: DiskQueue, rows: Sequence[Listed], moved: Moved, now: float) -> None:
    database = open_database(settings)
    for _ in range(_TRIES):
        brought: list[tuple[Listed, dict[str, object], Source]] = []
        for row in rows:
            if row.job.slug in moved.stayed:
                continue
            try:
                found = gather(
                    settings.git_worktree,
                    row.job.paths,
                    allowlist=Allowlist(settings.folders),
                    max_bytes=settings.worker_max_file_bytes,
                    saved_at=row.job.created_at,
                )
            except (GatheringError, OSError) as error:
                moved.stayed[row.job.slug] = str(error)
                continue
            moved.remarks |= found.left_out
            brought.append((row, _document(row), found))
        try:
            submit_many(database, settings.site, [(document, source) for _, document, source in brought])
        except ContentChangedError:
            continue
        queue.remove([row for row, _, _ in brought], now)
        moved.jobs += len(brought)
        return
    raise GatheringError("files keep changing while they are sent. Fix: import again when the CMS rests")


def _document(row: Listed) -> dict[str, object]:
    """The job's file to the letter, with what its name and age stand for."""
    try:
        written = look(row.path, row.name).document
    except OSError:
        written = None  # it has just been saved anew: that save moves next time
    said = row.document if written is None else written
    known: dict[str, object] = {"id": row.job.id, "createdAt": format_time(row.job.created_at)}
    document = known | {key: value for key, value in said.items() if key not in known or value is not None}
    if document["paths"] != list(row.job.paths):  # with those of the older saves that it stands for
        document["paths"] = list(row.job.paths)
    return document


def take_out(settings: Settings, now: float) -> Moved:
    """Every job of the site is in the folder that the settings name, and its files are in the work tree.

    The site is paused before, and stays so: what is saved into it from now on waits. Raises SiteError where
    that would lose something.
    """
    with _lone(settings, now):
        database, queue, rows = open_database(settings), open_folder(settings), open_rows(settings)
        pause = rows.paused(now)
        settings.queue_root.mkdir(parents=True, exist_ok=True)
        if pause is not None:
            queue.pause(now, until=pause.until, reason=pause.reason)
        else:
            rows.pause(now, reason=f"moved to {settings.queue_root}")
        moved = Moved()
        unpacker = Unpacker(
            settings.git_worktree, Allowlist(settings.folders), PostgresDeliveries(database, settings.site)
        )
        try:
            deadline = time.monotonic() + _PATIENCE
            while True:
                while _take(settings, database, unpacker, moved):
                    pass
                in_flight = _in_flight(database, settings.site)
                if not in_flight or time.monotonic() > deadline:
                    break
                time.sleep(_GLANCE)
        finally:
            unpacker.close()
        for slug in in_flight:
            moved.stayed[slug] = "it is in flight: export again when it is published or put off"
        return moved


def _take(settings: Settings, database: Database, unpacker: Unpacker, moved: Moved) -> bool:
    """Move the next jobs that nobody works on; whether there were any."""
    with database.transaction() as connection:
        found = connection.execute(
            f"SELECT {COLUMNS} FROM publications WHERE site = %s AND state <> 'claimed'"  # noqa: S608 - names
            " ORDER BY created_at, id LIMIT %s".encode(),
            (settings.site, _AT_ONCE),
        ).fetchall()
    saves = [Save.read(row) for row in found]
    if not saves:
        return False
    deliveries = PostgresDeliveries(database, settings.site).of([str(save.id) for save in saves])
    delivered = [file for delivery in deliveries.values() for file in delivery.files]
    moved.remarks |= unpacker.unpack(delivered)
    with database.transaction() as connection:
        tokens.lock(connection, settings.site, None)  # no worker claims, no writer saves meanwhile
        still = connection.execute(
            "SELECT id, document FROM publications WHERE id = ANY(%s) AND state <> 'claimed'",
            ([save.id for save in saves],),
        ).fetchall()
        same = {(number, text) for number, text in still}
        going = [save for save in saves if (save.id, save.text) in same]
        for save in going:
            _write(settings.queue_root, save)
        files.sync_folder(settings.queue_root)
        joining.discard(connection, [save.id for save in going])
    moved.jobs += len(going)
    return True


def _write(queue: Path, save: Save) -> None:
    """The job's file is in the folder, beside whatever is there by that name."""
    document = save.document
    data = (
        save.text.encode() if document.get("id") == save.job.id else encode({"id": save.job.id, **document})
    )
    temporary = files.temporary(queue)
    files.write_new(temporary, data, mode=0o666)
    try:
        files.belong_to(temporary, queue)
        name = save.job.id.replace("/", "_").lstrip(".") or "job"
        for each in files.variants(f"{name[:_NAME]}{files.SUFFIX}"):
            try:
                files.place(temporary, queue / each)
            except FileExistsError:
                with suppress(OSError):
                    if (queue / each).read_bytes() == data:
                        return  # from a move that ended in the middle
                continue
            return
    finally:
        temporary.unlink(missing_ok=True)


def _in_flight(database: Database, site: str) -> list[str]:
    with database.transaction() as connection:
        rows = connection.execute(
            "SELECT slug FROM publications WHERE site = %s AND state = 'claimed' ORDER BY slug", (site,)
        )
        return [slug for (slug,) in rows]


@contextmanager
def _lone(settings: Settings, now: float) -> Iterator[None]:
    """Inside, no worker publishes from the folder."""
    settings.storage_root.mkdir(parents=True, exist_ok=True)
    lock = open_lock(settings)
    try:
        lock.acquire(now)
    except AnotherWorkerError as other:
        pid = f" (PID {other.holder.pid})" if other.holder else ""
        raise SiteError(
            f"a worker{pid} publishes from {settings.queue_root}. Fix: stop it, then try again"
        ) from None
    try:
        yield
    finally:
        lock.release()
