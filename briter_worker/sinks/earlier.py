"""Remember what unpublished saves of a post declared: a file that they knew is not missing.

Of published saves the remote's history tells. The others have ended in failures, newer saves and
cancellations, each of which is an event with the paths that its job declared.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from briter_worker import events
from briter_worker.allowlist import normalized

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from briter_worker.job import Job
    from briter_worker.sinks.store import SqliteStore

_ENDS_UNPUBLISHED = (events.JobFailure, events.Superseded, events.Cancelled)
_KEPT_S = 365 * 86400.0
_NOTE = "INSERT OR IGNORE INTO declared (slug, path, job_id, saved_at, at) VALUES (?, ?, ?, ?, ?)"
_FORGET = "DELETE FROM declared WHERE at < ?"
_CANCELLED = (
    "SELECT declared.path, declared.slug, MAX(attempts.ended) FROM declared"
    " JOIN attempts ON attempts.slug = declared.slug AND attempts.outcome = 'cancelled'"
    " GROUP BY declared.path, declared.slug"
)
_FIND = "SELECT path FROM declared WHERE slug = ? AND path = ? AND NOT (job_id = ? AND saved_at = ?)"


class Cancellation(NamedTuple):
    """A path that an unpublished save of a post declared, and when the post was cancelled last."""

    path: str
    slug: str
    at: float


@dataclass(eq=False)
class EarlierSaves:
    """Records what unpublished saves of one site declared. Each path keeps the first save that did."""

    receipts: SqliteStore
    clock: Callable[[], float] = time.time

    def store(self, batch: Sequence[events.Event], /) -> None:
        """Record the paths of jobs that failed, or left the queue unpublished. Raises StoreError."""
        unpublished = [event for event in batch if isinstance(event, _ENDS_UNPUBLISHED)]
        saves = [event.save for event in unpublished if event.save is not None and event.save.paths]
        if not saves:
            return
        now = self.clock()
        with self.receipts.transaction() as transaction:
            transaction.execute(_FORGET, (now - _KEPT_S,))
            for save in saves:
                for path in save.paths:
                    values = (save.slug, normalized(path), save.job_id, save.saved_at, now)
                    transaction.execute(_NOTE, values)

    def close(self) -> None:
        """Close the store."""
        self.receipts.close()

    def declared(self, job: Job, paths: Collection[str]) -> set[str]:
        """Return which of these paths another save of the job's post declared. Raises StoreError."""
        found = set()
        for path in paths:
            values = (job.slug, normalized(path), job.id, job.created_at)
            if self.receipts.query(_FIND, values):
                found.add(path)
        return found

    def cancelled(self) -> list[Cancellation]:
        """Return the paths of the posts that were cancelled. Raises StoreError."""
        rows = self.receipts.query(_CANCELLED, ())
        return [Cancellation(path, slug, at or 0.0) for path, slug, at in rows]
