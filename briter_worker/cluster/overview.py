"""How all sites of a cluster stand, in one question, for whoever looks at them together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, LiteralString

from briter_worker.cluster.sites import hosts
from briter_worker.errors import for_people
from briter_worker.job import format_time
from briter_worker.ports import Pause

if TYPE_CHECKING:
    from collections.abc import Sequence

    from briter_worker.queues.postgres.database import Database

_SITES: LiteralString = """
SELECT s.name, s.remote, s.branch, s.paused, c.failure, c.condition,
  coalesce(n.pending, 0), coalesce(n.retrying, 0), coalesce(n.scheduled, 0), coalesce(n.claimed, 0),
  coalesce(n.failed, 0), n.oldest
FROM sites s
LEFT JOIN conditions c ON c.site = s.name AND c.failure IS NOT NULL
LEFT JOIN (
  SELECT site,
    count(*) FILTER (WHERE state = 'waiting' AND due_at <= %(now)s) AS pending,
    count(*) FILTER (WHERE state = 'waiting' AND due_at > %(now)s AND scheduled_for <= %(now)s) AS retrying,
    count(*) FILTER (WHERE state = 'waiting' AND scheduled_for > %(now)s) AS scheduled,
    count(*) FILTER (WHERE state = 'claimed') AS claimed,
    count(*) FILTER (WHERE state = 'failed') AS failed,
    min(greatest(created_at, scheduled_for))
      FILTER (WHERE state IN ('waiting', 'claimed') AND scheduled_for <= %(now)s) AS oldest
  FROM publications GROUP BY site
) n ON n.site = s.name
WHERE NOT s.removed
ORDER BY s.name
"""
_TALLIES: LiteralString = (
    "SELECT t.site, t.kind, t.outcome, t.number, t.waits, t.waited FROM tallies t"
    " JOIN sites s ON s.name = t.site AND NOT s.removed ORDER BY 1, 2, 3"
)


@dataclass(frozen=True, slots=True)
class Glance:
    """One site among many."""

    name: str
    remote: str
    branch: str
    paused: Pause | None
    failure: str | None
    condition: str | None
    """What keeps any post of the site from being published."""
    pending: int
    retrying: int
    scheduled: int
    claimed: int
    failed: int
    oldest: float | None
    """Since when the post that waits longest has waited: since its save, or since it was due."""

    @property
    def jobs(self) -> dict[str, int]:
        """How many jobs there are in each state."""
        names = ("pending", "scheduled", "retrying", "claimed", "failed")
        return {name: getattr(self, name) for name in names}

    @property
    def has_trouble(self) -> bool:
        """Whether somebody may have to look after it."""
        return self.failure is not None or self.failed > 0 or self.retrying > 0

    def as_json(self, now: float) -> dict[str, Any]:
        """For programs, in camelCase."""
        pause = self.paused
        until = None if pause is None or pause.until is None else format_time(pause.until)
        told = pause and {"since": format_time(pause.since), "until": until, "reason": pause.reason or None}
        return {
            "name": self.name,
            "remote": self.remote,
            "branch": self.branch,
            "jobs": self.jobs,
            "oldestWaitingSeconds": None if self.oldest is None else max(0.0, now - self.oldest),
            "paused": told,
            "condition": self.condition,
            "failure": self.failure,
        }


@dataclass(frozen=True, slots=True)
class Tally:
    """How often an outcome was on a site, and how long authors waited for it in all."""

    site: str
    kind: str
    outcome: str
    number: int
    waits: int
    waited: float


@dataclass(frozen=True, slots=True)
class Overview:
    """All sites, by name, as they were at `at`."""

    at: float
    sites: Sequence[Glance] = ()
    hosts: int = 0


def look(database: Database, now: float) -> Overview:
    """Look at all sites. Raises DatabaseError."""
    with database.transaction() as connection:
        rows = connection.execute(_SITES, {"now": now}).fetchall()
    return Overview(now, [_glance(row, now) for row in rows], hosts(database))


def tallies(database: Database) -> list[Tally]:
    """What the history adds up to: numbers that only grow. Raises DatabaseError."""
    with database.transaction() as connection:
        return [Tally(*row) for row in connection.execute(_TALLIES)]


def _glance(row: tuple[Any, ...], now: float) -> Glance:
    name, remote, branch, paused, failure, condition, *counts = row
    pause = paused and Pause(paused["since"], paused.get("until"), paused.get("reason", ""))
    if pause is not None and pause.until is not None and pause.until <= now:
        pause = None
    text = None if condition is None else for_people(condition)
    return Glance(name, remote, branch, pause, failure, text, *counts)
