"""The index of the work tree: built anew aside, and put in place under git's own lock."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from briter_worker.errors import FailureCode, PublishError
from briter_worker.git.repository import Entry

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from briter_worker.git.run import Git

_PATIENCE_S = 1.0
"""A person's `git add` ends within this time; an editor or a stale lock does not."""
_POLL_S = 0.01
_SWITCH_S = 0.2
"""`git switch` writes the index, then HEAD: a younger index may be another branch's already."""
_FEW_PATHS = 100
_Stamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """An entry of the index; `mode` and `blob` are those of a tree's entry."""

    entry: Entry
    stage: int
    skips_worktree: bool


class Index:
    """The index, in a copy that replaces it: git sees all of a change or nothing.

    The copy lies in the worker's folder and becomes `index.lock` by a hard link. So the lock is held for
    moments, is complete when it appears, and is known as the worker's by its inode after a crash.
    """

    def __init__(self, git: Git, branch_ref: str) -> None:
        self._git = git
        self._refs = git.git_dir / "HEAD", git.common_dir / branch_ref
        self._file = git.git_dir / "index"
        self._lock = git.git_dir / "index.lock"
        self._copy = git.state_dir / f"{git.git_dir.name.strip('.')}-index"
        self._stamp: _Stamp | None = None
        self.has_changes = False
        self._held = 0
        self._waited_for: _Stamp | None = None

    def clear_leftovers(self) -> None:
        """Remove the copy, and the lock that a dead worker made of it."""
        with suppress(FileNotFoundError):
            if self._lock.samefile(self._copy):
                self._lock.unlink()
        self._discard()

    def entries(self, paths: Collection[str]) -> dict[str, IndexEntry]:
        """Return the entries of these paths in the copy, or in the index while there is no copy."""
        few = [f":(top,literal){path}" for path in paths] if len(paths) <= _FEW_PATHS else []
        env = {"GIT_INDEX_FILE": str(self._copy)} if self._stamp else {}
        out = self._git.run(
            "ls-files", "-z", "-s", "-v", "--", *few, env=env, what="the index could not be read"
        )
        wanted, found = set(paths), {}
        for line in os.fsdecode(out).split("\0")[:-1]:
            about, _, path = line.partition("\t")
            tag, mode, blob, stage = about.split(" ")
            if path in wanted:
                found[path] = IndexEntry(Entry(mode, blob), int(stage), tag in "Ss")
        return found

    def is_locked(self) -> bool:
        """Return True if a git command holds the index."""
        return self._lock.exists()

    def stamp(self) -> _Stamp | None:
        """Return what changes whenever git writes the index."""
        return _stamp(self._file.stat()) if self._file.exists() else None

    @contextmanager
    def copied(self) -> Iterator[None]:
        """Work on a copy of the index as it is now."""
        self.clear_leftovers()
        try:
            self._wait_for_switch(self._file.stat())
            self._stamp = self.stamp()
            _share(self._file, self._copy)
        except FileNotFoundError as error:
            raise PublishError(FailureCode.CORRUPT, "the repository has no index", "git reset") from error
        try:
            yield
        finally:
            self._discard()

    def _wait_for_switch(self, status: os.stat_result) -> None:
        age = time.time() - status.st_mtime
        written = [path.stat().st_mtime_ns for path in self._refs if path.exists()]
        if 0 <= age < _SWITCH_S and max(written, default=0) < status.st_mtime_ns:
            time.sleep(_SWITCH_S - age)

    def change_copy(self, entries: Mapping[str, Entry | None], *, null: str) -> None:
        """Set these entries in the copy; None, written with the `null` object id, removes one."""
        removed_first = sorted(entries.items(), key=lambda item: item[1] is not None)
        lines = [
            f"{entry.mode} {entry.blob}\t{path}\0" if entry else f"0 {null}\t{path}\0"
            for path, entry in removed_first
        ]
        self.has_changes = bool(lines)
        self._update(("-z", "--add", "--replace", "--index-info"), lines)

    def skip_in_copy(self, paths: Collection[str]) -> None:
        """Have git ignore the work tree's files of these paths.

        Without this mark on a file that lacks the branch's version, `git commit -a` would take that back.
        """
        self._update(("-z", "--skip-worktree", "--stdin"), [f"{path}\0" for path in paths])
        if paths and self._held:
            again = self._copy.with_name(f"{self._copy.name}-again")
            _share(self._copy, again)  # git has replaced the copy, and the lock still is what it was
            again.replace(self._lock)
            self._held = self._lock.stat().st_ino

    def _update(self, options: tuple[str, ...], lines: Collection[str]) -> None:
        if lines:
            self._git.run(
                "update-index",
                *options,
                stdin=os.fsencode("".join(lines)),
                env={"GIT_INDEX_FILE": str(self._copy)},
                what="the index could not be written",
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the index. Raises PublishError if another git command holds it, or has changed it since."""
        self._take_lock()
        try:
            if self.stamp() != self._stamp:
                raise PublishError(
                    FailureCode.LOCKED, "another git command has changed the index", "let that command end"
                )
            yield
        finally:
            with suppress(FileNotFoundError):
                if self._lock.stat().st_ino == self._held:
                    self._lock.unlink()
            self._held = 0

    def _take_lock(self) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                _share(self._copy, self._lock)
            except FileExistsError:
                with suppress(FileNotFoundError):
                    held = _stamp(self._lock.stat())
                    if time.monotonic() > deadline or held == self._waited_for:
                        self._waited_for = held
                        raise PublishError(
                            FailureCode.LOCKED,
                            f"another git command holds the index ({self._lock})",
                            "let that command end; if none runs, remove the file",
                        ) from None
                time.sleep(_POLL_S)
            else:
                self._held = self._lock.stat().st_ino
                return

    def place(self) -> None:
        """Put the copy in the place of the index, durably. Call it while the index is held."""
        self._lock.replace(self._file)
        folder = os.open(self._file.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _discard(self) -> None:
        self._stamp = None
        for suffix in ("", ".lock", "-again"):
            self._copy.with_name(f"{self._copy.name}{suffix}").unlink(missing_ok=True)


def _share(source: os.PathLike[str], name: os.PathLike[str]) -> None:
    """Give the file a second name, or copy it with its age, by which git knows which entries to distrust."""
    try:
        os.link(source, name, follow_symlinks=False)
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError:  # no hard links on this file system
        handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        os.close(handle)
        shutil.copy2(source, name)


def _stamp(status: os.stat_result) -> _Stamp:
    return status.st_ino, status.st_size, status.st_mtime_ns
