"""The command line: which commands there are, and how whatever happens becomes an exit status.

The commands import only what they use: cron starts an empty `run --once` each minute.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from briter_worker import views
from briter_worker.commands import DeclinedError, look, steer, work
from briter_worker.errors import PublishError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

app = typer.Typer(
    name="briter-worker",
    help="Publishes the posts of a flat-file CMS through git, exactly once each.",
    add_completion=False,
    no_args_is_help=True,
    # Rich takes longer to load than most commands run.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(work.run)
app.command()(work.enqueue)
app.command("list")(look.list_)
app.command()(look.show)
app.command()(steer.retry)
app.command()(steer.cancel)
app.command()(look.status)
app.command()(look.health)
app.command()(look.doctor)
app.command()(look.schema)


@dataclass
class _Invocation:
    """What holds for every command."""

    debug: bool = False


def main(argv: Sequence[str]) -> int:
    """Run one command; its exit status. Whatever goes wrong is one line, not a traceback."""
    invocation = _Invocation(debug=bool(os.environ.get("BRITER_DEBUG")))
    try:
        typer.main.get_command(app).main(list(argv), prog_name="briter-worker", obj=invocation)
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else 1
    except Exception as error:
        if invocation.debug:
            raise
        text, status = _explained(error)
        views.tell(text)
        return status
    return 0


def _explained(error: Exception) -> tuple[str, int]:
    match error:
        case UsageError():
            return str(error), 2
        case DeclinedError() | PublishError():
            return str(error), 1
        case OSError(strerror=str(reason)):
            where = f"{error.filename}: " if error.filename else ""
            return f"{where}{reason}", 1
        case _:
            what = f"{type(error).__name__}: {error} ({_place(error)})"
            return f"a mistake in the worker itself: {what}. BRITER_DEBUG=1 shows more; please report it", 1


def _place(error: Exception) -> str:
    """Where it was raised."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    return f"{step.tb_frame.f_code.co_filename}:{step.tb_lineno}" if step else "nowhere"


def _version(*, wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415 - slow, and rarely asked for

        views.put(f"briter-worker {version('briter-worker')}")
        raise typer.Exit


@app.callback()
def _for_every_command(
    context: typer.Context,
    *,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[  # noqa: ARG001 - its callback has done the work
        bool,
        typer.Option(
            "--version",
            callback=lambda wanted: _version(wanted=wanted),
            is_eager=True,
            help="Print the version.",
        ),
    ] = False,
) -> None:
    context.obj.debug = context.obj.debug or debug
