"""Moves between the queue folder and `.claimed/`, each of which a crash leaves done or not done.

The queue folder belongs to the CMS: between any two of our system calls it may rename a newer save over
any name in it. So nothing in it is ever rewritten or removed by name: a file is *taken* by a rename, and
whatever the rename brought is what we decide on; it is changed in `.claimed/`, where only we write; and it
is *given back* by a link, which never overwrites.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

from briter_worker.job import format_time
from briter_worker.queues import files
from briter_worker.queues.sighting import Sighting, look
from briter_worker.strictjson import MAX_BYTES, encode

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from briter_worker.job import Job
    from briter_worker.strictjson import Document


_MARK = ".cancel"


@dataclass(frozen=True, slots=True)
class Held:
    """A job in `.claimed/`, as it was when it was read there."""

    name: str
    job: Job
    document: Document
    stat: os.stat_result

    @property
    def order(self) -> tuple[float, float, str]:
        """Of two saves of a slug, the greater is the newer."""
        return (self.job.created_at, self.stat.st_mtime_ns / 1e9, self.name)


class Flight:
    """The queue folder, and the folder of what has been taken out of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.claimed = root / ".claimed"

    def exclusively(self) -> AbstractContextManager[None]:
        """No other process changes the queue meanwhile, but for the writers of new jobs."""
        self.root.mkdir(parents=True, exist_ok=True)
        files.make_folder(self.claimed, self.root)
        return files.exclusively(self.claimed / ".lock")

    def names(self) -> list[str]:
        """What is in flight."""
        try:
            return sorted(path.name for path in self.claimed.iterdir() if files.is_job_name(path.name))
        except FileNotFoundError:
            return []

    def take(self, name: str) -> str | None:
        """Move a waiting file out of every other program's reach; its name there, or None when it is gone."""
        held = name if name.isprintable() and not self._has(name) else f"{uuid4().hex}{files.SUFFIX}"
        # Who died between the two removals of `drop` has left it: this is another save, and is wanted.
        self._unmark(held)
        try:
            os.rename(self.root / name, self.claimed / held)  # noqa: PTH104 - Path.rename builds a Path
        except FileNotFoundError:
            return None
        if held != name:
            self._keep_id(held, files.stem(name))
        return held

    def look(self, held: str) -> Sighting:
        """What is in flight under this name. Raises FileNotFoundError when nothing is."""
        return look(self.claimed / held, held)

    def read(self, held: str) -> Held | None:
        """The job in flight under this name; None when it is gone, or no job."""
        try:
            sighting = self.look(held)
        except FileNotFoundError:
            return None
        if sighting.job is None or sighting.document is None:
            return None
        return Held(held, sighting.job, sighting.document, sighting.stat)

    def rewrite(self, held: Held, document: Document) -> Held:
        """The job in flight with another document, durable once its folder is flushed."""
        path = self.claimed / held.name
        data = encode(document)
        if len(data) > MAX_BYTES and "updatedAt" not in document:
            # By this it is known as the worker's writing, which may be larger than a writer's.
            data = encode({**document, "updatedAt": format_time(held.stat.st_mtime)})
        files.replace(path, data, held.stat)
        return self.read(held.name) or held

    def give_back(self, names: Iterable[str]) -> None:
        """These wait again, each under its own name, or a like one when a writer has put another there.

        All that can be, is; then the first OSError is raised.
        """
        failed: OSError | None = None
        placed = []
        for name in names:
            try:
                if self._place(name):
                    placed.append(name)
            except OSError as error:
                failed = failed or error
        if placed:
            # Only when the new names are durable may the old ones go.
            files.sync_folder(self.root)
            self.drop(placed)
        if failed is not None:
            raise failed

    def _place(self, held: str) -> bool:
        source = self.claimed / held
        for name in files.variants(held):
            target = self.root / name
            if name != held:
                self._keep_id(held, files.stem(held))
            try:
                if source.is_dir() and not source.is_symlink():
                    _move_folder(source, target)
                    return False
                files.place(source, target)
            except FileExistsError:
                if _is_same_file(source, target):
                    return True  # a crash came between the link and the removal
                continue
            except FileNotFoundError:
                return False
            return True
        raise AssertionError  # variants never end

    def drop(self, names: Iterable[str]) -> None:
        """These are in flight no more, durably."""
        marked = self.marked()
        for name in names:
            (self.claimed / name).unlink(missing_ok=True)
            if name in marked:
                self._unmark(name)
        files.sync_folder(self.claimed)
        # Nor do the names come back that they had before they were taken.
        files.sync_folder(self.root)

    def mark(self, held: str) -> None:
        """Ask for this one to be cancelled, durably: whoever works on it, now or after a crash, sees it."""
        (self.claimed / f"{held}{_MARK}").touch()
        files.belong_to(self.claimed / f"{held}{_MARK}", self.root)
        files.sync_folder(self.claimed)

    def is_marked(self, held: str) -> bool:
        """Whether somebody has asked for this one to be cancelled."""
        return os.path.lexists(self.claimed / f"{held}{_MARK}")

    def marked(self) -> set[str]:
        """All of which somebody has asked to be cancelled: one look, however many are in flight."""
        try:
            names = os.listdir(self.claimed)  # noqa: PTH208 - iterdir builds a Path of each
        except FileNotFoundError:
            return set()
        return {name.removesuffix(_MARK) for name in names if name.endswith(_MARK)}

    def _unmark(self, held: str) -> None:
        if self.is_marked(held):
            (self.claimed / f"{held}{_MARK}").unlink(missing_ok=True)

    def sync(self) -> None:
        """What was taken and rewritten survives a power cut."""
        files.sync_folder(self.claimed)

    def _has(self, held: str) -> bool:
        return os.path.lexists(self.claimed / held)

    def _keep_id(self, held: str, job_id: str) -> None:
        """A job whose id is its file's name keeps it under another name."""
        job = self.read(held)
        if job is not None and not job.document.get("id"):
            self.rewrite(job, {"id": job_id, **{k: v for k, v in job.document.items() if k != "id"}})


def _move_folder(source: Path, target: Path) -> None:
    """A folder cannot be linked; no writer of jobs makes one, so nobody is raced here."""
    if os.path.lexists(target):
        raise FileExistsError(target)
    source.rename(target)


def _is_same_file(one: Path, other: Path) -> bool:
    try:
        return os.path.samestat(one.lstat(), other.lstat())
    except FileNotFoundError:
        return False
