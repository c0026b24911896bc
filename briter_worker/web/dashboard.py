"""All that the pages and the API share, in one place."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from briter_worker.allowlist import Allowlist
from briter_worker.errors import for_people
from briter_worker.outlets import open_record
from briter_worker.web.actions import Actions, FolderEntry
from briter_worker.web.condition import obstacle
from briter_worker.web.examination import Examination
from briter_worker.web.live import Hub
from briter_worker.web.looking import FolderLooking
from briter_worker.web.readers import Readers
from briter_worker.web.snapshot import Keeper
from briter_worker.wiring import open_folder

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from briter_worker.ports import EventSink
    from briter_worker.settings import Settings
    from briter_worker.sinks.fan import Fan
    from briter_worker.standing import Standing
    from briter_worker.web.actions import Entry
    from briter_worker.web.looking import Looking
    from briter_worker.web.security import Guard

    Hook = Callable[[Callable[[], Standing]], Callable[[], tuple[bytes, str]]]
    """Makes what renders the numbers, given what tells how the site stands."""

_DEAD = 60.0
"""A look at a hundred thousand files on a slow disk takes its time."""


PAGES = (
    ("/", "Now"),
    ("/scheduled", "Scheduled"),
    ("/failed", "Failed"),
    ("/published", "Published"),
    ("/figures", "Figures"),
    ("/site", "Site"),
)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a dashboard is put together from: it depends on where the queue is."""

    name: str
    looking: Looking
    readers: Readers
    entry: Entry
    record: Fan
    base: str = ""
    """What each of its addresses begins with."""


def of_folder(settings: Settings, log: EventSink) -> Parts:
    """The parts for the site of this machine."""
    queue = open_folder(settings)
    readers = Readers(settings)
    return Parts(
        name=settings.git_worktree.name,
        looking=FolderLooking(settings, queue),
        readers=readers,
        entry=FolderEntry(settings, queue, readers),
        record=open_record(settings, log),
    )


class Dashboard:
    """One site's dashboard."""

    def __init__(
        self,
        settings: Settings,
        parts: Parts,
        log: EventSink,
        complain: Callable[[str], None],
        metrics: Hook | None = None,
    ) -> None:
        self.settings = settings
        self.name = parts.name
        self.base = parts.base
        self.guard: Guard | None = None
        self.hub = Hub()
        self.readers = parts.readers
        looking = parts.looking
        self.keeper = Keeper(settings, looking, self.hub.publish, self.hub.restart)
        # A pause is the worker's to tell: it notices the file, whoever wrote it.
        self._record = parts.record
        self.actions = Actions(
            looking.queue,
            self.keeper,
            parts.entry,
            Allowlist(settings.folders),
            log=log,
            record=self._record,
        )
        self.examination = Examination(settings, complain)
        self._metrics = metrics and metrics(lambda: self.keeper.snapshot.standing_at(time.time()))
        self._one_reading = threading.Lock()

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to look, for the loop that will serve."""
        self.keeper.start()
        self.keeper.renew()  # of most queues, the first reader sees all
        self.hub.open(loop, self.keeper.latest)

    def close(self) -> None:
        """Look no more."""
        self.hub.close()
        self.keeper.stop()
        self.readers.close()
        self._record.close()

    def everywhere(self) -> dict[str, Any]:
        """What every page shows."""
        keeper = self.keeper
        seen = (
            f"{keeper.revision}-{keeper.latest}"  # before the snapshot: at worst, the page is fetched twice
        )
        snapshot = keeper.snapshot
        return {
            "seen": seen,
            "snapshot": snapshot,
            "standing": snapshot.standing,
            "dry_run": snapshot.standing.dry_run,
            "obstacle": obstacle(snapshot, keeper.queue_problem),
            "site_name": for_people(self.name) or "site",
            "base": self.base,
            "above": "/" if self.base else "",
            "pages": PAGES,
            "counted": "/failed",
            "needs_hand": len(snapshot.failed),
            "most_retries": self.settings.worker_max_attempts,
        }

    def metrics(self) -> tuple[bytes, str] | None:
        """The numbers as text, and its media type; None where they are not installed."""
        if self._metrics is None:
            return None
        with self._one_reading:
            return self._metrics()

    @property
    def is_alive(self) -> bool:
        """Whether the snapshot is still being kept."""
        return time.monotonic() - self.keeper.beat < _DEAD

    def status(self) -> dict[str, Any]:
        """How the site stands now, for programs."""
        keeper = self.keeper
        standing = keeper.snapshot.standing_at(time.time()).as_json()
        return {
            **standing,
            "inFlight": keeper.progress(),
            "latest": keeper.latest,
            "revision": keeper.revision,
            "readers": len(self.hub),
            "problems": [text for text in (keeper.queue_problem, keeper.history_problem) if text],
        }
