"""Records events in the history: one row per attempt, one per drain, and the live stream."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from briter_worker.events import (
    Cancelled,
    DeadLettered,
    Event,
    Failed,
    HistoryRetired,
    JobOutcome,
    JobStarted,
    NoPaths,
    Progress,
    Published,
    Quarantined,
    Superseded,
    Warned,
    WorkerSkipped,
    WorkerStarted,
    WorkerStopped,
    WorkerStopping,
)
from briter_worker.redaction import one_line
from briter_worker.sinks.history import waiting_time
from briter_worker.sinks.log import log_entry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from briter_worker.sinks.store import Store, Transaction

INTERRUPTED = "interrupted"
_FIRST_PHASE = "validate"
_SLOW_PHASE = "push"
"""The phase that waits for the remote: whoever looks meanwhile is to see it."""
ANY_KIND = "any"
"""The kind of jobs that ended without an attempt."""
_MAX_PHASES = 100
_PROGRESS_EVERY_S = 0.25
_RETIRE_EVERY_S = 3600.0
_DAY_S = 86400.0
_MOMENTS_KEPT_S = 7 * _DAY_S
_ROWS_PER_STEP, _MAX_STEPS = 1000, 20

Ending = JobOutcome | Superseded | Cancelled | Quarantined
_OPENS_NO_HISTORY = (WorkerStarted, WorkerSkipped, WorkerStopping, WorkerStopped, Warned, HistoryRetired)
"""A run of cron that finds nothing to publish writes nothing."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a site publishes to: part of every receipt."""

    branch: str
    remote: str
    href_template: str = ""

    def href(self, slug: str) -> str | None:
        """Return the address of the published post, if the site has a template for it."""
        template = self.href_template
        return template.replace("{slug}", quote(slug, errors="replace")) if template else None


@dataclass(frozen=True, slots=True)
class Retention:
    """The age in days at which a receipt is stale, and at which it is deleted."""

    stale_days: int
    keep_days: int


class RunningDrain:
    """The running drain: its jobs without an outcome, and its phases ([name, began, ended or None])."""

    def __init__(self, began: float) -> None:
        self.id = str(secrets.randbits(62))
        self.began = began
        self.phases: list[list[Any]] = [[_FIRST_PHASE, began, None]]
        self.phase, self.done, self.total = _FIRST_PHASE, 0, 0
        self.open: set[str] = set()
        self.is_starting = True
        """Only starts have come: a drain announces all of them before anything else."""

    def advance(self, event: Progress, at: float) -> None:
        """Note the progress. A phase lasts until the next one begins."""
        self.is_starting = False
        if self.phases[-1][0] != event.phase and len(self.phases) < _MAX_PHASES:
            self.phases[-1][2] = at
            self.phases.append([event.phase, at, None])
        if event.total and event.done >= event.total:
            self.phases[-1][2] = at
        self.phase, self.done, self.total = event.phase, event.done, event.total

    def end(self, job_id: str, at: float) -> None:
        """Note that a job has its outcome. The last phase lasts until the last outcome."""
        self.is_starting = False
        self.open.discard(job_id)
        if not self.open:
            self.phases[-1][2] = at


class HistorySink:
    """Records the events of one site, in the caller's thread."""

    def __init__(
        self,
        store: Store,
        target: Target,
        *,
        site: str = "",
        retention: Retention | None = None,
        announce: Callable[[Event], None] = lambda _: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._target = target
        self._site = site
        self._retention = retention
        self._announce = announce
        self._clock = clock
        self._waiting: list[tuple[float, Event]] = []
        self._drain: RunningDrain | None = None
        self._is_used = False
        self._written_at = 0.0
        self._retire_at = 0.0

    def store(self, events: Sequence[Event]) -> None:
        """Record the events. Starts and progress are written with what follows them.

        Raises StoreError; then what was not written is lost.
        """
        now = self._clock()
        self._is_used = self._is_used or any(not isinstance(event, _OPENS_NO_HISTORY) for event in events)
        if not self._is_used:
            return
        self._waiting += [(now, event) for event in events]
        if any(self._is_due(event, now) for event in events):
            self._write()
            self._retire(now)

    def close(self) -> None:
        """Write what is left."""
        try:
            self._write()
            if self._is_used:
                self._retire(self._clock())
        finally:
            self._store.close()

    def _is_due(self, event: Event, now: float) -> bool:
        if not isinstance(event, JobStarted | Progress):
            return True
        is_slow = isinstance(event, Progress) and event.phase == _SLOW_PHASE and event.done == 0
        return is_slow or not 0 <= now - self._written_at < _PROGRESS_EVERY_S

    def _retire(self, now: float) -> None:
        if self._retention is None or self._clock() < self._retire_at:
            return
        self._retire_at = now + _RETIRE_EVERY_S
        retired = retire(self._store, self._retention, now)
        if retired is not None:
            self._announce(retired)

    def _write(self) -> None:
        items, self._waiting = self._waiting, []
        if not items:
            return
        try:
            with self._store.transaction(self._site) as transaction:
                for at, event in items:
                    self._record(transaction, at, event)
                self._write_drain(transaction)
        except BaseException:
            self._drain = None  # what the transaction began does not exist
            raise
        if self._drain is not None and not self._drain.open:
            self._drain = None
        self._written_at = self._clock()

    def _record(self, transaction: Transaction, at: float, event: Event) -> None:
        match event:
            case Progress():
                if self._drain is not None:
                    self._drain.advance(event, at)
                return
            case JobStarted():
                self._start(transaction, at, event)
            case JobOutcome() | Superseded() | Cancelled() | Quarantined():
                if not self._end(transaction, at, event):
                    return
            case _:
                pass
        data = json.dumps(log_entry(event, at), ensure_ascii=False, separators=(",", ":"))
        transaction.execute(
            "INSERT INTO moments (site, at, event, data) VALUES (?, ?, ?, ?)",
            (self._site, at, event.name, data),
        )

    def _start(self, transaction: Transaction, at: float, event: JobStarted) -> None:
        if self._drain is None or not self._drain.is_starting:
            # Jobs of the last drain may be open for ever: they were released.
            self._write_drain(transaction)
            self._drain = RunningDrain(at)
        self._drain.open.add(event.job_id)
        # An attempt that its worker did not live to end.
        transaction.execute(
            "UPDATE attempts SET outcome = ?, ended = ? WHERE site = ? AND job_id = ? AND outcome IS NULL",
            (INTERRUPTED, at, self._site, event.job_id),
        )
        facts = {
            "drain": self._drain.id,
            "title": event.title,
            "attempt": event.attempt,
            "saved_at": event.saved_at,
            "due_at": event.due_at,
            "began": at,
            "dry_run": int(event.dry_run),
        }
        self._insert(transaction, event.job_id, event.slug, facts)

    def _end(self, transaction: Transaction, at: float, event: Ending) -> bool:
        """Record the outcome. Return False if it was known: it is delivered again."""
        facts = {"outcome": event.name, "ended": at, **_facts(event, self._target)}
        names = ", ".join(f'"{name}" = ?' for name in facts)
        # An attempt that a dead worker left ends without a new start.
        ended = transaction.execute(
            f"UPDATE attempts SET {names} WHERE site = ? AND job_id = ? AND outcome IS NULL"  # noqa: S608 - our names
            " RETURNING saved_at, due_at",
            [*facts.values(), self._site, event.job_id],
        ).fetchall()
        if not ended:
            if isinstance(event, Published) and self._is_known(transaction, event):
                return False
            self._insert(transaction, event.job_id, event.slug, facts)
        if self._drain is not None:
            self._drain.end(event.job_id, at)
        self._count(transaction, event, waiting_time(at, *ended[0]) if ended else None)
        return True

    def _is_known(self, transaction: Transaction, event: Published) -> bool:
        query = 'SELECT 1 FROM attempts WHERE site = ? AND job_id = ? AND "commit" = ?'
        values = (self._site, event.job_id, event.commit)
        return transaction.execute(query, values).fetchone() is not None

    def _count(self, transaction: Transaction, event: Ending, waited: float | None) -> None:
        kind = event.job_type if isinstance(event, JobOutcome) else ANY_KIND
        if not isinstance(event, Published) or event.dry_run:
            waited = None
        transaction.execute(
            "INSERT INTO tallies AS t (site, kind, outcome, number, waits, waited) VALUES (?, ?, ?, 1, ?, ?)"
            " ON CONFLICT (site, kind, outcome) DO UPDATE SET number = t.number + 1,"
            " waits = t.waits + excluded.waits, waited = t.waited + excluded.waited",
            (self._site, kind, event.name, int(waited is not None), waited or 0.0),
        )

    def _insert(self, transaction: Transaction, job_id: str, slug: str, facts: Mapping[str, Any]) -> None:
        row = {"site": self._site, "job_id": job_id, "slug": slug, **facts}
        names = ", ".join(f'"{name}"' for name in row)
        marks = ", ".join("?" * len(row))
        transaction.execute(f"INSERT INTO attempts ({names}) VALUES ({marks})", [*row.values()])  # noqa: S608 - as above

    def _write_drain(self, transaction: Transaction) -> None:
        if (drain := self._drain) is not None:
            phases = json.dumps(drain.phases)
            transaction.execute(
                "INSERT INTO drains (id, began, phase, done, total, phases) VALUES (?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (id) DO UPDATE SET phase = excluded.phase, done = excluded.done,"
                " total = excluded.total, phases = excluded.phases",
                (drain.id, drain.began, drain.phase, drain.done, drain.total, phases),
            )


def _facts(event: Ending, target: Target) -> dict[str, Any]:
    facts: dict[str, Any] = {
        name: one_line(str(getattr(event, name))) for name in ("error", "fix") if getattr(event, name, None)
    }
    if isinstance(event, JobOutcome):
        facts |= {
            "attempt": event.attempt,
            "dry_run": int(event.dry_run),
            "duration_ms": event.duration_ms,
            "rejected_paths": json.dumps([one_line(path) for path in event.rejected_paths]),
            "branch": target.branch,
            "remote": target.remote,
        }
    match event:
        case Published():
            facts |= {"commit": event.commit, "href": target.href(event.slug)}
        case Failed():
            facts |= {"failure": event.failure, "retry_at": event.retry_at}
        case DeadLettered():
            facts["failure"] = event.failure
        case NoPaths():
            facts["failure"] = NoPaths.name
        case Superseded():
            facts["superseded_by"] = event.superseded_by
        case _:
            pass
    return facts


def retire(store: Store, retention: Retention, now: float) -> HistoryRetired | None:
    """Mark old receipts as stale and delete older ones, of all sites, in short transactions.

    Return the numbers, or None if there was nothing to do. Safe on many nodes. Raises StoreError.
    """
    stale_before, kept_since = now - retention.stale_days * _DAY_S, now - retention.keep_days * _DAY_S
    stale = deleted = 0
    for _ in range(_MAX_STEPS):
        with store.transaction() as transaction:
            if not transaction.execute(store.try_lock).fetchone()[0]:
                break
            step = [
                transaction.execute(statement, (before, _ROWS_PER_STEP)).rowcount
                for statement, before in (
                    (_DELETE_RECEIPTS, kept_since),
                    (_MARK_STALE, stale_before),
                    (_DELETE_DRAINS, kept_since - _DAY_S),  # a drain ends after it began
                    (_DELETE_MOMENTS, now - _MOMENTS_KEPT_S),
                )
            ]
        deleted += step[0]
        stale += step[1]
        if max(step) < _ROWS_PER_STEP:
            break
    return HistoryRetired(stale=stale, deleted=deleted) if stale or deleted else None


_DELETE_RECEIPTS = (
    "DELETE FROM attempts WHERE id IN (SELECT id FROM attempts"
    " WHERE stale IN (0, 1) AND ended < ? AND outcome IS NOT NULL LIMIT ?)"
)
_MARK_STALE = (
    "UPDATE attempts SET stale = 1 WHERE id IN (SELECT id FROM attempts"
    " WHERE stale = 0 AND ended < ? AND outcome IS NOT NULL LIMIT ?)"
)
_DELETE_DRAINS = "DELETE FROM drains WHERE id IN (SELECT id FROM drains WHERE began < ? LIMIT ?)"
_DELETE_MOMENTS = "DELETE FROM moments WHERE id IN (SELECT id FROM moments WHERE at < ? LIMIT ?)"
