"""Lock files of git's that nobody holds any more: those that dead workers left, and very old ones.

A file in the git folder marks when commands of ours may be running there. What appeared since it was made by
a worker that never took it away was that worker's.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from briter_worker.errors import Failure, PublishError
from briter_worker.git import causes
from briter_worker.git.refs import PRIVATE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from briter_worker.git.command import Commands

OLD = 15 * 60.0
"""No command of git's takes so long that its lock is still held, if no git runs."""
_MOMENT = 0.5
_MARKER = "briter-worker.busy"
_INDEX = "index.lock"


class Leftovers:
    """What is left over in one repository. Whoever uses this has the site to themselves."""

    def __init__(self, commands: Commands, own: Collection[str], is_behind: Callable[[], bool]) -> None:
        self._commands = commands
        self._own = own
        """The refs that the worker moves."""
        self._is_behind = is_behind
        """Whether the index has to be brought up to the branch."""
        self._working = False
        self._inherited: int | None = None
        """A dead worker's lock of the index. As long as it is there, the marker is that worker's still."""

    def locks(self) -> Iterator[Path]:
        """Lock files of git's that are there now, whoever made them."""
        repo = self._commands.repo
        git_dir, common = Path(repo.git_dir), Path(repo.common_dir)
        for path in (
            git_dir / _INDEX,
            git_dir / "HEAD.lock",
            common / "packed-refs.lock",
            *(common / f"{ref}.lock" for ref in self._own),
        ):
            if path.exists():
                yield path
        if (common / PRIVATE).is_dir():
            yield from (common / PRIVATE).rglob("*.lock")

    def clear(self) -> None:
        """Remove lock files that are certainly nobody's; raise for one that stops us and may be somebody's.

        `index.lock` stops nobody: building and pushing do not use the index. One that a dead worker left
        stays to the end of `leaving`, as the index may be behind its branch: without it, a person's next
        commit would take posts back, and `git stash` what was saved since. Until then, commands of ours may
        run.
        """
        marker = self._marker()
        if not self._working:
            self._inherited = None  # another file may have the number of one that went since
        try:
            # Within our own span, nobody has died: a lock that comes up is somebody else's.
            died_after = None if self._working else marker.stat().st_mtime
        except FileNotFoundError:
            died_after = None
        for path in self.locks():
            if path.name == _INDEX and _is_since(path, died_after):
                self._inherited = _number(path)
            elif not self._remove_dead(path, died_after) and path.name != _INDEX:
                raise PublishError(
                    Failure.LOCKED,
                    f"another git command holds {path}. Fix: let it end; if none runs, remove that file",
                )
        try:
            if self._inherited is None:
                marker.touch()
            self._working = True
        except OSError as error:
            raise causes.from_os("the repository cannot be written", error) from error

    def take_over_index(self) -> bool:
        """Whether the lock of the index that is there is a dead worker's; from now on it is the caller's."""
        index = Path(self._commands.repo.git_dir, _INDEX)
        if self._inherited is None or _number(index) != self._inherited or self._git_runs():
            return False  # or a person's, of a moment after
        self._inherited = None
        return True

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """At the end no command of ours runs any more: what one that was ended has left goes then."""
        ended = self._commands.watch.ended
        try:
            yield
        finally:
            if self._working:  # else the marker is a dead worker's, and its locks are there still
                self._working = False
                with suppress(OSError, PublishError):
                    self._leave(killed=self._commands.watch.ended > ended)

    def _leave(self, *, killed: bool) -> None:
        """The marker goes, too: if it stayed, the lock file of a person who comes later would pass for ours.

        But where a dead worker's lock of the index is still there, nothing else tells that it is: some git
        runs, a person's `git status`, say, so that it may not be removed yet; or the index is behind still.
        """
        marker = self._marker()
        began = marker.stat().st_mtime
        inherited, self._inherited = self._inherited, None
        for path in self._abandoned(killed=killed):
            self._remove_dead(path, began)
        index = marker.with_name(_INDEX)
        if inherited is not None and _number(index) == inherited:
            is_needed = self._is_behind() and _is_since(index, time.time() - OLD)
            if is_needed or not self._remove_dead(index, began):
                return
        marker.unlink()

    def _abandoned(self, *, killed: bool) -> Iterator[Path]:
        left = {path: _number(path) for path in self.locks() if killed or path.name != _INDEX}
        if left and not killed:
            # Git could not remove it. Somebody else's program holds the lock of a ref for a moment only.
            time.sleep(_MOMENT)
        yield from (path for path, number in left.items() if _number(path) == number)

    def _marker(self) -> Path:
        # Of this work tree alone: a worker in another one, linked to this, has its own.
        return Path(self._commands.repo.git_dir, _MARKER)

    def _remove_dead(self, path: Path, died_after: float | None) -> bool:
        """Whether the lock file is gone: it was ours, or it is old; and no git runs here.

        We hold the site, and our children hold it with us, so none of ours is alive: what lies below our own
        refs was left by a dead one, and so was what appeared since a worker began that never finished. That
        no process has the file open proves nothing: `git commit` waits for its editor without.
        """
        try:
            ours = path.is_relative_to(Path(self._commands.repo.common_dir, PRIVATE))
            left = _is_since(path, died_after) or time.time() - path.stat().st_mtime > OLD
            if not ours and (not left or self._git_runs()):
                return False
            path.unlink(missing_ok=True)
        except OSError:
            return not path.exists()
        return True

    def _git_runs(self) -> bool:
        """Whether a git process of others works in this repository, as far as can be seen; if not, it may."""
        places = (str(self._commands.worktree), str(self._commands.repo.git_dir))
        for process in psutil.process_iter(["name"]):
            if not (process.info["name"] or "").startswith("git"):
                continue
            try:
                if process.ppid() == os.getpid():
                    continue  # our own
                named = " ".join(process.cmdline())
                if process.cwd().startswith(places) or any(place in named for place in places):
                    return True
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
            except psutil.AccessDenied:
                return True
        return False


def _is_since(path: Path, moment: float | None) -> bool:
    status = _status(path)
    return moment is not None and status is not None and status.st_mtime >= moment


def _number(path: Path) -> int | None:
    status = _status(path)
    return None if status is None else status.st_ino


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None
