"""Runs one host of a cluster, as a process: its signals, its connections, its exit status."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from briter_worker.cluster.dispatching import Host, Pace
from briter_worker.cluster.drains import Drains
from briter_worker.cluster.engine import Engine
from briter_worker.cluster.sweep import Sweep
from briter_worker.cluster.telling import Telling
from briter_worker.plugins import Plugins
from briter_worker.queues.postgres import contents
from briter_worker.queues.postgres.database import Database, DatabaseError
from briter_worker.wiring import open_backoff, prepare_git
from briter_worker.worker import Stop, started, stopped

if TYPE_CHECKING:
    from collections.abc import Callable

    from briter_worker.cluster.telling import Log, Numbers
    from briter_worker.settings import Settings
    from briter_worker.settling import Tally

_HOUSE_EVERY = 600.0


def run(
    settings: Settings,
    *,
    workers: int,
    once: bool,
    log: Log,
    metrics: Callable[[], Numbers] | None = None,
) -> int:
    """Publish for every site, up to `workers` at once; the exit status.

    Until told to stop or, with `once`, until nothing is due. Raises DatabaseError and EngineError where the
    database cannot be worked with at the start.
    """
    prepare_git()
    # With the two of the dispatch, two more than there are slots.
    with Database(settings.database_url, connections=workers, name="briter-worker") as database:
        database.check()
        measures = None if metrics is None else metrics()
        telling = Telling(settings, database, log, metrics=measures)
        drains = Drains(
            settings,
            database,
            Plugins(settings.plugins),
            telling,
            worker=f"{socket.gethostname()}:{os.getpid()}",
        )
        stop = Stop(log, limit=settings.worker_shutdown_timeout_ms / 1000, abort=drains.abort)
        try:
            with stop.on_signals():
                telling.start()
                tally = _run(settings, database, drains, log, stop, workers, once=once)
        finally:
            telling.close()
            if measures is not None:
                measures.close()
    return 1 if once and (tally.failed or tally.undecided) else 0


def _run(
    settings: Settings, database: Database, drains: Drains, log: Log, stop: Stop, workers: int, *, once: bool
) -> Tally:
    engine = Engine(database.conninfo)
    sweep = Sweep(engine, dry_run=settings.worker_dry_run, longest_delay=open_backoff(settings).longest)
    pace = Pace(poll=settings.worker_poll_interval_ms / 1000)

    async def serve() -> Tally:
        host = Host(engine, drains, sweep, log, stop, slots=workers, pace=pace, once=once)
        started(log, dry_run=settings.worker_dry_run)
        house = None if once else asyncio.create_task(_keep_house(database))
        try:
            return await host.run()
        finally:
            stopped(log, host.total)
            if house is not None:
                house.cancel()

    return asyncio.run(serve())


async def _keep_house(database: Database) -> None:
    """Remove contents that nothing needs any more, now and then.

    Two sites that let go of the same content at once leave it to each other; and a writer may keep one from
    being removed that it does not save after all.
    """
    while True:
        with suppress(DatabaseError):  # it is told by whoever has to do with a post
            await asyncio.to_thread(contents.tidy, database)
        await asyncio.sleep(_HOUSE_EVERY)
