"""The command line: every command, its exit status, one line per error, and what the commands share."""

from __future__ import annotations

import gc
import os
import pwd
import sys
import traceback
from contextlib import closing, suppress
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, TextIO

import typer
import typer.main
from pydantic import ValidationError
from typer.core import TyperCommand

from briter_worker.accepted import refusal_text
from briter_worker.errors import (
    FailureCode,
    FixableError,
    PublishError,
    UsageError,
    describe,
    one_line,
    printable,
    quote_fix,
)
from briter_worker.events import Event, Warned
from briter_worker.settings import Settings, load_settings
from briter_worker.wiring import known_now, open_database, open_history, open_queue

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


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
"""The module and the function or group of each command."""
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
EPILOG = "The site is the one in BRITER_APP_ROOT. [default: the current folder]"
EXAMPLES = {
    "run": "briter-worker run --once",
    "enqueue": "briter-worker enqueue hello content/posts/hello.md -m 'Publish Hello'",
    "list": "briter-worker list --status failed",
    "show": "briter-worker show hello --watch",
    "undo": "briter-worker undo hello",
    "pause": "briter-worker pause --for 30m --reason 'Moving the server'",
}
_MAX_COMPLETED = 100
"""Newest receipts whose slugs a shell completes."""


def complete_slug(incomplete: str) -> list[str]:
    """Return the slugs that a shell offers: those in the queue, then those published last."""
    slugs: dict[str, None] = {}
    with suppress(Exception):  # a shell has no use for an error
        settings = read_site(None)
        slugs |= dict.fromkeys(row.job.slug for row in open_queue(settings).jobs(known_now(settings)))
        with closing(open_history(settings)) as history:
            slugs |= dict.fromkeys(each.slug for each in history.receipts(limit=_MAX_COMPLETED))
    return [slug for slug in slugs if slug.startswith(incomplete) and slug.isprintable()]


Wanted = Annotated[
    str,
    typer.Argument(metavar="ID-or-SLUG", help="Job id or post slug.", autocompletion=complete_slug),
]
SiteOption = Annotated[
    str | None,
    typer.Option("--site", metavar="NAME", help="Site to act on (cluster only). [env: BRITER_SITE]"),
]


def is_terminal() -> bool:
    """Return True if standard output is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def write(text: str) -> None:
    """Print the text. A reader that has closed the pipe (`| head`) is not an error."""
    if sys.stdout is None:
        return
    text = printable(text)
    try:
        sys.stdout.write(text if text.endswith("\n") or not text else f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        _discard(sys.stdout)
    except OSError as error:
        error.filename = "standard output"
        raise


def report(message: str, fix: str = "") -> None:
    """Print the message and its fix as one line to standard error."""
    if sys.stderr is None:
        return
    text = quote_fix(message)
    text = f"{text.rstrip('.')}. Fix: {fix}" if fix else text
    try:
        sys.stderr.write(f"briter-worker: {one_line(text)}\n")
        sys.stderr.flush()
    except OSError:
        pass


def discard_unwritten() -> None:
    """Drop what could not be printed: Python exits with 120 if it cannot flush at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            _discard(stream)


def _discard(stream: TextIO) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def read_site(site: str | None) -> Settings:
    """Return the configuration of one site; in a cluster, with the site's own values.

    Raises UsageError, also where the folder is no site, and DeclinedError if there is no such site.
    """
    settings = load_settings()
    if not settings.database_url:
        if site is not None:
            raise UsageError(
                f"BRITER_DATABASE_URL is not set, so that the only site is that of {settings.storage_root}",
                "leave --site out, or set BRITER_DATABASE_URL for a cluster",
            )
        check_repository(settings)
        _check_storage(settings)
        return settings
    name = site or settings.site
    if not name:
        raise UsageError(
            "no site was given", "use --site NAME or BRITER_SITE; briter-worker site list shows the names"
        )
    from briter_worker.cluster import sites  # noqa: PLC0415 - the extra [postgres]

    return sites.settings_of(sites.get(open_database(settings), name), settings)


def check_repository(settings: Settings) -> None:
    """Raise UsageError if the site's folder is not the top of a repository."""
    if _is_missing(settings.git_worktree / ".git"):
        raise UsageError(
            f"{settings.git_worktree} is no site: it is not the top of a git repository",
            "clone the site there, or point BRITER_APP_ROOT or BRITER_GIT_WORKTREE at the site's folder",
        )


def _check_storage(settings: Settings) -> None:
    """Raise UsageError if no worker has used the site's storage: nobody publishes what is queued there."""
    if _is_missing(settings.queue_root) and _is_missing(settings.lock_path):
        raise UsageError(
            f"no worker has used the storage {settings.storage_root} of the site {settings.git_worktree} yet",
            "start the worker first: briter-worker run --once; "
            "or set BRITER_STORAGE_ROOT or BRITER_QUEUE_ROOT as for the worker",
        )


def _is_missing(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:  # it is there, and not for this user
        return False
    return False


def name_site(settings: Settings) -> None:
    """Print on which site a command has acted, beside what it prints."""
    if settings.database_url:
        report(f"site {settings.site} of the cluster")
    else:
        report(f"site {settings.git_worktree}, {settings.git_branch} on {settings.git_remote}")


def read_cluster(command: str) -> Settings:
    """Return the configuration for a command that only a cluster has. Raises UsageError."""
    settings = load_settings()
    if not settings.database_url:
        raise UsageError(
            f"{command} is for a cluster, and there is none",
            "set BRITER_DATABASE_URL, such as postgresql://db.example.org/briter",
        )
    return settings


def warn(event: Event) -> None:
    """Print what a command has to warn of; its other events are in the history."""
    if isinstance(event, Warned):
        report(event.error, event.fix)


def user_name() -> str:
    """Return the name of the system's user who gave the command."""
    with suppress(KeyError):
        return pwd.getpwuid(os.getuid()).pw_name
    return str(os.getuid())


class _Command(TyperCommand):
    """A command that says what is accepted in our words: Typer shows those of pydantic."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Read the arguments. Raises typer.BadParameter."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as refused:
            if isinstance(refused.__cause__, ValidationError):
                refused.message = refusal_text(refused.__cause__.errors(include_url=False)[0])
            raise


def build_app(wanted: str | None = None) -> typer.Typer:
    """Return the command line with the wanted command alone, or with all: a worker needs few imports."""
    app = typer.Typer(
        name="briter-worker",
        help="Publish the posts of a flat-file CMS through git.",
        epilog=EPILOG,
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
            example = f"Example: {EXAMPLES[name]}\n\n" if name in EXAMPLES else ""
            app.command(name, cls=_Command, epilog=f"{example}{EPILOG}")(command)
    return app


def _print_version(wanted: bool) -> None:  # noqa: FBT001 - as Typer calls it
    if wanted:
        write(f"briter-worker {version('briter-worker')}")
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
        write("")  # flushes what Typer printed
    except Exception as error:
        if os.environ.get("BRITER_DEBUG"):
            raise
        status = _report_error(error)
    finally:
        discard_unwritten()
    return status


def _report_error(error: Exception) -> int:
    match error:
        case UsageError() | PublishError(code=FailureCode.NOT_A_REPOSITORY):
            report(error.message, error.fix)
            return 2
        case FixableError() | OSError():
            report(*describe(error))
        case _:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            report(
                f"internal error: {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})",
                "report it, with the output of BRITER_DEBUG=1",
            )
    return 1
