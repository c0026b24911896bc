"""Whether dry runs have left commits to push, read without starting git or importing GitPython.

A worker with nothing to do asks this each time, and a cron job that finds nothing should cost nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_REF = "refs/briter/dry-run"


def has_dry_run_commits(worktree: Path) -> bool:
    """Whether the repository has the ref that dry runs leave; False where there is no repository."""
    try:
        common = _common_dir(worktree)
        if (common / _REF).exists():
            return True
        packed = (common / "packed-refs").read_bytes()
    except OSError:
        return False
    return f" {_REF}\n".encode() in packed


def _common_dir(worktree: Path) -> Path:
    git_dir = worktree / ".git"
    if git_dir.is_file():  # a linked work tree, or a submodule
        git_dir = worktree / git_dir.read_text().removeprefix("gitdir:").strip()
    pointer = git_dir / "commondir"
    return git_dir / pointer.read_text().strip() if pointer.exists() else git_dir
