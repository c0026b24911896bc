"""What commands and pages do with the queue folder, beside a running worker or without one."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from briter_worker.errors import DeclinedError
from briter_worker.job import Document, Job, State, Status, format_time, join_paths, parse_time, with_state
from briter_worker.ports import Cancellation, ListedJob, Pause
from briter_worker.queues.disk.claims import CANCEL, ClaimFolder, TakenJob, jobs_in
from briter_worker.queues.disk.files import Folder
from briter_worker.queues.disk.index import Index, read_queue_file
from briter_worker.queues.disk.quarantine import Quarantine
from briter_worker.queues.disk.watch import PAUSE_FILE
from briter_worker.queues.selection import (
    select_existing,
    select_matching,
    select_retryable,
    select_to_publish_now,
    select_to_retry,
)
from briter_worker.redaction import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from briter_worker.ports import QuarantinedFile

_LOOKS = 5
"""A queue that never rests is shown as it is after so many looks."""
_TIMES = ("scheduledFor", "createdAt", "nextAttemptAt", "updatedAt", "dryRunAt")


class DiskControl:
    """Implements `ports.QueueControl`. A command decides on the file that it actually took."""

    def __init__(
        self,
        root: Path,
        quarantine: Path,
        *,
        longest_delay: float,
        dry_run: bool,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.root = root
        self._clock = clock
        self._longest_delay = longest_delay
        self._claims = ClaimFolder(root)
        self._index = Index(root, longest_delay, dry_run=dry_run)
        self._quarantine = Quarantine(quarantine, self._claims)
        self._guard = threading.RLock()
        """A dashboard looks from several threads."""
        self._listed: tuple[list[ListedJob], list[ListedJob]] = ([], [])
        self._listed_version: tuple[int, tuple[str, ...]] = (-1, ())

    @contextlib.contextmanager
    def _exclusively(self) -> Iterator[None]:
        with self._guard, self._claims.exclusively():
            yield

    # Views

    def jobs(self, now: float) -> Sequence[ListedJob]:
        """Return every job once: in flight, then waiting by due time, then dead letters."""
        with self._guard:
            claimed = self._list_claimed(now)
            waiting, failed = self._list_waiting(now)
            if claimed:
                seen = {_save_of(row) for row in claimed}
                waiting = [row for row in waiting if _save_of(row) not in seen]
            return [*claimed, *waiting, *failed]

    def find(self, wanted: str, now: float) -> Sequence[ListedJob]:
        """Return the job of this id, else all jobs of this slug."""
        return select_matching(self.jobs(now), wanted)

    def quarantined(self) -> Sequence[QuarantinedFile]:
        """Return the quarantined files, oldest first."""
        with self._guard:
            self._index.refresh(self._clock())
            letters = [entry.job for entry in self._index.entries.values() if entry.is_quarantined]
            return self._quarantine.contents(letters)

    def unusable_files(self, now: float) -> dict[str, str]:
        """Return the reason for each file that is not a job, or that could not be moved."""
        with self._guard:
            self._index.refresh(now)
            return self._index.unusable(now)

    def _list_claimed(self, now: float) -> list[ListedJob]:
        """List the jobs in flight; look again while jobs move from one folder to the other."""
        found: list[TakenJob] = []
        for _ in range(_LOOKS):
            self._index.refresh(now)
            before = self._folder_times()
            with self._claims.opened() as folder:
                found = jobs_in(folder) if folder else []
            self._index.refresh(now)
            if self._folder_times() == before:
                break
        rows = []
        for taken in found:
            job = taken.job.model_copy(update={"attempts": taken.job.attempts + 1})
            path = self._claims.path / taken.name
            rows.append(ListedJob(job, State.CLAIMED, partial(_read_document, path, job), str(path)))
        return rows

    def _folder_times(self) -> list[int]:
        times = []
        for folder in (self.root, self._claims.path):
            with contextlib.suppress(FileNotFoundError):
                times.append(folder.stat().st_mtime_ns)
        return times

    def _list_waiting(self, now: float) -> tuple[list[ListedJob], list[ListedJob]]:
        """List what the index has; anew only when a file changed or a time has come."""
        index = self._index
        version = (index.version, tuple(index.due(now)))
        if self._listed_version != version:
            waiting = [self._list_slug(names, now) for names in index.pending.values()]
            waiting.sort(key=lambda row: (*_wait(row.job), row.where))
            failed = [self._row(name, State.FAILED) for names in index.failed.values() for name in names]
            failed.sort(key=lambda row: (row.job.created_at, row.where))
            self._listed, self._listed_version = (waiting, failed), version
        return self._listed

    def _list_slug(self, names: list[str], now: float) -> ListedJob:
        """List the newest save of a slug, with the paths of the older saves that it will supersede."""
        if len(names) == 1:
            return self._row(names[0], self._index.entries[names[0]].job.state(now))
        first, *older = self._index.newest_first(names)
        job = self._index.entries[first].job
        paths = join_paths(job.paths, *(self._index.entries[name].paths for name in older))
        return self._row(first, job.state(now), job.model_copy(update={"paths": paths}))

    def _row(self, name: str, state: State, job: Job | None = None) -> ListedJob:
        job = job or self._index.entries[name].job
        where = f"{self.root}/{name}"
        return ListedJob(job, state, partial(_read_document, where, job), where)

    # Commands

    def retry(self, wanted: str, now: float) -> Sequence[Job]:
        """Make dead letters and retrying jobs due at once."""
        with self._exclusively():
            return self._retry(select_to_retry(self._list(now), wanted), now)

    def retry_all(self, now: float) -> Sequence[Job]:
        """Make every dead letter that a retry can help due at once."""
        with self._exclusively():
            return self._retry(select_retryable(self._list(now)), now)

    def publish_now(self, wanted: str, now: float) -> Sequence[Job]:
        """Make scheduled and retrying jobs due at once; their attempts still count."""
        with self._exclusively():
            rows = select_to_publish_now(self._list(now), wanted)
            waits_no_more = {"scheduledFor": None, "nextAttemptAt": None, "updatedAt": format_time(now)}
            return self._change(rows, lambda document: {**document, **waits_no_more})

    def cancel(self, wanted: str, now: float) -> Cancellation:
        """Remove jobs from the queue, with the older saves they stand for; mark those in flight."""
        with self._exclusively():
            rows = select_existing(self._list(now), wanted)
            in_flight = [row for row in rows if row.state is State.CLAIMED]
            for row in in_flight:
                self._claims.mark(_name(row), CANCEL)
            if in_flight:
                self._claims.claimed.sync()
            waiting = [row for row in rows if row.state is not State.CLAIMED]
            removed = self._remove_rows(waiting)
            if waiting and not removed:
                text = f"{wanted!r} has just been saved again or claimed by the worker"
                raise DeclinedError(text, "look again")
            shown = {row.job.id for row in waiting}
            return Cancellation(
                tuple(taken.job for taken in removed if taken.job.id in shown),
                tuple(row.job for row in in_flight),
            )

    def remove(self, rows: Sequence[ListedJob], now: float) -> None:
        """Remove waiting jobs and dead letters that are stored elsewhere by now; newer saves stay."""
        with self._exclusively():
            self._index.refresh(now)
            self._remove_rows(rows)

    def _list(self, now: float) -> Sequence[ListedJob]:
        self._give_back_taken(now)
        return self.jobs(now)

    def _retry(self, rows: Sequence[ListedJob], now: float) -> list[Job]:
        return self._change(
            rows, lambda document: with_state(document, now, status=Status.PENDING, attempts=0)
        )

    def _change(self, rows: Sequence[ListedJob], change: Callable[[Document], Document]) -> list[Job]:
        taken = self._take_rows(_name(row) for row in rows)
        changed = [self._claims.rewrite(each, change(each.document)).job for each in taken]
        self._claims.give_back(each.name for each in taken)
        return changed

    def _remove_rows(self, rows: Iterable[ListedJob]) -> list[TakenJob]:
        taken = self._take_rows(name for row in rows for name in self._files_of(row))
        self._claims.drop([each.name for each in taken])
        return taken

    def _files_of(self, row: ListedJob) -> list[str]:
        """Return the files shown as this row. A later save is newer, or declares what the row did not."""
        if row.state is State.FAILED:
            names = [name for name in self._index.failed.get(row.job.slug, ()) if name == _name(row)]
        else:
            names = self._index.pending.get(row.job.slug, [])
        entries = {name: self._index.entries[name] for name in names}
        declared = set(row.job.paths)
        return [
            name
            for name, entry in entries.items()
            if entry.created_at <= row.job.created_at and declared.issuperset(entry.paths)
        ]

    def _take_rows(self, names: Iterable[str]) -> list[TakenJob]:
        """Take the files that are still the saves that were listed; all others stay."""
        taken, back = [], []
        for name in list(names):
            entry = self._index.entries.get(name)
            taken_name = self._claims.take(name) if entry else None
            self._index.forget(name)
            if entry is None or taken_name is None:
                continue
            job = self._claims.read(taken_name)
            if job is not None and _is_same_save(job.job, entry.job):
                taken.append(job)
            else:
                back.append(taken_name)
        self._claims.give_back(back)
        return taken

    def _give_back_taken(self, now: float) -> None:
        """Let files wait again that a dead process had taken out of the queue folder."""
        _, taken = self._claims.names()
        if taken:
            self._index.refresh(now)
            self._claims.give_back(taken)
            self._index.refresh(now)

    # The pause

    def active_pause(self, now: float) -> Pause | None:
        """Return the active pause. A damaged file is a pause, too: only `resume`, or its time, ends one."""
        try:
            with Folder.open(self.root) as root:
                data, _ = root.read(PAUSE_FILE)
            document = json.loads(data or b"")
            until = document["until"]
            pause = Pause(
                since=parse_time(document["since"]),
                until=None if until is None else parse_time(until),
                reason=one_line(str(document["reason"])),
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return Pause(since=0.0, until=None, reason=f"the file {PAUSE_FILE} cannot be read")
        return pause if pause.is_active(now) else None

    def pause(self, now: float, *, until: float | None = None, reason: str = "") -> Pause:
        """Stop claiming until a time, or until `resume`; durable when this returns."""
        pause = Pause(now, until, one_line(reason))
        document = {
            "since": format_time(now),
            "until": None if until is None else format_time(until),
            "reason": pause.reason,
        }
        with self._exclusively():
            self._claims.root.replace(PAUSE_FILE, json.dumps(document).encode())
            self._claims.root.give_to_owner(PAUSE_FILE)
            self._claims.root.sync()
        return pause

    def resume(self) -> bool:
        """End the pause. Return True if there was one."""
        try:
            with Folder.open(self.root) as root:
                was_paused = root.has(PAUSE_FILE)
                root.unlink(PAUSE_FILE)
                root.sync()
        except FileNotFoundError:
            return False
        return was_paused


def _save_of(row: ListedJob) -> tuple[str, str, float]:
    return (row.job.id, row.job.slug, row.job.created_at)


def _wait(job: Job) -> tuple[float, float]:
    return (job.due_at(0.0, float("inf")), job.created_at)


def _name(row: ListedJob) -> str:
    return os.path.basename(row.where)  # noqa: PTH119 - a Path of each of many names takes long


def _is_same_save(one: Job, other: Job) -> bool:
    return (one.id, one.slug, one.created_at, one.status) == (
        other.id,
        other.slug,
        other.created_at,
        other.status,
    )


def _read_document(path: Path | str, job: Job) -> Document:
    """Return the document of a listed job as it is now; or as it was, if it is gone."""
    path = Path(path)
    document: Document = {}
    with contextlib.suppress(OSError), Folder.open(path.parent) as folder:
        document = read_queue_file(folder, path.name).document
    if document.get("slug") != job.slug:
        document = job.model_dump(mode="json", by_alias=True)
        for key in _TIMES:
            if document[key] is not None:
                document[key] = format_time(document[key])
    return {"id": job.id, **document, "paths": list(job.paths), "attempts": job.attempts}
