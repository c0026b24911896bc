"""Where the snapshot's thread of one site of a cluster looks: rows, asked about now and then."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import TYPE_CHECKING

from briter_worker.cluster import sites
from briter_worker.standing import stand
from briter_worker.wiring import open_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from briter_worker.queues.postgres.database import Database
    from briter_worker.queues.watching import Stopping
    from briter_worker.settings import Settings
    from briter_worker.standing import Standing
    from briter_worker.web.looking import Steered

_SHARE = 10.0
"""After a glance that took a second, so many pass before the next one."""
_LONGEST = 10.0
# One arm for each state: each has an index of its own, and none has all of a site's rows.
_STAMP = " UNION ALL ".join(
    "SELECT count(*)::float8, coalesce(max(id), 0)::float8, coalesce(max(changed_at), 0),"  # noqa: S608 - no values
    f" (count(*) FILTER (WHERE cancel))::float8 FROM publications WHERE site = %(site)s AND state = '{state}'"
    for state in ("waiting", "claimed", "failed")
)


class RowLooking:
    """Implements `Looking`. Raises OSError."""

    glance = 0.25

    def __init__(self, settings: Settings, database: Database) -> None:
        self._settings = settings
        self._database = database
        self._waker = _Nudged()
        self._stamp: tuple[float, ...] = ()
        self._again_at = 0.0
        self.queue: Steered = open_rows(settings)

    def prepare(self) -> None:
        """The tables are there."""

    def nothing_known(self, now: float) -> Standing:
        """Where it is published to, and by how many."""
        return stand(self._settings, now, queue=self.queue, rows=())

    def stamp(self) -> tuple[float, ...]:
        """How many rows there are, and which was changed last; of very many, not asked at each glance."""
        began = time.monotonic()
        if began >= self._again_at:
            with self._database.transaction() as connection:
                rows = connection.execute(_STAMP.encode(), {"site": self._settings.site}).fetchall()
            self._stamp = tuple(value for row in rows for value in row)
            now = time.monotonic()
            self._again_at = now + min(_LONGEST, _SHARE * (now - began) - self.glance)
        return self._stamp

    def may_hide_more(self, stamp: tuple[float, ...]) -> bool:  # noqa: ARG002 - as a folder's
        """Each change of a row is a change of a stamp."""
        return False

    def lately(self, standing: Standing, now: float) -> Standing:
        """How many hosts there are, and whether there is a pause."""
        hosts = sites.hosts(self._database)
        return dataclasses.replace(standing, hosts=hosts, paused=self.queue.paused(now))

    def waker(self, notice: Callable[[], None]) -> _Nudged:  # noqa: ARG002 - the stamp tells
        """Sleeps until the next glance."""
        return self._waker

    def hurry(self) -> None:
        """The next glance is now."""
        self._again_at = 0.0
        self._waker.nudge()


class _Nudged:
    """Sleeps, unless it is nudged."""

    def __init__(self) -> None:
        self._nudge = threading.Event()

    def nudge(self) -> None:
        """Wake up."""
        self._nudge.set()

    def wait(self, seconds: float, stop: Stopping) -> None:
        """Return after so long, or when it is nudged."""
        if not stop.is_set():
            self._nudge.wait(seconds)
            self._nudge.clear()
