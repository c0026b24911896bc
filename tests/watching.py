"""A watcher in the test's process: real files and events of the kernel, and a clock that the test moves."""

from __future__ import annotations

import time
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from briter_worker import events
from briter_worker.settings import load_settings
from briter_worker.watch.kernel import KernelEvents, Look
from briter_worker.wiring import open_post_watcher

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sites import Site

    from briter_worker.watch.kernel import Source

_OLD_S = 5.0
"""To the watcher, every file is as old as this: older than the resolution of any time stamp."""


@dataclass
class Watching:
    """A watcher, and what it enqueued and said."""

    site: Site
    sees_events: bool = True
    backstop: float = 600.0
    """Seconds of real time between looks at everything, beside the events."""
    saved: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    """Slug, and the files as they were when the job was written."""
    warnings: list[str] = field(default_factory=list)
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.watcher = open_post_watcher(load_settings(self.site.environment()), self._emit)
        assert self.watcher.acquire()
        self._source: Source | None = None
        if self.sees_events:
            folders = self.watcher.allowlist.folders
            self._source = KernelEvents(self.site.worktree, folders, self.backstop)
        self.watcher.look_everywhere()

    def _emit(self, event: events.Event) -> None:
        if isinstance(event, events.Enqueued):
            self.saved.append((event.slug, {path: self._text(path) for path in event.paths}))
        elif isinstance(event, events.Warned):
            self.warnings.append(event.error)

    def _text(self, path: str) -> str | None:
        file = self.site.worktree / path
        return file.read_text() if file.is_file() else None

    def wait(self, seconds: float) -> None:
        """Let so much time pass. Without events, everything is compared at its beginning."""
        if self._source is None:
            self.watcher.note(Look(is_everything=True), self.now)
        ends = self.now + seconds
        while True:
            if self._source is not None:
                self.watcher.note(self._source.wait(0), self.now)
            self.watcher.step(self.now, time.time() + _OLD_S)
            if self.now >= ends:
                return
            self.now = min(ends, max(self.now + 0.001, self.watcher.next_look()))

    def settle(self) -> list[str]:
        """Let time pass until all is settled; return the slugs enqueued since the watcher began."""
        self.wait(15.0)
        return [slug for slug, _ in self.saved]

    def messages(self) -> dict[str, str | None]:
        """Return the messages of the waiting jobs, by slug."""
        return {job["slug"]: job.get("message") for job in self.site.jobs()}

    def close(self) -> None:
        if self._source is not None:
            self._source.close()
        self.watcher.close()


@contextmanager
def watching(site: Site, *, sees_events: bool = True, backstop: float = 600.0) -> Iterator[Watching]:
    """Watch the site, from a comparison with the ledger on."""
    with closing(Watching(site, sees_events=sees_events, backstop=backstop)) as found:
        found.settle()
        yield found
