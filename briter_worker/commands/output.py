"""The standard streams: text, JSON and columns on standard output, one line per message on standard error."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, TextIO

from briter_worker.job import encode_document
from briter_worker.redaction import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

EMPTY = "-"


def is_terminal() -> bool:
    """Return True if standard output is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def write(text: str) -> None:
    """Print the text. A reader that has closed the pipe (`| head`) is not an error."""
    if sys.stdout is None:
        return
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
    text = f"{message.rstrip('.')}. Fix: {fix}" if fix else message
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


def write_json(value: object) -> None:
    """Print the value as JSON, with escapes for what a terminal could obey."""
    write(encode_document(value).decode())  # type: ignore[arg-type]  # any JSON value


def answer(value: object, text: str, *, as_json: bool) -> None:
    """Print the value as JSON for programs, or the text for people."""
    if as_json:
        write_json(value)
    else:
        write(text)


def write_columns(rows: Iterable[Sequence[str]]) -> None:
    """Print one line per row, with tabs between the cells. A cell contains no tab and no line feed."""
    write("".join("\t".join(one_line(cell) or EMPTY for cell in row) + "\n" for row in rows))
