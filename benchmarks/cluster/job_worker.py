"""Publications as jobs of Procrastinate: what a CMS would do without Briter Worker.

`python -m benchmarks.cluster.job_worker CONNINFO CLONES` takes one job at a time until it ends. CLONES
is a folder with a clone of each site. Procrastinate's lock gives a site to one job at a time.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from functools import cache
from pathlib import Path

import procrastinate
import psycopg

POSTS_TABLE = (
    "CREATE TABLE posts (id bigserial PRIMARY KEY, site text, path text, content text, message text)"
)
_TAKE = "DELETE FROM posts WHERE site = %s RETURNING id, path, content, message"


def make_app(connector: procrastinate.BaseConnector, clones: Path, conninfo: str = "") -> procrastinate.App:
    """Return the app with its tasks: `publish` pushes one post, `drain` all posts of a site at once."""
    app = procrastinate.App(connector=connector)

    def run_git(site: str, *command: str) -> None:
        subprocess.run(["git", *command], cwd=clones / site, check=True, stdout=subprocess.DEVNULL)

    def commit(site: str, path: str, content: str, message: str) -> None:
        (clones / site / path).write_text(content, encoding="utf-8")
        run_git(site, "add", "--", path)
        run_git(site, "commit", "--quiet", f"--message={message}")

    @cache
    def database() -> psycopg.Connection[tuple[int, str, str, str]]:
        return psycopg.connect(conninfo)

    @app.task(name="publish")
    def publish(site: str, path: str, content: str, message: str) -> None:
        commit(site, path, content, message)
        run_git(site, "push", "--quiet", "origin", "main")

    @app.task(name="drain")
    def drain(site: str) -> None:
        with database().transaction():  # the posts are gone once they are pushed
            posts = sorted(database().execute(_TAKE, (site,)).fetchall())
            for _, path, content, message in posts:
                commit(site, path, content, message)
            run_git(site, "push", "--quiet", "origin", "main")

    return app


async def _work(conninfo: str, clones: Path) -> None:
    app = make_app(procrastinate.PsycopgConnector(conninfo=conninfo), clones, conninfo)
    async with app.open_async():
        # 0.1 s between two looks instead of 5 s: Procrastinate does not notify when a lock becomes free.
        await app.run_worker_async(concurrency=1, delete_jobs="always", fetch_job_polling_interval=0.1)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    asyncio.run(_work(sys.argv[1], Path(sys.argv[2])))
