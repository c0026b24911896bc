"""Writes the history of all sites of a cluster, for one host: events as they come, many in one transaction.

Of one site, moments become visible in the order of their ids, as whoever writes some holds the site's own
lock from before they get their ids until they are committed. Who has seen one has seen all before it.
"""

from __future__ import annotations

import copy
import json
import time
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from briter_worker.events import (
    Cancelled,
    Event,
    HistoryRetired,
    JobOutcome,
    JobStarted,
    Progress,
    Published,
    Quarantined,
    Superseded,
)
from briter_worker.sinks.history.recording import FIRST_PHASE, INTERRUPTED, begun, ended, follow, told
from briter_worker.sinks.history.sink import Pace
from briter_worker.sinks.postgres.database import RowStoring, storable_row
from briter_worker.sinks.postgres.retention import retire

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from briter_worker.ports import EventSink
    from briter_worker.sinks.history.recording import Target
    from briter_worker.sinks.history.retention import Retention
    from briter_worker.sinks.postgres.database import Connection, Database

_RETIRE_EVERY = 3600.0
_MOMENT = 0.25
"""As long may pass until it is to be seen that a drain has begun, or gone on."""
_LOCKS = 0x62726974
"""Of the two numbers of an advisory lock, the one that says what it is for."""
_ANY_KIND = "any"
_BEGUN = "drain, job_id, slug, title, attempt, saved_at, due_at, began, dry_run"
_ENDED = (
    "outcome, ended, attempt, duration_ms, commit, branch, remote, dry_run, href, error, failure, retry_at,"
    " rejected_paths, superseded_by"
)
_ALL = f"{_BEGUN}, {_ENDED.replace(' attempt,', '').replace(' dry_run,', '')}"
_DEFAULTS = {"title": "", "attempt": 0, "dry_run": 0, "rejected_paths": "[]"}
_LOCK = (
    "SELECT pg_advisory_xact_lock(%s, hashtext(site)) FROM"
    " (SELECT DISTINCT site FROM unnest(%s::text[]) AS site ORDER BY site) AS sites"
)
_CUT_OFF = (
    "UPDATE attempts a SET outcome = %s, ended = n.at FROM unnest(%s::text[], %s::text[], %s::float8[])"
    " AS n (site, job_id, at) WHERE a.site = n.site AND a.job_id = n.job_id AND a.outcome IS NULL"
)
_INSERT = (
    f"INSERT INTO attempts (site, {_ALL}) SELECT site, {_ALL}"  # noqa: S608 - names of our own
    " FROM json_populate_recordset(NULL::attempts, %s::json)"
)
# What is not said of the end stays as the beginning had it.
_END = (
    "UPDATE attempts a SET "  # noqa: S608 - as above
    + ", ".join(f"{name} = coalesce(n.{name}, a.{name})" for name in _ENDED.split(", "))
    + " FROM json_populate_recordset(NULL::attempts, %s::json) AS n"
    " WHERE a.site = n.site AND a.job_id = n.job_id AND a.outcome IS NULL RETURNING a.site, a.job_id"
)
_DRAINS = (
    "INSERT INTO drains (id, began, phase, done, total, phases)"
    " SELECT id, began, phase, done, total, phases FROM json_populate_recordset(NULL::drains, %s::json)"
    " ON CONFLICT (id) DO UPDATE SET phase = excluded.phase, done = excluded.done, total = excluded.total,"
    " phases = excluded.phases"
)
_MOMENTS = (
    "INSERT INTO moments (site, at, event, data)"
    " SELECT * FROM unnest(%s::text[], %s::float8[], %s::text[], %s::text[])"
)
_TALLIES = (
    "INSERT INTO tallies AS t (site, kind, outcome, number, waits, waited)"
    " SELECT * FROM unnest(%s::text[], %s::text[], %s::text[], %s::bigint[], %s::bigint[], %s::float8[])"
    " ORDER BY 1, 2, 3 ON CONFLICT (site, kind, outcome) DO UPDATE SET number = t.number + excluded.number,"
    " waits = t.waits + excluded.waits, waited = t.waited + excluded.waited"
)


_Part = tuple[str, tuple[Any, ...]]
"""A statement, and its values."""


@dataclass(frozen=True, slots=True)
class Told:
    """What happened on a site, and when."""

    site: str
    target: Target
    at: float
    event: Event
    teller: int = 0
    """Another one for each drain."""


@dataclass(slots=True)
class _Drain:
    """A drain of a site on this host."""

    teller: int
    id: str
    began: float
    phases: list[list[Any]]
    phase: str = FIRST_PHASE
    done: int = 0
    total: int = 0
    open: dict[str, tuple[float, float | None]] = field(default_factory=dict)
    """Attempts that have no outcome yet, by their jobs: when each was saved, and until when it was held."""

    def as_row(self) -> dict[str, Any]:
        """As the table has it."""
        names = ("id", "began", "phase", "done", "total")
        return {name: getattr(self, name) for name in names} | {"phases": json.dumps(self.phases)}


class RowHistorySink(RowStoring[Told]):
    """Stores what happens on any site of the cluster, within a moment."""

    def __init__(
        self,
        database: Database,
        retention: Retention,
        *,
        announce: EventSink,
        complain: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(database, what="history", complain=complain)
        self._retention = retention
        self._announce = announce
        self._clock = clock
        self._running: dict[str, _Drain] = {}
        self._tellers = count(1)
        self._retire_at = 0.0

    def of(self, site: str, target: Target) -> Callable[[Event], None]:
        """What takes note of the site's events, for one drain of it. In one thread at a time."""
        pace = Pace()
        teller = next(self._tellers)

        def note(event: Event) -> None:
            if not isinstance(event, Progress) or pace.is_news(event):
                # Most drains have ended by then: they are stored at once, with how they went.
                within = _MOMENT if isinstance(event, JobStarted | Progress) else 0.0
                self.put(Told(site, target, self._clock(), event, teller), within=within)

        return note

    def is_lasting(self, item: Told) -> bool:
        """What became of something; how far it is, will be written again in a moment."""
        return not isinstance(item.event, Progress | JobStarted)

    def record(self, connection: Connection, items: list[Told]) -> None:
        """Store these, in order."""
        page = _Page(copy.deepcopy(self._running))
        for item in items:
            page.add(item)
        page.write(connection)
        self._running = page.running

    def rest(self) -> None:
        """Let old receipts go, now and then."""
        if time.monotonic() < self._retire_at:
            return
        retired = retire(self._database, self._retention, self._clock())
        if retired.is_whole:
            self._retire_at = time.monotonic() + _RETIRE_EVERY
        if retired.stale or retired.deleted:
            self._announce(HistoryRetired(stale=retired.stale, deleted=retired.deleted))


class _Page:
    """What one transaction writes: each attempt once, however much of it happened since the last one."""

    def __init__(self, running: dict[str, _Drain]) -> None:
        self.running = running
        self._cut_off: list[tuple[str, str, float]] = []
        self._attempts: dict[tuple[str, str], dict[str, Any]] = {}
        """Those begun here that have no outcome, by site and job."""
        self._new: list[dict[str, Any]] = []
        self._ends: dict[tuple[str, str], dict[str, Any]] = {}
        """Of attempts that were begun before."""
        self._drains: dict[str, _Drain] = {}
        self._moments: list[tuple[str, float, str, str]] = []
        self._tallies: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0, 0, 0.0])

    def add(self, item: Told) -> None:
        """This happened."""
        match item.event:
            case Progress():
                drain = self._drain_of(item)
                if drain is not None:
                    follow(drain.phases, item.event, item.at)
                    drain.phase, drain.done, drain.total = item.event.phase, item.event.done, item.event.total
                    self._drains[drain.id] = drain
                return
            case JobStarted():
                self._start(item, item.event)
            case JobOutcome() | Superseded() | Cancelled() | Quarantined():
                self._end(item, item.event)
            case _:
                pass
        self._moments.append((item.site, item.at, item.event.name, storable_row(told(item.event, item.at))))

    def _start(self, item: Told, event: JobStarted) -> None:
        drain = self._drain_of(item)
        if drain is None:
            drain = _Drain(item.teller, uuid4().hex, item.at, [[FIRST_PHASE, item.at, None]])
            self.running[item.site] = drain
        self._drains[drain.id] = drain
        drain.open[event.job_id] = (event.saved_at, event.due_at)
        facts = _row(item.site, begun(event, item.at)) | {"drain": drain.id}
        key = (item.site, facts["job_id"])
        # One that its worker did not live to end.
        if key in self._attempts:
            self._attempts[key] |= {"outcome": INTERRUPTED, "ended": item.at}
        elif key not in self._ends:
            self._cut_off.append((*key, item.at))
        self._attempts[key] = facts
        self._new.append(facts)

    def _drain_of(self, item: Told) -> _Drain | None:
        """The drain it is part of; one that lost the site is nobody's."""
        drain = self.running.get(item.site)
        return drain if drain is not None and drain.teller == item.teller else None

    def _end(self, item: Told, event: JobOutcome | Superseded | Cancelled | Quarantined) -> None:
        facts = _row(item.site, ended(event, item.at, item.target))
        key = (item.site, facts["job_id"])
        begun_here = self._attempts.pop(key, None)
        if begun_here is not None:
            begun_here |= facts
        elif key in self._ends:
            # A batch that a dead worker left is settled without a new start.
            self._new.append(facts)
        else:
            self._ends[key] = facts
            self._new.append(facts)  # in its turn, should nothing have been begun
        drain = self._drain_of(item)
        times = drain.open.pop(event.job_id, None) if drain is not None else None
        if drain is not None and not drain.open:
            drain.phases[-1][2] = item.at
            self._drains[drain.id] = drain
            del self.running[item.site]
        self._count(item, event, times)

    def _count(
        self,
        item: Told,
        event: JobOutcome | Superseded | Cancelled | Quarantined,
        times: tuple[float, float | None] | None,
    ) -> None:
        kind = event.kind if isinstance(event, JobOutcome) else _ANY_KIND
        tally = self._tallies[item.site, storable_row(kind), event.name]
        tally[0] += 1
        if isinstance(event, Published) and not event.dry_run and times is not None:
            saved_at, due_at = times
            tally[1] += 1
            tally[2] += max(0.0, item.at - max(saved_at, due_at or 0.0))

    def write(self, connection: Connection) -> None:
        """Put it all into the tables: in two statements, unless attempts end that were begun before."""
        sites = {site for site, *_ in self._moments}
        if sites:
            connection.execute(_LOCK, (_LOCKS, sorted(sites)))
        if self._ends:
            if self._cut_off:
                self._put(connection, [self._cutting_off()])
                self._cut_off = []
            known = connection.execute(_END, (_as_json(list(self._ends.values())),)).fetchall()
            begun_before = {id(self._ends[site, job_id]) for site, job_id in known}
            self._new = [facts for facts in self._new if id(facts) not in begun_before]
        parts: list[_Part] = []
        if self._cut_off:
            parts.append(self._cutting_off())
        if self._drains:
            parts.append((_DRAINS, (_as_json([each.as_row() for each in self._drains.values()]),)))
        if self._new:
            parts.append((_INSERT, (_as_json([_DEFAULTS | facts for facts in self._new]),)))
        if self._moments:
            parts.append((_MOMENTS, tuple(map(list, zip(*self._moments, strict=True)))))
        if self._tallies:
            rows = [(*key, *values) for key, values in self._tallies.items()]
            parts.append((_TALLIES, tuple(map(list, zip(*rows, strict=True)))))
        self._put(connection, parts)

    def _cutting_off(self) -> _Part:
        return _CUT_OFF, (INTERRUPTED, *map(list, zip(*self._cut_off, strict=True)))

    @staticmethod
    def _put(connection: Connection, parts: Sequence[_Part]) -> None:
        """All at once: none of them sees what another writes."""
        if parts:
            *before, (last, _) = parts
            named = ", ".join(f"part{number} AS ({query})" for number, (query, _) in enumerate(before))
            query = f"WITH {named} {last}" if named else last
            connection.execute(query.encode(), [value for _, values in parts for value in values])


def _row(site: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "site": site,
        **{name: storable_row(value) if isinstance(value, str) else value for name, value in facts.items()},
    }


def _as_json(rows: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps(rows)
