"""The process: `python -m briter_worker`, also installed as `briter-worker`."""

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
    """Run the command of the command line, and exit with its status."""
    _exit_on_early_signals()
    _remove_current_folder_from_path()
    _fill_standard_descriptors()
    _use_utf8()
    # The pydantic plugin system looks through every installed package, which takes 30 ms.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from briter_worker.cli import main as run_command  # noqa: PLC0415 - its imports may open files
    from briter_worker.redaction import many_lines  # noqa: PLC0415

    def print_redacted(
        kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
    ) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        sys.stderr.write(many_lines(text))

    import traceback  # noqa: PLC0415 - after the path is safe

    sys.excepthook = print_redacted
    threading.excepthook = lambda failed: print_redacted(
        failed.exc_type, failed.exc_value, failed.exc_traceback
    )
    sys.exit(run_command(sys.argv[1:]))


def _exit_on_early_signals() -> None:
    """Exit with 0 when a worker is stopped before it has started."""
    if sys.argv[1:2] == ["run"]:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: os._exit(0))


def _remove_current_folder_from_path() -> None:
    """Keep `python -m` from importing modules of the site, such as its `git.py`."""
    first = sys.path[0] if sys.path else _HERE
    if not sys.flags.safe_path and first != _HERE and first in {"", os.getcwd()}:  # noqa: PTH109 - as above
        del sys.path[0]


def _fill_standard_descriptors() -> None:
    """Open /dev/null in place of closed standard streams, so that no descriptor below 3 is the lock's.

    Git processes get standard streams of their own and would not inherit a lock there.
    """
    for wanted in range(3):
        try:
            os.fstat(wanted)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor: `wanted`


def _use_utf8() -> None:
    """Use UTF-8 for paths and output, whatever the locale of a cron job is."""
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        # Python decides this only when it starts.
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "PYTHONUTF8": "1"})  # noqa: S606 - this program
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


if __name__ == "__main__":
    main()
