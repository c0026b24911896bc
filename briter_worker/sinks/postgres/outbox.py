"""What is still to be sent, for all sites of a cluster: whichever host comes first takes the next one.

One that is taken is leased: should its sender die, it is due again for any host, with the attempt counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

from briter_worker.sinks.postgres.database import storable_row
from briter_worker.sinks.webhooks.outbox import FURTHEST, LEASE, Delivery

if TYPE_CHECKING:
    from collections.abc import Sequence

    from briter_worker.sinks.postgres.database import Connection, Database

_MOST_BUILDS = 100
"""So many that are not due yet are passed over in one look."""
_ADD = (
    "INSERT INTO messages (message, url, build, content_type, body, created, due)"
    " SELECT * FROM unnest(%s::text[], %s::text[], %s::boolean[], %s::text[], %s::text[], %s::float8[],"
    " %s::float8[])"
)
# A build that waits already is not asked for twice.
_ADD_BUILD = (
    "INSERT INTO messages (message, url, build, created, due)"
    " SELECT %(message)s::text, %(url)s::text, true, %(at)s::float8, %(at)s::float8"
    " WHERE NOT EXISTS (SELECT FROM messages WHERE url = %(url)s AND build AND lease IS NULL)"
)
_NEXT = (
    "SELECT id, message, url, created, content_type, body, build, attempts FROM messages"
    " WHERE due <= %s OR due > %s ORDER BY due, id LIMIT 1 FOR UPDATE SKIP LOCKED"
)


def add(connection: Connection, deliveries: Sequence[Delivery]) -> None:
    """To be sent."""
    posts = [each for each in deliveries if not each.build]
    if posts:
        texts = [(each.message, each.url, each.content_type, each.body) for each in posts]
        message, url, kind, body = (
            [storable_row(text) for text in column] for column in zip(*texts, strict=True)
        )
        created = [each.created for each in posts]
        connection.execute(_ADD, (message, url, [False] * len(posts), kind, body, created, created))
    # One of many is all: a build is of all there is.
    for each in {each.url: each for each in deliveries if each.build}.values():
        connection.execute(
            _ADD_BUILD, {"message": each.message, "url": storable_row(each.url), "at": each.created}
        )


class RowOutbox:
    """Implements `sender.Box`. Raises OSError; then nothing was changed."""

    def __init__(self, database: Database, *, build_interval: float) -> None:
        self._database = database
        self._build_interval = build_interval
        self._lease = uuid4().hex

    def take(self, now: float) -> Delivery | None:
        """The next that is due and no other host is taking, leased; None when nothing is due."""
        with self._database.transaction() as connection:
            for _ in range(_MOST_BUILDS):
                row = connection.execute(_NEXT, (now, now + FURTHEST)).fetchone()
                if row is None:
                    return None
                number, message, url, created, content_type, body, build, attempts = row
                if build and not self._may_build(connection, number, url, now):
                    continue
                connection.execute(
                    "UPDATE messages SET lease = %s, attempts = attempts + 1, due = %s WHERE id = %s",
                    (self._lease, now + LEASE, number),
                )
                return Delivery(message, url, created, content_type, body, build, number, attempts + 1)
        return None

    def _may_build(self, connection: Connection, number: int, url: str, now: float) -> bool:
        """Whether it is time; if so, this call is for all that wait."""
        # One host at a time: of a hook that was never called there is no row to lock.
        connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (url,))
        row = connection.execute("SELECT called FROM builds WHERE url = %s", (url,)).fetchone()
        again = (row[0] + self._build_interval) if row else now
        # A call that is further away than the interval: the clock was set back.
        if now < again <= now + self._build_interval:
            connection.execute("UPDATE messages SET due = %s WHERE id = %s", (again, number))
            return False
        connection.execute(
            "DELETE FROM messages WHERE url = %s AND build AND lease IS NULL AND id <> %s", (url, number)
        )
        connection.execute(
            "INSERT INTO builds (url, called) VALUES (%s, %s)"
            " ON CONFLICT (url) DO UPDATE SET called = excluded.called",
            (url, now),
        )
        return True

    def remove(self, delivery: Delivery) -> None:
        """It was received, or is given up."""
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM messages WHERE id = %s", (delivery.id,))

    def give_up(self, delivery: Delivery, *, also_before: float) -> int:
        """It, and what has waited for its receiver since before then, is not sent; how many those are."""
        with self._database.transaction() as connection:
            return connection.execute(
                "DELETE FROM messages WHERE id = %s OR (url = %s AND created < %s AND lease IS NULL)",
                (delivery.id, delivery.url, also_before),
            ).rowcount

    def put_off(self, delivery: Delivery, due: float, error: str, *, all_of_url: bool) -> None:
        """To be tried again then; with `all_of_url`, nothing else is sent there before."""
        with self._database.transaction() as connection:
            # Not what another host has taken since, as this one was too slow.
            connection.execute(
                "UPDATE messages SET lease = NULL, due = %s, error = %s WHERE id = %s AND lease = %s",
                (due, storable_row(error), delivery.id, self._lease),
            )
            if all_of_url:
                connection.execute(
                    "UPDATE messages SET due = %s WHERE url = %s AND lease IS NULL AND due < %s",
                    (due, delivery.url, due),
                )

    def next_due(self) -> float | None:
        """When there is something to send; None when nothing is left."""
        with self._database.transaction() as connection:
            row = connection.execute("SELECT min(due) FROM messages").fetchone()
        return None if row is None else row[0]

    def is_current(self) -> bool:
        """It is opened for each question anyhow."""
        return True

    def close(self) -> None:
        """Nothing is held."""


def waiting(database: Database) -> list[tuple[str, int, str]]:
    """What could not be sent so far: address, how many messages, and what the last attempt met."""
    with database.transaction() as connection:
        rows = connection.execute(
            "SELECT url, count(*), max(error) FROM messages WHERE attempts > 0 GROUP BY url ORDER BY url"
        )
        return [(url, number, error) for url, number, error in rows]
