"""Puts one site's worker together: with `cluster`, the only module that names concrete classes."""

from __future__ import annotations

import atexit
import os
import threading
import time
from contextlib import closing, suppress
from functools import cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from briter_worker import events
from briter_worker.allowlist import parents
from briter_worker.drain import Drain
from briter_worker.errors import DeclinedError, Failure, FailureCode, LockLostError, PublishError, UsageError
from briter_worker.events import DeclaredSave
from briter_worker.git.commits import Person
from briter_worker.git.environment import Signer
from briter_worker.git.format import check_format, note_format
from briter_worker.git.plans import FileConflicts, FilePlans
from briter_worker.git.publisher import GitPublisher
from briter_worker.git.repository import Entry, Repository
from briter_worker.git.run import Git
from briter_worker.git.ssh import SshConnections
from briter_worker.git.staging import Staging, WorkTreeCopies
from briter_worker.job import Program, QuietTime, State
from briter_worker.lock import AnotherWorkerError, SiteLock
from briter_worker.plugins import Plugins
from briter_worker.ports import Backoff, EventSink
from briter_worker.queues.disk.queue import DiskQueue
from briter_worker.sinks.earlier import EarlierSaves
from briter_worker.sinks.recorder import ActionLog, FanOut, HistorySink, OpenedLater, SiteCondition, Target
from briter_worker.sinks.store import Outbox, PostgresStore, SqliteStore, Store, StoreError
from briter_worker.watch import LEDGER_NAME
from briter_worker.worker import Puller, Stop, Worker, heartbeat

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from briter_worker.job import Job
    from briter_worker.queues.postgres.database import Database
    from briter_worker.queues.postgres.queue import PostgresQueue
    from briter_worker.settings import Settings
    from briter_worker.sinks.earlier import Cancellation
    from briter_worker.sinks.history import History
    from briter_worker.sinks.recorder import Sink
    from briter_worker.sinks.webhooks import Sender, WebhookSink
    from briter_worker.watch.watcher import PostWatcher

    SiteQueue = DiskQueue | PostgresQueue
    """The queue for commands and pages, which do the same on either backend."""


def open_backoff(settings: Settings) -> Backoff:
    """Return the site's delays between attempts."""
    return Backoff(
        tuple(delay / 1000 for delay in settings.worker_backoff_ms), settings.worker_backoff_jitter
    )


def quiet_time_of(settings: Settings) -> QuietTime:
    """Return how long the site's posts wait for further saves."""
    return QuietTime(settings.worker_quiet_ms / 1000, settings.worker_quiet_max_ms / 1000)


def open_queue(settings: Settings) -> SiteQueue:
    """Return the site's queue for commands and pages, on either backend."""
    return open_postgres_queue(settings) if settings.database_url else open_disk_queue(settings)


def open_disk_queue(settings: Settings, *, record: Path | None = None) -> DiskQueue:
    """Return the site's queue folder; it need not exist yet. `record`: what scheduled jobs declared last."""
    return DiskQueue(
        settings.queue_root,
        settings.quarantine_root,
        longest_delay=open_backoff(settings).longest,
        quiet=quiet_time_of(settings),
        dry_run=settings.worker_dry_run,
        record=record,
    )


def open_postgres_queue(settings: Settings) -> PostgresQueue:
    """Return the queue of `settings.site`, for commands and pages."""
    database = open_database(settings)
    from briter_worker.queues.postgres.queue import PostgresQueue  # noqa: PLC0415 - the extra [postgres]

    return PostgresQueue(
        database,
        settings.site,
        longest_delay=open_backoff(settings).longest,
        dry_run=settings.worker_dry_run,
    )


def open_database(settings: Settings) -> Database:
    """Return the cluster's database, not connected yet; one for the whole process."""
    return _open_database(settings.database_url)


def read_now(settings: Settings) -> float:
    """Return the time by the clock that decides: Postgres's in a cluster, else this machine's.

    Raises OSError where Postgres does not answer.
    """
    return open_database(settings).read_clock() if settings.database_url else time.time()


def known_now(settings: Settings) -> float:
    """Return the time by the clock that decides, as it was read last; asks nobody if it ever was."""
    return open_database(settings).now() if settings.database_url else time.time()


@cache
def _open_database(url: str) -> Database:
    missing = [name for name in ("psycopg", "psycopg_pool", "yaml") if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"a cluster (BRITER_DATABASE_URL) needs {', '.join(missing)}",
            "pip install 'briter-worker[postgres]'",
        )
    from briter_worker.queues.postgres.database import Database  # noqa: PLC0415 - as above

    database = Database(url)
    atexit.register(database.close)
    return database


def open_history(settings: Settings) -> History:
    """Return the reader of the site's history, on either backend."""
    from briter_worker.sinks.history import History  # noqa: PLC0415 - a worker reads no receipts

    return History(open_store(settings), settings.history_key)


def open_store(settings: Settings) -> Store:
    """Return the store of the history, on either backend."""
    if settings.database_url:
        database = open_database(settings)
        return PostgresStore(database.connection, database.transaction)
    return SqliteStore(settings.storage_root / "history.db")


def open_earlier_saves(settings: Settings) -> EarlierSaves:
    """Return the record of what unpublished saves of a disk's site declared."""
    return EarlierSaves(SqliteStore(settings.storage_root / "history.db"))


def open_outbox(settings: Settings) -> Store:
    """Return the store of the webhooks that are not sent yet, on either backend."""
    return open_store(settings) if settings.database_url else SqliteStore(_outbox_path(settings), "outbox")


def _outbox_path(settings: Settings) -> Path:
    return settings.storage_root / "webhooks.db"


def open_lock(settings: Settings) -> SiteLock:
    """Return the site's lock, not acquired yet."""
    stale_after = settings.worker_lock_stale_ms / 1000
    return SiteLock(settings.lock_path, stale_after=stale_after, dry_run=settings.worker_dry_run)


def open_ssh(settings: Settings) -> SshConnections:
    """Return the ssh connections that a worker keeps, and end those of workers that died."""
    return SshConnections(settings.git_ssh_keep_ms / 1000, worktree=settings.git_worktree)


def open_git(settings: Settings, *, pass_fds: tuple[int, ...] = (), ssh: SshConnections | None = None) -> Git:
    """Return git in the site's repository. Raises PublishError when there is none.

    Without `ssh`, each command opens a connection of its own.
    """
    return Git(
        settings.git_worktree,
        remote=settings.git_remote,
        timeout=settings.git_timeout_ms / 1000,
        total_timeout=settings.git_transfer_timeout_ms / 1000,
        hooks=settings.git_hooks,
        pass_fds=pass_fds,
        signer=signer_of(settings),
        ssh=ssh,
    )


def signer_of(settings: Settings) -> Signer | None:
    """Return what signs the site's commits, if anything does."""
    return Signer(settings.git_signing_key, settings.git_signing_format) if settings.git_signing_key else None


def open_repository(settings: Settings, git: Git | None = None) -> Repository:
    """Return the site's repository; without `git`, for commands and pages."""
    return Repository(git or open_git(settings), branch=settings.git_branch, remote=settings.git_remote)


def target_of(settings: Settings) -> Target:
    """Return where the site publishes to, as its history records it."""
    return Target(settings.git_branch, settings.git_remote, settings.published_href_template)


def open_sender(
    settings: Settings,
    store: Store,
    log: Callable[[events.Event], None],
    clock: Callable[[], float] = time.time,
) -> Sender:
    """Return the sender of this process's webhooks, not started yet."""
    from briter_worker.sinks.webhooks import Sender  # noqa: PLC0415 - most sites have none

    return Sender(
        Outbox(store, build_interval=settings.build_hook_min_interval_ms / 1000),
        secret=settings.webhook_secret,
        allow_private=settings.webhook_allow_private,
        warn=warn_by(log),
        clock=clock,
    )


def open_webhooks(
    settings: Settings, sender: Sender, site: str | None = None, clock: Callable[[], float] = time.time
) -> WebhookSink:
    """Return the sink that sends the webhooks of one site."""
    from briter_worker.sinks.webhooks import WebhookSink  # noqa: PLC0415 - most sites have none

    return WebhookSink(
        sender,
        settings.webhook_urls,
        template=settings.webhook_template,
        build_hook=settings.build_hook_url,
        href=target_of(settings).href,
        site=site,
        clock=clock,
    )


def open_sinks(
    settings: Settings, log: Callable[[events.Event], None], *, metrics: Sequence[Sink] = ()
) -> FanOut:
    """Return the sinks of one site's worker: history and webhooks are stored first, the log comes last."""
    history = open_store(settings)
    has_receivers = bool(settings.webhook_urls or settings.build_hook_url)

    def needs_webhooks(event: events.Event) -> bool:
        """Return True for an event to notify of, and when an earlier run may have left messages."""
        return has_receivers or _outbox_path(settings).exists() or bool(getattr(event, "webhook", None))

    return FanOut(
        [
            HistorySink(history, target_of(settings), keep_days=settings.history_keep_days),
            open_earlier_saves(settings),
            OpenedLater(
                lambda: open_webhooks(settings, open_sender(settings, open_outbox(settings), log)),
                needs_webhooks,
            ),
            *metrics,
        ],
        log,
        condition=SiteCondition(history),
    )


def run_worker(
    settings: Settings,
    *,
    once: bool,
    log: Callable[[events.Event], None],
    metrics: Sequence[Sink] = (),
    watcher: PostWatcher | None = None,
) -> int:
    """Run the worker until a stop signal, or with `once` until nothing is due; return the exit status."""
    _check_start(settings)
    with closing(open_sinks(settings, log, metrics=metrics)) as emit:
        lock = open_lock(settings)
        limit = settings.worker_shutdown_timeout_ms / 1000
        stop = Stop(emit, limit=limit, abort=lambda: None)
        # Before the lock is acquired: from then on, a signal means an orderly stop.
        with stop.on_signals():
            try:
                lock.acquire(time.time())
            except AnotherWorkerError as other:
                holder = other.holder.pid if other.holder else None
                text = "another worker instance is active, skipping"
                emit(events.WorkerSkipped(message=text, holder_pid=holder))
                return 0
            interval = max(0.2, settings.worker_lock_stale_ms / 3000)
            with (
                heartbeat(lock, interval),
                closing(open_ssh(settings)) as ssh,
                closing(open_git(settings, pass_fds=(lock.descriptor(),), ssh=ssh)) as git,
                closing(open_earlier_saves(settings)) as earlier,
            ):
                stop.abort, stop.give_up = git.abort, git.give_up
                if watcher is not None:
                    if not watcher.acquire():
                        emit(another_watcher())
                        return 0
                    poll = settings.worker_poll_interval_ms / 1000
                    threading.Thread(target=watcher.run, args=(stop.is_set, poll), daemon=True).start()
                return _run(settings, git, lock, stop, emit, earlier, once=once)


def _check_start(settings: Settings) -> None:
    """Raise UsageError or PublishError where the worker could never publish anything.

    State of a later program is left as it is: nothing is written before it is looked at.
    """
    check_site_format(settings)
    try:
        settings.queue_root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the queue folder {settings.queue_root} cannot be created: {error.strerror}",
            "create it and give the worker's user write access, or set BRITER_QUEUE_ROOT",
        ) from error
    try:
        open_repository(settings).check_push_address()
    except PublishError as error:
        if error.code is FailureCode.NOT_A_REPOSITORY:
            raise
        # Any other failure may pass: the jobs' attempts report it.


def check_site_format(settings: Settings) -> None:
    """Raise UsageError if a later program has written the site's state. Changes nothing."""
    if not settings.database_url:
        with suppress(PublishError), closing(open_git(settings)) as git:  # there may be no repository
            check_format(git.common_dir / "briter")


def _run(
    settings: Settings,
    git: Git,
    lock: SiteLock,
    stop: Stop,
    emit: FanOut,
    earlier: EarlierSaves,
    *,
    once: bool,
) -> int:
    plugins = Plugins(settings.plugins)
    copies = cache(lambda: open_copies(settings, git, emit, plugins.allowed_paths))
    try:
        trusted, order = git.common_dir / "briter", pull_order(git)
    except PublishError:  # the repository is damaged: the jobs' attempts report it
        trusted = settings.git_worktree / ".git" / "briter"
        order = trusted / "pull"
    queue = open_disk_queue(settings, record=trusted / "scheduled")
    actions = open_store(settings)
    drain = Drain(
        queue=queue,
        publisher=cache(lambda: _open_publisher(settings, copies(), lock, emit)),
        emit=emit,
        plugins=plugins,
        backoff=open_backoff(settings),
        max_attempts=settings.worker_max_attempts,
        dry_run=settings.worker_dry_run,
        co_authors=settings.git_co_authors,
        declared_earlier=partial(declared_earlier, queue, earlier),
        stopping=stop.is_set,
    )
    puller = _open_puller(settings, order, copies, queue, emit)
    worker = Worker(
        drain=drain,
        stuck_files=queue.stuck_files,
        still_ours=lock.still_ours,
        stop=stop,
        wait=queue.watcher.wait,
        log_actions=ActionLog(actions, emit.log),
        # A dry run changes no file of the site.
        pull=(lambda _now: None) if settings.worker_dry_run else puller.run,
        poll=settings.worker_poll_interval_ms / 1000,
    )
    with suppress(PublishError):  # the repository cannot be written: the jobs' attempts report it
        note_format(git.state_dir, version("briter-worker"))
    emit(events.WorkerStarted(pid=os.getpid(), dry_run=settings.worker_dry_run))
    try:
        counts = worker.run_once() if once else worker.run_forever()
    except LockLostError:
        text = "the worker's lock file was removed or replaced while the worker ran, so another worker may"
        fix = "start the worker again, and leave worker.lock alone"
        emit(events.Warned(error=f"{text} have the site now; this one ends", fix=fix))
        return 1
    finally:
        stop.end()
        actions.close()
        emit(events.WorkerStopped(drained=worker.counts.completed, once=once or None))
    return 1 if once and (counts.failed or counts.undecided) else 0


def declared_earlier(
    queue: DiskQueue, saves: EarlierSaves, job: Job, paths: Collection[str]
) -> Collection[str]:
    """Return which of these paths a dead letter or a receipt of the post declared, if that can be read."""
    found = {path for letter in queue.dead_letters(job.slug) for path in DeclaredSave.of(letter).paths}
    with suppress(StoreError):
        found |= saves.declared(job, paths)
    return found


def _open_publisher(settings: Settings, copies: WorkTreeCopies, lock: SiteLock, emit: FanOut) -> GitPublisher:
    state, branch = copies.repository.git.state_dir, settings.git_branch
    return GitPublisher(
        copies.repository,
        copies=copies,
        plans=FilePlans(state, branch),
        bases=FileConflicts(state, branch),
        identity=Person(settings.git_author_name, settings.git_author_email),
        dry_run=settings.worker_dry_run,
        progress=progress_by(emit),
        warn=warn_by(emit),
        still_ours=lock.still_ours,
    )


def _open_puller(
    settings: Settings, order: Path, copies: Callable[[], WorkTreeCopies], queue: DiskQueue, emit: FanOut
) -> Puller:
    def pull() -> None:
        """Follow the remote; local commits, which `status` names, keep the site where it is."""
        from briter_worker.git.pull import pull as pull_branch  # noqa: PLC0415 - most workers never pull

        with suppress(DeclinedError):
            pull_branch(copies().repository, copies(), rebase=False, push=False)

    def report(failure: Failure | None) -> None:
        """Make due what an outage delayed once a pull shows its end; dead letters wait for a push."""
        if emit.follow_pull(failure):
            now = time.time()
            queue.requeue(now, [row.job.id for row in queue.jobs(now) if row.state is State.FAILED])

    return Puller(order, settings.git_pull_interval_ms / 1000, pull, report)


def open_post_watcher(settings: Settings, emit: Callable[[events.Event], None]) -> PostWatcher:
    """Return what enqueues the posts whose files change. Raises UsageError in a cluster."""
    from briter_worker import client  # noqa: PLC0415 - most workers watch no posts
    from briter_worker.watch.watcher import PostWatcher  # noqa: PLC0415 - as above

    if settings.database_url:
        raise UsageError("watch needs a queue folder", "unset BRITER_DATABASE_URL; in a cluster, enqueue")
    _check_start(settings)
    queue = open_disk_queue(settings)

    history = open_history(settings)

    def cancelled_at(slug: str) -> float:
        with suppress(StoreError):
            for receipt in history.receipts(slug=slug, outcomes=[events.Cancelled.name], limit=1):
                return receipt.ended or 0.0
        return 0.0

    def cancellations() -> list[Cancellation]:
        with suppress(StoreError), closing(open_earlier_saves(settings)) as saves:
            return saves.cancelled()
        return []

    def save(slug: str, paths: Sequence[str], message: str | None) -> None:
        document = client.compose(slug, paths, message=message, made_by=Program.WATCH)
        job_id = client.submit(document, queue=settings.queue_root).id
        emit(events.Enqueued(job_id=job_id, slug=slug, paths=tuple(paths)))

    return PostWatcher(
        root=settings.git_worktree,
        repository=open_repository(settings),
        allowlist=settings.allowlist(
            private=_private_folders(settings), more=Plugins(settings.plugins).allowed_paths
        ),
        enqueue=save,
        scheduled_paths=queue.scheduled_paths,
        list_jobs=queue.jobs,
        cancelled_at=cancelled_at,
        cancellations=cancellations,
        warn=warn_by(emit),
    )


def another_watcher(*, has_order: bool = False) -> events.WorkerSkipped:
    """Return what the second watcher of a site says before it ends: the first one carries out its order."""
    text = "another watch is active, skipping"
    if has_order:
        text = "another watch is active; it compares all files with the remote now"
    return events.WorkerSkipped(message=text, holder_pid=None)


def _private_folders(settings: Settings) -> list[str]:
    """Return the folders of the worker's storage that lie inside the repository."""
    worktree = Path(os.path.realpath(settings.git_worktree))
    roots = (settings.storage_root, settings.queue_root, settings.quarantine_root)
    real = (Path(os.path.realpath(root)) for root in roots)
    return [root.relative_to(worktree).as_posix() for root in real if worktree in root.parents]


def open_copies(
    settings: Settings, git: Git, emit: EventSink, more_folders: Callable[[], Iterable[str]]
) -> WorkTreeCopies:
    """Return the CMS's copies of the files, which follow the remote."""

    def conflicting(paths: Sequence[str]) -> None:
        """Name the post that will conflict, unless its job says so anyway."""
        rows = open_disk_queue(settings).jobs(time.time())
        declared = {path.rstrip("/") for row in rows for path in row.job.paths}
        with suppress(StoreError), closing(open_history(settings)) as history:
            for path in paths:
                if declared.isdisjoint((path, *parents(path))):
                    slug = history.slug_of(path) or path
                    text = f"the remote changed {path} in the same lines as the CMS did"
                    fix = "take the remote's changes over into the post before it is saved"
                    emit(events.ConflictAhead(job_id=f"remote-{uuid4()}", slug=slug, error=text, fix=fix))

    allowlist = settings.allowlist(private=_private_folders(settings), more=more_folders)

    limit = settings.worker_max_file_bytes
    staging = Staging(open_repository(settings, git), allowlist, limit, progress_by(emit))
    updated = events.SiteUpdated.of
    return WorkTreeCopies(
        staging,
        warn_by(emit),
        lambda tip, paths: emit(updated(tip, paths)),
        conflicting,
        partial(record_written, git),
    )


def record_written(git: Git, files: Mapping[str, Entry | None]) -> None:
    """Note in the ledger of `watch` what the worker writes into the site itself; None for a removed file."""
    ledger = git.own_dir / LEDGER_NAME
    if not ledger.exists():
        return  # nobody watches
    from briter_worker.watch.ledger import Version, record  # noqa: PLC0415 - most sites watch no posts

    versions = {
        path: Version(entry.blob, entry.mode == "100755") if entry else None for path, entry in files.items()
    }
    record(ledger, versions)


def progress_by(emit: Callable[[events.Event], None]) -> Callable[[str, int, int], None]:
    """Return the function that reports the progress of a phase."""
    return lambda phase, done, total: emit(events.Progress(phase=phase, done=done, total=total))


def warn_by(emit: Callable[[events.Event], None]) -> Callable[[str, str], None]:
    """Return the function that warns with a text and a fix."""
    return lambda text, fix: emit(events.Warned(error=text, fix=fix))


def pull_order(git: Git) -> Path:
    """Return the file by which a user orders a pull of this work tree alone. Raises PublishError."""
    return git.own_dir / "pull"
