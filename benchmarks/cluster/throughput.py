"""Publications per second of four workers with real pushes: ours, and one job of Procrastinate per post."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import procrastinate
import psycopg
from psycopg.types.json import Jsonb

from benchmarks.cluster.ground import make_post, wait_until
from benchmarks.cluster.job_worker import make_app
from benchmarks.lab import daemon, git, post_path, remove, say
from briter_worker.cluster.sites import wake

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.cluster.ground import Cluster, Ground

OURS, SINGLE, PROCRASTINATE = "ours", "ours, one post per site", "Procrastinate, one job per post"
WORKERS = 4
_REST_S = 1.0
"""Until workers that have just started wait for something to do."""
_DEFER = b"""
INSERT INTO procrastinate_jobs (queue_name, task_name, lock, args) VALUES ('default', 'publish', %s, %s)
"""


@dataclass(frozen=True, slots=True)
class Size:
    """Number of sites, and of posts that wait in each."""

    sites: int
    posts: int


def measure(ground: Ground, size: Size, times: int) -> dict[str, list[float]]:
    """Return publications per second, in turns. Only one kind of worker runs at a time."""
    ours = [f"ours-{number}" for number in range(size.sites)]
    theirs = [f"theirs-{number}" for number in range(size.sites)]
    rates: dict[str, list[float]] = {OURS: [], SINGLE: [], PROCRASTINATE: []}
    clones = ground.lab.root / "job-clones"
    with (
        ground.remotes([*ours, *theirs]) as remotes,
        ground.cluster(ours, remotes) as cluster,
        ground.database() as url,
    ):
        with make_app(procrastinate.SyncPsycopgConnector(conninfo=url), clones).open() as app:
            app.schema_manager.apply_schema()
        clones.mkdir()
        for name in theirs:
            git(
                ("clone", "--quiet", str(remotes / f"{name}.git"), str(clones / name)), clones, ground.lab.env
            )
        _publish(cluster, ours, 1)  # makes the nodes' clones
        for turn in range(times):
            say(f"cluster, publications, repetition {turn + 1} of {times}")
            rates[OURS].append(_publish(cluster, ours, size.posts))
            rates[SINGLE].append(_publish(cluster, ours, 1))
            rates[PROCRASTINATE].append(_work_off(ground, url, clones, theirs, size.posts))
        counts = {
            len(names) * posts: sum(_count_commits(ground, remotes / f"{name}.git") for name in names)
            for names, posts in ((ours, times * size.posts + times + 1), (theirs, times * size.posts))
        }
    remove(clones)
    if any(expected != found for expected, found in counts.items()):
        raise RuntimeError(f"not every post became a commit: {counts}")
    return rates


def _publish(cluster: Cluster, sites: list[str], posts: int) -> float:
    with ExitStack() as nodes:
        for _ in range(WORKERS):
            nodes.enter_context(daemon(cluster.lab.root, cluster.environment(), is_read=True))
        time.sleep(_REST_S)
        with cluster.database.connection() as connection:  # stored aside, so that no node's sweep finds them
            connection.execute(b"UPDATE sites SET paused = '{}'")
        for site in sites:
            cluster.save(site, posts)
        with cluster.database.connection() as connection:
            connection.execute(b"UPDATE sites SET paused = NULL")
        began = time.perf_counter()
        wake(cluster.database, sites)
        return len(sites) * posts / (wait_until(cluster.is_drained, 0.02) - began)


def _work_off(ground: Ground, url: str, clones: Path, sites: list[str], posts: int) -> float:
    rows = [
        (
            site,
            Jsonb(
                {
                    "site": site,
                    "path": post_path(number),
                    "content": make_post(number).decode(),
                    "message": f"Publish post {number}",
                }
            ),
        )
        for number in range(posts)
        for site in sites
    ]
    command = [sys.executable, "-m", "benchmarks.cluster.job_worker", url, str(clones)]
    workers = [subprocess.Popen(command, cwd=ground.lab.root, env=ground.lab.env) for _ in range(WORKERS)]
    try:
        with psycopg.connect(url, autocommit=True) as asking, psycopg.connect(url) as putting:

            def ask(query: bytes) -> object:
                row = asking.execute(query).fetchone()
                return row[0] if row else None

            wait_until(lambda: ask(b"SELECT count(*) FROM procrastinate_workers") == WORKERS)
            time.sleep(_REST_S)
            putting.cursor().executemany(_DEFER, rows)
            began = time.perf_counter()
            putting.commit()
            ended = wait_until(lambda: not ask(b"SELECT EXISTS (SELECT FROM procrastinate_jobs)"), 0.02)
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait(60)
    return len(rows) / (ended - began)


def _count_commits(ground: Ground, remote: Path) -> int:
    return int(git(("rev-list", "--count", "main"), remote, ground.lab.env)) - 1
