"""The register of a cluster's sites: where each is published to, its own settings, and its wake-up.

The row of a removed site stays, so that the site's fencing token goes on counting. The database is shared,
copied and backed up, so it contains no credential: only the name of an environment variable or the path of a
file, on each node.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from psycopg.rows import dict_row

from briter_worker.errors import DeclinedError, UsageError, one_line, redact, storable
from briter_worker.git.clone import open_clone
from briter_worker.git.configuration import find_secrets
from briter_worker.job import count, format_time
from briter_worker.ports import Pause
from briter_worker.queues.postgres.rows import SiteMissingError, lock_site
from briter_worker.settings import SITE_NAME, for_site
from briter_worker.wiring import signer_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from briter_worker.git.repository import Repository
    from briter_worker.git.ssh import SshConnections
    from briter_worker.queues.postgres.database import Connection, Database
    from briter_worker.settings import Settings

_HOST = r"(?:[A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9a-fA-F:.]+\])(?::[0-9]{1,5})?"
_USER = r"[A-Za-z0-9_][A-Za-z0-9._+-]*"
_PATH = r"[^\s\x00-\x1f\x7f-\x9f\ud800-\udfff\\?#]*"
_HTTP = rf"https?://{_HOST}/{_PATH}"
_SSH = rf"ssh://(?:{_USER}@)?{_HOST}/{_PATH}|(?:{_USER}@)?[A-Za-z0-9][A-Za-z0-9._-]*:(?!:|//|$){_PATH}"
_OTHER = rf"git://{_HOST}/{_PATH}|file:///{_PATH}|/{_PATH}"
_MAX_LENGTH = 2000
_ACCEPTED = (
    "https://host/path, ssh://host/path, git@host:path, git://host/path, file:///path or an absolute "
    "path, without a password, token, query or fragment"
)
_USE_REFERENCE = "name the credentials with --credential-env NAME, --credential-file PATH or --ssh-key PATH"
_USERNAME = r"[^\s\x00-\x1f\x7f-\x9f:@]{1,200}"
_PLACE = (r"/[^\x00-\x1f\x7f-\x9f]*", "an absolute path on the nodes, such as /run/secrets/blog")
_CREDENTIALS = {
    "env": (
        "--credential-env",
        _HTTP,
        r"(?!BRITER_)[A-Za-z_][A-Za-z0-9_]{0,199}",
        "the name of a variable in the nodes' environment, such as BLOG_TOKEN, none of the worker's own",
    ),
    "file": ("--credential-file", _HTTP, *_PLACE),
    "sshKey": ("--ssh-key", _SSH, *_PLACE),
}
"""Option, addresses, values and what is accepted, by kind of reference."""
CHANNEL = "briter_sites"
"""Notifies nodes of sites that have something to do."""
_OWN_ARGUMENTS = {"gitBranch": "--branch", "adapter": "--adapter", "allowedPaths": "--allow"}
STATES = ("pending", "scheduled", "retrying", "quiet", "tried", "claimed", "failed")
_SUMMARIES = """
WITH jobs AS (
  SELECT site, greatest(created_at, scheduled_for) AS since, CASE
    WHEN state <> 'pending' THEN state
    WHEN scheduled_for > %(now)s THEN 'scheduled'
    WHEN tried THEN 'tried'
    WHEN next_attempt_at > %(now)s THEN 'retrying'
    WHEN quiet_until > %(now)s THEN 'quiet'
    ELSE 'pending' END AS shown
  FROM publications
), counted AS (
  SELECT site, shown, count(*) AS number,
    min(since) FILTER (WHERE shown NOT IN ('failed', 'scheduled')) AS oldest
  FROM jobs GROUP BY site, shown
)
SELECT s.*, c.failure, c.condition, c.fix, n.jobs, n.oldest
FROM sites s
LEFT JOIN conditions c ON c.site = s.identity AND c.failure IS NOT NULL
LEFT JOIN (
  SELECT site, json_object_agg(shown, number) AS jobs, min(oldest) AS oldest FROM counted GROUP BY site
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
    """The place where each node finds the credentials of the remote; never the credentials."""
    created_at: float = 0.0
    paused: Pause | None = None
    pushed_tip: str | None = None
    """The remote's tip after the last push."""
    changed_by: str = ""
    """The user who added or changed the site last."""
    identity: str = ""
    """The key of the site's history, which a removed site of the same name does not share."""

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Site:
        """Return the site of a row of the table."""
        pause = row["paused"]
        names = ["name", "remote", "branch", "adapter", "settings", "created_at", "pushed_tip"]
        names += ["changed_by", "identity"]
        return cls(
            **{name: row[name] for name in names},
            allowed=tuple(row["allowed"]),
            credentials=row["credentials"] or None,
            paused=pause and Pause(**pause),
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
            "changedBy": self.changed_by,
            "paused": self.paused is not None,
        }


@dataclass(frozen=True, slots=True)
class SiteSummary:
    """One site among many: its jobs by state, and its condition."""

    site: Site
    jobs: Mapping[str, int]
    """The number of jobs in each state."""
    oldest: float | None
    """The time at which the job that waits longest was saved, or became due."""
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
    def waiting(self) -> int:
        """Return the number of jobs that are neither in flight nor failed."""
        return sum(self.jobs[state] for state in STATES[:5])

    @property
    def is_busy(self) -> bool:
        """Return True if jobs are in flight, due or retrying."""
        return any(self.jobs[state] for state in ("pending", "retrying", "claimed"))

    @property
    def has_trouble(self) -> bool:
        """Return True if the site needs attention."""
        return self.failure is not None or self.jobs["failed"] > 0 or self.jobs["retrying"] > 0

    def to_json(self, now: float) -> dict[str, Any]:
        """Return the summary for programs, in camelCase."""
        return {
            "name": self.site.name,
            "remote": self.site.remote,
            "branch": self.site.branch,
            "changedBy": self.site.changed_by,
            "jobs": dict(self.jobs),
            "oldestWaitingSeconds": None if self.oldest is None else max(0.0, now - self.oldest),
            "paused": self.paused and self.paused.to_json(),
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
    return settings.of_site(site.name, site.identity)


def open_site_clone(
    site: Site, settings: Settings, below: str = "", patience: float = 1.0, ssh: SshConnections | None = None
) -> AbstractContextManager[Repository]:
    """Lock and open this machine's clone of the site in the cache; `below`: another one, for other uses.

    `ssh`: connections that the node keeps.
    """
    return open_clone(
        settings.cache_root / below / site.name,
        url=site.remote,
        branch=site.branch,
        credentials=site.credentials,
        timeout=settings.git_timeout_ms / 1000,
        total_timeout=settings.git_transfer_timeout_ms / 1000,
        signer=signer_of(settings),
        patience=patience,
        ssh=ssh,
    )


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
    with database.transaction() as connection:
        if store(connection, check_site(site, node)) is not None:
            raise DeclinedError(
                f"there is a site {site.name!r} already", f"briter-worker site change {site.name} alters it"
            )


def change(database: Database, site: Site, node: Settings) -> None:
    """Replace the site of that name, from its next publication on. Raises UsageError and SiteMissingError."""
    with database.transaction() as connection:
        replace_stored(connection, check_site(site, node))
    wake(database)  # the site may have gone live


def replace_stored(connection: Connection, site: Site) -> None:
    """Store a checked site in place of the one of that name. Raises SiteMissingError."""
    target = store(connection, site)
    if target is None:
        raise SiteMissingError(site.name)
    if target != (site.remote, site.branch):
        _forget_published(connection, site.name)


def store(connection: Connection, site: Site) -> tuple[str, str] | None:
    """Store a checked site; return remote and branch of the one that it replaces, if there was one."""
    row = connection.execute(
        "SELECT remote, branch FROM sites WHERE name = %s AND NOT removed FOR UPDATE", (site.name,)
    ).fetchone()
    values = {
        "name": site.name,
        "remote": site.remote,
        "branch": site.branch,
        "adapter": site.adapter,
        "allowed": list(site.allowed),
        "settings": json.dumps(dict(site.settings)),
        "credentials": json.dumps(dict(site.credentials or {})),
        "created_at": site.created_at,
        "changed_by": site.changed_by,
        "removed": False,
    }
    columns = ", ".join(values)
    connection.execute(
        f"INSERT INTO sites ({columns}) VALUES ({', '.join(f'%({key})s' for key in values)})"  # noqa: S608
        f" ON CONFLICT (name) DO UPDATE SET ({columns}) = (excluded.{columns.replace(', ', ', excluded.')})",
        values,
    )
    return None if row is None else (row[0], row[1])


def _forget_published(connection: Connection, name: str) -> None:
    """Drop what is known of the old remote, and fence off a node that still publishes to it."""
    connection.execute(
        "UPDATE sites SET token = token + 1, worker = NULL, pushed_tip = NULL WHERE name = %s", (name,)
    )
    for table in (b"published", b"base_versions", b"plans"):
        connection.execute(b"DELETE FROM " + table + b" WHERE site = %s", (name,))
    connection.execute(
        "DELETE FROM conditions USING sites WHERE site = sites.identity AND sites.name = %s", (name,)
    )


def get(database: Database, name: str) -> Site:
    """Return the site of that name. Raises SiteMissingError."""
    with database.connection() as connection:
        rows = connection.cursor(row_factory=dict_row)
        wanted = (storable(name),)
        row = rows.execute("SELECT * FROM sites WHERE name = %s AND NOT removed", wanted).fetchone()
    if row is None:
        raise SiteMissingError(name)
    return Site.from_row(row)


def summaries(database: Database, now: float) -> list[SiteSummary]:
    """Return every site by name, with its jobs and its condition."""
    with database.connection() as connection:
        rows = connection.cursor(row_factory=dict_row).execute(_SUMMARIES, {"now": now}).fetchall()
    found = []
    for row in rows:
        site = Site.from_row(row)
        found.append(
            SiteSummary(
                site,
                dict.fromkeys(STATES, 0) | (row["jobs"] or {}),
                oldest=row["oldest"],
                failure=row["failure"],
                condition=None if row["condition"] is None else one_line(row["condition"]),
                fix=row["fix"] or "",
                paused=site.paused if site.paused is not None and site.paused.is_active(now) else None,
            )
        )
    return found


def all_sites(database: Database) -> list[Site]:
    """Return every site by name."""
    with database.connection() as connection:
        rows = connection.cursor(row_factory=dict_row)
        found = rows.execute("SELECT * FROM sites WHERE NOT removed ORDER BY name").fetchall()
    return [Site.from_row(row) for row in found]


def remove(connection: Connection, name: str, *, discard: bool, by: str = "") -> None:
    """Unregister the site, in a transaction; `discard` deletes the jobs that it still has.

    A node that publishes the site loses it, and pushes nothing more.
    """
    lock_site(connection, name)
    counted = connection.execute("SELECT count(*) FROM publications WHERE site = %s", (name,)).fetchone()
    if counted and counted[0] and not discard:
        raise DeclinedError(
            f"the site {name} still has {count(counted[0], 'job')}",
            f"briter-worker export --site {name} moves them, and site remove {name} --discard deletes them",
        )
    connection.execute(
        "UPDATE sites SET removed = true, paused = NULL, changed_by = %s WHERE name = %s", (by, name)
    )
    _forget_published(connection, name)
    # The next site of this name may be somebody else's.
    connection.execute("UPDATE tokens SET sites = array_remove(sites, %s)", (name,))
    for table in (b"superseded", b"publications"):
        connection.execute(b"DELETE FROM " + table + b" WHERE site = %s", (name,))


def wake(database: Database) -> None:
    """Have the nodes look for jobs that are committed; their poll replaces a notification that gets lost."""
    with database.connection() as connection:
        connection.execute(f"NOTIFY {CHANNEL}".encode())


def order_pull(database: Database, name: str) -> None:
    """Have a node look for edits of others on the site's remote."""
    with database.connection() as connection:
        connection.execute("UPDATE sites SET pull_at = 0 WHERE name = %s", (name,))
    wake(database)


def check_remote(url: str) -> None:
    """Raise UsageError unless the address is one that everybody may read."""
    if len(url) > _MAX_LENGTH or not re.fullmatch(f"{_HTTP}|{_SSH}|{_OTHER}", url):
        # The value is not shown, because its mistake may be the secret in it.
        raise UsageError(f"--remote is not accepted; accepted: {_ACCEPTED}", _USE_REFERENCE)
    without_user = re.sub(f"ssh://{_USER}@", "ssh://", url)  # the user of ssh is not a secret
    if find_secrets([("remote.site.url", url)]) or redact(without_user) != without_user:
        raise UsageError("--remote contains what looks like a credential", _USE_REFERENCE)


def check_credentials(remote: str, reference: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Return the reference: `env` or `file` with an optional `username`, or `sshKey`. Raises UsageError."""
    given = {key: str(value) for key, value in (reference or {}).items() if value is not None}
    if not given:
        return None
    kinds = given.keys() - {"username"}
    if len(kinds) != 1 or not kinds <= _CREDENTIALS.keys() or given.keys() == {"username", "sshKey"}:
        raise UsageError(
            "credentials are one of --credential-env, --credential-file and --ssh-key; "
            "--credential-user goes with the first two"
        )
    (kind,) = kinds
    option, address, pattern, accepted = _CREDENTIALS[kind]
    if not re.fullmatch(address, remote):
        scheme = "for ssh, such as git@host:path" if kind == "sshKey" else "that begins with http(s)://"
        raise UsageError(f"{option} goes with an address {scheme}")
    value = given[kind]
    # What looks like a secret is none of our places: a user gave the credential itself.
    if not re.fullmatch(pattern, value) or (kind == "env" and redact(value) != value):
        raise UsageError(f"{option} is not accepted; accepted: {accepted}; not the credential itself")
    if not re.fullmatch(_USERNAME, given.get("username", "bot")):
        raise UsageError("--credential-user is not accepted; accepted: a name without spaces, : and @")
    return given
