"""The register of a cluster's sites: where each is published to, and its own settings.

The row of a removed site stays, so that the site's fencing token goes on counting.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from psycopg.rows import dict_row

from briter_worker.cluster.remotes import check_credentials, check_remote
from briter_worker.errors import DeclinedError, UsageError
from briter_worker.job import format_time
from briter_worker.ports import Pause
from briter_worker.queues.postgres.fencing import SiteMissingError
from briter_worker.redaction import one_line
from briter_worker.settings import SITE_NAME, for_site

if TYPE_CHECKING:
    from collections.abc import Mapping

    from briter_worker.queues.postgres.database import Connection, Database
    from briter_worker.settings import Settings

_ALIVE_S = 15.0
"""A node without a heartbeat for so long is not counted."""
_OWN_ARGUMENTS = {"gitBranch": "--branch", "adapter": "--adapter", "allowedPaths": "--allow"}
# Counts of a site's jobs by state.
_SUMMARIES = """
SELECT s.*, c.failure, c.condition, c.fix,
  coalesce(n.pending, 0) AS pending, coalesce(n.retrying, 0) AS retrying, coalesce(n.tried, 0) AS tried,
  coalesce(n.scheduled, 0) AS scheduled, coalesce(n.claimed, 0) AS claimed, coalesce(n.failed, 0) AS dead,
  n.oldest
FROM sites s
LEFT JOIN conditions c ON c.site = s.name AND c.failure IS NOT NULL
LEFT JOIN (
  SELECT site,
    count(*) FILTER (WHERE state = 'pending' AND NOT tried AND due_at <= %(now)s) AS pending,
    count(*) FILTER (
      WHERE state = 'pending' AND NOT tried AND due_at > %(now)s AND scheduled_for <= %(now)s
    ) AS retrying,
    count(*) FILTER (WHERE state = 'pending' AND tried AND scheduled_for <= %(now)s) AS tried,
    count(*) FILTER (WHERE state = 'pending' AND scheduled_for > %(now)s) AS scheduled,
    count(*) FILTER (WHERE state = 'claimed') AS claimed,
    count(*) FILTER (WHERE state = 'failed') AS failed,
    min(greatest(created_at, scheduled_for))
      FILTER (WHERE state <> 'failed' AND scheduled_for <= %(now)s) AS oldest
  FROM publications GROUP BY site
) n ON n.site = s.name
WHERE NOT s.removed
ORDER BY s.name
"""


@dataclass(frozen=True, slots=True)
class Site:
    """One site, as the database has it. What is absent from `settings` is as the node's settings say."""

    name: str
    remote: str
    branch: str
    adapter: str
    allowed: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The site's own settings, with the keys of config.json."""
    credentials: Mapping[str, str] | None = None
    """Where each node finds the credentials of the remote; never the credentials."""
    created_at: float = 0.0
    paused: Pause | None = None
    tip: str | None = None
    """The remote branch's commit after the last publication."""

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Site:
        """Return the site of a row of the table."""
        pause = row["paused"]
        return cls(
            name=row["name"],
            remote=row["remote"],
            branch=row["branch"],
            adapter=row["adapter"],
            allowed=tuple(row["allowed"]),
            settings=row["settings"],
            credentials=row["credentials"] or None,
            created_at=row["created_at"],
            paused=pause and Pause(pause["since"], pause.get("until"), pause.get("reason", "")),
            tip=row["tip"],
        )

    def to_json(self) -> dict[str, Any]:
        """Return the site for programs, in camelCase."""
        return {
            "name": self.name,
            "remote": self.remote,
            "branch": self.branch,
            "adapter": self.adapter,
            "allowedPaths": list(self.allowed),
            "settings": dict(self.settings),
            "credentials": None if self.credentials is None else dict(self.credentials),
            "createdAt": format_time(self.created_at),
            "paused": self.paused is not None,
        }


@dataclass(frozen=True, slots=True)
class SiteSummary:
    """One site among many: its jobs by state, and its condition."""

    site: Site
    pending: int
    scheduled: int
    retrying: int
    tried: int
    claimed: int
    failed: int
    oldest: float | None
    """When the job that waits longest was saved, or became due."""
    failure: str | None = None
    condition: str | None = None
    fix: str = ""
    paused: Pause | None = None
    """The pause, if it is active."""

    @property
    def name(self) -> str:
        """Return the site's name."""
        return self.site.name

    @property
    def jobs(self) -> dict[str, int]:
        """Return the number of jobs in each state."""
        states = ("pending", "scheduled", "retrying", "tried", "claimed", "failed")
        return {state: getattr(self, state) for state in states}

    @property
    def waiting(self) -> int:
        """Return the number of jobs that are neither in flight nor failed."""
        return self.pending + self.scheduled + self.retrying + self.tried

    @property
    def has_trouble(self) -> bool:
        """Return True if the site needs attention."""
        return self.failure is not None or self.failed > 0 or self.retrying > 0

    def to_json(self, now: float) -> dict[str, Any]:
        """Return the summary for programs, in camelCase."""
        pause = self.paused
        until = None if pause is None or pause.until is None else format_time(pause.until)
        return {
            "name": self.site.name,
            "remote": self.site.remote,
            "branch": self.site.branch,
            "jobs": self.jobs,
            "oldestWaitingSeconds": None if self.oldest is None else max(0.0, now - self.oldest),
            "paused": pause
            and {"since": format_time(pause.since), "until": until, "reason": pause.reason or None},
            "condition": self.condition,
            "failure": self.failure,
            "fix": self.fix or None,
        }


def settings_of(site: Site, node: Settings) -> Settings:
    """Return the node's settings with the site's own laid over them. Raises UsageError."""
    own = {
        **site.settings,
        "gitBranch": site.branch,
        "adapter": site.adapter,
        "allowedPaths": list(site.allowed),
    }
    settings = for_site(node, own, source=f"the site {site.name}")
    return settings.model_copy(update={"site": site.name})


def check_site(site: Site, node: Settings) -> Site:
    """Return the site if a node can work with it. Raises UsageError, which says what is accepted."""
    if not re.fullmatch(SITE_NAME, site.name):
        raise UsageError(
            f"{site.name!r} is no name of a site; accepted: up to 100 letters and digits, "
            "and after the first also . _ and -"
        )
    check_remote(site.remote)
    if taken := [key for key in _OWN_ARGUMENTS if key in site.settings]:
        raise UsageError(
            f"{', '.join(taken)} cannot be set with --set",
            f"use {', '.join(_OWN_ARGUMENTS[key] for key in taken)}",
        )
    settings_of(site, node)
    return replace(site, credentials=check_credentials(site.remote, site.credentials))


def add(database: Database, site: Site, node: Settings) -> None:
    """Register the site. Raises UsageError, and DeclinedError when there is one of that name."""
    site = check_site(site, node)
    with database.transaction() as connection:
        added = connection.execute(
            "INSERT INTO sites (name, remote, branch, adapter, allowed, settings, credentials, created_at)"
            " VALUES (%s, %s, %s, %s, %s, %s, %s, %s)"
            " ON CONFLICT (name) DO UPDATE SET remote = excluded.remote, branch = excluded.branch,"
            " adapter = excluded.adapter, allowed = excluded.allowed, settings = excluded.settings,"
            " credentials = excluded.credentials, created_at = excluded.created_at, removed = false,"
            " paused = NULL, tip = NULL WHERE sites.removed RETURNING name",
            (site.name, *_columns(site), site.created_at),
        ).fetchone()
    if added is None:
        raise DeclinedError(
            f"there is a site {site.name!r} already", f"briter-worker site change {site.name} alters it"
        )


def change(database: Database, site: Site, node: Settings) -> None:
    """Replace the site of that name, from its next publication on."""
    site = check_site(site, node)
    with database.transaction() as connection:
        row = connection.execute(
            "SELECT remote, branch FROM sites WHERE name = %s AND NOT removed FOR UPDATE", (site.name,)
        ).fetchone()
        if row is None:
            raise SiteMissingError(site.name)
        connection.execute(
            "UPDATE sites SET remote = %s, branch = %s, adapter = %s, allowed = %s, settings = %s,"
            " credentials = %s WHERE name = %s",
            (*_columns(site), site.name),
        )
        if row != (site.remote, site.branch):
            _forget_published(connection, site.name)


def _forget_published(connection: Connection, name: str) -> None:
    """Drop what is known of the old remote, and fence off a node that still publishes to it."""
    connection.execute("UPDATE sites SET tip = NULL, token = token + 1 WHERE name = %s", (name,))
    for table in (b"published", b"base_versions", b"conditions", b"plans"):
        connection.execute(b"DELETE FROM " + table + b" WHERE site = %s", (name,))


def get(database: Database, name: str) -> Site:
    """Return the site of that name. Raises SiteMissingError."""
    with database.connection() as connection:
        rows = connection.cursor(row_factory=dict_row)
        row = rows.execute("SELECT * FROM sites WHERE name = %s AND NOT removed", (name,)).fetchone()
    if row is None:
        raise SiteMissingError(name)
    return Site.from_row(row)


def summaries(database: Database, now: float) -> list[SiteSummary]:
    """Return every site by name, with its jobs and its condition."""
    with database.connection() as connection:
        rows = connection.cursor(row_factory=dict_row).execute(_SUMMARIES, {"now": now}).fetchall()
    return [_summary(row, now) for row in rows]


def _summary(row: Mapping[str, Any], now: float) -> SiteSummary:
    site = Site.from_row(row)
    counts = {state: row[state] for state in ("pending", "scheduled", "retrying", "tried", "claimed")}
    return SiteSummary(
        site,
        **counts,
        failed=row["dead"],
        oldest=row["oldest"],
        failure=row["failure"],
        condition=None if row["condition"] is None else one_line(row["condition"]),
        fix=row["fix"] or "",
        paused=site.paused if site.paused is not None and site.paused.is_active(now) else None,
    )


def count_nodes(database: Database) -> int:
    """Return how many nodes have a recent heartbeat."""
    with database.connection() as connection:
        row = connection.execute(
            "SELECT count(*) FROM procrastinate_workers"
            " WHERE last_heartbeat > now() - make_interval(secs => %s)",
            (_ALIVE_S,),
        ).fetchone()
    return int(row[0]) if row else 0


def published_at(database: Database, name: str) -> float:
    """Return when something of the site was published last; 0 when nothing was."""
    with database.connection() as connection:
        row = connection.execute(
            "SELECT max(published_at) FROM published WHERE site = %s", (name,)
        ).fetchone()
    return float(row[0] or 0.0) if row else 0.0


def remove(database: Database, name: str, *, discard: bool) -> None:
    """Unregister the site; `discard` deletes the jobs that it still has.

    A node that publishes the site loses it, and pushes nothing more.
    """
    with database.transaction() as connection:
        known = connection.execute(
            "SELECT 1 FROM sites WHERE name = %s AND NOT removed FOR UPDATE", (name,)
        ).fetchone()
        if known is None:
            raise SiteMissingError(name)
        counted = connection.execute("SELECT count(*) FROM publications WHERE site = %s", (name,)).fetchone()
        if counted and counted[0] and not discard:
            raise DeclinedError(
                f"the site {name} still has {counted[0]} jobs",
                "let them be published, move them with "
                f"briter-worker export --site {name}, or delete them with --discard",
            )
        connection.execute("UPDATE sites SET removed = true WHERE name = %s", (name,))
        _forget_published(connection, name)
        for table in (b"superseded", b"publications"):
            connection.execute(b"DELETE FROM " + table + b" WHERE site = %s", (name,))


def _columns(site: Site) -> tuple[object, ...]:
    return (
        site.remote,
        site.branch,
        site.adapter,
        list(site.allowed),
        json.dumps(dict(site.settings)),
        json.dumps(dict(site.credentials or {})),
    )
