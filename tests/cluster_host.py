"""A host of a cluster as a process of its own, whose drains only count rows: for the tests of the dispatch.

Arguments: the database's URL, and a JSON object with `seconds` (a drain's work), `slots` and `pace`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from briter_worker.cluster.dispatching import Host, Pace
from briter_worker.cluster.engine import Engine
from briter_worker.cluster.slots import Left
from briter_worker.cluster.sweep import Sweep
from briter_worker.queues.postgres.database import Database
from briter_worker.settling import Tally
from briter_worker.sinks.log import LogSink, standard_output
from briter_worker.worker import Stop

if TYPE_CHECKING:
    from collections.abc import Callable

_CLAIM = """
UPDATE publications SET state = 'claimed', token = (SELECT token FROM sites WHERE name = %(site)s)
WHERE id IN (
  SELECT id FROM publications
  WHERE site = %(site)s AND (state = 'claimed' OR state = 'waiting' AND due_at <= %(now)s)
  ORDER BY id LIMIT %(most)s
)
"""
_DUE = "SELECT FROM publications WHERE site = %s AND state = 'waiting' AND due_at <= %s"


def drain_rows(
    database: Database, site: str, stopping: Callable[[], bool], *, seconds: float = 0.0, most: int = 500
) -> Left:
    """Take the site's token, claim what is due, work for so long, write into `drained` who has done it."""
    with database.transaction() as connection:
        row = connection.execute(
            "UPDATE sites SET token = token + 1, taken_at = %s WHERE name = %s RETURNING token",
            (time.time(), site),
        ).fetchone()
        assert row is not None
        connection.execute(_CLAIM, {"site": site, "now": time.time(), "most": most})
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and not stopping():
        time.sleep(0.01)
    with database.transaction() as connection:
        done = connection.execute(
            "DELETE FROM publications p USING sites s"
            " WHERE p.site = %s AND s.name = p.site AND p.state = 'claimed' AND s.token = %s RETURNING p.id",
            (site, row[0]),
        ).fetchall()
        for (number,) in done:
            connection.execute(
                "INSERT INTO drained (publication, site, host, at) VALUES (%s, %s, %s, %s)",
                (number, site, os.getpid(), time.time()),
            )
        is_due = connection.execute(_DUE, (site, time.time())).fetchone() is not None
    return Left(Tally(settled=len(done)), due=is_due)


async def _run(host: Host) -> None:
    await host.run()


def main() -> None:
    """Run until a signal."""
    url, options = sys.argv[1], json.loads(sys.argv[2])
    settings: dict[str, Any] = {"slots": 4, "pace": {}, "seconds": 0.0, "limit": 60.0} | options
    log = LogSink(standard_output())
    stop = Stop(log, limit=settings["limit"], abort=lambda: os._exit(9))
    with stop.on_signals(), Database(url, connections=settings["slots"]) as database:
        engine = Engine(database.conninfo)
        host = Host(
            engine,
            lambda site, stopping: drain_rows(database, site, stopping, seconds=settings["seconds"]),
            Sweep(engine, dry_run=False, longest_delay=3600.0),
            log,
            stop,
            slots=settings["slots"],
            pace=Pace(**settings["pace"]),
            once=False,
        )
        asyncio.run(_run(host))


if __name__ == "__main__":
    main()
