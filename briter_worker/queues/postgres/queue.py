"""The queue of one site as rows, for one drain; and the plans of its pushes."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from briter_worker.allowlist import normalized
from briter_worker.errors import FailureClass, FailureCode, LockLostError, is_hurried
from briter_worker.events import Superseded
from briter_worker.job import Status, in_part, with_state
from briter_worker.ports import Claim, ClaimResult, Plan, Result
from briter_worker.queues.postgres.control import PostgresControl, as_new
from briter_worker.queues.postgres.rows import (
    COLUMNS,
    FAILED,
    FOLDER,
    PENDING,
    Row,
    decode_path,
    delete,
    delete_files,
    is_covered,
    lock_site,
    locked,
    put_back,
    select,
    select_saves,
    update,
)
from briter_worker.spelling import near_misses

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from contextlib import AbstractContextManager

    from briter_worker.errors import Failure
    from briter_worker.job import Document, Job
    from briter_worker.ports import Leftover, Outcome
    from briter_worker.queues.postgres.database import Connection, Database

_ENVIRONMENT = [code.value for code in FailureCode if code.failure_class is FailureClass.ENVIRONMENT]
_HURRIED = [code for code in _ENVIRONMENT if is_hurried(code)]
_NO_TOKEN = -1
_UNKNOWN = {"superseded": True, "failed_or_retrying": True, "scheduled": True}
_DELAYED_BY_ENVIRONMENT = """
site = %(site)s AND failure = ANY(%(codes)s)
AND (state = 'failed'
  OR state = 'pending' AND failure = ANY(%(hurried)s) AND next_attempt_at > 0 AND next_attempt_at > %(now)s)
"""
# A retry further away than any backoff was written before the clock was set back.
_CLAIM = f"""
WITH own AS (
    SELECT name FROM sites WHERE name = %(site)s AND token = %(token)s AND NOT removed FOR NO KEY UPDATE
), due AS (
    SELECT id FROM publications
    WHERE site = (SELECT name FROM own) AND state = 'pending' AND NOT (tried AND %(dry_run)s)
    AND (due_at <= %(now)s OR scheduled_for <= %(now)s AND next_attempt_at > %(furthest)s)
    ORDER BY due_at, created_at, id LIMIT %(limit)s
)
UPDATE publications SET state = 'claimed', attempt = attempts + 1, cancelled = false,
    alone = (SELECT count(*) FROM due) = 1
WHERE id IN (SELECT id FROM due) RETURNING {COLUMNS}
"""  # noqa: S608 - column names only
_WITHDRAWN = """
SELECT c.id, c.cancelled FROM publications c WHERE c.id = ANY(%s) AND c.state = 'claimed' AND (
    c.cancelled OR EXISTS (
        SELECT FROM publications newer
        WHERE newer.site = c.site AND newer.slug = c.slug AND newer.state = 'pending'
        AND newer.scheduled_for > %s
        AND (newer.created_at >= c.created_at OR c.document::json ->> 'madeBy' IN ('watch', 'undo'))
    )
)
"""
_ACKNOWLEDGE = """
WITH own AS (
    SELECT name FROM sites WHERE name = %(site)s AND token = %(token)s AND NOT removed FOR NO KEY UPDATE
), recorded AS (
    INSERT INTO published AS p (site, path, saved_at)
    SELECT own.name, path, max(saved_at) FROM own, files
    WHERE publication = ANY(%(ids)s) AND mode <> '040000' GROUP BY own.name, path
    ON CONFLICT (site, path) DO UPDATE SET saved_at = greatest(p.saved_at, excluded.saved_at),
        outdated_by = CASE WHEN excluded.saved_at < p.saved_at THEN p.outdated_by END
)
DELETE FROM publications USING own WHERE id = ANY(%(ids)s)
"""
_NOTE_PUBLISHED = """
INSERT INTO published AS p (site, path, saved_at)
SELECT %(site)s, path, saved_at FROM files WHERE publication = %(id)s AND path = ANY(%(paths)s)
ON CONFLICT (site, path) DO UPDATE SET saved_at = greatest(p.saved_at, excluded.saved_at),
    outdated_by = CASE WHEN excluded.saved_at < p.saved_at THEN p.outdated_by END
"""
_RECORD_PLAN = """
INSERT INTO plans (id, plan, site)
SELECT %s, %s, name FROM sites WHERE name = %s AND token = %s AND NOT removed FOR NO KEY UPDATE
"""


class PostgresQueue(PostgresControl):
    """Implements `ports.Queue` for one site.

    Each change of a drain is one transaction, which raises LockLostError unless `token` is the site's last
    one. Commands and pages have no token.
    """

    def __init__(
        self,
        database: Database,
        site: str,
        *,
        token: int = _NO_TOKEN,
        longest_delay: float,
        dry_run: bool,
        limit: int = 500,
        clock: Callable[[], float] = time.time,
        has: Mapping[str, bool] = _UNKNOWN,
    ) -> None:
        """`has`: which rows the site had when the lease was taken, by the keys of `_UNKNOWN`."""
        super().__init__(database, site)
        self._token = token
        self._longest_delay = longest_delay
        self._dry_run = dry_run
        self._limit = limit
        """Maximum number of jobs that one drain claims at once."""
        self._clock = clock
        self._has = dict(has)

    def claim(self, now: float) -> ClaimResult:
        """Claim the due jobs, at most `limit`, and count the attempt."""
        values = {
            "site": self._site,
            "token": self._token,
            "now": now,
            "furthest": now + self._longest_delay,
            "dry_run": self._dry_run,
            "limit": self._limit,
        }
        superseded = []
        with self._database.transaction(is_pipelined=True) as connection:
            rows = [Row.from_record(record) for record in connection.execute(_CLAIM, values)]
            if not rows:
                lock_site(connection, self._site, self._token)
            if self._has["superseded"]:
                superseded = connection.execute(
                    "DELETE FROM superseded WHERE site = %s RETURNING id, job_id, slug, by_job", (self._site,)
                ).fetchall()
        return ClaimResult(
            tuple(self._claims(rows, now)),
            tuple(
                Superseded(job_id=job_id, slug=slug, superseded_by=by)
                for _, job_id, slug, by in sorted(superseded)
            ),
        )

    def recover(self, now: float) -> Sequence[Claim]:
        """Return everything in flight: nobody but the caller works on the site's jobs."""
        with self._database.connection() as connection:
            rows = select(connection, "site = %(site)s AND state = 'claimed'", {"site": self._site})
        return self._claims(rows, now)

    def reclaim(self, claim: Claim, now: float) -> Claim:  # noqa: ARG002 - the port's signature
        """Claim a recovered job again, to be published alone; a crash while it was alone counts."""
        with self._locked() as connection:
            connection.execute(
                "UPDATE publications SET attempt = attempt + alone::int, alone = true"
                " WHERE id = %s AND state = 'claimed'",
                (int(claim.key),),
            )
            rows = self._claimed_rows(connection, [claim])
            if not rows:
                raise LockLostError(f"a job of the site {self._site} is gone")
            return _claim(rows[0])

    def acknowledge(self, claims: Sequence[Claim], rejected: Mapping[str, Collection[str]]) -> None:
        """Remove published jobs, and older dead letters of their slugs as far as they are published now."""
        now = self._clock()
        may_have_dead_letters = self._has["failed_or_retrying"]
        needs_lock = may_have_dead_letters or any(rejected.values())
        with self._locked() if needs_lock else self._database.connection() as connection:
            for claim in claims:
                left_out = {path.rstrip("/") for path in rejected.get(claim.key, ())}
                if left_out:
                    delete_files(connection, int(claim.key), partial(is_covered, declared=left_out))
            if may_have_dead_letters and claims:
                slugs = [claim.job.slug for claim in claims]
                for dead in select_saves(connection, self._site, FAILED, slugs):
                    published = _published_since(dead.job, claims, rejected)
                    if published:
                        self._shorten(connection, dead, published, now)
            values = {"site": self._site, "token": self._token, "ids": _ids(claims)}
            if not connection.execute(_ACKNOWLEDGE, values).rowcount:
                lock_site(connection, self._site, self._token)

    def acknowledge_part(self, claim: Claim, outcome: Outcome, left: Leftover, *, at: float) -> bool:
        """Put the job back until `at`, for the paths that are left; False if it was cancelled."""
        now, number = self._clock(), int(claim.key)
        self._has["failed_or_retrying"] = True
        kept = {path.rstrip("/") for path in left.paths}
        waiting = kept.intersection(map(normalized, outcome.missing)) | outcome.withheld.keys()
        out = {path.rstrip("/") for path in outcome.rejected_paths} | waiting
        published = {path.rstrip("/") for path in claim.job.paths if path not in left.paths}
        published.difference_update(out)

        def change(row: Row, claim: Claim) -> Document:
            document = with_state(
                row.document,
                now,
                status=Status.PENDING,
                attempts=claim.attempt - (left.retry_at is not None),
                failure=left.failure,
                next_attempt_at=at,
            )
            return in_part(document, left.paths, outcome.commit or "")

        with self._locked() as connection:
            for letter in select_saves(connection, self._site, FAILED, [claim.job.slug]):
                if published and claim.job.created_at >= letter.job.created_at:
                    self._shorten(connection, letter, published, now)
            found = connection.execute("SELECT path, mode FROM files WHERE publication = %s", (number,))
            done = [path for path, mode in found if mode != FOLDER and decode_path(path) not in out]
            connection.execute(_NOTE_PUBLISHED, {"site": self._site, "id": number, "paths": done})
            delete_files(connection, number, lambda path: not is_covered(path, kept))
            return not self._change_claims(connection, [claim], change, now)

    def _shorten(self, connection: Connection, letter: Row, published: Collection[str], now: float) -> None:
        """Leave a dead letter only the paths that are not published."""
        paths = [path for path in letter.job.paths if not is_covered(path, published)]
        if not paths:
            delete(connection, [letter.id])
        elif len(paths) < len(letter.job.paths):
            update(connection, self._site, [letter.with_paths(paths, now)])
            left = {path.rstrip("/") for path in paths}
            delete_files(connection, letter.id, lambda path: not is_covered(path, left))

    def mark_tried(self, claims: Sequence[Claim], now: float) -> None:
        """Put jobs that a dry run has built back as tried; remove those that a user cancelled."""
        self._settle(claims, now, counts=False, status=Status.PENDING, dry_run_at=now)

    def retry_later(self, claim: Claim, failure: Failure, *, at: float, counts: bool = True) -> bool:
        """Put the job back until `at`. Return False, and remove the job, if a user cancelled it."""
        state = {"status": Status.PENDING, "failure": failure, "next_attempt_at": at}
        return not self._settle([claim], self._clock(), counts=counts, **state)

    def dead_letter(self, claim: Claim, failure: Failure) -> bool:
        """Store the job as failed; while another save of the post is pending, the job joins that one instead.

        Return False, and remove the job, if a user cancelled it.
        """
        return not self._settle([claim], self._clock(), counts=True, status=Status.FAILED, failure=failure)

    def _settle(self, claims: Sequence[Claim], now: float, *, counts: bool, **state: Any) -> list[Claim]:  # noqa: ANN401 - as `with_state`
        self._has["failed_or_retrying"] = True

        def change(row: Row, claim: Claim) -> Document:
            return with_state(row.document, now, attempts=claim.attempt - (not counts), **state)

        return self._put_back_claims(claims, change, now)

    def release(self, claims: Sequence[Claim]) -> Sequence[Claim]:
        """Put jobs back as if they had not been claimed. Remove and return those that a user cancelled."""

        def change(row: Row, claim: Claim) -> Document:
            # Earlier attempts that ended in a crash were counted in the claim only.
            attempts = claim.attempt - 1
            return row.document if row.job.attempts >= attempts else {**row.document, "attempts": attempts}

        return self._put_back_claims(claims, change, self._clock())

    def withdrawn(self, claims: Sequence[Claim], now: float) -> Mapping[str, Result]:
        """Return the claims that were cancelled, or whose posts were saved again, scheduled for later."""
        with self._database.connection() as connection:
            found = connection.execute(_WITHDRAWN, (_ids(claims), now))
            return {str(key): Result.CANCELLED if gone else Result.RELEASED for key, gone in found}

    def requeue(self, now: float, except_for: Collection[str] = ()) -> Sequence[Job]:
        """Make dead letters of environment failures pending again; return their jobs.

        Make retries due at once that wait after such a failure, unless the failure may be one post's own.
        """
        if not self._has["failed_or_retrying"]:
            return ()
        values = {"site": self._site, "now": now, "codes": _ENVIRONMENT, "hurried": _HURRIED}
        with self._database.connection() as connection:  # without a lock: as a rule no job is delayed
            if not select(connection, _DELAYED_BY_ENVIRONMENT, values):
                return ()
        with self._locked() as connection:
            delayed = select(connection, _DELAYED_BY_ENVIRONMENT, values)
            rows = [row for row in delayed if row.job.id not in except_for]
            revived = [as_new(row, now) for row in rows if row.state == FAILED]
            hurried = [row.with_keys({"nextAttemptAt": None}, now) for row in rows if row.state == PENDING]
            put_back(connection, self._site, [*revived, *hurried], now)
        return [row.job for row in revived]

    def scheduled_paths(self, now: float) -> Mapping[str, float]:
        """Return the paths that scheduled jobs declare, each with the earliest time it is scheduled for."""
        if not self._has["scheduled"]:
            self._has["scheduled"] = True  # perhaps at the next look
            return {}
        with self._database.connection() as connection:
            found = connection.execute(
                "SELECT path, min(scheduled_for) FROM publications, unnest(paths) AS path"
                " WHERE site = %(site)s AND state = 'pending' AND due_at > %(now)s"
                " AND scheduled_for > %(now)s GROUP BY path",
                {"site": self._site, "now": now},
            )
            return dict(found.fetchall())

    def next_due(self, now: float) -> float | None:  # noqa: ARG002 - the port's signature
        """Return when the next pending job is due, or None if none waits."""
        with self._database.connection() as connection:
            row = connection.execute(
                "SELECT min(due_at) FROM publications"
                " WHERE site = %s AND state = 'pending' AND NOT (tried AND %s)",
                (self._site, self._dry_run),
            ).fetchone()
        return row[0] if row else None

    def _locked(self) -> AbstractContextManager[Connection]:
        return locked(self._database, self._site, self._token)

    def _claimed_rows(self, connection: Connection, claims: Sequence[Claim]) -> list[Row]:
        return select(connection, "id = ANY(%(ids)s) AND state = 'claimed'", {"ids": _ids(claims)})

    def _put_back_claims(
        self, claims: Sequence[Claim], change: Callable[[Row, Claim], Document], now: float
    ) -> list[Claim]:
        """Change the jobs that are still in flight; delete and return those that a user cancelled.

        A job that has failed is pending instead while another save of its post is.
        """
        with self._locked() as connection:
            return self._change_claims(connection, claims, change, now)

    def _change_claims(
        self,
        connection: Connection,
        claims: Sequence[Claim],
        change: Callable[[Row, Claim], Document],
        now: float,
    ) -> list[Claim]:
        """Put the claims back as `change` has them. Delete and return the claims that a user cancelled."""
        by_key = {claim.key: claim for claim in claims}
        cancelled: list[Row] = []
        back: list[Row] = []
        for row in self._claimed_rows(connection, claims):
            if row.is_cancelled:
                cancelled.append(row)
            else:
                back.append(row.rewritten(change(row, by_key[str(row.id)])))
        delete(connection, [row.id for row in cancelled])
        put_back(connection, self._site, self._with_pending_saves(connection, back, now), now)
        return [by_key[str(row.id)] for row in cancelled]

    def _with_pending_saves(self, connection: Connection, rows: Sequence[Row], now: float) -> list[Row]:
        """Return the rows; those that failed are pending if another save of their post is pending."""
        failed = [row.job.slug for row in rows if row.state == FAILED]
        pending = {row.job.slug for row in select_saves(connection, self._site, PENDING, failed)}
        changed: list[Row] = []
        for row in rows:
            joins_pending = row.job.slug in pending
            changed.append(row.with_keys({"status": PENDING}, now) if joins_pending else row)
        return changed

    def _claims(self, rows: Sequence[Row], now: float) -> list[Claim]:
        in_order = sorted(rows, key=lambda row: (row.job.due_at(now, self._longest_delay), *row.order))
        return [_claim(row) for row in in_order]


def _published_since(
    dead_letter: Job, claims: Sequence[Claim], rejected: Mapping[str, Collection[str]]
) -> set[str]:
    """Return the paths that claims of the same post published and that were saved after the dead letter."""
    published: set[str] = set()
    for claim in claims:
        is_same_post = claim.job.slug == dead_letter.slug
        if is_same_post and claim.job.created_at >= dead_letter.created_at:
            left_out = rejected.get(claim.key, ())
            published.update(path.rstrip("/") for path in claim.job.paths if path not in left_out)
    return published


def _claim(row: Row) -> Claim:
    odd_keys = tuple(near_misses(json.loads(row.text)).items())
    return Claim(str(row.id), row.job, row.attempt, row.alone, odd_keys)


def _ids(claims: Sequence[Claim]) -> list[int]:
    return [int(claim.key) for claim in claims]


class PostgresPlans:
    """Implements `ports.PlanStore` for one drain of one site, the only one that changes the site's plans."""

    def __init__(
        self, database: Database, site: str, *, token: int, known: Sequence[Plan] | None = None
    ) -> None:
        """`known`: the recorded plans, if they are known."""
        self._database = database
        self._site = site
        self.token = token
        self._known = known
        self.dropped: list[str] = []
        """Ids of plans that are complete: they are deleted as the lease ends."""

    def record(self, plan: Plan) -> None:
        """Store the plan durably. Raises LockLostError."""
        # In ASCII: JSON's escapes can hold paths that are not UTF-8, and Postgres's text cannot.
        facts = plan._asdict()
        if plan.unpublished is None:
            del facts["unpublished"]  # a node of an earlier version does not know the key
        text = json.dumps(facts)
        known, self._known = self.plans(), None
        values = (plan.id, text, self._site, self.token)
        with self._database.connection() as connection:
            is_recorded = connection.execute(_RECORD_PLAN.encode(), values).rowcount
        if not is_recorded:
            with locked(self._database, self._site, self.token):  # raises
                pass
        self._known = [*known, plan]

    def plans(self) -> Sequence[Plan]:
        """Return the recorded plans, oldest first."""
        if self._known is None:
            with self._database.connection() as connection:
                found = connection.execute(
                    "SELECT plan FROM plans WHERE site = %s ORDER BY number", (self._site,)
                )
                self._known = [Plan(**json.loads(text)) for (text,) in found]
        return self._known

    def drop(self, plan: Plan) -> None:
        """Forget the plan."""
        self.dropped.append(plan.id)
        self._known = [each for each in self.plans() if each.id != plan.id]
