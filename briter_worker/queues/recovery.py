"""What a dead worker left in flight: settled, to be finished, or to be tried again in halves."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING
from uuid import uuid4

from briter_worker.job import Status
from briter_worker.ports import Batch, Claim

if TYPE_CHECKING:
    from briter_worker.queues.flight import Flight, Held
    from briter_worker.queues.index import Index
    from briter_worker.queues.journal import Journal


class Recovery:
    """Puts in order what a crash interrupted. The caller holds the queue's lock."""

    def __init__(self, flight: Flight, index: Index, journal: Journal) -> None:
        self._flight = flight
        self._index = index
        self._journal = journal

    def tidy(self, now: float) -> None:
        """What was taken without a journal, by a claim or a command that died, waits again uncounted."""
        owned = {name for entry in self._journal.entries() for name in entry.claims}
        orphans = [name for name in self._flight.names() if name not in owned]
        if orphans:
            self._index.notice()
            self._index.refresh(now)
            self._settle(orphans)

    def sweep(self) -> None:
        """Half-written files of dead workers; nobody else writes here, and the queue's lock is held."""
        with contextlib.suppress(FileNotFoundError):
            for path in self._flight.claimed.iterdir():
                if path.name.startswith(".") and path.suffix == ".tmp":
                    path.unlink(missing_ok=True)

    def batches(self, now: float) -> list[Batch]:
        """Every batch that was not closed, with those of its claims that were not settled."""
        entries = self._journal.entries()
        if not entries:
            return []
        self._index.notice()
        self._index.refresh(now)
        owner = {name: entry.key for entry in entries for name in entry.claims}
        found = []
        for entry in entries:
            claims = []
            settled = []
            for name, attempt in entry.claims.items():
                if owner[name] != entry.key:
                    continue
                held = self._flight.read(name)
                is_wanted = not self._flight.is_marked(name)
                if held is None or self._twin(held) or (is_wanted and _is_settled(held, attempt)):
                    settled.append(name)
                else:
                    claims.append(Claim(name, held.job, attempt))
            self._settle(settled)
            if claims:
                found.append(Batch(entry.key, tuple(claims), entry.plans))
            else:
                self._journal.close(entry.key)
        return found

    def split(self, batch: Batch, now: float) -> list[Batch]:
        """The batch again if its work had not begun, else in halves, neither of them begun.

        A claim of which a newer save waits, perhaps on hold, waits with it: the next claim joins the two.
        """
        claims = [claim for claim in batch.claims if self._flight.read(claim.key) is not None]
        self._index.notice()
        self._index.refresh(now)
        outdone = [claim for claim in claims if self._is_outdone(claim)]
        if outdone:
            self._flight.give_back([claim.key for claim in outdone])
            self._index.notice()
        claims = [claim for claim in claims if claim not in outdone]
        entry = next((entry for entry in self._journal.entries() if entry.key == batch.key), None)
        if not claims:
            self._journal.close(batch.key)
            return []
        if entry is not None and not entry.started:
            return [Batch(batch.key, tuple(claims))]
        # In a group, any of them may be the killer: the attempt that was counted for this try stands.
        # Alone, there is no other suspect: each death counts.
        if len(claims) == 1:
            only = claims[0]
            halves = [[Claim(only.key, only.job, only.attempt + 1)]]
        else:
            middle = (len(claims) + 1) // 2
            halves = [claims[:middle], claims[middle:]]
        found = []
        for half in halves:
            key = uuid4().hex
            attempts = {claim.key: claim.attempt for claim in half}
            self._journal.open(key, attempts, started=False)
            found.append(Batch(key, tuple(half)))
        self._journal.close(batch.key)
        return found

    def _is_outdone(self, claim: Claim) -> bool:
        waiting = [self._index.seen[name].job for name in self._index.pending.get(claim.job.slug, ())]
        return any(job is not None and job.created_at > claim.job.created_at for job in waiting)

    def _settle(self, names: list[str]) -> None:
        """Each waits in the queue exactly once."""
        twins: list[str] = []
        others: list[str] = []
        for name in names:
            held = self._flight.read(name)
            (twins if held is not None and self._twin(held) else others).append(name)
        if twins:
            self._flight.drop(twins)
        self._flight.give_back(others)
        self._index.notice()

    def _twin(self, held: Held) -> bool:
        """Whether the queue has this very save: a crash came between giving it back and letting it go."""
        job = held.job
        for name in [*self._index.pending.get(job.slug, ()), *self._index.failed.get(job.slug, ())]:
            other = self._index.seen[name].job
            if (
                other is not None
                and (other.id, other.created_at) == (job.id, job.created_at)
                and set(job.paths) <= set(other.paths)
            ):
                return True
        return False


def _is_settled(held: Held, attempt: int) -> bool:
    """Whether it already says what became of the attempt, and was about to be given back."""
    return held.job.status is Status.FAILED or held.job.attempts >= attempt
