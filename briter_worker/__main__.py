"""`python -m briter_worker`, also installed as `briter-worker`."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 - pathlib comes later


def main() -> None:
    """Run the command that was given, and exit with its status."""
    _end_quietly_until_there_is_something_to_end()
    _forget_current_folder()
    _fill_standard_descriptors()
    _speak_utf8()
    _tell_no_secrets()
    # Pydantic would look through every installed package for plugins, which takes longer than the rest of it.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from briter_worker.cli import main as run_command  # noqa: PLC0415 - its imports may open files

    sys.exit(run_command(sys.argv[1:]))


def _end_quietly_until_there_is_something_to_end() -> None:
    """A worker that is stopped before it has begun, or after it has ended, was stopped in order."""
    if sys.argv[1:2] == ["run"]:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: os._exit(0))


def _forget_current_folder() -> None:
    """`python -m` looks for modules in the current folder first: a site's `git.py` must not be run.

    What is still to be imported is safe then; the installed `briter-worker` never looks there.
    """
    first = sys.path[0] if sys.path else _HERE
    if not sys.flags.safe_path and first != _HERE and first in {"", os.getcwd()}:  # noqa: PTH109 - as above
        del sys.path[0]


def _fill_standard_descriptors() -> None:
    """A descriptor below 3 that the parent has closed would be given to the next file: to the lock's.

    Git children get standard streams of their own, so a lock there would not be passed on to them.
    """
    for wanted in range(3):
        try:
            os.fstat(wanted)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free one: this one


def _speak_utf8() -> None:
    """Paths in git and names of posts are UTF-8, whatever the locale of a cron says."""
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        # Python decides this only when it starts.
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "PYTHONUTF8": "1"})  # noqa: S606 - ourselves
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def _tell_no_secrets() -> None:
    """A traceback, for whoever asked for it (BRITER_DEBUG), has the texts of libraries' exceptions in it."""

    def show(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        import traceback  # noqa: PLC0415 - for the rare case

        from briter_worker.errors import paragraphs  # noqa: PLC0415 - as above

        sys.stderr.write(paragraphs("".join(traceback.format_exception(kind, error, trace))))

    sys.excepthook = show
    threading.excepthook = lambda told: show(told.exc_type, told.exc_value, told.exc_traceback)


if __name__ == "__main__":
    main()
