"""A batch's delivered files, laid out as the CMS had them: a cache's work tree, for one publication.

Where several jobs bring one path, the newest of what was saved counts, whoever brought it; as in a work tree,
in which a file is there once. What was saved before the version that is published is not brought back.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from briter_worker.allowlist import PathRefusedError
from briter_worker.errors import Failure
from briter_worker.git import causes
from briter_worker.git.place import changed_paths

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from briter_worker.allowlist import Allowlist
    from briter_worker.git.bases import Versions
    from briter_worker.git.command import Commands
    from briter_worker.git.objects import Objects, Tree
    from briter_worker.ports import Change, Delivered, Deliveries, Delivery, Request, Staged

_RULES = (".gitattributes", ".gitignore")
_FILES = ("100644", "100755")
_PIECE = 1 << 20
_OBJECT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_UNKNOWN = 0.0
"""When a folder was saved of which nothing was left."""


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """What was below a folder when it was saved: nothing but these."""

    saved_at: float
    paths: frozenset[str]
    tells_all: bool
    """Whether what was deleted is said of each file, as the CMS's own git knows what there was."""


class Chosen:
    """Of all that a batch's jobs brought, the newest of each path."""

    def __init__(self, deliveries: Mapping[str, Delivery]) -> None:
        self.newest: dict[str, Delivered] = {}
        self._snapshots: dict[str, _Snapshot] = {}
        for delivery in deliveries.values():
            for each in delivery.files:
                known = self.newest.get(each.path)
                if known is None or each.saved_at > known.saved_at:
                    self.newest[each.path] = each
            for folder in delivery.folders:
                self._take(folder.rstrip("/"), delivery)
        for each in self.newest.values():
            if each.blob is None:  # it may have been a folder
                self._keep(each.path, _Snapshot(each.saved_at, frozenset(), each.knows_base))

    def _take(self, folder: str, delivery: Delivery) -> None:
        below = [each for each in delivery.files if each.path.startswith(f"{folder}/")]
        times = [each.saved_at for each in below] or [each.saved_at for each in delivery.files]
        present = frozenset(each.path for each in below if each.blob is not None)
        tells_all = any(each.knows_base for each in delivery.files)
        self._keep(folder, _Snapshot(max(times, default=_UNKNOWN), present, tells_all))

    def _keep(self, folder: str, snapshot: _Snapshot) -> None:
        known = self._snapshots.get(folder)
        if known is None or snapshot.saved_at > known.saved_at:
            self._snapshots[folder] = snapshot

    def gone_at(self, path: str) -> float | None:
        """When it was last seen that the path was not there; None where that was never seen."""
        times = [snapshot.saved_at for snapshot in self._without(path)]
        own = self.newest.get(path)
        if own is not None and own.blob is None:
            times.append(own.saved_at)
        return max(times, default=None)

    def was_never_there(self, path: str) -> bool:
        """Whether the CMS's copy of a folder lacks the path, and did not lose it."""
        above = self._without(path)
        return path not in self.newest and bool(above) and all(snapshot.tells_all for snapshot in above)

    def _without(self, path: str) -> list[_Snapshot]:
        found = map(self._snapshots.get, _above(path))
        return [snapshot for snapshot in found if snapshot is not None and path not in snapshot.paths]

    def present(self) -> list[Delivered]:
        """The files that are there, newest first."""
        found = [each for each in self.newest.values() if each.blob is not None and self._is_there(each)]
        return sorted(found, key=lambda each: -each.saved_at)

    def _is_there(self, each: Delivered) -> bool:
        gone = self.gone_at(each.path)
        return gone is None or each.saved_at >= gone


class Scratch:
    """The files of one batch at a time, below the work tree of a cache."""

    def __init__(
        self,
        commands: Commands,
        *,
        deliveries: Deliveries,
        versions: Versions,
        allowlist: Allowlist,
        max_file_bytes: int,
    ) -> None:
        self._commands = commands
        self._root = commands.worktree
        self._deliveries = deliveries
        self._versions = versions
        self._allowlist = allowlist
        self._max_file_bytes = max_file_bytes
        self._chosen = Chosen({})
        self._refused: dict[str, dict[str, str]] = {}
        """By request and path, why nobody may publish it."""
        self._unsound: dict[str, str] = {}
        """By path, why its content cannot be what was saved."""
        self._brought: Mapping[str, Delivery] = {}

    def bring(self, requests: Sequence[Request], tree: Tree, objects: Objects) -> None:
        """The requests' files are there, and nothing else but the rules of git's that hold for them."""
        try:
            self.empty()
            self._brought = self._deliveries.of([request.key for request in requests])
            self._chosen = Chosen(self._brought)
            self._unsound = {}
            self._refused = {key: dict(self._refusals(each)) for key, each in self._brought.items()}
            for each in self._chosen.present():
                self._commands.watch.touch()
                self._write(each)
            self._lay_rules(tree, objects, requests)
        except OSError as error:
            if error.errno is None:
                raise  # not of this host's disk
            raise causes.from_os(f"the posts' files cannot be written to {self._root}", error) from error

    def _refusals(self, delivery: Delivery) -> Iterator[tuple[str, str]]:
        for each in delivery.files:
            try:
                self._allowlist.resolve(each.path)
            except PathRefusedError as refusal:
                yield each.path, refusal.reason

    def _write(self, each: Delivered) -> None:
        try:
            path = self._root / self._allowlist.resolve(each.path)
        except PathRefusedError:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            mode = 0o755 if each.mode == "100755" else 0o644
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        except (FileExistsError, NotADirectoryError):
            return  # what was saved later is a file where this has a folder, or the other way round
        with os.fdopen(handle, "wb") as file:
            size = 0
            with suppress(LookupError):  # it is gone: then what there is of it is not what was saved
                for part in self._deliveries.content(str(each.blob)):
                    self._commands.watch.touch()
                    size += len(part)
                    file.write(part)
                    if size > self._max_file_bytes:
                        return  # staging refuses it
        if _name(path, size, str(each.blob)) != each.blob:
            path.unlink()
            self._unsound[each.path] = (
                f"the content of {each.path} is not what was saved. Fix: save the post again"
            )

    def _lay_rules(self, tree: Tree, objects: Objects, requests: Sequence[Request]) -> None:
        """The branch's `.gitattributes` and `.gitignore` along the folders, unless the CMS changed them."""
        declared = [path for request in requests for path in request.paths]
        paths = {*self._chosen.newest, *(f"{path.rstrip('/')}/" for path in declared)}
        for folder in sorted({above for path in paths for above in ("", *_above(path))}):
            for name in _RULES:
                path = f"{folder}/{name}" if folder else name
                entry = tree.entry(path)
                if entry is None or entry.mode not in _FILES:
                    continue
                if name != ".gitattributes" and self._chosen.gone_at(path) is not None:
                    continue
                with suppress(FileExistsError, NotADirectoryError):
                    (self._root / folder).mkdir(parents=True, exist_ok=True)
                    with (self._root / path).open("xb") as file:
                        file.write(objects.blob(entry.sha))

    def based(self, staged: Mapping[str, Staged], tree: Tree) -> Mapping[str, Staged]:
        """What is published of what was staged, each change as an edit of what its author started from."""
        paths = changed_paths(staged)
        published = self._deliveries.published(paths)
        bases = self._versions.bases(paths)

        def wanted(change: Change) -> bool:
            gone = self._chosen.gone_at(change.path)
            own = self._chosen.newest.get(change.path)
            saved_at = own.saved_at if change.blob is not None and own is not None else gone
            # What no job brought, nor said to be gone, was not meant.
            if saved_at is None:
                return False
            known = change.path in published or change.path in bases
            if change.blob is None and not known and self._chosen.was_never_there(change.path):
                return False  # somebody else has added it to the branch
            return saved_at == _UNKNOWN or saved_at >= published.get(change.path, saved_at)

        def based(change: Change) -> Change:
            own = self._chosen.newest.get(change.path)
            there = tree.entry(change.path)
            known = bases.get(change.path)
            base = change.base
            if own is not None and own.base is not None and not _OBJECT.fullmatch(own.base):
                own = replace(own, knows_base=False)
            sees_tip = own is not None and own.knows_base and there is not None and own.base == there.sha
            if known is not None and (known.conflict is not None or not sees_tip):
                base = known.of(change.blob)
            elif own is not None and own.knows_base:
                base = own.base
            mode = own.mode if own is not None and change.blob is not None else change.mode
            return replace(change, base=base, mode=mode if mode in _FILES else change.mode)

        return {
            key: self._judged(key, replace(each, changes=tuple(map(based, filter(wanted, each.changes)))))
            for key, each in staged.items()
        }

    def _judged(self, key: str, staged: Staged) -> Staged:
        delivery = self._brought.get(key)
        unsound = [each.path for each in delivery.files if each.path in self._unsound] if delivery else []
        if unsound:
            return replace(staged, failure=Failure.INTERNAL, text=self._unsound[unsound[0]])
        return replace(staged, rejected={**self._refused.get(key, {}), **staged.rejected})

    def empty(self) -> None:
        """Nothing is there but the repository."""
        with suppress(FileNotFoundError), os.scandir(self._root) as entries:
            for entry in entries:
                if entry.name == ".git":
                    continue
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    Path(entry.path).unlink()


def _above(path: str) -> list[str]:
    return [path[:i] for i, c in enumerate(path) if c == "/"]


def _name(path: Path, size: int, like: str) -> str:
    """The name that git gives the file's content."""
    kind = hashlib.sha1 if len(like) == 40 else hashlib.sha256  # noqa: PLR2004
    digest = kind(b"blob %d\0" % size, usedforsecurity=False)
    with path.open("rb") as file:
        while part := file.read(_PIECE):
            digest.update(part)
    return digest.hexdigest()
