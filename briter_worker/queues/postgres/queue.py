"""The queue of one site as rows in Postgres. See `migrations/` for the tables, `tokens` for the fence."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psycopg

from briter_worker.errors import Failure, Kind, LockLostError, Loss, for_people
from briter_worker.job import Status, rewritten
from briter_worker.ports import Batch, Claim, Found, Superseding
from briter_worker.queues.postgres import contents, joining, journal
from briter_worker.queues.postgres.joining import FAILED, TRIED, WAITING
from briter_worker.queues.postgres.recovery import PostgresRecovery, ids_of
from briter_worker.queues.postgres.rows import COLUMNS, Save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from briter_worker.job import Job
    from briter_worker.ports import Plan
    from briter_worker.queues.postgres.database import Connection
    from briter_worker.queues.quarantine import Quarantined

_REVIVABLE = [failure.value for failure in Failure if failure.kind is Kind.ENVIRONMENT]
_DUE = f"""
due AS (
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
),
claimed AS (
    UPDATE publications SET state = 'claimed', token = %(token)s, batch = %(batch)s, attempt = attempts + 1,
        cancel = false, changed_at = %(now)s
    WHERE id IN (SELECT id FROM due)
    RETURNING {COLUMNS}, slug
)"""  # noqa: S608 - no values, here and below
# Superseded saves are told once; a batch begins with its claim; older dead letters join what is claimed.
_CLAIM = f"""
WITH told AS (DELETE FROM superseded WHERE site = %(site)s RETURNING id, job_id, slug, by_job),
{_DUE},
begun AS (
    INSERT INTO batches (key, site, token, started)
    SELECT %(batch)s, %(site)s, %(token)s, true WHERE EXISTS (SELECT FROM claimed)
)
SELECT 'claimed', {COLUMNS}, NULL FROM claimed
UNION ALL SELECT 'letter', {COLUMNS}, NULL FROM publications
WHERE site = %(site)s AND state = 'failed' AND slug = ANY(ARRAY(SELECT slug FROM claimed))
UNION ALL SELECT 'told', id, slug, job_id, NULL, by_job FROM told
""".encode()  # noqa: S608
_LETTERS = """
SELECT letter.id FROM done JOIN publications letter
    ON letter.site = %(site)s AND letter.state = 'failed' AND letter.slug = done.slug
WHERE letter.created_at <= done.created_at
"""
# What of their contents nobody is just about to need is locked here, and may go.
_FINISH = f"""
WITH done AS (
    SELECT id, slug, created_at FROM publications WHERE id = ANY(%(ids)s) AND state = 'claimed'
),
noted AS (
    INSERT INTO versions AS v (site, path, saved_at, published_at)
    SELECT %(site)s, path, max(saved_at), %(now)s FROM delivered
    WHERE publication = ANY(ARRAY(SELECT id FROM done)) GROUP BY path
    ON CONFLICT (site, path) DO UPDATE
    SET saved_at = greatest(v.saved_at, excluded.saved_at), published_at = excluded.published_at
),
gone AS (SELECT id FROM done UNION {_LETTERS}),
free AS (
    SELECT blob FROM contents WHERE blob = ANY(ARRAY(
        SELECT blob FROM delivered WHERE publication = ANY(ARRAY(SELECT id FROM gone)) AND blob IS NOT NULL
    )) ORDER BY blob FOR UPDATE SKIP LOCKED
),
deleted AS (DELETE FROM publications WHERE id = ANY(ARRAY(SELECT id FROM gone)))
SELECT blob FROM free
""".encode()  # noqa: S608 - no values


class _Later(Collection[str]):
    """What is asked for when it is first read: only a folder's publication does."""

    def __init__(self, ask: Callable[[], set[str]]) -> None:
        self._ask = ask

    @cached_property
    def _all(self) -> set[str]:
        return self._ask()

    def __contains__(self, path: object) -> bool:
        return path in self._all

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


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
            if self._may_have_tried:
                self._take_tried(connection, now)
            facts = {
                "site": self._site,
                "now": now,
                "furthest": now + self._longest_delay,
                "most": self._most,
                "token": self.token,
                "batch": key,
            }
            found: dict[str, list[tuple[Any, ...]]] = {"claimed": [], "letter": [], "told": []}
            for what, *columns in connection.execute(_CLAIM, facts):
                found[what].append(tuple(columns))
            superseded = tuple(
                Superseding(job_id, slug, by) for _, slug, job_id, _, by in sorted(found["told"])
            )
            saves = [Save.read(columns) for *columns, _ in found["claimed"]]
            if not saves:
                return Found(superseded=superseded)
            letters = [Save.read(columns) for *columns, _ in found["letter"]]
            saves = self._with_lost(connection, saves, letters)
            saves = sorted(saves, key=lambda save: self._order(save, now))
        claims = tuple(Claim(str(save.id), save.job, save.job.attempts + 1) for save in saves)
        return Found(Batch(key, claims), superseded)

    def _take_tried(self, connection: Connection, now: float) -> None:
        """What dry runs have published waits again: this host may have none of their commits."""
        found = connection.execute(
            f"SELECT {COLUMNS} FROM publications WHERE site = %s AND state = 'tried' LIMIT %s".encode(),  # noqa: S608
            (self._site, self._most),
        )
        joining.place(connection, self._site, [Save.read(row) for row in found], WAITING, now)

    def _with_lost(self, connection: Connection, saves: list[Save], failed: list[Save]) -> list[Save]:
        if not failed:
            return saves
        letters: dict[str, list[Save]] = defaultdict(list)
        for letter in failed:
            letters[letter.job.slug].append(letter)
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
            journal.record(self._database, self._site, self.token, batch.key, plan)
        except psycopg.errors.ForeignKeyViolation:
            raise LockLostError(
                Loss.DONE, f"the site {self._site}: what was about to be pushed is settled already"
            ) from None

    def close(self, batch: Batch) -> None:
        """The batch is settled: forget its plans."""
        journal.settled(self._database, self._site, self.token, batch.key)

    def finish(self, batch: Batch, claims: Sequence[Claim]) -> None:  # noqa: ARG002 - the port's signature
        """These are on the remote: they leave the queue, with any older dead letter of their slugs.

        What a dry run has published is kept, out of sight, for the first live run.
        """
        facts = {"site": self._site, "now": self._clock(), "ids": ids_of(claims)}
        with self._working() as connection:
            if self._dry_run:
                self._try(connection, claims, facts)
            else:
                free = connection.execute(_FINISH, facts).fetchall()
                contents.drop(connection, [blob for (blob,) in free])

    def _try(self, connection: Connection, claims: Sequence[Claim], facts: Mapping[str, Any]) -> None:
        saves = [save for save, _ in self._claimed(connection, claims).values()]
        done = "WITH done AS (SELECT slug, created_at FROM publications WHERE id = ANY(%(ids)s))"
        letters = connection.execute(f"{done} {_LETTERS}".encode(), facts).fetchall()
        joining.place(connection, self._site, saves, TRIED, facts["now"])
        joining.discard(connection, [number for (number,) in letters])

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
        """What jobs that are still on hold declare: asked when it is read."""

        def ask() -> set[str]:
            with self._database.asking() as connection:
                rows = connection.execute(
                    "SELECT DISTINCT unnest(paths) FROM publications WHERE site = %(site)s"
                    " AND state = 'waiting' AND due_at > %(now)s AND scheduled_for > %(now)s",
                    {"site": self._site, "now": now},
                )
                return {path for (path,) in rows}

        return _Later(ask)

    def held_since(self, held: Collection[str], now: float) -> Collection[str]:  # noqa: ARG002 - as above
        """None: see `overtaken`."""
        return ()

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
