"""What each event changes in the history's tables."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from briter_worker.errors import for_people
from briter_worker.events import (
    Cancelled,
    DeadLettered,
    Event,
    Failed,
    JobOutcome,
    JobStarted,
    NoPaths,
    Progress,
    Published,
    Quarantined,
    Superseded,
)
from briter_worker.sinks.log import entry
from briter_worker.sinks.sqlite import storable

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence

INTERRUPTED = "interrupted"
FIRST_PHASE = "validate"
_MOST_PHASES = 100
"""A batch that the remote refuses in part goes through many: halved, each half pushed."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a site publishes to: part of every receipt."""

    branch: str
    remote: str
    href_template: str = ""

    def href(self, slug: str) -> str | None:
        """The published post's address, when the site has a template for it."""
        from urllib.parse import quote  # noqa: PLC0415 - not for a drain without a template

        return (
            self.href_template.replace("{slug}", quote(slug, errors="replace"))
            if self.href_template
            else None
        )


class Recorder:
    """Turns events into rows, within a transaction that the caller holds."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._drain: int | None = None
        self._open: set[str] = set()
        """The jobs of the running drain that have no outcome yet."""
        self._beginning = False
        """Whether the last that the drain told was a start: it tells all of them before anything else."""

    def forget(self) -> None:
        """The transaction was given up: what it began does not exist."""
        self._drain = None
        self._open.clear()

    def record(self, connection: sqlite3.Connection, events: Sequence[tuple[float, Event]]) -> None:
        """Store these, in order."""
        for at, event in events:
            match event:
                case Progress():
                    self._progress(connection, at, event)
                    continue
                case JobStarted():
                    self._start(connection, at, event)
                case JobOutcome() | Superseded() | Cancelled() | Quarantined():
                    is_news = self._end(connection, ended(event, at, self._target))
                    self._leave(connection, at, event.job_id)
                    if not is_news:
                        continue
                case _:
                    pass
            connection.execute(
                "INSERT INTO moments (at, event, data) VALUES (?, ?, ?)",
                (at, event.name, told(event, at)),
            )

    def _start(self, connection: sqlite3.Connection, at: float, event: JobStarted) -> None:
        # Of an earlier one, some may be open for ever: they were put back.
        if not self._beginning or self._drain is None:
            self._open.clear()
            phases = json.dumps([[FIRST_PHASE, at, None]])
            self._drain = connection.execute(
                "INSERT INTO drains (began, phase, phases) VALUES (?, ?, ?)", (at, FIRST_PHASE, phases)
            ).lastrowid
        self._beginning = True
        self._open.add(event.job_id)
        # One that its worker did not live to end.
        connection.execute(
            "UPDATE attempts SET outcome = ?, ended = ? WHERE job_id = ? AND outcome IS NULL",
            (INTERRUPTED, at, storable(event.job_id)),
        )
        self._insert(connection, drain=self._drain, **begun(event, at))

    def _progress(self, connection: sqlite3.Connection, at: float, event: Progress) -> None:
        self._beginning = False
        if self._drain is None:
            return
        phases = self._phases(connection)
        follow(phases, event, at)
        connection.execute(
            "UPDATE drains SET phase = ?, done = ?, total = ?, phases = ? WHERE id = ?",
            (event.phase, event.done, event.total, json.dumps(phases), self._drain),
        )

    def _leave(self, connection: sqlite3.Connection, at: float, job_id: str) -> None:
        """Its job has an outcome; with the last one's, the drain's last phase ends."""
        self._beginning = False
        if self._drain is None or job_id not in self._open:
            return
        self._open.remove(job_id)
        if not self._open:
            phases = self._phases(connection)
            phases[-1][2] = at
            connection.execute("UPDATE drains SET phases = ? WHERE id = ?", (json.dumps(phases), self._drain))

    def _phases(self, connection: sqlite3.Connection) -> list[list[Any]]:
        row = connection.execute("SELECT phases FROM drains WHERE id = ?", (self._drain,)).fetchone()
        phases: list[list[Any]] = json.loads(row[0])
        return phases

    def _end(self, connection: sqlite3.Connection, facts: dict[str, Any]) -> bool:
        """Whether that was not known yet: a worker may die when it is, and the job has not left the queue."""
        names = ", ".join(f'"{name}" = :{name}' for name in facts if name not in ("job_id", "slug"))
        # A batch that a dead worker left is settled without a new start.
        changed = connection.execute(
            f"UPDATE attempts SET {names} WHERE job_id = :job_id AND outcome IS NULL",  # noqa: S608 - our own names
            facts,
        ).rowcount
        if not changed:
            if facts["outcome"] == Published.name and self._is_known(connection, facts):
                return False
            self._insert(connection, **facts)
        return True

    def _is_known(self, connection: sqlite3.Connection, facts: dict[str, Any]) -> bool:
        query = 'SELECT 1 FROM attempts WHERE job_id = :job_id AND "commit" = :commit AND outcome = :outcome'
        return connection.execute(query, facts).fetchone() is not None

    def _insert(self, connection: sqlite3.Connection, **row: object) -> None:
        names = ", ".join(f'"{name}"' for name in row)
        marks = ", ".join(f":{name}" for name in row)
        connection.execute(f"INSERT INTO attempts ({names}) VALUES ({marks})", row)  # noqa: S608 - as above


def begun(event: JobStarted, at: float) -> dict[str, Any]:
    """What is known of an attempt when it begins."""
    return {
        "job_id": storable(event.job_id),
        "slug": storable(event.slug),
        "title": storable(event.title),
        "attempt": event.attempt,
        "saved_at": event.saved_at,
        "due_at": event.due_at,
        "began": at,
        "dry_run": int(event.dry_run),
    }


def ended(
    event: JobOutcome | Superseded | Cancelled | Quarantined, at: float, target: Target
) -> dict[str, Any]:
    """What its end adds to that."""
    facts = _outcome(event) if isinstance(event, JobOutcome) else _fate(event)
    facts |= {"job_id": storable(event.job_id), "slug": storable(event.slug)}
    facts |= {"outcome": event.name, "ended": at}
    if isinstance(event, Published):
        facts["href"] = target.href(event.slug)
    if isinstance(event, JobOutcome):
        facts |= {"branch": target.branch, "remote": target.remote}
    return facts


def follow(phases: list[list[Any]], event: Progress, at: float) -> None:
    """Add to a drain's phases what the event says of them.

    A phase lasts until the next one: when git has sent the last object, the remote has yet to take it.
    """
    if phases[-1][0] != event.phase and len(phases) < _MOST_PHASES:
        phases[-1][2] = at
        phases.append([event.phase, at, None])
    if event.total and event.done >= event.total:
        phases[-1][2] = at


def told(event: Event, at: float) -> str:
    """The event as the live stream tells it."""
    return json.dumps(entry(event, at), ensure_ascii=False, separators=(",", ":"))


def _outcome(event: JobOutcome) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "attempt": event.attempt,
        "dry_run": int(event.dry_run),
        "duration_ms": event.duration_ms,
        "rejected_paths": json.dumps([for_people(path) for path in event.rejected_paths]),
    }
    match event:
        case Published():
            facts["commit"] = event.commit
        case Failed():
            facts |= {
                "error": for_people(event.error),
                "failure": event.failure,
                "retry_at": event.retry_at,
            }
        case DeadLettered():
            facts |= {"error": for_people(event.error), "failure": event.failure}
        case NoPaths():
            facts |= {"error": for_people(event.error), "failure": NoPaths.name}
        case _:
            pass
    return facts


def _fate(event: Superseded | Cancelled | Quarantined) -> dict[str, Any]:
    match event:
        case Superseded():
            return {"superseded_by": storable(event.superseded_by)}
        case Quarantined():
            return {"error": for_people(event.error)}
        case Cancelled():
            return {}
