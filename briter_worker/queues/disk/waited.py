"""The jobs that waited when the worker began to refuse misspelt keys: they are read as before.

The first program of this version that changes a queue of an earlier version notes such jobs, once, in the
lock file of the claims, which earlier versions leave empty. In a queue that no earlier version has changed
there are none. Until the note is there, all jobs of an earlier version's queue count as such.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from briter_worker.job import embargo_fault
from briter_worker.queues.disk.files import Folder, JobFile

if TYPE_CHECKING:
    from collections.abc import Iterable
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

    def is_noted(self, claimed: Folder) -> bool:
        """Return True if the jobs are noted that waited."""
        if self._noted is None:
            self._noted = self._read(claimed)
        return self._noted is not None

    def note(self, claimed: Folder, jobs: Iterable[JobFile]) -> None:
        """Note which of the jobs would be refused today, or at some time; only under the lock."""
        found = [_identity(file) for file in jobs if embargo_fault(file.document, -math.inf)]
        claimed.overwrite(self._note, json.dumps(found).encode())
        self._noted = frozenset(found)

    def _read(self, claimed: Folder) -> frozenset[Identity] | None:
        """Return what is noted; None if nothing is, or a part only."""
        try:
            noted = json.loads(claimed.read(self._note)[0] or b"")
            return frozenset((str(job_id), int(written)) for job_id, written in noted)
        except (FileNotFoundError, ValueError, TypeError):
            return None


def _identity(file: JobFile) -> Identity:
    return file.job.id, file.stat.st_mtime_ns
