"""The commands. Each imports only what it uses: an empty `run --once` is started by cron each minute."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from briter_worker import views
from briter_worker.errors import PublishError, UsageError, for_people

if TYPE_CHECKING:
    from collections.abc import Sequence

    from briter_worker.ports import EventSink
    from briter_worker.settings import Settings

app = typer.Typer(
    name="briter-worker",
    help="Publishes the posts of a flat-file CMS through git, exactly once each.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class _DeclinedError(Exception):
    """What was asked for cannot be done; the text says why: exit 1, one line."""


@dataclass
class _Invocation:
    """What holds for every command."""

    debug: bool = False


class Wanted(StrEnum):
    """Which jobs to list."""

    PENDING = "pending"
    SCHEDULED = "scheduled"
    FAILED = "failed"
    ALL = "all"


_WAITING = frozenset({"pending", "retrying"})

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Job = Annotated[str, typer.Argument(metavar="ID-or-SLUG", help="A job's id, or a post's slug.")]


def main(argv: Sequence[str]) -> int:
    """Run one command; its exit status. Whatever happens ends in one line, not in a traceback."""
    invocation = _Invocation(debug=bool(os.environ.get("BRITER_DEBUG")))
    try:
        typer.main.get_command(app).main(list(argv), prog_name="briter-worker", obj=invocation)
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else 1
    except Exception as error:
        if invocation.debug:
            raise
        text, status = _explained(error)
        views.tell(for_people(text))
        return status
    return 0


def _explained(error: Exception) -> tuple[str, int]:
    match error:
        case UsageError():
            return str(error), 2
        case _DeclinedError() | PublishError():
            return str(error), 1
        case OSError(strerror=str(reason)):
            where = f": {error.filename}" if error.filename else ""
            return f"{reason}{where}", 1
        case _:
            place = error.__traceback__
            while place is not None and place.tb_next is not None:
                place = place.tb_next
            where = f" ({place.tb_frame.f_code.co_filename}:{place.tb_lineno})" if place else ""
            said = f"{type(error).__name__}: {error}{where}"
            return f"a mistake in the worker itself: {said}. BRITER_DEBUG=1 shows more; please report it", 1


def _settings() -> Settings:
    from briter_worker.settings import load_settings  # noqa: PLC0415

    return load_settings()


def _version(wanted: bool) -> None:  # noqa: FBT001 - typer's signature
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415

        views.put(f"briter-worker {version('briter-worker')}")
        raise typer.Exit


@app.callback()
def _briter_worker(
    context: typer.Context,
    *,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[  # noqa: ARG001 - its callback does the work
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    context.obj.debug = context.obj.debug or debug


@app.command()
def run(
    *,
    once: Annotated[bool, typer.Option("--once", help="Drain what is due, and exit.")] = False,
) -> None:
    """Publish whatever is due, until SIGTERM; one line of the log for each event."""
    settings = _settings()
    from briter_worker.wiring import run_worker  # noqa: PLC0415

    raise typer.Exit(run_worker(settings, once=once, sink=_sink()))


def _sink() -> EventSink:
    from briter_worker.sinks.log import LogSink, standard_output  # noqa: PLC0415

    log = LogSink(standard_output(), complain=views.tell)
    if not views.is_terminal():
        return log
    from briter_worker.sinks.terminal import TerminalSink  # noqa: PLC0415

    return TerminalSink(log)


@app.command()
def enqueue(
    slug: Annotated[str, typer.Argument(metavar="SLUG", help="The post.")],
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH…", help="What to publish, relative to the site's repository.")
    ],
    *,
    message: Annotated[
        str | None, typer.Option("--message", "-m", help="The commit message, used exactly as it is.")
    ] = None,
    at: Annotated[
        str | None, typer.Option(metavar="ISO", help="Hold it until then, such as 2026-01-31T09:00:00Z.")
    ] = None,
    author: Annotated[str | None, typer.Option(metavar="'Name <mail>'", help="The commit's author.")] = None,
    as_json: Json = False,
) -> None:
    """Ask for a post to be published: write a job, safely."""
    settings = _settings()
    from briter_worker import client  # noqa: PLC0415

    try:
        job = client.enqueue(slug, paths, message=message, at=at, author=author, queue=settings.queue_root)
    except ValueError as error:
        raise UsageError(for_people(str(error))) from None
    _warn_of_refusals(settings, paths)
    if as_json:
        views.put_json({"id": job.id, "slug": slug, "file": str(job.path)})
    elif views.is_terminal():
        views.put(f"{for_people(slug)} waits to be published: job {job.id}")
    else:
        views.put(job.id)


def _warn_of_refusals(settings: Settings, paths: Sequence[str]) -> None:
    from briter_worker.allowlist import Allowlist, PathRefusedError  # noqa: PLC0415

    allowlist = Allowlist(settings.folders)
    for path in paths:
        try:
            allowlist.resolve(path)
        except PathRefusedError as refused:
            views.tell(for_people(f"warning: {path} will not be published: {refused.reason}"))


@app.command("list")
def list_(
    *,
    status: Annotated[Wanted, typer.Option(help="Which jobs.")] = Wanted.ALL,
    as_json: Json = False,
) -> None:
    """The jobs in the queue: in flight, then waiting by the time they are due, then dead letters."""
    settings = _settings()
    from briter_worker.wiring import open_queue  # noqa: PLC0415

    now = time.time()
    rows = open_queue(settings).jobs(now)
    match status:
        case Wanted.PENDING:
            rows = [row for row in rows if row.state.value in _WAITING]
        case Wanted.SCHEDULED | Wanted.FAILED:
            rows = [row for row in rows if row.state.value == status.value]
        case Wanted.ALL:
            pass
    views.put_jobs(rows, now, as_json=as_json)
