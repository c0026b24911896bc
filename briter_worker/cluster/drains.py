"""One drain of one site, put together from what the database says of it, its cache and its sinks."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, LiteralString, Self

from briter_worker.allowlist import Allowlist
from briter_worker.cluster import sites
from briter_worker.cluster.slots import Left
from briter_worker.cluster.starts import Starts
from briter_worker.drain import Drain
from briter_worker.errors import LockLostError
from briter_worker.events import Progress, Warned
from briter_worker.queues.postgres import tokens
from briter_worker.queues.postgres.deliveries import PostgresDeliveries
from briter_worker.queues.postgres.queue import PostgresQueue
from briter_worker.settling import Desk, Tally
from briter_worker.wiring import open_backoff

if TYPE_CHECKING:
    from collections.abc import Callable

    from briter_worker.cluster.sites import Site
    from briter_worker.cluster.telling import Telling
    from briter_worker.git.cache import Cache
    from briter_worker.git.publisher import GitPublisher
    from briter_worker.plugins import Plugins
    from briter_worker.ports import EventSink
    from briter_worker.queues.postgres.database import Database
    from briter_worker.settings import Settings

_TIP: LiteralString = "UPDATE sites SET tip = %(tip)s FROM fence WHERE name = %(site)s RETURNING name"


class Drains:
    """Drains the site that it is called with: in as many threads as there are slots."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        plugins: Plugins,
        telling: Telling,
        *,
        worker: str,
    ) -> None:
        self._settings = settings
        self._database = database
        self._plugins = plugins
        self._telling = telling
        self._worker = worker
        self._guard = threading.Lock()
        self._open: set[_Publisher] = set()
        self._aborted = False

    def __call__(self, name: str, stopping: Callable[[], bool], /) -> Left:
        """See `slots.Drain`. What dead workers left is finished first, then what is due is taken, once."""
        site, token = sites.take(self._database, name, self._worker)
        if site.paused is not None and site.paused.lasts(time.time()):
            return Left()
        settings = sites.settings_of(site, self._settings)
        emit = self._telling.of(settings)
        backoff = open_backoff(settings)
        queue = PostgresQueue(
            self._database,
            name,
            token=token,
            max_attempts=settings.worker_max_attempts,
            longest_delay=backoff.longest,
            dry_run=settings.worker_dry_run,
        )
        desk = Desk(
            queue=queue,
            emit=emit,
            backoff=backoff,
            max_attempts=settings.worker_max_attempts,
            dry_run=settings.worker_dry_run,
            extensions=self._plugins,
        )
        tally = Tally()
        with _Publisher(self, site, settings, token, emit) as publisher:
            drain = Drain(desk, publisher.get, stopping=stopping)
            tally.add(drain.recover())
            if not stopping():
                tally.add(drain.run() or Tally())
        due = queue.next_due(time.time())
        return Left(tally, due=due is not None and due <= time.time())

    def abort(self) -> None:
        """Give up what is running. From any thread."""
        with self._guard:
            self._aborted = True
            running = list(self._open)
        for publisher in running:
            publisher.abort()

    def opened(self, publisher: _Publisher) -> None:
        """From now on, `abort` is for this one, too."""
        with self._guard:
            self._open.add(publisher)
            aborted = self._aborted
        if aborted:
            publisher.abort()

    def closed(self, publisher: _Publisher) -> None:
        """And no more."""
        with self._guard:
            self._open.discard(publisher)

    def publisher(
        self, site: Site, settings: Settings, token: int, emit: EventSink, stack: ExitStack
    ) -> tuple[Cache, GitPublisher]:
        """The way to the site's remote, to be closed by the stack. Raises PublishError."""
        from briter_worker.git.cache import open_cache  # noqa: PLC0415 - GitPython costs 50 ms
        from briter_worker.git.commits import Person  # noqa: PLC0415 - as above
        from briter_worker.git.delivering import open_publisher  # noqa: PLC0415

        def is_ours() -> bool:
            tokens.hold(self._database, site.name, token)  # it says more than yes or no
            return True

        cache = stack.enter_context(
            open_cache(
                settings.cache_root / site.name,
                url=site.remote,
                branch=site.branch,
                credentials=site.credentials,
                tip=site.tip,
                timeout=settings.git_timeout_ms / 1000,
            )
        )
        publisher = open_publisher(
            cache,
            deliveries=PostgresDeliveries(self._database, site.name),
            versions=Starts(self._database, site.name, token=token),
            allowlist=Allowlist((*settings.folders, *self._plugins.allowed_paths())),
            identity=Person(settings.git_author_name, settings.git_author_email),
            max_file_bytes=settings.worker_max_file_bytes,
            dry_run=settings.worker_dry_run,
            progress=lambda phase, done, total: emit(Progress(phase=phase, done=done, total=total)),
            warn=lambda text: emit(Warned(error=text)),
            still_ours=is_ours,
        )
        stack.callback(publisher.close, lambda: False, wait=0.0)
        return cache, publisher

    def remember_tip(self, site: Site, token: int, tip: str | None) -> None:
        """Other hosts need not ask the remote to know that they are behind."""
        if tip is not None and tip != site.tip:
            with suppress(LockLostError):
                tokens.write(self._database, site.name, token, _TIP, {"tip": tip}, flushed=False)


class _Publisher:
    """A drain's publisher, opened when it is first needed: many drains find nothing to do."""

    def __init__(self, drains: Drains, site: Site, settings: Settings, token: int, emit: EventSink) -> None:
        self._drains = drains
        self._site = site
        self._settings = settings
        self._token = token
        self._emit = emit
        self._stack = ExitStack()
        self._opened: tuple[Cache, GitPublisher] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._drains.closed(self)
        tip = None if self._opened is None or self._settings.worker_dry_run else self._opened[0].tip
        self._stack.close()
        self._drains.remember_tip(self._site, self._token, tip)

    def get(self) -> GitPublisher:
        """The publisher; one for the whole drain."""
        if self._opened is None:
            self._opened = self._drains.publisher(
                self._site, self._settings, self._token, self._emit, self._stack
            )
            self._drains.opened(self)
        return self._opened[1]

    def abort(self) -> None:
        """Give up what is running. From any thread."""
        if self._opened is not None:
            self._opened[1].abort()
