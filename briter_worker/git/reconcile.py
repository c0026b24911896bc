"""Puts changes on a commit that may have moved since they were made: path by path, line by line.

A change knows the version its author started from (its base). Where the tree still has that version, the
change is taken as it is; where both sides changed, their lines are merged; what overlaps is a conflict,
and concerns that one post.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from briter_worker.git import causes
from briter_worker.git.objects import FOLDER, LINK, NESTED, Entry, MissingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from briter_worker.git.command import Commands
    from briter_worker.git.commits import Writer
    from briter_worker.git.objects import Objects, Tree
    from briter_worker.ports import Change

_MERGED, _OVERLAPS = 0, 127


@dataclass(slots=True)
class Placed:
    """What a request's changes amount to on a tree."""

    entries: dict[str, Entry | None] = field(default_factory=dict)
    conflicts: tuple[str, ...] = ()


class Placing:
    """Puts requests, one after the other, on one tree."""

    def __init__(self, commands: Commands, objects: Objects, tree: Tree, writer: Writer) -> None:
        self._commands = commands
        self._writer = writer
        self._objects = objects
        self._tree = tree
        self._over: dict[str, Entry | None] = {}
        self._made: set[str] = set()
        """Folders in which something was placed."""
        self._taken_in: dict[str, tuple[Change, Entry | None]] = {}
        """By path: the change that was placed there last, and what it came to."""

    def entry(self, path: str) -> Entry | None:
        """What is at `path` by now: a file's entry, or None."""
        if path in self._over:
            return self._over[path]
        entry = self._tree.entry(path)
        return None if entry is None or entry.mode == FOLDER else entry

    def place(self, changes: Sequence[Change]) -> Placed:
        """What has to change for these changes; with a conflict, nothing of them is taken over."""
        placed = Placed()
        conflicts: list[str] = []
        results: dict[str, tuple[Change, Entry | None]] = {}
        gone: set[str] = set()
        # Removals first: what they leave is in nobody's way. What the other side has there by now is.
        for change in sorted(changes, key=lambda each: each.blob is not None):
            theirs = self.entry(change.path)
            if _is_theirs_alone(change, theirs) or self._taken_in.get(change.path) == (change, theirs):
                continue
            if change.blob is not None and self._is_taken(change.path, gone):
                conflicts.append(change.path)
                continue
            try:
                ours = self._merged(change, theirs)
            except _ConflictError:
                conflicts.append(change.path)
                continue
            if ours is None:
                gone.add(change.path)
            results[change.path] = change, ours
            if ours != theirs:
                placed.entries[change.path] = ours
        placed.conflicts = tuple(conflicts)
        if not conflicts:
            # Another post may bring the same: merged with its own result, it may meet its own lines as a
            # conflict, where lines are alike.
            self._taken_in.update(results)
            self._over.update(placed.entries)
            self._made.update(
                above for path, entry in placed.entries.items() if entry for above in _folders_of(path)
            )
        return placed

    def _is_taken(self, path: str, gone: set[str]) -> bool:
        """Whether writing the file would remove others: a folder in its place, or a file in a folder's."""
        for above in _folders_of(path):
            if above not in gone and self.entry(above) is not None:
                return True
        was = self._tree.entry(path)
        if (
            was is not None
            and was.is_folder
            and any(
                below not in gone and self.entry(below) is not None
                for below, _ in self._tree.files(path, nested=True)
            )
        ):
            return True
        return path in self._made and any(
            entry is not None and below not in gone and below.startswith(f"{path}/")
            for below, entry in self._over.items()
        )

    def _merged(self, change: Change, theirs: Entry | None) -> Entry | None:
        ours = None if change.blob is None else Entry(change.mode, change.blob)
        their_blob = None if theirs is None else theirs.sha
        if theirs is not None and theirs.mode == NESTED:
            raise _ConflictError
        if ours is None or theirs is None or theirs.mode == LINK:
            if their_blob in (change.base, change.blob):
                return ours
            raise _ConflictError
        mode = ours.mode if _changed_mode(change) else theirs.mode
        if their_blob in (change.base, change.blob):
            return Entry(mode, ours.sha)
        if change.blob == change.base:
            return Entry(mode, theirs.sha)
        return Entry(mode, self._merge_lines(change.base, ours.sha, theirs.sha))

    def _merge_lines(self, base: str | None, ours: str, theirs: str) -> str:
        self._writer.close()  # what was staged can be read from now on
        with tempfile.TemporaryDirectory(prefix="briter-merge-") as folder:
            names = ("ours", "base", "theirs")
            try:
                for name, sha in zip(names, (ours, base, theirs), strict=True):
                    Path(folder, name).write_bytes(self._objects.version(sha))
            except MissingError:
                if not self._commands.is_cache:
                    raise
                # What the author started from was never on the remote, or is not any more.
                raise _ConflictError from None
            paths = [str(Path(folder, name)) for name in names]
            status, merged, err = self._commands.attempt("merge-file", "-p", "-q", *paths)
        if _MERGED < status <= _OVERLAPS or "binary" in err:
            raise _ConflictError
        if status != _MERGED:
            raise causes.from_git("two versions could not be merged", err)
        out = self._commands.run("hash-object", "-w", "--stdin", "--no-filters", stdin=merged)
        return out.decode().strip()


class _ConflictError(Exception):
    """Both sides changed the same lines."""


def _is_theirs_alone(change: Change, theirs: Entry | None) -> bool:
    """Whether only the other side changed the file."""
    if change.blob != change.base or change.base == (None if theirs is None else theirs.sha):
        return False
    return theirs is None or theirs.mode in (LINK, NESTED) or not _changed_mode(change)


def _changed_mode(change: Change) -> bool:
    return change.base_mode not in ("", change.mode)


def _folders_of(path: str) -> list[str]:
    return [path[:i] for i, c in enumerate(path) if c == "/"]
