"""The one word that is dispatched: drain site S. At most one of it waits, and at most one runs, for a site.

What it is about is committed before: a word that overtook its rows would find nothing, and be gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, LiteralString

if TYPE_CHECKING:
    from collections.abc import Collection

    from briter_worker.queues.postgres.database import Database

QUEUE = "drains"
TASK = "drain"

# As `procrastinate_defer_jobs_v1` would, but where a site's word waits already, the others still get theirs,
# no error stands in Postgres's log, and no message has to be read that comes in the server's language.
# It is not flushed: were it lost with the server, the sweep would find the rows.
# In one order, so that two who wake the same sites never wait for each other.
WAKE: LiteralString = f"""
INSERT INTO procrastinate_jobs (queue_name, task_name, lock, queueing_lock, args)
SELECT '{QUEUE}', '{TASK}', site, site, jsonb_build_object('site', site)
FROM unnest(%(sites)s::text[]) AS site
WHERE set_config('synchronous_commit', 'off', true) = 'off'
ORDER BY site
ON CONFLICT DO NOTHING
RETURNING lock AS site
"""  # noqa: S608 - two words of our own


def wake(database: Database, sites: Collection[str]) -> None:
    """Have these sites drained, by whichever host comes first. Call it when their rows are committed."""
    with database.asking() as connection:
        connection.execute(WAKE, {"sites": list(sites)})
