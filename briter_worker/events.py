"""Events: one class for everything that happens. Sinks turn them into log lines and receipts."""

from __future__ import annotations

from inspect import get_annotations
from types import SimpleNamespace
from typing import TYPE_CHECKING, ClassVar, NamedTuple, dataclass_transform

from briter_worker.errors import FailureCode
from briter_worker.job import GIT_SYNC

if TYPE_CHECKING:
    from collections.abc import Sequence

    from briter_worker.job import Job

_MAX_UPDATED_PATHS = 1000


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Event(SimpleNamespace):
    """Base class. `name` is the public name of the event, `level` the level of its log line.

    A subclass declares its fields as a dataclass does; mypy checks them.
    """

    name: ClassVar[str]
    level: ClassVar[str] = "info"
    unlogged: ClassVar[frozenset[str]] = frozenset()
    """Fields for the history that the log leaves out."""
    fields: ClassVar[tuple[str, ...]] = ()
    """The names of the event's fields, those of base classes first."""

    def __init_subclass__(cls) -> None:
        cls.fields = (*cls.fields, *get_annotations(cls))


class JobEvent(Event):
    """Base class of the events of one job."""

    job_id: str
    slug: str


class DeclaredSave(NamedTuple):
    """Paths that an unpublished save of a post declared, without those that nobody ever had."""

    job_id: str
    slug: str
    saved_at: float
    paths: tuple[str, ...]

    @classmethod
    def of(cls, job: Job) -> DeclaredSave:
        """Return the save of a job. A job that failed as missing knows of no file."""
        paths = () if job.failure == FailureCode.MISSING else job.paths
        return cls(job.id, job.slug, job.created_at, paths)


class JobStarted(JobEvent):
    """An attempt starts; exactly one outcome follows."""

    name = "start"
    unlogged = frozenset({"title", "author", "saved_at", "due_at"})
    attempt: int
    dry_run: bool
    title: str
    """The commit message's first line."""
    author: str = ""
    saved_at: float
    due_at: float | None
    """The time that the job was scheduled for, if any."""


class JobOutcome(JobEvent):
    """Base class of the outcomes of an attempt."""

    unlogged = frozenset({"job_type", "webhook", "start"})
    attempt: int
    dry_run: bool
    duration_ms: int
    rejected_paths: tuple[str, ...] = ()
    job_type: str = GIT_SYNC
    webhook: str | None = None
    """Address to notify. The address may contain a secret, so neither log nor history has it."""
    start: JobStarted | None = None
    """For the receipt, where a dead worker did not write the start."""


class FileChange(NamedTuple):
    """A file that a commit changed, with its lines added and removed (None: not text, or not at hand)."""

    path: str
    added: int | None
    removed: int | None
    deleted: bool = False


class Published(JobOutcome):
    """The job's commit is on the remote (in a dry run: would be)."""

    name = "published"
    unlogged = JobOutcome.unlogged | {"changes"}
    commit: str
    changes: tuple[FileChange, ...] = ()
    signed_with: str | None = None
    waiting_paths: tuple[str, ...] = ()
    """Declared paths that are not published yet: the job waits for them until `retry_at`."""
    retry_at: float | None = None
    reason: str | None = None
    """Why the job waits."""


class PublishedInPart(Published):
    """The job ends, and some of its paths are not published: they never came. Nothing was pushed now.

    `commit` is of the earlier attempt that published the others.
    """


class NoChange(JobOutcome):
    """The remote has the content of the job already, or a plugin has handled a job of its own type."""

    name = "nochange"
    reason: str | None = None
    """Why there is no change, where a user's git did that."""


class JobFailure(JobOutcome):
    """Base class of the outcomes of a job that is not published."""

    level = "error"
    unlogged = JobOutcome.unlogged | {"save"}
    error: str
    fix: str = ""
    save: DeclaredSave | None = None


class NoPaths(JobFailure):
    """None of the job's paths may be published; the job is a dead letter."""

    name = "nopaths"


class Failed(JobFailure):
    """The job is tried again at `retry_at`, because it failed or was deferred (which costs no attempt)."""

    name = "failed"
    level = "warning"
    failure: str
    retry_at: float


class DeadLettered(JobFailure):
    """The job is not tried again by itself, except after an environment failure (`Revived`)."""

    name = "dead-lettered"
    failure: str


class Superseded(JobEvent):
    """A newer save of the post replaced the job and took over its paths."""

    name = "superseded"
    unlogged = frozenset({"save"})
    superseded_by: str
    save: DeclaredSave | None = None


class Cancelled(JobEvent):
    """The job left the queue on request."""

    name = "cancelled"
    unlogged = frozenset({"save"})
    save: DeclaredSave | None = None


class Quarantined(JobEvent):
    """A file that is not a job was quarantined; a failed job names it."""

    name = "quarantined"
    level = "error"
    error: str
    file: str
    fix: str = ""


class ConflictAhead(JobEvent):
    """The remote changed a file in the same lines as the CMS, which has not enqueued a job for it yet."""

    name = "conflict-ahead"
    level = "warning"
    error: str
    fix: str


class Revived(JobEvent):
    """A dead letter that an environment failure caused is pending again, because a push succeeded."""

    name = "revived"


class Enqueued(Event):
    """The watcher wrote a job for a post whose files changed."""

    name = "enqueued"
    job_id: str
    slug: str
    paths: tuple[str, ...]


class Warned(Event):
    """Something needs attention, but no job failed by it."""

    name = "warning"
    level = "warning"
    error: str
    fix: str = ""


class ConditionChanged(Event):
    """The site condition changed: an environment failure began, or ended (`condition` is None)."""

    name = "condition"
    level = "warning"
    condition: str | None
    failure: str | None
    fix: str = ""


class Paused(Event):
    """Publishing pauses until a time, or until `resume`."""

    name = "paused"
    level = "warning"
    reason: str
    until: float | None


class Resumed(Event):
    """The pause ended."""

    name = "resumed"


class SiteUpdated(Event):
    """Files of the site are as others changed them on the remote. A post's own push is no update."""

    name = "site-updated"
    commit: str
    paths: tuple[str, ...]
    total: int
    """The number of files; `paths` has the first thousand."""

    @classmethod
    def of(cls, commit: str, paths: Sequence[str]) -> SiteUpdated:
        """Return the event of these files."""
        return cls(commit=commit, paths=tuple(paths[:_MAX_UPDATED_PATHS]), total=len(paths))


class Steered(Event):
    """A user steered jobs or the site, from the command line or the dashboard."""

    name = "steered"
    action: str
    by: str
    job_id: str | None
    slug: str | None


class Progress(Event):
    """Progress of the running drain. Not for the log."""

    name = "progress"
    level = "debug"
    phase: str
    done: int
    total: int


class Reaped(Event):
    """In a cluster: the node that had the site died or was cut off, and the site was freed."""

    name = "reaped"
    level = "warning"
    site: str
    worker: str
    """The node that had the site."""


class WorkerStarted(Event):
    """The worker holds the site's lock and starts."""

    name = "worker-started"
    pid: int
    dry_run: bool


class WorkerSkipped(Event):
    """Another worker has the site; this one exits."""

    name = "worker-skipped"
    message: str
    holder_pid: int | None


class WorkerStopping(Event):
    """The worker claims no new jobs. `message`: what it waits for and how long, if a publication runs."""

    name = "worker-stopping"
    signal: str
    message: str | None = None


class WorkerStopped(Event):
    """The worker is about to release the lock."""

    name = "worker-stopped"
    drained: int
    once: bool | None = None
    """The worker was to publish what was due, as cron starts it."""
