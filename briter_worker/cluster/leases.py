"""Leases: which node drains which site.

A lease is the node's name in the site's row, as long as the node is alive, which it reports in `nodes`. Each
lease takes the site's next fencing token: a node that was taken for dead, and is not, changes nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from psycopg.rows import dict_row

from briter_worker.wiring import open_backoff

if TYPE_CHECKING:
    from collections.abc import Collection

    from briter_worker.queues.postgres.database import Connection, Database
    from briter_worker.settings import Settings

_DEAD_S = 10.0
"""A node that has not reported itself for this time is taken for dead."""
_NOW = "extract(epoch FROM statement_timestamp())::float8"
# A site that this node holds and does not work on is one whose release, or whose lease, got lost.
_IS_FREE = f"""
NOT s.removed AND s.slow = ANY (%(lanes)s) AND s.name <> ALL (%(besides)s)
AND (s.paused IS NULL OR (s.paused->>'until')::float8 <= {_NOW})
AND (s.worker IS NULL OR s.worker = %(node)s OR NOT EXISTS (
    SELECT FROM nodes n WHERE n.name = s.worker AND (n.seen_at > {_NOW} - {_DEAD_S} OR NOT %(is_steady)s)
))
"""
# Of the waiting jobs, the one that has been due for longest.
_FIND_DUE = f"""
SELECT s.name, s.worker FROM publications p JOIN sites s ON s.name = p.site
WHERE p.state = 'pending' AND p.due_at <= {_NOW} AND {_IS_FREE}
AND NOT (p.tried AND coalesce((s.settings->>'workerDryRun')::boolean, %(dry_run)s))
ORDER BY p.due_at, p.site LIMIT 1 FOR NO KEY UPDATE OF s SKIP LOCKED
"""  # noqa: S608 - constants only, here and below
_FIND_NAMED = f"""
SELECT s.name, s.worker FROM sites s WHERE s.name = %(name)s AND {_IS_FREE} FOR NO KEY UPDATE SKIP LOCKED
"""  # noqa: S608
_TAKE = """
WITH found AS ({found})
UPDATE sites SET token = token + 1, worker = %(node)s, taken_at = extract(epoch FROM clock_timestamp())
FROM found WHERE sites.name = found.name
RETURNING sites.*, found.worker AS left_by,
    (SELECT failure FROM conditions WHERE site = sites.identity) AS condition,
    EXISTS (SELECT FROM plans WHERE site = sites.name)
    OR EXISTS (SELECT FROM publications WHERE site = sites.name AND state = 'claimed') AS is_unfinished,
    jsonb_build_object(
        'superseded', EXISTS (SELECT FROM superseded WHERE site = sites.name),
        'scheduled', EXISTS (
            SELECT FROM publications WHERE site = sites.name AND state = 'pending' AND due_at > taken_at
        ),
        'failed_or_retrying', EXISTS (SELECT FROM publications WHERE site = sites.name AND state = 'failed')
        OR EXISTS (
            SELECT FROM publications WHERE site = sites.name AND state = 'pending' AND next_attempt_at > 0
        )
    ) AS has
"""
_TAKE_DUE, _TAKE_NAMED = (_TAKE.format(found=found).encode() for found in (_FIND_DUE, _FIND_NAMED))
# Sites that have something to do beside due jobs: pulls, leases of the dead, plans and jobs in flight that
# nobody works on, and retries further away than any backoff, which a clock that ran ahead has written.
_SWEEP = f"""
SELECT s.name FROM sites s
WHERE {_IS_FREE} AND (
    s.pull_at <= {_NOW} OR (s.pull_at IS NULL AND %(pulls)s)
    OR EXISTS (
        SELECT FROM publications p
        WHERE p.site = s.name AND p.state = 'pending' AND p.next_attempt_at > {_NOW} + %(longest)s
    )
    OR s.worker IS NOT NULL OR (
        coalesce(s.taken_at, 0) <= {_NOW} - %(doubt)s
        AND (EXISTS (SELECT FROM publications p WHERE p.site = s.name AND p.state = 'claimed')
            OR EXISTS (SELECT FROM plans p WHERE p.site = s.name))
    )
)
"""  # noqa: S608
# What a crash of the server loses of this is what the node holds and does not work on, and plans that are
# resolved once more, which does no harm.
_RELEASE = """
WITH own AS (
    UPDATE sites SET worker = NULL, slow = %s WHERE name = %s AND token = %s
    AND set_config('synchronous_commit', 'off', true) = 'off' RETURNING name
)
DELETE FROM plans USING own WHERE site = own.name AND id = ANY(%s)
"""
_NEXT_DUE = f"SELECT min(due_at) - {_NOW} FROM publications WHERE state = 'pending' AND due_at > %s"  # noqa: S608


class Leases:
    """The leases of one node."""

    def __init__(self, database: Database, node: str, settings: Settings) -> None:
        self._database = database
        self._values: dict[str, Any] = {
            "node": node,
            "dry_run": settings.worker_dry_run,
            "pulls": settings.git_pull_interval_ms > 0,
            "longest": open_backoff(settings).longest,
        }

    def take(
        self,
        connection: Connection,
        *,
        is_steady: bool,
        besides: Collection[str],
        lanes: Collection[bool],
        name: str | None = None,
    ) -> dict[str, Any] | None:
        """Lease the site whose job has been due for longest, or the named one. Return its row, or None.

        The row has in `left_by` the node that had the site and died, in `condition` the failure that keeps
        the site's posts, in `is_unfinished` whether a drain has left a plan or jobs in flight, and in `has`
        whether the queue has superseded, failed and scheduled rows.
        `is_steady`: dead nodes can be told from living ones.
        """
        values = self._values | {"is_steady": is_steady, "besides": list(besides), "lanes": list(lanes)}
        cursor = connection.cursor(row_factory=dict_row)
        cursor.execute(_TAKE_DUE if name is None else _TAKE_NAMED, values | {"name": name})
        row = cursor.fetchone()
        if row is not None:
            self._database.set_clock(row["taken_at"])
        return row

    def sweep(self, *, is_steady: bool, besides: Collection[str], doubt: float = 60.0) -> list[str]:
        """Return free sites that have something to do beside due jobs. Raises DatabaseError.

        `doubt`: how long a site rests whose jobs in flight wait for an answer of the remote.
        """
        values = self._values | {"is_steady": is_steady, "besides": list(besides), "doubt": doubt}
        values["lanes"] = [False, True]
        with self._database.connection() as connection:
            return [name for (name,) in connection.execute(_SWEEP.encode(), values)]

    def next_due(self, since: float) -> float:
        """Return in how many seconds the first job is due that was not at `since`. Raises DatabaseError."""
        with self._database.connection() as connection:
            row = connection.execute(_NEXT_DUE.encode(), (since,)).fetchone()
        return math.inf if row is None or row[0] is None else max(0.0, row[0])

    def release(self, site: str, token: int, *, is_slow: bool, plans: Collection[str] = ()) -> None:
        """End the lease, delete these plans, and choose the site's next lane. Raises DatabaseError."""
        with self._database.connection() as connection:
            connection.execute(_RELEASE, (is_slow, site, token, list(plans)))
