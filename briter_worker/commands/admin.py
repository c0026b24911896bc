"""The commands for operators: status, health, doctor, pull, schema, import, export, db."""

from __future__ import annotations

import os
import time
from contextlib import closing, suppress
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from briter_worker import doctor as checks
from briter_worker.commands import (
    Json,
    SiteOption,
    name_site,
    output,
    read_cluster,
    read_site,
    report,
    warn,
)
from briter_worker.errors import FixableError, UsageError, one_line
from briter_worker.events import Event, SiteUpdated
from briter_worker.git.pull import pull as pull_branch
from briter_worker.job import count, job_schema
from briter_worker.plugins import Plugins
from briter_worker.settings import load_settings, settings_schema
from briter_worker.sinks.store import StoreError
from briter_worker.status import health_problems, read_status
from briter_worker.wiring import (
    check_site_format,
    known_now,
    open_copies,
    open_database,
    open_git,
    open_history,
    open_sinks,
    pull_order,
    read_now,
)

if TYPE_CHECKING:
    from pathlib import Path

    from briter_worker.settings import Settings

_PATIENCE_S = 10.0
"""The longest time in seconds that `pull` waits for a publication to end."""
_MAX_READ = 5000
"""`health` reads no longer queue: it is to answer within a second."""
database_app = typer.Typer(
    no_args_is_help=True, help="Manage the database of a cluster.", rich_markup_mode=None
)


def status(*, site: SiteOption = None, as_json: Json = False) -> None:
    """Show job counts, the worker, and known problems."""
    settings = read_site(site)
    found = read_status(settings, read_now(settings))
    output.answer(found.to_json(), lambda: output.write_status(found), as_json=as_json)


def health(
    *,
    worker: Annotated[
        bool,
        typer.Option(
            "--worker/--no-worker",
            help="Fail if no worker is running. Use --no-worker when the worker runs from cron.",
        ),
    ] = True,
    as_json: Json = False,
) -> None:
    """Check the queue and the worker. Exits with 0 or 1."""
    settings, now = load_settings(), time.time()
    problems = health_problems(settings, now, expect_worker=worker)
    lines = [f"unhealthy: {problem}" for problem in problems] or ["healthy"]
    more = {}
    # It reads the whole queue, and containers ask every few seconds.
    with suppress(OSError, FixableError):  # that is among the problems
        if settings.site or (not settings.database_url and _is_short(settings.queue_root)):
            own = read_site(None)
            more["state"] = read_status(own, known_now(own), local_commits=()).headline().text
            lines.append(f"state: {more['state']}")
    output.answer({"healthy": not problems, "problems": problems, **more}, "\n".join(lines), as_json=as_json)
    raise typer.Exit(1 if problems else 0)


def _is_short(queue: Path) -> bool:
    with os.scandir(queue) as entries:
        return next(islice(entries, _MAX_READ, None), None) is None


def doctor(*, site: SiteOption = None, as_json: Json = False) -> None:
    """Check everything that a publication needs. Prints one fix per finding."""
    settings = load_settings()
    if site is not None:
        settings = settings.model_copy(update={"site": site}) if settings.database_url else read_site(site)
    findings = []
    for finding in checks.examine(settings, time.time()):
        findings.append(finding)
        if not as_json:
            output.write_finding(finding)  # one by one: the remote may take its time
    is_sound = all(finding.state is not checks.State.ERROR for finding in findings)
    if as_json:
        output.write_json({"ok": is_sound, "findings": [finding.to_json() for finding in findings]})
    raise typer.Exit(0 if is_sound else 1)


def pull(
    *,
    rebase: Annotated[bool, typer.Option("--rebase", help="Rebase local commits.")] = False,
    push: Annotated[bool, typer.Option("--push", help="Push the rebased commits.")] = False,
    as_json: Json = False,
) -> None:
    """Update the site from the remote. Files that the CMS has changed stay as they are."""
    if load_settings().database_url:
        raise UsageError(
            "pull is for a site with a work tree; a cluster has none", "omit BRITER_DATABASE_URL"
        )
    settings = read_site(None)
    check_site_format(settings)
    updated: list[str] = []

    def log(event: Event) -> None:
        warn(event)
        if isinstance(event, SiteUpdated):
            updated.extend(event.paths)

    with closing(open_git(settings)) as git, closing(open_sinks(settings, log)) as emit:
        checkout = open_copies(settings, git, emit, Plugins(settings.plugins).allowed_paths)
        result = pull_branch(checkout.repository, checkout, rebase=rebase, push=push, patience=_PATIENCE_S)
        if _has_condition(settings):
            pull_order(git).touch(mode=0o600)  # a pull of the worker's own ends the site condition
    document = {
        "tip": result.tip,
        "rebased": [{"commit": each.commit, "subject": each.subject} for each in result.rebased],
        "pushed": result.is_pushed,
        "late": result.late_reason or None,
        "paths": updated,
    }
    done = "rebased and pushed" if result.is_pushed else "rebased"
    lines = [one_line(f"{done}: {each.commit[:10]} {each.subject}") for each in result.rebased]
    if result.late_reason and not as_json:
        report(f"the local branch follows later: {result.late_reason}")
    else:
        lines.append(f"{settings.git_branch} has what {settings.git_remote} has ({result.tip[:10]})")
    output.answer(document, "\n".join(lines), as_json=as_json)
    if not as_json:
        name_site(settings)
    if result.is_blocked:
        raise typer.Exit(1)


def _has_condition(settings: Settings) -> bool:
    """Return True if the history shows a site condition; False if the history cannot be read."""
    try:
        with closing(open_history(settings)) as history:
            condition = history.condition()
    except StoreError:
        return False
    return condition is not None and bool(condition.failure)


def schema(
    model: Annotated[
        Literal["job", "config"], typer.Argument(metavar="job|config", help="Job file or config.json.")
    ],
    *,
    as_json: Json = False,  # noqa: ARG001 - a schema is JSON in any case
) -> None:
    """Print the JSON Schema of the job file or of config.json."""
    output.write_json(job_schema() if model == "job" else settings_schema())


def import_(*, site: SiteOption = None, as_json: Json = False) -> None:
    """Move the jobs of this folder into the cluster. Their files move along."""
    _move_jobs("import", site, as_json=as_json)


def export(*, site: SiteOption = None, as_json: Json = False) -> None:
    """Move the jobs of a site out of the cluster. Their files move into the work tree."""
    _move_jobs("export", site, as_json=as_json)


def _move_jobs(command: Literal["import", "export"], site: str | None, *, as_json: bool) -> None:
    read_cluster(command)
    settings = read_site(site)
    from briter_worker.cluster import migrate  # noqa: PLC0415 - the extra [postgres]

    move = migrate.import_jobs if command == "import" else migrate.export_jobs
    moved = move(settings, read_now(settings))
    for path, reason in moved.remarks.items():
        report(f"warning: {path} is not moved along: {reason}")
    for slug, reason in moved.stayed.items():
        report(f"{slug} stays where it is: {reason}")
    way = "into" if command == "import" else "out of"
    document = {"jobs": moved.jobs, "stayed": moved.stayed, "remarks": moved.remarks}
    text = f"{count(moved.jobs, 'job')} moved {way} the site {settings.site} of the cluster"
    output.answer(document, text, as_json=as_json)
    raise typer.Exit(1 if moved.stayed else 0)


@database_app.command()
def upgrade(*, as_json: Json = False) -> None:
    """Create or upgrade the tables. Safe to repeat, and while older nodes run."""
    database = open_database(read_cluster("db upgrade"))
    applied = database.upgrade()
    version = database.version()
    text = f"the database is up to date (version {version})"
    if applied:
        text = f"the database is now at version {version}; migrations applied: {', '.join(applied)}"
    output.answer({"version": version, "applied": applied}, text, as_json=as_json)


@database_app.command()
def restored(*, as_json: Json = False) -> None:
    """Compare what waits with the remotes after a backup was restored. Publishing is paused meanwhile."""
    settings = read_cluster("db restored")
    database = open_database(settings)
    database.check()
    from briter_worker.cluster.drain_site import compare_restored  # noqa: PLC0415 - the extra [postgres]

    found = compare_restored(database, settings)
    for name, reason in found.unchecked.items():
        report(f"{name} could not be compared and stays paused: {reason}", "briter-worker db restored")
    outdated = count(len(found.outdated), "waiting file")
    lines = [f"{count(found.compared, 'site')} compared; outdated: {outdated}"]
    lines += [one_line(f"{each['site']} {each['slug']}: {each['path']}") for each in found.outdated]
    output.answer(asdict(found), "\n".join(lines), as_json=as_json)
    raise typer.Exit(1 if found.unchecked else 0)


@database_app.command()
def check(*, as_json: Json = False) -> None:
    """Check that the database can be reached and fits this program."""
    database = open_database(read_cluster("db check"))
    database.check()
    version = database.version()
    text = f"the database fits this program (version {version})"
    output.answer({"ok": True, "version": version}, text, as_json=as_json)
