"""After the push: bring the local branch, the index and the work tree up to what the remote has.

Everything here may be done twice, and none of it may fail a job: the posts are on the remote. Order matters
for a crash at any line: the branch moves together with the bases (so no later publication can revert what
came from the remote), then the index follows, then the files that the CMS has not touched.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING

from briter_worker.allowlist import may_be_checked_out
from briter_worker.errors import Failure, PublishError
from briter_worker.git.bases import Base, Bases, read_bases, write_bases
from briter_worker.git.differences import Difference, between
from briter_worker.git.indexing import Index
from briter_worker.git.objects import FOLDER, LINK, NESTED, Entry
from briter_worker.git.writeback import WriteBack

if TYPE_CHECKING:
    from collections.abc import Mapping

    from briter_worker.git.moving import Move
    from briter_worker.git.objects import Objects
    from briter_worker.git.site import Site
    from briter_worker.ports import Plan

_SEEN = re.compile(rb"(?:\A|\n)[0-7]{6} ([0-9a-f]+) 0\t([^\0]+)\0  ctime: [1-9]")
"""An entry of the index with a status: git has seen the file like that."""


class Adoption:
    """Takes over what was pushed. Used within one batch."""

    def __init__(self, site: Site, objects: Objects) -> None:
        self._site = site
        self._commands = site.commands
        self._objects = objects
        self._index = Index(site)

    def adopt(self, plan: Plan, known: Mapping[str, Entry | None] | None) -> None:
        """Take over `plan.new`. `known`: all that it changes, where nothing came from the remote.

        Raises PublishError when something could not be done; it is done by a later adoption or `heal`.
        """
        if not self._site.is_checked_out():
            raise self._put_off(plan)
        tip = self._site.ref(self._site.branch_ref)
        if tip in (None, plan.old, plan.new) or not self._site.is_ancestor(plan.new, str(tip)):
            self._take_over(plan, known)
            return
        # It has been taken over, and there is more on top of it. What a death left undone is noted.
        self.heal()
        if self._site.ref(plan.ref) is not None:
            self._site.update((plan.ref, None, None))

    def _put_off(self, plan: Plan) -> PublishError:
        self._postpone(plan)
        return PublishError(
            Failure.WRONG_BRANCH,
            f"it is published, but {self._site.branch} is not checked out any more, so that the branch, "
            "the index and the files were left as they are. They follow by themselves once it is again: "
            f"git switch {self._site.branch}",
        )

    def _take_over(self, plan: Plan, known: Mapping[str, Entry | None] | None) -> None:
        foreign: dict[str, Difference] = {}
        if known is None:
            foreign = {
                path: each
                for path, each in between(self._commands, plan.old, plan.new).items()
                if path not in plan.staged
                or plan.staged[path] != (each.new.sha if each.new else None)
                or _is_other_mode(each)
            }
        left_out = self._index.left_out() if foreign else set()
        foreign = {
            path: each
            for path, each in foreign.items()
            if path not in left_out and not _is_special(each, FOLDER, NESTED) and may_be_checked_out(path)
        }
        bases = read_bases(self._site, self._objects)
        kept = self._still_needed(bases, plan)
        for path, each in foreign.items():
            started = plan.staged.get(path, each.old.sha if each.old else None)
            if path in plan.staged or path not in kept:
                kept[path] = Base(started)
        try:
            with self._index.held(lambda: self._is_at(plan.new)):
                self._move_all(plan, known, bases, kept)
        finally:
            if foreign and self._has_moved(plan):
                self._write_back(foreign, kept, plan.new)
        if self._site.ref(self._site.unindexed_ref) == plan.old:
            self._site.update((self._site.unindexed_ref, None, None))

    def _has_moved(self, plan: Plan) -> bool:
        return self._site.is_checked_out() and self._site.ref(self._site.branch_ref) == plan.new

    def _move_all(
        self, plan: Plan, known: Mapping[str, Entry | None] | None, bases: Bases, kept: Bases
    ) -> None:
        """The branch and the index, with nobody's commit between them."""
        moves = self._moves(plan, bases, kept)
        before = {name: self._site.ref(name) for name, _, _ in moves}
        try:
            if moves:
                self._site.update(*moves)
        except PublishError:
            # Git may have been ended, or refused, in the middle. Where the branch has moved, the index must
            # follow: else a person's next commit would take the posts back.
            if plan.old == plan.new or self._site.ref(self._site.branch_ref) != plan.new:
                raise
        self._stay(plan, before)
        try:
            if known is None:
                self._index.follow(plan.old, plan.new, own=plan.staged.keys())
            else:
                self._index.put(known)
        except PublishError:
            self._stay(plan, before)
            raise

    def _is_at(self, new: str) -> bool:
        """Whether the index and the files are those of the branch, or of one that was made of it since."""
        return self._site.is_checked_out() or self._site.has_checked_out(new)

    def _stay(self, plan: Plan, before: Mapping[str, str | None]) -> None:
        """Raises PublishError when the index and the files are another branch's now, and somebody's work."""
        if self._is_at(plan.new):
            return
        if self._take_back(plan, before):
            raise self._put_off(plan)
        raise PublishError(
            Failure.WRONG_BRANCH,
            f"it is published, but {self._site.branch} was not checked out any more, so that the files "
            f"and the index were left alone. Fix: git switch {self._site.branch}; files that are in its "
            "way and were published may be removed",
        )

    def _take_back(self, plan: Plan, before: Mapping[str, str | None]) -> bool:
        """Whether the branch is again where it was for who left it while it was moved: see `_postpone`.

        `git switch --create` takes no lock of the index, and writes HEAD last.
        """
        site = self._site
        if not self._index.is_held or before.get(site.branch_ref) != plan.old:
            return False  # while it is held, nobody comes back: that takes the index
        # By its private ref it is found again. What files started from goes with the branch, or after it.
        moves: list[Move] = [(plan.ref, plan.new, None), (site.branch_ref, plan.old, plan.new)]
        done = {plan.ref, site.branch_ref, site.tracking_ref}  # the last one tells what the remote has
        moves += [(name, was, None) for name, was in before.items() if name not in done]
        try:
            site.update(*(move for move in moves if site.ref(move[0]) != move[1]))
        except PublishError:
            return False
        return True

    def _unindexed(self, plan: Plan) -> Move:
        """What the index has to be brought up from, by `heal`."""
        return self._site.unindexed_ref, self._site.ref(self._site.unindexed_ref) or plan.old, None

    def _postpone(self, plan: Plan) -> None:
        """Take note of what has to be known when the branch is checked out again.

        Were it moved before, its posts would be in the way of whoever comes back. Its private ref tells that
        this was pushed; what is in the work tree, where it was merged with the remote's, nothing else does.
        """
        changes: list[Move] = []
        if not plan.dry_run:  # else its posts are tried again, as edits of what they started from
            before = read_bases(self._site, self._objects)
            after = before | self._merged_elsewhere(plan)
            if after != before:
                changes.append((self._site.bases_ref, write_bases(self._commands, after), None))
            if self._site.ref(self._site.tracking_ref) != plan.new:
                changes.append((self._site.tracking_ref, plan.new, None))
        if plan.old != plan.new == self._site.ref(self._site.branch_ref):
            # It has moved already, and its worker died before the index, or before the files.
            self._follow_elsewhere(plan)
            changes.append(self._unindexed(plan))
        if changes:
            self._site.update(*changes)

    def _merged_elsewhere(self, plan: Plan) -> Bases:
        """What files in the work tree are, of which the plan has another version."""
        tree = self._objects.tree(plan.new)
        entries = {path: tree.entry(path) for path in plan.staged}
        return {
            path: Base(plan.staged[path])
            for path, entry in entries.items()
            if plan.staged[path] != (entry.sha if entry else None)
        }

    def _follow_elsewhere(self, plan: Plan) -> None:
        """Have the index follow although another branch is checked out, where that was made of ours since.

        It has the index that was there, and a commit on it would take the posts back.
        """
        with suppress(PublishError), self._index.held(lambda: self._is_at(plan.new)):
            if self._index.is_held and self._is_at(plan.new):
                self._index.follow(plan.old, plan.new, own=plan.staged.keys())

    def _still_needed(self, bases: Bases, plan: Plan) -> Bases:
        """Without those of files that are, in the work tree, what the branch has now."""
        tree = self._objects.tree(plan.new) if bases else None
        kept: Bases = {}
        for path, base in bases.items():
            entry = tree.entry(path) if tree else None
            now = None if entry is None or entry.is_folder else entry.sha
            if path not in plan.staged or plan.staged[path] != now:
                kept[path] = base
        return kept

    def heal(self) -> None:
        """Finish what an earlier adoption could not do to the index and to the files."""
        old, tip = self._site.ref(self._site.unindexed_ref), self._site.ref(self._site.branch_ref)
        if old is not None and tip is not None and self._site.is_checked_out():
            with self._index.held(self._site.is_checked_out):
                self._index.follow(old, tip)
            self._write_late(tip)
            self._site.update((self._site.unindexed_ref, None, None))

    def _write_late(self, tip: str) -> None:
        """Files that are still what they started from, where the branch has another version by now."""
        bases = read_bases(self._site, self._objects)
        tree, left_out = self._objects.tree(tip), self._index.left_out() if bases else set()
        wanted = {}
        for path, base in bases.items():
            entry = tree.entry(path)
            is_file = entry is None or not (entry.is_folder or entry.mode in (LINK, NESTED))
            if is_file and base.conflict is None and path not in left_out and may_be_checked_out(path):
                wanted[path] = (entry, base.start)
        self._write(wanted, bases, tip)

    def forget_given_up(self) -> None:
        """Forget what files started from that a person has had git bring to what the branch has.

        Adoptions leave no status in the index. Where one is, git has found in the file what the index has:
        somebody gave the edit up, and what is written there since is an edit of that.
        """
        bases = read_bases(self._site, self._objects)
        if not bases:
            return
        tree = self._objects.tree(self._site.tips().local)
        out = self._commands.run(
            "ls-files", "-z", "--stage", "--debug", "--", *(f":(top,literal){path}" for path in bases)
        )
        kept = dict(bases)
        for version, name in _SEEN.findall(out):
            path, sha = os.fsdecode(name), version.decode()
            now = tree.entry(path)
            if path in bases and sha != bases[path].start and now is not None and now.sha == sha:
                del kept[path]
        if kept != bases:
            self._site.update((self._site.bases_ref, write_bases(self._commands, kept), None))

    def _moves(self, plan: Plan, before: Bases, after: Bases) -> list[Move]:
        tip = self._site.ref(self._site.branch_ref)
        if tip not in (plan.old, plan.new):
            if tip is not None and self._site.is_ancestor(tip, plan.old):
                # Nobody has committed: what this stands on was put off, as somebody was away, who is back.
                self._postpone(plan)
                raise PublishError(
                    Failure.WRONG_BRANCH,
                    f"it is published, but {self._site.branch} has not followed what was published before. "
                    "Both follow by themselves",
                )
            raise PublishError(
                Failure.DIVERGED,
                f"it is published, but {self._site.branch} was changed by somebody meanwhile. "
                f"Fix: git pull --rebase {self._site.remote} {self._site.branch}, with what is "
                "not committed put aside, as docs/how-to/failed-posts.md says",
            )
        changes: list[Move] = []
        if before != after:
            # First: git moves one after the other, and may be ended in between.
            changes.append((self._site.bases_ref, write_bases(self._commands, after), None))
        if plan.old != plan.new:
            # Before the branch: whatever becomes of us, or of the batch, the index is known to be behind.
            changes.append(self._unindexed(plan))
        if tip != plan.new:
            changes.append((self._site.branch_ref, plan.new, plan.old))
        on_remote = plan.remote if plan.dry_run else plan.new
        if on_remote is not None and self._site.ref(self._site.tracking_ref) != on_remote:
            changes.append((self._site.tracking_ref, on_remote, None))
        if plan.dry_run:
            changes.append((self._site.dry_run_ref, plan.new, None))
        elif self._site.ref(self._site.dry_run_ref) is not None:
            changes.append((self._site.dry_run_ref, None, None))
        if self._site.ref(plan.ref) is not None:
            changes.append((plan.ref, None, None))
        return changes

    def _write_back(self, foreign: Mapping[str, Difference], bases: Bases, new: str) -> None:
        # A link is not made here. By its base it is known that nobody has removed it, or made it a file.
        wanted = {
            path: (each.new, bases[path].start)
            for path, each in foreign.items()
            if not _is_special(each, LINK)
        }
        self._write(wanted, bases, new)

    def _write(self, wanted: Mapping[str, tuple[Entry | None, str | None]], bases: Bases, new: str) -> None:
        written = WriteBack(self._commands, self._objects, new).write(wanted)
        left = {path: base for path, base in bases.items() if path not in written or base.conflict}
        if left != bases:
            self._site.update((self._site.bases_ref, write_bases(self._commands, left), None))


def _is_other_mode(each: Difference) -> bool:
    return each.old is not None and each.new is not None and each.old.mode != each.new.mode


def _is_special(each: Difference, *modes: str) -> bool:
    return any(entry is not None and entry.mode in modes for entry in (each.old, each.new))
