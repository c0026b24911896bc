"""One drain of one site of a cluster: the database's rows, the site's clone and the node's sinks."""

from __future__ import annotations

import math
import threading
from contextlib import ExitStack
from functools import cache, partial
from typing import TYPE_CHECKING

from briter_worker.cluster.sites import Site, settings_of
from briter_worker.drain import Counts, Drain
from briter_worker.events import Progress, Warned
from briter_worker.git.clone import open_clone
from briter_worker.git.payloads import SubmittedCopies
from briter_worker.git.publisher import GitPublisher
from briter_worker.git.push import Person
from briter_worker.git.staging import Staging
from briter_worker.queues.postgres.payloads import PostgresBases, PostgresPayloads
from briter_worker.queues.postgres.queue import PostgresPlans, PostgresQueue
from briter_worker.queues.postgres.rows import take_site
from briter_worker.sinks.recorder import FanOut, HistorySink, SiteCondition, retire
from briter_worker.sinks.store import PostgresStore
from briter_worker.wiring import open_backoff, open_sender, open_webhooks, signer_of, target_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from briter_worker.git.run import Git
    from briter_worker.plugins import Plugins
    from briter_worker.ports import EventSink
    from briter_worker.queues.postgres.database import Database
    from briter_worker.settings import Settings
    from briter_worker.sinks.log import LogSink
    from briter_worker.sinks.metrics import MetricsSink
    from briter_worker.sinks.recorder import Sink


class NodeSinks:
    """The event sinks of one node; each drain gets its own, over the same stores. Safe in several threads."""

    def __init__(
        self, settings: Settings, database: Database, log: LogSink, metrics: MetricsSink | None
    ) -> None:
        self._settings = settings
        self._log = log
        self._metrics = metrics
        self._store = PostgresStore(database.transaction)
        self._clock = database.now
        self._sender = open_sender(settings, log, database.now)
        self._sender.wake()  # an earlier node may have left messages

    def open(self, settings: Settings) -> FanOut:
        """Return the sinks of one drain of the settings' site, for one thread."""
        site = settings.site
        sinks: list[Sink] = [
            HistorySink(self._store, target_of(settings), site=site, clock=self._clock),
            open_webhooks(settings, self._sender, site, self._clock),
        ]
        if self._metrics is not None:
            sinks.append(self._metrics.for_drain())
        condition = SiteCondition(self._store, site, clock=self._clock)
        return FanOut(sinks, partial(self._log, site=site), condition=condition)

    def retire(self) -> None:
        """Delete old receipts of all sites. Raises StoreError."""
        retire(self._store, self._settings.history_keep_days, self._clock())

    def close(self) -> None:
        """Send what is due, within a bounded time."""
        self._sender.close()
        if self._metrics is not None:
            self._metrics.close()
        self._store.close()


class SiteDrains:
    """Drains sites for one node, each call in a thread of its own."""

    def __init__(
        self, settings: Settings, database: Database, plugins: Plugins, sinks: NodeSinks, *, node: str
    ) -> None:
        self._settings = settings
        self._database = database
        self._plugins = plugins
        self._sinks = sinks
        self._node = node
        self._guard = threading.Lock()
        self._running: set[Git] = set()
        self._aborted = False

    def drain(self, name: str, stopping: Callable[[], bool]) -> tuple[Counts, float]:
        """Complete what a dead node left of the site, then publish what is due, once.

        Return as the second value in how many seconds a post is due next.

        Raises LockLostError, UnavailableError, PublishError, UsageError.
        """
        row, clock = take_site(self._database, name, self._node), self._database.now
        site, token = Site.from_row(row), int(row["token"])
        if site.paused is not None and site.paused.is_active(clock()):
            return Counts(), math.inf
        settings = settings_of(site, self._settings)
        emit = self._sinks.open(settings)
        queue = PostgresQueue(
            self._database,
            name,
            token=token,
            longest_delay=open_backoff(settings).longest,
            dry_run=settings.worker_dry_run,
            clock=clock,
        )
        with ExitStack() as stack:
            stack.callback(emit.close)
            drain = Drain(
                queue=queue,
                # Opened when it is first needed: many drains find nothing to do.
                publisher=cache(partial(self._open_publisher, site, settings, token, emit, stack)),
                emit=emit,
                plugins=lambda: self._plugins,
                backoff=open_backoff(settings),
                max_attempts=settings.worker_max_attempts,
                dry_run=settings.worker_dry_run,
                co_authors=settings.git_co_authors,
                stopping=stopping,
                clock=clock,
            )
            counts = drain.recover()
            if not stopping() and (done := drain.run()):
                counts.add(done)
        next_due = queue.next_due(clock())
        return counts, math.inf if next_due is None else next_due - clock()

    def abort(self) -> None:
        """End what git runs for any site. From any thread."""
        with self._guard:
            self._aborted = True
            running = list(self._running)
        for git in running:
            git.abort()

    def _open_publisher(
        self, site: Site, settings: Settings, token: int, emit: EventSink, stack: ExitStack
    ) -> GitPublisher:
        """Return the publisher to the site's remote; the stack closes its clone. Raises PublishError."""
        repository = stack.enter_context(
            open_clone(
                settings.cache_root / site.name,
                url=site.remote,
                branch=site.branch,
                credentials=site.credentials,
                timeout=settings.git_timeout_ms / 1000,
                signer=signer_of(settings),
            )
        )
        with self._guard:
            self._running.add(repository.git)
            aborted = self._aborted
        stack.callback(self._running.discard, repository.git)
        if aborted:
            repository.git.abort()

        def progress(phase: str, done: int, total: int) -> None:
            emit(Progress(phase=phase, done=done, total=total))

        allowlist = settings.allowlist(more=self._plugins.allowed_paths)
        staging = Staging(repository, allowlist, settings.worker_max_file_bytes, progress)
        bases = PostgresBases(self._database, site.name, token=token)
        return GitPublisher(
            repository,
            copies=SubmittedCopies(staging, PostgresPayloads(self._database, site.name), bases),
            plans=PostgresPlans(self._database, site.name, token=token),
            bases=bases,
            identity=Person(settings.git_author_name, settings.git_author_email),
            dry_run=settings.worker_dry_run,
            progress=progress,
            warn=lambda text, fix: emit(Warned(error=text, fix=fix)),
            still_ours=lambda: True,  # the plan, recorded just before, checks the token
        )
