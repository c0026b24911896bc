"""Keeps the repository's packs few, while nothing is published.

Each publication brings one small pack. When there are many, git rolls the small ones up into one
(`git repack --geometric`), whose cost is that of the small ones alone. It takes over every object of theirs,
whether anything refers to it or not: nothing that a person may need is ever dropped.

It runs beside the worker, at the lowest priority, and is ended as soon as there is something to publish.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from briter_worker.errors import PublishError, Stopped

if TYPE_CHECKING:
    from collections.abc import Callable

    from briter_worker.git.command import Commands
    from briter_worker.git.watch import Process

_COMMAND = (
    *("-c", "pack.threads=1", "-c", "pack.windowMemory=64m", "-c", "gc.bigPackThreshold=0"),
    *("repack", "--geometric=2", "-d", "-q", "--no-write-bitmap-index"),
)
_LOWEST = 19
_LONGEST = 600.0
"""Seconds after which it is ended, whatever it is doing."""
_AGAIN = 3600.0
"""Seconds until the next try, when git would not."""
_URGENT = 10
"""So many times too many packs, and it is not ended any more for a publication: the site never rests."""
_LOOK = 0.05


class Upkeep:
    """One repository's housekeeping: at most one process, started and ended by the worker."""

    def __init__(self, commands: Commands, *, packs: int = 30, loose: int = 3000) -> None:
        self._commands = commands
        self._most_packs = packs
        self._most_loose = loose
        self._process: Process | None = None
        self._urgent = False
        self._deadline = 0.0
        self._not_before = 0.0

    def begin(self) -> None:
        """Start, if there is something to roll up and nothing runs yet; does not wait for it."""
        now = time.monotonic()
        if self._running(now) or now < self._not_before:
            return
        packs, loose = self._counted()
        if packs < self._most_packs and loose < self._most_loose:
            return
        if self._shared():
            self._not_before = now + _AGAIN
            return
        self._urgent = packs >= _URGENT * self._most_packs
        process = self._process = self._commands.spawn(_COMMAND)
        with self._commands.watch.awaiting(process):
            pass
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, _LOWEST)
        self._deadline = now + _LONGEST

    def make_way(self) -> None:
        """Something is to be published: end what runs, unless it has been ended for that too often."""
        if self._process is not None and not (self._urgent and self._process.poll() is None):
            self.end()

    def finish(self, stopping: Callable[[], bool], longest: float) -> None:
        """Let it run to its end, but not longer than this, nor when the worker has to stop."""
        deadline = time.monotonic() + longest
        while self._running(time.monotonic()) and time.monotonic() < deadline and not stopping():
            time.sleep(_LOOK)
        self.end()

    def end(self) -> None:
        """Nothing of it runs any more. What it had not finished is as it was."""
        if self._process is not None:
            process, self._process = self._process, None
            with suppress(PublishError, Stopped):
                self._commands.watch.dismiss(process)

    def _running(self, now: float) -> bool:
        if self._process is None:
            return False
        status = self._process.poll()
        if status is None and now < self._deadline:
            return True
        if status != 0:
            self._not_before = now + _AGAIN
        self.end()
        return False

    def _counted(self) -> tuple[int, int]:
        """How many packs and loose objects there are; of these, one folder of 256 is looked at."""
        objects = self._objects()
        try:
            packs = [
                file
                for file in (objects / "pack").iterdir()
                if file.suffix == ".pack" and not file.with_suffix(".keep").exists()
            ]
        except OSError:
            return 0, 0
        try:
            loose = 256 * sum(1 for _ in (objects / "17").iterdir())
        except OSError:
            loose = 0
        return len(packs), loose

    def _shared(self) -> bool:
        """Whether objects are also elsewhere, or still on the remote: then git's own `gc` knows better."""
        objects = self._objects()
        return (objects / "info" / "alternates").exists() or any((objects / "pack").glob("*.promisor"))

    def _objects(self) -> Path:
        return Path(self._commands.repo.common_dir, "objects")
