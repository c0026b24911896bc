"""What commands and pages do with the queue folder, beside a running worker or without one."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from briter_worker.errors import DeclinedError, os_error_text
from briter_worker.job import NO_QUIET_TIME, Document, Job, State, Status, format_time, join_paths, with_state
from briter_worker.ports import Cancellation, ListedJob, Pause
from briter_worker.queues import selection
from briter_worker.queues.disk.claims import CANCEL, ClaimFolder, read_claimed
from briter_worker.queues.disk.files import Folder, JobFile, is_job_name, read_queue_file
from briter_worker.queues.disk.index import PAUSE_FILE, FolderWatcher, Index
from briter_worker.redaction import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from briter_worker.job import QuietTime

_ONE_FILE_ONLY = frozenset({errno.EPERM, errno.EBUSY, errno.EXDEV})
"""A rename fails so because of that file: it is immutable, or mounted."""
_PAUSE = TypeAdapter(Pause)


class DiskControl:
    """The queue for commands and pages, which decide on the file that they actually took.

    For one thread at a time.
    """

    def __init__(
        self,
        root: Path,
        quarantine: Path,
        *,
        longest_delay: float,
        quiet: QuietTime = NO_QUIET_TIME,
        dry_run: bool,
        record: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.root = root
        self._clock = clock
        self._quarantine_path = quarantine
        self._claims = ClaimFolder(root, quarantine)
        self.watcher = FolderWatcher()
        """While it watches, only files that it names are read."""
        self._index = Index(root, longest_delay, quiet, dry_run, record, self.watcher)
        self._listed: tuple[int, float, list[ListedJob]] = (-1, 0.0, [])
        """The index's version, until when the states hold, and the jobs outside `.claimed/`."""

    # Views

    def jobs(self, now: float) -> Sequence[ListedJob]:
        """Return every job once: in flight, then waiting by due time, then dead letters."""
        # A job that moves from one folder to the other meanwhile is found in one of these looks.
        before = self._read_claimed()
        self._index.refresh(now)
        claimed = []
        for file in (before | self._read_claimed()).values():
            job = file.job.model_copy(update={"attempts": file.job.attempts + 1})
            claimed.append(self._row(f".claimed/{file.name}", job, State.CLAIMED))
        seen = {_save_of(row.job) for row in claimed}
        others = self._list_others(now)
        return [*claimed, *(row for row in others if _save_of(row.job) not in seen)] if seen else others

    def find(self, wanted: str, now: float) -> Sequence[ListedJob]:
        """Return the job of this id, else all jobs of this slug."""
        return selection.select_matching(self.jobs(now), wanted)

    def quarantined(self) -> Sequence[Path]:
        """Return the quarantined files, oldest first."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(self._quarantine_path.iterdir())
        return []

    def unusable_files(self, now: float) -> dict[str, str]:
        """Return the reason for each file that is not a job, or that could not be moved."""
        return self._look(now).unusable(now)

    def _look(self, now: float) -> Index:
        """Return what the folder holds now."""
        self._index.refresh(now)
        return self._index

    def _read_claimed(self) -> dict[str, JobFile]:
        with contextlib.suppress(FileNotFoundError), self._claims.opened() as folder:
            found = {name: read_claimed(folder, name) for name in folder.names() if is_job_name(name)}
            return {name: file for name, file in found.items() if file is not None}
        return {}

    def _list_others(self, now: float) -> list[ListedJob]:
        """Return the jobs that are not in flight; list again only when a file changed or a time has come."""
        index, (version, until, rows) = self._index, self._listed
        if version != index.version or now >= until:
            slugs = list(index.by_slug)
            waiting = [self._waiting_row(names, now) for slug in slugs if (names := index.pending(slug))]
            waiting.sort(key=lambda row: (row.job.due_at(0.0, math.inf), row.job.created_at, row.where))
            letters = [name for slug in slugs for name in index.failed(slug)]
            failed = [self._row(name, index.entries[name].job, State.FAILED) for name in letters]
            failed.sort(key=lambda row: (row.job.created_at, row.where))
            jobs = (row.job for row in waiting)
            times = (at for job in jobs for at in (job.scheduled_for, job.next_attempt_at, job.quiet_until))
            until = min((at for at in times if at and at > now), default=math.inf)
            rows = [*waiting, *failed]
            self._listed = (index.version, until, rows)
        return rows

    def _waiting_row(self, names: Sequence[str], now: float) -> ListedJob:
        """List the newest save of a slug, with the paths of the older saves that it will supersede."""
        job, *older = (self._index.entries[name].job for name in names)
        if older:
            paths = join_paths(job.paths, *(each.paths for each in older))
            job = self._index.quiet.apply(job.model_copy(update={"paths": paths}), job.created_at, *older)
        return self._row(names[0], job, job.state(now))

    def _row(self, name: str, job: Job, state: State) -> ListedJob:
        where = f"{self.root}/{name}"
        return ListedJob(job, state, partial(_read_document, where, job), where)

    # Commands

    def retry(self, wanted: str, now: float) -> Sequence[Job]:
        """Make dead letters and retrying jobs due at once."""
        with self._claims.exclusively():
            return self._retry(selection.select_to_retry(self._list(now), wanted), now)

    def retry_all(self, now: float) -> Sequence[Job]:
        """Make every dead letter that a retry can help due at once."""
        with self._claims.exclusively():
            return self._retry(selection.select_retryable(self._list(now)), now)

    def _list(self, now: float) -> Sequence[ListedJob]:
        """List the jobs, those included that a dead process had taken out of the queue folder."""
        self._claims.give_back(self._claims.names()[1])
        return self.jobs(now)

    def _retry(self, rows: Sequence[ListedJob], now: float) -> list[Job]:
        names = [_name(row) for row in rows]
        return self._alter(
            names, now, lambda file: with_state(file.document, now, status=Status.PENDING, attempts=0)
        )

    def publish_now(self, wanted: str, now: float) -> Sequence[Job]:
        """Make jobs due at once that wait for a time; their attempts still count."""
        waits_no_more = {"scheduledFor": None, "nextAttemptAt": None, "updatedAt": format_time(now)}
        if self._index.quiet.after_save:
            waits_no_more["quietUntil"] = format_time(now)
        with self._claims.exclusively():
            names = [_name(row) for row in selection.select_to_publish_now(self._list(now), wanted)]
            return self._alter(names, now, lambda file: {**file.document, **waits_no_more})

    def cancel(self, wanted: str, now: float) -> Cancellation:
        """Remove jobs from the queue, with the older saves they stand for; mark those in flight."""
        with self._claims.exclusively():
            rows = selection.select_existing(self._list(now), wanted)
            in_flight = [row for row in rows if row.state is State.CLAIMED]
            for row in in_flight:
                self._claims.claimed.touch(_name(row) + CANCEL)
            self._claims.claimed.sync()
            waiting = [row for row in rows if row.state is not State.CLAIMED]
            removed = self._remove_rows(waiting, now)
            if waiting and not removed:
                text = f"{wanted!r} has just been saved again or claimed by the worker"
                raise DeclinedError(text, "look again")
            shown = {row.job.id for row in waiting}
            return Cancellation(
                tuple(job for job in removed if job.id in shown), tuple(row.job for row in in_flight)
            )

    def remove(self, rows: Sequence[ListedJob], now: float) -> None:
        """Remove waiting jobs and dead letters that are stored elsewhere by now; newer saves stay."""
        with self._claims.exclusively():
            self._index.refresh(now)
            self._remove_rows(rows, now)

    def _remove_rows(self, rows: Iterable[ListedJob], now: float) -> list[Job]:
        return self._alter([name for row in rows for name in self._files_of(row)], now, lambda _: None)

    def _files_of(self, row: ListedJob) -> list[str]:
        """Return the files shown as this row. A later save is newer, or declares what the row did not."""
        names = self._index.pending(row.job.slug)
        if row.state is State.FAILED:
            names = [name for name in self._index.failed(row.job.slug) if name == _name(row)]
        entries = {name: self._index.entries[name] for name in names}
        declared = set(row.job.paths)
        return [
            name
            for name, entry in entries.items()
            if entry.job.created_at <= row.job.created_at and declared.issuperset(entry.job.paths)
        ]

    # Changes of waiting files

    def _take(self, name: str, now: float) -> JobFile | None:
        """Take the job in a waiting file; what is not a job (any more) stays, and what cannot be moved."""
        try:
            taken = self._claims.take(name)
        except OSError as error:
            if error.errno not in _ONE_FILE_ONLY:
                raise
            self._index.leave_alone([name], now, f"it cannot be claimed: {os_error_text(error)}")
            return None
        known = self._index.entries.get(name)
        self._index.forget(name)
        file = self._claims.read(taken) if taken else None
        if taken and file is None:
            self._claims.give_back([taken])
        return file and self._index.with_quiet_time(file, known)

    def _alter(
        self, names: Collection[str], now: float, change: Callable[[JobFile], Document | None]
    ) -> list[Job]:
        """Replace the documents of waiting jobs, or remove the jobs where `change` returns None.

        A file that is another save by now stays as it is. Return the changed and removed jobs.
        """
        altered, back, gone = [], [], []
        for name in names:
            entry = self._index.entries[name]
            file = self._take(name, now)
            if file is None:
                continue
            document = change(file) if _save_of(file.job) == _save_of(entry.job) else file.document
            if document is None:
                gone.append(file.name)
                altered.append(file.job)
            else:
                back.append(file.name)
                if document != file.document:
                    altered.append(self._claims.rewrite(file, document).job)
        self._claims.give_back(back)
        self._claims.drop(gone)
        return altered

    # The pause

    def active_pause(self, now: float) -> Pause | None:
        """Return the active pause. A damaged file is a pause, too: only `resume`, or its time, ends one."""
        try:
            with Folder.open(self.root) as root:
                pause = _PAUSE.validate_json(root.read(PAUSE_FILE)[0] or b"")
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            return Pause(since=0.0, until=None, reason=f"the file {PAUSE_FILE} cannot be read")
        return pause._replace(reason=one_line(pause.reason)) if pause.is_active(now) else None

    def pause(self, now: float, *, until: float | None = None, reason: str = "") -> Pause:
        """Stop claiming until a time, or until `resume`; durable when this returns."""
        pause = Pause(now, until, one_line(reason))
        with self._claims.exclusively():
            self._claims.root.replace(PAUSE_FILE, _PAUSE.dump_json(pause))
            self._claims.root.sync()
        return pause

    def resume(self) -> bool:
        """End the pause. Return True if there was one."""
        with contextlib.suppress(FileNotFoundError), Folder.open(self.root) as root:
            was_paused = root.has(PAUSE_FILE)
            root.unlink(PAUSE_FILE)
            root.sync()
            return was_paused
        return False


def _save_of(job: Job) -> tuple[str, str, float, Status]:
    return (job.id, job.slug, job.created_at, job.status)


def _name(row: ListedJob) -> str:
    return os.path.basename(row.where)  # noqa: PTH119 - a Path of each of many names takes long


def _read_document(where: str, job: Job) -> Document:
    """Return the document of a listed job as it is now; or as it was, if it is gone."""
    path = Path(where)
    document = job.model_dump(mode="json", by_alias=True)
    with contextlib.suppress(OSError), Folder.open(path.parent) as folder:
        file = read_queue_file(folder, path.name)
        if isinstance(file, JobFile) and file.job.slug == job.slug:
            document = file.document
    if job.quiet_until is not None:
        document = {**document, "quietUntil": format_time(job.quiet_until)}
    return {"id": job.id, **document, "paths": list(job.paths), "attempts": job.attempts}
