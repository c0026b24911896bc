"""How the site stands: what waits and since when, who publishes, and what is wrong with it."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from briter_worker.errors import for_people
from briter_worker.job import State, format_time
from briter_worker.lock import is_held, read_holder
from briter_worker.sinks.condition import is_environment, well_since
from briter_worker.wiring import open_backoff, open_database, open_queue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from briter_worker.ports import Pause
    from briter_worker.queues.disk import DiskQueue
    from briter_worker.queues.postgres.queue import PostgresQueue
    from briter_worker.queues.steering import Shown
    from briter_worker.settings import Settings

_LEAST_PATIENCE = 60.0
"""A heartbeat may be this late in any case: a loaded host is no dead worker."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds the site's lock, as its record says."""

    pid: int
    host: str | None
    alive: bool
    heartbeat: float | None


@dataclass(frozen=True, slots=True)
class Standing:
    """All that `status` tells. Ages and waits are seconds."""

    now: float
    jobs: dict[str, int]
    oldest: dict[str, float | None]
    """For each state, the age of its oldest save."""
    waiting_since: float | None
    """Since when the post that waits longest has waited: since its save, or since it was due."""
    unpushed_since: float | None
    """The same, with those that failed for good."""
    next_due_in: float | None
    """How long until something is due: 0 when something is, None when nothing waits."""
    worker: Holder | None
    hosts: int | None
    """In a cluster, how many are there to publish; None beside a folder."""
    paused: Pause | None
    condition: str | None
    """What keeps any post of the site from being published, as far as the last attempts tell."""
    failure: str | None
    """The condition's word."""
    quarantined: int
    stuck: dict[str, str]
    dry_run: bool
    worktree: str
    branch: str
    remote: str
    queue: str

    @property
    def has_worker(self) -> bool:
        """Whether somebody is there to publish."""
        return bool(self.hosts) if self.hosts is not None else self.worker is not None and self.worker.alive

    def as_json(self) -> dict[str, Any]:
        """For programs, in camelCase."""
        due = None if self.next_due_in is None else format_time(self.now + self.next_due_in)
        return {
            "jobs": self.jobs,
            "oldestSeconds": self.oldest,
            "oldestWaitingSeconds": None if self.waiting_since is None else self.now - self.waiting_since,
            "nextDue": due,
            "worker": None if self.worker is None else _as_json(self.worker),
            "hosts": self.hosts,
            "paused": None if self.paused is None else pause_as_json(self.paused),
            "condition": self.condition,
            "failure": self.failure,
            "quarantined": self.quarantined,
            "stuck": [{"file": file, "reason": reason} for file, reason in self.stuck.items()],
            "dryRun": self.dry_run,
            "worktree": self.worktree,
            "branch": self.branch,
            "remote": self.remote,
            "queue": self.queue,
        }


def pause_as_json(pause: Pause) -> dict[str, Any]:
    """A pause, for programs."""
    until = None if pause.until is None else format_time(pause.until)
    return {"since": format_time(pause.since), "until": until, "reason": pause.reason or None}


def _as_json(holder: Holder) -> dict[str, Any]:
    beat = None if holder.heartbeat is None else format_time(holder.heartbeat)
    return {"pid": holder.pid, "host": holder.host, "alive": holder.alive, "heartbeat": beat}


def stand(
    settings: Settings,
    now: float,
    *,
    queue: DiskQueue | PostgresQueue | None = None,
    rows: Sequence[Shown] | None = None,
) -> Standing:
    """How the site stands now. Changes nothing.

    Whoever asks often passes the queue it keeps, and the `rows` that its `jobs` has just brought.
    """
    queue = queue or open_queue(settings)
    rows = queue.jobs(now) if rows is None else rows
    counts = Counter(row.state for row in rows)
    oldest: dict[State, float] = {}
    for row in rows:
        oldest[row.state] = max(oldest.get(row.state, 0.0), now - row.job.created_at)
    longest = open_backoff(settings).longest
    waits = [
        max(0.0, row.job.due_at(now, longest) - now)
        for row in rows
        if row.state in {State.PENDING, State.SCHEDULED, State.RETRYING}
    ]
    surroundings = _cluster(settings) if settings.database_url else _machine(settings, now)
    worst = _condition(rows, surroundings.well_since)
    due = [row for row in rows if row.state is not State.SCHEDULED]
    since = [waits_since(row) for row in due]
    waiting = [moment for row, moment in zip(due, since, strict=True) if row.state is not State.FAILED]
    return Standing(
        now=now,
        jobs={state.value: counts[state] for state in State},
        oldest={state.value: oldest.get(state) for state in State},
        waiting_since=min(waiting, default=None),
        unpushed_since=min(since, default=None),
        next_due_in=min(waits, default=None),
        worker=surroundings.worker,
        hosts=surroundings.hosts,
        paused=queue.paused(now),
        condition=None if worst is None else for_people(worst.job.last_error or worst.job.failure or ""),
        failure=None if worst is None else worst.job.failure,
        quarantined=len(queue.quarantined()),
        stuck={for_people(name): for_people(reason) for name, reason in queue.stuck(now).items()},
        dry_run=settings.worker_dry_run,
        worktree=surroundings.worktree,
        branch=settings.git_branch,
        remote=surroundings.remote,
        queue=surroundings.queue,
    )


def waits_since(row: Shown) -> float:
    """Since when the post waits: since its save, or since it was due."""
    return max(row.job.created_at, row.job.scheduled_for or 0.0)


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """Where the site is, and who is there to publish it."""

    worker: Holder | None
    hosts: int | None
    well_since: float
    worktree: str
    remote: str
    queue: str


def _machine(settings: Settings, now: float) -> _Surroundings:
    return _Surroundings(
        worker=holder(settings, now),
        hosts=None,
        well_since=well_since(settings.condition_path),
        worktree=str(settings.git_worktree),
        remote=settings.git_remote,
        queue=str(settings.queue_root),
    )


def _cluster(settings: Settings) -> _Surroundings:
    from briter_worker.cluster import sites  # noqa: PLC0415 - for a cluster only

    database = open_database(settings)
    return _Surroundings(
        worker=None,
        hosts=sites.hosts(database),
        well_since=sites.published_at(database, settings.site),
        worktree="",
        remote=sites.get(database, settings.site).remote,
        queue=f"the site {settings.site} of the cluster",
    )


def _condition(rows: Sequence[Shown], well: float) -> Shown | None:
    """The job that was the last to fail by the site's surroundings, while nothing has got over them."""
    ill = [
        row
        for row in rows
        if row.job.failure and row.state is not State.CLAIMED and is_environment(row.job.failure)
    ]
    # Each once: for a file, it is a look at the disk.
    last, failed_at = max(((row, row.changed_at) for row in ill), key=itemgetter(1), default=(None, 0.0))
    return last if failed_at > well else None


def holder(settings: Settings, now: float) -> Holder | None:
    """Who holds the site's lock, if its record names anybody. Never touches the lock."""
    recorded = read_holder(settings.lock_path)
    if recorded is None:
        return None
    alive = is_held(settings.lock_path, now=now, stale_after=_patience(settings))
    return Holder(recorded.pid, recorded.host, alive, recorded.heartbeat)


def _patience(settings: Settings) -> float:
    return max(settings.worker_lock_stale_ms / 1000, _LEAST_PATIENCE)


def ailments(settings: Settings, now: float, *, expect_worker: bool) -> list[str]:
    """Why posts are not being published on this host, in one line each; empty when all is well.

    Quick, and touches nothing: a container's engine asks every few seconds.
    """
    if settings.database_url:
        return _cluster_ailments(settings, expect_worker=expect_worker)
    found = []
    if not os.access(settings.queue_root, os.R_OK | os.W_OK | os.X_OK):
        there = "cannot be read and written" if Path(settings.queue_root).exists() else "does not exist"
        found.append(f"the queue's folder {settings.queue_root} {there}")
    if expect_worker and (problem := _lifeless(settings, now)):
        found.append(problem)
    return found


def _cluster_ailments(settings: Settings, *, expect_worker: bool) -> list[str]:
    from briter_worker.cluster import sites  # noqa: PLC0415 - for a cluster only

    database = open_database(settings)
    try:
        database.check()
        if expect_worker and not sites.hosts(database):
            return ["no worker is running: no host of the cluster has lately shown that it lives"]
    except OSError as error:
        return [str(error)]
    return []


def _lifeless(settings: Settings, now: float) -> str | None:
    worker = holder(settings, now)
    if worker is None:
        return f"no worker is running: nothing holds {settings.lock_path}"
    if not worker.alive:
        return f"no worker is running: PID {worker.pid}, which held the lock, is gone"
    if worker.heartbeat is None:
        return f"PID {worker.pid} holds the lock, but it is no worker: it has no heartbeat"
    silent = now - worker.heartbeat
    if abs(silent) > _patience(settings):
        return f"the worker (PID {worker.pid}) has shown no heartbeat for {silent:.0f} s"
    return None
