"""Remove lock files of git that nobody holds any more.

A mark in the git folder says that commands of the worker may be running there. What appeared after the mark
of a worker that never removed it was that worker's: its git has ended, as the site's lock is free.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import psutil

from briter_worker.errors import FailureCode, PublishError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from briter_worker.git.run import Git

OLD_S = 15 * 60.0
"""No git command takes so long that its lock is still held, if no git runs."""
_SHORT_S = 0.5
_INDEX = "index.lock"


class StaleLocks:
    """The lock files of one repository. Use it only while holding the site."""

    def __init__(self, git: Git, refs: Collection[str], private: str) -> None:
        """`refs` are the refs that the worker moves, and `private` the prefix of those it owns."""
        self._git = git
        self._refs = refs
        self._private = private
        self._is_marked = False

    def locks(self) -> Iterator[Path]:
        """Yield the lock files that are there now, whoever made them."""
        git_dir, common = self._git.git_dir, self._git.common_dir
        for path in (
            git_dir / _INDEX,
            git_dir / "HEAD.lock",
            common / "packed-refs.lock",
            *(common / f"{ref}.lock" for ref in self._refs),
        ):
            if path.exists():
                yield path
        if (common / self._private).is_dir():
            yield from (common / self._private).rglob("*.lock")

    @contextmanager
    def marked(self) -> Iterator[None]:
        """Remove stale locks, and keep the mark while the caller works.

        Raises PublishError for a lock that stops the worker and may be somebody's; `index.lock` stops nobody,
        because building and pushing do not use the index.
        """
        if self._is_marked:
            yield
            return
        # Of this work tree alone: a worker in another linked one has its own.
        mark = self._git.git_dir / "briter" / "busy"
        self._clear(mark, index=True)
        if held := self._clear(mark, wait=True):
            raise PublishError(
                FailureCode.LOCKED,
                f"another git command holds {held[0]}",
                "let that command end; if none runs, remove the file",
            )
        try:
            mark.parent.mkdir(mode=0o700, exist_ok=True)
            mark.touch()
        except OSError as error:
            raise PublishError.from_os("the repository cannot be written", error) from error
        self._is_marked, ended = True, self._git.ended
        try:
            yield
        finally:
            self._is_marked = False
            killed = self._git.ended > ended  # these could not remove their locks
            with suppress(OSError, PublishError):
                self._clear(mark, index=killed, wait=not killed)
                mark.unlink(missing_ok=True)

    def _clear(self, mark: Path, *, index: bool = False, wait: bool = False) -> list[Path]:
        """Remove stale locks; return the others. `wait`: others may hold the lock of a ref for a moment."""
        since = mark.stat().st_mtime if mark.exists() else None
        found = {path: _inode(path) for path in self.locks() if index or path.name != _INDEX}
        if found and wait:
            time.sleep(_SHORT_S)
        left = (path for path, inode in found.items() if _inode(path) == inode)
        return [path for path in left if not self._remove(path, since)]

    def _remove(self, path: Path, since: float | None) -> bool:
        """Remove the lock if it is provably the worker's, or old; return True if it is gone.

        That no process has the file open proves nothing: `git commit` waits for its editor without.
        """
        try:
            modified = path.stat().st_mtime
            ours = path.is_relative_to(self._git.common_dir / self._private)
            stale = (since is not None and modified >= since) or time.time() - modified > OLD_S
            if not ours and (not stale or self._is_git_running()):
                return False
            path.unlink(missing_ok=True)
        except OSError:
            return not path.exists()
        return True

    def _is_git_running(self) -> bool:
        """Return True if another git may be working in this repository."""
        places = (str(self._git.worktree or self._git.git_dir), str(self._git.git_dir))
        for process in psutil.process_iter(["name"]):
            if not (process.info["name"] or "").startswith("git"):
                continue
            try:
                if process.ppid() == os.getpid():
                    continue  # our own
                command = " ".join(process.cmdline())
                if process.cwd().startswith(places) or any(place in command for place in places):
                    return True
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
            except psutil.AccessDenied:
                return True
        return False


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None
