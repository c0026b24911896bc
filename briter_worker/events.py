"""Events: one frozen dataclass for everything that happens. Sinks turn them into log lines and receipts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from briter_worker.job import GIT_SYNC


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base class. `name` is the public name of the event, `level` the level of its log line."""

    name: ClassVar[str]
    level: ClassVar[str] = "info"
    unlogged: ClassVar[frozenset[str]] = frozenset()
    """Fields for the history that the log leaves out."""


@dataclass(frozen=True, kw_only=True)
class JobEvent(Event):
    """Base class of the events of one job."""

    job_id: str
    slug: str


@dataclass(frozen=True, kw_only=True)
class JobStarted(JobEvent):
    """An attempt starts; exactly one outcome follows."""

    name = "start"
    unlogged = frozenset({"title", "saved_at", "due_at"})
    attempt: int
    dry_run: bool
    title: str
    """The commit message's first line."""
    saved_at: float
    due_at: float | None
    """The time that the job was scheduled for, if any."""


@dataclass(frozen=True, kw_only=True)
class JobOutcome(JobEvent):
    """Base class of the outcomes of an attempt."""

    unlogged = frozenset({"job_type", "webhook"})
    attempt: int
    dry_run: bool
    duration_ms: int
    rejected_paths: tuple[str, ...] = ()
    job_type: str = GIT_SYNC
    webhook: str | None = None
    """Address to notify. The address may contain a secret, so neither log nor history has it."""


@dataclass(frozen=True, kw_only=True)
class Published(JobOutcome):
    """The job's commit is on the remote (in a dry run: would be)."""

    name = "published"
    commit: str


@dataclass(frozen=True, kw_only=True)
class NoChange(JobOutcome):
    """The remote has the content of the job already."""

    name = "nochange"


@dataclass(frozen=True, kw_only=True)
class NoPaths(JobOutcome):
    """None of the job's paths may be published; the job is a dead letter."""

    name = "nopaths"
    level = "error"
    error: str
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class Failed(JobOutcome):
    """The attempt failed and is repeated at `retry_at`."""

    name = "failed"
    level = "warning"
    error: str
    failure: str
    fix: str = ""
    retry_at: float


@dataclass(frozen=True, kw_only=True)
class Snoozed(JobOutcome):
    """The job is deferred to `retry_at`; the attempt does not count."""

    name = "snoozed"
    error: str
    retry_at: float


@dataclass(frozen=True, kw_only=True)
class Handled(JobOutcome):
    """A plugin handled a job of its own type."""

    name = "handled"


@dataclass(frozen=True, kw_only=True)
class DeadLettered(JobOutcome):
    """The job is not tried again by itself, except after an environment failure (`Revived`)."""

    name = "dead-lettered"
    level = "error"
    error: str
    failure: str
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class Superseded(JobEvent):
    """A newer save of the post replaced the job and took over its paths."""

    name = "superseded"
    superseded_by: str


@dataclass(frozen=True, kw_only=True)
class Cancelled(JobEvent):
    """The job left the queue on request."""

    name = "cancelled"


@dataclass(frozen=True, kw_only=True)
class Quarantined(JobEvent):
    """A file that is not a job was quarantined; a failed job names it."""

    name = "quarantined"
    level = "error"
    error: str
    file: str
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class Revived(JobEvent):
    """A dead letter that an environment failure caused is pending again, because a push succeeded."""

    name = "revived"


@dataclass(frozen=True, kw_only=True)
class Warned(Event):
    """Something needs attention, but no job failed by it."""

    name = "warning"
    level = "warning"
    error: str
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class ConditionChanged(Event):
    """The site condition changed: an environment failure began, or ended (`condition` is None)."""

    name = "condition"
    level = "warning"
    condition: str | None
    failure: str | None
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class Paused(Event):
    """Publishing pauses until a time, or until `resume`."""

    name = "paused"
    level = "warning"
    reason: str
    until: float | None


@dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    """The pause ended."""

    name = "resumed"


@dataclass(frozen=True, kw_only=True)
class HistoryRetired(Event):
    """Old receipts became stale, and older ones were deleted."""

    name = "history-retired"
    stale: int
    deleted: int


@dataclass(frozen=True, kw_only=True)
class Progress(Event):
    """Progress of the running drain. Not for the log."""

    name = "progress"
    level = "debug"
    phase: str
    done: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Reaped(Event):
    """In a cluster: the node that had the site died or was cut off, and the site was freed."""

    name = "reaped"
    level = "warning"
    site: str
    worker: int | None
    """The number of the worker that had the site, if still known."""


@dataclass(frozen=True, kw_only=True)
class WorkerStarted(Event):
    """The worker holds the site's lock and starts."""

    name = "worker-started"
    pid: int
    dry_run: bool


@dataclass(frozen=True, kw_only=True)
class WorkerSkipped(Event):
    """Another worker has the site; this one exits."""

    name = "worker-skipped"
    message: str
    holder_pid: int | None


@dataclass(frozen=True, kw_only=True)
class WorkerStopping(Event):
    """The worker claims no new jobs."""

    name = "worker-stopping"
    signal: str


@dataclass(frozen=True, kw_only=True)
class WorkerStopped(Event):
    """The worker is about to release the lock."""

    name = "worker-stopped"
    drained: int
