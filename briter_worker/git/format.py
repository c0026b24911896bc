"""The format of the state in `.git/briter/`: no program works on the state of a later one.

The number rises whenever an earlier program would misread what a later one has written: in `.git/briter/`
itself, in `storage/` beside the contract's job files, or in the two SQLite files there. The file names the
program that wrote it, so that an earlier one can name the version that is needed.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from briter_worker.errors import PublishError, UsageError, one_line, sync_folder

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = 1
_NAME = "format.json"


def check_format(state: Path) -> None:
    """Raise UsageError if a later program has written the state. Changes nothing."""
    file = state / _NAME
    try:
        document = json.loads(file.read_bytes())
        number, version = int(document["format"]), one_line(str(document["version"]), 40)
    except FileNotFoundError:
        return  # nothing was written yet, or by a program before there was a number
    except (OSError, ValueError, TypeError, KeyError) as error:
        text = f"{file} cannot be read, so that nobody knows which version wrote the state of this site"
        raise UsageError(
            f"{text}: {one_line(str(error))}", f"if no later version ran here: rm {file}"
        ) from None
    if number > FORMAT:
        raise UsageError(
            f"{state} was written by Briter Worker {version} (format {number}); "
            f"this one knows format {FORMAT}, and changed nothing",
            f"install that version or a later one again: pip install 'briter-worker>={version}'",
        )


def note_format(state: Path, version: str) -> None:
    """Store durably which format the state has from now on. Raises PublishError."""
    file, partial = state / _NAME, state / "format.tmp"
    document = json.dumps({"format": FORMAT, "version": version}) + "\n"
    try:
        if file.exists() and file.read_text() == document:
            return
        with partial.open("w") as handle:
            handle.write(document)
            handle.flush()
            os.fsync(handle.fileno())
        partial.replace(file)
        sync_folder(state)
    except OSError as error:
        raise PublishError.from_os("the format of the site's state cannot be stored", error) from error
