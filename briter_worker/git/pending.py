"""What is left to do in the repository beside jobs, read without starting git or importing GitPython.

A worker with nothing to do asks this each time, and a cron job that finds nothing should cost nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from briter_worker.git import refs

if TYPE_CHECKING:
    from pathlib import Path


def lacking(worktree: Path) -> str | None:
    """What to say, with its fix, where there is no repository to publish from; None where there is one."""
    if (worktree / ".git").exists():
        return None
    return (
        f"{worktree} is not the top of a git repository, so that nothing is published from it. "
        "Fix: go to the site's clone, or set BRITER_APP_ROOT or BRITER_GIT_WORKTREE to it"
    )


def has_dry_run_commits(worktree: Path, branch: str) -> bool:
    """Whether the repository has the ref that the branch's dry runs leave; False where it is none."""
    return _has(worktree, branch, refs.DRY_RUN)


def has_late_index(worktree: Path, branch: str) -> bool:
    """Whether the index still has to be brought up to what was published: it was locked then."""
    return _has(worktree, branch, refs.UNINDEXED)


def has_late_adoption(worktree: Path, branch: str, remote: str) -> bool:
    """Whether the remote has what the worker pushed, as was seen then, and the branch here has not."""
    try:
        common = _common_dir(worktree)
        there = refs.read(common, f"refs/remotes/{remote}/{branch}")
        if there is None or there == refs.read(common, f"refs/heads/{branch}"):
            return False
        batches = [path.name for path in (common / refs.PRIVATE).iterdir() if path.is_file()]
        return any(refs.read(common, f"{refs.PRIVATE}/{name}") == there for name in batches)
    except (refs.BrokenRefError, OSError):
        return False  # the next publication looks at it, and mends it


def _has(worktree: Path, branch: str, name: str) -> bool:
    try:
        return refs.read(_common_dir(worktree), f"{refs.of_branch(branch)}/{name}") is not None
    except refs.BrokenRefError:
        return True  # whoever has git looks at it, and mends it
    except OSError:
        return False


def _common_dir(worktree: Path) -> Path:
    git_dir = worktree / ".git"
    if git_dir.is_file():  # a linked work tree, or a submodule
        git_dir = worktree / git_dir.read_text().removeprefix("gitdir:").strip()
    pointer = git_dir / "commondir"
    return git_dir / pointer.read_text().strip() if pointer.exists() else git_dir
