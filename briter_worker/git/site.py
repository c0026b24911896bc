"""The repository as it stands: is it ready for a publication, and where are its branch and its remote?"""

from __future__ import annotations

import os
import re
import shlex
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from briter_worker.errors import Failure, PublishError
from briter_worker.git import causes, refs
from briter_worker.git.leftovers import OLD, Leftovers
from briter_worker.git.moving import Moving
from briter_worker.git.refs import PRIVATE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from briter_worker.git.command import Commands
    from briter_worker.git.moving import Move


_UNDER_WAY = {
    "MERGE_HEAD": ("a merge", "git merge --abort, or finish it with git commit"),
    "rebase-merge": ("a rebase", "git rebase --abort, or git rebase --continue"),
    "rebase-apply": ("a rebase or git am", "git rebase --abort, or git am --abort"),
    "CHERRY_PICK_HEAD": ("a cherry-pick", "git cherry-pick --abort, or --continue"),
    "REVERT_HEAD": ("a revert", "git revert --abort, or --continue"),
    "BISECT_LOG": ("a bisect", "git bisect reset"),
}
_BATCH = re.compile(r"[0-9a-f]{32}")
_OLD_PUSH = 2 * 24 * 60 * 60.0
"""Longer than any backoff: a push whose answer was lost is recognised by its ref when it is tried again."""


@dataclass(frozen=True, slots=True)
class Tips:
    """Where the branch is here, and where it was on the remote when we last saw it."""

    local: str
    remote: str | None


class Site:
    """One repository, one branch, one remote."""

    def __init__(self, commands: Commands, *, branch: str, remote: str) -> None:
        self.commands = commands
        self.remote = remote
        self.branch = branch
        self._moving = Moving(commands)
        self._is_working = False
        self._head: tuple[int, int] | None = None
        self.branch_ref = f"refs/heads/{branch}"
        self.tracking_ref = f"refs/remotes/{remote}/{branch}"
        # Per branch, so also per linked work tree: git lets no two of them have one branch checked out.
        own = refs.of_branch(branch)
        self.dry_run_ref = f"{own}/{refs.DRY_RUN}"
        """The last commit of a dry run that no live run has pushed yet."""
        self.bases_ref = f"{own}/bases"
        """A tree of the versions that files in the work tree started from; see `bases`."""
        self.unindexed_ref = f"{own}/{refs.UNINDEXED}"
        """The commit that index and files still show; there while the branch moves, until they followed."""
        self.fetched_ref = f"{own}/fetched"
        """What the last fetch brought."""
        self._leftovers = Leftovers(commands, (self.branch_ref, self.tracking_ref), self._is_index_behind)

    def look(self) -> Tips:
        """The tips, once the site is fit to be published from. Raises PublishError, with the fix."""
        self._refresh()
        self.check_owner()
        self._no_locks()
        self._head = self._head_stamp()
        self.check_branch()
        self.check_nothing_under_way()
        self.check_remote()
        return self.tips()

    def _refresh(self) -> None:
        try:
            self.commands.refresh()
            _ = self.commands.repo  # opened here, where we know what its absence may mean
        except PublishError as failure:
            # Where HEAD holds nothing, git sees no repository at all.
            folder = self.commands.worktree / ".git"
            if failure.failure is Failure.NOT_A_REPOSITORY and (folder / "HEAD").is_file():
                self._head_of(folder)
            raise

    def tips(self) -> Tips:
        """Where the branch is. Raises PublishError when it has no commit yet."""
        local = self.ref(self.branch_ref)
        if local is None:
            raise PublishError(
                Failure.WRONG_BRANCH,
                f"the branch {self.branch} has no commit yet. Fix: commit and push once by hand",
            )
        return Tips(local, self.ref(self.tracking_ref))

    def check_remote(self) -> None:
        """Raises PublishError when the remote is not configured; does not ask it anything."""
        if f'remote "{self.remote}"' not in self.commands.config.sections():
            raise self.no_remote()

    def no_remote(self) -> PublishError:
        """What it means that the remote is not configured."""
        return PublishError(
            Failure.REMOTE_MISSING,
            f"the repository has no remote named {self.remote}. "
            f"Fix: git remote add {self.remote} URL, or set BRITER_GIT_REMOTE",
        )

    def no_branch(self) -> PublishError:
        """What it means that the remote does not have the branch."""
        return PublishError(
            Failure.REMOTE_REWRITTEN,
            f"the remote has no branch {self.branch} any more. Fix: git push {self.remote} {self.branch}, if "
            f"it should be there; or check what answers at its address: git ls-remote {self.remote}",
        )

    def ref(self, name: str) -> str | None:
        """The commit or tree that a ref points to, or None. Raises PublishError when it is damaged."""
        common = Path(self.commands.repo.common_dir)
        try:
            return refs.read(common, name)
        except refs.BrokenRefError as broken:
            if not broken.name.startswith(f"{PRIVATE}/"):
                raise PublishError(
                    Failure.CORRUPT,
                    f"{broken}, it holds no commit. "
                    f"Fix: rm {shlex.quote(str(broken.path))} && {self._repair(common, broken.name)}",
                ) from None
            # Ours, emptied by a power cut: what it was for is lost, and must not stop the posts.
            broken.path.unlink(missing_ok=True)
            return refs.read(common, name)
        except OSError as error:
            raise causes.from_os(f"{name} cannot be read", error) from error

    def _repair(self, common: Path, name: str) -> str:
        if name == self.tracking_ref:
            return f"git fetch {self.remote}"
        last = refs.last_logged(common, name)
        return f"git update-ref {name} {last or self.tracking_ref}"

    def update(self, *moves: Move) -> None:
        """Move refs, all or none."""
        if self._is_working:
            self._moving.move(moves)
            return
        with self._moving as moving:
            moving.move(moves)

    def about_to_update(self) -> None:
        """Start git already, which takes as long as moving a ref does. For use inside `working`."""
        self._moving.start()

    def batches_within(self, commit: str) -> list[tuple[str, str]]:
        """The private refs of pushes, and their commits, that `commit` contains."""
        out = self.commands.run(
            "for-each-ref", "--format=%(refname) %(objectname)", f"--merged={commit}", PRIVATE
        )
        pairs = [tuple(line.split()) for line in out.decode().splitlines()]
        return [(ref, sha) for ref, sha in pairs if _BATCH.fullmatch(ref.rpartition("/")[2])]

    def is_ancestor(self, old: str, new: str) -> bool:
        """Whether `new` contains `old`; False also where `old` is not known here."""
        status, _, _ = self.commands.attempt("merge-base", "--is-ancestor", old, new)
        return status == 0

    def tidy(self, now: float, keep: Collection[str] = ()) -> None:
        """Remove what dead workers left: old private refs, crash reports, packs that were never finished.

        `keep`: the refs of publications that are not settled yet.
        """
        repo = self.commands.repo
        git_dir, common = Path(repo.git_dir), Path(repo.common_dir)
        left = [
            *git_dir.glob("fast_import_crash_*"),
            *git_dir.glob(f"{refs.TEMPORARY}*"),
            *(common / "objects" / "pack").glob("tmp_*"),
            *(common / "objects" / "pack").glob(".tmp-*"),
            *(common / "objects").glob("[0-9a-f][0-9a-f]/tmp_obj_*"),
        ]
        for path in left:
            with suppress(OSError):
                if now - path.stat().st_mtime > OLD:
                    path.unlink()
        out = self.commands.run("for-each-ref", "--format=%(committerdate:unix) %(refname)", PRIVATE)
        old = [
            name
            for made, _, name in (line.partition(" ") for line in out.decode().splitlines())
            if _BATCH.fullmatch(name.rpartition("/")[2])
            and name not in keep
            and now - self._changed(common / name, int(made or 0)) > _OLD_PUSH
        ]
        needed = self._not_adopted() if old else set()
        if moves := [(name, None, None) for name in old if name not in needed]:
            self.update(*moves)

    def _not_adopted(self) -> set[str]:
        """The private refs of what the remote has, and the branch here has not: its person may be away."""
        here, there = self.ref(self.branch_ref), self.ref(self.tracking_ref)
        if here is None or there is None:
            return set()
        out = self.commands.run(
            "for-each-ref", "--format=%(refname)", f"--merged={there}", f"--no-merged={here}", PRIVATE
        )
        return set(out.decode().splitlines())

    def _changed(self, loose: Path, made: float) -> float:
        """When a ref was last written, at the latest; a packed one has only its commit's time."""
        try:
            return max(loose.stat().st_mtime, made)
        except OSError:
            return made

    def check_owner(self) -> None:
        """Raises PublishError when git would not trust the repository's owner.

        Given a --git-dir, git does not ask whose repository it is: have it ask where that matters.
        """
        git_dir = Path(self.commands.repo.git_dir)
        if {git_dir.stat().st_uid, self.commands.worktree.stat().st_uid} != {os.geteuid()}:
            self.commands.run(
                "rev-parse", "--git-dir", discover=True, doing="the site's repository was refused"
            )

    def check_branch(self) -> None:
        """Raises PublishError unless the configured branch is checked out."""
        current = self._head_of(Path(self.commands.repo.git_dir))
        if current is None:
            raise PublishError(
                Failure.WRONG_BRANCH,
                f"HEAD is detached, it should be on {self.branch}. Fix: git switch {self.branch}",
            )
        if current != self.branch_ref:
            raise PublishError(
                Failure.WRONG_BRANCH,
                f"{current.removeprefix('refs/heads/')} is checked out, not {self.branch}. "
                f"Fix: git switch {self.branch}, or set BRITER_GIT_BRANCH",
            )

    def _head_of(self, git_dir: Path) -> str | None:
        try:
            return refs.head(git_dir)
        except refs.BrokenRefError as broken:
            # Not by git symbolic-ref, which finds no repository there.
            said = shlex.quote(f"ref: {self.branch_ref}")
            raise PublishError(
                Failure.CORRUPT, f"{broken}. Fix: echo {said} > {shlex.quote(str(broken.path))}"
            ) from None
        except OSError as error:
            raise causes.from_os("HEAD cannot be read", error) from error

    def check_unmoved(self) -> None:
        """Raises PublishError when the work tree was another branch's since `look`, if only for a moment.

        What was read there may be that branch's.
        """
        self.check_branch()
        self.check_nothing_under_way()
        if self._head_stamp() != self._head:
            raise PublishError(
                Failure.WRONG_BRANCH,
                "another branch was checked out while the posts were read. "
                f"Fix: leave the site on {self.branch}; it is tried again by itself",
            )

    def is_checked_out(self) -> bool:
        """Whether the work tree and the index are the configured branch's."""
        return self._checked_out() == self.branch_ref

    def has_checked_out(self, commit: str) -> bool:
        """Whether the work tree and the index are those of this commit, on whatever branch."""
        current = self._checked_out()
        return current is not None and self.ref(current) == commit

    def _is_index_behind(self) -> bool:
        """Whether the work tree's index has to follow the branch still, for all that is known."""
        if self.ref(self.unindexed_ref) is None:
            return False
        tip = self.ref(self.branch_ref)
        return self.is_checked_out() or (tip is not None and self.has_checked_out(tip))

    def _checked_out(self) -> str | None:
        """The branch that is; None where HEAD is detached, or damaged."""
        try:
            return refs.head(Path(self.commands.repo.git_dir))
        except (refs.BrokenRefError, OSError):
            return None

    def _head_stamp(self) -> tuple[int, int]:
        """Changes whenever git switches branches: it writes HEAD anew; a commit does not."""
        status = Path(self.commands.repo.git_dir, "HEAD").stat()
        return status.st_ino, status.st_mtime_ns

    def check_nothing_under_way(self) -> None:
        """Raises PublishError while a person is in the middle of a merge or the like."""
        git_dir = Path(self.commands.repo.git_dir)
        for name, (what, fix) in _UNDER_WAY.items():
            if (git_dir / name).exists():
                raise PublishError(
                    Failure.UNFINISHED, f"{what} is under way in the site's repository. Fix: {fix}"
                )

    @contextmanager
    def working(self) -> Iterator[Tips]:
        """Where the branch is, as `look` says; a worker that is killed inside leaves a marker of it."""
        with self._leftovers.leaving():
            self._is_working = True
            try:
                with self._moving:
                    yield self.look()
            finally:
                self._is_working = False

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """As `working`, for what a dead worker began: where the site is not fit, what can be done is."""
        with self._leftovers.leaving():
            self.commands.refresh()
            with suppress(PublishError):
                self._no_locks()
            yield

    def _no_locks(self) -> None:
        self._leftovers.clear()

    def take_over_index(self) -> bool:
        """Whether the index is locked by a dead worker; from now on the lock is the caller's."""
        return self._leftovers.take_over_index()

    def locks(self) -> Iterator[Path]:
        """Lock files of git's that are there now, whoever made them."""
        return self._leftovers.locks()
