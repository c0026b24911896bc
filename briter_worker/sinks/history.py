"""The history as commands and pages read it: receipts, running attempts, the live stream, the condition.

Reading needs no worker. A history that does not exist yet is empty; one that cannot be read raises
HistoryUnreadableError.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic.alias_generators import to_camel

from briter_worker.errors import FixableError
from briter_worker.job import format_time
from briter_worker.sinks.store import StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from briter_worker.sinks.store import Store

Parsed = TypeVar("Parsed")
_MAX_ATTEMPTS = 100
_MAX_RUNNING = 1000
_DAMAGED = ("the history has a row that this program did not write", "move history.db away")


class HistoryUnreadableError(FixableError):
    """The history cannot be read."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a drain; `ended` is None while the phase lasts."""

    name: str
    began: float
    ended: float | None


@dataclass(frozen=True, slots=True)
class Receipt:
    """One attempt: under way while `outcome` is None. Times are seconds since 1970."""

    id: int
    job_id: str
    slug: str
    title: str
    attempt: int
    saved_at: float | None
    due_at: float | None
    began: float | None
    ended: float | None
    outcome: str | None
    duration_ms: int | None
    commit: str | None
    branch: str | None
    remote: str | None
    dry_run: bool
    href: str | None
    error: str | None
    failure: str | None
    fix: str | None
    retry_at: float | None
    rejected_paths: tuple[str, ...]
    superseded_by: str | None
    stale: bool
    phase: str | None
    done: int
    total: int
    phases: tuple[Phase, ...]

    @property
    def save_to_remote(self) -> float | None:
        """Seconds from the save, or from the time it was scheduled for, until it was on the remote."""
        if self.outcome != "published" or self.dry_run:
            return None
        return waiting_time(self.ended, self.saved_at, self.due_at)

    def to_json(self) -> dict[str, Any]:
        """Return the receipt for programs, in camelCase; `time` is when it ended, or began."""
        found: dict[str, Any] = {"time": _time(self.ended or self.began)}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "due_at":
                found["scheduledFor"] = _time(value)
            elif field.name in ("saved_at", "retry_at"):
                found[to_camel(field.name)] = _time(value)
            elif field.name not in ("began", "ended"):
                found[to_camel(field.name)] = list(value) if isinstance(value, tuple) else value
        waited = self.save_to_remote
        phases = [
            {"name": phase.name, "began": _time(phase.began), "ended": _time(phase.ended)}
            for phase in self.phases
        ]
        return found | {"saveToRemoteMs": None if waited is None else round(waited * 1000), "phases": phases}


@dataclass(frozen=True, slots=True)
class Moment:
    """One event of the live stream, with the keys of its log line. `id` grows with time."""

    id: int
    at: float
    event: str
    data: dict[str, Any]

    @property
    def fix(self) -> str:
        """Return what to do about it; empty for most events."""
        return str(self.data.get("fix", ""))


@dataclass(frozen=True, slots=True)
class Bucket:
    """The outcomes of one span of time, and the waiting times of its publications in seconds, sorted."""

    began: float
    outcomes: dict[str, int]
    waits: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Condition:
    """The site condition: an environment failure; without a failure, when the last one ended."""

    failure: str | None
    text: str
    fix: str
    changed_at: float


@dataclass(frozen=True, slots=True)
class Tally:
    """How often an outcome occurred, and how long authors waited for it in all, in seconds."""

    site: str
    kind: str
    outcome: str
    number: int
    waits: int
    waited: float


def waiting_time(ended: float | None, saved_at: float | None, due_at: float | None) -> float | None:
    """Return how long the author waited, in seconds."""
    if ended is None or saved_at is None:
        return None
    return max(0.0, ended - max(saved_at, due_at or 0.0))


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else format_time(seconds)


_RECEIPT = (
    "SELECT a.id, a.job_id, a.slug, a.title, a.attempt, a.saved_at, a.due_at, a.began, a.ended, a.outcome,"
    ' a.duration_ms, a."commit", a.branch, a.remote, a.dry_run, a.href, a.error, a.failure, a.fix,'
    " a.retry_at, a.rejected_paths, a.superseded_by, a.stale, d.phase, d.done, d.total, d.phases"
    " FROM attempts a LEFT JOIN drains d ON d.id = a.drain WHERE a.site = ?"
)


class History:
    """Reads the history of one site. Safe in several threads."""

    def __init__(self, store: Store, site: str = "") -> None:
        self._store = store
        self._site = site

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def receipts(
        self,
        *,
        slug: str | None = None,
        outcomes: Sequence[str] = (),
        search: str | None = None,
        before: int | None = None,
        limit: int = 50,
        stale: bool = False,
    ) -> list[Receipt]:
        """Return ended attempts, newest first: at most `limit`, older than the receipt `before`."""
        query, values = f"{_RECEIPT} AND a.outcome IS NOT NULL", [self._site]  # type: tuple[str, list[Any]]
        if not stale:
            query += " AND +a.stale = 0"  # the plus keeps the index of old receipts out: few are newest
        if slug is not None:
            query += " AND a.slug = ?"
            values.append(slug)
        if search:
            text = re.sub(r"([\\%_])", r"\\\1", search)
            like = rf"{self._store.like} ? ESCAPE '\'"
            query += f' AND (a.slug {like} OR a.title {like} OR a."commit" {like})'
            values += [f"%{text}%", f"%{text}%", f"{text}%"]
        if before is not None:
            query += " AND a.id < ?"
            values.append(before)
        newest = "ORDER BY a.id DESC LIMIT ?"
        if not outcomes:
            return self._receipts(f"{query} {newest}", [*values, limit])
        # Each outcome has an index that ends with its newest; asked for together, all rows would be sorted.
        found = [
            receipt
            for outcome in outcomes
            for receipt in self._receipts(f"{query} AND a.outcome = ? {newest}", [*values, outcome, limit])
        ]
        return sorted(found, key=lambda receipt: receipt.id, reverse=True)[:limit]

    def attempts(self, job_id: str) -> list[Receipt]:
        """Return the attempts of one job, newest first."""
        query = f"{_RECEIPT} AND a.job_id = ? ORDER BY a.id DESC LIMIT ?"
        return self._receipts(query, [self._site, job_id, _MAX_ATTEMPTS])

    def under_way(self) -> list[Receipt]:
        """Return attempts without an outcome: running, or left by a dead worker."""
        query = f"{_RECEIPT} AND a.outcome IS NULL ORDER BY a.id LIMIT ?"
        return self._receipts(query, [self._site, _MAX_RUNNING])

    def moments(self, after: int, limit: int = 500) -> list[Moment]:
        """Return what happened after the moment `after`, in order."""
        rows = self._query(
            "SELECT id, at, event, data FROM moments WHERE site = ? AND id > ? ORDER BY id LIMIT ?",
            [self._site, after, limit],
        )
        return [Moment(number, at, event, _parse(data, dict)) for number, at, event, data in rows]

    def latest(self) -> tuple[int, int]:
        """Return the ids of the newest and the oldest moment; 0 and 0 if there is none."""
        # Asked for one by one, each is the end of an index; together, a scan.
        rows = self._query(
            "SELECT (SELECT max(id) FROM moments WHERE site = ?),"
            " (SELECT min(id) FROM moments WHERE site = ?)",
            [self._site, self._site],
        )
        return (rows[0][0] or 0, rows[0][1] or 0) if rows else (0, 0)

    def throughput(self, since: float, span: float) -> list[Bucket]:
        """Return what ended since then, in buckets of `span` seconds, without empty ones."""
        rows = self._query(
            "SELECT ended, outcome, dry_run, saved_at, due_at FROM attempts"
            " WHERE site = ? AND stale IN (0, 1) AND ended >= ? AND outcome IS NOT NULL",
            [self._site, since],
        )
        buckets: dict[int, tuple[dict[str, int], list[float]]] = {}
        for ended, outcome, dry_run, saved_at, due_at in rows:
            counts, waits = buckets.setdefault(int((ended - since) / span), ({}, []))
            counts[outcome] = counts.get(outcome, 0) + 1
            waited = waiting_time(ended, saved_at, due_at)
            if outcome == "published" and not dry_run and waited is not None:
                waits.append(waited)
        return [
            Bucket(since + number * span, counts, tuple(sorted(waits)))
            for number, (counts, waits) in sorted(buckets.items())
        ]

    def condition(self) -> Condition | None:
        """Return the site condition, or when the last one ended; None if nothing is known."""
        rows = self._query(
            "SELECT failure, condition, fix, changed_at FROM conditions WHERE site = ?", [self._site]
        )
        return Condition(rows[0][0], rows[0][1] or "", rows[0][2], rows[0][3]) if rows else None

    def tallies(self) -> list[Tally]:
        """Return the counters of the site. Raises StoreError."""
        return [each for each in tallies(self._store) if each.site == self._site]

    def _receipts(self, query: str, values: Sequence[Any]) -> list[Receipt]:
        return [_receipt(row) for row in self._query(query, values)]

    def _query(self, query: str, values: Sequence[Any]) -> list[Any]:
        try:
            return self._store.query(query, values)
        except StoreError as error:
            raise HistoryUnreadableError(error.message, error.fix) from error


def tallies(store: Store) -> list[Tally]:
    """Return the counters of all sites. Raises StoreError."""
    rows = store.query("SELECT site, kind, outcome, number, waits, waited FROM tallies ORDER BY 1, 2, 3")
    return [Tally(*row) for row in rows]


def _receipt(row: Sequence[Any]) -> Receipt:
    facts, (rejected, superseded_by, stale, phase, done, total, phases) = list(row[:20]), row[20:]
    facts[14] = bool(facts[14])  # dry_run
    try:
        ran_through = tuple(Phase(*each) for each in _parse(phases or "[]", list))
    except TypeError:
        raise HistoryUnreadableError(*_DAMAGED) from None
    paths = tuple(map(str, _parse(rejected, list)))
    values = (*facts, paths, superseded_by, bool(stale), phase, done or 0, total or 0, ran_through)
    return Receipt(*values)


def _parse(text: str, kind: type[Parsed]) -> Parsed:
    """Return the JSON value. A value of another kind was not written by this program."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, kind):
        raise HistoryUnreadableError(*_DAMAGED)
    return value
