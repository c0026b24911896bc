"""Taking what is due: the newest save of each slug, with the paths of those it supersedes."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING

from briter_worker.errors import Kind, explained
from briter_worker.job import Status, joined
from briter_worker.ports import PutAside, Superseding
from briter_worker.queues.index import RETRY_TROUBLE, Index, kind_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from briter_worker.ports import Claim
    from briter_worker.queues.flight import Flight, Held
    from briter_worker.queues.quarantine import Quarantine
    from briter_worker.queues.recovery import Recovery

_NO_FOLDER = frozenset({errno.EEXIST, errno.ENOTDIR})


@dataclass(frozen=True, slots=True)
class Haul:
    """What was taken, earliest due first, and what was tidied on the way."""

    due: Sequence[Held] = ()
    superseded: tuple[Superseding, ...] = ()
    put_aside: tuple[PutAside, ...] = ()


class Claiming:
    """Decides what is due, on the files actually taken. The caller holds the queue's lock."""

    def __init__(
        self, flight: Flight, index: Index, quarantine: Quarantine, recovery: Recovery, longest_delay: float
    ) -> None:
        self._flight = flight
        self._index = index
        self._quarantine = quarantine
        self._recovery = recovery
        self._longest_delay = longest_delay
        self._untidy = False
        self.in_the_way: dict[str, str] = {}
        """What is no job and could not be put aside when that was tried last, by name, with the reasons."""

    def is_idle(self, now: float) -> bool:
        """Whether there is nothing to take and nothing to tidy; asks no disk."""
        due = self._index.next_due()
        return not (
            self._untidy or self._index.crowded or self._index.ripe(now) or (due is not None and due <= now)
        )

    def interrupted(self, now: float) -> None:
        """What was taken and got no journal is an orphan now: given back before the next claim."""
        self._untidy = True
        self._index.restore(now)

    def haul(self, now: float) -> Haul:
        """Every due job, in flight now."""
        if self._untidy:
            self._recovery.tidy(now)
            self._index.refresh(now)
            self._untidy = False
        put_aside = [aside for name in self._index.ripe(now) if (aside := self._put_aside(name, now))]
        superseded, taken, back = self._settle_crowds(now)
        slugs = {held.job.slug for held in taken}
        for name in self._index.take_due(now):
            held = self.take(name)
            if held is None:
                continue
            if self._is_due(held, now) and held.job.slug not in slugs:
                slugs.add(held.job.slug)
                taken.append(self._with_lost_paths(held))
            else:
                back.append(held.name)
        self._flight.give_back(back)
        taken.sort(key=lambda held: (held.job.due_at(now, self._longest_delay), *held.order))
        return Haul(taken, tuple(superseded), tuple(put_aside))

    def take(self, name: str) -> Held | None:
        """The job in a waiting file, out of everyone else's reach; what is no job (any more) stays."""
        taken = self._flight.take(name)
        self._index.forget(name)
        if taken is None:
            return None
        held = self._flight.read(taken)
        if held is None:
            self._flight.give_back([taken])
        return held

    def _is_due(self, held: Held, now: float) -> bool:
        return held.job.status is Status.PENDING and held.job.due_at(now, self._longest_delay) <= now

    def _settle_crowds(self, now: float) -> tuple[list[Superseding], list[Held], list[str]]:
        """Of several saves of a slug the newest stays, with all their paths; likewise of dead letters."""
        superseded: list[Superseding] = []
        due: list[Held] = []
        back: list[str] = []
        losers: list[str] = []
        for slug in sorted(self._index.crowded):
            for status, names in (
                (Status.PENDING, list(self._index.pending.get(slug, ()))),
                (Status.FAILED, self._index.joinable(slug)),
            ):
                if len(names) < 2:  # noqa: PLR2004 - one is no crowd
                    continue
                all_taken = [held for name in names if (held := self.take(name)) is not None]
                rivals = [h for h in all_taken if h.job.slug == slug and h.job.status is status]
                back += [held.name for held in all_taken if held not in rivals]
                if not rivals:
                    continue
                winner, *older = sorted(rivals, key=lambda held: held.order, reverse=True)
                winner = self._with_paths(winner, joined(winner.job.paths, *(h.job.paths for h in older)))
                losers += [held.name for held in older]
                superseded += [Superseding(held.job.id, slug, winner.job.id) for held in older]
                if self._is_due(winner, now):
                    due.append(self._with_lost_paths(winner))
                else:
                    back.append(winner.name)
        if losers:
            # The winners' joined paths are durable before the older files go.
            self._flight.sync()
            self._flight.drop(losers)
        return superseded, due, back

    def _with_lost_paths(self, held: Held) -> Held:
        """With the paths of an older dead letter that this job's publication will remove.

        What was refused is not carried on: it would have the newer save refused, too.
        """
        lost = [
            other.paths
            for name in self._index.failed.get(held.job.slug, ())
            if (other := self._index.seen[name].job) is not None
            and other.created_at <= held.job.created_at
            and kind_of(other) in {Kind.TRANSIENT, Kind.ENVIRONMENT}
        ]
        return self._with_paths(held, joined(held.job.paths, *lost))

    def _with_paths(self, held: Held, paths: tuple[str, ...]) -> Held:
        if set(paths) == set(held.job.paths):
            return held
        return self._flight.rewrite(held, {**held.document, "paths": list(paths)})

    def _put_aside(self, name: str, now: float) -> PutAside | None:
        seen = self._index.seen[name]
        try:
            taken = self._flight.take(name)
            self._index.forget(name)
            if taken is None:
                self.in_the_way.pop(name, None)
                return None
            sighting = self._flight.look(taken)
            trouble = sighting.trouble
            # A writer may have finished it, or begun a new one, since we looked.
            if trouble is None or (trouble.passing and not seen.is_still(sighting.stat)):
                self._flight.give_back([taken])
                self.in_the_way.pop(name, None)
                return None
            try:
                aside = self._quarantine.put_aside(taken, name, sighting, trouble, now)
            except OSError:
                self._flight.give_back([taken])
                raise
        except OSError as error:
            # This file stays; the others go on.
            self.in_the_way[name] = _why(error)
            self._untidy = True
            self._index.postpone(name, now + RETRY_TROUBLE)
            self._index.notice()
            return None
        self.in_the_way.pop(name, None)
        return aside

    def drop_dead_letters(self, claims: Iterable[Claim]) -> None:
        """The dead letters that these published saves replace are gone; newer ones stay."""
        gone: list[str] = []
        back: list[str] = []
        for claim in claims:
            for name in list(self._index.failed.get(claim.job.slug, ())):
                held = self.take(name)
                if held is None:
                    continue
                job = held.job
                over = (
                    job.status is Status.FAILED
                    and job.slug == claim.job.slug
                    and job.created_at <= claim.job.created_at
                )
                (gone if over else back).append(held.name)
        try:
            self._flight.give_back(back)
            if gone:
                self._flight.drop(gone)
        except OSError:
            # They wait again at the next claim, so that the next attempt finds them.
            self._untidy = True
            raise


def _why(error: OSError) -> str:
    """Why a file could not be put aside, and what to do about it."""
    if error.errno in _NO_FOLDER:
        fix = "have a folder there that the worker's user may write to"
        return f"{error.filename} is no folder, nor can it be made. Fix: {fix}"
    return explained(error)
