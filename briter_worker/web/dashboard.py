"""All that the pages and the API share, in one place."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

from briter_worker.outlets import open_record
from briter_worker.web.actions import Actions
from briter_worker.web.examination import Examination
from briter_worker.web.live import Hub
from briter_worker.web.readers import Readers
from briter_worker.web.snapshot import Keeper
from briter_worker.wiring import open_folder

if TYPE_CHECKING:
    from collections.abc import Callable

    from briter_worker.ports import EventSink
    from briter_worker.settings import Settings
    from briter_worker.standing import Standing
    from briter_worker.web.security import Guard

    Hook = Callable[[Callable[[], Standing]], Callable[[], tuple[bytes, str]]]
    """Makes what renders the numbers, given what tells how the site stands."""

_DEAD = 60.0
"""A look at a hundred thousand files on a slow disk takes its time."""


class Dashboard:
    """One site's dashboard."""

    def __init__(
        self,
        settings: Settings,
        log: EventSink,
        complain: Callable[[str], None],
        metrics: Hook | None,
    ) -> None:
        self.settings = settings
        self.guard: Guard | None = None
        self.hub = Hub()
        self.queue = open_folder(settings)
        self.readers = Readers(settings)
        self.keeper = Keeper(settings, self.queue, self.hub.publish, self.hub.restart)
        # A pause is the worker's to tell: it notices the file, whoever wrote it.
        self._record = open_record(settings, log)
        self.actions = Actions(settings, self.queue, self.keeper, self.readers, log=log, record=self._record)
        self.examination = Examination(settings, complain)
        self._metrics = metrics and metrics(lambda: self.keeper.snapshot.standing_at(time.time()))
        self._one_reading = threading.Lock()

    def open(self) -> None:
        """Begin to look; in the loop that will serve."""
        self.keeper.start()
        self.keeper.renew()  # of most queues, the first reader sees all
        self.hub.open(asyncio.get_running_loop(), self.keeper.latest)

    def close(self) -> None:
        """Look no more."""
        self.hub.close()
        self.keeper.stop()
        self.readers.close()
        self._record.close()

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
