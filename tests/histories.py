"""The history of one site for tests: workers that write it, a reader, and the events of attempts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from briter_worker.events import Event, Failed, JobStarted, Published, Warned
from briter_worker.sinks.history import History, Receipt
from briter_worker.sinks.recorder import FanOut, HistorySink, Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from briter_worker.sinks.store import Store

SHA = "52ed5b9c2a5b45b9a7a0a6f8f1f7be9bd5b2d6b1"


class Book:
    """A site's history, one worker after another that writes it, a reader, and what was logged."""

    def __init__(self, open_store: Callable[[], Store], site: str = "") -> None:
        self.open_store = open_store
        self.site = site
        self.now = 1_000_000.0
        self.monotonic = 0.0
        self.logged: list[Event] = []
        self.history = History(open_store(), site)

    def open(self) -> FanOut:
        sink = HistorySink(
            self.open_store(),
            Target("main", "origin", "https://example.org/notes/{slug}"),
            site=self.site,
            keep_days=365,
            clock=lambda: self.now,
        )
        return FanOut([sink], self.logged.append, clock=lambda: self.monotonic)

    def write(self, *events: Event) -> None:
        """Record the events of one worker's life."""
        sinks = self.open()
        for event in events:
            sinks(event)
        sinks.close()

    def receipts(self) -> list[Receipt]:
        return self.history.receipts()

    def warnings(self) -> list[str]:
        return [event.error for event in self.logged if isinstance(event, Warned)]


def start(job: str = "j1", attempt: int = 1) -> JobStarted:
    """Start an attempt of a job that was saved ten seconds ago."""
    return JobStarted(
        job_id=job,
        slug=f"post-{job}",
        attempt=attempt,
        dry_run=False,
        title="Publish it",
        saved_at=999_990.0,
        due_at=None,
    )


def outcome(job: str, attempt: int) -> dict[str, Any]:
    return {"job_id": job, "slug": f"post-{job}", "attempt": attempt, "duration_ms": 80}


def published(job: str = "j1", attempt: int = 1, *, dry_run: bool = False, commit: str = SHA) -> Published:
    return Published(**outcome(job, attempt), dry_run=dry_run, commit=commit)


def failed(job: str = "j1", attempt: int = 1) -> Failed:
    return Failed(
        **outcome(job, attempt),
        dry_run=False,
        error="the remote is down\x1b[31m",
        failure="network",
        fix="check the network",
        retry_at=1_000_060.0,
    )
