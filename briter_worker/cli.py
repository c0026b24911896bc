"""The command line: every command, its exit status, and one line per error."""

from __future__ import annotations

import gc
import os
import traceback
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated

import typer
import typer.main

from briter_worker.commands import output
from briter_worker.errors import FixableError, UsageError, describe

if TYPE_CHECKING:
    from collections.abc import Sequence

_COMMANDS = {
    "run": ("run", "run"),
    "watch": ("run", "watch"),
    "enqueue": ("queue", "enqueue"),
    "list": ("queue", "list_"),
    "show": ("queue", "show"),
    "history": ("queue", "history"),
    "retry": ("queue", "retry"),
    "cancel": ("queue", "cancel"),
    "publish-now": ("queue", "publish_now"),
    "undo": ("queue", "undo"),
    "pause": ("queue", "pause"),
    "resume": ("queue", "resume"),
    "pull": ("admin", "pull"),
    "status": ("admin", "status"),
    "health": ("admin", "health"),
    "doctor": ("admin", "doctor"),
    "serve": ("run", "serve"),
    "schema": ("admin", "schema"),
    "import": ("admin", "import_"),
    "export": ("admin", "export"),
    "site": ("site", "app"),
    "token": ("site", "token_app"),
    "db": ("admin", "database_app"),
}
"""The module in `commands` and the function or group of each command."""


def build_app(wanted: str | None = None) -> typer.Typer:
    """Return the command line with the wanted command alone, or with all: a worker needs few imports."""
    app = typer.Typer(
        name="briter-worker",
        help="Publish the posts of a flat-file CMS through git.",
        add_completion=wanted not in _COMMANDS,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_read_common_options)
    for name in [wanted] if wanted in _COMMANDS else _COMMANDS:
        module, function = _COMMANDS[name]
        command = getattr(import_module(f"briter_worker.commands.{module}"), function)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return app


def _print_version(wanted: bool) -> None:  # noqa: FBT001 - as Typer calls it
    if wanted:
        output.write(f"briter-worker {version('briter-worker')}")
        raise typer.Exit


def _read_common_options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main(argv: Sequence[str]) -> int:
    """Run one command and return its exit status. An error is one line, not a traceback."""
    wanted = next((argument for argument in argv if not argument.startswith("-")), None)
    status = 0
    try:
        try:
            command = typer.main.get_command(build_app(wanted))
            gc.freeze()
            gc.enable()
            command.main(list(argv), prog_name="briter-worker")
        except SystemExit as ending:
            status = ending.code if isinstance(ending.code, int) else 1
        output.write("")  # flushes what Typer printed
    except Exception as error:
        if os.environ.get("BRITER_DEBUG"):
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
        case FixableError() | OSError():
            output.report(*describe(error))
        case _:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            output.report(
                f"internal error: {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})",
                "report it, with the output of BRITER_DEBUG=1",
            )
    return 1
