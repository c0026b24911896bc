"""What a drain has in hand and is about to push: enough for its successor to finish it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, LiteralString

from briter_worker.queues.journal import plan_as_json, plan_from_json
from briter_worker.queues.postgres import tokens

if TYPE_CHECKING:
    from collections.abc import Iterable

    from briter_worker.ports import Plan
    from briter_worker.queues.postgres.database import Connection, Database

_RECORD: LiteralString = """
INSERT INTO plans (batch, number, plan)
SELECT %(batch)s, (SELECT coalesce(max(number) + 1, 0) FROM plans WHERE batch = %(batch)s), %(plan)s
FROM fence RETURNING batch
"""
_SETTLED: LiteralString = "DELETE FROM batches USING fence WHERE key = %(batch)s RETURNING key"


@dataclass(frozen=True, slots=True)
class Entry:
    """A batch that was not closed."""

    key: str
    started: bool
    plans: tuple[Plan, ...] = ()


def add(connection: Connection, site: str, token: int, keys: Iterable[str], *, started: bool) -> None:
    """Batches of these keys."""
    connection.execute(
        "INSERT INTO batches (key, site, token, started)"
        " SELECT key, %s, %s, %s FROM unnest(%s::text[]) AS key",
        (site, token, started, list(keys)),
    )


def begin(connection: Connection, key: str) -> None:
    """A crash from here on may be the doing of one of its claims."""
    connection.execute("UPDATE batches SET started = true WHERE key = %s AND NOT started", (key,))


def record(database: Database, site: str, token: int, key: str, plan: Plan) -> None:
    """Its next push is about to do this. Raises LockLostError."""
    # ASCII only: paths may have bytes that are no text, and JSON's escapes carry them.
    text = json.dumps(plan_as_json(plan), separators=(",", ":"))
    tokens.write(database, site, token, _RECORD, {"batch": key, "plan": text}, flushed=True)


def settled(database: Database, site: str, token: int, key: str) -> None:
    """This batch is forgotten, and its plans. Raises LockLostError."""
    # Not flushed: there again, it is an empty one.
    tokens.write(database, site, token, _SETTLED, {"batch": key}, flushed=False)


def close(connection: Connection, keys: Iterable[str]) -> None:
    """These batches are forgotten, and their plans."""
    connection.execute("DELETE FROM batches WHERE key = ANY(%s)", (list(keys),))


def entries(connection: Connection, site: str, before: int) -> list[Entry]:
    """The site's batches that drains before this token did not close, oldest first."""
    plans: dict[str, list[Plan]] = {}
    for key, plan in connection.execute(
        "SELECT batch, plan FROM plans JOIN batches ON batch = key WHERE site = %s AND token < %s"
        " ORDER BY batch, plans.number",
        (site, before),
    ):
        plans.setdefault(key, []).append(plan_from_json(json.loads(plan)))
    found = connection.execute(
        "SELECT key, started FROM batches WHERE site = %s AND token < %s ORDER BY batches.number",
        (site, before),
    )
    return [Entry(key, started, tuple(plans.get(key, ()))) for key, started in found]


def is_started(connection: Connection, key: str) -> bool:
    """Whether the work on the batch had begun; also where nothing is known of it."""
    row = connection.execute("SELECT started FROM batches WHERE key = %s", (key,)).fetchone()
    return row is None or bool(row[0])
