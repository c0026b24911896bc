"""Bring the remote's commits into the site, and local commits onto the remote's tip.

The rebase merges trees and touches no file. Then branch, index and files move as after a publication: a file
that the CMS has changed is not touched.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from briter_worker.errors import DeclinedError, FailureCode, PublishError
from briter_worker.git.checkout import MirrorState
from briter_worker.git.commits import write_commit
from briter_worker.git.index import set_entries
from briter_worker.git.plans import FilePlans
from briter_worker.git.push import push, push_large_files
from briter_worker.git.repository import COMMIT_MARK, Entry, blob_of, name_some, read_raw
from briter_worker.job import count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from briter_worker.git.checkout import Checkout
    from briter_worker.git.repository import LocalCommit, Repository

_MAX_RACES = 5


@dataclass(frozen=True, slots=True)
class PullResult:
    """The result of a pull."""

    tip: str
    """The remote's tip."""
    rebased: tuple[LocalCommit, ...] = ()
    """The local commits that were put onto the remote's tip."""
    is_pushed: bool = False
    late_reason: str = ""
    """The reason why the local branch does not have `tip` yet; empty if it has."""
    is_blocked: bool = False
    """The pull changed nothing, because the user has local changes."""


def pull(
    repository: Repository, checkout: Checkout, *, rebase: bool, push: bool, patience: float | None = None
) -> PullResult:
    """Move the local branch to the remote's tip, with local commits rebased and pushed on request.

    Safe beside a running worker: `patience` is how many seconds to wait for it. Raises DeclinedError, with
    nothing changed, if there are local commits and `rebase` is False, or if they conflict; PublishError if
    the remote cannot be asked, or the local branch cannot be moved.
    """
    with repository.working(patience):
        repository.check()
        for _ in range(_MAX_RACES):
            tip = repository.fetch()
            repository.check_not_rewritten(tip)
            refs = (repository.pushed_ref, repository.tracking_ref)
            if moves := [(ref, tip, None) for ref in refs if repository.ref(ref) != tip]:
                repository.update_refs(*moves)
            _remember_published(repository, checkout, tip)
            local = str(repository.ref(repository.branch_ref))
            if repository.is_ancestor(local, tip):
                if local != tip or checkout.state() != MirrorState():
                    checkout.sync(tip, {})
                return PullResult(tip, late_reason=checkout.late_reason, is_blocked=checkout.is_blocked)
            commits = repository.local_commits("--no-merges")[::-1]
            if not rebase:
                subjects = [f"{each.commit[:10]} ({each.subject})" for each in commits]
                raise DeclinedError(
                    f"not on the remote: {count(len(commits), 'local commit')}: {name_some(subjects)}",
                    "briter-worker pull --rebase --push",
                )
            new = _Rebase(repository, checkout, tip, commits).run()
            # Before the push: commits whose rebased versions are on the remote would be rebased once more
            # by the pull after a crash, onto later ones of the same lines.
            checkout.follow(new, {}, left=local)
            if not push:
                return PullResult(tip, tuple(commits))
            if _push(repository, new, tip):
                return PullResult(new, tuple(commits), is_pushed=True)
    raise PublishError(
        FailureCode.LOST_RACE, "others pushed again and again meanwhile", "briter-worker pull --rebase --push"
    )


def _remember_published(repository: Repository, checkout: Checkout, tip: str) -> None:
    """Remember what a worker had published when it died: files that still differ are edits of that."""
    local = str(repository.ref(repository.branch_ref))
    for plan in FilePlans(repository.git.state_dir, repository.branch).plans():
        # What the branch contains already, the dead worker has brought into the files.
        if repository.is_ancestor(plan.tip, tip) and not repository.is_ancestor(plan.tip, local):
            checkout.remember(tip, plan.blobs)


def _push(repository: Repository, new: str, tip: str) -> bool:
    """Push the rebased commits. Return False if the remote has moved meanwhile."""
    if new == tip:
        return True
    ref = f"{repository.own_refs}/batch/rebased"  # `tidy` removes it, should the command be killed
    repository.update_refs((ref, new, None))
    if repository.git.config("filter.lfs.clean"):
        push_large_files(repository, ref, base=tip, dry_run=False)
    try:
        is_done = push(repository, f"{ref}:{repository.branch_ref}", expect=tip)
    finally:  # if its answer was lost, the next pull finds the commits on the remote
        repository.update_refs((ref, None, None))
    if is_done:
        repository.update_refs((repository.pushed_ref, new, None), (repository.tracking_ref, new, None))
    return is_done


class _Rebase:
    """Puts local commits onto the remote's tip. Nothing of the site changes.

    A published file was read from a work tree that had the local commits up to then: they must not change it
    once more. What was committed later is an edit of the published version.
    """

    def __init__(
        self, repository: Repository, checkout: Checkout, tip: str, commits: Sequence[LocalCommit]
    ) -> None:
        self._repository = repository
        self._git = repository.git
        self._tip = tip
        self._commits = commits
        self._agreed = checkout.agreed(tip)
        self._bases = checkout.state().bases
        self._index = {"GIT_INDEX_FILE": str(self._git.state_dir / "index-rebase")}
        self._before: dict[str, dict[str, Entry | None]] = {}
        """By commit: the published version of each path that the commit changed."""
        self._same: dict[str, dict[str, Entry | None]] = {}
        """By commit: those that the commit leaves as they were published."""

    def run(self) -> str:
        """Return the last rebased commit. Raises DeclinedError if a commit conflicts."""
        self._find_published()
        onto = self._tip
        try:
            for commit in self._commits:
                onto = self._pick(commit, onto)
        finally:
            self._git.state_dir.joinpath("index-rebase").unlink(missing_ok=True)
        return onto

    def _pick(self, commit: LocalCommit, onto: str) -> str:
        """Return a commit on `onto` with the same changes; `onto` itself if that has them already."""
        content = self._git.run("cat-file", "commit", commit.commit)
        base = self._write_tree(commit.parent, self._before.get(commit.commit, {}))
        theirs = self._write_tree(commit.commit, self._same.get(commit.commit, {}))
        ours = self._write_tree(onto, {})
        header, _, message = content.partition(b"\n\n")
        fields = dict(line.split(b" ", 1) for line in header.splitlines() if not line.startswith(b" "))
        people, encoding = (fields[b"author"], fields[b"committer"]), fields.get(b"encoding", b"UTF-8")
        write = partial(write_commit, self._git, people=people, message=message, encoding=encoding.decode())
        # Two commits on one base: `git merge-tree` learned to be told the base in 2.40.
        root = write(base)
        sides = (write(tree, root) for tree in (ours, theirs))
        command = ("merge-tree", "--write-tree", "-z", "--name-only", "--no-messages")
        status, out, said = self._git.attempt(*command, *sides)
        if status not in (0, 1):
            raise self._git.failure(command, said, status)
        merged, *unmerged = os.fsdecode(out).split("\0")[:-1]
        if status:
            raise self._conflict(commit, unmerged)
        if merged == ours and not content.startswith(f"tree {base}\n".encode()):
            return onto
        return write(merged, onto, signer=self._git.signer)

    def _conflict(self, commit: LocalCommit, paths: Sequence[str]) -> DeclinedError:
        remote, branch = self._repository.remote, self._repository.branch
        # Not to the remote's tip: files that the remote changed are older here, and would look edited.
        return DeclinedError(
            f"the local commit {commit.commit[:10]} ({commit.subject}) and the remote changed the same lines "
            f"of {name_some(paths)}; nothing was changed",
            f"git worktree add --detach ../rebase {branch}, and there: git rebase {remote}/{branch}, resolve "
            f"the conflicts, git push {remote} HEAD:{branch}; then in the site: git reset "
            f"{self._agreed[:10]}",
        )

    def _find_published(self) -> None:
        # While the index was held, nobody knows what was committed before.
        bases = {path: base for path, base in self._bases.items() if base.committed != ""}
        if not bases:
            return
        on_remote, seen = self._repository.entries(self._tip, bases), set[str]()
        command = ("log", "-z", "--raw", "--no-renames", "--no-abbrev", "--no-merges", "--topo-order")
        local = (f"--format={COMMIT_MARK}%H", self._repository.branch_ref, "--not", self._tip, "--")
        for commit, path, _, new in read_raw(self._git.fields(*command, *local)):  # newest first
            if path not in bases:
                continue
            base = bases[path]
            mode = on_remote[path].mode if path in on_remote else "100644"
            published = self._before.setdefault(commit, {})[path] = (
                Entry(mode, base.blob) if base.blob else None
            )
            if path in seen or blob_of(new) == base.committed:
                self._same.setdefault(commit, {})[path] = published
            seen.add(path)

    def _write_tree(self, commit: str, changes: Mapping[str, Entry | None]) -> str:
        self._git.run("read-tree", commit or "--empty", env=self._index)
        set_entries(self._git, changes, self._index)
        return self._git.run("write-tree", env=self._index).decode().strip()
