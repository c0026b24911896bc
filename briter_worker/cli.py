"""The command line: every command, its exit status, and one line per error."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated

import typer
import typer.main

from briter_worker.commands import admin, output, queue, run, site
from briter_worker.errors import (
    FixableError,
    PublishError,
    UsageError,
    os_error_fix,
    os_error_text,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

app = typer.Typer(
    name="briter-worker",
    help="Publish the posts of a flat-file CMS through git.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(run.run)
app.command()(queue.enqueue)
app.command("list")(queue.list_)
app.command()(queue.show)
app.command()(queue.history)
app.command()(queue.retry)
app.command()(queue.cancel)
app.command("publish-now")(queue.publish_now)
app.command()(queue.pause)
app.command()(queue.resume)
app.command()(admin.pull)
app.command()(admin.status)
app.command()(admin.health)
app.command()(admin.doctor)
app.command()(run.serve)
app.command()(admin.schema)
app.command("import")(admin.import_)
app.command()(admin.export)
app.add_typer(site.app, name="site")
app.add_typer(admin.database_app, name="db")


@dataclass
class Invocation:
    """Options of every command."""

    debug: bool


def _print_version(*, wanted: bool) -> None:
    if wanted:
        output.write(f"briter-worker {version('briter-worker')}")
        raise typer.Exit


@app.callback()
def _read_common_options(
    context: typer.Context,
    *,
    debug: Annotated[bool, typer.Option("--debug", help="Print tracebacks. [env: BRITER_DEBUG]")] = False,
    version: Annotated[  # noqa: ARG001 - its callback has done the work
        bool,
        typer.Option(
            "--version",
            callback=lambda wanted: _print_version(wanted=wanted),
            is_eager=True,
            help="Print the version.",
        ),
    ] = False,
) -> None:
    context.obj.debug = context.obj.debug or debug


def main(argv: Sequence[str]) -> int:
    """Run one command and return its exit status. An error is one line, not a traceback."""
    invocation = Invocation(debug=bool(os.environ.get("BRITER_DEBUG")))
    status = 0
    try:
        try:
            typer.main.get_command(app).main(list(argv), prog_name="briter-worker", obj=invocation)
        except SystemExit as ending:
            status = ending.code if isinstance(ending.code, int) else 1
        output.write("")  # flushes what Typer printed
    except Exception as error:
        if invocation.debug:
            raise
        status = _report_error(error)
    finally:
        output.discard_unwritten()
    return status


def _report_error(error: Exception) -> int:
    match error:
        case UsageError():
            output.report(error.message, error.fix)
            return 2
        case FixableError() | PublishError():
            output.report(error.message, error.fix)
        case OSError(strerror=str()):
            output.report(os_error_text(error), os_error_fix(error))
        case OSError():
            output.report(str(error) or type(error).__name__, getattr(error, "fix", ""))
        case _:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            output.report(
                f"internal error: {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})",
                "report it, with the output of BRITER_DEBUG=1",
            )
    return 1
