"""Writes what came from the remote into the work tree, where the CMS has not touched it."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from briter_worker.errors import PublishError
from briter_worker.git import refs
from briter_worker.git.attributes import Attributes
from briter_worker.git.commits import Writer
from briter_worker.git.folders import Folders, Refused, kind_of, read_all

if TYPE_CHECKING:
    from collections.abc import Mapping

    from briter_worker.git.command import Commands
    from briter_worker.git.objects import Entry, Objects


class WriteBack:
    """Brings files to the version of one commit. Used once."""

    def __init__(self, commands: Commands, objects: Objects, commit: str) -> None:
        self._commands = commands
        self._objects = objects
        self._tree = objects.tree(commit)
        self._folders = Folders(commands.worktree)

    def write(self, wanted: Mapping[str, tuple[Entry | None, str | None]]) -> set[str]:
        """Write each path's entry (None: remove it) over the version that is expected there.

        Returns the paths that are now as wanted; a file that is not as expected is not touched.
        """
        filtered = Attributes(self._commands, self._tree).filtered(wanted)
        written: set[str] = set()
        try:
            # Removals first: a file may take a folder's place.
            for path, (entry, expected) in sorted(wanted.items(), key=lambda item: item[1][0] is not None):
                # One file that cannot be written keeps its base, and stops no other.
                with suppress(OSError, Refused, PublishError):
                    if entry is None:
                        done = self._remove(path, expected, filtered=path in filtered)
                    else:
                        done = self._put(path, entry, expected, filtered=path in filtered)
                    if done:
                        written.add(path)
        finally:
            self._folders.close()
        return written

    def _remove(self, path: str, expected: str | None, *, filtered: bool) -> bool:
        before = self._version(path, filtered=filtered)
        if before is None:
            return True
        if before[0] != expected or not self._unchanged(path, before[1]):
            return False
        parent, _, name = path.rpartition("/")
        os.unlink(name, dir_fd=self._folders.open(parent))
        with suppress(OSError, Refused):
            while parent:
                self._folders.remove(parent)
                parent = parent.rpartition("/")[0]
        return True

    def _put(self, path: str, entry: Entry, expected: str | None, *, filtered: bool) -> bool:
        parent, _, name = path.rpartition("/")
        before = self._version(path, filtered=filtered)
        executable = entry.mode == "100755"
        if before is not None and before[0] == entry.sha:
            if bool(before[1].st_mode & stat.S_IXUSR) != executable:
                with self._folders.file(parent, name) as file:
                    os.fchmod(file, _mode(executable=executable))
            return True
        if (before[0] if before else None) != expected:
            return False
        content = self._objects.blob(entry.sha)
        if filtered:
            content = self._commands.run("cat-file", "--filters", f"--path={path}", entry.sha)
        self._folders.make(parent)  # refuses a link on the way
        # In git's own folder: a folder that a job declares must not carry it if we die here.
        handle, temporary = tempfile.mkstemp(prefix=refs.TEMPORARY, dir=self._commands.repo.git_dir)
        try:
            with os.fdopen(handle, "wb") as made:
                made.write(content)
            _like_a_checkout(Path(temporary), os.fstat(self._folders.open(parent)), executable=executable)
            # As late as can be: what the CMS has saved meanwhile stays.
            if not self._unchanged(path, before[1] if before else None):
                return False
            # Into the folder that was looked at: a link that takes its place meanwhile leads nowhere.
            os.replace(temporary, name, dst_dir_fd=self._folders.open(parent))
        finally:
            Path(temporary).unlink(missing_ok=True)
        return True

    def _version(self, path: str, *, filtered: bool) -> tuple[str, os.stat_result] | None:
        """The blob that the file in the work tree would be, and its status; None where there is none."""
        parent, _, name = path.rpartition("/")
        try:
            if kind_of(self._folders.open(parent), name) is None:
                return None
            with self._folders.file(parent, name) as fd:
                status = os.fstat(fd)
                content = read_all(fd, status.st_size)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not filtered:
            return Writer(self._commands, tip=self._tree.sha).hash(content), status
        out = self._commands.run("hash-object", "--stdin", f"--path={path}", stdin=content)
        return out.decode().strip(), status

    def _unchanged(self, path: str, before: os.stat_result | None) -> bool:
        parent, _, name = path.rpartition("/")
        try:
            now = os.stat(name, dir_fd=self._folders.open(parent), follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return before is None
        return before is not None and (now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns) == (
            before.st_ino,
            before.st_size,
            before.st_mtime_ns,
            before.st_ctime_ns,
        )


def _like_a_checkout(file: Path, folder: os.stat_result, *, executable: bool) -> None:
    """The mode git gives, and the folder's owner: the CMS has to be able to edit it."""
    file.chmod(_mode(executable=executable))
    if os.geteuid() == 0:
        os.chown(file, folder.st_uid, folder.st_gid)


def _mode(*, executable: bool) -> int:
    return (0o777 if executable else 0o666) & ~_UMASK


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


_UMASK = _umask()
"""Read once, while there is one thread: reading it means setting it."""
