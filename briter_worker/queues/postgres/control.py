"""What commands and pages see of a site's jobs, and do with them, beside a running drain."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import TYPE_CHECKING

from briter_worker.errors import one_line, storable
from briter_worker.job import State, Status, with_state
from briter_worker.ports import Cancellation, ListedJob, Pause
from briter_worker.queues.postgres.rows import CLAIMED, FAILED, delete, locked, put_back, select
from briter_worker.queues.selection import (
    is_withheld_for,
    paths_scheduled_later,
    select_existing,
    select_matching,
    select_outdated,
    select_retryable,
    select_to_publish_now,
    select_to_retry,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from briter_worker.job import Document, Job
    from briter_worker.queues.postgres.database import Connection, Database
    from briter_worker.queues.postgres.rows import Row
_COUNT_AS_LATER = """
UPDATE files f SET saved_at = greatest(f.saved_at, o.saved_at) FROM published o
WHERE o.site = %s AND o.path = f.path AND o.outdated_by IS NOT NULL AND f.publication = ANY(%s)
"""


class PostgresControl:
    """The queue of one site for commands and pages."""

    def __init__(self, database: Database, site: str) -> None:
        self._database = database
        self._site = site

    def jobs(self, now: float) -> Sequence[ListedJob]:
        """Return every job once: in flight, then waiting by due time, then dead letters."""
        with self._database.connection() as connection:
            return self._list(select(connection, "site = %(site)s", {"site": self._site}), now)

    def find(self, wanted: str, now: float) -> Sequence[ListedJob]:
        """Return the job of this id, else all jobs of this slug."""
        with self._database.connection() as connection:
            return select_matching(self._list(self._wanted(connection, wanted), now), wanted)

    def retry(self, wanted: str, now: float) -> Sequence[Job]:
        """Make dead letters and retrying jobs due at once."""
        return self._put_back(wanted, now, partial(select_to_retry, wanted=wanted), as_new)

    def retry_all(self, now: float) -> Sequence[Job]:
        """Make every dead letter that a retry can help due at once."""
        return self._put_back(None, now, select_retryable, as_new)

    def publish_now(self, wanted: str, now: float) -> Sequence[Job]:
        """Make the wanted jobs due at once that wait for a time, and the jobs that waited for theirs."""
        keys = {"scheduledFor": None, "nextAttemptAt": None, "quietUntil": None}
        choose = partial(select_to_publish_now, wanted=wanted)
        with locked(self._database, self._site) as connection:
            chosen = self._choose(self._wanted(connection, wanted), now, choose)
            rows = [row.with_keys(keys, now) for row in chosen]
            put_back(connection, self._site, rows, now)
            self._free_withheld(connection, chosen, now)
        return [row.job for row in rows]

    def publish_over(self, wanted: str, now: float) -> Sequence[Job]:
        """Make outdated dead letters due at once; they count as saved after what the remote has."""
        with locked(self._database, self._site) as connection:
            rows = self._wanted(connection, wanted)
            chosen = self._choose(rows, now, partial(select_outdated, wanted=wanted))
            connection.execute(_COUNT_AS_LATER, (self._site, [row.id for row in chosen]))
            back = [as_new(row, now) for row in chosen]
            put_back(connection, self._site, back, now)
        return [row.job for row in back]

    def forgive(self, failure: str, now: float) -> None:
        """Make the jobs that wait after this failure due at once, as if they had not been tried."""
        with locked(self._database, self._site) as connection:
            values = {"site": self._site, "failure": failure}
            which = "site = %(site)s AND state = 'pending' AND failure = %(failure)s"
            rows = [as_new(row, now) for row in select(connection, which, values)]
            put_back(connection, self._site, rows, now)

    def cancel(self, wanted: str, now: float) -> Cancellation:
        """Remove jobs from the queue, or request it for those in flight."""
        with locked(self._database, self._site) as connection:
            rows = self._wanted(connection, wanted)
            chosen = self._choose(rows, now, partial(select_existing, wanted=wanted))
            in_flight = [row for row in chosen if row.state == CLAIMED]
            others = [row for row in chosen if row.state != CLAIMED]
            connection.execute(
                "UPDATE publications SET cancelled = true WHERE id = ANY(%s)",
                ([row.id for row in in_flight],),
            )
            delete(connection, [row.id for row in others])
            self._free_withheld(connection, others, now)
        return Cancellation(tuple(row.job for row in others), tuple(row.job for row in in_flight))

    def _free_withheld(self, connection: Connection, rows: Sequence[Row], now: float) -> None:
        """Make the jobs due that waited for files of these jobs, which are not scheduled any more."""
        paths = paths_scheduled_later((row.job for row in rows), now)
        if not paths:
            return
        which = "site = %(site)s AND state = 'pending' AND next_attempt_at > 0"
        waiting = select(connection, which, {"site": self._site})
        freed = [row for row in waiting if is_withheld_for(row.job, paths)]
        put_back(connection, self._site, [row.with_keys({"nextAttemptAt": None}, now) for row in freed], now)

    def pause(self, now: float, *, until: float | None = None, reason: str = "") -> Pause:
        """Stop claiming until a time, or until `resume`."""
        pause = Pause(now, until, one_line(reason))
        with locked(self._database, self._site) as connection:
            connection.execute(
                "UPDATE sites SET paused = %s WHERE name = %s", (json.dumps(pause._asdict()), self._site)
            )
        return pause

    def resume(self) -> bool:
        """End the pause. Return True if there was one."""
        with locked(self._database, self._site) as connection:
            ended = connection.execute(
                "UPDATE sites SET paused = NULL WHERE name = %s AND paused IS NOT NULL", (self._site,)
            )
            return ended.rowcount > 0

    def active_pause(self, now: float) -> Pause | None:
        """Return the active pause, if any."""
        with self._database.connection() as connection:
            row = connection.execute("SELECT paused FROM sites WHERE name = %s", (self._site,)).fetchone()
        if row is None or row[0] is None:
            return None
        pause = Pause(**row[0])
        return pause if pause.is_active(now) else None

    def quarantined(self) -> Sequence[object]:
        """Return nothing: `submit` refuses what is not a job."""
        return ()

    def unusable_files(self, now: float) -> Mapping[str, str]:  # noqa: ARG002 - the port's signature
        """Return nothing: a row is always a job."""
        return {}

    def _wanted(self, connection: Connection, wanted: str | None) -> list[Row]:
        """Return the rows of this id or slug; None: all dead letters."""
        is_wanted = "state = 'failed'" if wanted is None else "(job_id = %(wanted)s OR slug = %(wanted)s)"
        values = {"site": self._site, "wanted": storable(wanted or "")}
        return select(connection, f"site = %(site)s AND {is_wanted}", values)

    def _list(self, rows: Iterable[Row], now: float) -> list[ListedJob]:
        return [_listed(row, self._site, now) for row in sorted(rows, key=_position)]

    def _choose(
        self, rows: Sequence[Row], now: float, choose: Callable[[Sequence[ListedJob]], Sequence[ListedJob]]
    ) -> list[Row]:
        by_where = {_where(row, self._site): row for row in rows}
        return [by_where[each.where] for each in choose(self._list(rows, now))]

    def _put_back(
        self,
        wanted: str | None,
        now: float,
        choose: Callable[[Sequence[ListedJob]], Sequence[ListedJob]],
        change: Callable[[Row, float], Row],
    ) -> list[Job]:
        """Change the chosen ones of the wanted rows; return their jobs as they are now."""
        with locked(self._database, self._site) as connection:
            chosen = self._choose(self._wanted(connection, wanted), now, choose)
            rows = [change(row, now) for row in chosen]
            put_back(connection, self._site, rows, now)
        return [row.job for row in rows]


def _where(row: Row, site: str) -> str:
    return f"site {site}, row {row.id}"


def _listed(row: Row, site: str, now: float) -> ListedJob:
    job, state = row.job, row.job.state(now)
    if row.state == CLAIMED:
        job, state = job.model_copy(update={"attempts": row.attempt}), State.CLAIMED

    def read() -> Document:
        return {"id": job.id, **row.document, "paths": list(job.paths), "attempts": job.attempts}

    return ListedJob(job, state, read, where=_where(row, site))


def as_new(row: Row, now: float) -> Row:
    """Return the row of a pending job that was never attempted."""
    return row.rewritten(with_state(row.document, now, status=Status.PENDING, attempts=0))


def _position(row: Row) -> tuple[int, float, float, int]:
    if row.state == CLAIMED:
        return (0, 0.0, 0.0, row.id)
    if row.state == FAILED:
        return (2, 0.0, row.job.created_at, row.id)
    return (1, row.job.due_at(0.0, math.inf), row.job.created_at, row.id)
