"""What the cluster's node needs to be true of Procrastinate: an update that changes it fails here."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from procrastinate import App, PsycopgConnector
from procrastinate.worker import Worker

from briter_worker.cluster.connector import LastingConnector, Outage
from briter_worker.cluster.sites import DRAIN_QUEUE, DRAIN_TASK, wake

if TYPE_CHECKING:
    import pytest

    from briter_worker.queues.postgres.database import Database


def test_another_job_is_fetched_when_the_workers_semaphore_is_released(database: Database) -> None:
    app, running = App(connector=PsycopgConnector(conninfo=database.conninfo)), list[str]()
    other = asyncio.Event()
    worker = Worker(app, queues=[DRAIN_QUEUE], concurrency=1, fetch_job_polling_interval=0.01)

    async def drain(site: str) -> None:
        running.append(site)
        if site == "a":
            worker._job_semaphore.release()  # noqa: SLF001 - as Node does
            await other.wait()
            worker.stop()  # type: ignore[no-untyped-call]
        else:
            other.set()

    async def main() -> None:
        app.task(name=DRAIN_TASK, queue=DRAIN_QUEUE)(drain)
        wake(database, ["a", "b"])
        async with app.open_async():
            await asyncio.wait_for(worker.run(), 20)  # type: ignore[no-untyped-call]

    asyncio.run(main())
    assert running == ["a", "b"]


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
