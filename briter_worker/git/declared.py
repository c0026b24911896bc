"""What a job's declared paths stand for: files to read, files that are gone, and what may not be published.

Every declared path passes the allowlist first, then each part of it is looked at without following links.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from briter_worker.allowlist import Allowlist, PathRefusedError, holds
from briter_worker.errors import PublishError
from briter_worker.git.folders import Folders, Refused, kind_of
from briter_worker.git.ignoring import can_ignore
from briter_worker.git.objects import NESTED

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from briter_worker.git.command import Commands
    from briter_worker.git.objects import Tree
    from briter_worker.ports import Request


@dataclass(slots=True)
class Draft:
    """One request while it is being staged."""

    request: Request
    files: dict[str, None] = field(default_factory=dict)
    gone: dict[str, None] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)
    """For each declared path that the allowlist accepts, where it is."""
    folders: list[str] = field(default_factory=list)
    """Which of them are folders."""
    shut: list[str] = field(default_factory=list)
    """What lies in them and is refused."""
    ignored: set[str] = field(default_factory=set)
    on_hold: list[str] = field(default_factory=list)
    """Files of a declared folder that are published with the job on hold that declares them."""


class Declared:
    """Finds out what a batch's declared paths stand for, against one commit's tree."""

    def __init__(
        self, commands: Commands, *, allowlist: Allowlist, tree: Tree, folders: Folders, held: Iterable[str]
    ) -> None:
        self._commands = commands
        self._allowlist = allowlist
        self._tree = tree
        self._folders = folders
        self._declared_by_held = held

    def drafts(self, requests: Sequence[Request]) -> list[Draft]:
        """One draft a request. What git ignores, or leaves out of a sparse checkout, is left out."""
        drafts = [self._draft(request) for request in requests]
        self._drop_ignored(drafts)
        self._drop_left_out(drafts)
        for draft in drafts:
            self._reject_barren(draft)
        return drafts

    def _reject_barren(self, draft: Draft) -> None:
        """A folder in which nothing may be published is no more allowed than what is in it."""
        for folder in draft.folders:
            carried = any(holds(folder, path) for path in (*draft.files, *draft.gone, *draft.on_hold))
            refused = [path for path in (*draft.shut, *draft.ignored) if holds(folder, path)]
            if refused and not carried and next(self._tree.files(folder), None) is None:
                draft.rejected[folder] = (
                    f"nothing in it may be published ({refused[0]} is refused or ignored)"
                )

    @cached_property
    def _held(self) -> frozenset[str]:
        """Only a folder asks for them, and with 100,000 jobs on hold they take a while."""
        return frozenset(self._resolved())

    def _resolved(self) -> Iterable[str]:
        for path in self._declared_by_held:
            try:
                yield self._allowlist.resolve(path)
            except PathRefusedError:
                continue

    def _draft(self, request: Request) -> Draft:
        draft = Draft(request)
        for declared in request.paths:
            self._commands.watch.touch()
            try:
                path = draft.places[declared] = self._allowlist.resolve(declared)
                self._look(path, draft)
            except (PathRefusedError, Refused) as refusal:
                draft.rejected[declared] = refusal.reason
        return draft

    def _look(self, path: str, draft: Draft) -> None:
        parent, _, name = path.rpartition("/")
        self._no_nested(path)
        try:
            mode = kind_of(self._folders.open(parent), name)
        except (FileNotFoundError, NotADirectoryError):
            mode = None
        if mode is None:
            was = self._tree.entry(path)
            if was is None:
                draft.missing.append(path)
            elif was.is_folder:
                self._gone_below(path, draft)
            else:
                draft.gone[path] = None
        elif stat.S_ISDIR(mode):
            draft.folders.append(path)
            self._expand(path, draft)
        elif stat.S_ISREG(mode):
            draft.files[path] = None
            self._gone_below(path, draft)
        else:
            raise Refused.of(mode)

    def _no_nested(self, path: str) -> None:
        for i, c in enumerate(path + "/"):
            if c == "/":
                entry = self._tree.entry(path[:i])
                if entry is None:
                    return
                if entry.mode == NESTED:
                    raise Refused("it is inside a nested repository (a submodule)")

    def _expand(self, folder: str, draft: Draft) -> None:
        """All that is under the folder, and all of the tree's that is not any more."""
        here: set[str] = set()
        shut: dict[str, str] = {}
        """What is refused in it; not what else the job declares: that may be a folder above this one."""
        todo = [folder]
        while todo:
            current = todo.pop()
            self._commands.watch.touch()
            try:
                listing = self._folders.listing(current)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except Refused as refusal:
                if current == folder:
                    raise
                shut[current] = refusal.reason
                continue
            for name, mode in listing:
                self._sort(f"{current}/{name}", mode, todo, here, shut)
        draft.rejected.update(shut)
        draft.shut += shut
        was = self._tree.entry(folder)
        if was is not None and not was.is_folder:
            draft.gone[folder] = None
        self._gone_below(folder, draft, here=here, shut=shut)
        for path in sorted(here):
            if self._is_held(path):
                draft.on_hold.append(path)
            else:
                draft.files[path] = None

    def _gone_below(
        self, folder: str, draft: Draft, *, here: Collection[str] = (), shut: Collection[str] = ()
    ) -> None:
        """All of the tree's below the folder that is not any more: not `here`, nor in what is `shut`."""
        blocked = tuple(f"{path}/" for path in shut)
        for path, _ in self._tree.files(folder):
            if path in here or path in shut or path.startswith(blocked) or self._is_held(path):
                continue
            try:
                self._allowlist.resolve(path)
            except PathRefusedError as refusal:
                draft.rejected[path] = refusal.reason
                continue
            draft.gone[path] = None

    def _sort(self, path: str, mode: int, todo: list[str], here: set[str], rejected: dict[str, str]) -> None:
        """What a folder's listing has there: a folder to look into, a file, or nothing to publish."""
        try:
            self._allowlist.resolve(path)
            if stat.S_ISDIR(mode):
                todo.append(path)
            elif stat.S_ISREG(mode):
                here.add(path)
            else:
                raise Refused.of(mode)
        except (PathRefusedError, Refused) as refusal:
            rejected[path] = refusal.reason

    def _is_held(self, path: str) -> bool:
        """Whether a job on hold declares it, itself or by a folder above it."""
        if not self._held:
            return False
        return path in self._held or any(path[:i] in self._held for i, c in enumerate(path) if c == "/")

    def _drop_ignored(self, drafts: Sequence[Draft]) -> None:
        new = sorted({p for draft in drafts for p in draft.files if self._tree.entry(p) is None})
        if not new or (self._commands.is_cache and not can_ignore(self._commands, new)):
            return
        ignored = self._ignored(new)
        for draft in drafts:
            for path in ignored & draft.files.keys():
                del draft.files[path]
                draft.ignored.add(path)
                if path in draft.places.values():
                    draft.rejected[path] = "git ignores it; see git check-ignore -v, and change .gitignore"

    def _ignored(self, paths: Sequence[str]) -> set[str]:
        try:
            out = self._commands.run("check-ignore", "-z", "--stdin", stdin=_lines(paths), ok=(0, 1))
        except PublishError as failure:
            # Git gives up at the first path that it takes to be elsewhere: find that one.
            if not re.search("is in submodule|beyond a symbolic link", failure.text):
                raise
            if len(paths) == 1:
                return {paths[0]}
            middle = len(paths) // 2
            return self._ignored(paths[:middle]) | self._ignored(paths[middle:])
        return set(os.fsdecode(out).split("\0")[:-1])

    def _drop_left_out(self, drafts: Sequence[Draft]) -> None:
        """What a sparse checkout leaves out of the work tree was not deleted by anybody."""
        if not any(draft.gone for draft in drafts):
            return
        out = self._commands.run(
            *("--literal-pathspecs", "ls-files", "-z", "-t", "--"),
            *self._allowlist.folders,
            doing="the index could not be read",
        )
        left_out = {os.fsdecode(line[2:]) for line in out.split(b"\0") if line.startswith(b"S ")}
        for draft in drafts:
            for path in left_out & draft.gone.keys():
                del draft.gone[path]


def _lines(paths: Iterable[str]) -> bytes:
    return b"".join(os.fsencode(path) + b"\0" for path in paths)
