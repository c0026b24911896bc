"""The design on one page: what the drain needs of a queue, a publisher and a sink.

A job is *claimed*, its declared paths are *staged* to changes, the publisher turns all jobs of a batch
into commits and one push, and each job is *settled*. The push is the commit point: the publisher records
a `Plan` durably before it, so that a crash after it is healed from the plan, and a crash before it leaves
nothing behind.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from dataclasses import dataclass

    from briter_worker.errors import Failure
    from briter_worker.events import Event
    from briter_worker.job import Job
else:
    from briter_worker.lazily import dataclass


@dataclass(frozen=True)
class Claim:
    """A job that this worker has taken and nobody else can. `key` names it within its batch."""

    key: str
    job: Job
    attempt: int
    """The running attempt, counted from 1, durably counted before the work began."""


@dataclass(frozen=True)
class Superseding:
    """An older job of a slug gave way to a newer one, which has its paths now."""

    job_id: str
    slug: str
    by: str


@dataclass(frozen=True)
class PutAside:
    """A file that is no job, moved out of the way; a failed job of this id and slug names it."""

    job_id: str
    slug: str
    reason: str
    file: str


@dataclass(frozen=True)
class Plan:
    """What one push is about to do: enough to finish it, or to see that it never happened."""

    old: str
    """The local branch's tip before."""
    new: str
    """The commit that the remote branch will have."""
    ref: str
    """The private ref that holds `new`."""
    commits: Mapping[str, str]
    """For each job, by its claim's key, the commit that carries it."""
    staged: Mapping[str, str | None]
    """The blob that was read for each path (None: deleted): a work tree file still like that is untouched."""
    dry_run: bool
    remote: str | None = None
    """Where the remote branch was before."""


@dataclass(frozen=True)
class Batch:
    """The jobs of one drain, all claimed, with the plans of the pushes that a dead worker had begun."""

    key: str
    claims: tuple[Claim, ...] = ()
    plans: tuple[Plan, ...] = ()


@dataclass(frozen=True)
class Found:
    """What a look into the queue brought: a batch of due jobs, and what was tidied on the way."""

    batch: Batch | None = None
    superseded: tuple[Superseding, ...] = ()
    put_aside: tuple[PutAside, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What became of one claim. With `failure` None it is on the remote: by `commit`, or unchanged."""

    key: str
    commit: str | None = None
    failure: Failure | None = None
    text: str = ""
    rejected_paths: tuple[str, ...] = ()
    cancelled: bool = False
    """Left out of the push on request: nothing of it is on the remote."""
    snooze_until: float | None = None
    """Not tried: to be tried again then, as if this attempt had not been."""
    overtaken: bool = False
    """Not tried: while it was read, a post on hold was saved into the same files."""


@dataclass(frozen=True)
class Pause:
    """Somebody wants nothing published: until a time, or until they end it."""

    since: float
    until: float | None
    reason: str

    def lasts(self, now: float) -> bool:
        """Whether it has not ended by itself."""
        return self.until is None or self.until > now


class Queue(Protocol):
    """Where jobs wait. Every change of state is durable when the call returns."""

    def recover(self, now: float) -> Sequence[Batch]:
        """What a dead worker left in flight, to be finished from its plans or taken up again."""
        ...

    def claim(self, now: float) -> Found:
        """Take every due job, newest of its slug; count the attempt; tidy what is no job."""
        ...

    def retake(self, batch: Batch, now: float) -> Sequence[Batch]:
        """An interrupted batch that did not land, ready to be tried again, in halves when it killed.

        Each is to be begun (`begin`) before its work starts. A claim whose attempt is beyond the maximum
        has killed that many workers: it is to be buried.
        """
        ...

    def begin(self, batch: Batch) -> None:
        """The work on a retaken batch starts: dying from here on is its doing. `claim` begins its own."""
        ...

    def record(self, batch: Batch, plan: Plan) -> None:
        """Remember durably what the next push is about to do."""
        ...

    def finish(self, batch: Batch, claims: Sequence[Claim]) -> None:
        """These are on the remote: they leave the queue, with any older dead letter of their slugs."""
        ...

    def put_off(self, batch: Batch, claim: Claim, failure: Failure, text: str, until: float) -> bool:
        """Back to waiting, to be tried again at `until`; a newer save of the post takes it over.

        Taking over is the next `claim`'s doing, which is due at once and reports it. False when somebody
        wants it cancelled: then nothing was done, and it is to be dropped. So for the next two.
        """
        ...

    def snooze(self, batch: Batch, claim: Claim, text: str, until: float) -> bool:
        """Back to waiting until then, this attempt not counted."""
        ...

    def bury(self, batch: Batch, claim: Claim, failure: Failure, text: str) -> bool:
        """Dead-letter it, with its reason; but if a newer save of the post waits, that one takes it over."""
        ...

    def release(self, batch: Batch, claims: Sequence[Claim]) -> None:
        """Back to waiting as if they had not been claimed: the attempt does not count.

        Those that somebody wants cancelled stay, to be dropped.
        """
        ...

    def cancelled(self, batch: Batch) -> Collection[str]:
        """Of these claims, by their keys, those that a person wants cancelled."""
        ...

    def overtaken(self, batch: Batch, now: float) -> Collection[str]:
        """Of these claims, by their keys, those whose posts have been saved again since, and on hold.

        Where contents are read when a job's turn comes, theirs may be the held ones by now.
        """
        ...

    def drop(self, batch: Batch, claims: Sequence[Claim]) -> None:
        """These leave the queue as if they had never been asked for; a newer save of theirs stays."""
        ...

    def close(self, batch: Batch) -> None:
        """The batch is settled: forget its plans."""
        ...

    def revive(self, now: float) -> Sequence[Job]:
        """Dead letters that the site's surroundings caused wait again, with no attempts."""
        ...

    def held_paths(self, now: float) -> Collection[str]:
        """What jobs that are still on hold declare: no folder of another job may carry it."""
        ...

    def held_since(self, held: Collection[str], now: float) -> Collection[str]:
        """What such jobs declare now that is not among `held`: what was read of it meanwhile may be theirs.

        Nothing, where jobs carry their contents.
        """
        ...

    def next_due(self, now: float) -> float | None:
        """When the next waiting job becomes due, if any waits."""
        ...

    def paused(self, now: float) -> Pause | None:
        """The pause that lasts, if one does; it outlives every worker."""
        ...


@dataclass(frozen=True)
class Request:
    """One post for the publisher: the declared paths, not yet trusted, and the commit they become."""

    key: str
    slug: str
    paths: tuple[str, ...]
    message: str
    author: tuple[str, str] | None = None


@dataclass(frozen=True)
class Change:
    """One path of one commit. `blob` None deletes it; `base` is the version its author started from."""

    path: str
    mode: str
    blob: str | None
    base: str | None
    base_mode: str = ""
    """The mode that the author started from; empty where nobody knows. Then the branch's counts."""


@dataclass(frozen=True)
class Staged:
    """A request's declared paths, read: what may be published, and what may not, with the reasons."""

    changes: tuple[Change, ...] = ()
    rejected: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    failure: Failure | None = None
    """Set when this request alone cannot be published; `text` says why."""
    text: str = ""


class Publisher(Protocol):
    """Turns requests into commits on the remote: all of a request, or nothing of it."""

    def publish(
        self,
        requests: Sequence[Request],
        *,
        held: Collection[str],
        examine: Callable[[str, Sequence[Change]], Outcome | None],
        cancelled: Callable[[], Collection[str]],
        record: Callable[[Plan], None],
        now: float,
    ) -> Iterator[Sequence[Outcome]]:
        """Yield outcomes as soon as they are certain, in groups; each request gets exactly one.

        `examine` may end a request, by its key, when its changes are known and nothing is built yet.
        `cancelled` tells the keys of what is not wanted any more; it is asked up to the push, not after it.
        A PublishError concerns every request that has no outcome yet; none of those is on the remote.
        """
        ...

    def landed(self, plan: Plan) -> bool:
        """Whether the remote has what a dead worker's plan was pushing; if so, it is adopted."""
        ...

    def flush(self, now: float) -> str | None:
        """Push what dry runs have committed; the commit that the remote has now, if anything was pushed."""
        ...

    def tidy(self, now: float) -> None:
        """Remove what dead workers and old batches left in the repository; finish late adoptions."""
        ...


@dataclass(frozen=True)
class JobKind:
    """What a plugin does with jobs of a type of its own. What is None is as for all jobs."""

    handle: Callable[[Job], None]
    max_attempts: int | None = None
    delays: tuple[float, ...] | None = None
    """Seconds between attempts; the last repeats."""


@dataclass(frozen=True)
class Publication:
    """A job's commit, on the remote."""

    job: Job
    commit: str
    attempt: int
    dry_run: bool
    rejected_paths: tuple[str, ...] = ()


@dataclass(frozen=True)
class Delivered:
    """A file as it was when its job was saved, where jobs carry contents. `blob` None: it was gone."""

    path: str
    mode: str
    blob: str | None
    saved_at: float
    base: str | None = None
    """The version its author started from (None: there was none), where `knows_base`."""
    knows_base: bool = False


@dataclass(frozen=True)
class Delivery:
    """All that came with one job: its declared files, and everything below each of its declared folders."""

    files: tuple[Delivered, ...] = ()
    folders: tuple[str, ...] = ()
    """Declared paths that were folders: what the branch has below them and `files` has not is deleted."""


class Deliveries(Protocol):
    """The contents that jobs carry, for a publisher that has no work tree of the CMS to read."""

    def of(self, keys: Collection[str]) -> Mapping[str, Delivery]:
        """What came with these claims."""
        ...

    def content(self, blob: str) -> Iterator[bytes]:
        """A content, part by part."""
        ...

    def published(self, paths: Collection[str]) -> Mapping[str, float]:
        """When the version was saved that was published last, of those paths that ever were."""
        ...


class Extensions(Protocol):
    """What plugins add. Each may raise RefusedError and SnoozedError; what else it raises is transient."""

    def kind(self, name: str) -> JobKind | None:
        """How jobs of this type are handled, if a plugin does."""
        ...

    def before_publish(self, job: Job, changes: Sequence[Change]) -> None:
        """The job's changes are known, and nothing is built yet."""
        ...

    def around_attempt(self, job: Job, attempt: int) -> AbstractContextManager[None]:
        """What is to be entered before an attempt, and left after it."""
        ...

    def after_publish(self, publication: Publication) -> None:
        """The job is on the remote, and has left the queue."""
        ...


class EventSink(Protocol):
    """Is told what happened. A sink that fails never stops publishing."""

    def __call__(self, event: Event, /) -> None:
        """Take note of the event."""
        ...
