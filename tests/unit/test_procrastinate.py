"""What the cluster's node needs to be true of Procrastinate: an update that changes it fails here."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from procrastinate import App, PsycopgConnector

from briter_worker.cluster.connector import LastingConnector, Outage
from briter_worker.cluster.sites import DRAIN_QUEUE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import pytest
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
