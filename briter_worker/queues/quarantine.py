"""Files that are no jobs: moved out of the way whole, each with a failed job that says so."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from briter_worker.errors import for_people
from briter_worker.job import Status, format_time, parse_time, rewritten
from briter_worker.ports import PutAside
from briter_worker.queues import files
from briter_worker.strictjson import Document, encode

if TYPE_CHECKING:
    from pathlib import Path

    from briter_worker.queues.flight import Flight
    from briter_worker.queues.sighting import Sighting, Trouble

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_TIMES = ("scheduledFor", "createdAt", "nextAttemptAt", "updatedAt")
_REASON = 400
"""So much of the reason leaves room for the file's name behind it."""
_OWN_KEYS = ("status", "attempts", "attempt", "nextAttemptAt", "lastError", "failure", "updatedAt")


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A file in quarantine."""

    path: Path
    bytes: int
    since: float


class Quarantine:
    """Where the bytes of what is no job are kept."""

    def __init__(self, folder: Path, flight: Flight) -> None:
        self._folder = folder
        self._nearby = flight.root / ".quarantine"
        self._flight = flight

    def put_aside(self, held: str, name: str, sighting: Sighting, trouble: Trouble, now: float) -> PutAside:
        """Keep the file's bytes, and write the failed job that names them.

        The job is written first: a crash in between puts the file aside once more, never silently.
        """
        target = self._free_name(name, now)
        text = for_people(
            f"{for_people(trouble.reason, _REASON)}. The file {files.printable(name)!r} is kept as {target}. "
            "Fix: correct what wrote it, save the post again, then cancel this one"
        )
        document = _salvaged(trouble.document, name, min(sighting.stat.st_mtime, now))
        document = rewritten(
            document,
            status=Status.FAILED,
            attempts=0,
            now=now,
            last_error=text,
            failure=trouble.failure.value,
        )
        like = sighting.stat if stat.S_ISREG(sighting.stat.st_mode) else None
        letter = self._write_failed(name, document, like)
        source = self._flight.claimed / held
        try:
            kept = self._move(source, target)
        except OSError:
            if os.path.lexists(source):  # it is tried again, and gets a letter then
                with contextlib.suppress(OSError):
                    self._take_back(letter, document)
            raise
        return PutAside(document["id"], document["slug"], text, str(kept))

    def _write_failed(self, name: str, document: Document, like: os.stat_result | None) -> str:
        temp = files.temporary(self._flight.claimed)
        files.write_new(temp, encode(document), like)
        try:
            letter = self._place(temp, name if name.isprintable() else f"{temp.name[1:33]}{files.SUFFIX}")
        finally:
            temp.unlink(missing_ok=True)
        files.sync_folder(self._flight.root)
        return letter

    def _take_back(self, letter: str, document: Document) -> None:
        """The letter is gone; what a writer may have put in its place meanwhile stays."""
        held = self._flight.take(letter)
        if held is None:
            return
        if self._flight.look(held).document == document:
            self._flight.drop([held])
        else:
            self._flight.give_back([held])

    def _place(self, temp: Path, name: str) -> str:
        for candidate in files.variants(name):
            try:
                files.place(temp, self._flight.root / candidate)
            except FileExistsError:
                continue  # a writer has used the name meanwhile
            return candidate
        raise AssertionError  # variants never end

    def _free_name(self, name: str, now: float) -> Path:
        stamp = _UNSAFE.sub("", format_time(now).replace(":", ""))
        safe = _UNSAFE.sub("_", files.stem(name))[:100] + files.SUFFIX
        files.make_folder(self._folder, self._flight.root)
        for candidate in files.variants(f"{stamp}-{safe}"):
            if not os.path.lexists(self._folder / candidate):
                return self._folder / candidate
        raise AssertionError  # variants never end

    def _move(self, source: Path, target: Path) -> Path:
        try:
            source.rename(target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            target = self._move_across(source, target)
        files.sync_folder(target.parent)
        files.sync_folder(source.parent)
        return target

    def _move_across(self, source: Path, target: Path) -> Path:
        """To another file system: a file is copied; what must not be opened stays on this one."""
        found = source.lstat()
        if not stat.S_ISREG(found.st_mode) or not os.access(source, os.R_OK):
            files.make_folder(self._nearby, self._flight.root)
            return source.rename(self._nearby / target.name)
        import shutil  # noqa: PLC0415 - it loads every compression there is

        temp = files.temporary(target.parent)
        try:
            with source.open("rb") as reader, temp.open("xb") as writer:
                shutil.copyfileobj(reader, writer)
                writer.flush()
                os.fsync(writer.fileno())
            temp.rename(target)
        except BaseException:
            temp.unlink(missing_ok=True)
            raise
        files.sync_folder(target.parent)
        source.unlink()
        return target

    def contents(self) -> list[Quarantined]:
        """What is kept, oldest first."""
        found = []
        for folder in (self._folder, self._nearby):
            try:
                paths = list(folder.iterdir())
            except FileNotFoundError:
                continue
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    about = path.lstat()
                    found.append(Quarantined(path, about.st_size, _since(path.name, about)))
        return sorted(found, key=lambda kept: kept.since)


def _since(name: str, about: os.stat_result) -> float:
    """The moment is in the name: a rename keeps the time at which the bytes were written."""
    try:
        moment = datetime.strptime(name[:21], "%Y-%m-%dT%H%M%S.%f").replace(tzinfo=UTC)
    except ValueError:
        return about.st_ctime
    return moment.timestamp()


def _salvaged(document: Document | None, name: str, modified: float) -> Document:
    """As much of the original as breaks no rule, made into a job that can be shown."""
    from briter_worker.contract import broken_keys  # noqa: PLC0415 - it says why

    usable: dict[str, Any] = {k: v for k, v in (document or {}).items() if k not in _OWN_KEYS}
    for key in _TIMES:
        if key in usable and not _is_time(usable[key]):
            del usable[key]
    stem = files.stem(name)
    defaults = {"id": stem, "slug": stem, "paths": []}
    for key, value in defaults.items():
        if usable.get(key) is None:
            usable[key] = value
    for key in broken_keys(usable):
        for spelling in (key, "commitMessage") if key == "message" else (key,):
            usable.pop(spelling, None)
    usable.setdefault("createdAt", format_time(modified))
    return {**defaults, **usable}


def _is_time(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        parse_time(value)
    except ValueError:
        return False
    return True
