"""The index of the site's work tree: changed in a copy, and read without taking anything from git."""

from __future__ import annotations

import json
import os
import shutil
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from briter_worker.errors import FailureCode, PublishError, sync_folder
from briter_worker.git.repository import Entry
from briter_worker.git.work_tree import stamp

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from briter_worker.git.run import Git

_PATIENCE_S = 1.0
"""A user's `git add` holds the lock for less; an editor or a stale lock does not."""
_OWN_LOCK = b"briter-worker"
_POLL_S = 0.01
_SWITCH_S = 0.2
"""`git switch` writes the index, then HEAD: a younger index may be another branch's already."""
_FEW_PATHS = 100
_Stamp = tuple[int, int, int]


class Index:
    """The index, changed in a copy that replaces it under git's own lock: git sees all of it or nothing."""

    def __init__(self, git: Git) -> None:
        self._git = git
        self._file = git.git_dir / "index"
        self._lock = git.git_dir / "index.lock"
        # Linked work trees share the worker's folder.
        self._copy = git.state_dir / f"{git.git_dir.name.strip('.')}-index"
        self._contents = self._copy.with_name(f"{self._copy.name}-files")
        self._copied: _Stamp | None = None
        self._placed: _Stamp | None = None
        """The index as this worker has written it last."""
        self.is_changed = False

    def clear_leftovers(self) -> None:
        """Remove the copy and all that belongs to it, also of a dead worker."""
        self._copied = None
        with suppress(FileNotFoundError):
            if self._lock.read_bytes() == _OWN_LOCK:
                self._lock.unlink()
        self._copy.with_name(f"{self._copy.name}.lock").unlink(missing_ok=True)
        self._copy.unlink(missing_ok=True)
        shutil.rmtree(self._contents, ignore_errors=True)

    def entries(self, paths: Collection[str]) -> tuple[dict[str, Entry], set[str]]:
        """Return the entries of these paths, and which of them git ignores in the work tree.

        They are those of the copy, or of the index while there is no copy. Unmerged ones have no mode.
        """
        few = [f":(top,literal){path}" for path in paths] if len(paths) <= _FEW_PATHS else []
        env = {"GIT_INDEX_FILE": str(self._copy)} if self._copied else {}
        wanted, found, skipped = set(paths), {}, set()
        for line in self._git.fields("ls-files", "-z", "-s", "-v", "--", *few, env=env):
            about, _, path = line.partition("\t")
            if path in wanted:
                tag, mode, blob, stage = about.split(" ")
                found[path] = Entry("" if int(stage) else mode, blob)
                skipped |= {path} if tag in "Ss" else set()
        return found, skipped

    def committed(self, branch: Mapping[str, Entry | None]) -> dict[str, str | None]:
        """Return the branch's blobs that the index has too; none if git is writing it."""
        before = self.stamp()
        staged = self.entries(branch)[0] if before else {}
        if before is None or self.is_locked() or self.stamp() != before:
            return {}
        same = (path for path, entry in branch.items() if staged.get(path) == entry)
        return {path: entry.blob if (entry := branch[path]) else None for path in same}

    def is_locked(self) -> bool:
        """Return True if a git command holds the index."""
        return self._lock.exists()

    def stamp(self) -> _Stamp | None:
        """Return what changes whenever git writes the index."""
        return stamp(self._file.stat()) if self._file.exists() else None

    @contextmanager
    def copied(self) -> Iterator[None]:
        """Work on a copy of the index as it is now."""
        self.clear_leftovers()
        try:
            modified = self._file.stat().st_mtime
            age = time.time() - modified
            if 0 <= age < _SWITCH_S and self.stamp() != self._placed:
                time.sleep(_SWITCH_S - age)
            self._copied, self.is_changed = self.stamp(), False
            try:  # the same file is on the disk already; git never writes into it, but replaces its name
                os.link(self._file, self._copy)
            except OSError:  # no hard links on this file system; the age tells what git may trust
                shutil.copy2(self._file, self._copy)
        except FileNotFoundError as error:
            raise PublishError(FailureCode.CORRUPT, "the repository has no index", "git reset") from error
        try:
            yield
        finally:
            self.clear_leftovers()

    def change(self, entries: Mapping[str, Entry | None]) -> None:
        """Set these entries in the copy; None removes one."""
        if entries:
            set_entries(self._git, entries, {"GIT_INDEX_FILE": str(self._copy)})
            self.is_changed = True

    def skip(self, paths: Collection[str]) -> None:
        """Have git ignore the work tree's files of these paths.

        Without this mark on a file that lacks the branch's version, `git commit -a` would take that back.
        """
        if paths:
            env = {"GIT_INDEX_FILE": str(self._copy)}
            self._git.fields("update-index", "-z", "--skip-worktree", "--stdin", lines=paths, env=env)
            self.is_changed = True

    def check_out(self, paths: Collection[str]) -> Iterator[tuple[str, Path]]:
        """Yield each path, and a file with its content as git writes it into a work tree."""
        if not paths:
            return
        self._contents.mkdir(mode=0o700)
        command = (f"--work-tree={self._contents}", "checkout-index", "--temp", "-z", "--stdin")
        for line in self._git.fields(*command, lines=paths, env={"GIT_INDEX_FILE": str(self._copy)}):
            name, _, path = line.partition("\t")
            yield path, self._contents / name
            (self._contents / name).unlink()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the index. Raises PublishError if another git command holds it, or has changed it since."""
        while not self._try_lock():
            time.sleep(_POLL_S)
        try:
            if self.stamp() != self._copied:
                raise PublishError(
                    FailureCode.LOCKED, "another git command has changed the index", "let that command end"
                )
            yield
        finally:
            self._lock.unlink(missing_ok=True)

    def _try_lock(self) -> bool:
        with suppress(FileNotFoundError):
            try:
                lock = self._lock.open("xb", buffering=0)
            except FileExistsError:
                if abs(time.time() - self._lock.stat().st_mtime) > _PATIENCE_S:
                    raise PublishError(
                        FailureCode.LOCKED,
                        f"another git command holds the index ({self._lock})",
                        "let that command end; if none runs, remove the file",
                    ) from None
                return False
            with lock:
                try:
                    lock.write(_OWN_LOCK)
                except OSError:  # an empty lock would be taken for a user's
                    self._lock.unlink()
                    raise
            return True
        return False

    def place(self) -> None:
        """Put the copy in the place of the index, durably. Call it while the index is held."""
        if self.is_changed:
            self._copy.replace(self._file)
            self._placed = self.stamp()
            sync_folder(self._file.parent)


def set_entries(git: Git, entries: Mapping[str, Entry | None], env: Mapping[str, str]) -> None:
    """Set these entries in the index that `env` names; None removes one."""
    null = "0" * (64 if git.config("extensions.objectFormat") == "sha256" else 40)
    lines = (
        f"{entry.mode} {entry.blob}\t{path}" if entry else f"0 {null}\t{path}"
        for path, entry in sorted(entries.items(), key=lambda item: item[1] is not None)
    )
    git.fields("update-index", "-z", "--index-info", lines=lines, env=env)


def hash_files(git: Git, paths: Collection[str], *options: str) -> list[str]:
    """Return the blob of each file, as git would add it."""
    if not paths:
        return []
    # git unquotes a name as JSON does; a line break in a name would end the line.
    lines = (json.dumps(path, ensure_ascii=False) if '"' in path or "\n" in path else path for path in paths)
    stdin = os.fsencode("".join(f"{line}\n" for line in lines))
    return git.run("hash-object", *options, "--stdin-paths", stdin=stdin).decode().splitlines()
