"""The process: `python -m briter_worker`, also installed as `briter-worker`."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
import threading
import traceback
from typing import TYPE_CHECKING

from briter_worker.errors import many_lines

if TYPE_CHECKING:
    from types import TracebackType


def main() -> None:
    """Run the command of the command line, and exit with its status."""
    _exit_on_early_signals()
    _fill_standard_descriptors()
    _use_utf8()
    # Pydantic looks for plugins in every installed package, which takes longer than the rest of the start.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    sys.excepthook = _print_redacted
    threading.excepthook = lambda args: _print_redacted(args.exc_type, args.exc_value, args.exc_traceback)
    # Modules are no garbage: to look for some among them takes a tenth of the start.
    gc.disable()
    from briter_worker.commands import main as run_command  # noqa: PLC0415 - after the above

    sys.exit(run_command(sys.argv[1:]))


def _print_redacted(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    sys.stderr.write(many_lines("".join(traceback.format_exception(kind, error, trace))))


def _exit_on_early_signals() -> None:
    """Exit with 0 when a worker is stopped before it has started."""
    if sys.argv[1:2] == ["run"]:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: os._exit(0))


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
