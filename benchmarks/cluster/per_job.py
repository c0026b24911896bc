"""Publications as jobs of Procrastinate: one job each, as who has no worker of his own would do it.

per_job.py CONNINFO CLONES: takes jobs one by one until it is told to stop. CLONES is a folder with a clone of
each site, or empty: then a publication does nothing. A site is one job's at a time, by Procrastinate's lock.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

import procrastinate

from benchmarks.cluster.pushing import push


def made(connector: procrastinate.BaseConnector, clones: Path | None) -> procrastinate.App:
    """The app, with its one task `publish`."""
    app = procrastinate.App(connector=connector)

    @app.task(name="publish")
    def publish(site: str, path: str, content: str, message: str) -> None:
        if clones is not None:
            push(clones / site, path, content.encode(), message)

    return app


async def _work(conninfo: str, clones: Path | None) -> None:
    app = made(procrastinate.PsycopgConnector(conninfo=conninfo), clones)
    print("ready", flush=True)
    sys.stdin.readline()
    async with app.open_async():
        # A tenth of a second between two looks, not five: it is told of no lock that became free.
        await app.run_worker_async(concurrency=1, delete_jobs="always", fetch_job_polling_interval=0.1)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    asyncio.run(_work(sys.argv[1], Path(sys.argv[2]) if sys.argv[2] else None))
