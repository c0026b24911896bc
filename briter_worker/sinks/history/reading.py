"""What readers ask of the history: receipts, what is under way, and what happened since.

Reading changes nothing and needs no worker. A history that does not exist yet is empty; one that cannot be
read raises HistoryUnreadableError with the reason.
"""

from __future__ import annotations

import json
import re
import sqlite3
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from briter_worker.job import format_time
from briter_worker.sinks.sqlite import open_to_read, storable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


class _Row(Protocol):
    """A row, with its values by name and in order."""

    def __getitem__(self, name: Any, /) -> Any:  # noqa: ANN401 - any value
        ...

    def __iter__(self) -> Iterator[Any]: ...


class HistoryUnreadableError(Exception):
    """The history cannot be read; the text says why."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of an attempt; `ended` None while it lasts."""

    name: str
    began: float
    ended: float | None


@dataclass(frozen=True, slots=True)
class Receipt:
    """One attempt: under way while `outcome` is None, else what became of it. Times are seconds."""

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
        """How long the author waited, in seconds: from the save, or from the time it was held until."""
        if self.outcome != "published" or self.ended is None or self.saved_at is None or self.dry_run:
            return None
        return max(0.0, self.ended - max(self.saved_at, self.due_at or 0.0))

    def as_json(self) -> dict[str, Any]:
        """For programs, in camelCase; `time` is when it ended, or began."""
        waited = self.save_to_remote
        return {
            "id": self.id,
            "time": _time(self.ended or self.began),
            "jobId": self.job_id,
            "slug": self.slug,
            "title": self.title,
            "attempt": self.attempt,
            "outcome": self.outcome,
            "commit": self.commit,
            "branch": self.branch,
            "remote": self.remote,
            "dryRun": self.dry_run,
            "durationMs": self.duration_ms,
            "savedAt": _time(self.saved_at),
            "scheduledFor": _time(self.due_at),
            "saveToRemoteMs": None if waited is None else round(waited * 1000),
            "href": self.href,
            "error": self.error,
            "failure": self.failure,
            "retryAt": _time(self.retry_at),
            "rejectedPaths": list(self.rejected_paths),
            "supersededBy": self.superseded_by,
            "stale": self.stale,
            "phase": self.phase,
            "done": self.done,
            "total": self.total,
            "phases": [
                {"name": phase.name, "began": _time(phase.began), "ended": _time(phase.ended)}
                for phase in self.phases
            ],
        }


@dataclass(frozen=True, slots=True)
class Moment:
    """One thing that happened, as the log tells it. `id` grows with time."""

    id: int
    at: float
    event: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Bucket:
    """What was settled within one span of time: counts by outcome, and how long authors waited."""

    began: float
    outcomes: dict[str, int]
    waits: tuple[float, ...]


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else format_time(seconds)


_RECEIPT = (
    "SELECT a.id, a.job_id, a.slug, a.title, a.attempt, a.saved_at, a.due_at, a.began, a.ended, a.outcome, "
    'a.duration_ms, a."commit", a.branch, a.remote, a.dry_run, a.href, a.error, a.failure, a.retry_at, '
    "a.rejected_paths, a.superseded_by, a.stale, d.phase, d.done, d.total, d.phases "
    "FROM attempts a LEFT JOIN drains d ON d.id = a.drain"
)


class History(ABC):
    """One reader. Safe in one thread at a time. What is asked is the same wherever the tables are."""

    _like = "LIKE"
    # With the plus no index is used for it: the newest rows are read from the end, and few of them.
    _fresh = "+a.stale = 0"
    _number = "CAST((a.ended - ?) / ? AS INTEGER)"
    _later = "max"
    """Of two values."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the file, or of the connection."""

    @abstractmethod
    def _ask(self, query: str, values: Sequence[object]) -> Sequence[_Row]:
        """The rows; none where there is no history yet. Raises HistoryUnreadableError."""

    def _ours(self) -> tuple[list[str], list[object]]:
        """What each row `a` has to be like to be of the site, where others' are beside them."""
        return [], []

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
        """What ended, newest first: at most `limit`, older than the receipt `before`."""
        wheres, values = self._ours()
        wheres.append("a.outcome IS NOT NULL")
        if not stale:
            wheres.append(self._fresh)
        if slug is not None:
            wheres.append("a.slug = ?")
            values.append(storable(slug))
        if search:
            text = re.sub(r"([\\%_])", r"\\\1", storable(search))
            like = rf"{self._like} ? ESCAPE '\'"
            wheres.append(f'(a.slug {like} OR a.title {like} OR a."commit" {like})')
            values += [f"%{text}%", f"%{text}%", f"{text}%"]
        if before is not None:
            wheres.append("a.id < ?")
            values.append(before)
        query = f"{_RECEIPT} WHERE {' AND '.join(wheres)}"
        newest = "ORDER BY a.id DESC LIMIT ?"
        if not outcomes:
            return self._receipts(f"{query} {newest}", (*values, limit))
        # Each has an index that ends with its newest; asked for together, all of them would be sorted.
        found = [
            receipt
            for outcome in outcomes
            for receipt in self._receipts(f"{query} AND a.outcome = ? {newest}", (*values, outcome, limit))
        ]
        return sorted(found, key=lambda receipt: receipt.id, reverse=True)[:limit]

    def attempts(self, job_id: str) -> list[Receipt]:
        """Every attempt of one job, newest first."""
        wheres, values = self._ours()
        where = " AND ".join([*wheres, "a.job_id = ?"])
        return self._receipts(
            f"{_RECEIPT} WHERE {where} ORDER BY a.id DESC LIMIT 100", (*values, storable(job_id))
        )

    def under_way(self) -> list[Receipt]:
        """Attempts that have no outcome: being worked on, or left by a worker that died."""
        wheres, values = self._ours()
        where = " AND ".join([*wheres, "a.outcome IS NULL"])
        return self._receipts(f"{_RECEIPT} WHERE {where} ORDER BY a.id LIMIT 1000", values)

    def moments(self, after: int, limit: int = 500) -> list[Moment]:
        """What happened after the moment `after`, in order."""
        wheres, values = self._ours()
        where = " AND ".join([*wheres, "a.id > ?"])
        rows = self._ask(
            f"SELECT a.id, a.at, a.event, a.data FROM moments a WHERE {where} ORDER BY a.id LIMIT ?",  # noqa: S608 - no values
            (*values, after, limit),
        )
        return [Moment(row["id"], row["at"], row["event"], json.loads(row["data"])) for row in rows]

    def latest(self) -> tuple[int, int]:
        """The newest and the oldest moment's id; 0 and 0 when there is none."""
        wheres, values = self._ours()
        where = f" WHERE {' AND '.join(wheres)}" if wheres else ""
        # Asked for one by one, each is the end of an index; together, a scan.
        rows = self._ask(
            f"SELECT (SELECT max(a.id) FROM moments a{where}) AS newest,"  # noqa: S608 - as above
            f" (SELECT min(a.id) FROM moments a{where}) AS oldest",
            (*values, *values),
        )
        return (rows[0]["newest"] or 0, rows[0]["oldest"] or 0) if rows else (0, 0)

    def counts(self) -> dict[tuple[str, bool], int]:
        """How many receipts there are, by outcome and whether it was a dry run."""
        wheres, values = self._ours()
        where = " AND ".join([*wheres, "a.outcome IS NOT NULL"])
        rows = self._ask(
            "SELECT a.outcome, a.dry_run, count(*) AS number FROM attempts a"  # noqa: S608 - as above
            f" WHERE {where} GROUP BY a.outcome, a.dry_run",
            values,
        )
        return {(row["outcome"], bool(row["dry_run"])): row["number"] for row in rows}

    def throughput(self, since: float, span: float) -> list[Bucket]:
        """What ended since then, in buckets of `span` seconds from then on, those in which something did."""
        wheres, values = self._ours()
        where = " AND ".join([*wheres, "a.stale IN (0, 1) AND a.ended >= ? AND a.outcome IS NOT NULL"])
        rows = self._ask(
            f"SELECT {self._number} AS number, a.outcome, "  # noqa: S608 - as above
            "CASE WHEN a.outcome = 'published' AND a.dry_run = 0 AND a.saved_at IS NOT NULL THEN "
            f"{self._later}(0.0, a.ended - {self._later}(a.saved_at, coalesce(a.due_at, 0.0))) END AS waited "
            f"FROM attempts a WHERE {where}",
            (since, span, *values, since),
        )
        counts: dict[int, dict[str, int]] = {}
        waits: dict[int, list[float]] = {}
        for number, outcome, waited in map(tuple, rows):
            bucket = counts.setdefault(number, {})
            bucket[outcome] = bucket.get(outcome, 0) + 1
            if waited is not None:
                waits.setdefault(number, []).append(waited)
        return [
            Bucket(since + number * span, counts[number], tuple(sorted(waits.get(number, ()))))
            for number in sorted(counts)
        ]

    def _receipts(self, query: str, values: Sequence[object]) -> list[Receipt]:
        return [_receipt(row) for row in self._ask(query, values)]


class FileHistory(History):
    """The history of a site that has a folder of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._inode = 0

    def close(self) -> None:
        """Let go of the file."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _ask(self, query: str, values: Sequence[object]) -> Sequence[sqlite3.Row]:
        with self._reading() as connection:
            return [] if connection is None else connection.execute(query, values).fetchall()

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection | None]:
        """The connection; None when there is no history yet. One that was put aside is let go of."""
        try:
            inode = self._path.stat().st_ino
        except FileNotFoundError:
            self.close()
            yield None
            return
        except OSError as error:
            raise HistoryUnreadableError(
                f"the history {self._path} cannot be read: {error.strerror}"
            ) from error
        if inode != self._inode:
            self.close()
        try:
            if self._connection is None:
                connection = open_to_read(self._path)
                if connection.execute("PRAGMA user_version").fetchone()[0] == 0:
                    connection.close()
                    yield None  # it is being made right now
                    return
                self._connection, self._inode = connection, inode
            yield self._connection
        except sqlite3.Error as error:
            self.close()
            raise HistoryUnreadableError(f"the history {self._path} cannot be read: {error}") from error


def _receipt(row: _Row) -> Receipt:
    return Receipt(
        id=row["id"],
        job_id=row["job_id"],
        slug=row["slug"],
        title=row["title"],
        attempt=row["attempt"],
        saved_at=row["saved_at"],
        due_at=row["due_at"],
        began=row["began"],
        ended=row["ended"],
        outcome=row["outcome"],
        duration_ms=row["duration_ms"],
        commit=row["commit"],
        branch=row["branch"],
        remote=row["remote"],
        dry_run=bool(row["dry_run"]),
        href=row["href"],
        error=row["error"],
        failure=row["failure"],
        retry_at=row["retry_at"],
        rejected_paths=tuple(json.loads(row["rejected_paths"])),
        superseded_by=row["superseded_by"],
        stale=bool(row["stale"]),
        phase=row["phase"],
        done=row["done"] or 0,
        total=row["total"] or 0,
        phases=tuple(Phase(*phase) for phase in json.loads(row["phases"] or "[]")),
    )
