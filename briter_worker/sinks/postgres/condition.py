"""A site's condition, kept in the cluster's Postgres. Only who has the site in hand writes it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from briter_worker.sinks.condition import Ailment
from briter_worker.sinks.postgres.database import storable_row

if TYPE_CHECKING:
    from briter_worker.sinks.postgres.database import Database


class RowSlate:
    """Implements `condition.Slate`."""

    def __init__(self, database: Database, site: str) -> None:
        self._database = database
        self._site = site

    def read(self) -> Ailment | None:
        """What is wrong, as far as is known."""
        with self._database.asking() as connection:
            row = connection.execute(
                "SELECT failure, condition FROM conditions WHERE site = %s AND failure IS NOT NULL",
                (self._site,),
            ).fetchone()
        return None if row is None else Ailment(row[0], row[1])

    def write(self, ailment: Ailment | None) -> None:
        """From now on, this is."""
        failure = None if ailment is None else storable_row(ailment.failure)
        text = None if ailment is None else storable_row(ailment.text)
        with self._database.transaction() as connection:
            connection.execute(
                "INSERT INTO conditions (site, failure, condition, changed_at) VALUES (%s, %s, %s, %s)"
                " ON CONFLICT (site) DO UPDATE SET failure = excluded.failure,"
                " condition = excluded.condition, changed_at = excluded.changed_at",
                (self._site, failure, text, time.time()),
            )
