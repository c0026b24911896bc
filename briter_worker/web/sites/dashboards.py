"""Each site's dashboard, there while somebody looks at it: opened when asked for, let go when nobody asks."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import TYPE_CHECKING

from briter_worker.cluster import sites
from briter_worker.cluster.telling import Records
from briter_worker.web.dashboard import Dashboard, Parts
from briter_worker.web.readers import Readers
from briter_worker.web.sites.entry import RowEntry
from briter_worker.web.sites.looking import RowLooking

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from briter_worker.cluster.sites import Site
    from briter_worker.cluster.telling import Log
    from briter_worker.queues.postgres.database import Database
    from briter_worker.settings import Settings

_KEPT = 64
"""So many are kept that nobody asks for at the moment."""
_IDLE = 120.0
_TRUSTED = 5.0
"""After so many seconds it is looked up whether the site is still what it was."""


@dataclasses.dataclass(slots=True)
class _Kept:
    site: Site
    dashboard: Dashboard
    asked: float
    looked_up: float


class Dashboards:
    """The sites' dashboards. Safe in several threads."""

    def __init__(
        self, settings: Settings, database: Database, log: Log, complain: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._database = database
        self._log = log
        self._complain = complain
        self._records = Records(settings, database, log)
        self._guard = threading.Lock()
        self._kept: dict[str, _Kept] = {}
        self._closed = False

    def known(self, name: str) -> Dashboard | None:
        """The site's, if it is open, and was looked up just now. Waits for nothing."""
        now = time.monotonic()
        kept = self._kept.get(name)
        if kept is None or now - kept.looked_up > _TRUSTED:
            return None
        kept.asked = now
        return kept.dashboard

    def get(self, name: str, loop: asyncio.AbstractEventLoop) -> Dashboard:
        """The site's, opened for the loop. Raises UnknownSiteError, UsageError and DatabaseError."""
        try:
            site = sites.get(self._database, name)
        except sites.UnknownSiteError:
            self._drop(name)
            raise
        known = self._unchanged(site)
        if known is not None:
            return known
        dashboard = self._open(site, loop)
        with self._guard:
            now = time.monotonic()
            before = self._kept.get(name)
            self._kept[name] = _Kept(site, dashboard, now, now)
            gone = self._unasked(now)
            if before is not None:
                gone.append(before.dashboard)
            if self._closed:
                gone.append(dashboard)
        for each in gone:
            each.close()
        return dashboard

    def _unchanged(self, site: Site) -> Dashboard | None:
        with self._guard:
            kept = self._kept.get(site.name)
            # What each drain changes is not the dashboard's.
            if kept is None or _lasting(kept.site) != _lasting(site):
                return None
            kept.looked_up = kept.asked = time.monotonic()
            return kept.dashboard

    def close(self) -> None:
        """Look no more."""
        with self._guard:
            self._closed = True
            kept, self._kept = self._kept, {}
        for each in kept.values():
            each.dashboard.close()
        self._records.close()

    def leave(self) -> None:
        """Have all readers leave."""
        for each in list(self._kept.values()):
            each.dashboard.hub.close()

    def _open(self, site: Site, loop: asyncio.AbstractEventLoop) -> Dashboard:
        settings = sites.settings_of(site, self._settings)
        log = self._log.of(site.name)
        parts = Parts(
            name=site.name,
            looking=RowLooking(settings, self._database),
            readers=Readers(settings),
            entry=RowEntry(settings, self._database),
            record=self._records.of(settings),
            base=f"/sites/{site.name}",
        )
        dashboard = Dashboard(settings, parts, log, self._complain)
        dashboard.open(loop)
        return dashboard

    def _unasked(self, now: float) -> list[Dashboard]:
        """Those to be closed: nobody reads their stream, and they were not asked for lately."""
        idle = sorted((kept.asked, name) for name, kept in self._kept.items() if not len(kept.dashboard.hub))
        many = len(idle) - _KEPT
        gone = [name for number, (asked, name) in enumerate(idle) if number < many or now - asked > _IDLE]
        return [self._kept.pop(name).dashboard for name in gone]

    def _drop(self, name: str) -> None:
        with self._guard:
            kept = self._kept.pop(name, None)
        if kept is not None:
            kept.dashboard.close()


def _lasting(site: Site) -> Site:
    return dataclasses.replace(site, tip=None, paused=None)
