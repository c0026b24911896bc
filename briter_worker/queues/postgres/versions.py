"""The numbered migrations in `migrations/`, each applied once, and those of Procrastinate.

They only add: a worker that was started before the upgrade goes on. A migration after which old programs
must not run says so in its first line: `-- oldest: 7` is the lowest version a program may be written for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psycopg
    from psycopg.rows import TupleRow

    Connection = psycopg.Connection[TupleRow]

_LOCK = 0x6272697465720001
_OLDEST_SERVER = 140000
_ENGINE = "procrastinate "
_SETTING_UP = """
CREATE SCHEMA IF NOT EXISTS briter;
CREATE TABLE IF NOT EXISTS migrations (
    name text PRIMARY KEY,
    version integer NOT NULL DEFAULT 0,
    oldest integer NOT NULL DEFAULT 0,
    applied_at timestamptz NOT NULL DEFAULT now()
);
"""


@dataclass(frozen=True, slots=True)
class Version:
    """What the database has, and for what version a program must be written at least."""

    have: int
    oldest: int


@dataclass(frozen=True, slots=True)
class _Migration:
    name: str
    version: int
    oldest: int
    script: str


def needed() -> int:
    """The version that this program is written for: the number of its last migration."""
    return _own()[-1].version


def read(connection: Connection) -> Version:
    """The version of the tables; 0 where there are none."""
    if _one(connection, "SELECT to_regclass('briter.migrations') IS NULL"):
        return Version(0, 0)
    row = connection.execute("SELECT coalesce(max(version), 0), coalesce(max(oldest), 0) FROM migrations")
    return Version(*row.fetchone() or (0, 0))


def upgrade(connection: Connection) -> list[str]:
    """Apply what is missing, one upgrade at a time; the names of what was applied."""
    if connection.info.server_version < _OLDEST_SERVER:
        import psycopg  # noqa: PLC0415 - for this alone

        raise psycopg.NotSupportedError("this server is too old: version 14 or newer is needed")
    connection.execute("SET statement_timeout = 0")
    connection.execute("SET lock_timeout = 0")
    connection.execute("SELECT pg_advisory_lock(%s)", (_LOCK,))
    try:
        # A table that is in use is waited for, but not for long: behind us everybody else would wait.
        connection.execute("SET lock_timeout = '10s'")
        connection.execute(_SETTING_UP)
        have = {name for (name,) in connection.execute("SELECT name FROM migrations")}
        return [*_apply(connection, _own(), have), *_apply(connection, _engine(have), have)]
    finally:
        connection.execute("SELECT pg_advisory_unlock(%s)", (_LOCK,))


def _apply(connection: Connection, migrations: list[_Migration], have: set[str]) -> list[str]:
    done = []
    for each in migrations:
        if each.name in have:
            continue
        with connection.transaction():
            if each.script:
                connection.execute(each.script.encode())
            connection.execute(
                "INSERT INTO migrations (name, version, oldest) VALUES (%s, %s, %s)",
                (each.name, each.version, each.oldest),
            )
        done.append(each.name)
    return done


@cache
def _own() -> list[_Migration]:
    folder = resources.files("briter_worker.queues.postgres") / "migrations"
    found = []
    for file in [file for file in folder.iterdir() if file.name.endswith(".sql")]:
        name = file.name.removesuffix(".sql")
        script = file.read_text(encoding="utf-8")
        oldest = re.match(r"-- oldest: (\d+)", script)
        found.append(_Migration(name, int(name[:4]), int(oldest[1]) if oldest else 1, script))
    return sorted(found, key=lambda each: each.name)


def _engine(have: set[str]) -> list[_Migration]:
    """Its whole schema where there is none, with all its migrations counted as applied; else what is new."""
    from procrastinate.schema import SchemaManager, migrations_path  # noqa: PLC0415 - for an upgrade alone

    files = sorted(migrations_path.glob("*.sql"))
    if any(name.startswith(_ENGINE) for name in have):
        return [_Migration(_ENGINE + file.stem, 0, 0, file.read_text(encoding="utf-8")) for file in files]
    whole = _Migration(_ENGINE + "schema", 0, 0, SchemaManager.get_schema())
    return [whole, *(_Migration(_ENGINE + file.stem, 0, 0, "") for file in files)]


def _one(connection: Connection, query: bytes | str) -> object:
    row = connection.execute(query.encode() if isinstance(query, str) else query).fetchone()
    return row[0] if row else None
