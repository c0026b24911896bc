"""What commands and pages see of a site's jobs, and do with them, beside a running drain."""

from __future__ import annotations

import contextlib
import json
import math
from typing import TYPE_CHECKING

from briter_worker.job import State, Status, with_state
from briter_worker.ports import Cancellation, ListedJob, Pause
from briter_worker.queues.postgres.fencing import lock_site
from briter_worker.queues.postgres.rows import CLAIMED, FAILED, delete, put_back, select
from briter_worker.queues.selection import (
    select_existing,
    select_matching,
    select_retryable,
    select_to_publish_now,
    select_to_retry,
)
from briter_worker.redaction import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from briter_worker.job import Document, Job
    from briter_worker.queues.postgres.database import Connection, Database
    from briter_worker.queues.postgres.rows import Row


class PostgresControl:
    """What commands and pages do with the queue of one site."""

    def __init__(self, database: Database, site: str) -> None:
        self._database = database
        self._site = site
        self._seen: dict[int, tuple[str, Row]] = {}
        """The rows of the last `jobs`, and their versions."""

    def jobs(self, now: float) -> Sequence[ListedJob]:
        """Return every job once: in flight, then waiting by due time, then dead letters."""
        with self._database.connection() as connection:
            versions = dict(
                connection.execute("SELECT id, xmin::text FROM publications WHERE site = %s", (self._site,))
            )
            # Pages ask again and again: only rows with a new version are read and parsed.
            seen = {
                number: (version, row)
                for number, (version, row) in self._seen.items()
                if versions.get(number) == version
            }
            changed = [number for number in versions if number not in seen]
            for row in select(connection, "id = ANY(%(ids)s)", {"ids": changed}):
                seen[row.id] = (versions[row.id], row)
        self._seen = seen
        return self._list((row for _, row in seen.values()), now)

    def find(self, wanted: str, now: float) -> Sequence[ListedJob]:
        """Return the job of this id, else all jobs of this slug."""
        with self._database.connection() as connection:
            return select_matching(self._list(self._wanted(connection, wanted), now), wanted)

    def retry(self, wanted: str, now: float) -> Sequence[Job]:
        """Make dead letters and retrying jobs due at once."""
        with self._locked() as connection:
            rows = self._wanted(connection, wanted)
            chosen = self._choose(rows, now, lambda listed: select_to_retry(listed, wanted))
            return self._put_back(connection, [as_new(row, now) for row in chosen], now)

    def retry_all(self, now: float) -> Sequence[Job]:
        """Make every dead letter that a retry can help due at once."""
        with self._locked() as connection:
            rows = select(connection, "site = %(site)s AND state = 'failed'", {"site": self._site})
            chosen = self._choose(rows, now, select_retryable)
            return self._put_back(connection, [as_new(row, now) for row in chosen], now)

    def publish_now(self, wanted: str, now: float) -> Sequence[Job]:
        """Make scheduled and retrying jobs due at once."""
        with self._locked() as connection:
            rows = self._wanted(connection, wanted)
            chosen = self._choose(rows, now, lambda listed: select_to_publish_now(listed, wanted))
            keys = {"scheduledFor": None, "nextAttemptAt": None}
            return self._put_back(connection, [row.with_keys(keys, now) for row in chosen], now)

    def cancel(self, wanted: str, now: float) -> Cancellation:
        """Remove jobs from the queue, or request it for those in flight."""
        with self._locked() as connection:
            rows = self._wanted(connection, wanted)
            chosen = self._choose(rows, now, lambda listed: select_existing(listed, wanted))
            in_flight = [row for row in chosen if row.state == CLAIMED]
            others = [row for row in chosen if row.state != CLAIMED]
            connection.execute(
                "UPDATE publications SET cancelled = true WHERE id = ANY(%s)",
                ([row.id for row in in_flight],),
            )
            delete(connection, [row.id for row in others])
        return Cancellation(tuple(row.job for row in others), tuple(row.job for row in in_flight))

    def pause(self, now: float, *, until: float | None = None, reason: str = "") -> Pause:
        """Stop claiming until a time, or until `resume`."""
        pause = Pause(now, until, one_line(reason))
        with self._locked() as connection:
            connection.execute(
                "UPDATE sites SET paused = %s WHERE name = %s", (json.dumps(pause._asdict()), self._site)
            )
        return pause

    def resume(self) -> bool:
        """End the pause. Return True if there was one."""
        with self._locked() as connection:
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

    @contextlib.contextmanager
    def _locked(self) -> Iterator[Connection]:
        with self._database.transaction() as connection:
            lock_site(connection, self._site)
            yield connection

    def _wanted(self, connection: Connection, wanted: str) -> list[Row]:
        return select(
            connection,
            "site = %(site)s AND (job_id = %(wanted)s OR slug = %(wanted)s)",
            {"site": self._site, "wanted": wanted},
        )

    def _list(self, rows: Iterable[Row], now: float) -> list[ListedJob]:
        return [self._listed(row, now) for row in sorted(rows, key=_position)]

    def _listed(self, row: Row, now: float) -> ListedJob:
        job, state = row.job, row.job.state(now)
        if row.state == CLAIMED:
            job, state = job.model_copy(update={"attempts": row.attempt}), State.CLAIMED

        def read() -> Document:
            return {"id": job.id, **row.document, "paths": list(job.paths), "attempts": job.attempts}

        return ListedJob(job, state, read, where=f"site {self._site}, row {row.id}")

    def _choose(
        self, rows: Sequence[Row], now: float, choose: Callable[[Sequence[ListedJob]], Sequence[ListedJob]]
    ) -> list[Row]:
        listed = [(self._listed(row, now), row) for row in sorted(rows, key=_position)]
        chosen = {each.where for each in choose([each for each, _ in listed])}
        return [row for each, row in listed if each.where in chosen]

    def _put_back(self, connection: Connection, rows: Sequence[Row], now: float) -> list[Job]:
        put_back(connection, self._site, rows, now)
        return [row.job for row in rows]


def as_new(row: Row, now: float) -> Row:
    """Return the row of a pending job that was never attempted."""
    return row.rewritten(with_state(row.document, now, status=Status.PENDING, attempts=0))


def _position(row: Row) -> tuple[int, float, float, int]:
    if row.state == CLAIMED:
        return (0, 0.0, 0.0, row.id)
    if row.state == FAILED:
        return (2, 0.0, row.job.created_at, row.id)
    return (1, row.job.due_at(0.0, math.inf), row.job.created_at, row.id)
