"""What people do with a site's posts: see their differences, undo a publication, and who did what."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from briter_worker import client, wiring
from briter_worker.errors import UsageError
from briter_worker.events import Cancelled, Steered
from briter_worker.git import undo
from briter_worker.git.repository import Repository
from briter_worker.sinks.recorder import FanOut, HistorySink
from briter_worker.sinks.store import PostgresStore, SqliteStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from briter_worker.events import Event
    from briter_worker.job import Job
    from briter_worker.settings import Settings
    from briter_worker.sinks.store import Store

_MAX_PUBLICATIONS = 1000


def published_commits(settings: Settings, slug: str) -> list[str]:
    """Return the commits of the post's publications, newest first. Raises UsageError and DeclinedError."""
    if settings.database_url:
        raise UsageError(
            "a cluster has no work tree, so its publications are neither shown nor undone here",
            "git show COMMIT or git revert COMMIT in a clone of the site",
        )
    with closing(wiring.open_history(settings)) as history:
        receipts = history.receipts(slug=slug, outcomes=("published",), limit=_MAX_PUBLICATIONS)
    commits = [each.commit for each in receipts if each.commit and not each.dry_run]
    if not commits:
        text = f"the history has no publication of the post {slug!r}"
        raise UsageError(text, "briter-worker history shows the slugs of published posts")
    return commits


def show_difference(settings: Settings, slug: str) -> tuple[str, str]:
    """Return the commit of the post's last publication and its differences."""
    commit = published_commits(settings, slug)[0]
    with closing(wiring.open_git(settings)) as git:
        repository = Repository(git, branch=settings.git_branch, remote=settings.git_remote)
        return commit, undo.difference(repository, commit)


def undo_post(
    settings: Settings, slug: str, *, to: str | None = None, message: str | None = None
) -> client.Enqueued:
    """Bring the post's files to an earlier version, and enqueue their publication."""
    commits = published_commits(settings, slug)
    with closing(wiring.open_git(settings)) as git:
        repository = Repository(git, branch=settings.git_branch, remote=settings.git_remote)
        with undo.restored(repository, settings.allowlist(), commits, to) as paths:
            document = client.compose(slug, paths, message=message or f"Restore {slug}")
            return client.submit(document, queue=settings.queue_root)


def record_action(
    settings: Settings,
    action: str,
    by: str,
    jobs: Iterable[tuple[str | None, str | None]],
    log: Callable[[Event], None],
    *,
    cancelled: Iterable[Job] = (),
) -> None:
    """Store and log who steered which jobs (id, slug), and which were removed, beside a running worker."""
    if settings.database_url:
        store: Store = PostgresStore(wiring.open_database(settings).transaction)
    else:
        store = SqliteStore(settings.history_path)
    batch: list[Event] = [Steered(action=action, by=by, job_id=each, slug=slug) for each, slug in jobs]
    batch += [Cancelled(job_id=job.id, slug=job.slug) for job in cancelled]
    with closing(FanOut([HistorySink(store, wiring.target_of(settings), site=settings.site)], log)) as emit:
        emit.deliver(batch, lambda: None)
