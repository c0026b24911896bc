"""Publications as jobs of Procrastinate, one job each: what a CMS would do without Briter Worker.

`python -m benchmarks.cluster.job_worker CONNINFO CLONES` takes one job at a time until it ends. CLONES
is a folder with a clone of each site. Procrastinate's lock gives a site to one job at a time.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from pathlib import Path

import procrastinate


def make_app(connector: procrastinate.BaseConnector, clones: Path) -> procrastinate.App:
    """Return the app with its one task `publish`."""
    app = procrastinate.App(connector=connector)

    @app.task(name="publish")
    def publish(site: str, path: str, content: str, message: str) -> None:
        clone = clones / site
        (clone / path).write_text(content, encoding="utf-8")
        for command in (
            ["git", "add", "--", path],
            ["git", "commit", "--quiet", f"--message={message}"],
            ["git", "push", "--quiet", "origin", "main"],
        ):
            subprocess.run(command, cwd=clone, check=True, stdout=subprocess.DEVNULL)

    return app


async def _work(conninfo: str, clones: Path) -> None:
    app = make_app(procrastinate.PsycopgConnector(conninfo=conninfo), clones)
    async with app.open_async():
        # 0.1 s between two looks instead of 5 s: Procrastinate does not notify when a lock becomes free.
        await app.run_worker_async(concurrency=1, delete_jobs="always", fetch_job_polling_interval=0.1)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    asyncio.run(_work(sys.argv[1], Path(sys.argv[2])))
