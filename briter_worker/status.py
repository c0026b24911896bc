"""The status of a site: its jobs, its worker and its known problems. Reading it changes nothing."""

from __future__ import annotations

import os
from contextlib import closing, nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from briter_worker.errors import FixableError, failure_text, is_environment, one_line, quote_fix, sentence
from briter_worker.job import LATEST, Document, Job, State, count, format_time
from briter_worker.lock import Holder, read_holder
from briter_worker.sinks.store import StoreError
from briter_worker.sinks.webhooks import origin_of
from briter_worker.wiring import open_backoff, open_database, open_history, open_queue, open_repository

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from briter_worker.ports import ListedJob, Pause
    from briter_worker.settings import Settings
    from briter_worker.sinks.history import History, Receipt
    from briter_worker.sinks.metrics import Sample
    from briter_worker.wiring import SiteQueue

PULL_COMMAND = "briter-worker pull --rebase --push"
"""Publishes the local commits of a user."""
_MIN_PATIENCE_S = 60.0
"""A heartbeat may be this late on a loaded machine."""
_PAUSE_S = 300.0
"""The time from one run of cron's to the next, until the history has two."""
_MIN_PAUSE_S = 60.0
_LATEST_RUNS = 11

LocalCommits = tuple[tuple[str, str], ...]
"""The id and subject of each commit of the local branch that the remote lacks."""


@dataclass(frozen=True, slots=True)
class Headline:
    """The state of a site or of a post in one sentence. `tone` is good, busy, warn or bad."""

    tone: str
    text: str
    detail: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteStatus:
    """The status of a site. Ages are in seconds."""

    now: float
    jobs: dict[str, int]
    oldest: dict[str, float | None]
    """Age of the oldest save in each state."""
    waiting_since: float | None
    """The beginning of the longest wait of a due job: its save, or the time at which it was due."""
    unpushed_since: float | None
    """The same, including dead letters."""
    next_due: float | None
    """`now` if a job is due, None if none waits."""
    worker: Holder | None
    hosts: int | None
    """Number of nodes in a cluster; None on disk."""
    paused: Pause | None
    condition: str | None
    """The environment failure that stops all posts, as far as the last attempts tell."""
    failure: str | None
    """The condition's failure code."""
    fix: str | None
    """The condition's fix."""
    condition_since: float | None
    condition_checked: float | None
    """The time of the last attempt that failed by it."""
    last_run: float | None
    """The time at which the last worker ended, if jobs wait for the next one and it is not overdue."""
    quarantined: int
    stuck: dict[str, str]
    dry_run: bool
    worktree: str
    branch: str
    remote: str
    queue: str
    local_commits: LocalCommits = ()
    partly_published: Sequence[str] = ()
    """The posts whose newest publication left paths out, newest first; read if no other post needs a look."""

    @property
    def has_worker(self) -> bool:
        """Return True if a worker runs."""
        if self.hosts is not None:
            return bool(self.hosts)
        return self.worker is not None and self.worker.alive

    @property
    def is_worker_due(self) -> bool:
        """Return True if a worker runs, or cron is about to start one."""
        return self.has_worker or self.last_run is not None

    def headline(self) -> Headline:
        """Return what matters most."""
        if obstacle := self.obstacle():
            return obstacle
        for state, tone, text in (
            (State.CLAIMED, "busy", "being published"),
            (State.FAILED, "warn", "failed"),
            (State.RETRYING, "warn", "will be retried"),
            (State.PENDING, "busy", "about to be published"),
            (State.QUIET, "busy", "about to be published, when no further save follows"),
        ):
            if self.jobs[state]:
                return Headline(tone, f"{count(self.jobs[state], 'post')} {text}")
        if self.dry_run:
            tried = self.jobs[State.TRIED]
            text = f"{count(tried, 'post')} tried" if tried else "No post waits"
            fix = "set BRITER_WORKER_DRY_RUN=false for the worker: it then publishes what the queue holds"
            return Headline("busy", f"{text}: a dry run publishes nothing", "", fix)
        if posts := self.partly_published:
            text = f"{count(len(posts), 'post')} published only in part, the latest {one_line(posts[0])}"
            fix = "briter-worker show SLUG names the paths that are missing or not allowed: correct them"
            return Headline("warn", text, "", fix)
        if self.jobs[State.SCHEDULED]:
            scheduled = count(self.jobs[State.SCHEDULED], "post")
            return Headline("good", f"Everything that was due is on the remote; {scheduled} scheduled")
        return Headline("good", "Everything that was saved is on the remote")

    def obstacle(self) -> Headline | None:
        """Return why no post can be published, or None."""
        if self.paused is not None:
            until = "" if self.paused.until is None else f" until {_local(self.paused.until)}"
            return Headline("warn", f"Publishing is paused{until}", one_line(self.paused.reason))
        states = (State.PENDING, State.RETRYING, State.SCHEDULED, State.QUIET, State.CLAIMED)
        waiting = sum(self.jobs[state] for state in states)
        posts = f"{count(waiting, 'post')} {'waits' if waiting == 1 else 'wait'}"
        if waiting and not self.is_worker_due:
            where = "on the server" if self.hosts is None else "on a node of the cluster"
            fix = f"start the worker {where}: briter-worker run"
            return Headline("bad", f"{posts}, and no worker is running", "", fix)
        if self.condition is not None:
            text = f"No post can be published: {failure_text(self.failure) or 'the last attempt failed'}"
            return Headline("bad", text, sentence(quote_fix(self.condition)), self.fix or "")
        if self.jobs[State.PENDING] and not self.has_worker and self.last_run:
            text = f"{posts} for the next run of the worker; the last one ended at {_local(self.last_run)}"
            return Headline("busy", text)
        return None

    def to_json(self) -> dict[str, Any]:
        """Return the status for programs, in camelCase."""
        worker = None
        if self.worker is not None:
            worker = {name: getattr(self.worker, name) for name in ("pid", "host", "alive")}
            worker["heartbeat"] = _time(self.worker.heartbeat)
        return {
            "headline": asdict(self.headline()),
            "jobs": self.jobs,
            "oldestSeconds": self.oldest,
            "oldestWaitingSeconds": None if self.waiting_since is None else self.now - self.waiting_since,
            "nextDue": _time(self.next_due),
            "worker": worker,
            "hosts": self.hosts,
            "paused": None if self.paused is None else self.paused.to_json(),
            "condition": self.condition,
            "failure": self.failure,
            "fix": self.fix,
            "conditionSince": _time(self.condition_since),
            "conditionChecked": _time(self.condition_checked),
            "localCommits": [{"commit": sha, "subject": subject} for sha, subject in self.local_commits],
            "quarantined": self.quarantined,
            "stuck": [{"file": file, "reason": reason} for file, reason in self.stuck.items()],
            "dryRun": self.dry_run,
            "worktree": self.worktree,
            "branch": self.branch,
            "remote": self.remote,
            "queue": self.queue,
        }


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else format_time(seconds)


def job_to_json(row: ListedJob) -> Document:
    """Return the job's document with the keys that its producer omitted, and `state`."""
    job = row.job
    omitted = {
        "type": job.type,
        "createdAt": format_time(job.created_at),
        "status": job.status.value,
        "nextAttemptAt": None,
        "lastError": None,
        "failure": None,
        "fix": None,
    }
    written = {key: value for key, value in row.read().items() if value is not None or key not in omitted}
    if isinstance(webhook := written.get("webhook"), str):
        written["webhook"] = one_line(origin_of(webhook))  # the rest of the address is often a secret
    return {**omitted, **written, "state": row.state.value}


def post_to_json(rows: Sequence[ListedJob], receipts: Sequence[Receipt]) -> Document:
    """Return the newest job's keys, or the last receipt's, with `progress` and `receipts`."""
    if rows:
        document = job_to_json(rows[0])
    else:
        last = next((each for each in receipts if each.outcome), receipts[0])
        document = {"id": last.job_id, "slug": last.slug, "state": last.outcome or "claimed"}
    running = [each.to_json() for each in receipts if each.outcome is None]
    return {
        **document,
        "progress": running[0] if running else None,
        "receipts": [each.to_json() for each in receipts if each.outcome],
    }


def read_status(
    settings: Settings,
    now: float,
    *,
    queue: SiteQueue | None = None,
    jobs: Sequence[ListedJob] | None = None,
    local_commits: LocalCommits | None = None,
    history: History | None = None,
) -> SiteStatus:
    """Return the status of the site.

    Frequent callers pass the queue and the history that they keep, the `jobs` that the queue listed just now,
    and the `local_commits` that they read before (None asks git).
    """
    queue = queue or open_queue(settings)
    rows = queue.jobs(now) if jobs is None else jobs
    longest = open_backoff(settings).longest
    by_state: dict[State, list[ListedJob]] = {state: [] for state in State}
    for row in rows:
        by_state[row.state].append(row)
    later = [*by_state[State.SCHEDULED], *by_state[State.QUIET]]
    waiting = [*by_state[State.PENDING], *by_state[State.RETRYING]]
    due = [*waiting, *by_state[State.TRIED], *by_state[State.CLAIMED]]
    site = _cluster_site(settings) if settings.database_url else _disk_site(settings, now)
    is_open = bool(waiting or later or by_state[State.CLAIMED])
    is_expected = is_open and site["worker"] is None and not settings.database_url
    if site["dry_run"] is None:
        site["dry_run"] = bool(by_state[State.TRIED]) or _was_dry_run(settings, history)
    # To read the history may change its files, so it is read for a job that needs it.
    with nullcontext(history) if history else closing(open_history(settings)) as opened:
        last, since = _find_condition(rows, opened)
        last_run = _last_run(settings, now, opened) if is_expected else None
        partly: list[str] = []
        if not (due or by_state[State.QUIET] or by_state[State.FAILED]):
            with suppress(StoreError):
                partly = opened.partly_published()
    return SiteStatus(
        now=now,
        jobs={state.value: len(found) for state, found in by_state.items()},
        oldest={
            state.value: max((max(0.0, now - row.job.created_at) for row in found), default=None)
            for state, found in by_state.items()
        },
        waiting_since=min(map(waits_since, due), default=None),
        unpushed_since=min(map(waits_since, [*due, *by_state[State.FAILED]]), default=None),
        next_due=min((max(now, row.job.due_at(now, longest)) for row in [*waiting, *later]), default=None),
        last_run=last_run,
        paused=queue.active_pause(now),
        condition=one_line(last.last_error or last.failure or "") if last else None,
        failure=last.failure if last else None,
        fix=last.fix if last else None,
        condition_since=since,
        condition_checked=last.updated_at if last else None,
        quarantined=len(queue.quarantined()),
        stuck={one_line(name): one_line(why) for name, why in queue.unusable_files(now).items()},
        branch=settings.git_branch,
        local_commits=read_local_commits(settings) if local_commits is None else local_commits,
        partly_published=partly,
        **site,
    )


def waits_since(row: ListedJob) -> float:
    """Return when the wait of a job began: at its save, or when it was due."""
    return max(row.job.created_at, row.job.scheduled_for or 0.0)


def _local(seconds: float) -> str:
    return f"{datetime.fromtimestamp(min(seconds, LATEST), UTC).astimezone():%-d %b, %H:%M}"


def _disk_site(settings: Settings, now: float) -> dict[str, Any]:
    worker = lock_holder(settings, now)
    return {
        "worker": worker,
        "dry_run": worker.dry_run if worker and worker.alive else None,
        "hosts": None,
        "worktree": str(settings.git_worktree),
        "remote": settings.git_remote,
        "queue": str(settings.queue_root),
    }


def _last_run(settings: Settings, now: float, history: History) -> float | None:
    """Return when the last worker ended, if it left the lock in order and cron's next run is not overdue."""
    try:
        ended = settings.lock_path.stat().st_mtime
    except OSError:
        return None
    pauses: list[float] = []
    with suppress(StoreError):
        pauses = [later - earlier for later, earlier in pairwise(history.runs(_LATEST_RUNS))]
    longest = max(_MIN_PAUSE_S, *pauses) if pauses else _PAUSE_S
    return ended if now - ended <= 2 * longest else None


def _cluster_site(settings: Settings) -> dict[str, Any]:
    from briter_worker.cluster import health, sites  # noqa: PLC0415 - the extra [postgres]

    database = open_database(settings)
    site = sites.get(database, settings.site)
    return {
        "worker": None,
        "dry_run": settings.worker_dry_run if "workerDryRun" in site.settings else None,
        "hosts": len(health.running_nodes(database)),
        "worktree": "",
        "remote": site.remote,
        "queue": f"the site {settings.site} of the cluster",
    }


def _find_condition(rows: Sequence[ListedJob], history: History) -> tuple[Job | None, float | None]:
    """Return the job that failed last by an environment failure, and since when there is such a failure.

    Return None if a push succeeded since. The history is read only for such a job: looking changes nothing.
    """
    failed = [row.job for row in rows if is_environment(row.job.failure) and row.state is not State.CLAIMED]
    last = max(failed, key=lambda job: job.updated_at, default=None)
    if last is None:
        return None, None
    known = None
    with suppress(StoreError):
        known = history.condition()
    if known is None:
        return last, min(job.updated_at for job in failed)
    if known.failure is None and known.changed_at >= last.updated_at:
        return None, None
    return last, known.changed_at if known.failure else last.updated_at


def _was_dry_run(settings: Settings, history: History | None) -> bool:
    """Return whether the worker's last attempt was a dry run; without one, what the settings here say."""
    with suppress(StoreError):
        if history and (started := history.last_moment("start")):
            return started.data.get("dryRun") is True
    return settings.worker_dry_run


def read_local_commits(settings: Settings) -> LocalCommits:
    """Return the local commits that the remote lacks; none where git cannot tell."""
    if settings.database_url:
        return ()
    try:
        commits = open_repository(settings).local_commits("--max-count=50")
        return tuple((each.commit, one_line(each.subject)) for each in commits)
    except (FixableError, OSError):
        return ()


def lock_holder(settings: Settings, now: float) -> Holder | None:
    """Return the process that the site's lock names, if any. Does not touch the lock."""
    return read_holder(settings.lock_path, now=now, stale_after=_patience(settings))


def _patience(settings: Settings) -> float:
    return max(settings.worker_lock_stale_ms / 1000, _MIN_PATIENCE_S)


def health_problems(settings: Settings, now: float, *, expect_worker: bool) -> list[str]:
    """Return why this machine publishes no posts, one line each. Fast: containers ask every few seconds."""
    if settings.database_url:
        return _cluster_problems(settings, expect_worker=expect_worker)
    problems = []
    if not os.access(settings.queue_root, os.R_OK | os.W_OK | os.X_OK):
        what = "cannot be read and written" if settings.queue_root.exists() else "does not exist"
        problems.append(f"the queue folder {settings.queue_root} {what}")
    worker = lock_holder(settings, now)
    if not expect_worker:
        return problems
    if worker is None:
        problems.append(f"no worker is running: nothing holds {settings.lock_path}")
    elif not worker.alive:
        problems.append(f"no worker is running: PID {worker.pid}, which held the lock, is gone")
    elif worker.heartbeat is None:
        problems.append(f"PID {worker.pid} holds the lock, but is not a worker: it has no heartbeat")
    elif (silent := abs(now - worker.heartbeat)) > _patience(settings):
        problems.append(f"the worker (PID {worker.pid}) has shown no heartbeat for {silent:.0f} s")
    return problems


def _cluster_problems(settings: Settings, *, expect_worker: bool) -> list[str]:
    from briter_worker.cluster import health  # noqa: PLC0415 - the extra [postgres]

    database = open_database(settings)
    try:
        database.check()
        if expect_worker and not health.running_nodes(database):
            return ["no worker is running: no node of the cluster has a recent heartbeat"]
    except OSError as error:
        return [str(error)]
    return []


def measure_site(status: SiteStatus) -> Iterator[Sample]:
    """Yield the gauges of a site with a folder and a worker of its own."""
    worker = status.worker if status.worker and status.worker.alive else None
    for state, number in status.jobs.items():
        yield "jobs", {"state": state}, number
    yield "oldest_waiting_seconds", {}, _age(status.waiting_since, status.now)
    yield "dead_letters", {}, status.jobs["failed"]
    yield "paused", {}, int(status.paused is not None)
    yield "in_flight", {}, status.jobs["claimed"]
    yield "oldest_unpushed_seconds", {}, _age(status.unpushed_since, status.now)
    yield "worker_alive", {}, int(worker is not None)
    yield "dry_run", {}, int(status.dry_run)
    yield "quarantined", {}, status.quarantined
    if status.failure is not None:
        yield "condition", {"failure": status.failure}, 1
    if worker is not None:
        yield "lock_holder", {"host": one_line(worker.host or ""), "pid": str(worker.pid)}, 1
        if worker.heartbeat is not None:
            yield "worker_heartbeat_age_seconds", {}, _age(worker.heartbeat, status.now)


def _age(since: float | None, now: float) -> float:
    return 0.0 if since is None else max(0.0, now - since)
