"""The tree that must be published, as git itself and the file system say; no code is shared with the worker.

Which paths are proper follows from the names that were made up, what a path is from `lstat`, what is ignored
from `git check-ignore`, and modes and blobs from `git update-index` into an index of its own.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from soak.random_tree import BAD, FOLDERS
from soak.repository import GITLINK, LAX, Tree, git, join, read_tree

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from sites import Site


@dataclass(slots=True)
class Wanted:
    """What one list of paths stands for."""

    files: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    rejected: set[str] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)
    ignored: set[str] = field(default_factory=set)
    on_hold: set[str] = field(default_factory=set)
    """Files of a folder that another job will publish, when it is due."""


class Oracle:
    """What git and the file system say of one work tree, and of the commit that it is on."""

    def __init__(self, site: Site, held: Iterable[str]) -> None:
        self._root = site.worktree
        self._index = site.root / "oracle.index"
        self.tip = read_tree(self._root)
        self.held = {path for each in held if (path := proper(each)) is not None}

    def wanted(self, paths: Iterable[str]) -> dict[str, Wanted | None]:
        """Each declared path on its own; None where it is improper."""
        found: dict[str, Wanted | None] = {}
        for declared in paths:
            path = proper(declared)
            found[declared] = None if path is None else self._look(path)
        return found

    def _look(self, path: str) -> Wanted:
        wanted = Wanted()
        if any(self._in_tip(each) == GITLINK for each in (*above(path), path)):
            wanted.rejected.add(path)
            return wanted
        kind: int | None = None
        for each in (*above(path), path):
            kind = self._kind(each)
            if kind is None or (stat.S_ISREG(kind) and each != path):
                kind = None
                break
            if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)) or self._is_nested(each):
                wanted.rejected.add(path)
                return wanted
        if kind is None:
            if path in self.tip:
                wanted.gone.add(path)
            else:
                wanted.gone |= {each for each in self._below(path) if self._may_go(each, wanted)}
        elif stat.S_ISREG(kind):
            wanted.files.add(path)
            wanted.gone |= {each for each in self._below(path) if self._may_go(each, wanted)}
        else:
            wanted.folders.add(path)
            self._walk(path, wanted)
        return wanted

    def _walk(self, top: str, wanted: Wanted) -> None:
        here: set[str] = set()
        shut: set[str] = set()
        todo = [top]
        while todo:
            folder = todo.pop()
            for name in os.listdir(self._root / folder):  # noqa: PTH208 - names only
                path = f"{folder}/{name}"
                kind = self._kind(path)
                is_folder = kind is not None and stat.S_ISDIR(kind)
                if proper(path) is None or (is_folder and self._is_nested(path)):
                    shut.add(path)
                elif is_folder:
                    todo.append(path)
                elif kind is not None and stat.S_ISREG(kind):
                    here.add(path)
                else:
                    shut.add(path)
        wanted.rejected |= shut
        wanted.files |= here
        for path in (*self._below(top), *([top] if top in self.tip else [])):
            if (
                path not in here
                and shut.isdisjoint((*above(path), path))
                and (path == top or self._may_go(path, wanted))
            ):
                wanted.gone.add(path)

    def _may_go(self, path: str, wanted: Wanted) -> bool:
        if proper(path) is None:
            wanted.rejected.add(path)
            return False
        return True

    def _below(self, folder: str) -> list[str]:
        return [
            path for path, (mode, _) in self.tip.items() if path.startswith(f"{folder}/") and mode != GITLINK
        ]

    def _in_tip(self, path: str) -> str | None:
        return self.tip[path][0] if path in self.tip else None

    def _kind(self, path: str) -> int | None:
        try:
            return os.lstat(self._root / path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _is_nested(self, path: str) -> bool:
        kind = self._kind(path)
        if kind is None or not stat.S_ISDIR(kind):
            return False
        names = set(os.listdir(self._root / path))  # noqa: PTH208
        return ".git" in names or names >= {"HEAD", "objects", "refs"}

    def ignored(self, paths: Iterable[str]) -> set[str]:
        """Those of the paths that are new and that git ignores; in a submodule's place, it does not say."""
        # A tracked file does not count as ignored; what is in a folder that took its place does, also for
        # `git status` and `git add --all`.
        new = sorted(
            path
            for path in paths
            if path not in self.tip and self._in_tip(self._replaces(path) or "") != GITLINK
        )
        if not new:
            return set()
        out = git(self._root, "check-ignore", "-z", "--stdin", stdin=join(new), ok=(0, 1))
        return set(out.split("\0")[:-1])

    def _replaces(self, path: str) -> str | None:
        """What the tip has as a file where this path needs a folder."""
        return next((each for each in above(path) if each in self.tip), None)

    def blobs(self, paths: Iterable[str]) -> Tree:
        """What git itself would record for these files."""
        git(self._root, *LAX, "read-tree", "main", index=self._index)
        new = [path for path in paths if self._in_tip(self._replaces(path) or "") != GITLINK]
        add = ("update-index", "--add", "--replace", "-z", "--stdin")
        git(self._root, *LAX, *add, stdin=join(new), index=self._index)
        found: Tree = {}
        for line in git(self._root, "ls-files", "--stage", "-z", index=self._index).split("\0")[:-1]:
            about, _, path = line.partition("\t")
            mode, sha, _ = about.split()
            found[path] = (mode, sha)
        return found

    def settle(self, wanted: Wanted, ignored: set[str], places: Collection[str]) -> None:
        """Drop what is ignored, and from folders what a scheduled job declares."""
        for path in (wanted.files | wanted.gone) - set(places):
            lines = [*above(path), path]
            held = max((len(each) for each in lines if each in self.held), default=-1)
            if held >= max((len(each) for each in lines if each in places), default=0):
                wanted.on_hold.add(path)
        wanted.files -= wanted.on_hold
        wanted.gone -= wanted.on_hold
        wanted.ignored = wanted.files & ignored
        wanted.files -= ignored

    def clashes(self, wanted: Wanted, declared: Collection[str]) -> set[str]:
        """Files that cannot be put where they are, which are dropped.

        They need a folder where the tip has a file that the job does not delete; or they would take the
        place of a folder in which something stays: on hold, a submodule. Then all of it stays,
        but for what the job itself says is gone.
        """
        needing = {
            path
            for path in wanted.files
            if (it := self._replaces(path)) is not None and it not in wanted.gone
        }
        burying = {
            path
            for path in wanted.files - needing
            if any(each.startswith(f"{path}/") and each not in wanted.gone for each in self.tip)
        }
        for path in burying:
            said = [each for each in declared if each.startswith(f"{path}/")]
            wanted.gone -= {
                each
                for each in wanted.gone
                if each.startswith(f"{path}/") and not any(_holds(one, each) for one in said)
            }
        wanted.files -= needing | burying
        return needing | burying

    def is_barren(self, folder: str, wanted: Wanted) -> bool:
        """Whether nothing in a folder may be published, though something is there."""
        under = f"{folder}/"
        refused = any(path.startswith(under) or path == folder for path in wanted.rejected | wanted.ignored)
        found = wanted.files | wanted.gone | wanted.on_hold
        carried = any(path.startswith(under) or path == folder for path in found)
        return refused and not carried and not self._below(folder)


def proper(declared: str) -> str | None:
    """The path, if its text is one that may be published at all."""
    path = declared.removesuffix("/")
    parts = path.split("/")
    if any(
        part in {"", ".", "..", ".git"} or part in BAD or "\udcff" in part or "\\" in part for part in parts
    ):
        return None
    inside = any(parts[: len(each)] == each for each in (folder.split("/") for folder in FOLDERS))
    return path if inside else None


def above(path: str) -> list[str]:
    """The folders that a path is in, the outermost first."""
    return [path[:i] for i, c in enumerate(path) if c == "/"]


def _holds(folder: str, path: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def put(tree: Tree, wanted: Wanted, blobs: Tree) -> Tree:
    """Return the tree after a commit of these changes."""
    left = {path: blob for path, blob in tree.items() if path not in wanted.gone}
    return left | {path: blobs[path] for path in wanted.files}
