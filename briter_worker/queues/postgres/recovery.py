"""What earlier drains of a site left in flight: to be finished, or to be tried again in halves."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING
from uuid import uuid4

from briter_worker.errors import LockLostError, Loss
from briter_worker.ports import Batch, Claim
from briter_worker.queues.postgres import joining, journal, tokens
from briter_worker.queues.postgres.joining import WAITING
from briter_worker.queues.postgres.rows import COLUMNS, Save
from briter_worker.queues.postgres.steering import PostgresSteering

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from briter_worker.queues.postgres.database import Connection, Database


class PostgresRecovery(PostgresSteering):
    """A site in the hands of one drain, and what it takes over from those before it."""

    def __init__(
        self,
        database: Database,
        site: str,
        *,
        token: int | None,
        max_attempts: int,
        longest_delay: float,
        dry_run: bool = False,
        most: int = 500,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(database, site)
        self.max_attempts = max_attempts
        self._token = token
        self._longest_delay = longest_delay
        self._dry_run = dry_run
        self._most = most
        self._clock = clock
        self._may_have_tried = not dry_run
        """Whether there may be what a dry run has published, for a live run to take."""

    @property
    def token(self) -> int:
        """What proves that the site is this worker's."""
        if self._token is None:
            raise LockLostError(Loss.TAKEN, f"the site {self._site} was never taken by this program")
        return self._token

    def recover(self, now: float) -> Sequence[Batch]:
        """What earlier drains left in flight, to be finished from its plans or taken up again."""
        with self._database.asking() as connection:
            has_leftovers, has_tried = self._look(connection)
        self._may_have_tried = has_tried and not self._dry_run
        if not has_leftovers:
            return ()
        with self._working() as connection:
            claimed, unwanted = self._left_over(connection)
            entries = journal.entries(connection, self._site, self.token)
            batches = [
                Batch(entry.key, self._in_order(claimed.pop(entry.key), now), entry.plans)
                for entry in entries
                if entry.key in claimed
            ]
            journal.close(connection, {entry.key for entry in entries} - {batch.key for batch in batches})
            # Without a journal nothing of them had begun: they wait again, uncounted.
            orphans = [save for left in claimed.values() for save, _ in left]
            joining.discard(connection, [save.id for save in orphans if save.id in unwanted])
            back = [save for save in orphans if save.id not in unwanted]
            joining.place(connection, self._site, back, WAITING, now)
            return batches

    def _look(self, connection: Connection) -> tuple[bool, bool]:
        """Whether anything was left in flight, and whether anything was tried only."""
        row = connection.execute(
            "SELECT EXISTS (SELECT FROM batches WHERE site = %(site)s AND token < %(token)s) OR EXISTS"
            " (SELECT FROM publications WHERE site = %(site)s AND state = 'claimed' AND token < %(token)s),"
            " EXISTS (SELECT FROM publications WHERE site = %(site)s AND state = 'tried')",
            {"site": self._site, "token": self.token},
        ).fetchone()
        return (True, True) if row is None else (bool(row[0]), bool(row[1]))

    def _left_over(self, connection: Connection) -> tuple[dict[str, list[tuple[Save, int]]], set[int]]:
        found: dict[str, list[tuple[Save, int]]] = defaultdict(list)
        unwanted = set()
        for *columns, batch, attempt, cancel in connection.execute(
            f"SELECT {COLUMNS}, batch, attempt, cancel FROM publications"  # noqa: S608 - no values
            " WHERE site = %s AND state = 'claimed' AND token < %s".encode(),
            (self._site, self.token),
        ):
            save = Save.read(columns)
            found[batch or ""].append((save, attempt))
            if cancel:
                unwanted.add(save.id)
        return found, unwanted

    def _in_order(self, left: list[tuple[Save, int]], now: float) -> tuple[Claim, ...]:
        left = sorted(left, key=lambda each: self._order(each[0], now))
        return tuple(Claim(str(save.id), save.job, attempt) for save, attempt in left)

    def _order(self, save: Save, now: float) -> tuple[float, float, int]:
        return (save.job.due_at(now, self._longest_delay), *save.order)

    def retake(self, batch: Batch, now: float) -> Sequence[Batch]:
        """An interrupted batch that did not land, ready to be tried again, in halves when it killed."""
        with self._working() as connection:
            claims = self._without_outdone(connection, batch, now)
            is_started = journal.is_started(connection, batch.key)
            if claims and not is_started:
                parts = [Batch(batch.key, tuple(claims))]
            else:
                journal.close(connection, [batch.key])
                parts = [Batch(uuid4().hex, half) for half in _halves(claims)]
                journal.add(connection, self._site, self.token, [part.key for part in parts], started=False)
            self._own(connection, parts)
            return parts

    def _without_outdone(self, connection: Connection, batch: Batch, now: float) -> list[Claim]:
        """The claims of which no newer save waits; the others wait with it."""
        rows = self._claimed(connection, batch.claims)
        waiting = joining.rivals(
            connection, self._site, {save.job.slug for save, _ in rows.values()}, WAITING
        )
        outdone = {
            key
            for key, (save, is_unwanted) in rows.items()
            if not is_unwanted
            and any(other.job.created_at > save.job.created_at for other in waiting.get(save.job.slug, ()))
        }
        joining.place(connection, self._site, [rows[key][0] for key in outdone], WAITING, now)
        return [claim for claim in batch.claims if claim.key in rows and claim.key not in outdone]

    def _own(self, connection: Connection, parts: Sequence[Batch]) -> None:
        """The parts are this drain's."""
        connection.execute(
            "UPDATE batches SET token = %s WHERE key = ANY(%s)", (self.token, [part.key for part in parts])
        )
        rows = [(int(claim.key), part.key, claim.attempt) for part in parts for claim in part.claims]
        connection.execute(
            "UPDATE publications p SET token = %s, batch = n.batch, attempt = n.attempt"
            " FROM unnest(%s::bigint[], %s::text[], %s::bigint[]) AS n (id, batch, attempt)"
            " WHERE p.id = n.id",
            (self.token, *([row[column] for row in rows] for column in range(3))),
        )

    def begin(self, batch: Batch) -> None:
        """The work on a retaken batch begins: a crash from here on counts."""
        with self._working() as connection:
            journal.begin(connection, batch.key)

    def _claimed(self, connection: Connection, claims: Sequence[Claim]) -> dict[str, tuple[Save, bool]]:
        """Those of these claims that are in flight, by key, and whether somebody wants them cancelled."""
        found = {}
        for *columns, cancel in connection.execute(
            f"SELECT {COLUMNS}, cancel FROM publications WHERE id = ANY(%s) AND state = 'claimed'".encode(),  # noqa: S608
            (ids_of(claims),),
        ):
            save = Save.read(columns)
            found[str(save.id)] = (save, bool(cancel))
        return found

    @contextlib.contextmanager
    def _working(self, *, flushed: bool = True) -> Iterator[Connection]:
        """A transaction in which the site is this worker's."""
        with tokens.working(self._database, self._site, self.token, flushed=flushed) as connection:
            yield connection


def ids_of(claims: Sequence[Claim]) -> list[int]:
    """The rows that these claims name."""
    return [int(claim.key) for claim in claims]


def _halves(claims: Sequence[Claim]) -> list[tuple[Claim, ...]]:
    # In a group, any of them may be the killer: the attempt that was counted for this try stands.
    # Alone, there is no other suspect: each death counts.
    if len(claims) < 2:  # noqa: PLR2004 - one cannot be halved
        return [(replace(claim, attempt=claim.attempt + 1),) for claim in claims]
    middle = (len(claims) + 1) // 2
    return [tuple(claims[:middle]), tuple(claims[middle:])]
