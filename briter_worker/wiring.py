"""Puts the worker together. It and `outlets`, for the sinks, are all that names concrete classes."""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from briter_worker.allowlist import Allowlist
from briter_worker.backoff import Backoff
from briter_worker.drain import Drain
from briter_worker.errors import Failure, LockLostError, PublishError, Stopped, UsageError
from briter_worker.events import Progress, Warned
from briter_worker.git.pending import has_dry_run_commits, has_late_adoption, has_late_index, lacking
from briter_worker.lock import AnotherWorkerError, SiteLock, UnusableLockError
from briter_worker.outlets import open_outlets
from briter_worker.plugins import Plugins
from briter_worker.queues.disk import DiskQueue
from briter_worker.queues.watching import FolderWaker
from briter_worker.settling import Desk
from briter_worker.worker import Stop, Worker, heartbeat, skipped, started, stopped

if TYPE_CHECKING:
    from collections.abc import Callable

    from briter_worker.git.command import Commands
    from briter_worker.git.publisher import GitPublisher
    from briter_worker.git.remote import Remote
    from briter_worker.git.site import Site
    from briter_worker.ports import EventSink
    from briter_worker.queues.postgres.database import Database
    from briter_worker.queues.postgres.queue import PostgresQueue
    from briter_worker.settings import Settings
    from briter_worker.sinks.condition import ConditionWatch
    from briter_worker.sinks.fan import Sink
    from briter_worker.sinks.history.reading import History

_UPKEEP = 30.0
"""Seconds for which `run --once` stays for housekeeping."""


def open_backoff(settings: Settings) -> Backoff:
    """The site's waits between attempts."""
    return Backoff(
        tuple(delay / 1000 for delay in settings.worker_backoff_ms), settings.worker_backoff_jitter
    )


def open_queue(settings: Settings) -> DiskQueue | PostgresQueue:
    """The site's queue, for looking at it and steering it, whichever engine runs."""
    return open_rows(settings) if settings.database_url else open_folder(settings)


def open_folder(settings: Settings) -> DiskQueue:
    """The site's queue as files; its folders need not exist yet."""
    return DiskQueue(
        settings.queue_root,
        settings.quarantine_root,
        max_attempts=settings.worker_max_attempts,
        longest_delay=open_backoff(settings).longest,
    )


def open_rows(settings: Settings) -> PostgresQueue:
    """The site's queue as rows; `settings.site` says which."""
    database = open_database(settings)
    from briter_worker.queues.postgres.queue import PostgresQueue  # noqa: PLC0415 - for a cluster only

    return PostgresQueue(
        database,
        settings.site,
        token=None,
        max_attempts=settings.worker_max_attempts,
        longest_delay=open_backoff(settings).longest,
    )


_databases: dict[str, Database] = {}


def open_database(settings: Settings) -> Database:
    """The cluster's database, not connected yet; one for the whole process."""
    known = _databases.get(settings.database_url)
    if known is not None:
        return known
    from importlib.util import find_spec  # noqa: PLC0415 - for a cluster only

    missing = [name for name in ("procrastinate", "psycopg", "psycopg_pool") if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"a cluster (BRITER_DATABASE_URL) needs {', '.join(missing)}. "
            "Fix: pip install 'briter-worker[postgres]'"
        )
    import atexit  # noqa: PLC0415 - as above

    from briter_worker.queues.postgres.database import Database  # noqa: PLC0415 - as above

    database = _databases[settings.database_url] = Database(settings.database_url)
    atexit.register(database.close)
    return database


def open_lock(settings: Settings) -> SiteLock:
    """The site's lock, not taken yet."""
    return SiteLock(settings.lock_path, stale_after=settings.worker_lock_stale_ms / 1000)


def open_commands(settings: Settings, *, pass_fds: tuple[int, ...] = ()) -> Commands:
    """Git in the site's repository."""
    prepare_git()
    from briter_worker.git.command import Commands  # noqa: PLC0415 - GitPython costs 50 ms; most runs find nothing

    return Commands(
        settings.git_worktree,
        remote=settings.git_remote,
        timeout=settings.git_timeout_ms / 1000,
        hooks=settings.git_hooks,
        pass_fds=pass_fds,
    )


def prepare_git() -> None:
    """Have this process run git as the worker wants it, before anything of `git/` is loaded."""
    # GitPython hands the whole environment on, and obeys some of it itself.
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        del os.environ[name]
    try:
        import git  # noqa: F401, PLC0415 - as in open_commands
    except ImportError as error:  # GitPython does not load without git
        raise PublishError(
            Failure.GIT_MISSING, "git was not found. Fix: install git 2.36 or newer"
        ) from error

    # GitPython logs what git said, unredacted; without a handler Python prints that. We tell it ourselves.
    log = logging.getLogger("git")
    log.propagate = False
    if not log.handlers:
        log.addHandler(logging.NullHandler())


def open_site(settings: Settings) -> Site:
    """The site's repository, for looking at it."""
    from briter_worker.git.site import Site  # noqa: PLC0415 - as above

    return Site(open_commands(settings), branch=settings.git_branch, remote=settings.git_remote)


def open_remote(site: Site) -> Remote:
    """The site's remote, for asking it."""
    from briter_worker.git.remote import Remote  # noqa: PLC0415 - as above

    return Remote(site, progress=lambda _done, _total: None)


class _Publishers:
    """The run's publisher, opened when it is first needed: most runs of cron find nothing to do."""

    def __init__(self, settings: Settings, lock: SiteLock, sink: EventSink) -> None:
        self._settings = settings
        self._lock = lock
        self._sink = sink
        self._opened: GitPublisher | None = None
        self.plugins = Plugins(settings.plugins)
        self._aborted = threading.Event()

    def open(self) -> GitPublisher:
        """The publisher; one for the whole run."""
        if self._opened is None:
            self._opened = _open_publisher(self._settings, self._lock, self._sink, self.plugins)
            if self._aborted.is_set():  # while it was being opened
                self._opened.abort()
        return self._opened

    def abort(self) -> None:
        """Give up what is running. From any thread."""
        self._aborted.set()
        if self._opened is not None:
            self._opened.abort()

    def tidy(self) -> None:
        """Clean up in the repository, where there is something to clean."""
        site = (self._settings.git_worktree, self._settings.git_branch)
        late = has_late_index(*site) or has_late_adoption(*site, self._settings.git_remote)
        if self._opened is not None or late:
            with suppress(PublishError, OSError, Stopped):
                self.open().tidy(time.time())

    def close(self, stopping: Callable[[], bool], *, wait: float) -> None:
        """Leave nothing running in the repository; housekeeping has this long to end by itself."""
        if self._opened is not None:
            with suppress(PublishError, OSError, Stopped):
                self._opened.close(stopping, wait=wait)


def open_history(settings: Settings) -> History:
    """The site's history, for looking at it."""
    if settings.database_url:
        from briter_worker.sinks.postgres.reading import RowHistory  # noqa: PLC0415 - for a cluster only

        return RowHistory(open_database(settings), settings.site)
    from briter_worker.sinks.history.reading import FileHistory  # noqa: PLC0415 - not for a run of cron

    return FileHistory(settings.history_path)


def run_worker(
    settings: Settings, *, once: bool, log: EventSink, metrics: Callable[[], Sink] | None = None
) -> int:
    """Run the worker until it is told to stop, or with `once` until nothing is due; its exit code."""
    sink = open_outlets(settings, once=once, log=log, metrics=metrics)
    try:
        return _run_worker(settings, once=once, sink=sink)
    finally:
        sink.close()


def _run_worker(settings: Settings, *, once: bool, sink: ConditionWatch) -> int:
    try:
        settings.queue_root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the queue's folder {settings.queue_root} cannot be made: {error.strerror}. "
            "Fix: make it, and give the worker's user write access, or set BRITER_QUEUE_ROOT"
        ) from error
    lock = open_lock(settings)
    publishers = _Publishers(settings, lock, sink)
    stop = Stop(sink, limit=settings.worker_shutdown_timeout_ms / 1000, abort=publishers.abort)
    # Before the lock is taken: from then on, a signal means to end in order.
    with stop.on_signals():
        try:
            lock.acquire(time.time())
        except AnotherWorkerError as other:
            skipped(sink, other.holder.pid if other.holder else None)
            return 0
        except UnusableLockError as error:
            raise PublishError(Failure.DISK, str(error)) from error
        with heartbeat(lock, max(0.2, settings.worker_lock_stale_ms / 3000)):
            worker = _open_worker(settings, lock, publishers, stop, sink)
            try:
                return _run(worker, settings, once=once, sink=sink)
            finally:
                # A service goes on another time; for cron, this is the time.
                publishers.close(stop.is_set, wait=_UPKEEP if once and lock.still_ours() else 0.0)


def _open_worker(
    settings: Settings, lock: SiteLock, publishers: _Publishers, stop: Stop, sink: ConditionWatch
) -> Worker:
    queue = open_folder(settings)
    desk = Desk(
        queue=queue,
        emit=sink,
        backoff=open_backoff(settings),
        max_attempts=settings.worker_max_attempts,
        dry_run=settings.worker_dry_run,
        extensions=publishers.plugins,
        keep=sink.keep,
    )
    return Worker(
        Drain(desk, publishers.open, stopping=stop.is_set),
        sink,
        stop,
        FolderWaker(settings.queue_root, queue.notice, queue.rely_on_notice),
        next_due=queue.next_due,
        paused=queue.paused,
        pending_flush=lambda: (
            not settings.worker_dry_run and has_dry_run_commits(settings.git_worktree, settings.git_branch)
        ),
        still_ours=lock.still_ours,
        tidy=publishers.tidy,
        poll=settings.worker_poll_interval_ms / 1000,
        in_the_way=queue.in_the_way,
    )


def _run(worker: Worker, settings: Settings, *, once: bool, sink: EventSink) -> int:
    started(sink, dry_run=settings.worker_dry_run)
    if why := lacking(settings.git_worktree):
        # Told now: whoever starts it in the wrong folder would wait in vain for a post to be published.
        sink(Warned(error=why))
    try:
        tally = worker.once() if once else worker.forever()
    except LockLostError as lost:
        sink(Warned(error=str(lost)))
        return 1
    finally:
        stopped(sink, worker.total)
    return 1 if once and (tally.failed or tally.undecided) else 0


def _open_publisher(settings: Settings, lock: SiteLock, sink: EventSink, plugins: Plugins) -> GitPublisher:
    commands = open_commands(settings, pass_fds=(lock.descriptor(),))
    from briter_worker.git.commits import Person  # noqa: PLC0415 - as in open_commands
    from briter_worker.git.publisher import GitPublisher  # noqa: PLC0415

    return GitPublisher(
        commands,
        branch=settings.git_branch,
        remote=settings.git_remote,
        allowlist=Allowlist((*settings.folders, *plugins.allowed_paths())),
        identity=Person(settings.git_author_name, settings.git_author_email),
        max_file_bytes=settings.worker_max_file_bytes,
        dry_run=settings.worker_dry_run,
        progress=lambda phase, done, total: sink(Progress(phase=phase, done=done, total=total)),
        warn=lambda text: sink(Warned(error=text)),
        still_ours=lock.still_ours,
    )
