"""The work tree's index, brought up to what the branch has.

Between a branch that moved and an index that has not, a person's `git commit` would take the posts back:
it commits what the index says. So the index is held, by git's own lock, while the branch moves.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from briter_worker.git import causes
from briter_worker.git.differences import between, parsed
from briter_worker.git.refs import TEMPORARY

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from briter_worker.git.objects import Entry
    from briter_worker.git.site import Site

_PATIENCE = 1.0
"""Somebody's `git add` is over by then; an editor, or a lock that was left behind, is not."""
_GLANCE = 0.01


class Index:
    """Changes the index in a copy, which then takes its place: git sees all of a change or nothing."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._commands = site.commands
        git_dir = Path(site.commands.repo.git_dir)
        self._file = git_dir / "index"
        self._lock = git_dir / "index.lock"
        self._copy = git_dir / f"{TEMPORARY}index"
        self._held = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """No other git changes the index inside, nor commits. Where another one holds it, that one goes on.

        Then git itself refuses what `put` wants: who holds the index has read the branch before it moved, and
        git does not let them commit onto another.
        """
        self._held = self._taken()
        try:
            yield
        finally:
            if self._held:
                self._held = False
                with suppress(OSError):
                    self._copy.unlink(missing_ok=True)  # else `tidy` removes it
                _remove(self._lock)

    @property
    def is_held(self) -> bool:
        """Whether nobody else can change it now."""
        return self._held

    def _taken(self) -> bool:
        if self._site.take_over_index():
            return True
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                os.close(os.open(self._lock, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
            except FileExistsError:
                if time.monotonic() > deadline:
                    return False
                time.sleep(_GLANCE)
            except OSError:
                return False  # git will say it in its own words
            else:
                return True

    def put(self, entries: Mapping[str, Entry | None]) -> None:
        """These paths are in the index as they are here. Raises PublishError; then the index is as it was."""
        gone = "0" * len(self._site.tips().local)
        lines = b"".join(
            (f"0 {gone}\t" if entry is None else f"{entry.mode} {entry.sha}\t").encode()
            + os.fsencode(path)
            + b"\0"
            for path, entry in sorted(entries.items(), key=lambda item: item[1] is not None)
        )
        if lines:
            self._change("-z", "--add", "--replace", "--index-info", stdin=lines)

    def follow(self, old: str, new: str, *, own: Iterable[str] = ()) -> None:
        """Bring the index from one commit to the other, but for what somebody else has staged."""
        differences = between(self._commands, old, new)
        out = self._commands.run("diff-index", "--cached", "-z", "--raw", "--no-renames", "--no-abbrev", old)
        staged = parsed(out).keys() - set(own)
        left_out = self.left_out()
        self.put({path: each.new for path, each in differences.items() if path not in staged})
        again = sorted(path for path, each in differences.items() if path in left_out and each.new)
        if again:
            self._change(
                "-z",
                "--skip-worktree",
                "--stdin",
                stdin=b"".join(os.fsencode(path) + b"\0" for path in again),
            )

    def left_out(self) -> set[str]:
        """What a sparse checkout keeps out of the work tree."""
        marks = self._commands.run("ls-files", "-z", "-t")
        return {os.fsdecode(line[2:]) for line in marks.split(b"\0") if line.startswith(b"S ")}

    def _change(self, *options: str, stdin: bytes) -> None:
        doing = "it is published, but the index could not be written"
        if not self._held:
            self._commands.run("update-index", *options, stdin=stdin, doing=doing)
            return
        try:
            # Only who holds the site has these names: what is there was left by a git that was killed.
            for left in (self._copy, Path(f"{self._copy}.lock")):
                left.unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                _share(self._file, self._copy)
            extra = {"GIT_INDEX_FILE": str(self._copy)}
            # Git writes another file, flushes it (core.fsync), and gives it the copy's name.
            self._commands.run("update-index", *options, stdin=stdin, doing=doing, extra=extra)
            self._copy.replace(self._file)
        except OSError as error:
            raise causes.from_os(doing, error) from error


def _remove(lock: Path) -> None:
    """Tried twice: left behind, it would stop everybody who works there, as if somebody held it."""
    with suppress(OSError):
        lock.unlink(missing_ok=True)
        return
    lock.unlink(missing_ok=True)


def _share(index: Path, copy: Path) -> None:
    """`copy` is what the index is now, with its age: by that git knows of which files it cannot be sure."""
    try:
        # Git never writes into an index, it puts another in its place: one file of many megabytes is enough.
        os.link(index, copy, follow_symlinks=False)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without links, or another's file
        shutil.copy2(index, copy)
