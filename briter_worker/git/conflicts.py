"""Conflicts: keep the author's version of a post on a branch of the remote, until the conflict is over.

A conflict is over when the author publishes other content, or when somebody has merged the branch.
"""

from __future__ import annotations

import re
import shlex
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

from briter_worker.errors import Failure, FailureCode, PublishError
from briter_worker.git.commits import write_commits
from briter_worker.git.merge import Base, Merge
from briter_worker.git.push import move_side_branch
from briter_worker.ports import BaseVersion, Conflict, Outcome, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from briter_worker.git.batch import Item
    from briter_worker.git.commits import Person
    from briter_worker.git.repository import Repository
    from briter_worker.ports import BaseVersions

_MAX_NAME_BYTES = 100
"""The name of a branch is a file's name on the remote, of at most 255 bytes."""
_SAVE_AGAIN = "take the remote's changes over into the post, and save it again"


class ConflictBranches:
    """Remembers the open conflicts of one branch, and keeps their versions on `conflict/<slug>`."""

    def __init__(
        self,
        repository: Repository,
        store: BaseVersions,
        identity: Person,
        read: Callable[[str], bytes],
    ) -> None:
        self._repository = repository
        self._store = store
        self._identity = identity
        self._read = read
        self._open: dict[str, BaseVersion] = {}
        self._merged: set[str] = set()
        """Commits of conflict branches that somebody has merged."""

    def load(self, paths: Collection[str], tip: str) -> None:
        """Read what is known of the paths' conflicts, as of the remote's `tip`."""
        known = self._store.bases(paths) if paths else {}
        self._open = {path: base for path, base in known.items() if base.conflict}
        commits = {base.conflict.commit for base in self._open.values() if base.conflict}
        self._merged = {each for each in commits if each and self._repository.is_ancestor(each, tip)}

    def base_of(self, path: str, blob: str | None) -> Base | None:
        """Return the version that this content of a path with an open conflict is an edit of.

        The same content conflicts again; any other content is the author's answer to the remote's version.
        """
        known = self._open.get(path)
        if known is None or known.conflict is None:
            return None
        if known.conflict.commit in self._merged:
            return Base(known.conflict.ours)
        return Base(known.blob if blob == known.conflict.ours else known.conflict.theirs)

    def settle(self, item: Item, paths: Sequence[str], merge: Merge, *, now: float, dry_run: bool) -> Outcome:
        """Return the failure of a request that conflicts; its version is kept, and remembered as such."""
        message, fix = f"the remote changed {', '.join(paths)} in the same lines", _SAVE_AGAIN
        if not dry_run:
            try:
                where, commands = self._keep_version(item, paths, merge, now)
            except PublishError as error:  # other posts of the push are on the remote: none of them may fail
                where, commands = f"where it was saved, and nowhere else ({error.message})", ""
            message = f"{message}; the post's version is {where}"
            fix = f"{fix}; or merge both: {commands}, then retry the post" if commands else fix
        failure = Failure(FailureCode.CONFLICT, message, fix)
        return Outcome(item.key, Result.FAILED, failure=failure, rejected_paths=item.rejected)

    def _keep_version(self, item: Item, paths: Sequence[str], merge: Merge, now: float) -> tuple[str, str]:
        """Return where the version is kept, and the commands that merge it where git can."""
        parent = self._find_parent(item, paths[0], merge.tip)
        kept = self._known_branch(item, paths) or self._keep(item, parent, now)
        self._remember(item, paths, merge, kept)
        if not kept.branch:
            return "where it was saved", ""
        # On the tip itself, git would see no conflict, and drop the remote's lines.
        commands = "" if parent == merge.tip else self._merge_commands(kept.branch)
        return f"on the branch {kept.branch} of the remote", commands

    def close(self, paths: Collection[str]) -> None:
        """Forget the conflicts of paths that are published, and delete their branches. May be repeated."""
        over = {path: self._open[path] for path in paths if path in self._open}
        branches = {(base.conflict.branch, base.conflict.commit) for base in over.values() if base.conflict}
        for branch, commit in branches:
            if branch:
                move_side_branch(self._repository, "", branch, commit)
        if over:
            self._store.remember({path: BaseVersion(base.blob) for path, base in over.items()}, {})
            for path in over:
                del self._open[path]

    def _known_branch(self, item: Item, paths: Sequence[str]) -> Conflict | None:
        """Return where this very version is kept already."""
        found = [self._open[path].conflict if path in self._open else None for path in paths]
        first = found[0]
        if first is None or any(each is None or each.commit != first.commit for each in found):
            return None
        same = all(each and each.ours == item.blobs[path] for path, each in zip(paths, found, strict=True))
        return first if same and first.branch else None

    def _keep(self, item: Item, parent: str, now: float) -> Conflict:
        """Push the request's version to a branch of its own, as one commit on what it started from."""
        nowhere = Conflict(None, None, "", None)
        own = Merge(self._repository, parent, item.blobs, self._read)
        placed = own.place([replace(edit, base=None) for edit in item.edits])
        if not placed.files:
            return nowhere
        name = f"conflict/{_branch_name(item.request.slug)}"
        ref = f"{self._repository.own_refs}/conflict/{uuid.uuid4().hex}"
        try:
            (commit,) = write_commits(
                self._repository.git,
                [item.commit(self._identity, now, placed.files)],
                parent=parent,
                ref=ref,
                progress=lambda *_: None,
            )
            open_conflicts = [base.conflict for base in self._open.values() if base.conflict]
            before = {each.branch: each.commit for each in open_conflicts}
            candidates = (name, f"{name}-{commit[:8]}")
            kept = next(
                (
                    each
                    for each in candidates
                    if move_side_branch(self._repository, ref, each, before.get(each))
                ),
                None,
            )
            self._repository.update_refs((ref, None, None))
        except PublishError:
            return nowhere
        return Conflict(None, None, kept, commit) if kept else nowhere

    def _find_parent(self, item: Item, path: str, tip: str) -> str:
        """Return the newest commit that has the version the author started from, or the tip."""
        base = next((edit.base for edit in item.edits if edit.path == path), None)
        if base is None or base.blob is None or self._repository.git.worktree is None:
            return tip  # a bare clone has no history
        status, out, _ = self._repository.git.attempt(
            *("--literal-pathspecs", "log", "-1", "--no-merges", "--format=%H %P"),
            *(f"--find-object={base.blob}", tip, "--", path),
        )
        for commit in out.decode().split() if status == 0 else []:
            entry = self._repository.entries(commit, [path]).get(path)
            if entry is not None and entry.blob == base.blob:
                return commit
        return tip

    def _merge_commands(self, branch: str) -> str:
        remote, main = self._repository.remote, self._repository.branch
        return (
            f"git fetch {remote} && git switch {main} && git merge --ff-only {remote}/{main} && git merge "
            f"{shlex.quote(f'{remote}/{branch}')}; resolve and commit; git push {remote} {main}"
        )

    def _remember(self, item: Item, paths: Sequence[str], merge: Merge, kept: Conflict) -> None:
        bases = {edit.path: edit.base for edit in item.edits}
        found: dict[str, BaseVersion] = {}
        for path in paths:
            base = bases[path]
            known = self._open.get(path)
            start = known.blob if known else base.blob if base else merge.tree_blob(path)
            conflict = replace(kept, ours=item.blobs[path], theirs=merge.tree_blob(path))
            found[path] = BaseVersion(start, conflict)
        self._store.remember(found, {})
        self._open.update(found)


def _branch_name(slug: str) -> str:
    """Return a slug as part of a branch's name: whatever git or a shell does not take becomes a dash."""
    name = re.sub(r"[^\w/.-]+|\.\.+|/\.+|//+", "-", slug).strip("/.-")
    name = re.sub(r"\.lock(?=/|$)", "-lock", name).encode()[:_MAX_NAME_BYTES].decode(errors="ignore")
    return name.rstrip("/.-") or "post"
