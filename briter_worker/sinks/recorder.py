"""The recording side: the history's rows, the site condition, and the fan-out of each event to every sink."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

from pydantic.alias_generators import to_camel

from briter_worker import events
from briter_worker.errors import FailureCode, FixableError, is_environment, one_line
from briter_worker.sinks.log import log_entry
from briter_worker.sinks.store import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from briter_worker.errors import Failure
    from briter_worker.sinks.store import Store, Transaction

INTERRUPTED = "interrupted"
_FIRST_PHASE = "validate"
ANY_KIND = "any"
"""The kind of jobs that ended without an attempt."""
_MAX_PHASES = 100
_MAX_FILES = 1000
_PROGRESS_EVERY_S = 0.25
_RETIRE_EVERY_S = 3600.0
_RETRY_STORE_AFTER_S = 10.0
"""A store that waits for its file costs a second; a drain has many events."""
_DAY_S = 86400.0
_MOMENTS_KEPT_S = 7 * _DAY_S

_NOT_SEEN_BY_A_PULL = frozenset(
    {FailureCode.AUTH, FailureCode.REMOTE_REFUSED, FailureCode.PROTECTED}
    | {FailureCode.DISK, FailureCode.PLUGIN_BROKEN}
)
"""Conditions that may keep a post from being pushed although the remote's commits can be fetched."""

Ending = events.JobOutcome | events.Superseded | events.Cancelled | events.Quarantined | events.ConflictAhead
_Starts = dict[tuple[str, str], dict[str, Any]]
"""By job and slug."""
_RECORDED = ("attempt", "duration_ms", "commit", "error", "failure", "fix", "retry_at", "superseded_by")
"""The fields of an outcome that are columns of its receipt."""


class Sink(Protocol):
    """Receiver of events: history, webhooks, metrics."""

    def store(self, batch: Sequence[events.Event], /) -> None:
        """Store or count the events."""
        ...

    def close(self) -> None:
        """Finish what is left, within a bounded time."""
        ...


@dataclass(eq=False)
class FanOut:
    """Stores events, then logs them, so that a logged event is in the history.

    A sink that fails harms neither the others nor a post.
    """

    sinks: Sequence[Sink]
    log: Callable[[events.Event], None]
    condition: SiteCondition | None = None
    clock: Callable[[], float] = time.monotonic
    _failing: dict[int, float] = field(default_factory=dict)
    """The sinks that failed last, and until when one whose store failed gets no events."""

    def __call__(self, event: events.Event, /) -> None:
        """Store the event, then announce it."""
        self.deliver([event], lambda: None)

    def deliver(self, batch: Sequence[events.Event], acknowledge: Callable[[], None], /) -> None:
        """Store the events, acknowledge the jobs, then announce the events and the site's new condition."""
        for sink in self.sinks:
            if self.clock() >= self._failing.get(id(sink), 0.0):
                self._guarded(sink, partial(sink.store, batch))
        acknowledge()
        for event in batch:
            self.log(event)
        for event in batch:
            if self.condition is not None and (change := self.condition.follow(event)) is not None:
                self(change)

    def follow_pull(self, failure: Failure | None) -> bool:
        """Let the site condition follow a pull that failed, or succeeded (None). Return True if it ended."""
        if self.condition is None or (change := self.condition.follow_pull(failure)) is None:
            return False
        self(change)
        return failure is None

    def close(self) -> None:
        """Close every sink."""
        for sink in self.sinks:
            self._guarded(sink, sink.close)

    def _guarded(self, sink: Sink, call: Callable[[], None]) -> None:
        """Call the sink. Report the first of several failures in a row."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - a sink's failure is never a post's
            is_reported = id(sink) in self._failing
            is_store = isinstance(error, StoreError)
            self._failing[id(sink)] = self.clock() + _RETRY_STORE_AFTER_S if is_store else 0.0
            if is_reported:
                return
            what, fix = f"{type(sink).__name__}: {type(error).__name__}: {error}", ""
            if isinstance(error, FixableError):
                what, fix = error.message, error.fix
            self.log(events.Warned(error=one_line(f"{what}; publishing goes on without it"), fix=fix))
        else:
            self._failing.pop(id(sink), None)


@dataclass(eq=False)
class OpenedLater:
    """A sink that is opened by the first event that needs it: a worker that is skipped takes no port."""

    open_sink: Callable[[], Sink]
    is_needed: Callable[[events.Event], object]
    _sink: Sink | None = None

    def store(self, batch: Sequence[events.Event], /) -> None:
        """Pass the events on once the sink is open."""
        if self._sink is None and any(map(self.is_needed, batch)):
            self._sink = self.open_sink()
        if self._sink is not None:
            self._sink.store(batch)

    def close(self) -> None:
        """Close the sink if it was opened."""
        if self._sink is not None:
            self._sink.close()


@dataclass(eq=False)
class SiteCondition:
    """The condition of one site: the environment failure that keeps every post from being published.

    The condition is stored, so that neither the next worker nor each minute's cron reports it again. Only the
    worker that has the site writes it.
    """

    store: Store
    site: str = ""
    clock: Callable[[], float] = time.time
    is_read: bool = False
    failure: str | None = None
    """The failure of the condition, once it is read."""
    _is_pulls: bool = False
    """A pull of this process found the condition."""

    def follow(self, event: events.Event) -> events.ConditionChanged | None:
        """Return the change that the event brings, after it is stored; None for most events."""
        match event:
            case events.Failed() | events.DeadLettered() if is_environment(event.failure):
                # The text of one failure may differ from time to time; the condition is the same.
                if self._known() != event.failure:
                    return self._change(event.failure, event.error, event.fix)
            case events.PublishedInPart():
                pass  # nothing was pushed now
            case events.Published() if self._known() is not None:
                return self._change(None, None, "")
            case _:
                pass
        return None

    def follow_pull(self, failure: Failure | None) -> events.ConditionChanged | None:
        """Return the change that a pull brings, after it is stored; None for most pulls."""
        known = self._known()
        if failure is not None:
            if known is None or (self._is_pulls and known != failure.code):
                return self._change(failure.code, failure.message, failure.fix, is_pulls=True)
        elif known is not None and (self._is_pulls or known not in _NOT_SEEN_BY_A_PULL):
            return self._change(None, None, "")
        return None

    def _known(self) -> str | None:
        if not self.is_read:
            self.is_read = True
            with suppress(StoreError):  # the history reports it
                rows = self.store.query("SELECT failure FROM conditions WHERE site = ?", (self.site,))
                self.failure = rows[0][0] if rows else None
        return self.failure

    def _change(
        self, failure: str | None, text: str | None, fix: str, *, is_pulls: bool = False
    ) -> events.ConditionChanged:
        self.failure, self._is_pulls = failure, is_pulls
        # A full disk may be the condition itself; this worker reports it once all the same.
        with suppress(StoreError), self.store.transaction(self.site) as transaction:
            transaction.execute(
                "INSERT INTO conditions (site, failure, condition, fix, changed_at) VALUES (?, ?, ?, ?, ?)"
                " ON CONFLICT (site) DO UPDATE SET failure = excluded.failure,"
                " condition = excluded.condition, fix = excluded.fix, changed_at = excluded.changed_at",
                (self.site, failure, text, fix, self.clock()),
            )
        return events.ConditionChanged(condition=text, failure=failure, fix=fix)


@dataclass(frozen=True, slots=True)
class Target:
    """The remote and branch that a site publishes to: part of every receipt."""

    branch: str
    remote: str
    href_template: str = ""

    def href(self, slug: str) -> str | None:
        """Return the address of the published post, if the site has a template for it."""
        template = self.href_template
        return template.replace("{slug}", quote(slug, errors="replace")) if template else None


@dataclass
class ActionLog:
    """Logs what users did beside a worker, or since the last one stopped: a command has no log of its own."""

    store: Store
    log: Callable[[events.Event], None]
    _looked_at: int | None = None

    def __call__(self) -> None:
        """Log the actions that are new in the history."""
        with suppress(StoreError):  # the history reports it
            if self._looked_at is None:
                rows = self.store.query(
                    "SELECT COALESCE((SELECT max(id) FROM moments WHERE event = 'worker-stopped'),"
                    " (SELECT max(id) FROM moments), 0)"
                )
                self._looked_at = rows[0][0] if rows else 0
            query = "SELECT id, event, data FROM moments WHERE id > ? ORDER BY id"
            for number, event, data in self.store.query(query, (self._looked_at,)):
                self._looked_at = number
                if event == events.Steered.name:
                    facts = json.loads(data)
                    who_and_what = {key: facts.get(to_camel(key)) for key in events.Steered.fields}
                    self.log(events.Steered(**who_and_what))


class RunningDrain:
    """The running drain: the starts of its open jobs, and its phases ([name, began, ended or None])."""

    def __init__(self, began: float) -> None:
        self.id = str(int.from_bytes(os.urandom(7)))
        self.began = began
        self.phases: list[list[Any]] = [[_FIRST_PHASE, began, None]]
        self.phase, self.done, self.total = _FIRST_PHASE, 0, 0
        self.open: dict[tuple[str, str], events.JobStarted] = {}
        self.is_starting = True
        """Only starts have come: a drain announces all of them before anything else."""

    def _advance(self, event: events.Progress, at: float) -> None:
        """Note the progress. A phase lasts until the next one begins."""
        if self.phases[-1][0] != event.phase and len(self.phases) < _MAX_PHASES:
            self.phases[-1][2] = at
            self.phases.append([event.phase, at, None])
        if event.total and event.done >= event.total:
            self.phases[-1][2] = at
        self.phase, self.done, self.total = event.phase, event.done, event.total

    @staticmethod
    def follow(running: RunningDrain | None, event: events.Event, at: float) -> RunningDrain | None:
        """Return the drain that runs after the event, with what the event changed of it."""
        if isinstance(event, events.JobStarted):
            if running is None or not running.is_starting:
                running = RunningDrain(at)  # jobs of the last one may be open for ever: they were released
            running.open[event.job_id, event.slug] = event
        elif running is not None and isinstance(event, Ending | events.Progress):
            running.is_starting = False
            if isinstance(event, events.Progress):
                running._advance(event, at)
            else:
                running.open.pop((event.job_id, event.slug), None)
                if not running.open:  # the last phase lasts until the last outcome
                    running.phases[-1][2] = at
        return running


class HistorySink:
    """Records the events of one site: one row per attempt, one per drain, and the live stream."""

    def __init__(
        self,
        store: Store,
        target: Target,
        *,
        site: str = "",
        keep_days: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._target = target
        self._site = site
        self._keep_days = keep_days
        self._clock = clock
        self._waiting: list[tuple[float, events.Event]] = []
        self._drain: RunningDrain | None = None
        self._written_at = 0.0
        self._retire_at = 0.0

    def store(self, batch: Sequence[events.Event], /) -> None:
        """Record the events. Starts and progress are written with what follows them.

        Raises StoreError; then what was not written is lost.
        """
        if any(isinstance(event, events.WorkerSkipped) for event in batch):
            return  # the history is the other worker's
        now = self._clock()
        self._written_at = self._written_at or now
        self._waiting += [(now, event) for event in batch]
        if any(self._is_due(event, now) for event in batch):
            self._write()
            if self._keep_days is not None and now >= self._retire_at:
                self._retire_at = now + _RETIRE_EVERY_S
                retire(self._store, self._keep_days, now)

    def close(self) -> None:
        """Write what is left."""
        try:
            self._write()
        finally:
            self._store.close()

    def _is_due(self, event: events.Event, now: float) -> bool:
        if not isinstance(event, events.JobStarted | events.Progress):
            return True
        return not 0 <= now - self._written_at < _PROGRESS_EVERY_S

    def _write(self) -> None:
        items, self._waiting = self._waiting, []
        if not items:
            return
        try:
            with self._store.transaction(self._site) as transaction:
                starts: _Starts = {}
                for at, event in items:
                    self._record(transaction, at, event, starts)
                for key, facts in starts.items():
                    self._insert(transaction, key, facts)
                self._write_drain(transaction, self._drain)
        except BaseException:
            self._drain = None  # what the transaction began does not exist
            raise
        if self._drain is not None and not self._drain.open:
            self._drain = None
        self._written_at = self._clock()

    def _record(self, transaction: Transaction, at: float, event: events.Event, starts: _Starts) -> None:
        """Record the event. `starts` has the rows of attempts that began, inserted as they end or last."""
        if isinstance(event, Ending) and not self._end(transaction, at, event, starts):
            return
        before, self._drain = self._drain, RunningDrain.follow(self._drain, event, at)
        if self._drain is not before:
            self._write_drain(transaction, before)
        if isinstance(event, events.Progress):
            return
        if isinstance(event, events.JobStarted):
            self._start(transaction, at, event, starts)
        data = json.dumps(log_entry(event, at), ensure_ascii=False, separators=(",", ":"))
        transaction.execute(
            "INSERT INTO moments (site, at, event, data) VALUES (?, ?, ?, ?)",
            (self._site, at, event.name, data),
        )

    def _start(self, transaction: Transaction, at: float, event: events.JobStarted, starts: _Starts) -> None:
        key = (event.job_id, event.slug)
        if key in starts:  # it was released, and claimed again
            self._insert(transaction, key, starts.pop(key))
        # An attempt that its worker did not live to end.
        transaction.execute(
            "UPDATE attempts SET outcome = ?, ended = ?"
            " WHERE site = ? AND job_id = ? AND slug = ? AND outcome IS NULL",
            (INTERRUPTED, at, self._site, event.job_id, event.slug),
        )
        starts[key] = {"drain": self._drain and self._drain.id, "began": at, **_facts_of_start(event)}

    def _end(self, transaction: Transaction, at: float, event: Ending, starts: _Starts) -> bool:
        """Record the outcome. Return False if it was known: it is delivered again."""
        key, facts = (event.job_id, event.slug), {"outcome": event.name, "ended": at, **self._facts_of(event)}
        if started := starts.pop(key, None):
            self._insert(transaction, key, started | facts)
            ended = [(started["saved_at"], started["due_at"])]
        else:
            names = ", ".join(f'"{name}" = ?' for name in facts)
            ended = transaction.execute(
                f"UPDATE attempts SET {names} WHERE site = ? AND job_id = ? AND slug = ?"  # noqa: S608 - our names
                " AND outcome IS NULL RETURNING saved_at, due_at",
                [*facts.values(), self._site, *key],
            ).fetchall()
        if not ended:  # an attempt that a dead worker left ends without a new start
            if isinstance(event, events.Published):
                query = 'SELECT 1 FROM attempts WHERE site = ? AND job_id = ? AND "commit" = ?'
                values = (self._site, event.job_id, event.commit)
                if transaction.execute(query, values).fetchone() is not None:
                    return False
            if isinstance(event, events.JobOutcome) and event.start is not None:
                facts = _facts_of_start(event.start) | facts
                ended = [(facts["saved_at"], facts["due_at"])]
            self._insert(transaction, key, facts)
        if not isinstance(event, events.ConflictAhead):  # no attempt
            self._count(transaction, event, waiting_time(at, *ended[0]) if ended else None)
        return True

    def _facts_of(self, event: Ending) -> dict[str, Any]:
        values = {name: getattr(event, name, None) for name in _RECORDED}
        facts: dict[str, Any] = {name: value for name, value in values.items() if value not in {None, ""}}
        facts |= {name: one_line(facts[name]) for name in ("error", "fix") if name in facts}
        if isinstance(event, events.JobOutcome):
            facts |= {
                "dry_run": int(event.dry_run),
                "rejected_paths": json.dumps([one_line(path) for path in event.rejected_paths]),
                "branch": self._target.branch,
                "remote": self._target.remote,
            }
        if isinstance(event, events.Published):
            # An undo takes its paths from here: an altered one would be another file.
            changes = [each for each in event.changes[:_MAX_FILES] if one_line(each[0]) == each[0]]
            facts |= {
                "href": self._target.href(event.slug),
                "changes": json.dumps(changes),
                "files_changed": len(event.changes),
                "signed_with": event.signed_with and one_line(event.signed_with),
            }
        if isinstance(event, events.NoPaths):
            facts["failure"] = events.NoPaths.name
        return facts

    def _count(self, transaction: Transaction, event: Ending, waited: float | None) -> None:
        kind = event.job_type if isinstance(event, events.JobOutcome) else ANY_KIND
        if not isinstance(event, events.Published) or event.dry_run:
            waited = None
        transaction.execute(
            "INSERT INTO tallies AS t (site, kind, outcome, number, waits, waited) VALUES (?, ?, ?, 1, ?, ?)"
            " ON CONFLICT (site, kind, outcome) DO UPDATE SET number = t.number + 1,"
            " waits = t.waits + excluded.waits, waited = t.waited + excluded.waited",
            (self._site, kind, event.name, int(waited is not None), waited or 0.0),
        )

    def _insert(self, transaction: Transaction, key: tuple[str, str], facts: Mapping[str, Any]) -> None:
        row = {"site": self._site, "job_id": key[0], "slug": key[1], **facts}
        names = ", ".join(f'"{name}"' for name in row)
        marks = ", ".join("?" * len(row))
        transaction.execute(f"INSERT INTO attempts ({names}) VALUES ({marks})", [*row.values()])  # noqa: S608 - as above

    def _write_drain(self, transaction: Transaction, drain: RunningDrain | None) -> None:
        if drain is not None:
            transaction.execute(
                "INSERT INTO drains (id, began, phase, done, total, phases) VALUES (?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (id) DO UPDATE SET phase = excluded.phase, done = excluded.done,"
                " total = excluded.total, phases = excluded.phases",
                (drain.id, drain.began, drain.phase, drain.done, drain.total, json.dumps(drain.phases)),
            )


def _facts_of_start(event: events.JobStarted) -> dict[str, Any]:
    return {
        "title": event.title,
        "author": one_line(event.author),
        "attempt": event.attempt,
        "saved_at": event.saved_at,
        "due_at": event.due_at,
        "dry_run": int(event.dry_run),
    }


def waiting_time(ended: float | None, saved_at: float | None, due_at: float | None) -> float | None:
    """Return how long the author waited, in seconds."""
    if ended is None or saved_at is None:
        return None
    return max(0.0, ended - max(saved_at, due_at or 0.0))


def retire(
    store: Store,
    keep_days: int,
    now: float,
    own: Mapping[str, int] | None = None,
    kept: Sequence[str] = (),
) -> None:
    """Delete old receipts, drains and moments, of all sites; `own` has the days of sites that differ.

    Sites in `kept` keep their receipts. Safe on many nodes. Raises StoreError.
    """
    own, ended = own or {}, "outcome IS NOT NULL AND ended < ?"
    apart = (*own, *kept)
    others = f"{ended} AND site NOT IN ({', '.join('?' * len(apart))})" if apart else ended
    steps: list[tuple[str, tuple[object, ...]]] = [
        (f"attempts WHERE {others}", (now - keep_days * _DAY_S, *apart)),
        *(
            (f"attempts WHERE {ended} AND site = ?", (now - days * _DAY_S, site))
            for site, days in own.items()
        ),
        # A drain ends after it began.
        ("drains WHERE began < ?", (now - max(keep_days, *own.values(), 0) * _DAY_S - _DAY_S,)),
        ("moments WHERE at < ?", (now - _MOMENTS_KEPT_S,)),
    ]
    for which, values in steps:
        with store.transaction() as transaction:
            transaction.execute(f"DELETE FROM {which}", values)  # noqa: S608 - our own
