"""How soon a save is taken up by an idle host, and by another one when the host that had it dies."""

from __future__ import annotations

import subprocess
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.cluster.ground import Cluster, content_of, path_of
from benchmarks.lab import say, wait_for, worker
from benchmarks.latency import moved, tip
from briter_worker.cluster.asking import enqueue
from briter_worker.wiring import open_database

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from benchmarks.cluster.ground import Ground

_REST = 0.1
_LONGEST = 60.0
_SLOW = """#!/bin/sh
# A remote that answers nobody who came while it was slow.
[ -e slow ] || exit 0
while [ -e slow ]; do sleep 0.05; done
exit 1
"""


@dataclass
class Waits:
    """Milliseconds each."""

    begun: list[float] = field(default_factory=list)
    """From the call of `enqueue` until a drain of the site began."""
    published: list[float] = field(default_factory=list)


def saves(ground: Ground, count: int) -> Waits:
    """So many posts, each saved when the one before it has been published and the host is idle again."""
    say(f"cluster, {count} saves, each to an idle host")
    waits = Waits()
    with _one_site(ground) as (cluster, remote), _host(cluster):
        settings = cluster.settings()
        for number in range(count + 2):
            before, called, began = tip(remote), time.time(), time.perf_counter()
            enqueue(
                "post", files={path_of(0): content_of(number)}, site="site", settings=settings, message="Post"
            )
            published = moved(remote, before) - began
            _until(lambda: not cluster.ask("SELECT count(*) FROM procrastinate_jobs"))
            taken_at = float(cluster.ask("SELECT taken_at FROM sites"))
            if number >= 2:  # noqa: PLR2004 - imports, and the cache, came before
                waits.begun.append(1000 * (taken_at - called))
                waits.published.append(1000 * published)
            time.sleep(_REST)
        open_database(settings).close()
    return waits


def deaths(ground: Ground, count: int) -> Waits:
    """As many hosts, each killed in the middle of a push, until another one begins and has published."""
    waits = Waits()
    with _one_site(ground) as (cluster, remote), ExitStack() as hosts:
        hook, slow = remote / "hooks" / "pre-receive", remote / "slow"
        hook.parent.mkdir(exist_ok=True)
        hook.write_text(_SLOW, encoding="utf-8")
        hook.chmod(0o755)
        settings = cluster.settings()
        having = hosts.enter_context(_host(cluster))
        for number in range(count):
            say(f"cluster, death {number + 1} of {count} of the host that has the site")
            slow.touch()
            content = content_of(number)
            enqueue("post", files={path_of(0): content}, site="site", settings=settings, message="Post")
            _until(lambda: cluster.ask("SELECT count(*) FROM plans") == 1)
            other = hosts.enter_context(_host(cluster))
            time.sleep(1)  # until it waits
            before, token = tip(remote), int(cluster.ask("SELECT token FROM sites"))
            died, began = time.time(), time.perf_counter()
            having.kill()
            having.wait()
            slow.unlink()
            _until(lambda: cluster.ask("SELECT token > %s FROM sites", token))  # noqa: B023 - called at once
            waits.begun.append(1000 * (float(cluster.ask("SELECT taken_at FROM sites")) - died))
            waits.published.append(1000 * (moved(remote, before) - began))
            _until(lambda: not cluster.ask("SELECT count(*) FROM publications"))
            having = other
        open_database(settings).close()
    return waits


@contextmanager
def _one_site(ground: Ground) -> Iterator[tuple[Cluster, Path]]:
    with ground.remotes(["site"]) as remotes, Cluster.made(ground) as cluster:
        cluster.add(["site"], remotes)
        yield cluster, remotes / "site.git"


@contextmanager
def _host(cluster: Cluster) -> Iterator[subprocess.Popen[str]]:
    """The worker as a service, as a user starts it: it has started, and it is gone on leaving."""
    with subprocess.Popen(
        worker("run"), env=cluster.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            wait_for(process, "worker-started")
            # Somebody reads its log, so that it never waits for that.
            threading.Thread(target=process.stdout.read, daemon=True).start()  # type: ignore[union-attr]  # asked for
            yield process
            process.terminate()
            process.wait(60)
        finally:
            process.kill()


def _until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _LONGEST
    while not is_so():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {_LONGEST:.0f} s")
        time.sleep(0.005)
