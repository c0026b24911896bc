"""The queue of one site as rows in Postgres. See `migrations/` for the tables, `tokens` for the fence."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING
from uuid import uuid4

import psycopg

from briter_worker.errors import Failure, Kind, LockLostError, Loss, for_people
from briter_worker.job import Status, rewritten
from briter_worker.ports import Batch, Claim, Found, Superseding
from briter_worker.queues.postgres import joining, journal
from briter_worker.queues.postgres.joining import FAILED, TRIED, WAITING
from briter_worker.queues.postgres.recovery import PostgresRecovery, ids_of
from briter_worker.queues.postgres.rows import COLUMNS, Save

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from briter_worker.job import Job
    from briter_worker.ports import Plan
    from briter_worker.queues.postgres.database import Connection
    from briter_worker.queues.quarantine import Quarantined

_REVIVABLE = [failure.value for failure in Failure if failure.kind is Kind.ENVIRONMENT]
_DUE = """
WITH due AS (
    SELECT id, at, created_at FROM (
        (SELECT id, due_at AS at, created_at FROM publications
         WHERE site = %(site)s AND state = 'waiting' AND due_at <= %(now)s
         ORDER BY due_at, created_at, id LIMIT %(most)s)
        UNION ALL
        (SELECT id, scheduled_for, created_at FROM publications
         WHERE site = %(site)s AND state = 'waiting' AND next_attempt_at > 0
         AND next_attempt_at > %(furthest)s AND scheduled_for <= %(now)s
         LIMIT %(most)s)
    ) AS either ORDER BY at, created_at, id LIMIT %(most)s
)
UPDATE publications SET state = 'claimed', token = %(token)s, batch = %(batch)s, attempt = attempts + 1,
    cancel = false, changed_at = %(now)s
WHERE id IN (SELECT id FROM due)
"""
_CLAIM = f"{_DUE} RETURNING {COLUMNS}".encode()
_VERSIONS = """
INSERT INTO versions AS v (site, path, saved_at, published_at)
SELECT %(site)s, path, max(saved_at), %(now)s FROM delivered WHERE publication = ANY(%(ids)s) GROUP BY path
ON CONFLICT (site, path) DO UPDATE
SET saved_at = greatest(v.saved_at, excluded.saved_at), published_at = excluded.published_at
"""
_LETTERS = """
SELECT letter.id FROM unnest(%s::text[], %s::float8[]) AS done (slug, created_at)
JOIN publications letter ON letter.site = %s AND letter.state = 'failed' AND letter.slug = done.slug
WHERE letter.created_at <= done.created_at
"""


class PostgresQueue(PostgresRecovery):
    """Implements `ports.Queue` for one drain of one site, beside any number of writers and steerers.

    Every change is one transaction under the site's lock; a worker's looks at its token first and raises
    LockLostError when that is not the site's last one. With `token` None it is for looking and steering.
    """

    def claim(self, now: float) -> Found:
        """Take what is due, newest of its slug, but not more than `most`; count the attempt."""
        key = uuid4().hex
        # Before anything of it is pushed, its plan is recorded, and flushed, and with that all of this.
        with self._working(flushed=False) as connection:
            if not self._dry_run:
                self._take_tried(connection, now)
            told = connection.execute(
                "DELETE FROM superseded WHERE site = %s RETURNING id, job_id, slug, by_job", (self._site,)
            )
            facts = {
                "site": self._site,
                "now": now,
                "furthest": now + self._longest_delay,
                "most": self._most,
                "token": self.token,
                "batch": key,
            }
            saves = [Save.read(row) for row in connection.execute(_CLAIM, facts)]
            superseded = tuple(Superseding(*columns) for _, *columns in sorted(told))
            if not saves:
                return Found(superseded=superseded)
            saves = sorted(self._with_lost(connection, saves), key=lambda save: self._order(save, now))
            journal.add(connection, self._site, self.token, [key], started=True)
        claims = tuple(Claim(str(save.id), save.job, save.job.attempts + 1) for save in saves)
        return Found(Batch(key, claims), superseded)

    def _take_tried(self, connection: Connection, now: float) -> None:
        """What dry runs have published waits again: this host may have none of their commits."""
        found = connection.execute(
            f"SELECT {COLUMNS} FROM publications WHERE site = %s AND state = 'tried' LIMIT %s".encode(),  # noqa: S608
            (self._site, self._most),
        )
        joining.place(connection, self._site, [Save.read(row) for row in found], WAITING, now)

    def _with_lost(self, connection: Connection, saves: list[Save]) -> list[Save]:
        letters = joining.rivals(connection, self._site, {save.job.slug for save in saves}, FAILED)
        if not letters:
            return saves
        pairs = []
        found = []
        for save in saves:
            lost = joining.lost_by(save, letters.get(save.job.slug, ()))
            pairs += [(letter.id, save.id) for letter in lost]
            found.append(joining.declaring(save, lost))
        if pairs:
            joining.hand_over(connection, pairs)
            joining.redeclare(
                connection, [new for new, old in zip(found, saves, strict=True) if new is not old]
            )
        return found

    def record(self, batch: Batch, plan: Plan) -> None:
        """Remember durably what the next push is about to do."""
        try:
            with self._working() as connection:
                journal.record(connection, batch.key, plan)
        except psycopg.errors.ForeignKeyViolation:
            raise LockLostError(
                Loss.DONE, f"the site {self._site}: what was about to be pushed is settled already"
            ) from None

    def close(self, batch: Batch) -> None:
        """The batch is settled: forget its plans."""
        with self._working(flushed=False) as connection:  # there again, it is an empty one
            journal.close(connection, [batch.key])

    def finish(self, batch: Batch, claims: Sequence[Claim]) -> None:  # noqa: ARG002 - the port's signature
        """These are on the remote: they leave the queue, with any older dead letter of their slugs.

        What a dry run has published is kept, out of sight, for the first live run.
        """
        now = self._clock()
        with self._working() as connection:
            rows = self._claimed(connection, claims)
            saves = [save for save, _ in rows.values()]
            slugs = [save.job.slug for save in saves]
            letters = connection.execute(
                _LETTERS, (slugs, [save.job.created_at for save in saves], self._site)
            )
            gone = [number for (number,) in letters]
            if self._dry_run:
                joining.place(connection, self._site, saves, TRIED, now)
            else:
                ids = [save.id for save in saves]
                connection.execute(_VERSIONS, {"site": self._site, "now": now, "ids": ids})
                gone += ids
            joining.discard(connection, gone)

    def drop(self, batch: Batch, claims: Sequence[Claim]) -> None:  # noqa: ARG002 - the port's signature
        """These leave the queue as if they had never been asked for; a newer save of theirs stays."""
        with self._working() as connection:
            joining.discard(connection, [save.id for save, _ in self._claimed(connection, claims).values()])

    def put_off(self, batch: Batch, claim: Claim, failure: Failure, text: str, until: float) -> bool:  # noqa: ARG002
        """Back to waiting, to be tried again at `until`; a newer save has taken it over by then."""
        return self._settle(claim, Status.PENDING, failure, text, until)

    def snooze(self, batch: Batch, claim: Claim, text: str, until: float) -> bool:  # noqa: ARG002
        """Back to waiting until then, this attempt not counted."""
        return self._settle(replace(claim, attempt=claim.attempt - 1), Status.PENDING, None, text, until)

    def bury(self, batch: Batch, claim: Claim, failure: Failure, text: str) -> bool:  # noqa: ARG002
        """Dead-letter it, with its reason; but if a newer save waits, that takes it over."""
        return self._settle(claim, Status.FAILED, failure, text, None)

    def _settle(
        self, claim: Claim, status: Status, failure: Failure | None, text: str, until: float | None
    ) -> bool:
        now = self._clock()
        with self._working() as connection:
            held = self._claimed(connection, [claim]).get(claim.key)
            if held is None:
                return True  # done already, and the answer was lost
            save, is_unwanted = held
            if is_unwanted:
                return False
            slug = save.job.slug
            if status is Status.FAILED and joining.rivals(connection, self._site, [slug], WAITING):
                status = Status.PENDING
            document = rewritten(
                save.document,
                status=status,
                attempts=claim.attempt,
                now=now,
                next_attempt_at=until,
                last_error=for_people(text),
                failure=None if failure is None else failure.value,
            )
            state = FAILED if status is Status.FAILED else WAITING
            joining.place(connection, self._site, [save.rewritten(document)], state, now)
            return True

    def release(self, batch: Batch, claims: Sequence[Claim]) -> None:  # noqa: ARG002 - the port's signature
        """Back to waiting as if they had not been claimed, but for those that are to be cancelled."""
        attempts = {claim.key: claim.attempt - 1 for claim in claims}
        with self._working() as connection:
            back = []
            for key, (save, is_unwanted) in self._claimed(connection, claims).items():
                if is_unwanted:
                    continue
                # Deaths of earlier workers were counted in the journal only.
                counted = save.job.attempts >= attempts[key]
                back.append(save if counted else save.rewritten({**save.document, "attempts": attempts[key]}))
            joining.place(connection, self._site, back, WAITING, self._clock())

    def cancelled(self, batch: Batch) -> Collection[str]:
        """Of these claims, by their keys, those that a person wants cancelled."""
        with self._database.asking() as connection:
            rows = connection.execute(
                "SELECT id FROM publications WHERE id = ANY(%s) AND cancel AND state = 'claimed'",
                (ids_of(batch.claims),),
            )
            return {str(number) for (number,) in rows}

    def overtaken(self, batch: Batch, now: float) -> Collection[str]:  # noqa: ARG002 - the port's signature
        """None: what is published is what came with the job, whatever has been saved since."""
        return ()

    def revive(self, now: float) -> Sequence[Job]:
        """Dead letters that the site's surroundings caused wait again, with no attempts."""
        query = (
            f"SELECT {COLUMNS} FROM publications WHERE site = %s AND state = 'failed' AND failure = ANY(%s)"  # noqa: S608
            " ORDER BY created_at, id"
        ).encode()
        with self._database.asking() as connection:
            if connection.execute(query, (self._site, _REVIVABLE)).fetchone() is None:
                return ()
        with self._working() as connection:
            saves = [Save.read(row) for row in connection.execute(query, (self._site, _REVIVABLE))]
            back = [
                save.rewritten(rewritten(save.document, status=Status.PENDING, attempts=0, now=now))
                for save in saves
            ]
            joining.place(connection, self._site, back, WAITING, now)
            return [save.job for save in back]

    def held_paths(self, now: float) -> Collection[str]:
        """What jobs that are still on hold declare: no folder of another job may carry it."""
        with self._database.asking() as connection:
            rows = connection.execute(
                "SELECT DISTINCT unnest(paths) FROM publications WHERE site = %(site)s AND state = 'waiting'"
                " AND due_at > %(now)s AND scheduled_for > %(now)s",
                {"site": self._site, "now": now},
            )
            return {path for (path,) in rows}

    def next_due(self, now: float) -> float | None:
        """When the next waiting job becomes due."""
        with self._database.asking() as connection:
            row = connection.execute(
                "SELECT (SELECT min(due_at) FROM publications WHERE site = %(site)s AND state = 'waiting'),"
                " (SELECT min(scheduled_for) FROM publications WHERE site = %(site)s AND state = 'waiting'"
                "  AND next_attempt_at > 0 AND next_attempt_at > %(furthest)s),"
                " EXISTS (SELECT FROM publications WHERE site = %(site)s AND state = 'tried')",
                {"site": self._site, "furthest": now + self._longest_delay},
            ).fetchone()
        first, set_back, has_tried = row or (None, None, False)
        moments = [moment for moment in (first, set_back) if moment is not None]
        if has_tried and not self._dry_run:
            moments.append(now)
        return min(moments, default=None)

    def stuck(self, now: float) -> dict[str, str]:  # noqa: ARG002 - as a folder's
        """A row is always a job."""
        return {}

    def quarantined(self) -> list[Quarantined]:
        """Nor is anything put aside."""
        return []
