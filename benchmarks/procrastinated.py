"""Procrastinate, one job after the other, run by `benchmarks.queue` in an environment of its own.

procrastinated.py CONNECTION JOBS: each is put in by itself, then all are taken and done by one worker; prints
the seconds it took, without the start of Python and without making the tables.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time

import procrastinate  # type: ignore[import-not-found]  # not of this project
import psycopg  # type: ignore[import-not-found]  # not of this project


async def measure(connection: str, jobs: int) -> float:
    """Seconds for all jobs."""
    with psycopg.connect(connection, autocommit=True) as database:
        database.execute("DROP SCHEMA public CASCADE")  # a turn before this one
        database.execute("CREATE SCHEMA public")
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=connection))
    done: list[str] = []

    @app.task(name="publish")  # type: ignore[untyped-decorator]  # as above
    async def publish(slug: str, paths: list[str], message: str) -> None:  # noqa: ARG001 - a job's shape
        done.append(slug)

    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        began = time.perf_counter()
        for number in range(jobs):
            await publish.defer_async(
                slug=f"post-{number}", paths=[f"content/posts/{number}.md"], message="Publish"
            )
        await app.run_worker_async(
            wait=False, concurrency=1, delete_jobs="always", install_signal_handlers=False
        )
        took = time.perf_counter() - began
    if len(done) != jobs:
        raise RuntimeError("a job is lost")
    return took


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    print(asyncio.run(measure(sys.argv[1], int(sys.argv[2]))))
