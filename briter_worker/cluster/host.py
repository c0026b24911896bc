"""Runs one host of a cluster, as a process: its signals, its connections, its exit status."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING

from briter_worker.cluster.dispatching import Host, Pace
from briter_worker.cluster.drains import Drains
from briter_worker.cluster.engine import Engine
from briter_worker.cluster.sweep import Sweep
from briter_worker.cluster.telling import Telling
from briter_worker.plugins import Plugins
from briter_worker.queues.postgres import contents
from briter_worker.queues.postgres.database import Database
from briter_worker.wiring import open_backoff, prepare_git
from briter_worker.worker import Stop, started, stopped

if TYPE_CHECKING:
    from collections.abc import Callable

    from briter_worker.cluster.telling import Log, Numbers
    from briter_worker.settings import Settings
    from briter_worker.settling import Tally


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
        if not once:
            contents.tidy(database)  # what a writer kept from being removed, and then did not save after all
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
                tally = _run(settings, Engine(database.conninfo), drains, log, stop, workers, once=once)
        finally:
            telling.close()
            if measures is not None:
                measures.close()
    return 1 if once and (tally.failed or tally.undecided) else 0


def _run(
    settings: Settings, engine: Engine, drains: Drains, log: Log, stop: Stop, workers: int, *, once: bool
) -> Tally:
    sweep = Sweep(engine, dry_run=settings.worker_dry_run, longest_delay=open_backoff(settings).longest)
    pace = Pace(poll=settings.worker_poll_interval_ms / 1000)

    async def serve() -> Tally:
        host = Host(engine, drains, sweep, log, stop, slots=workers, pace=pace, once=once)
        started(log, dry_run=settings.worker_dry_run)
        try:
            return await host.run()
        finally:
            stopped(log, host.total)

    return asyncio.run(serve())
