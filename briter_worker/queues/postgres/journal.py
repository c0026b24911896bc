"""What a drain has in hand and is about to push: enough for its successor to finish it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from briter_worker.queues.journal import plan_as_json, plan_from_json

if TYPE_CHECKING:
    from collections.abc import Iterable

    from briter_worker.ports import Plan
    from briter_worker.queues.postgres.database import Connection


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


def record(connection: Connection, key: str, plan: Plan) -> None:
    """Its next push is about to do this."""
    # ASCII only: paths may have bytes that are no text, and JSON's escapes carry them.
    connection.execute(
        "INSERT INTO plans (batch, number, plan)"
        " SELECT %s, coalesce(max(number) + 1, 0), %s FROM plans WHERE batch = %s",
        (key, json.dumps(plan_as_json(plan), separators=(",", ":")), key),
    )


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
