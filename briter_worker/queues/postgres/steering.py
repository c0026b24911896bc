"""What a person sees of a site's rows, and may do to them, while a worker runs or while none does."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

from briter_worker.errors import for_people
from briter_worker.job import State, Status, rewritten
from briter_worker.ports import Pause
from briter_worker.queues.postgres import joining, tokens
from briter_worker.queues.postgres.joining import CLAIMED, FAILED, WAITING
from briter_worker.queues.postgres.rows import COLUMNS, Row, Save, with_attempts
from briter_worker.queues.steering import (
    Cancellation,
    existing,
    helpable,
    hurried,
    matching,
    to_hurry,
    to_retry,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from briter_worker.job import Job
    from briter_worker.queues.postgres.database import Connection, Database
    from briter_worker.strictjson import Document

# One arm for each state: each has an index of its own, and none has all of a site's rows.
_ARMS = [
    f"SELECT {COLUMNS}, state, attempt, changed_at FROM publications"  # noqa: S608 - no values
    f" WHERE site = %(site)s AND state = '{state}'"
    for state in (WAITING, CLAIMED, FAILED)
]
# Who looks again and again reads what has changed since: each change of a row gives it another xmin.
_SIGHT = " UNION ALL ".join(
    f"SELECT id, xmin::text, state, attempt, changed_at FROM publications"  # noqa: S608 - no values
    f" WHERE site = %(site)s AND state = '{state}'"
    for state in (WAITING, CLAIMED, FAILED)
)
_NEW = f"SELECT {COLUMNS}, xmin::text FROM publications WHERE id = ANY(%(ids)s)"  # noqa: S608 - no values
_SOME = " UNION ALL ".join(f"{arm} AND (job_id = %(wanted)s OR slug = %(wanted)s)" for arm in _ARMS)


class PostgresSteering:
    """Views and commands of one site. A command has the site's lock from its look to its deed."""

    def __init__(self, database: Database, site: str) -> None:
        self._database = database
        self._site = site
        self._seen: dict[int, tuple[str, Save]] = {}
        """What was read at the last look, by its row, and which version of it."""

    def jobs(self, now: float) -> list[Row]:
        """Every job once: in flight, then waiting by due time, then dead letters. Changes nothing."""
        with self._database.asking() as connection:
            return self._rows(connection, now)

    def find(self, wanted: str, now: float) -> list[Row]:
        """The job of this id, else all jobs of this slug. Changes nothing."""
        with self._database.asking() as connection:
            return self._matching(connection, wanted, now)

    def retry(self, wanted: str, now: float) -> list[Job]:
        """Dead letters, and jobs that wait for a retry, are due at once. Raises SteeringError."""
        with self._locked() as connection:
            chosen = to_retry(existing(self._matching(connection, wanted, now), wanted), wanted)
            return self._again(connection, chosen, now)

    def retry_all(self, now: float) -> list[Job]:
        """Every dead letter that a retry can help is due at once."""
        with self._locked() as connection:
            return self._again(connection, helpable(self._rows(connection, now)), now)

    def publish_now(self, wanted: str, now: float) -> list[Job]:
        """Jobs on hold, and such as wait for a retry, are due at once. Raises SteeringError."""
        with self._locked() as connection:
            chosen = to_hurry(existing(self._matching(connection, wanted, now), wanted), wanted)
            return self._put(connection, chosen, lambda save: hurried(save.document, save.job, now), now)

    def cancel(self, wanted: str, now: float) -> Cancellation:
        """The jobs of this id or slug leave the queue, or are asked to. Raises SteeringError."""
        with self._locked() as connection:
            rows = existing(self._matching(connection, wanted, now), wanted)
            asked = [row for row in rows if row.state is State.CLAIMED]
            gone = [row for row in rows if row.state is not State.CLAIMED]
            connection.execute(
                "UPDATE publications SET cancel = true WHERE id = ANY(%s)", ([row.id for row in asked],)
            )
            joining.discard(connection, [row.id for row in gone])
        return Cancellation(tuple(row.job for row in gone), tuple(row.job for row in asked))

    def paused(self, now: float) -> Pause | None:
        """The pause that lasts, if one does; it outlives every worker."""
        with self._database.asking() as connection:
            row = connection.execute("SELECT paused FROM sites WHERE name = %s", (self._site,)).fetchone()
        if row is None or row[0] is None:
            return None
        told = row[0]
        pause = Pause(since=told["since"], until=told.get("until"), reason=told.get("reason", ""))
        return pause if pause.lasts(now) else None

    def pause(self, now: float, *, until: float | None = None, reason: str = "") -> Pause:
        """Have nothing claimed until then, or until `resume`."""
        pause = Pause(now, until, for_people(reason))
        told = {"since": pause.since, "until": pause.until, "reason": pause.reason}
        with self._locked() as connection:
            connection.execute("UPDATE sites SET paused = %s WHERE name = %s", (json.dumps(told), self._site))
        return pause

    def resume(self) -> bool:
        """Have jobs claimed again; whether there was a pause to end."""
        with self._locked() as connection:
            done = connection.execute(
                "UPDATE sites SET paused = NULL WHERE name = %s AND paused IS NOT NULL RETURNING name",
                (self._site,),
            )
            return done.fetchone() is not None

    def _rows(self, connection: Connection, now: float) -> list[Row]:
        sight = connection.execute(_SIGHT.encode(), {"site": self._site}).fetchall()
        seen = self._seen
        known = {
            number: seen[number] for number, version, *_ in sight if seen.get(number, ("",))[0] == version
        }
        new = [number for number, *_ in sight if number not in known]
        if new:
            for *columns, version in connection.execute(_NEW.encode(), {"ids": new}):
                known[columns[0]] = version, Save.read(columns)
        self._seen = known
        # What is gone since the look is gone.
        there = (row for row in sight if row[0] in known)
        return sorted(
            (self._shown(known[number][1], *rest, now=now) for number, _, *rest in there), key=_place
        )

    def _matching(self, connection: Connection, wanted: str, now: float) -> list[Row]:
        found = connection.execute(_SOME.encode(), {"site": self._site, "wanted": wanted})
        return matching(sorted((self._row(row, now) for row in found), key=_place), wanted)

    def _row(self, row: tuple[Any, ...], now: float) -> Row:
        *columns, state, attempt, changed_at = row
        return self._shown(Save.read(columns), state, attempt, changed_at, now=now)

    def _shown(self, save: Save, state: str, attempt: int, changed_at: float, *, now: float) -> Row:
        job = save.job
        if state == "claimed":
            return Row(save.id, with_attempts(job, attempt), State.CLAIMED, self._site, changed_at, save.text)
        return Row(save.id, job, job.state(now), self._site, changed_at, save.text)

    def _again(self, connection: Connection, chosen: Sequence[Row], now: float) -> list[Job]:
        return self._put(
            connection,
            chosen,
            lambda save: rewritten(save.document, status=Status.PENDING, attempts=0, now=now),
            now,
        )

    def _put(
        self,
        connection: Connection,
        chosen: Sequence[Row],
        change: Callable[[Save], Document],
        now: float,
    ) -> list[Job]:
        saves = [Save(row.id, row.job, row.text) for row in chosen]
        saves = [save.rewritten(change(save)) for save in saves]
        joining.place(connection, self._site, saves, WAITING, now)
        return [save.job for save in saves]

    @contextlib.contextmanager
    def _locked(self) -> Iterator[Connection]:
        with self._database.transaction() as connection:
            tokens.lock(connection, self._site, None)
            yield connection


def _place(row: Row) -> tuple[int, float, float, int]:
    if row.state is State.CLAIMED:
        return (0, 0.0, 0.0, row.id)
    if row.state is State.FAILED:
        return (2, 0.0, row.job.created_at, row.id)
    return (1, row.job.due_at(0.0, float("inf")), row.job.created_at, row.id)
