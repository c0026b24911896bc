"""Lock files and temporary files that dead git processes left in a repository."""

from __future__ import annotations

import math
import os
import shutil
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from briter_worker.errors import FailureCode, PublishError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from briter_worker.git.run import Git

_OLD_S = 15 * 60.0
"""No git command takes so long that its lock is still held, if no git runs."""
_WAIT_S = 0.5
"""Another git command may hold the lock of a ref for a moment."""
_TEMPORARY = (
    *("objects/pack/tmp_*", "objects/pack/.tmp-*", "objects/??/tmp_obj_*"),
    *("fast_import_crash_*", "briter/index-*", "briter/.*.tmp", "reftable/*.temp.*", "reftable/*.ref.lock"),
)


@dataclass(frozen=True)
class LockFiles:
    """The lock files that stop git in a repository, and a mark by which the worker knows its own.

    A worker that dies leaves the mark. A lock file that appeared after the mark was that worker's: its git
    has ended, as the repository's lock is free. That no process has a lock file open proves nothing:
    `git commit` waits for its editor without.
    """

    _git: Git
    _own_refs: str
    """Prefix of refs that only this worker moves."""
    _refs: Sequence[str]

    def find(self) -> list[Path]:
        """Return the lock files that are there now, whoever made them."""
        git_dir, common = self._git.git_dir, self._git.common_dir
        refs = (common / f"{ref}.lock" for ref in self._refs)
        tables = (place / "reftable" / "tables.list.lock" for place in {git_dir, common})
        shared = (git_dir / "index.lock", git_dir / "HEAD.lock", common / "packed-refs.lock", *refs, *tables)
        return [*(path for path in shared if path.exists()), *self._own()]

    def _own(self) -> Iterator[Path]:
        return (self._git.common_dir / self._own_refs).rglob("*.lock")

    def remove_own(self) -> None:
        """Remove the locks of the worker's own refs. Call it when no git of the worker's runs."""
        for path in self._own():
            with suppress(OSError):
                path.unlink()

    @contextmanager
    def marked(self) -> Iterator[None]:
        """Remove stale lock files, and mark the repository as in use inside.

        Raises PublishError for a lock that stops the worker and may be a user's. `index.lock` stops nobody:
        building and pushing do not use the index.
        """
        mark = self._git.own_dir / "busy"
        self._remove_stale(mark, self.find())
        if held := self._remove_lasting(mark):
            raise PublishError(
                FailureCode.LOCKED,
                f"another git command holds {held[0]}",
                "let that command end; if none runs, remove the file",
            )
        try:
            mark.touch()
        except OSError as error:
            raise PublishError.from_os("the repository cannot be written", error) from error
        try:
            yield
        finally:
            with suppress(OSError, PublishError):
                self._remove_lasting(mark)  # of a git that was killed, or failed
                mark.unlink(missing_ok=True)

    def _remove_lasting(self, mark: Path) -> list[Path]:
        """Wait for the locks that stop the worker, then remove the stale ones. Return the others."""
        if held := [path for path in self.find() if path.name != "index.lock"]:
            time.sleep(_WAIT_S)
        return self._remove_stale(mark, held)

    def _remove_stale(self, mark: Path, paths: Sequence[Path]) -> list[Path]:
        """Remove the locks that are younger than the mark, or old, if no git runs. Return the others."""
        self.remove_own()
        marked_at = mark.stat().st_mtime if mark.exists() else math.inf
        for path in paths:
            with suppress(OSError):
                locked_at = path.stat().st_mtime
                is_of_dead_worker = locked_at >= marked_at
                is_old = time.time() - locked_at > _OLD_S
                if (is_of_dead_worker or is_old) and not self.is_git_running():
                    path.unlink(missing_ok=True)
        return [path for path in paths if path.exists()]

    def is_git_running(self, younger: float = math.inf) -> bool:
        """Return True if a git that this process did not start may be working in this repository.

        A git that started `younger` seconds ago, or earlier, does not count.
        """
        git_dir = self._git.git_dir
        work_tree = self._git.worktree or git_dir
        # Resolved, as the kernel names a process's folder: the site may be a symbolic link.
        folders = (os.path.realpath(work_tree), os.path.realpath(git_dir))
        for process in psutil.process_iter(["name", "ppid"]):
            is_git = (process.info["name"] or "").startswith("git")
            is_own_child = process.info["ppid"] == os.getpid()
            if not is_git or is_own_child:
                continue
            with suppress(psutil.NoSuchProcess):
                about = process.as_dict(["status", "cwd", "cmdline", "create_time"])
                has_exited = about["status"] == psutil.STATUS_ZOMBIE
                is_too_old = time.time() - about["create_time"] >= younger
                if has_exited or is_too_old:
                    continue
                if _may_work_in(folders, about["cwd"], about["cmdline"] or ()):
                    return True
        return False


def _may_work_in(folders: tuple[str, ...], cwd: str | None, command: Sequence[str]) -> bool:
    """Return True if a process works in one of the folders or names one, or hides where it works."""
    if cwd is None:  # another user's process
        return True
    if cwd.startswith(folders):
        return True
    text = " ".join(command)
    return any(folder in text for folder in folders)


def remove_temporary(git: Git, now: float) -> None:
    """Remove the temporary files of gits that were killed."""
    for place in {git.git_dir, git.common_dir}:
        for path in (path for pattern in _TEMPORARY for path in place.glob(pattern)):
            with suppress(OSError):
                if now - path.stat().st_mtime > _OLD_S:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
