"""All sites together, looked at by one thread while somebody asks: no page waits for very many rows."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from briter_worker.cluster.overview import Overview, look
from briter_worker.errors import explained
from briter_worker.web.live import Hub

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from briter_worker.cluster.overview import Glance
    from briter_worker.queues.postgres.database import Database
    from briter_worker.settings import Settings
    from briter_worker.web.security import Guard

_EVERY = 1.0
_SHARE = 10.0
"""After a look that took a second, so many pass before the next one."""
_LONGEST = 30.0
_ASKED = 60.0
"""For so long after a question it is looked for the next one."""
_STALE = 5.0
_PATIENCE = 2.0
STATES = ("pending", "retrying", "scheduled", "claimed", "failed")


class AllSites:
    """What is behind the cluster's door: implements `door.Behind`."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self.settings = settings
        self.guard: Guard | None = None
        self.hub = Hub()
        self.overview = Overview(0.0)
        self.problem: str | None = None
        self.revision = 0
        self._database = database
        self._fresh = threading.Condition()
        self._wanted = True
        self._looked = -_LONGEST
        self._stopped = False
        self._asked = 0.0
        self._told: dict[str, Any] | None = None
        self._thread = threading.Thread(target=self._run, name="sites", daemon=True)

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to look, for the loop that will serve."""
        self.hub.open(loop, 0)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self.hub.close()
        with self._fresh:
            self._stopped = True
            self._fresh.notify_all()

    def ask(self) -> Overview:
        """The sites as they are: as they were a moment ago, where somebody asks all the time."""
        with self._fresh:
            self._asked = time.monotonic()
            if self._asked - self._looked > max(_STALE, 2 * _EVERY):
                self._wanted = True
                self._fresh.notify_all()
                self._fresh.wait_for(lambda: not self._wanted, timeout=_PATIENCE)
        return self.overview

    def everywhere(self) -> dict[str, Any]:
        """What every page shows."""
        return {
            "seen": f"{self.revision}-0",
            "dry_run": False,
            "site_name": "All sites",
            "base": "",
            "pages": (("/", "Sites"),),
            "counted": "/",
            "needs_hand": sum(site.failed for site in self.overview.sites),
        }

    def status(self) -> dict[str, Any]:
        """What readers are told whenever it changes."""
        found = self.overview.sites
        return {
            "revision": self.revision,
            "sites": len(found),
            "hosts": self.overview.hosts,
            "jobs": {state: sum(site.jobs[state] for site in found) for state in STATES},
            "inTrouble": sum(site.has_trouble for site in found),
            "paused": sum(site.paused is not None for site in found),
            "problem": self.problem,
        }

    def _run(self) -> None:
        pause = 0.0
        while True:
            with self._fresh:
                self._fresh.wait_for(lambda: self._wanted or self._stopped, timeout=pause or _EVERY)
                if self._stopped:
                    return
                asked = self._wanted or len(self.hub) or time.monotonic() - self._asked < _ASKED
            if not asked:
                pause = _EVERY
                continue
            began = time.monotonic()
            self._look()
            took = time.monotonic() - began
            pause = min(_LONGEST, max(_EVERY, _SHARE * took))
            with self._fresh:
                self._looked = time.monotonic()
                self._wanted = False
                self._fresh.notify_all()

    def _look(self) -> None:
        try:
            found = look(self._database, time.time())
            if found.sites != self.overview.sites or found.hosts != self.overview.hosts:
                self.revision += 1
            self.overview = found
            self.problem = None
        except OSError as error:
            self.problem = explained(error)
        except Exception as error:  # noqa: BLE001 - the thread's end would be the end of all news
            self.problem = str(error)
        status = self.status()
        if status != self._told:
            self._told = status
            with suppress(RuntimeError):  # the loop has just ended
                self.hub.publish((), status)


def chosen(sites: Sequence[Glance], q: str, show: str) -> list[Glance]:
    """Those with this in their name or remote, in this condition."""
    words = q.casefold().split()
    found = [
        site
        for site in sites
        if all(word in site.name.casefold() or word in site.remote.casefold() for word in words)
    ]
    match show:
        case "trouble":
            return [site for site in found if site.has_trouble]
        case "waiting":
            return [site for site in found if site.pending or site.retrying or site.claimed]
        case "paused":
            return [site for site in found if site.paused is not None]
        case _:
            return found
