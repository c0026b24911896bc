"""The cost of storing one post, until Postgres has flushed it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import procrastinate

from benchmarks.cluster.ground import make_post
from benchmarks.cluster.job_worker import make_app
from benchmarks.lab import post_path, say
from briter_worker.cluster.submit import enqueue
from briter_worker.wiring import open_database

if TYPE_CHECKING:
    from benchmarks.cluster.ground import Ground

ENQUEUE, DEFER = "enqueue()", "Procrastinate defer()"
_SITE = "site"
_WARM_UP = 20


def measure(ground: Ground, count: int) -> dict[str, list[float]]:
    """Return milliseconds per post of both, in turns. No node runs."""
    say(f"cluster, {count} posts stored")
    taken: dict[str, list[float]] = {ENQUEUE: [], DEFER: []}
    root = ground.lab.root
    with ground.cluster([_SITE], root) as cluster, ground.database() as url:
        settings = cluster.settings()
        app = make_app(procrastinate.SyncPsycopgConnector(conninfo=url), root)
        with app.open():
            app.schema_manager.apply_schema()
            publish = app.tasks["publish"].configure(lock=_SITE)
            for number in range(count + _WARM_UP):
                path, content = post_path(number), make_post(number)
                began = time.perf_counter()
                slug, files = f"post-{number:06}", {path: content}
                enqueue(slug, files=files, site=_SITE, settings=settings, message="Publish")
                between = time.perf_counter()
                publish.defer(site=_SITE, path=path, content=content.decode(), message="Publish")
                ended = time.perf_counter()
                if number >= _WARM_UP:
                    taken[ENQUEUE].append(1000 * (between - began))
                    taken[DEFER].append(1000 * (ended - between))
        open_database(settings).close()
    return taken
