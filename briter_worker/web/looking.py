"""Where the snapshot's thread looks: a folder. For the rows of a cluster's site, see `sites/looking.py`."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Protocol

from briter_worker.queues.watching import FolderWaker
from briter_worker.standing import holder, stand
from briter_worker.wiring import open_folder

if TYPE_CHECKING:
    from collections.abc import Callable

    from briter_worker.queues.disk import DiskQueue
    from briter_worker.queues.postgres.queue import PostgresQueue
    from briter_worker.queues.watching import Stopping
    from briter_worker.settings import Settings
    from briter_worker.standing import Standing

    Steered = DiskQueue | PostgresQueue

_YOUNG_NS = 100_000_000


class Waker(Protocol):
    """What the thread sleeps by."""

    def wait(self, seconds: float, stop: Stopping) -> None:
        """Return after so long, or sooner when there is news, or when `stop` is set."""
        ...


class Looking(Protocol):
    """A queue, and how to see at a glance whether it has changed. Raises OSError."""

    queue: Steered
    glance: float
    """So many seconds lie between two."""

    def prepare(self) -> None:
        """Have there be something to look at."""
        ...

    def nothing_known(self, now: float) -> Standing:
        """What can be said before the queue was looked at."""
        ...

    def stamp(self) -> tuple[float, ...]:
        """Another one whenever the queue has changed."""
        ...

    def may_hide_more(self, stamp: tuple[float, ...]) -> bool:
        """Whether something may have changed since, and moved no stamp."""
        ...

    def lately(self, standing: Standing, now: float) -> Standing:
        """The standing, with what changes beside the queue."""
        ...

    def waker(self, notice: Callable[[], None]) -> Waker:
        """What tells `notice` of news."""
        ...

    def hurry(self) -> None:
        """Somebody waits for the next glance."""
        ...


class FolderLooking:
    """Implements `Looking` for the queue's folder."""

    glance = 0.2

    def __init__(self, settings: Settings, queue: DiskQueue) -> None:
        self._settings = settings
        self._folder = queue
        self.queue: Steered = queue

    def prepare(self) -> None:
        """The folder is there."""
        self._settings.queue_root.mkdir(parents=True, exist_ok=True)

    def nothing_known(self, now: float) -> Standing:
        """Who is there, and where: the look itself may take its time."""
        settings = self._settings
        nowhere = open_folder(dataclasses.replace(settings, queue_root=settings.queue_root / ".none"))
        return dataclasses.replace(
            stand(settings, now, queue=nowhere, rows=()),
            paused=open_folder(settings).paused(now),
            queue=str(settings.queue_root),
        )

    def stamp(self) -> tuple[float, ...]:
        """When the folders changed last."""
        root = self._settings.queue_root
        stamps = []
        for path in (root, root / ".claimed", root / ".paused"):
            try:
                stamps.append(path.stat().st_mtime_ns)
            except OSError:
                stamps.append(0)
        return tuple(stamps)

    def may_hide_more(self, stamp: tuple[float, ...]) -> bool:
        """A second change in the moment of the first moves no stamp."""
        return time.time_ns() - max(stamp) < _YOUNG_NS

    def lately(self, standing: Standing, now: float) -> Standing:
        """The worker, and whether there is a pause."""
        worker = holder(self._settings, now)
        return dataclasses.replace(standing, worker=worker, paused=self.queue.paused(now))

    def waker(self, notice: Callable[[], None]) -> Waker:
        """The system tells."""

        def noticed() -> None:
            self._folder.notice()
            notice()

        return FolderWaker(self._settings.queue_root, noticed)

    def hurry(self) -> None:
        """What was written wakes by itself."""
