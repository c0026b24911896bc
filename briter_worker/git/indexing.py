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

from briter_worker.errors import Failure, PublishError
from briter_worker.git import causes
from briter_worker.git.differences import between, parsed
from briter_worker.git.refs import TEMPORARY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from briter_worker.git.objects import Entry
    from briter_worker.git.site import Site

_PATIENCE = 1.0
"""Somebody's `git add` is over by then; an editor, or a lock that was left behind, is not."""
_GLANCE = 0.01
_DOING = "it is published, but the index could not be written"
_Step = tuple[tuple[str, ...], bytes]
"""What `git update-index` is asked for, and what it reads."""


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
        self._is_wanted: Callable[[], bool] = lambda: True

    @contextmanager
    def held(self, is_wanted: Callable[[], bool]) -> Iterator[None]:
        """No other git changes the index inside, nor commits. Where another one holds it, that one goes on.

        Then git itself refuses what `put` wants: who holds the index has read the branch before it moved, and
        git does not let them commit onto another. `is_wanted` is asked right before a change takes place.
        """
        self._is_wanted = is_wanted
        held = self._held = self._taken()
        try:
            yield
        finally:
            self._held = False
            if held:
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
        self._change(*self._to_put(entries))

    def _to_put(self, entries: Mapping[str, Entry | None]) -> list[_Step]:
        gone = "0" * len(self._site.tips().local)
        lines = b"".join(
            (f"0 {gone}\t" if entry is None else f"{entry.mode} {entry.sha}\t").encode()
            + os.fsencode(path)
            + b"\0"
            for path, entry in sorted(entries.items(), key=lambda item: item[1] is not None)
        )
        return [(("-z", "--add", "--replace", "--index-info"), lines)] if lines else []

    def follow(self, old: str, new: str, *, own: Iterable[str] = ()) -> None:
        """Bring the index from one commit to the other, but for what somebody else has staged. As `put`."""
        differences = between(self._commands, old, new)
        out = self._commands.run("diff-index", "--cached", "-z", "--raw", "--no-renames", "--no-abbrev", old)
        staged = parsed(out).keys() - set(own)
        left_out = self.left_out()
        steps = self._to_put({path: each.new for path, each in differences.items() if path not in staged})
        again = sorted(path for path, each in differences.items() if path in left_out and each.new)
        if again:
            steps.append(
                (
                    ("-z", "--skip-worktree", "--stdin"),
                    b"".join(os.fsencode(path) + b"\0" for path in again),
                )
            )
        self._change(*steps)

    def left_out(self) -> set[str]:
        """What a sparse checkout keeps out of the work tree."""
        marks = self._commands.run("ls-files", "-z", "-t")
        return {os.fsdecode(line[2:]) for line in marks.split(b"\0") if line.startswith(b"S ")}

    def _change(self, *steps: _Step) -> None:
        if not steps:
            return
        if not self._held:
            self._check_wanted()
            self._run(steps, {})
            return
        try:
            # Only who holds the site has these names: what is there was left by a git that was killed.
            for left in (self._copy, Path(f"{self._copy}.lock")):
                left.unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                _share(self._file, self._copy)
            # Git writes another file, flushes it (core.fsync), and gives it the copy's name.
            self._run(steps, {"GIT_INDEX_FILE": str(self._copy)})
            self._check_wanted()
            self._copy.replace(self._file)
        except OSError as error:
            raise causes.from_os(_DOING, error) from error

    def _run(self, steps: Iterable[_Step], extra: Mapping[str, str]) -> None:
        for options, lines in steps:
            self._commands.run("update-index", *options, stdin=lines, doing=_DOING, extra=extra)

    def _check_wanted(self) -> None:
        if not self._is_wanted():
            raise PublishError(Failure.WRONG_BRANCH, f"{_DOING}: it is another branch's now")


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
