"""The design on one page: what the drain needs from a queue, a publisher and an event sink.

The drain claims the jobs that are due, hands them to the publisher, and acknowledges each job. The push is
the commit point: everything before it happens aside, and the publisher records its plan durably before the
push, so that `Publisher.resolve` can finish or discard it after a crash.
"""

from __future__ import annotations

import hashlib
import random as rng
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from briter_worker.job import Document, Job, State, format_time

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from briter_worker.errors import Failure
    from briter_worker.events import Event, FileChange, Quarantined, Superseded

_SHA1_LENGTH = 40


class Claim(NamedTuple):
    """A job that this worker took and no other worker can take."""

    key: str
    """Names this save of the job, unique in the site and stable across a crash of the worker."""
    job: Job
    attempt: int
    """The running attempt, counted from 1 and stored durably before the work started."""
    alone: bool = False
    """True if the batch has (or had, before a crash) only this job; the crash then counts against the job."""
    odd_keys: tuple[tuple[str, str], ...] = ()
    """Keys of the job that look like keys of the contract's table, each with the right spelling."""


class ClaimResult(NamedTuple):
    """The jobs claimed by one look into the queue, and what was tidied on the way."""

    claims: tuple[Claim, ...] = ()
    superseded: tuple[Superseded, ...] = ()
    quarantined: tuple[Quarantined, ...] = ()


class Pause(NamedTuple):
    """An order to publish nothing, until a time or until `resume`."""

    since: float
    until: float | None
    reason: str

    def is_active(self, now: float) -> bool:
        """Return True if the pause has not ended by itself."""
        return self.until is None or self.until > now

    def to_json(self) -> Document:
        """Return the pause for programs."""
        until = None if self.until is None else format_time(self.until)
        return {"since": format_time(self.since), "until": until, "reason": self.reason or None}


class Queue(Protocol):
    """The queue of jobs. Every change of state is durable when the call returns.

    A method that finds a newer save of the claimed post never loses it: the newer save stays pending.
    """

    def claim(self, now: float) -> ClaimResult:
        """Claim every due job, newest of its slug; count the attempt; quarantine what is not a job.

        A dry-run queue does not claim jobs that were tried and not saved again.
        """

    def recover(self, now: float) -> Sequence[Claim]:
        """Return the claims that a dead worker left in flight. Changes no count."""

    def reclaim(self, claim: Claim, now: float) -> Claim:
        """Claim a recovered job again, to be published alone; a crash while it was alone counts."""

    def acknowledge(self, claims: Sequence[Claim], rejected: Mapping[str, Collection[str]]) -> None:
        """Remove published jobs, and older dead letters of their slugs as far as they are published now.

        `rejected`: by claim key, declared paths that were not published. A dead letter keeps such paths.
        """

    def acknowledge_part(self, claim: Claim, outcome: Outcome, left: Leftover, *, at: float) -> bool:
        """Put the job of a published commit back until `at`, for the paths that are left.

        Otherwise as `acknowledge` and `retry_later`.
        """

    def mark_tried(self, claims: Sequence[Claim], now: float) -> None:
        """Put jobs that a dry run has built back as tried, with `dryRunAt`; the attempt does not count."""

    def retry_later(self, claim: Claim, failure: Failure, *, at: float, counts: bool = True) -> bool:
        """Put the job back until `at`. Return False, and remove the job, if a user cancelled it."""

    def dead_letter(self, claim: Claim, failure: Failure) -> bool:
        """Store the job as failed; a newer save of the post takes over its paths instead.

        Return False, and remove the job, if a user cancelled it.
        """

    def release(self, claims: Sequence[Claim]) -> Sequence[Claim]:
        """Put jobs back as if they had not been claimed. Remove and return those that a user cancelled."""

    def withdrawn(self, claims: Sequence[Claim], now: float) -> Mapping[str, Result]:
        """Return the claims, by key, that may not be published: CANCELLED on request, or RELEASED.

        RELEASED are those whose posts have been saved again since, scheduled for later: their files may have
        the content whose time has not come.
        """

    def requeue(self, now: float, except_for: Collection[str] = ()) -> Sequence[Job]:
        """After a successful push, undo what environment failures did; return the revived dead letters.

        Dead letters of environment failures are pending again, with no attempts; retries that an environment
        failure other than a time-out delayed are due at once. Jobs with the ids `except_for` failed beside
        that push, which proves nothing of them.
        """

    def scheduled_paths(self, now: float) -> Mapping[str, float]:
        """Return the paths that scheduled jobs declare, each with the time it is scheduled for.

        0 stands for a job that cannot be read, and may be scheduled.
        """

    def next_due(self, now: float) -> float | None:
        """Return when the next pending job is due, or None if none waits."""

    def active_pause(self, now: float) -> Pause | None:
        """Return the active pause, if any; a pause outlives every worker."""


class ListedJob(NamedTuple):
    """A job of the queue, as commands and pages show it."""

    job: Job
    state: State
    read: Callable[[], Document]
    """Return the job's document, with the keys that the worker does not know."""
    where: str
    """The job's file, or the name of its row."""


class Cancellation(NamedTuple):
    """The jobs that a cancellation removed, and those in flight that it removes if no push has begun."""

    removed: tuple[Job, ...] = ()
    requested: tuple[Job, ...] = ()


class Change(NamedTuple):
    """One path of one commit."""

    path: str
    mode: str
    blob: str | None
    """Object id of the new content; None deletes the path."""


class Result(Enum):
    """Result of one claim."""

    PUBLISHED = "published"
    """The commit is on the remote; in a dry run, the remote would take it."""
    UNCHANGED = "unchanged"
    """The remote has the content already."""
    FAILED = "failed"
    """Not published because of `failure`. With `retry_at`: deferred until then, at no attempt."""
    CANCELLED = "cancelled"
    """Left out of the push on request."""
    RELEASED = "released"
    """Not tried; the next claim decides again."""


class Outcome(NamedTuple):
    """Result of one claim, and its facts."""

    key: str
    result: Result
    commit: str | None = None
    failure: Failure | None = None
    retry_at: float | None = None
    rejected_paths: tuple[str, ...] = ()
    """Declared paths that were not published although the job was."""
    missing: tuple[str, ...] = ()
    """Declared paths that neither the site has nor the version that its files are edits of."""
    withheld: Mapping[str, float] = MappingProxyType({})
    """Files below declared folders that a scheduled job declares, and its time; 0: that job is unreadable."""
    stashed: Mapping[str, str] = MappingProxyType({})
    """Declared files of which a stash made after the save has another version, and the name of the stash.

    Empty: git has written a conflict into the file since the save.
    """
    restored: str = ""
    """A declared file that git itself has written since the save, where nothing changed."""
    changes: tuple[FileChange, ...] = ()
    """What the commit changed."""
    signed_with: str | None = None
    """Kind and key of the commit's signature."""


class Leftover(NamedTuple):
    """The part of a job that stays in the queue, and why."""

    failure: Failure
    paths: tuple[str, ...]
    """The declared paths that the job still stands for."""
    retry_at: float | None
    """The job waits until then, at no attempt; None: the attempt counts, and the next delay is the job's."""


class Publisher(Protocol):
    """Turns claims into commits on one remote branch: all of a claim, or nothing of it."""

    def publish(
        self,
        claims: Sequence[Claim],
        *,
        scheduled: Callable[[], Mapping[str, float]],
        check: Callable[[str, Sequence[Change]], Outcome | None],
        withdrawn: Callable[[], Mapping[str, Result]],
        now: float,
    ) -> Iterator[Sequence[Outcome]]:
        """Build one commit per claim, push once, and yield each outcome as soon as it is certain.

        The caller stores the outcomes before it resumes the iteration: the publisher then drops its plan.
        `scheduled` is called before the files are read and again afterwards: files of scheduled jobs are left
        out, and a claim that may have read newly scheduled content is released. `check` may end a claim
        when its changes are known. `withdrawn` is called just before each push: see `Queue`.

        Raises PublishError, or any other exception, for all claims that have no outcome yet. None of them
        is on the remote unless `undecided` names it.
        """

    def resolve(self) -> Iterator[Sequence[Outcome]]:
        """Ask the remote about each recorded plan; yield the outcomes of the claims that landed.

        A plan is dropped when the iteration is resumed. A plan that did not land yields no outcomes.
        Raises PublishError when the remote cannot be asked; the remaining plans stay.
        """

    def ever_had(self, paths: Collection[str]) -> Collection[str]:
        """Return which of these declared paths the remote's branch has, or ever had."""

    def undecided(self) -> Collection[str]:
        """Return the claim keys of the recorded plans: nothing may be decided about these jobs."""

    def tidy(self, now: float) -> None:
        """Sync the local branch if that is late, and remove what dead workers left in the repository."""


class Remainder(NamedTuple):
    """Paths that a claim declares and its commit lacks, as an outcome has them; of a stored plan, a list."""

    rejected_paths: Sequence[str] = ()
    missing: Sequence[str] = ()
    withheld: Mapping[str, float] = MappingProxyType({})
    stashed: Mapping[str, str] = MappingProxyType({})


class Plan(NamedTuple):
    """One push, as recorded before it."""

    id: str
    base: str | None
    """The remote's tip that the commits were built on."""
    tip: str
    """The last commit, which the remote branch shall have."""
    commits: Mapping[str, str]
    """The commit of each claim, by its key; a claim without changes is absent."""
    blobs: Mapping[str, str | None]
    """The blob that was read from the work tree for each path (None: deleted)."""
    unpublished: Mapping[str, Remainder] | None = None
    """By claim key, for claims that declare more than their commits have. None: no claim does."""


class PlanStore(Protocol):
    """The store of a publisher's plans: the repository's `.git/briter/`, or the database."""

    def record(self, plan: Plan) -> None:
        """Store the plan durably."""

    def plans(self) -> Sequence[Plan]:
        """Return the recorded plans, oldest first."""

    def drop(self, plan: Plan) -> None:
        """Forget a plan that is complete; a crash may bring it back, to be resolved once more."""


class Conflict(NamedTuple):
    """Two versions of one file that could not be merged."""

    ours: str | None
    """The blob of the author's version (None: deleted)."""
    theirs: str | None
    """The blob of the remote's version."""
    branch: str
    """The branch of the remote that keeps the author's version; empty where it is kept nowhere else."""
    commit: str | None
    """The tip of that branch."""
    recorded_at: float
    """The time of the conflict: a save before it does not know the remote's version."""


class BaseVersion(NamedTuple):
    """The version that the author's copy of a file is an edit of (None: there was no file)."""

    blob: str | None
    conflicts: Mapping[str, Conflict] = MappingProxyType({})
    """The open conflicts of the copy, by the slug of the job that conflicted."""


class BaseVersions(Protocol):
    """A publisher's memory of the authors' copies of files."""

    def bases(self, paths: Collection[str]) -> Mapping[str, BaseVersion]:
        """Return what is known of these paths."""

    def remember(
        self, versions: Mapping[str, BaseVersion], contents: Mapping[str, bytes], tip: str | None = None
    ) -> None:
        """Store the versions durably, each in place of what was known of its path.

        `contents`: by blob, the contents of base versions that the remote does not have. `tip`: the commit on
        the remote that has the versions.
        """


RESTORE = "restore"
"""Begins the mode of a file that an undo restores."""


class SubmittedFile(NamedTuple):
    """A file as it was when its job was saved, where jobs carry their contents."""

    path: str
    mode: str
    """Git's mode; or `restore LAST TO`: the version at TO, or before LAST, the post's last publication."""
    blob: str | None
    """None: the file was deleted."""
    saved_at: float
    base: str | None = None
    """The version that the author edited (None: there was none), if `has_base`."""
    has_base: bool = False


def blob_hash(size: int, id_length: int = _SHA1_LENGTH) -> hashlib._Hash:
    """Return the hash that makes git's object id of a file, to be updated with the file's content."""
    new = hashlib.sha1 if id_length == _SHA1_LENGTH else hashlib.sha256
    return new(b"blob %d\0" % size, usedforsecurity=False)


def blob_id(content: bytes, id_length: int = _SHA1_LENGTH) -> str:
    """Return git's object id of a file's content."""
    found = blob_hash(len(content), id_length)
    found.update(content)
    return found.hexdigest()


class Payload(NamedTuple):
    """Everything that came with one job: its declared files, and all files below its declared folders."""

    files: tuple[SubmittedFile, ...] = ()
    folders: tuple[str, ...] = ()
    """Declared folders: what the branch has below them and `files` lacks is deleted."""


class PublishedVersion(NamedTuple):
    """The version of a path that was published last."""

    saved_at: float
    outdated_by: str = ""
    """The commit on the remote that has it, where it was published before a backup was restored."""


class Payloads(Protocol):
    """The contents that jobs carry, for a publisher that cannot read the CMS's work tree."""

    def of(self, keys: Collection[str]) -> Mapping[str, Payload]:
        """Return the payload of each claim, by key."""

    def content(self, blob: str) -> bytes:
        """Return the content of a blob. Raises LookupError if the blob is unknown."""

    def published(self, paths: Collection[str]) -> Mapping[str, PublishedVersion]:
        """Return when the version was saved that was published last, for the paths that ever were."""


SHORTEST_WAIT_S = 1.0
"""A shorter wait makes a worker do nothing else than try again."""


class Backoff(NamedTuple):
    """The delays between attempts in seconds: one after each attempt, the last one repeats.

    The first delay may be nothing; no other one is shorter than SHORTEST_WAIT_S.

    `jitter` is the fraction by which a delay varies at random, so that jobs that failed together do not all
    come back together.
    """

    delays: tuple[float, ...]
    jitter: float = 0.0

    @property
    def longest(self) -> float:
        """Return the longest delay: a retry further away was written by a clock that ran ahead."""
        return max(SHORTEST_WAIT_S, *self.delays)

    def delay(self, attempt: int, random: Callable[[], float] = rng.random) -> float:
        """Return the delay after the attempt (counted from 1): never negative, never over `longest`."""
        planned = self.delays[min(attempt, len(self.delays)) - 1]
        delay = planned * (1 + self.jitter * (2 * random() - 1))
        if attempt > 1:
            delay = max(delay, SHORTEST_WAIT_S)
        return min(delay, self.longest)


class JobKind(NamedTuple):
    """A plugin's handling of jobs of a type of its own. None: as for all jobs."""

    handle: Callable[[Job], None]
    max_attempts: int | None = None
    delays: tuple[float, ...] | None = None
    """Seconds between attempts; the last one repeats."""


class Publication(NamedTuple):
    """A job whose commit is on the remote."""

    job: Job
    commit: str
    attempt: int
    dry_run: bool
    rejected_paths: tuple[str, ...] = ()


class EventSink(Protocol):
    """Receives events. A sink that fails never stops publishing."""

    def __call__(self, event: Event, /) -> None:
        """Store the event, then announce it."""

    def deliver(self, events: Sequence[Event], acknowledge: Callable[[], None], /) -> None:
        """Store the events, acknowledge the jobs, then announce the events.

        So a receipt exists before the job leaves the queue, and an announced job has left it. After a crash
        in between, the same events are delivered again. An error of `acknowledge` is raised.
        """
