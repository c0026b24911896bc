"""Publications per second with real pushes, and one save beside an idle worker: ours, and Procrastinate's."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import procrastinate
import psycopg
from psycopg.types.json import Jsonb

from benchmarks.cluster.ground import make_post
from benchmarks.cluster.job_worker import POSTS_TABLE, make_app
from benchmarks.lab import count_commits, daemon, git, post_path, remove, say, wait_until
from benchmarks.latency import tip, wait_until_moved
from briter_worker.cluster.sites import wake

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks.cluster.ground import Cluster, Ground

OURS = "ours"
PUSH_EACH = "Procrastinate, one job and push per post"
PUSH_ONCE = "Procrastinate, one job and push per site"
WORKERS = (1, 2, 4)
_REST_S = 1.0
"""Until workers that have just started wait for something to do."""
_DEFER = b"""
INSERT INTO procrastinate_jobs (queue_name, task_name, lock, args) VALUES ('default', 'publish', %s, %s)
"""
_STORE = b"INSERT INTO posts (site, path, content, message) VALUES (%s, %s, %s, %s)"
_DEFER_DRAIN = b"""
INSERT INTO procrastinate_jobs (queue_name, task_name, lock, queueing_lock, args)
VALUES ('default', 'drain', %(site)s, %(site)s, jsonb_build_object('site', %(site)s::text))
"""


@dataclass(frozen=True, slots=True)
class Size:
    """Number of sites, and of posts that wait in each."""

    sites: int
    posts: int


def single(kind: str, workers: int) -> str:
    """Return the name of the series with one post waiting in each site."""
    return f"{kind}; one post per site, workers: {workers}"


def measure(ground: Ground, size: Size, times: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return publications per second, and milliseconds of a save beside an idle worker, in turns."""
    rates: dict[str, list[float]] = {}
    waits: dict[str, list[float]] = {}
    with ExitStack() as stack:
        sites = {
            kind: [f"site-{at}-{number}" for number in range(size.sites)]
            for at, kind in enumerate((OURS, PUSH_EACH, PUSH_ONCE))
        }
        remotes = stack.enter_context(ground.remotes([name for names in sites.values() for name in names]))
        cluster = stack.enter_context(ground.cluster(sites[OURS], remotes))
        workers: dict[str, _Ours | _Peer] = {OURS: _Ours(cluster, sites[OURS])}
        for kind in (PUSH_EACH, PUSH_ONCE):
            url = stack.enter_context(ground.database())
            peer = _Peer(ground, url, remotes, sites[kind], is_batched=kind == PUSH_ONCE)
            stack.callback(remove, peer.clones)
            workers[kind] = peer
        expected = dict.fromkeys(workers, 0)
        workers[OURS].publish(1, 4)  # makes the nodes' clones
        for turn in range(times):
            say(f"cluster, publications, repetition {turn + 1} of {times}")
            for kind, each in workers.items():
                rates.setdefault(kind, []).append(each.publish(size.posts, max(WORKERS)))
                expected[kind] += size.posts
                for number in WORKERS if kind != PUSH_ONCE else ():
                    rates.setdefault(single(kind, number), []).append(each.publish(1, number))
                    expected[kind] += 1
        for kind, each in workers.items():
            say(f"cluster, saves beside an idle worker: {kind}")
            waits[kind] = each.save_when_idle(remotes, 10 * times)
            commits = sum(count_commits(remotes / f"{name}.git", ground.lab.env) - 1 for name in sites[kind])
            if commits != size.sites * (expected[kind] + (kind == OURS)) + 10 * times + 1:
                raise RuntimeError(f"not every post became one commit: {kind}, {commits}")
    return rates, waits


class _Ours:
    def __init__(self, cluster: Cluster, sites: list[str]) -> None:
        self._cluster, self._sites = cluster, sites

    @contextmanager
    def _nodes(self, number: int) -> Iterator[None]:
        with ExitStack() as nodes:
            for _ in range(number):
                environment = self._cluster.environment()
                nodes.enter_context(daemon(self._cluster.lab.root, environment, is_read=True))
            time.sleep(_REST_S)
            yield

    def publish(self, posts: int, workers: int) -> float:
        """Return publications per second of posts that wait in every site."""
        database = self._cluster.database
        with self._nodes(workers):
            with database.connection() as connection:  # stored aside, so that no node's sweep finds them
                connection.execute(b"UPDATE sites SET paused = '{}'")
            for site in self._sites:
                self._cluster.save(site, posts)
            with database.connection() as connection:
                connection.execute(b"UPDATE sites SET paused = NULL")
            began = time.perf_counter()
            wake(database)
            return len(self._sites) * posts / (wait_until(self._cluster.is_drained, 0.02) - began)

    def save_when_idle(self, remotes: Path, count: int) -> list[float]:
        """Return the milliseconds from a stored post to its commit on the remote."""
        site, taken = self._sites[0], []
        with self._nodes(1):
            for _ in range(count + 1):
                before, began = tip(remotes / f"{site}.git"), time.perf_counter()
                self._cluster.save(site, 1)
                wake(self._cluster.database)
                taken.append(1000 * (wait_until_moved(remotes / f"{site}.git", before) - began))
                wait_until(self._cluster.is_drained)
                time.sleep(_REST_S / 5)
        return taken[1:]


class _Peer:
    def __init__(
        self, ground: Ground, url: str, remotes: Path, sites: list[str], *, is_batched: bool
    ) -> None:
        self._lab, self._url, self._sites, self._is_batched = ground.lab, url, sites, is_batched
        self.clones = ground.lab.root / f"clones-{is_batched}"
        self.clones.mkdir()
        with make_app(procrastinate.SyncPsycopgConnector(conninfo=url), self.clones).open() as app:
            app.schema_manager.apply_schema()
        with psycopg.connect(url) as connection:
            connection.execute(POSTS_TABLE.encode())
        for name in sites:
            command = ("clone", "--quiet", str(remotes / f"{name}.git"), str(self.clones / name))
            git(command, self.clones, ground.lab.env)

    @contextmanager
    def _workers(self, number: int) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
        """Yield a connection beside the workers."""
        command = [sys.executable, "-m", "benchmarks.cluster.job_worker", self._url, str(self.clones)]
        run = [subprocess.Popen(command, cwd=self._lab.root, env=self._lab.env) for _ in range(number)]
        try:
            with psycopg.connect(self._url, autocommit=True) as connection:
                running = b"SELECT count(*) FROM procrastinate_workers"
                wait_until(lambda: connection.execute(running).fetchone() == (number,))
                time.sleep(_REST_S)
                yield connection
        finally:
            for worker in run:
                worker.terminate()
            for worker in run:
                worker.wait(60)

    def _defer(
        self, connection: psycopg.Connection[tuple[object, ...]], sites: list[str], posts: int
    ) -> None:
        rows = [
            (site, post_path(number), make_post(number).decode(), f"Publish post {number}")
            for number in range(posts)
            for site in sites
        ]
        if self._is_batched:
            connection.cursor().executemany(_STORE, rows)
            connection.cursor().executemany(_DEFER_DRAIN, [{"site": site} for site in sites])
            return
        names = ("site", "path", "content", "message")
        jobs = [(row[0], Jsonb(dict(zip(names, row, strict=True)))) for row in rows]
        connection.cursor().executemany(_DEFER, jobs)

    def publish(self, posts: int, workers: int) -> float:
        """Return publications per second of posts that wait in every site."""
        with self._workers(workers) as connection:
            with psycopg.connect(self._url) as aside:
                self._defer(aside, self._sites, posts)
                began = time.perf_counter()
            query = b"SELECT EXISTS (SELECT FROM procrastinate_jobs)"
            ended = wait_until(lambda: connection.execute(query).fetchone() == (False,), 0.02)
        return len(self._sites) * posts / (ended - began)

    def save_when_idle(self, remotes: Path, count: int) -> list[float]:
        """Return the milliseconds from a stored post to its commit on the remote."""
        site, taken = self._sites[0], []
        with self._workers(1) as connection:
            for _ in range(count + 1):
                before, began = tip(remotes / f"{site}.git"), time.perf_counter()
                with connection.transaction():
                    self._defer(connection, [site], 1)
                taken.append(1000 * (wait_until_moved(remotes / f"{site}.git", before) - began))
                time.sleep(_REST_S / 5)
        return taken[1:]
