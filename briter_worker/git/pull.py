"""Bring the remote's commits into the site, and local commits onto the remote's tip.

The rebase happens in a linked work tree that holds no files. Then branch, index and files move as after a
publication: a file that the CMS has changed is not touched.
"""

from __future__ import annotations

import os
import secrets
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from briter_worker.errors import DeclinedError, FailureCode, LockLostError, PublishError
from briter_worker.git.push import FilePlans, UncertainPushError, push, push_large_files
from briter_worker.git.repository import Entry

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from briter_worker.git.checkout import Checkout
    from briter_worker.git.mirror_state import FileBase
    from briter_worker.git.repository import Repository

_MAX_RACES = 5
_NAMED = 10
_FOLDER = "briter-rebase-"
_NO_ENVIRONMENT: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class LocalCommit:
    """A commit of the local branch that the remote lacks."""

    commit: str
    parent: str
    subject: str
    committer: tuple[str, str]


@dataclass(frozen=True, slots=True)
class PullResult:
    """What a pull did."""

    tip: str
    """The remote's tip."""
    rebased: tuple[LocalCommit, ...] = ()
    """The local commits that were put onto the remote's tip."""
    is_pushed: bool = False
    late_reason: str = ""
    """Why the local branch does not have `tip` yet; empty if it has."""


def pull(
    repository: Repository,
    checkout: Checkout,
    *,
    rebase: bool,
    push: bool,
    still_ours: Callable[[], bool] = lambda: True,
) -> PullResult:
    """Move the local branch to the remote's tip, with local commits rebased and pushed on request.

    The caller holds the site's lock. Raises DeclinedError, with nothing changed, if there are local commits
    and `rebase` is False, or if they conflict; PublishError if the remote cannot be asked.
    """
    with repository.working():
        repository.check()
        checkout.catch_up()
        for _ in range(_MAX_RACES):
            tip = _fetch(repository)
            _remember_published(repository, checkout, tip)
            local = str(repository.ref(repository.branch_ref))
            if repository.is_ancestor(local, tip):
                checkout.sync(tip, {})
                return PullResult(tip, late_reason=checkout.state().reason)
            commits = _local_commits(repository, tip)
            if not rebase:
                raise DeclinedError(
                    f"{len(commits)} local commits are not on the remote: {_subjects(commits)}",
                    "briter-worker pull --rebase --push",
                )
            new = Rebase(repository, checkout, tip).run(commits)
            if not push:
                checkout.replace_commits(local, new)
                return PullResult(tip, tuple(commits))
            if not still_ours():
                raise LockLostError
            if _push(repository, new, tip):
                checkout.remember_rebased(local, new)
                checkout.sync(new, {})
                return PullResult(new, tuple(commits), is_pushed=True, late_reason=checkout.state().reason)
    raise PublishError(
        FailureCode.LOST_RACE, "others pushed again and again meanwhile", "briter-worker pull --rebase --push"
    )


def _fetch(repository: Repository) -> str:
    tip = repository.fetch()
    repository.check_not_rewritten(tip)
    repository.update_refs((repository.pushed_ref, tip, None), (repository.tracking_ref, tip, None))
    return tip


def _remember_published(repository: Repository, checkout: Checkout, tip: str) -> None:
    """Remember what a worker had published when it died: files that still differ are edits of that."""
    for plan in FilePlans(repository.git.state_dir, repository.branch).plans():
        if repository.is_ancestor(plan.tip, tip):
            checkout.remember(tip, plan.blobs)


def _local_commits(repository: Repository, tip: str) -> list[LocalCommit]:
    """Return the local branch's commits that `tip` lacks, oldest first, without merges."""
    out = repository.git.run(
        *("log", "-z", "--reverse", "--topo-order", "--no-merges", "--format=%H%n%P%n%cn%n%ce%n%s"),
        *(f"{tip}..{repository.branch_ref}", "--"),
    )
    fields = (os.fsdecode(entry).split("\n", 4) for entry in out.split(b"\0") if entry)
    return [LocalCommit(sha, parent, subject, (name, mail)) for sha, parent, name, mail, subject in fields]


def _push(repository: Repository, new: str, tip: str) -> bool:
    """Push the rebased commits. Return False if the remote has moved meanwhile."""
    if new == tip:
        return True
    ref = f"{repository.own_refs}/rebased"
    repository.update_refs((ref, new, None))
    if repository.git.config("filter.lfs.clean"):
        push_large_files(repository, ref, base=tip, dry_run=False)
    try:
        is_done = push(repository, f"{ref}:{repository.branch_ref}", expect=tip)
    except UncertainPushError:
        if repository.remote_tip() != new:
            raise
        is_done = True
    finally:
        repository.update_refs((ref, None, None))
    if is_done:
        repository.update_refs((repository.pushed_ref, new, None), (repository.tracking_ref, new, None))
    return is_done


@dataclass(frozen=True, slots=True)
class _Settled:
    """A path that was published: its version in these commits counts as `entry`, the published one."""

    entry: Entry | None
    commits: Collection[str]
    blobs: Mapping[str, str | None]
    """The version that each commit really has."""


class Rebase:
    """Puts local commits onto the remote's tip. Nothing of the site changes.

    A published file was read from a work tree that had the local commits up to then. So its published version
    counts as their version of the file: they must not change it once more.
    """

    def __init__(self, repository: Repository, checkout: Checkout, tip: str) -> None:
        self._repository = repository
        self._git = repository.git
        self._checkout = checkout
        self._tip = tip
        self._folder = self._git.state_dir / f"{_FOLDER}{secrets.token_hex(8)}"
        # Git names the folder of a linked work tree after the work tree.
        self._git_dir = self._git.common_dir / "worktrees" / self._folder.name
        self._place = f"--git-dir={self._git_dir}", f"--work-tree={self._folder}"
        self._index = self._git.state_dir / "rebase-index"

    def run(self, commits: Sequence[LocalCommit]) -> str:
        """Return the last rebased commit. Raises DeclinedError if a commit conflicts."""
        self._remove()
        where = str(self._folder)
        self._git.run("worktree", "add", "--quiet", "--no-checkout", "--detach", "--force", where, self._tip)
        try:
            self._run("read-tree", "HEAD")
            settled = self._settled_versions(commits)
            for commit in commits:
                self._pick(commit, settled)
            return self._run("rev-parse", "HEAD").decode().strip()
        finally:
            self._remove()

    def _pick(self, commit: LocalCommit, settled: Mapping[str, _Settled]) -> None:
        source = self._rewrite(commit, settled)
        if source is None:
            return
        name, mail = commit.committer
        committer = {"GIT_COMMITTER_NAME": name, "GIT_COMMITTER_EMAIL": mail, "GIT_LFS_SKIP_SMUDGE": "1"}
        status, _, said = self._git.attempt(
            *self._place, "cherry-pick", "--allow-empty", source, env=committer
        )
        if not status:
            return
        unmerged = os.fsdecode(self._run("diff", "--name-only", "-z", "--diff-filter=U")).split("\0")[:-1]
        if unmerged:
            raise self._conflict(commit, unmerged)
        if not (self._git_dir / "CHERRY_PICK_HEAD").exists():
            raise PublishError(FailureCode.INTERNAL, f"git cherry-pick {commit.commit[:10]} failed: {said}")
        self._run("cherry-pick", "--skip", env=committer)  # the remote has the same changes

    def _conflict(self, commit: LocalCommit, paths: Sequence[str]) -> DeclinedError:
        remote, branch = self._repository.remote, self._repository.branch
        # Not to the remote's tip: files that the remote changed are older here, and would look edited.
        agreed = self._checkout.agreed(self._tip) or self._tip
        more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
        return DeclinedError(
            f"the local commit {commit.commit[:10]} ({commit.subject}) and the remote changed the same lines "
            f"of {', '.join(paths[:_NAMED])}{more}; nothing was changed",
            f"git worktree add --detach ../rebase {branch}, and there: git rebase {remote}/{branch}, resolve "
            f"the conflicts, git push {remote} HEAD:{branch}; then in the site: git reset {agreed[:10]}",
        )

    # Versions that were published since

    def _settled_versions(self, commits: Sequence[LocalCommit]) -> dict[str, _Settled]:
        """Return the paths that were published since some of the commits were made."""
        start = self._checkout.agreed(self._tip)
        bases = self._checkout.state().bases
        if start is None or not bases:
            return {}
        line = [start, *(each.commit for each in commits)]
        everything = {*line, *(each.parent for each in commits)}
        entries = {each: self._repository.entries(each, bases) for each in everything}
        on_remote = self._repository.entries(self._tip, bases)
        found = {}
        for path, base in bases.items():
            blobs = {each: known[path].blob if path in known else None for each, known in entries.items()}
            mode = on_remote[path].mode if path in on_remote else "100644"
            entry = Entry(mode, base.blob) if base.blob else None
            found[path] = _Settled(entry, self._commits_before(path, base, line, blobs), blobs)
        return found

    def _commits_before(
        self, path: str, base: FileBase, line: Sequence[str], blobs: Mapping[str, str | None]
    ) -> Collection[str]:
        """Return the commits that were made before the file was published."""
        if base.is_unstaged:
            same = {each for each, blob in blobs.items() if blob == base.committed}
            last = max((number for number, each in enumerate(line) if each in same), default=0)
            return same.union(line[: last + 1])
        # Somebody held the index at that time: what was committed may be older or newer. But if the file
        # still is what was published, nothing newer is missing.
        return list(blobs) if self._checkout.has_version(path, base.blob) else []

    def _rewrite(self, commit: LocalCommit, settled: Mapping[str, _Settled]) -> str | None:
        """Return a commit with the same changes but those of settled paths; None if nothing is left."""
        touched = {
            path: each
            for path, each in settled.items()
            if each.blobs[commit.commit] != each.blobs[commit.parent]
        }
        own = {path: each.entry for path, each in touched.items() if commit.commit in each.commits}
        before = {path: each.entry for path, each in touched.items() if commit.parent in each.commits}
        if not own and not before:
            return commit.commit
        tree, onto_tree = self._write_tree(commit.commit, own), self._write_tree(commit.parent, own | before)
        if tree == onto_tree:
            return None
        header, _, message = self._git.run("cat-file", "commit", commit.commit).partition(b"\n\n")
        kept = [
            line for line in header.split(b"\n") if line.startswith((b"author ", b"committer ", b"encoding "))
        ]
        base = self._write_commit(f"tree {onto_tree}", kept, message)
        return self._write_commit(f"tree {tree}\nparent {base}", kept, message)

    def _write_commit(self, beginning: str, header: Sequence[bytes], message: bytes) -> str:
        content = b"\n".join([beginning.encode(), *header, b"", message])
        out = self._git.run("hash-object", "-t", "commit", "-w", "--stdin", stdin=content)
        return out.decode().strip()

    def _write_tree(self, commit: str, changes: Mapping[str, Entry | None]) -> str:
        env = {"GIT_INDEX_FILE": str(self._index)}
        self._git.run("read-tree", commit, env=env)
        lines = [
            f"{entry.mode} {entry.blob}\t{path}\0" if entry else f"0 {'0' * len(commit)}\t{path}\0"
            for path, entry in changes.items()
        ]
        if lines:
            stdin = os.fsencode("".join(lines))
            self._git.run("update-index", "-z", "--add", "--replace", "--index-info", stdin=stdin, env=env)
        return self._git.run("write-tree", env=env).decode().strip()

    # The linked work tree

    def _run(self, *args: str, env: Mapping[str, str] = _NO_ENVIRONMENT) -> bytes:
        return self._git.run(*self._place, *args, env=env, what=f"git {args[0]} failed")

    def _remove(self) -> None:
        """Remove the linked work tree, and those of processes that died."""
        for folder in self._git.state_dir.glob(f"{_FOLDER}*"):
            self._git.attempt("worktree", "remove", "--force", str(folder))
            shutil.rmtree(folder, ignore_errors=True)
        self._index.unlink(missing_ok=True)


def _subjects(commits: Sequence[LocalCommit]) -> str:
    named = ", ".join(f"{each.commit[:10]} ({each.subject})" for each in commits[:_NAMED])
    return named + (f" and {len(commits) - _NAMED} more" if len(commits) > _NAMED else "")
