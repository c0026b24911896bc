"""The commands for jobs: enqueue, list, show, history, retry, cancel, publish-now, undo, pause, resume."""

from __future__ import annotations

import os
import re
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, TypeVar

import typer

from briter_worker import client
from briter_worker.actions import show_difference, steer, undo_post
from briter_worker.allowlist import PathRefusedError, is_inside
from briter_worker.commands import (
    Json,
    SiteOption,
    Wanted,
    complete_slug,
    name_site,
    output,
    read_site,
    report,
    user_name,
    warn,
    write,
)
from briter_worker.errors import DeclinedError, UsageError, many_lines, one_line
from briter_worker.job import State
from briter_worker.status import job_to_json, lock_holder, post_to_json, read_status
from briter_worker.wiring import known_now, open_history, open_postgres_queue, open_queue, read_now

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from briter_worker.job import Job
    from briter_worker.ports import ListedJob
    from briter_worker.settings import Settings
    from briter_worker.sinks.history import Receipt
    from briter_worker.wiring import SiteQueue

T = TypeVar("T")
_WATCH_INTERVAL_S = 0.2
_MAX_LOOKS_WITHOUT_JOB = 15
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}

_STATES = {
    "pending": {State.PENDING, State.RETRYING, State.QUIET, State.TRIED},
    "scheduled": {State.SCHEDULED},
    "failed": {State.FAILED},
    "all": set(State),
}
StatusFilter = Literal["pending", "scheduled", "failed", "all"]
Span = Annotated[str | None, typer.Option("--for", metavar="SPAN", help="Duration: 90s, 30m, 2h, 1d.")]
Reason = Annotated[str, typer.Option(metavar="TEXT", help="Reason shown in list, status and the dashboard.")]
Paths = Annotated[
    list[str],
    typer.Argument(metavar="PATH", help="Files and folders, relative to the repository or absolute."),
]
At = Annotated[
    str | None, typer.Option(metavar="ISO", help="Time to publish, as 2026-01-31T09:00:00Z. [default: now]")
]
Author = Annotated[
    str | None, typer.Option(metavar="'NAME <MAIL>'", help="Author of the commit. [default: the worker]")
]
Message = Annotated[str | None, typer.Option("--message", "-m", metavar="TEXT", help="Commit message.")]
Root = Annotated[
    str | None,
    typer.Option(metavar="FOLDER", help="Folder of the files (cluster only). [env: BRITER_GIT_WORKTREE]"),
]

# --- enqueue


def enqueue(
    slug: Annotated[
        str, typer.Argument(metavar="SLUG", help="Slug of the post.", autocompletion=complete_slug)
    ],
    paths: Paths,
    *,
    message: Message = None,
    at: At = None,
    author: Author = None,
    site: SiteOption = None,
    root: Root = None,
    force: Annotated[bool, typer.Option("--force", help="Accept paths that are missing or refused.")] = False,
    as_json: Json = False,
) -> None:
    """Enqueue a job for a post. In a cluster, sends the files with the job."""
    settings = read_site(site)
    if root is not None and not settings.database_url:
        raise UsageError(
            f"--root needs a cluster; the worker reads the files in {settings.git_worktree}",
            "omit --root, or set BRITER_DATABASE_URL or BRITER_GIT_WORKTREE",
        )
    folder = settings.git_worktree if root is None else Path(root).absolute()
    paths = [_relative(path, folder) for path in paths]
    try:
        document = client.compose(slug, paths, message=message, at=at, author=author)
        _check_paths(settings, paths, folder, force=force)
        if settings.database_url:
            from briter_worker.cluster.submit import send  # noqa: PLC0415 - the extra [postgres]

            sent = send(settings, document, root=folder)
            job = {"id": sent.id, "slug": slug, "site": sent.site}
            for path in sent.left_out.keys() - {*paths}:
                report(f"warning: {path} will not be published: {sent.left_out[path]}")
        else:
            written = client.submit(document, queue=settings.queue_root)
            job = {"id": written.id, "slug": slug, "file": str(written.path)}
    except ValueError as error:
        raise UsageError(str(error), getattr(error, "fix", "")) from None
    _answer(settings, job, f"{one_line(slug)} is queued as job {job['id']}", as_json=as_json)


def _answer(settings: Settings, value: object, text: str, *, as_json: bool) -> None:
    """Print what a command has done, and the site that it has acted on."""
    output.answer(value, text, as_json=as_json)
    if not as_json:
        name_site(settings)


def _relative(path: str, folder: Path) -> str:
    """Return an absolute path inside the site as jobs declare it, and any other path as it is."""
    roots = (str(folder), os.path.realpath(folder))
    root = next((root for root in roots if path.startswith("/") and is_inside(root, path)), None)
    return path if root is None else path[len(root) :].lstrip("/")


def _check_paths(settings: Settings, paths: Sequence[str], folder: Path, *, force: bool) -> None:
    """Report each path that is missing, or that no setting allows. Raises DeclinedError at the first one."""
    allowlist = settings.allowlist()
    for path in dict.fromkeys(paths):
        problem, fix = "", ""
        try:
            allowlist.resolve(path)
        except PathRefusedError as refused:
            problem = f"{path} will not be published: {refused.refusal.text}"
            fix = f"{refused.refusal.fix}; or add --force to enqueue it all the same"
        else:
            place = os.path.normpath(folder.resolve() / path)
            if os.path.realpath(place) != place:
                problem = f"{path} will not be published: it is, or is below, a symbolic link"
                fix = "put the file itself there; or add --force to enqueue it all the same"
            elif not Path(place).exists():
                problem = f"{path} is not in {folder}"
                fix = "correct the path; or add --force to delete it on the remote"
        if problem and not force:
            raise DeclinedError(problem, fix)
        if problem:
            report(f"warning: {problem}")


# --- list, show, history


def list_(
    *,
    status: Annotated[
        StatusFilter, typer.Option(metavar="STATE", help="pending, scheduled, failed (dead letters) or all.")
    ] = "all",
    site: SiteOption = None,
    as_json: Json = False,
) -> None:
    """List the jobs in the queue: in flight, waiting, dead letters."""
    settings = read_site(site)
    queue, now = open_queue(settings), read_now(settings)
    rows = [row for row in queue.jobs(now) if row.state in _STATES[status]]
    if as_json:
        output.write_json([job_to_json(row) for row in rows])
        return
    output.write_jobs(rows, now)
    if pause := queue.active_pause(now):
        report(output.pause_text(pause))


def history(
    *,
    slug: Annotated[str | None, typer.Option(metavar="SLUG", help="Show only this post.")] = None,
    limit: Annotated[
        int, typer.Option(metavar="N", min=1, max=100_000, help="Maximum number of receipts.")
    ] = 50,
    actions: Annotated[bool, typer.Option("--actions", help="Show who retried, cancelled, undid.")] = False,
    site: SiteOption = None,
    as_json: Json = False,
) -> None:
    """Show the outcome of each attempt, newest first."""
    settings = read_site(site)
    with closing(open_history(settings)) as reader:
        if actions:
            found = [each.data for each in reader.actions(limit) if slug in {None, each.data.get("slug")}]
            if slug is not None and not found:
                _find_post(settings, slug)
            keys = ("time", "by", "action", "slug", "jobId")
            rows = ([each.get(key) for key in keys] for each in found)
            output.answer(found, lambda: output.write_rows(rows), as_json=as_json)
            return
        receipts = reader.receipts(slug=slug, limit=limit)
    if slug is not None and not receipts:
        _find_post(settings, slug)
    found = [receipt.to_json() for receipt in receipts]
    output.answer(found, lambda: output.write_receipts(receipts, known_now(settings)), as_json=as_json)


def show(
    wanted: Wanted,
    *,
    watch: Annotated[bool, typer.Option("--watch", help="Follow the post to its end.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Show what the last publication changed.")] = False,
    site: SiteOption = None,
    as_json: Json = False,
) -> None:
    """Show one post. Prints its job with all keys, and the outcome of each attempt."""
    settings = read_site(site)
    if diff:
        commit, text = show_difference(settings, wanted)
        output.answer({"slug": wanted, "commit": commit, "diff": text}, many_lines(text), as_json=as_json)
        return
    if watch:
        raise typer.Exit(_watch(settings, wanted))
    post = _find_post(settings, wanted)
    if as_json:
        output.write_json(post_to_json(post.rows, post.receipts))
        return
    for row in post.rows[:1]:
        output.write_facts({"state": row.state.value, **row.read(), "file": row.where})
    for row in post.rows[1:]:
        report(f"an older save of this post is {row.state.value}: job {row.job.id}")
    if post.obstacle:
        report(post.obstacle)
    if post.running is not None:
        output.write_facts({"phase": output.progress_text(post.running)})
    if ended := [each for each in post.receipts if each.outcome]:
        output.write_receipts(ended, known_now(settings))
        changes = ended[0].changes
        output.write_rows(("changed", f"+{each.added} -{each.removed}", each.path) for each in changes)
        output.write_rows(("may not be published", path) for path in ended[0].rejected_paths)


class _Post(NamedTuple):
    """A post: its jobs in the queue, newest first, and its receipts."""

    rows: Sequence[ListedJob]
    receipts: Sequence[Receipt]
    obstacle: str
    """The reason why a due job waits, if it is not its own last error."""
    now: float

    @property
    def running(self) -> Receipt | None:
        """Return the attempt that has no outcome yet."""
        return next((each for each in self.receipts if each.outcome is None), None)

    def progress(self) -> str:
        """Return a line for `--watch`, which does not change with time alone."""
        if self.running is not None and (not self.rows or self.rows[0].state.value == "claimed"):
            return output.progress_text(self.running)
        if not self.rows:
            return output.receipt_text(self.receipts[0])
        text = output.job_text(self.rows[0], self.now)
        return f"{text}; {self.obstacle}" if self.obstacle else text


def _find_post(settings: Settings, wanted: str) -> _Post:
    queue = open_queue(settings)
    now = read_now(settings)
    rows = sorted(queue.find(wanted, now), key=lambda row: row.job.created_at, reverse=True)
    with closing(open_history(settings)) as reader:
        receipts = reader.of_post(wanted)
    if not rows and not receipts:
        raise DeclinedError(
            f"neither the queue nor the history has a job with the id or slug {wanted!r}",
            "briter-worker list and briter-worker history show what there is",
        )
    obstacle = ""
    if rows and rows[0].state.value in {"pending", "retrying", "quiet"}:
        status = read_status(settings, now, queue=queue, jobs=rows[:1], local_commits=())
        obstacle = "" if status.has_worker else "no worker is running: the next one publishes it"
        obstacle = output.pause_text(status.paused) if status.paused else obstacle
    return _Post(rows, receipts, obstacle, now)


def _watch(settings: Settings, wanted: str) -> int:
    """Print each change of the post until it has ended; return the exit status."""
    printed = ""
    looks_without_job = 0  # a job leaves the queue just before its receipt is written
    while looks_without_job < _MAX_LOOKS_WITHOUT_JOB:
        try:
            post = _find_post(settings, wanted)
        except DeclinedError:
            if not printed:
                raise
            looks_without_job += 1
        else:
            if (text := post.progress()) != printed:
                write(text)
                printed = text
            if post.rows and all(row.state.value == "failed" for row in post.rows):
                return 1
            if not post.rows and post.running is None:
                return 0
            looks_without_job = 0 if post.rows else looks_without_job + 1
        time.sleep(_WATCH_INTERVAL_S)
    return 0  # the worker was killed before it wrote the receipt


# --- retry, cancel, publish-now, undo


def retry(
    wanted: Annotated[
        str | None,
        typer.Argument(metavar="ID-or-SLUG", help="Job id or post slug.", autocompletion=complete_slug),
    ] = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="Retry all that a retry can help.")] = False,
    site: SiteOption = None,
    as_json: Json = False,
) -> None:
    """Retry dead letters and delayed jobs now."""
    settings = read_site(site)
    if everything is (wanted is not None):
        raise UsageError("retry needs either ID-or-SLUG or --all")
    jobs = _steer(
        settings,
        "retry",
        lambda queue, now: queue.retry_all(now) if wanted is None else queue.retry(wanted, now),
    )
    _report_jobs(settings, "will be tried again", jobs, as_json=as_json)


def publish_now(
    wanted: Wanted,
    *,
    over: Annotated[
        bool, typer.Option("--over", help="Publish an outdated save over a later version (cluster only).")
    ] = False,
    site: SiteOption = None,
    as_json: Json = False,
) -> None:
    """Publish a waiting job now. Ends the wait for its time, a retry or its quiet time."""
    settings = read_site(site)
    if over and not settings.database_url:
        raise UsageError("--over needs a cluster", "save the post again")

    def change(queue: SiteQueue, now: float) -> Sequence[Job]:
        if over:
            return open_postgres_queue(settings).publish_over(wanted, now)
        return queue.publish_now(wanted, now)

    jobs = _steer(settings, "publish-now", change)
    _report_jobs(settings, "is due now", jobs, as_json=as_json)


def _report_jobs(settings: Settings, sentence: str, jobs: Sequence[Job], *, as_json: bool) -> None:
    lines = [f"{one_line(job.slug)} {sentence} (job {one_line(job.id)})" for job in jobs]
    text = "\n".join(lines) or "No job needs that."
    _answer(settings, [{"id": job.id, "slug": job.slug} for job in jobs], text, as_json=as_json)


def cancel(wanted: Wanted, *, site: SiteOption = None, as_json: Json = False) -> None:
    """Remove a job from the queue. A job in flight is removed if its push has not begun."""
    settings = read_site(site)
    done = _steer(settings, "cancel", lambda queue, now: queue.cancel(wanted, now))
    if as_json:
        output.write_json(
            [{"id": job.id, "slug": job.slug, "cancelled": True} for job in done.removed]
            + [{"id": job.id, "slug": job.slug, "cancelled": False} for job in done.requested]
        )
        return
    for job in done.requested:
        report(
            f"{one_line(job.slug)} is in flight: it will be cancelled unless its push has begun; "
            f"see briter-worker show {one_line(job.id)}"
        )
    if done.removed:
        _report_jobs(settings, "is cancelled", done.removed, as_json=False)
    else:
        name_site(settings)


def undo(
    slug: Annotated[
        str, typer.Argument(metavar="SLUG", help="Slug of the post.", autocompletion=complete_slug)
    ],
    *,
    to: Annotated[
        str | None, typer.Option(metavar="COMMIT", help="Version of this commit. [default: the one before]")
    ] = None,
    message: Message = None,
    site: SiteOption = None,
    as_json: Json = False,
) -> None:
    """Publish an earlier version of a post again. Changes nothing if the CMS has changed its files since."""
    settings = read_site(site)
    job_id = undo_post(settings, slug, user_name(), warn, to=to, message=message)
    text = f"the earlier version of {one_line(slug)} is queued as job {job_id}"
    _answer(settings, {"id": job_id, "slug": slug}, text, as_json=as_json)
    if settings.database_url:  # no file changed, and each node has settings of its own
        return
    worker = lock_holder(settings, time.time())
    if worker.dry_run if worker and worker.alive else settings.worker_dry_run:
        text = "a dry run publishes nothing: the job waits as tried until the worker goes live"
        report(text, "set BRITER_WORKER_DRY_RUN=false for the worker")


def _steer(settings: Settings, action: str, change: Callable[[SiteQueue, float], T]) -> T:
    return steer(settings, action, user_name(), warn, change)


# --- pause, resume


def pause(
    *,
    span: Span = None,
    reason: Reason = "",
    site: SiteOption = None,
    as_json: Json = False,
) -> None:
    """Pause publishing until `resume`, or for a time. A running push ends first."""
    settings = read_site(site)
    seconds = _seconds(span)
    made = _steer(
        settings,
        "pause",
        lambda queue, now: queue.pause(now, until=None if seconds is None else now + seconds, reason=reason),
    )
    _answer(settings, made.to_json(), output.pause_text(made), as_json=as_json)


def resume(*, site: SiteOption = None, as_json: Json = False) -> None:
    """Resume publishing."""
    settings = read_site(site)
    was_paused = _steer(settings, "resume", lambda queue, _now: queue.resume())
    text = "publishing goes on" if was_paused else "publishing was not paused"
    _answer(settings, {"resumed": was_paused}, text, as_json=as_json)


def _seconds(span: str | None) -> float | None:
    if span is None:
        return None
    found = re.fullmatch(r"([0-9]{1,6})([smhd])", span.strip())
    if found is None:
        raise UsageError(f"--for is {span!r}; accepted: a number and a unit, such as 90s, 30m, 2h or 1d")
    return int(found[1]) * _UNITS_S[found[2]]
