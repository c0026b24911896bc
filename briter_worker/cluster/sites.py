"""The register of a cluster's sites: where each is published to, and what it has of its own.

A site's row outlives what is published through it; what is taken out of the register is gone with its jobs.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from psycopg.rows import dict_row

from briter_worker.accepted import SITE_NAME
from briter_worker.cluster.remotes import checked_credentials, checked_remote
from briter_worker.errors import UsageError, for_people
from briter_worker.job import format_time
from briter_worker.ports import Pause
from briter_worker.queues.postgres import contents, tokens
from briter_worker.settings import for_site

if TYPE_CHECKING:
    from collections.abc import Mapping

    from briter_worker.queues.postgres.database import Connection, Database
    from briter_worker.settings import Settings


_SILENCE = 15.0
"""Seconds after which a host that has not shown that it lives is not counted."""


class SiteError(Exception):
    """What was asked of the register cannot be done; the text says why, and what to do instead."""


class UnknownSiteError(SiteError):
    """There is no such site."""

    def __init__(self, name: str) -> None:
        super().__init__(
            for_people(
                f"there is no site {name!r}. Fix: briter-worker site list names them all, "
                "and briter-worker site add makes one"
            )
        )


@dataclass(frozen=True, slots=True)
class Site:
    """One site, as it stands in the database. What is None or not in `settings` is as the worker's is."""

    name: str
    remote: str
    branch: str
    adapter: str
    allowed: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of its own, in the keys of config.json."""
    credentials: Mapping[str, str] | None = None
    """Where each worker finds what opens the remote; never the credential itself."""
    created_at: float = 0.0
    paused: Pause | None = None
    tip: str | None = None
    """The remote branch's commit, as the last publication left it."""

    def as_json(self) -> dict[str, Any]:
        """For programs, in camelCase."""
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
class Standing:
    """How much waits in a site."""

    site: Site
    waiting: int
    claimed: int
    failed: int
    oldest: float | None
    """When what waits longest, and is due, was saved or became due."""

    def as_json(self) -> dict[str, Any]:
        """For programs, in camelCase."""
        since = None if self.oldest is None else format_time(self.oldest)
        counts = {"waiting": self.waiting, "claimed": self.claimed, "failed": self.failed}
        return {**self.site.as_json(), "jobs": counts, "waitingSince": since}


def settings_of(site: Site, worker: Settings) -> Settings:
    """The worker's settings with the site's own over them. Raises UsageError."""
    own = {
        **site.settings,
        "gitBranch": site.branch,
        "adapter": site.adapter,
        "allowedPaths": list(site.allowed),
    }
    return replace(for_site(worker, own, source=f"the site {site.name}"), site=site.name)


def checked(site: Site, worker: Settings) -> Site:
    """The site, if a worker could work with it. Raises UsageError, which says what is accepted."""
    if not re.fullmatch(SITE_NAME, site.name):
        raise UsageError(
            for_people(
                f"{site.name!r} is no name of a site; accepted: up to 100 letters and digits, "
                "and after the first also . _ and -"
            )
        )
    remote = checked_remote(site.remote)
    if taken := sorted({"gitBranch", "adapter", "allowedPaths"} & site.settings.keys()):
        raise UsageError(f"{', '.join(taken)}: given by --branch, --adapter and --allow")
    settings_of(site, worker)
    return replace(site, credentials=checked_credentials(remote, site.credentials))


def add(database: Database, site: Site, worker: Settings) -> None:
    """Have it in the register. Raises UsageError, and SiteError when there is one of that name."""
    site = checked(site, worker)
    with database.transaction() as connection:
        made = connection.execute(
            "INSERT INTO sites (name, remote, branch, adapter, allowed, settings, credentials, created_at)"
            " VALUES (%s, %s, %s, %s, %s, %s, %s, %s)"
            # One that was removed left its row, so that its fence goes on counting.
            " ON CONFLICT (name) DO UPDATE SET remote = excluded.remote, branch = excluded.branch,"
            " adapter = excluded.adapter, allowed = excluded.allowed, settings = excluded.settings,"
            " credentials = excluded.credentials, created_at = excluded.created_at, removed = false,"
            " paused = NULL, tip = NULL WHERE sites.removed RETURNING name",
            (site.name, *_columns(site), site.created_at),
        ).fetchone()
    if made is None:
        raise SiteError(
            f"there is a site {site.name!r} already: briter-worker site change {site.name} alters it"
        )


def change(database: Database, site: Site, worker: Settings) -> None:
    """Put this in the place of the site of that name, from its next publication on."""
    site = checked(site, worker)
    with database.transaction() as connection:
        row = connection.execute(
            "SELECT remote, branch FROM sites WHERE name = %s AND NOT removed FOR UPDATE", (site.name,)
        ).fetchone()
        if row is None:
            raise UnknownSiteError(site.name)
        connection.execute(
            "UPDATE sites SET remote = %s, branch = %s, adapter = %s, allowed = %s, settings = %s,"
            " credentials = %s WHERE name = %s",
            (*_columns(site), site.name),
        )
        if row != (site.remote, site.branch):
            _forget_published(connection, site.name)


def _forget_published(connection: Connection, name: str) -> None:
    """What was published is elsewhere. Whoever has the site in hand loses it."""
    connection.execute("UPDATE sites SET tip = NULL, token = token + 1 WHERE name = %s", (name,))
    for table in (b"versions", b"starts", b"start_contents", b"conditions"):
        connection.execute(b"DELETE FROM " + table + b" WHERE site = %s", (name,))


def get(database: Database, name: str) -> Site:
    """The site of that name. Raises UnknownSiteError."""
    with database.asking() as connection:
        rows = connection.cursor(row_factory=dict_row)
        row = rows.execute("SELECT * FROM sites WHERE name = %s AND NOT removed", (name,)).fetchone()
    if row is None:
        raise UnknownSiteError(name)
    return _site(row)


def take(database: Database, name: str, worker: str) -> tuple[Site, int]:
    """The site of that name, from now on this worker's, and what proves it. Raises LockLostError."""
    row = tokens.taken(database, name, worker)
    return _site(row), row["token"]


def standings(database: Database, now: float) -> list[Standing]:
    """Every site, by name, with what waits in it."""
    with database.transaction() as connection:
        rows = connection.cursor(row_factory=dict_row).execute(
            "SELECT sites.*, waiting, claimed, failed, oldest FROM sites LEFT JOIN ("
            "SELECT site, count(*) FILTER (WHERE state IN ('waiting', 'tried')) AS waiting,"
            " count(*) FILTER (WHERE state = 'claimed') AS claimed,"
            " count(*) FILTER (WHERE state = 'failed') AS failed,"
            " min(greatest(created_at, scheduled_for))"
            "   FILTER (WHERE state IN ('waiting', 'tried') AND coalesce(scheduled_for, 0) <= %s) AS oldest"
            " FROM publications GROUP BY site) AS counted ON counted.site = sites.name"
            " WHERE NOT removed ORDER BY name",
            (now,),
        )
        return [
            Standing(_site(row), row["waiting"] or 0, row["claimed"] or 0, row["failed"] or 0, row["oldest"])
            for row in rows
        ]


def hosts(database: Database) -> int:
    """How many hosts have lately shown that they live."""
    with database.transaction() as connection:
        row = connection.execute(
            "SELECT count(*) FROM procrastinate_workers"
            " WHERE last_heartbeat > now() - make_interval(secs => %s)",
            (_SILENCE,),
        ).fetchone()
    return int(row[0]) if row else 0


def published_at(database: Database, name: str) -> float:
    """When something of the site's was published last; 0 when nothing was."""
    with database.transaction() as connection:
        row = connection.execute("SELECT max(published_at) FROM versions WHERE site = %s", (name,)).fetchone()
    return float(row[0] or 0.0) if row else 0.0


def remove(database: Database, name: str, *, discard: bool) -> None:
    """Take it out of the register; jobs it still has only with `discard`, which deletes them.

    A worker that has it in hand loses it: what it has not pushed yet, it will not push.
    """
    with database.transaction() as connection:
        known = connection.execute(
            "SELECT 1 FROM sites WHERE name = %s AND NOT removed FOR UPDATE", (name,)
        ).fetchone()
        if known is None:
            raise UnknownSiteError(name)
        jobs = connection.execute("SELECT id FROM publications WHERE site = %s", (name,)).fetchall()
        if jobs and not discard:
            raise SiteError(
                f"the site {name} still has {len(jobs)} jobs: let them be published, move them "
                f"(briter-worker export --site {name}), or delete them with --discard"
            )
        connection.execute("UPDATE sites SET removed = true WHERE name = %s", (name,))
        _forget_published(connection, name)
        connection.execute("DELETE FROM superseded WHERE site = %s", (name,))
        connection.execute("DELETE FROM batches WHERE site = %s", (name,))
        blobs = connection.execute(
            "SELECT DISTINCT blob FROM delivered JOIN publications ON id = publication"
            " WHERE site = %s AND blob IS NOT NULL",
            (name,),
        ).fetchall()
        connection.execute("DELETE FROM publications WHERE site = %s", (name,))
        contents.forget(connection, [blob for (blob,) in blobs])


def _columns(site: Site) -> tuple[object, ...]:
    return (
        site.remote,
        site.branch,
        site.adapter,
        list(site.allowed),
        json.dumps(dict(site.settings)),
        json.dumps(dict(site.credentials or {})),
    )


def _site(row: Mapping[str, Any]) -> Site:
    pause = row["paused"]
    return Site(
        name=row["name"],
        remote=row["remote"],
        branch=row["branch"],
        adapter=row["adapter"],
        allowed=tuple(row["allowed"]),
        settings=row["settings"],
        credentials=row["credentials"] or None,
        created_at=row["created_at"],
        paused=None if pause is None else Pause(pause["since"], pause.get("until"), pause.get("reason", "")),
        tip=row["tip"],
    )
