"""Merge: place edits on a commit that others may have changed since, path by path and line by line.

An edit knows its base, the version that its author started from. Where the tree still has the base, the
edit is taken as it is. Where both sides changed a file, their lines are merged. Overlapping lines are a
conflict of that one request.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from briter_worker.allowlist import parents
from briter_worker.git import messages
from briter_worker.git.commits import File, blob_id
from briter_worker.git.repository import FOLDER, LINK, SUBMODULE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from briter_worker.git.repository import Entry, Repository

_MAX_CONFLICTS = 127
"""`git merge-file` exits with the number of conflicts, at most this one."""


@dataclass(frozen=True, slots=True)
class Base:
    """The version that an edit started from (None: there was no file). `mode` may be unknown: empty."""

    blob: str | None
    mode: str = ""

    @classmethod
    def of(cls, entry: Entry | None) -> Base:
        """Return what a tree has at a path."""
        return cls(None) if entry is None or entry.mode == FOLDER else cls(entry.blob, entry.mode)


@dataclass(frozen=True, slots=True)
class Edit:
    """One path of one request: the new file (None: deleted), and its base (None: what the tree has)."""

    path: str
    file: File | None
    base: Base | None = None

    @property
    def blob(self) -> str | None:
        """Return the blob of the new file."""
        return self.file.blob if self.file else None


@dataclass(frozen=True, slots=True)
class Placed:
    """What the edits of one request change on the tree, or the paths that conflict."""

    files: dict[str, File | None] = field(default_factory=dict)
    conflicts: tuple[str, ...] = ()


class Merge:
    """Places requests on one commit's tree, one after another."""

    def __init__(
        self, repository: Repository, tip: str, paths: Iterable[str], read: Callable[[str], bytes]
    ) -> None:
        """`paths`: every path of every edit. `read` returns a blob, or raises LookupError."""
        self._repository = repository
        self.tip = tip
        self._read = read
        wanted = {above for path in paths for above in (path, *parents(path))}
        self._entries = repository.entries(tip, wanted)
        self._changed: dict[str, File | None] = {}
        self._last: dict[str, tuple[Edit, File | None]] = {}
        """By path: the edit that was placed last, and its result."""
        self._filled: set[str] = set()
        """Folders in which a file was placed."""

    def tree_blob(self, path: str) -> str | None:
        """Return the blob that the commit itself has at the path."""
        entry = self._entries.get(path)
        return None if entry is None or entry.mode == FOLDER else entry.blob

    def place(self, edits: Sequence[Edit]) -> Placed:
        """Return what the edits change. Nothing of a request that conflicts is placed."""
        files: dict[str, File | None] = {}
        conflicts: list[str] = []
        results: dict[str, tuple[Edit, File | None]] = {}
        deleted: set[str] = set()
        # Deletions first: another file of the request may take the place.
        for edit in sorted(edits, key=lambda each: each.file is not None):
            path, theirs = edit.path, self._current(edit.path)
            if self._last.get(path) == (edit, theirs):
                continue
            try:
                ours = self._merge(edit, theirs, deleted)
            except _ConflictError:
                conflicts.append(path)
                continue
            if ours is None:
                deleted.add(path)
            results[path] = (edit, ours)
            if ours != theirs:
                files[path] = ours
        if conflicts:
            return Placed(conflicts=tuple(conflicts))
        # Another request may bring the same edit. Merged with its own result, the edit could conflict with
        # itself, where neighbouring lines are alike.
        self._last.update(results)
        self._changed.update(files)
        self._filled.update(above for path, file in files.items() if file for above in parents(path))
        return Placed(files)

    def _current(self, path: str) -> File | None:
        if path in self._changed:
            return self._changed[path]
        entry = self._entries.get(path)
        return None if entry is None or entry.mode == FOLDER else File(entry.mode, entry.blob)

    def _is_in_the_way(self, path: str, deleted: set[str]) -> bool:
        """Return True if writing the file would remove others: a folder, or a file above it."""
        if any(above not in deleted and self._current(above) for above in parents(path)):
            return True
        below: set[str] = set()
        if path in self._filled:
            below = {name for name, file in self._changed.items() if file and name.startswith(f"{path}/")}
        entry = self._entries.get(path)
        if entry is not None and entry.mode == FOLDER:
            there = self._repository.entries_below(self.tip, [path])
            below |= {name for name in there if self._changed.get(name, True)}
        return not below <= deleted

    def _merge(self, edit: Edit, theirs: File | None, deleted: set[str]) -> File | None:
        ours, their_blob = edit.file, theirs.blob if theirs else None
        base = edit.base or Base(their_blob, theirs.mode if theirs else "")
        has_new_mode = ours is not None and base.mode not in ("", ours.mode)
        is_special = theirs is None or theirs.mode in (LINK, SUBMODULE)
        if edit.blob == base.blob != their_blob and (is_special or not has_new_mode):
            return theirs  # only the other side changed the file
        if ours is not None and self._is_in_the_way(edit.path, deleted):
            raise _ConflictError
        is_unchanged_there = their_blob in (base.blob, edit.blob)
        if ours is None or theirs is None or is_special:
            if is_unchanged_there and not (theirs and theirs.mode == SUBMODULE):
                return ours
            raise _ConflictError
        mode = ours.mode if has_new_mode else theirs.mode
        if is_unchanged_there:
            return File(mode, ours.blob, ours.content)
        if ours.blob == base.blob:
            return File(mode, theirs.blob, theirs.content)
        merged = self._merge_lines(base.blob, ours, theirs)
        return File(mode, blob_id(merged, like=self.tip), merged)

    def _merge_lines(self, base: str | None, ours: File, theirs: File) -> bytes:
        git = self._repository.git
        try:
            versions = {
                "ours": self._content(ours),
                "base": b"" if base is None else self._read(base),
                "theirs": self._content(theirs),
            }
        except LookupError:  # nobody has the base any more
            raise _ConflictError from None
        with tempfile.TemporaryDirectory(prefix="briter-merge-") as folder:
            for name, content in versions.items():
                Path(folder, name).write_bytes(content)
            paths = [str(Path(folder, name)) for name in versions]
            status, merged, error = git.attempt("merge-file", "-p", "-q", *paths)
        if 0 < status <= _MAX_CONFLICTS or "binary" in error:
            raise _ConflictError
        if status:
            what = "two versions of a file could not be merged"
            raise messages.from_git(what, error or messages.status_text(status))
        if git.worktree is not None and ours.content is not None:  # the base of the author's next edit
            git.run("hash-object", "-w", "--stdin", "--no-filters", stdin=ours.content)
        return merged

    def _content(self, file: File) -> bytes:
        return self._read(file.blob) if file.content is None else file.content


class _ConflictError(Exception):
    """Both sides changed the same lines, or one of them the kind of file."""
