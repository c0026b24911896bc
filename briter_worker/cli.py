"""The command line: one command is run, and whatever happens becomes an exit status and at most one line."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from briter_worker import views
from briter_worker.commands import DeclinedError, plain
from briter_worker.errors import PublishError, UsageError, explained, for_people

if TYPE_CHECKING:
    from collections.abc import Sequence


class Invocation:
    """What holds for every command."""

    def __init__(self, *, debug: bool) -> None:
        self.debug = debug


def main(argv: Sequence[str]) -> int:
    """Run one command; its exit status. Whatever goes wrong is one line, not a traceback."""
    invocation = Invocation(debug=bool(os.environ.get("BRITER_DEBUG")))
    try:
        status = _run(list(argv), invocation)
        views.put("")  # what typer has printed may still be on its way
    except Exception as error:
        if invocation.debug:
            raise
        text, status = _explained(error)
        views.tell(text)
    finally:
        views.let_go()
    return status


def _run(argv: list[str], invocation: Invocation) -> int:
    asked = plain.read(argv)
    if isinstance(asked, plain.Run):
        from briter_worker.commands.publish import publish  # noqa: PLC0415 - one command loads no other

        return publish(once=asked.once)
    if asked is not None:
        from briter_worker.commands.ask import ask  # noqa: PLC0415 - as above

        ask(asked)
        return 0

    import typer.main  # noqa: PLC0415 - see plain

    from briter_worker.commands.app import app  # noqa: PLC0415

    try:
        typer.main.get_command(app).main(argv, prog_name="briter-worker", obj=invocation)
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else 1
    return 0


def _explained(error: Exception) -> tuple[str, int]:
    match error:
        case UsageError():
            return str(error), 2
        case DeclinedError() | PublishError():
            return str(error), 1
        case OSError(strerror=str()):
            return explained(error), 1
        case OSError(errno=None):  # said by us, or by a library, in words of its own
            return for_people(str(error)) or type(error).__name__, 1
        case _:
            what = f"{type(error).__name__}: {error} ({_place(error)})"
            return f"a mistake in the worker itself: {what}. BRITER_DEBUG=1 shows more; please report it", 1


def _place(error: Exception) -> str:
    """Where it was raised."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    return f"{step.tb_frame.f_code.co_filename}:{step.tb_lineno}" if step else "nowhere"
