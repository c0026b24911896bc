"""The snapshot: the jobs of a site by state, with the site's status, and the headline that sums it up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from briter_worker.job import State
from briter_worker.redaction import one_line
from briter_worker.status import waits_since
from briter_worker.web import labels

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from briter_worker.ports import ListedJob
    from briter_worker.status import SiteStatus


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The queue and the status, as they were read together."""

    status: SiteStatus
    jobs: Mapping[State, Sequence[ListedJob]]
    """By state: scheduled ones by time, failed ones with the latest save first."""
    fingerprint: int
    revision: int
    """Grows when a job changes."""
    problem: str = ""
    """Why the queue cannot be read now; the jobs are then those of the last time."""
    problem_fix: str = ""

    @property
    def failed(self) -> Sequence[ListedJob]:
        """Return the dead letters."""
        return self.jobs[State.FAILED]

    def find(self, wanted: str) -> Sequence[ListedJob]:
        """Return the jobs of this id, else those of this slug; the newest save first."""
        everything = [row for rows in self.jobs.values() for row in rows]
        found = [row for row in everything if row.job.id == wanted]
        return _newest_first(found or [row for row in everything if row.job.slug == wanted])

    def of_slug(self, slug: str) -> Sequence[ListedJob]:
        """Return the jobs of this slug, the newest save first."""
        return _newest_first([row for rows in self.jobs.values() for row in rows if row.job.slug == slug])

    def longest_waiting(self) -> ListedJob | None:
        """Return the due job that waits longest."""
        waiting = (row for state in (State.PENDING, State.RETRYING) for row in self.jobs[state])
        return min(waiting, key=waits_since, default=None)


def _newest_first(rows: Sequence[ListedJob]) -> Sequence[ListedJob]:
    return sorted(rows, key=lambda row: row.job.created_at, reverse=True)


def take_snapshot(rows: Sequence[ListedJob], status: SiteStatus, before: Snapshot | None) -> Snapshot:
    """Sort the jobs of a queue, which come in the order of `DiskQueue.jobs`."""
    jobs: dict[State, list[ListedJob]] = {state: [] for state in State}
    for row in rows:
        jobs[row.state].append(row)
    jobs[State.FAILED].reverse()
    fingerprint = hash(
        tuple(
            (row.job.id, row.state, row.job.created_at, row.job.updated_at, row.job.attempts) for row in rows
        )
    )
    revision = before.revision + (fingerprint != before.fingerprint) if before else 1
    return Snapshot(status, jobs, fingerprint, revision)


@dataclass(frozen=True, slots=True)
class Headline:
    """The site's state in one sentence. `tone` is good, busy, warn or bad."""

    tone: str
    text: str
    detail: str = ""
    fix: str = ""


def headline(snapshot: Snapshot) -> Headline:
    """Return what matters most."""
    return next(_headlines(snapshot))


def obstacle(snapshot: Snapshot) -> Headline | None:
    """Return why no post can be published, or None."""
    return next(_obstacles(snapshot), None)


def _headlines(snapshot: Snapshot) -> Iterator[Headline]:
    number = {state: len(rows) for state, rows in snapshot.jobs.items()}
    yield from _obstacles(snapshot)
    if number[State.CLAIMED]:
        yield Headline("busy", f"{labels.count(number[State.CLAIMED], 'post')} being published")
    if number[State.FAILED]:
        yield Headline("warn", f"{labels.count(number[State.FAILED], 'post')} failed")
    if number[State.RETRYING]:
        yield Headline("warn", f"{labels.count(number[State.RETRYING], 'post')} will be retried")
    if number[State.PENDING]:
        yield Headline("busy", f"{labels.count(number[State.PENDING], 'post')} about to be published")
    if not snapshot.status.dry_run:
        yield Headline("good", "Everything that was saved is live")
    fix = "set BRITER_WORKER_DRY_RUN=false on the server: the worker then publishes what the queue holds"
    tried = labels.count(number[State.TRIED], "post")
    text = f"{tried} tried" if number[State.TRIED] else "No post waits"
    yield Headline("busy", f"{text}: a dry run publishes nothing", "", fix)


def _obstacles(snapshot: Snapshot) -> Iterator[Headline]:
    status = snapshot.status
    if snapshot.problem:
        yield Headline("bad", "The queue cannot be read", snapshot.problem, snapshot.problem_fix)
    if status.paused is not None:
        yield Headline("warn", labels.pause_text(status.paused), one_line(status.paused.reason))
    if status.condition is not None:
        why = labels.reason(status.failure, status.condition, status.fix)
        yield Headline("bad", f"No post can be published: {why.headline}", why.detail, why.fix)
    waiting = len(snapshot.jobs[State.PENDING])
    if waiting and not status.has_worker:
        verb = "wait" if waiting > 1 else "waits"
        text = f"{labels.count(waiting, 'post')} {verb}, and no worker is running"
        where = "on the server" if status.hosts is None else "on a node of the cluster"
        yield Headline("bad", text, "", f"start the worker {where}: briter-worker run")
