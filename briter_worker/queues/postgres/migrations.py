"""The schema: numbered migrations of our own (`sql/`), and those of Procrastinate, each applied once.

Migrations only add, so that older nodes go on beside an upgrade.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

import psycopg

if TYPE_CHECKING:
    from psycopg.rows import TupleRow

    Connection = psycopg.Connection[TupleRow]

_ADVISORY_LOCK = 0x6272697465720001
_OLDEST_SERVER = 140000
_PROCRASTINATE = "procrastinate "
_SETUP = """
CREATE SCHEMA IF NOT EXISTS briter;
CREATE TABLE IF NOT EXISTS migrations (
    name text PRIMARY KEY,
    version integer NOT NULL DEFAULT 0,
    applied_at timestamptz NOT NULL DEFAULT now()
);
"""


@dataclass(frozen=True, slots=True)
class _Migration:
    name: str
    version: int
    script: str


def needed_version() -> int:
    """Return the schema version that this program is written for."""
    return _own_migrations()[-1].version


def read_version(connection: Connection) -> int:
    """Return the version of the schema; 0 where there is none."""
    if connection.execute("SELECT to_regclass('briter.migrations')").fetchone() == (None,):
        return 0
    found = connection.execute("SELECT max(version) FROM migrations").fetchone()
    return int(found[0] or 0) if found else 0


def upgrade(connection: Connection) -> list[str]:
    """Apply the missing migrations, one upgrade at a time. Return their names."""
    if connection.info.server_version < _OLDEST_SERVER:
        raise psycopg.NotSupportedError("this server is too old: version 14 or newer is needed")
    connection.execute("SET statement_timeout = 0; SET lock_timeout = 0")
    connection.execute("SELECT pg_advisory_lock(%s)", (_ADVISORY_LOCK,))
    try:
        # A waiting ALTER TABLE blocks every later statement on the table, so it must not wait for long.
        connection.execute("SET lock_timeout = '10s'")
        connection.execute(_SETUP)
        applied = {name for (name,) in connection.execute("SELECT name FROM migrations")}
        missing = [
            each
            for each in (*_own_migrations(), *_procrastinate_migrations(applied))
            if each.name not in applied
        ]
        for migration in missing:
            _apply(connection, migration)
        return [migration.name for migration in missing]
    finally:
        connection.execute("SELECT pg_advisory_unlock(%s)", (_ADVISORY_LOCK,))


def _apply(connection: Connection, migration: _Migration) -> None:
    with connection.transaction():
        if migration.script:
            connection.execute(migration.script.encode())
        connection.execute(
            "INSERT INTO migrations (name, version) VALUES (%s, %s)", (migration.name, migration.version)
        )


@cache
def _own_migrations() -> tuple[_Migration, ...]:
    folder = resources.files("briter_worker.queues.postgres") / "sql"
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    return tuple(
        _Migration(file.name.removesuffix(".sql"), int(file.name[:4]), file.read_text("utf-8"))
        for file in files
    )


def _procrastinate_migrations(applied: set[str]) -> list[_Migration]:
    """Return the whole schema, with all its migrations as applied, where there is none; else the new ones."""
    from procrastinate.schema import SchemaManager, migrations_path  # noqa: PLC0415 - slow, and upgrades only

    files = sorted(migrations_path.glob("*.sql"))
    if any(name.startswith(_PROCRASTINATE) for name in applied):
        return [_Migration(_PROCRASTINATE + file.stem, 0, file.read_text("utf-8")) for file in files]
    schema = _Migration(f"{_PROCRASTINATE}schema", 0, SchemaManager.get_schema())
    return [schema, *(_Migration(_PROCRASTINATE + file.stem, 0, "") for file in files)]
