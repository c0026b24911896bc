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
from briter_worker.ports import BaseVersion, Conflict, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from briter_worker.git.commits import Person
    from briter_worker.git.publisher import Item
    from briter_worker.git.repository import Repository
    from briter_worker.ports import BaseVersions, Outcome

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
        self._open: dict[str, tuple[str | None, Conflict]] = {}
        """By path: the version that the author started from, and the conflict."""
        self._merged: set[str] = set()
        """Commits of conflict branches that somebody has merged."""

    def load(self, paths: Collection[str], tip: str) -> None:
        """Read what is known of the paths' conflicts, as of the remote's `tip`."""
        known = self._store.bases(paths) if paths else {}
        self._open = {path: (each.blob, each.conflict) for path, each in known.items() if each.conflict}
        commits = {conflict.commit for _, conflict in self._open.values()}
        self._merged = {each for each in commits if each and self._repository.is_ancestor(each, tip)}

    def base_of(self, path: str, blob: str | None) -> Base | None:
        """Return the version that this content of a path with an open conflict is an edit of.

        The same content conflicts again; any other content is the author's answer to the remote's version.
        """
        if path not in self._open:
            return None
        start, conflict = self._open[path]
        if conflict.commit in self._merged:
            return Base(conflict.ours)
        return Base(start if blob == conflict.ours else conflict.theirs)

    def settle(self, item: Item, paths: Sequence[str], merge: Merge, *, now: float, dry_run: bool) -> Outcome:
        """Return the failure of a request that conflicts; its version is kept, and remembered as such."""
        message, fix = f"the remote changed {', '.join(paths)} in the same lines", _SAVE_AGAIN
        if not dry_run:
            try:
                parent = self._find_parent(item, paths[0], merge.tip)
                branch, commit = self._keep(item, parent, now)
                self._remember(item, paths, merge, branch, commit)
            except PublishError as error:  # other posts of the push are on the remote: none of them may fail
                branch, parent = "", merge.tip
                message = f"{message}; its version could not be kept ({error.message})"
            where = f"on the branch {branch} of the remote" if branch else "where it was saved"
            message = f"{message}; the post's version is {where}"
            if branch and parent != merge.tip:  # else git would see no conflict, and drop theirs
                remote, main = self._repository.remote, self._repository.branch
                fix = (
                    f"{fix}; or merge both: git fetch {remote} && git switch {main} && git merge --ff-only "
                    f"{remote}/{main} && git merge {shlex.quote(f'{remote}/{branch}')}; resolve and commit; "
                    f"git push {remote} {main}, then retry the post"
                )
        return item.outcome(Result.FAILED, failure=Failure(FailureCode.CONFLICT, message, fix))

    def close(self, paths: Collection[str]) -> None:
        """Forget the conflicts of paths that are published, and delete their branches. May be repeated."""
        over = {path: self._open.pop(path) for path in paths if path in self._open}
        for branch, commit in {(each.branch, each.commit) for _, each in over.values()}:
            if branch:
                move_side_branch(self._repository, "", branch, commit)
        if over:
            self._store.remember({path: BaseVersion(blob) for path, (blob, _) in over.items()}, {})

    def _keep(self, item: Item, parent: str, now: float) -> tuple[str, str | None]:
        """Push the request's version as one commit on `parent`; return the branch, or nothing."""
        repository = self._repository
        merge = Merge(repository, parent, item.blobs, self._read)
        placed = merge.place([replace(edit, base=None) for edit in item.edits])
        if not placed.files:
            return "", None
        ref = f"{repository.own_refs}/conflict/{uuid.uuid4().hex}"
        commits = [item.commit(self._identity, now, placed.files)]
        (commit,) = write_commits(repository.git, commits, parent=parent, ref=ref, progress=lambda *_: None)
        name = f"conflict/{_branch_name(item.request.slug)}"
        before = {each.branch: each.commit for _, each in self._open.values()}
        candidates = (name, f"{name}-{commit[:8]}")
        kept = (each for each in candidates if move_side_branch(repository, ref, each, before.get(each)))
        branch = next(kept, "")
        repository.update_refs((ref, None, None))
        return branch, commit if branch else None

    def _find_parent(self, item: Item, path: str, tip: str) -> str:
        """Return the newest commit that has the version the author started from, or the tip."""
        base = next((edit.base for edit in item.edits if edit.path == path), None)
        if base is None or base.blob is None or self._repository.git.worktree is None:
            return tip  # a bare clone has no history
        out = self._repository.git.run(
            *("--literal-pathspecs", "log", "-1", "--no-merges", "--format=%H %P"),
            *(f"--find-object={base.blob}", tip, "--", path),
        )
        for commit in out.decode().split():
            entry = self._repository.entries(commit, [path]).get(path)
            if entry is not None and entry.blob == base.blob:
                return commit
        return tip

    def _remember(
        self, item: Item, paths: Sequence[str], merge: Merge, branch: str, commit: str | None
    ) -> None:
        bases = {edit.path: edit.base for edit in item.edits}
        for path in paths:
            base, theirs = bases[path], merge.tree_blob(path)
            start = base.blob if base else theirs
            if path in self._open:
                start = self._open[path][0]
            self._open[path] = start, Conflict(item.blobs[path], theirs, branch, commit)
        self._store.remember({path: BaseVersion(*self._open[path]) for path in paths}, {})


def _branch_name(slug: str) -> str:
    """Return a slug as part of a branch's name: whatever git or a shell does not take becomes a dash."""
    name = re.sub(r"[^\w/.-]+|\.\.+|/\.+|//+", "-", slug).strip("/.-")
    name = re.sub(r"\.lock(?=/|$)", "-lock", name).encode()[:_MAX_NAME_BYTES].decode(errors="ignore")
    return name.rstrip("/.-") or "post"
