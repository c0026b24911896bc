"""What a person sees of the queue, and may do to it, while a worker runs or while none does."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from briter_worker.errors import Failure
from briter_worker.job import Job, State, Status, format_time, joined, rewritten
from briter_worker.queues.sighting import look

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from briter_worker.queues.flight import Flight, Held
    from briter_worker.queues.index import Index
    from briter_worker.queues.journal import Journal
    from briter_worker.queues.recovery import Recovery
    from briter_worker.strictjson import Document


class Shown(Protocol):
    """A job as a person sees it, whichever queue it is in."""

    @property
    def job(self) -> Job:
        """What would be published; in flight, with the running attempt."""
        ...

    @property
    def state(self) -> State:
        """Where it stands."""
        ...

    @property
    def document(self) -> Document:
        """The job's file with every key its writer gave it."""
        ...

    @property
    def place(self) -> str:
        """Where a person finds it."""
        ...

    @property
    def changed_at(self) -> float:
        """When its state changed last."""
        ...


R = TypeVar("R", bound=Shown)

_HOPELESS = frozenset({Failure.MALFORMED, Failure.UNREADABLE, Failure.UNKNOWN_TYPE})
_LOOKS = 5


class SteeringError(Exception):
    """What a person asked of the queue cannot be done; the text says why, and what to do instead."""


class UnknownJobError(SteeringError):
    """The queue has no such job."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A job as a person sees it: what would be published, and where it stands."""

    job: Job
    """With the paths of the older saves that it will supersede; in flight, with the running attempt."""
    state: State
    folder: Path
    name: str

    @property
    def path(self) -> Path:
        """Where its file is. Made when it is asked for: of most of many jobs it never is."""
        return self.folder / self.name

    @property
    def place(self) -> str:
        """Where a person finds it."""
        return str(self.path)

    @property
    def changed_at(self) -> float:
        """When its state changed last; 0 when it has just moved on."""
        try:
            return self.path.stat().st_ctime  # a rewrite keeps the time of the save
        except OSError:
            return 0.0

    @property
    def document(self) -> Document:
        """The job's file with every key its writer gave it, as it is now; or as it was, if it is gone."""
        try:
            document = look(self.path, self.path.name).document
        except OSError:
            document = None
        if document is None or document.get("slug") != self.job.slug:
            document = _document(self.job)
        return {"id": self.job.id, **document, "paths": list(self.job.paths), "attempts": self.job.attempts}


@dataclass(frozen=True, slots=True)
class Cancellation:
    """What `cancel` has done: some are gone; those in flight end as soon as it is safe, if not pushed yet."""

    gone: tuple[Job, ...] = ()
    asked: tuple[Job, ...] = ()


class Steering:
    """Views and commands. What a command decides, it decides on the file that it actually took."""

    def __init__(self, flight: Flight, index: Index, journal: Journal, recovery: Recovery) -> None:
        self._flight = flight
        self._index = index
        self._journal = journal
        self._recovery = recovery

    def jobs(self, now: float) -> list[Listed]:
        """Every job once, in flight first, then waiting by due time, then dead letters."""
        # A job that moves while we look can be in neither folder: look until nothing moved.
        for _ in range(_LOOKS):
            self._index.refresh(now)
            before = self._stamp()
            claimed = self._claimed()
            self._index.refresh(now)
            if self._stamp() == before:
                break
        waiting = [self._effective(names) for names in self._index.pending.values()]
        in_flight = {(listed.job.id, listed.job.slug, listed.job.created_at) for listed in claimed}
        rest = [
            Listed(job, job.state(now), self._flight.root, name)
            for job, name in waiting
            if (job.id, job.slug, job.created_at) not in in_flight
        ]
        rest.sort(key=lambda row: (row.job.due_at(now, float("inf")), row.job.created_at, row.name))
        dead = [
            Listed(self._index.job(name), State.FAILED, self._flight.root, name)
            for names in self._index.failed.values()
            for name in names
        ]
        dead.sort(key=lambda row: (row.job.created_at, row.name))
        return [*claimed, *rest, *dead]

    def find(self, wanted: str, now: float) -> list[Listed]:
        """The job of this id, else all jobs of this slug."""
        return matching(self.jobs(now), wanted)

    def retry(self, wanted: str, now: float) -> list[Job]:
        """Dead letters, and jobs that wait for a retry, are due at once, as if never attempted."""
        return self._retry(to_retry(self._existing(wanted, now), wanted), now)

    def retry_all(self, now: float) -> list[Job]:
        """Every dead letter that a retry can help."""
        return self._retry(helpable(self.jobs(now)), now)

    def publish_now(self, wanted: str, now: float) -> list[Job]:
        """Jobs on hold wait for nothing any more, nor do such as wait for a retry."""
        chosen = to_hurry(self._existing(wanted, now), wanted)
        taken = self._take([row.name for row in chosen])
        jobs = [self._flight.rewrite(held, hurried(held.document, held.job, now)).job for held in taken]
        self._flight.give_back(held.name for held in taken)
        self._index.notice()
        return jobs

    def cancel(self, wanted: str, now: float) -> Cancellation:
        """Waiting jobs and dead letters leave the queue, with the older saves they stand for.

        What a writer has put in the place of one of them meanwhile stays. What is in flight is marked: it
        ends at the next safe point, unless it is being pushed by then.
        """
        rows = self._existing(wanted, now)
        asked = [row for row in rows if row.state is State.CLAIMED]
        for row in asked:
            self._flight.mark(row.name)
        chosen = [row for row in rows if row.state is not State.CLAIMED]
        if not chosen:
            return Cancellation(asked=tuple(row.job for row in asked))
        taken = self._drop(chosen)
        if not taken:
            raise SteeringError(f"{wanted!r} has just been saved again or taken by the worker; look again")
        kept = {row.job.id for row in chosen}
        return Cancellation(
            tuple(held.job for held in taken if held.job.id in kept), tuple(row.job for row in asked)
        )

    def remove(self, rows: Sequence[Listed], now: float) -> None:
        """These waiting jobs and dead letters are kept elsewhere by now; newer saves of them stay."""
        self._index.refresh(now)
        self._drop(rows)

    def _drop(self, rows: Sequence[Listed]) -> list[Held]:
        """Those that are still the saves that were shown, with the older saves they stand for."""
        taken = self._take([name for row in rows for name in self._files_of(row)])
        self._flight.drop(held.name for held in taken)
        return taken

    def _files_of(self, row: Listed) -> list[str]:
        """What was shown as this row. What has been saved since is newer, or declares what it did not."""
        if row.state is State.FAILED:
            names = [name for name in self._index.failed.get(row.job.slug, ()) if name == row.name]
        else:
            names = self._index.pending.get(row.job.slug, [])
        jobs = {name: self._index.job(name) for name in names}
        declared = set(row.job.paths)
        return [
            name
            for name, job in jobs.items()
            if job.created_at <= row.job.created_at and declared.issuperset(job.paths)
        ]

    def _existing(self, wanted: str, now: float) -> list[Listed]:
        self._recovery.tidy(now)
        return existing(self.find(wanted, now), wanted)

    def _retry(self, rows: list[Listed], now: float) -> list[Job]:
        taken = self._take([row.name for row in rows])
        jobs = []
        for held in taken:
            document = rewritten(held.document, status=Status.PENDING, attempts=0, now=now)
            jobs.append(self._flight.rewrite(held, document).job)
        self._flight.give_back(held.name for held in taken)
        self._index.notice()
        return jobs

    def _take(self, names: list[str]) -> list[Held]:
        """Those of the files that are still the saves that were shown; all others stay."""
        taken = []
        back = []
        for name in names:
            job = self._index.job(name)
            held_name = self._flight.take(name)
            self._index.forget(name)
            if held_name is None:
                continue
            held = self._flight.read(held_name)
            if held is not None and _same_save(held.job, job):
                taken.append(held)
            else:
                back.append(held_name)
        self._flight.give_back(back)
        return taken

    def _claimed(self) -> list[Listed]:
        attempts = {name: n for entry in self._journal.entries() for name, n in entry.claims.items()}
        found = []
        for name in self._flight.names():
            held = self._flight.read(name)
            if held is not None:
                job = dataclasses.replace(held.job, attempts=attempts.get(name, held.job.attempts))
                found.append(Listed(job, State.CLAIMED, self._flight.claimed, name))
        return found

    def _effective(self, names: list[str]) -> tuple[Job, str]:
        if len(names) == 1:  # nearly always, and a dashboard asks for a hundred thousand
            return self._index.job(names[0]), names[0]
        first, *older = self._index.newest_first(names)
        job = self._index.job(first)
        return dataclasses.replace(
            job, paths=joined(job.paths, *(self._index.job(name).paths for name in older))
        ), first

    def _stamp(self) -> tuple[int, ...]:
        stamps = []
        for folder in (self._flight.root, self._flight.claimed):
            try:
                stamps.append(folder.stat().st_mtime_ns)
            except FileNotFoundError:
                stamps.append(0)
        return tuple(stamps)


def matching(rows: Sequence[R], wanted: str) -> list[R]:
    """The job of this id, else all jobs of this slug."""
    return [row for row in rows if row.job.id == wanted] or [row for row in rows if row.job.slug == wanted]


def existing(rows: list[R], wanted: str) -> list[R]:
    """What was found. Raises UnknownJobError when nothing was."""
    if not rows:
        raise UnknownJobError(f"the queue has no job with the id or slug {wanted!r}")
    return rows


def to_retry(rows: Sequence[R], wanted: str) -> list[R]:
    """Those that have failed. Raises SteeringError when none has, or a retry cannot help."""
    chosen = [row for row in rows if row.state in {State.FAILED, State.RETRYING}]
    if not chosen:
        raise SteeringError(f"{wanted!r} has not failed: it is {rows[0].state.value}")
    for row in chosen:
        if is_hopeless(row.job):
            raise SteeringError(
                f"{wanted!r} cannot be retried, as its file is no job that could succeed "
                f"({row.job.failure}): save the post again, then cancel this one"
            )
    return chosen


def helpable(rows: Sequence[R]) -> list[R]:
    """The dead letters that a retry can help."""
    return [row for row in rows if row.state is State.FAILED and not is_hopeless(row.job)]


def to_hurry(rows: Sequence[R], wanted: str) -> list[R]:
    """Those that wait for a time. Raises SteeringError when none does."""
    chosen = [row for row in rows if row.state in {State.SCHEDULED, State.RETRYING}]
    if not chosen:
        text = f"{wanted!r} is not on hold: it is {rows[0].state.value}"
        raise SteeringError(f"{text}; use retry" if rows[0].state is State.FAILED else text)
    return chosen


def hurried(document: Document, job: Job, now: float) -> Document:
    """The document of a job that waits for nothing any more."""
    return rewritten(
        {**document, "scheduledFor": None},
        status=Status.PENDING,
        attempts=job.attempts,
        now=now,
        last_error=job.last_error,
        failure=job.failure,
    )


def is_hopeless(job: Job) -> bool:
    """Whether it would fail again however often it is tried: only a new save can help."""
    return job.failure in _HOPELESS


def _same_save(one: Job, other: Job) -> bool:
    return (one.id, one.slug, one.created_at, one.status) == (
        other.id,
        other.slug,
        other.created_at,
        other.status,
    )


def _document(job: Job) -> Document:
    """The contract's keys of a job whose file is gone."""
    times = {
        "createdAt": job.created_at,
        "scheduledFor": job.scheduled_for,
        "nextAttemptAt": job.next_attempt_at,
    }
    return {
        "id": job.id,
        "type": job.type,
        "slug": job.slug,
        "paths": list(job.paths),
        "message": job.message,
        "author": None if job.author is None else dataclasses.asdict(job.author),
        "status": job.status.value,
        "attempts": job.attempts,
        "lastError": job.last_error,
        "failure": job.failure,
        **{key: None if time is None else format_time(time) for key, time in times.items()},
    }
