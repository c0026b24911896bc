"""Everything that happens, one frozen dataclass each. Sinks turn them into lines, receipts and numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from briter_worker.job import GIT_SYNC

if TYPE_CHECKING:
    from dataclasses import dataclass
else:
    from briter_worker.lazily import dataclass


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened. `name` is its word in the log, `level` how much it matters."""

    name: ClassVar[str]
    level: ClassVar[str] = "info"
    unlogged: ClassVar[frozenset[str]] = frozenset()
    """Fields that the log leaves out: they are for the history."""


@dataclass(frozen=True, kw_only=True)
class JobEvent(Event):
    """Something that happened to one job."""

    job_id: str
    slug: str


@dataclass(frozen=True, kw_only=True)
class JobStarted(JobEvent):
    """An attempt begins; exactly one of the outcomes follows."""

    name = "start"
    unlogged = frozenset({"title", "saved_at", "due_at"})
    attempt: int
    dry_run: bool
    title: str
    """The commit message's first line."""
    saved_at: float
    due_at: float | None
    """What it was held until, if it was."""


@dataclass(frozen=True, kw_only=True)
class JobOutcome(JobEvent):
    """How an attempt ended."""

    unlogged = frozenset({"kind", "webhook"})
    attempt: int
    dry_run: bool
    duration_ms: int
    rejected_paths: tuple[str, ...] = ()
    kind: str = GIT_SYNC
    """The job's type."""
    webhook: str | None = None
    """Whom the job's writer wants told. It may hold a secret, so that neither log nor history has it."""


@dataclass(frozen=True, kw_only=True)
class Published(JobOutcome):
    """The job's commit is on the remote (in a dry run: would be)."""

    name = "published"
    commit: str


@dataclass(frozen=True, kw_only=True)
class NoChange(JobOutcome):
    """The remote has all of it already."""

    name = "nochange"


@dataclass(frozen=True, kw_only=True)
class NoPaths(JobOutcome):
    """None of the job's paths may be published; it is dead-lettered."""

    name = "nopaths"
    level = "error"
    error: str


@dataclass(frozen=True, kw_only=True)
class Failed(JobOutcome):
    """The attempt failed and will be repeated at `retry_at`."""

    name = "failed"
    level = "warning"
    error: str
    failure: str
    retry_at: float


@dataclass(frozen=True, kw_only=True)
class Snoozed(JobOutcome):
    """A plugin wants it tried again at `retry_at`; the attempt does not count."""

    name = "snoozed"
    error: str
    retry_at: float


@dataclass(frozen=True, kw_only=True)
class Handled(JobOutcome):
    """A plugin has done what a job of its own type asks for."""

    name = "handled"


@dataclass(frozen=True, kw_only=True)
class DeadLettered(JobOutcome):
    """The job will not be tried again by itself (but see `Revived`)."""

    name = "dead-lettered"
    level = "error"
    error: str
    failure: str


@dataclass(frozen=True, kw_only=True)
class Superseded(JobEvent):
    """A newer save of the post took its place, and its paths."""

    name = "superseded"
    superseded_by: str


@dataclass(frozen=True, kw_only=True)
class Cancelled(JobEvent):
    """The job was taken out of the queue on request."""

    name = "cancelled"


@dataclass(frozen=True, kw_only=True)
class Quarantined(JobEvent):
    """A file that is no job was put aside; a failed job names it."""

    name = "quarantined"
    level = "error"
    error: str
    file: str


@dataclass(frozen=True, kw_only=True)
class Revived(JobEvent):
    """A dead letter that the surroundings had caused waits again, as a push has succeeded."""

    name = "revived"


@dataclass(frozen=True, kw_only=True)
class Warned(Event):
    """Something is not as it should be, but no job failed by it."""

    name = "warning"
    level = "warning"
    error: str


@dataclass(frozen=True, kw_only=True)
class Flushed(Event):
    """Commits that only dry runs had published are on the remote now."""

    name = "flushed"
    commit: str


@dataclass(frozen=True, kw_only=True)
class ConditionChanged(Event):
    """The site's surroundings keep any post from being published, or do so no more: `condition` is absent."""

    name = "condition"
    level = "warning"
    condition: str | None
    failure: str | None


@dataclass(frozen=True, kw_only=True)
class Paused(Event):
    """Nothing is published while it lasts: until a time, or until somebody resumes."""

    name = "paused"
    level = "warning"
    reason: str
    until: float | None


@dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    """The pause is over."""

    name = "resumed"


@dataclass(frozen=True, kw_only=True)
class HistoryRetired(Event):
    """Old receipts are out of sight now, and older ones are deleted."""

    name = "history-retired"
    stale: int
    deleted: int


@dataclass(frozen=True, kw_only=True)
class Progress(Event):
    """How far the running drain is: of all attempts begun and not ended. Not for the log."""

    name = "progress"
    level = "debug"
    phase: str
    done: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Reaped(Event):
    """In a cluster: a worker died, or was cut off, while it had the site; another one takes it up."""

    name = "reaped"
    level = "warning"
    site: str
    worker: int | None
    """The number of the one that had it, where it is still known."""


@dataclass(frozen=True, kw_only=True)
class WorkerStarted(Event):
    """The worker holds the site's lock and begins."""

    name = "worker-started"
    pid: int
    dry_run: bool


@dataclass(frozen=True, kw_only=True)
class WorkerSkipped(Event):
    """Another worker has the site; this one has nothing to do."""

    name = "worker-skipped"
    message: str
    holder_pid: int | None


@dataclass(frozen=True, kw_only=True)
class WorkerStopping(Event):
    """No new job is taken."""

    name = "worker-stopping"
    signal: str


@dataclass(frozen=True, kw_only=True)
class WorkerStopped(Event):
    """The lock is about to be released."""

    name = "worker-stopped"
    drained: int
