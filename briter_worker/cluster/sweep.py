"""The sweep: wakes sites that have something due and no drain waiting. The backstop of every wake-up.

It finds posts whose schedule or backoff ended, producers that died between their commit and the wake-up, and
drains that were cut off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from briter_worker.queues.postgres.producer import wake_sites

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from briter_worker.queues.postgres.database import Database

_DOUBT_S = 60.0
"""How long a site rests whose jobs in flight wait for an answer of the remote."""
# A retry further away than any backoff was written by a clock that ran ahead, and is due. A site whose drain
# waits or runs looks for itself when it ends.
_DUE_SITES = """
SELECT s.name FROM sites s
WHERE NOT s.removed
  AND (s.paused IS NULL OR (s.paused->>'until')::float8 <= %(now)s)
  AND s.name <> ALL (%(besides)s::text[])
  AND (
    EXISTS (
      SELECT FROM publications p
      WHERE p.site = s.name AND p.state = 'pending' AND p.due_at <= %(now)s
        AND NOT (p.tried AND coalesce((s.settings->>'workerDryRun')::boolean, %(dry_run)s))
    )
    OR EXISTS (
      SELECT FROM publications p
      WHERE p.site = s.name AND p.state = 'pending' AND p.next_attempt_at > %(furthest)s
    )
    OR (
      coalesce(s.taken_at, 0) <= %(now)s - %(doubt)s
      AND EXISTS (SELECT FROM publications p WHERE p.site = s.name AND p.state = 'claimed')
    )
  )
  AND NOT EXISTS (
    SELECT FROM procrastinate_jobs j WHERE j.lock = s.name AND j.status IN ('todo', 'doing')
  )
"""
_NEXT_DUE = "SELECT min(due_at) FROM publications WHERE state = 'pending' AND due_at > %s"


@dataclass(frozen=True, slots=True)
class Swept:
    """The sites that a sweep woke, and when the next post of any site becomes due."""

    woken: Sequence[str]
    next_due: float | None


class Sweep:
    """Sweeps over all sites of the cluster."""

    def __init__(self, database: Database, *, dry_run: bool, longest_delay: float) -> None:
        self._database = database
        self._dry_run = dry_run
        self._longest_delay = longest_delay

    def wake_due(self, now: float, besides: Collection[str] = (), *, doubtful: bool = False) -> Swept:
        """Wake the sites that have something due, except `besides`; with `doubtful` also those in doubt.

        Raises DatabaseError.
        """
        values = {
            "now": now,
            "furthest": now + self._longest_delay,
            "besides": list(besides),
            "dry_run": self._dry_run,
            "doubt": 0.0 if doubtful else _DOUBT_S,
        }
        with self._database.connection() as connection:
            names = [name for (name,) in connection.execute(_DUE_SITES, values)]
            next_due = connection.execute(_NEXT_DUE, (now,)).fetchone()
        if names:
            wake_sites(self._database, names)
        return Swept(names, next_due[0] if next_due else None)
