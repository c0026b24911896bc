"""Posts → commits: puts each post's changes on a tip, in order."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from briter_worker.errors import Failure, PublishError
from briter_worker.git.commits import Commit, Person
from briter_worker.git.differences import between
from briter_worker.git.objects import FOLDER, NESTED
from briter_worker.git.reconcile import Placing
from briter_worker.ports import Change

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from briter_worker.git.commits import Writer
    from briter_worker.git.differences import Difference
    from briter_worker.git.objects import Entry, Objects
    from briter_worker.git.site import Site, Tips


@dataclass(frozen=True, slots=True)
class Item:
    """A post that is to be put on the branch; without a key, a dry run's commit that goes along."""

    key: str
    slug: str
    message: bytes
    author: bytes
    changes: tuple[Change, ...]
    rejected: tuple[str, ...] = ()

    def based_on(self, landed: Mapping[str, str | None]) -> Item:
        """The same, as an edit of what of ours has landed since it was staged."""
        if not landed:
            return self
        return replace(
            self,
            changes=tuple(
                replace(each, base=landed[each.path]) if each.path in landed else each
                for each in self.changes
            ),
        )


@dataclass(slots=True)
class Built:
    """Items put on a tip, as commits."""

    base: str
    tip: str
    commits: dict[str, str] = field(default_factory=dict)
    entries: dict[str, Entry | None] = field(default_factory=dict)
    unchanged: list[Item] = field(default_factory=list)
    conflicts: list[tuple[Item, tuple[str, ...]]] = field(default_factory=list)
    _carriers: dict[str, str] = field(default_factory=dict)

    def carry(self, name: str, commit: Commit) -> None:
        """Take note of a commit's changes."""
        self.entries.update(commit.entries)
        self._carriers.update(dict.fromkeys(commit.entries, name))

    def carrier(self, item: Item) -> str:
        """The commit that carries an item which changed nothing more itself."""
        found = (self._carriers[c.path] for c in item.changes if c.path in self._carriers)
        return next(found, self.tip)


class Building:
    """Builds commits of one worker's identity in one repository, at one moment."""

    def __init__(self, site: Site, objects: Objects, writer: Writer, *, identity: Person, now: float) -> None:
        self._site = site
        self._objects = objects
        self._writer = writer
        self._committer = identity.line(now)
        self._known: dict[tuple[str, str], list[tuple[str, bytes, bytes]]] = {}
        self._signature = f"committer {identity.name} <{identity.email}> ".encode()

    def build(self, items: Sequence[Item], base: str, ref: str) -> Built:
        """Put the items on `base`, `ref` pointing to the last commit. Moves nothing that a person sees."""
        placing = Placing(self._site.commands, self._objects, self._objects.tree(base), self._writer)
        built = Built(base, base)
        commits: list[Commit] = []
        keys: list[str] = []
        for item in items:
            placed = placing.place(item.changes)
            if placed.conflicts:
                built.conflicts.append((item, placed.conflicts))
            elif not placed.entries:
                built.unchanged.append(item)
            else:
                commits.append(Commit(item.message, item.author, self._committer, placed.entries))
                keys.append(item.key)
        if built.conflicts:
            self._writer.close()  # their versions are looked at, and kept
        if commits:
            self._site.about_to_update()
            names = self._writer.commits(self._objects, base, commits)
            built.tip = names[-1]
            self._site.update((ref, built.tip, None))
            for key, name, commit in zip(keys, names, commits, strict=True):
                built.commits[key] = name
                built.carry(name, commit)
            built.commits.pop("", None)
        return built

    def blob(self, commit: str, path: str) -> str | None:
        """The version of a file in a commit; None where it has no such file."""
        entry = self._objects.tree(commit).entry(path)
        return None if entry is None or entry.mode in (FOLDER, NESTED) else entry.sha

    def of_dry_runs(self, local: str, theirs: str) -> list[Item]:
        """The commits that the remote lacks, to be put on its tip.

        Raises PublishError when one of them is a person's: only a person may rewrite that.
        """
        commands = self._site.commands
        out = commands.run("rev-list", "--reverse", "--topo-order", "--parents", f"{theirs}..{local}")
        dry = self._site.ref(self._site.dry_run_ref)
        ours = dry is not None and self._site.is_ancestor(local, dry)
        landed = self._ours(local, theirs)
        items: list[Item] = []
        for line in out.decode().splitlines():
            sha, *parents = line.split()
            header, message = self._commit(sha)
            author = _author(header)
            if not ours or len(parents) != 1 or author is None or b"\n" + self._signature not in header:
                remote, branch = self._site.remote, self._site.branch
                raise PublishError(
                    Failure.DIVERGED,
                    f"{branch} has a commit of a person's ({sha[:10]}) that the remote lacks, and the remote "
                    f"has others. Fix: git pull --rebase {remote} {branch}, with what is not "
                    "committed put aside, as docs/how-to/failed-posts.md says",
                )
            changes = _changes(between(self._site.commands, parents[0], sha))
            paths = {change.path for change in changes}
            if any(
                (by, said) == (author, message) and paths == set(self._touched(there))
                for there, by, said in landed
            ):
                continue  # it was put there before, by a worker that died before it could say so
            items.append(Item("", "", message, author, changes))
        return items

    def dry_runs_between(self, tips: Tips) -> list[tuple[str, Item]]:
        """The commits that the remote lacks, oldest first; nothing where one of them is a person's."""
        out = self._site.commands.run(
            "rev-list", "--reverse", "--topo-order", "--parents", f"{tips.remote}..{tips.local}"
        )
        found: list[tuple[str, Item]] = []
        for line in out.decode().splitlines():
            sha, *parents = line.split()
            header, message = self._commit(sha)
            if len(parents) != 1 or b"\n" + self._signature not in header:
                return []
            changes = _changes(between(self._site.commands, parents[0], sha))
            found.append((sha, Item("", "", message, _author(header) or b"", changes)))
        return found

    def landed_as(self, item: Item, old: str, new: str) -> str | None:
        """Our commit of this item among those that came from the remote: a push whose answer was lost."""
        paths = {change.path for change in item.changes}
        for sha, _, said in self._ours(old, new):
            # Many posts may have one message: it is the one that touched this post's files.
            if said == item.message and paths & set(self._touched(sha)):
                return sha
        return None

    def _touched(self, sha: str) -> dict[str, Difference]:
        return between(self._site.commands, f"{sha}^", sha)

    def landed_versions(self, old: str, new: str) -> dict[str, str | None]:
        """The versions of files that the worker's own commits between two have brought, and nobody else's.

        What our commit was merged with is left out: the file in the work tree has not got that.
        """
        ours: dict[str, str | None] = {}
        for sha, _, _ in reversed(self._ours(old, new)):
            for path, each in self._touched(sha).items():
                before = ours[path] if path in ours else self.blob(old, path)
                if (each.old.sha if each.old else None) == before:
                    ours[path] = each.new.sha if each.new else None
                else:
                    ours.pop(path, None)
        return {path: blob for path, blob in ours.items() if self.blob(new, path) == blob}

    def _ours(self, old: str, new: str) -> list[tuple[str, bytes, bytes]]:
        """The worker's commits between two, newest first, each with its author and message."""
        known = self._known.get((old, new))
        if known is None:
            known = self._known[old, new] = []
            out = self._site.commands.run("rev-list", "--no-merges", f"{old}..{new}")
            for sha in out.decode().split():
                header, message = self._commit(sha)
                if b"\n" + self._signature in header:
                    known.append((sha, _author(header) or b"", message))
        return known

    def _commit(self, sha: str) -> tuple[bytes, bytes]:
        found = self._objects.read(sha)
        header, _, message = found[1].partition(b"\n\n") if found else (b"", b"", b"")
        return header, message


def _changes(differences: Mapping[str, Difference]) -> tuple[Change, ...]:
    return tuple(
        Change(
            path,
            each.new.mode if each.new else "",
            each.new.sha if each.new else None,
            each.old.sha if each.old else None,
            each.old.mode if each.old else "",
        )
        for path, each in differences.items()
    )


def _author(header: bytes) -> bytes | None:
    found = re.search(rb"^author (.*)$", header, re.MULTILINE)
    return found.group(1) if found else None
