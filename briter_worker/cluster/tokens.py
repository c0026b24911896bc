"""Tokens of the API: a program that has one needs no address of the database.

Each opens some sites for some kinds of request. The database has its digest, and never the token.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import TYPE_CHECKING, Any, NamedTuple

from psycopg.rows import dict_row

from briter_worker.cluster import sites
from briter_worker.errors import DeclinedError, UsageError, one_line, storable
from briter_worker.job import format_time
from briter_worker.settings import SITE_NAME

if TYPE_CHECKING:
    from collections.abc import Collection

    from briter_worker.queues.postgres.database import Database

PREFIX = "briter_"
RIGHTS = ("enqueue", "read", "act")
"""`enqueue` submits posts, `read` looks, `act` retries, cancels, pauses and the like."""


class ApiToken(NamedTuple):
    """A token's name and what it opens."""

    name: str
    sites: tuple[str, ...]
    rights: tuple[str, ...]
    created_at: float
    created_by: str

    def to_json(self) -> dict[str, Any]:
        """Return the token for programs, in camelCase."""
        return {
            "name": self.name,
            "sites": list(self.sites),
            "rights": list(self.rights),
            "createdAt": format_time(self.created_at),
            "createdBy": self.created_by,
        }


def create(
    database: Database, name: str, *, sites_of: Collection[str], rights: Collection[str], by: str
) -> str:
    """Store a new token's digest, and return the token, which nobody can read again.

    Raises UsageError, SiteMissingError, and DeclinedError when there is a token of that name.
    """
    if not re.fullmatch(SITE_NAME, name):
        accepted = "up to 100 of A-Z a-z 0-9 . _ and -"
        raise UsageError(f"{one_line(name, 80)!r} is no name of a token; accepted: {accepted}")
    if not sites_of or not rights or not set(rights) <= set(RIGHTS):
        raise UsageError(f"a token needs sites and rights; accepted rights: {', '.join(RIGHTS)}")
    for site in sites_of:
        sites.get(database, site)
    token = PREFIX + secrets.token_urlsafe(32)
    with database.transaction() as connection:
        added = connection.execute(
            "INSERT INTO tokens (name, digest, sites, rights, created_by) VALUES (%s, %s, %s, %s, %s)"
            " ON CONFLICT (name) DO NOTHING",
            (name, _digest(token), sorted({*sites_of}), [each for each in RIGHTS if each in rights], by),
        )
        if not added.rowcount:
            fix = f"choose another name, or first: briter-worker token revoke {name}"
            raise DeclinedError(f"there is a token {name!r} already", fix)
    return token


def revoke(database: Database, name: str) -> None:
    """Delete the token: it opens nothing from now on. Raises DeclinedError if there is none."""
    with database.transaction() as connection:
        if not connection.execute("DELETE FROM tokens WHERE name = %s", (storable(name),)).rowcount:
            raise DeclinedError(f"there is no token {one_line(name, 80)!r}", "briter-worker token list")


def all_tokens(database: Database) -> list[ApiToken]:
    """Return every token by name."""
    return _read(database, "", None)


def find(database: Database, token: str) -> ApiToken | None:
    """Return what a token opens; None if it was revoked, or never was one."""
    found = _read(database, "WHERE digest = %s", _digest(token)) if token.startswith(PREFIX) else []
    return found[0] if found else None


def _read(database: Database, condition: str, digest: bytes | None) -> list[ApiToken]:
    columns = ", ".join(ApiToken._fields)
    statement = f"SELECT {columns} FROM tokens {condition} ORDER BY name"  # noqa: S608 - constants only
    with database.connection() as connection:
        rows = connection.cursor(row_factory=dict_row)
        found = rows.execute(statement.encode(), None if digest is None else (digest,)).fetchall()
    return [ApiToken(**row)._replace(sites=tuple(row["sites"]), rights=tuple(row["rights"])) for row in found]


def _digest(token: str) -> bytes:
    # The token has 256 random bits: a plain digest cannot be guessed back.
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
