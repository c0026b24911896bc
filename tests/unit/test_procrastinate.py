"""What the cluster's node needs to be true of Procrastinate: an update that changes it fails here."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from procrastinate import App, PsycopgConnector, exceptions
from procrastinate.jobs import Status
from procrastinate.worker import Worker

from briter_worker.cluster.connector import LastingConnector, Outage
from briter_worker.cluster.sites import DRAIN_QUEUE, wake

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from procrastinate.jobs import Job
    from procrastinate.manager import JobManager

    from briter_worker.queues.postgres.database import Database


def run(database: Database, step: Callable[[JobManager], Awaitable[object]]) -> None:
    """Run a step against the job manager of an app of its own."""

    async def main() -> None:
        app = App(connector=PsycopgConnector(conninfo=database.conninfo, min_size=1, max_size=1))
        async with app.open_async():
            await step(app.job_manager)

    asyncio.run(main())


async def fetch(manager: JobManager, worker: int) -> Job | None:
    return await manager.fetch_job([DRAIN_QUEUE], worker)


def execute(database: Database, statement: str) -> None:
    with database.connection() as connection:
        connection.execute(statement.encode())


def test_a_site_runs_once_and_waits_once_at_most(database: Database) -> None:
    async def step(manager: JobManager) -> None:
        one, two = await manager.register_worker(), await manager.register_worker()
        wake(database, ["a", "b"])
        first = await fetch(manager, one)
        assert first is not None
        assert first.lock == "a"
        wake(database, ["a", "a", "b"])
        second = await fetch(manager, two)
        assert second is not None
        assert second.lock == "b"
        assert await fetch(manager, two) is None  # `a` waits for its first drain
        await manager.finish_job(first, Status.SUCCEEDED, delete_job=True)
        again = await fetch(manager, two)
        assert again is not None
        assert again.lock == "a"
        await manager.finish_job(again, Status.SUCCEEDED, delete_job=True)
        assert await fetch(manager, two) is None

    run(database, step)


def test_the_jobs_of_a_silent_worker_are_stalled_and_a_freed_number_never_comes_back(
    database: Database,
) -> None:
    async def step(manager: JobManager) -> None:
        worker = await manager.register_worker()
        wake(database, ["a"])
        job = await fetch(manager, worker)
        assert job is not None
        assert job.id is not None
        assert list(await manager.get_stalled_jobs(queue=DRAIN_QUEUE, seconds_since_heartbeat=10)) == []
        execute(database, "UPDATE procrastinate_workers SET last_heartbeat = now() - interval '11 seconds'")
        (stalled,) = await manager.get_stalled_jobs(queue=DRAIN_QUEUE, seconds_since_heartbeat=10)
        assert stalled.id == job.id
        await manager.finish_job_by_id_async(job.id, Status.SUCCEEDED, delete_job=True)
        wake(database, ["a"])
        anew = await fetch(manager, worker)
        assert anew is not None
        assert anew.id != job.id
        with pytest.raises(exceptions.ConnectorException):  # of the worker that only slept
            await manager.finish_job(job, Status.SUCCEEDED, delete_job=True)
        (doing,) = await manager.list_jobs_async(queue=DRAIN_QUEUE, status="doing", worker_id=worker)
        assert doing.id == anew.id

    run(database, step)


def test_retrying_a_job_keeps_its_number(database: Database) -> None:
    """The reason why a dead node's job is deleted and deferred anew."""

    async def step(manager: JobManager) -> None:
        worker = await manager.register_worker()
        wake(database, ["a"])
        job = await fetch(manager, worker)
        assert job is not None
        await manager.retry_job(job)
        again = await fetch(manager, worker)
        assert again is not None
        assert again.id == job.id

    run(database, step)


def test_a_worker_whose_row_was_pruned_cannot_fetch(database: Database) -> None:
    """The reason why rows are pruned after a day only."""

    async def step(manager: JobManager) -> None:
        worker = await manager.register_worker()
        execute(database, "DELETE FROM procrastinate_workers")
        wake(database, ["a"])
        with pytest.raises(exceptions.ConnectorException):
            await fetch(manager, worker)

    run(database, step)


def test_the_worker_takes_the_options_that_the_node_passes() -> None:
    options: dict[str, Any] = {
        "queues": [DRAIN_QUEUE],
        "concurrency": 2,
        "wait": False,
        "fetch_job_polling_interval": 0.5,
        "delete_jobs": "always",
        "listen_notify": True,
        "install_signal_handlers": False,
        "update_heartbeat_interval": 2.0,
        "stalled_worker_timeout": 86_400.0,
    }
    worker = Worker(App(connector=PsycopgConnector()), **options)
    assert worker.worker_id is None
    assert callable(worker.stop)


def test_a_cancellation_that_the_pool_swallows_still_ends_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this, a node that was busy when SIGTERM came stayed until it was killed."""
    calls = iter([contextlib.suppress(asyncio.CancelledError)])

    async def swallow(*_: object, **__: object) -> dict[str, Any]:
        with next(calls, contextlib.nullcontext()):
            await asyncio.sleep(60)
        return {}

    async def main() -> None:
        monkeypatch.setattr(PsycopgConnector, "execute_query_one_async", swallow)
        connector = LastingConnector("", Outage(lambda _: None), lambda: False)

        async def loop() -> None:
            while True:
                await connector.execute_query_one_async("SELECT 1")

        task = asyncio.create_task(loop())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=5)
        assert task.cancelled()

    asyncio.run(main())
