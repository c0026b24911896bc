"""`python -m briter_worker`, also installed as `briter-worker`."""

from __future__ import annotations

import io
import os
import sys


def main() -> None:
    """Run the command that was given, and exit with its status."""
    _fill_standard_descriptors()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Names of posts are any text: whatever the locale, it can be printed, and JSON is UTF-8.
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    from briter_worker.cli import main as run_command  # noqa: PLC0415 - its imports may open files

    sys.exit(run_command(sys.argv[1:]))


def _fill_standard_descriptors() -> None:
    """A descriptor below 3 that was closed by the parent would be given to the next file: to the lock's.

    Git children get their own standard streams, so a lock there would not be passed on to them.
    """
    for wanted in range(3):
        try:
            os.fstat(wanted)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free one: this one


if __name__ == "__main__":
    main()
