"""The jobs that waited when the worker began to refuse misspelt keys: they are read as before.

The first program of this version that changes a queue of an earlier version notes such jobs, once, in the
lock file of the claims, which earlier versions leave empty. In a queue that no earlier version has changed
there are none. Until the note is there, all jobs of an earlier version's queue count as such.
"""

from __future__ import annotations

import contextlib
import json
import math
from typing import TYPE_CHECKING

from briter_worker.job import embargo_fault
from briter_worker.queues.disk.files import Folder, JobFile, is_job_name, read_queue_file

if TYPE_CHECKING:
    from pathlib import Path

Identity = tuple[str, int]
"""A job's id, and the time at which its producer wrote the file: both stay when the worker rewrites it."""


class WaitedJobs:
    """The jobs of one queue that an earlier version has accepted."""

    def __init__(self, folder: Path, note: str) -> None:
        """`folder`: where the claims of the queue are; `note`: the name of their lock file."""
        self._folder = folder
        self._note = note
        self._noted: frozenset[Identity] | None = None

    def has(self, file: JobFile) -> bool:
        """Return True if the job waited before keys were checked."""
        if self._noted is None:
            try:
                with Folder.open(self._folder) as claimed:
                    self._noted = self._read(claimed)
            except (FileNotFoundError, NotADirectoryError):
                return False  # no version has changed the queue
        return self._noted is None or _identity(file) in self._noted

    def note(self, claimed: Folder, *folders: Folder) -> None:
        """Note the jobs of these folders, unless that was done before; only under the lock."""
        if self._noted is None:
            self._noted = self._read(claimed)
        if self._noted is None:
            found = [each for folder in folders for each in _misspelt(folder)]
            claimed.overwrite(self._note, json.dumps(found).encode())
            self._noted = frozenset(found)

    def _read(self, claimed: Folder) -> frozenset[Identity] | None:
        """Return what is noted; None if nothing is, or a part only."""
        try:
            noted = json.loads(claimed.read(self._note)[0] or b"")
            return frozenset((str(job_id), int(written)) for job_id, written in noted)
        except (FileNotFoundError, ValueError, TypeError):
            return None


def _misspelt(folder: Folder) -> list[Identity]:
    """Return the jobs of a folder that would be refused today, or at some time."""
    found = []
    for name in filter(is_job_name, folder.names()):
        with contextlib.suppress(OSError):
            file = read_queue_file(folder, name)
            if isinstance(file, JobFile) and embargo_fault(file.document, -math.inf):
                found.append(_identity(file))
    return found


def _identity(file: JobFile) -> Identity:
    return file.job.id, file.stat.st_mtime_ns
