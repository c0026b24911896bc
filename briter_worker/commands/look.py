"""Look at the queue, the worker and the site; nothing here changes them."""

from __future__ import annotations

import time
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from briter_worker import views
from briter_worker.commands import read_settings, read_site
from briter_worker.commands.options import Json, OfSite  # noqa: TC001 - typer reads them

if TYPE_CHECKING:
    from collections.abc import Sequence

    from briter_worker.queues.steering import Shown
    from briter_worker.standing import Standing


class Status(StrEnum):
    """Which jobs to list."""

    PENDING = "pending"
    SCHEDULED = "scheduled"
    FAILED = "failed"
    ALL = "all"


class Model(StrEnum):
    """What has a JSON Schema."""

    JOB = "job"
    CONFIG = "config"


_PENDING = frozenset({"pending", "retrying"})


def list_(
    *,
    status: Annotated[
        Status, typer.Option(help="pending: due now or again; scheduled: on hold; failed: dead letters.")
    ] = Status.ALL,
    site: OfSite = None,
    as_json: Json = False,
) -> None:
    """The jobs in the queue: in flight, waiting, dead letters."""
    settings = read_site(site)
    from briter_worker.wiring import open_queue  # noqa: PLC0415

    now = time.time()
    queue = open_queue(settings)
    rows: Sequence[Shown] = queue.jobs(now)
    match status:
        case Status.PENDING:
            rows = [row for row in rows if row.state.value in _PENDING]
        case Status.SCHEDULED | Status.FAILED:
            rows = [row for row in rows if row.state.value == status.value]
        case Status.ALL:
            pass
    views.put_jobs(rows, now, as_json=as_json)
    pause = queue.paused(now)
    if pause is not None and not as_json:
        views.tell(views.pause_in_words(pause, now))


def status(*, site: OfSite = None, as_json: Json = False) -> None:
    """How many jobs wait, who publishes, what is wrong."""
    settings = read_site(site)
    from briter_worker.standing import stand  # noqa: PLC0415

    standing = stand(settings, time.time())
    if as_json:
        views.put_json(standing.as_json())
    else:
        views.put_facts(_facts(standing))


def _facts(standing: Standing) -> list[tuple[str, str]]:
    facts = []
    for state, count in standing.jobs.items():
        since = standing.oldest[state]
        facts.append((state, str(count) if since is None else f"{count}, the oldest {views.ago(-since)}"))
    soon = standing.next_due_in
    if standing.hosts is not None:
        worker = f"{standing.hosts} hosts of the cluster" if standing.hosts else "no host of the cluster runs"
    elif standing.worker is None:
        worker = "none"
    else:
        worker = f"PID {standing.worker.pid}" if standing.worker.alive else "none; the last one died"
    where = f"{standing.worktree} to " if standing.worktree else ""
    return [
        *facts,
        ("next due", "" if soon is None else views.ago(soon) if soon > 0 else "now"),
        ("worker", worker),
        *([("paused", views.pause_in_words(standing.paused, standing.now))] if standing.paused else []),
        ("condition", standing.condition or "nothing is known to be wrong"),
        ("quarantine", str(standing.quarantined)),
        *((f"not a job: {name}", reason) for name, reason in standing.stuck.items()),
        ("mode", "dry run: nothing reaches the remote" if standing.dry_run else "live"),
        ("publishes", f"{where}{standing.branch} on {standing.remote}"),
        ("queue", standing.queue),
    ]


def health(
    *,
    worker: Annotated[
        bool, typer.Option("--worker/--no-worker", help="Without a worker that stays: for cron.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Exit 0 when the queue is usable and a worker lives, else 1."""
    settings = read_settings()
    from briter_worker.standing import ailments  # noqa: PLC0415

    found = ailments(settings, time.time(), expect_worker=worker)
    if as_json:
        views.put_json({"healthy": not found, "problems": found})
    else:
        views.put("\n".join(f"unhealthy: {problem}" for problem in found) or "healthy")
    raise typer.Exit(1 if found else 0)


def doctor(*, site: OfSite = None, as_json: Json = False) -> None:
    """Check everything a publication needs. One fix for each finding."""
    settings = read_settings()
    if site is not None:
        settings = replace(settings, site=site) if settings.database_url else read_site(site)
    from briter_worker.doctor import State, examine  # noqa: PLC0415

    findings = []
    for finding in examine(settings, time.time()):
        findings.append(finding)
        if not as_json:
            views.put_finding(finding)  # one by one: the remote may take its time
    sound = all(finding.state is not State.ERROR for finding in findings)
    if as_json:
        views.put_json({"ok": sound, "findings": [finding.as_json() for finding in findings]})
    raise typer.Exit(0 if sound else 1)


def schema(
    model: Annotated[Model, typer.Argument(help="The job file, or config.json.")],
    *,
    as_json: Json = False,  # noqa: ARG001 - a schema is JSON in any case
) -> None:
    """A JSON Schema: of the job file, or of config.json."""
    match model:
        case Model.JOB:
            from briter_worker.contract import job_schema  # noqa: PLC0415

            views.put_json(job_schema())
        case Model.CONFIG:
            from briter_worker.settings import settings_schema  # noqa: PLC0415

            views.put_json(settings_schema())
