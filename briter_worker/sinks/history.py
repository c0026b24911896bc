"""The history as commands and pages read it: receipts, running attempts, the live stream, the condition.

Reading needs no worker. A history that has not begun is empty; one that cannot be read raises StoreError.
"""

from __future__ import annotations

import json
import re
from itertools import takewhile
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, Json, PlainSerializer, TypeAdapter, ValidationError
from pydantic.alias_generators import to_camel

from briter_worker.errors import one_line
from briter_worker.events import FileChange  # noqa: TC001 - a field's type
from briter_worker.job import format_time
from briter_worker.sinks.recorder import waiting_time
from briter_worker.sinks.search import Wanted, search_of, words_of
from briter_worker.sinks.store import StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from briter_worker.sinks.store import Store

_MAX_ATTEMPTS = 100
_MAX_RUNNING = 1000
_MAX_OF_SLUG = 20
FAILED = ("failed", "dead-lettered", "nopaths", "quarantined", "interrupted")
"""The outcomes of attempts that failed."""


def _format_time(seconds: float | None) -> str | None:
    return None if seconds is None else format_time(seconds)


_Time = Annotated[float | None, PlainSerializer(_format_time)]
"""Seconds since 1970; ISO 8601 for programs."""


class Phase(NamedTuple):
    """One phase of a drain; `ended` is None while the phase lasts."""

    name: str
    began: float
    ended: float | None


class Receipt(BaseModel):
    """One attempt: under way while `outcome` is None. The fields are the columns of a row, in order."""

    model_config = ConfigDict(frozen=True, alias_generator=to_camel, validate_by_name=True)

    id: int
    job_id: str
    slug: str
    title: str
    author: str
    attempt: int
    saved_at: _Time
    due_at: _Time = Field(serialization_alias="scheduledFor")
    began: float | None = Field(exclude=True)
    ended: float | None = Field(exclude=True)
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
    retry_at: _Time
    rejected_paths: Json[tuple[str, ...]]
    superseded_by: str | None
    changes: Json[tuple[FileChange, ...]]
    """At most a thousand of the files that the commit changed."""
    files_changed: int
    signed_with: str | None
    phase: str | None
    done: int
    total: int
    phases: Json[tuple[Phase, ...]]

    @property
    def is_removal(self) -> bool:
        """Return True if the publication took the post off the remote."""
        return bool(self.changes) and all(each.deleted for each in self.changes)

    @property
    def save_to_remote(self) -> float | None:
        """Seconds from the save, or from the time it was scheduled for, until it was on the remote."""
        if self.outcome != "published" or self.dry_run:
            return None
        return waiting_time(self.ended, self.saved_at, self.due_at)

    def to_json(self) -> dict[str, Any]:
        """Return the receipt for programs, in camelCase; `time` is when it ended, or began."""
        waited = self.save_to_remote
        return self.model_dump(by_alias=True, exclude={"phases"}) | {
            "time": _format_time(self.ended or self.began),
            "changes": [each._asdict() for each in self.changes],
            "saveToRemoteMs": None if waited is None else round(waited * 1000),
            "phases": [
                {"name": name, "began": _format_time(began), "ended": _format_time(ended)}
                for name, began, ended in self.phases
            ],
        }


class Moment(NamedTuple):
    """One event of the live stream, with the keys of its log line. `id` grows with time."""

    id: int
    at: float
    event: str
    data: Json[dict[str, Any]]


class Condition(NamedTuple):
    """The site condition: an environment failure; without a failure, when the last one ended."""

    failure: str | None
    text: str | None
    fix: str
    changed_at: float


class Tally(NamedTuple):
    """Number of an outcome's occurrences, and seconds that authors waited for them in all."""

    site: str
    kind: str
    outcome: str
    number: int
    waits: int
    waited: float


_MOMENTS = TypeAdapter(list[Moment])
_COLUMNS = [
    f'a."{name}"' for name in Receipt.model_fields if name not in {"phase", "done", "total", "phases"}
]
_RECEIPT = (
    f"SELECT {', '.join(_COLUMNS)}, d.phase, COALESCE(d.done, 0), COALESCE(d.total, 0),"  # noqa: S608 - our names
    " COALESCE(d.phases, '[]') FROM attempts a LEFT JOIN drains d ON d.id = a.drain WHERE a.site = ?"
)


class History:
    """Reads the history of one site. Safe in several threads. Raises StoreError."""

    def __init__(self, store: Store, site: str = "") -> None:
        self._store = store
        self._site = site
        self._search = search_of(store, site)

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def receipts(
        self,
        *,
        slug: str | None = None,
        outcomes: Sequence[str] = (),
        search: str = "",
        before: int | None = None,
        limit: int = 50,
    ) -> list[Receipt]:
        """Return ended attempts, newest first: at most `limit`, older than the receipt `before`.

        `search` has words, in any case, of the post, its title, author and commit, or a failure's reason, or
        their beginnings. Raises IndexingError while the search's index is being made.
        """
        if search:
            wanted = Wanted(words_of(search), slug, outcomes, before, limit)
            found = self._search.ids(wanted) if wanted.words else []
            return self._receipts(f"AND a.id IN ({_marks(found)}) ORDER BY a.id DESC", *found)
        query, values = "AND a.outcome IS NOT NULL", []  # type: tuple[str, list[Any]]
        if slug is not None:
            query += " AND a.slug = ?"
            values.append(slug)
        if before is not None:
            query += " AND a.id < ?"
            values.append(before)
        if outcomes:
            query += f" AND a.outcome IN ({_marks(outcomes)})"
            values += outcomes
        return self._receipts(f"{query} ORDER BY a.id DESC LIMIT ?", *values, limit)

    def failures(self, job_ids: Sequence[str]) -> dict[str, int]:
        """Return how often each of these jobs failed, if it did."""
        query = (
            "SELECT job_id, count(*) FROM attempts WHERE site = ?"  # noqa: S608 - marks only
            f" AND job_id IN ({_marks(job_ids)}) AND outcome IN ({_marks(FAILED)}) GROUP BY job_id"
        )
        return dict(self._query(query, *job_ids, *FAILED))

    def attempts(self, job_id: str) -> list[Receipt]:
        """Return the attempts of one job, newest first."""
        return self._receipts("AND a.job_id = ? ORDER BY a.id DESC LIMIT ?", job_id, _MAX_ATTEMPTS)

    def of_post(self, wanted: str) -> list[Receipt]:
        """Return the attempts of this job, else the latest of this slug, newest first, also a running one."""
        latest = "AND a.slug = ? ORDER BY a.id DESC LIMIT ?"
        return self.attempts(wanted) or self._receipts(latest, wanted, _MAX_OF_SLUG)

    def under_way(self) -> list[Receipt]:
        """Return attempts without an outcome: running, or left by a dead worker."""
        return self._receipts("AND a.outcome IS NULL ORDER BY a.id LIMIT ?", _MAX_RUNNING)

    def moments(self, after: int, limit: int = 500) -> list[Moment]:
        """Return what happened after the moment `after`, in order."""
        return self._moments("id > ? ORDER BY id LIMIT ?", after, limit)

    def last_moment(self, event: str) -> Moment | None:
        """Return the newest moment of this kind."""
        return next(iter(self._moments("event = ? ORDER BY id DESC LIMIT 1", event)), None)

    def actions(self, limit: int) -> list[Moment]:
        """Return what people did, newest first."""
        return self._moments("event = 'steered' ORDER BY id DESC LIMIT ?", limit)

    def runs(self, limit: int) -> list[float]:
        """Return when workers that cron starts ended, latest first; none since a worker that stayed."""
        stops = self._moments("event = 'worker-stopped' ORDER BY id DESC LIMIT ?", limit)
        return [each.at for each in takewhile(lambda stop: stop.data.get("once"), stops)]

    def _moments(self, which: str, *values: object) -> list[Moment]:
        query = f"SELECT id, at, event, data FROM moments WHERE site = ? AND {which}"  # noqa: S608 - our own
        rows = self._query(query, *values)
        try:
            return _MOMENTS.validate_python([tuple(row) for row in rows])
        except ValidationError:
            raise _damaged() from None

    def latest(self) -> tuple[int, int]:
        """Return the ids of the newest and the oldest moment; 0 and 0 if there is none."""
        # Asked for one by one, each is the end of an index; together, a scan.
        newest = self._query("SELECT max(id) FROM moments WHERE site = ?")
        oldest = self._query("SELECT min(id) FROM moments WHERE site = ?")
        return (newest[0][0] or 0, oldest[0][0] or 0) if newest and oldest else (0, 0)

    def most_republished(self, since: float, gap: float) -> tuple[str, int]:
        """Return the slug published most often within `gap` seconds of the time before, and how often."""
        rows = self._query(
            "SELECT slug, count(*) FROM ("
            "SELECT slug, ended - lag(ended) OVER (PARTITION BY slug ORDER BY ended) AS gap FROM attempts"
            " WHERE site = ? AND ended >= ? AND outcome = 'published' AND dry_run = 0"
            ") AS gaps WHERE gap <= ? GROUP BY slug ORDER BY 2 DESC, 1 LIMIT 1",
            since,
            gap,
        )
        return (rows[0][0], rows[0][1]) if rows else ("", 0)

    def slug_of(self, path: str) -> str | None:
        """Return the slug of the last publication that changed the file."""
        query = (
            "SELECT slug FROM attempts WHERE site = ? AND outcome = 'published' AND changes LIKE ? ESCAPE '!'"
            " ORDER BY id DESC LIMIT 1"
        )
        text = re.sub("([!%_])", r"!\1", json.dumps(one_line(path)))
        rows = self._query(query, f"%[{text},%")
        return str(rows[0][0]) if rows else None

    def partly_published(self) -> list[str]:
        """Return the posts whose newest publication left paths out, newest first.

        Covers the last thousand attempts, so that it costs the same in a long history.
        """
        rows = self._query(
            "SELECT slug, rejected_paths FROM"
            " (SELECT * FROM attempts WHERE site = ? ORDER BY id DESC LIMIT 1000) AS latest"
            " WHERE dry_run = 0 AND (outcome = 'published' OR outcome = 'nochange' AND rejected_paths = '[]')"
            " ORDER BY id DESC"
        )
        newest = dict(reversed(rows))
        return [slug for slug, _ in rows if newest.pop(slug, "[]") != "[]"]

    def condition(self) -> Condition | None:
        """Return the site condition, or when the last one ended; None if nothing is known."""
        rows = self._query("SELECT failure, condition, fix, changed_at FROM conditions WHERE site = ?")
        return Condition(*rows[0]) if rows else None

    def tallies(self) -> list[Tally]:
        """Return the counters of the site."""
        return [each for each in tallies(self._store) if each.site == self._site]

    def _receipts(self, query: str, *values: object) -> list[Receipt]:
        rows = self._query(f"{_RECEIPT} {query}", *values)
        try:
            return [Receipt(**dict(zip(Receipt.model_fields, row, strict=True))) for row in rows]
        except ValidationError:
            raise _damaged() from None

    def _query(self, query: str, *values: object) -> list[Any]:
        return self._store.query(query, [self._site, *values])


def _marks(values: Sequence[object]) -> str:
    """Return what stands in `IN (…)` for these values."""
    return ", ".join("?" * len(values)) or "NULL"


def tallies(store: Store) -> list[Tally]:
    """Return the counters of all sites. Raises StoreError."""
    rows = store.query("SELECT site, kind, outcome, number, waits, waited FROM tallies ORDER BY 1, 2, 3")
    return [Tally(*row) for row in rows]


def _damaged() -> StoreError:
    return StoreError("the history has a row that this program did not write", "move history.db away")
