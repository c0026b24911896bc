"""What people do with a site's posts: see their differences, undo a publication, and who did what."""

from __future__ import annotations

import time
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

from briter_worker import client, wiring
from briter_worker.errors import DeclinedError, UsageError
from briter_worker.events import Cancelled, DeclaredSave, Event, Steered
from briter_worker.git import undo
from briter_worker.job import Program
from briter_worker.ports import Cancellation, Pause
from briter_worker.queues.selection import check_undo
from briter_worker.sinks.recorder import FanOut, HistorySink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from briter_worker.git.repository import Repository
    from briter_worker.job import Job
    from briter_worker.settings import Settings
    from briter_worker.sinks.history import Receipt
    from briter_worker.sinks.recorder import Sink
    from briter_worker.wiring import SiteQueue

T = TypeVar("T")
_MAX_PUBLICATIONS = 1000
_CLONES = ".shown"
"""Folder of the cache; no site has such a name."""


def _publications(settings: Settings, slug: str) -> list[Receipt]:
    """Return the receipts of the post's publications, newest first. Raises DeclinedError."""
    with closing(wiring.open_history(settings)) as history:
        receipts = history.receipts(slug=slug, outcomes=("published",), limit=_MAX_PUBLICATIONS)
    # A job that ended in part has two receipts; the earlier one has what the commit changed.
    found = list({each.commit: each for each in receipts if each.commit and not each.dry_run}.values())
    if not found:
        text = f"the history has no publication of the post {slug!r}"
        raise DeclinedError(text, "briter-worker history shows the slugs of published posts")
    return found


@contextmanager
def open_published(settings: Settings) -> Iterator[Repository]:
    """Open the site's repository; in a cluster a clone on this machine, beside the one that drains use."""
    if settings.database_url:
        from briter_worker.cluster import sites  # noqa: PLC0415 - the extra [postgres]

        site = sites.get(wiring.open_database(settings), settings.site)
        timeout = settings.git_timeout_ms / 1000
        with sites.open_site_clone(site, settings, _CLONES, timeout) as clone:
            clone.update_refs((clone.pushed_ref, clone.fetch(), None))
            yield clone
    else:
        repository = wiring.open_repository(settings)
        with closing(repository.git):
            yield repository


def show_difference(settings: Settings, slug: str) -> tuple[str, str]:
    """Return the commit of the post's last publication and its differences."""
    commit = str(_publications(settings, slug)[0].commit)
    with open_published(settings) as repository:
        return commit, undo.difference(repository, commit)


def undo_post(
    settings: Settings,
    slug: str,
    by: str,
    log: Callable[[Event], None],
    *,
    to: str | None = None,
    message: str | None = None,
) -> str:
    """Enqueue the publication of an earlier version of the post, and record who did; return the job's id.

    Where jobs do not carry their contents, bring the post's files to that version first.
    """
    wiring.check_site_format(settings)
    try:
        client.compose(slug, [], message=message)  # before a file changes
    except ValueError as error:
        raise UsageError(f"the message cannot be used: {error}", "write another message") from None
    publications = _publications(settings, slug)
    if settings.database_url:
        from briter_worker.cluster.submit import send_undo  # noqa: PLC0415 - the extra [postgres]

        job_id = send_undo(settings, slug, publications, to=to, message=message).id
    else:
        commits = [str(each.commit) for each in publications]
        queue, now = wiring.open_disk_queue(settings), time.time()
        check_undo([row for row in queue.jobs(now) if row.job.slug == slug], slug)
        scheduled = queue.scheduled_paths(now)
        with (
            open_published(settings) as repository,
            undo.restored(repository, settings.allowlist(), commits, to, scheduled=scheduled) as files,
        ):
            text = message or f"Restore {slug}"
            document = client.compose(slug, list(files), message=text, made_by=Program.UNDO)
            job_id = client.submit(document, queue=settings.queue_root).id
            # After the job: a crash in between leaves the files to `watch`.
            wiring.record_written(repository.git, files)
    _record(settings, [Steered(action="undo", by=by, job_id=job_id, slug=slug)], log)
    return job_id


def steer(
    settings: Settings,
    action: str,
    by: str,
    log: Callable[[Event], None],
    change: Callable[[SiteQueue, float], T],
    queue: SiteQueue | None = None,
) -> T:
    """Change the site's queue as a user wants; store and log who did what. Raises DeclinedError."""
    wiring.check_site_format(settings)
    now = wiring.read_now(settings)
    done = change(queue or wiring.open_queue(settings), now)
    steered = partial(Steered, action=action, by=by)
    batch: list[Event]
    match done:
        case Pause() | bool():
            batch = [steered(job_id=None, slug=None)] if done else []
        case Cancellation():
            batch = [steered(job_id=job.id, slug=job.slug) for job in (*done.removed, *done.requested)]
            batch += [
                Cancelled(job_id=job.id, slug=job.slug, save=DeclaredSave.of(job)) for job in done.removed
            ]
        case _:
            batch = [steered(job_id=job.id, slug=job.slug) for job in cast("Sequence[Job]", done)]
    _record(settings, batch, log)
    if settings.database_url:  # on disk, the worker notices changed files by itself
        from briter_worker.cluster import sites  # noqa: PLC0415 - the extra [postgres]

        with suppress(OSError):  # the nodes look for due jobs themselves, a little later
            sites.wake(wiring.open_database(settings))
    return done


def _record(settings: Settings, batch: Sequence[Event], log: Callable[[Event], None]) -> None:
    """Store and log what a user did, beside a running worker."""
    store, target = wiring.open_store(settings), wiring.target_of(settings)
    sinks: list[Sink] = [HistorySink(store, target, site=settings.history_key)]
    if not settings.database_url:
        sinks.append(wiring.open_earlier_saves(settings))
    with closing(FanOut(sinks, log)) as emit:
        emit.deliver(batch, lambda: None)
