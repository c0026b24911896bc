"""What declared paths stand for: in a work tree, opened without ever following a link, and in a commit."""

from __future__ import annotations

import errno
import os
import stat
from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from briter_worker.allowlist import PathRefusedError, Refusal, is_inside, nearest, parents
from briter_worker.errors import OS_FIXES, FailureCode, PublishError, os_error_fix, os_error_text
from briter_worker.git.leases import is_open_for_writing
from briter_worker.git.repository import FOLDER, SUBMODULE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from pathlib import Path

    from briter_worker.allowlist import Allowlist
    from briter_worker.errors import Failure
    from briter_worker.git.repository import Entry, Repository

OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_ACCESS = frozenset({errno.EACCES, errno.EPERM})
"""Says something about one file; any other error that has a fix says something about the machine."""
_ANY_SIZE = 2**63
_WRITING_S = 10.0
"""A program that has written nothing for this long only keeps the file open."""

_SUBMODULE = Refusal("it is inside a nested repository (a submodule)", "publish it from that repository")
Stamp = tuple[int, ...]
"""Distinguishes the states of a file."""


class Folders:
    """Folders of one work tree. Close it afterwards.

    Every method raises PathRefusedError for a link, a special file, a nested repository or a way out.
    """

    def __init__(self, root: Path) -> None:
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._folder, self._open = "", os.dup(self._root)
        self._walked: list[tuple[str, int]] = []
        """The folders of a walk that are open, each below the one before."""

    def close(self) -> None:
        """Close every folder."""
        for _, descriptor in self._walked:
            os.close(descriptor)
        os.close(self._open)
        os.close(self._root)

    def open(self, folder: str) -> int:
        """Return the descriptor of a folder, valid until the next call.

        Raises FileNotFoundError or NotADirectoryError where there is no such folder.
        """
        if folder != self._folder:
            found = descend(self._root, folder, _open_folder)
            os.close(self._open)
            self._folder, self._open = folder, found
        return self._open

    def walk_to(self, folder: str) -> int:
        """Return the descriptor of a folder, as `open` does, for a walk: each folder before those in it.

        The folders above stay open, so that each folder is opened once, however deep it is.
        """
        while self._walked and not is_inside(self._walked[-1][0], folder):
            os.close(self._walked.pop()[1])
        above, descriptor = self._walked[-1] if self._walked else ("", self._root)
        found = descend(descriptor, folder.removeprefix(above).strip("/"), _open_folder)
        self._walked.append((folder, found))
        return found

    def status(self, path: str) -> os.stat_result | None:
        """Return the status of what is at the path, a link itself; None where nothing is."""
        parent, _, name = path.rpartition("/")
        try:
            return os.stat(name, dir_fd=self.open(parent), follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def stamp(self, path: str) -> Stamp | None:
        """Return the state of a file; None where no regular file can be seen."""
        try:
            status = self.status(path)
        except (OSError, PathRefusedError):
            return None
        return stamp_of(status) if status and stat.S_ISREG(status.st_mode) else None

    def is_being_written(self, path: str, now: float) -> bool:
        """Return True if a program has the file open for writing, and has written to it just now."""
        parent, _, name = path.rpartition("/")
        try:
            fd = _open_at(self.open(parent), name, OPEN_FILE)
        except (OSError, PathRefusedError):
            return False
        try:
            return abs(now - os.fstat(fd).st_mtime) < _WRITING_S and is_open_for_writing(fd) is True
        finally:
            os.close(fd)

    def changed_at(self, folder: str) -> float:
        """Return when the last name in the folder came or went; of no folder, long ago."""
        try:
            return os.fstat(self.open(folder)).st_mtime
        except (OSError, PathRefusedError):
            return 0.0

    def list(self, folder: str) -> list[tuple[str, int]]:
        """Return the names and kinds (`st_mode`) of what a folder holds, sorted."""
        with os.scandir(self.open(folder)) as entries:
            return sorted((entry.name, _kind(entry)) for entry in entries)

    def read(self, path: str, max_bytes: int, most: int = _ANY_SIZE) -> tuple[os.stat_result, bytes | None]:
        """Return status and content of a regular file; of more than `most` bytes, no content.

        The content may be a byte too long: then the file has grown. Raises PublishError for a file that is
        larger than `max_bytes`.
        """
        parent, _, name = path.rpartition("/")
        fd = _open_at(self.open(parent), name, OPEN_FILE)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise _refusal(path, status.st_mode)
            if status.st_size > max_bytes:
                raise PublishError(
                    FailureCode.TOO_LARGE,
                    f"{path} has {status.st_size} bytes, more than the {max_bytes} allowed",
                    "make it smaller, or raise BRITER_WORKER_MAX_FILE_BYTES",
                )
            if status.st_size > most:
                return status, None
            with os.fdopen(fd, "rb", closefd=False) as file:
                return status, file.read(status.st_size + 1)
        finally:
            os.close(fd)


class PlainFile(NamedTuple):
    """A file in place of one in a work tree; its content may have to be fetched."""

    mode: str
    size: int
    content: bytes | None
    blob: str


class PlainFiles(Folders):
    """Files by their paths, in place of a work tree: no links, and no folder that is declared."""

    def __init__(self, files: Mapping[str, PlainFile], fetch: Callable[[str], bytes]) -> None:
        """Take the files, and what returns the content of a blob."""
        self._files = files
        self._fetch = fetch

    def close(self) -> None:
        """Do nothing."""

    def status(self, path: str) -> os.stat_result | None:
        """Return what counts of a file's status; None where nothing is."""
        if path not in self._files:
            return None
        file = self._files[path]
        return os.stat_result((int(file.mode, 8), 0, 0, 1, 0, 0, file.size, 0, 0, 0))

    def read(self, path: str, max_bytes: int, most: int = _ANY_SIZE) -> tuple[os.stat_result, bytes | None]:  # noqa: ARG002 - as those of a work tree
        """Return status and content of a file."""
        status = self.status(path)
        if status is None:
            raise FileNotFoundError(path)
        file = self._files[path]
        return status, self._fetch(file.blob) if file.content is None else file.content


class Tree:
    """The part of a commit's tree at and below some paths."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self.get = entries.get
        self._paths = sorted(path for path, entry in entries.items() if entry.mode != FOLDER)

    def below(self, folder: str) -> Iterator[str]:
        """Yield every file, link and submodule below the folder."""
        at = bisect_left(self._paths, f"{folder}/")
        while at < len(self._paths) and self._paths[at].startswith(f"{folder}/"):
            yield self._paths[at]
            at += 1

    def is_in_submodule(self, path: str) -> bool:
        """Return True if the path is a submodule, or inside one."""
        entries = (self.get(each) for each in (*parents(path), path))
        return any(entry is not None and entry.mode == SUBMODULE for entry in entries)


@dataclass(slots=True)
class Staged:
    """The files that the declared paths of one job stand for in a work tree, and their changes."""

    places: dict[str, str] = field(default_factory=dict)
    """The safe path of each declared path that the allowlist accepts."""
    files: dict[str, None] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    """Declared paths that are folders."""
    absent: dict[str, None] = field(default_factory=dict)
    """Declared paths where nothing is."""
    rejected: dict[str, Refusal] = field(default_factory=dict)
    """Reasons, by declared path, or by the path below a declared folder: what the branch has there stays."""
    ignored: dict[str, Refusal] = field(default_factory=dict)
    """Reasons for what is silently left out below a declared folder: what the branch has there stays."""
    gone: dict[str, None] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    """Declared paths that have nothing to publish, neither in the work tree nor in the commit."""
    withheld: dict[str, float] = field(default_factory=dict)
    """Files that scheduled jobs declare, and the time they are scheduled for."""
    stashed: dict[str, str] = field(default_factory=dict)
    """Files that a stash has another version of, made after the save, and the name of the stash.

    Empty: git has written a conflict into the file since the save.
    """
    changes: dict[str, Entry | None] = field(default_factory=dict)
    """By path, deletions (None) first. A file without content has its blob in the repository."""
    unchanged: dict[str, str | None] = field(default_factory=dict)
    """The blobs of paths that came with the claim and are what the tip has; empty for a work tree."""
    uses_lfs: bool = False
    failure: Failure | None = None
    """Set when this claim alone cannot be published."""

    def expand(self, folders: Folders, allowlist: Allowlist, declared: str) -> None:
        """Add the files that a declared path stands for. Raises PublishError for an unreadable folder."""
        try:
            path = self.places[declared] = allowlist.resolve(declared)
            if status := folders.status(path):
                self._add(folders, allowlist, path, status.st_mode)
            else:
                self.absent[path] = None
        except PathRefusedError as refused:
            self.rejected[declared] = refused.refusal
        except OSError as error:
            raise unreadable(declared, error) from error

    def _add(self, folders: Folders, allowlist: Allowlist, top: str, mode: int) -> None:
        todo = [(top, mode)]
        while todo:
            path, mode = todo.pop()
            full = f"{path}/" if stat.S_ISDIR(mode) else path
            if path != top and (excluded := allowlist.exclusion(full)):
                self.ignored[path] = excluded
                continue
            try:
                allowlist.resolve(full)
                if stat.S_ISREG(mode):
                    self.files[path] = None
                elif not stat.S_ISDIR(mode):
                    raise _refusal(path, mode)
                else:
                    with suppress(FileNotFoundError, NotADirectoryError):  # it has just been removed
                        todo += [(f"{path}/{name}", kind) for name, kind in reversed(folders.list(path))]
                    self.folders += [path] if path == top else []
            except PathRefusedError as refused:
                if path == top:
                    raise
                self.rejected[path] = refused.refusal

    def compare(self, tree: Tree, allowlist: Allowlist) -> None:
        """Find what the commit has and the work tree has not; what is refused there stays."""
        for path in [path for path in self.files if tree.is_in_submodule(path)]:
            del self.files[path]
            self.rejected[path] = _SUBMODULE
        for declared, place in self.places.items():
            if tree.is_in_submodule(place):
                self.rejected[declared] = _SUBMODULE
            if declared in self.rejected:
                continue
            for path in (place, *tree.below(place)):
                entry = tree.get(path)
                lineage = (each for each in (path, *parents(path)) if is_inside(place, each))
                is_here = path in self.files or any(each in self.rejected for each in lineage)
                if is_here or entry is None or entry.mode in (FOLDER, SUBMODULE):
                    continue
                with suppress(PathRefusedError):
                    allowlist.resolve(path)
                    self.gone[path] = None

    def withhold(self, scheduled: Mapping[str, float], of_programs: Collection[str] = ()) -> None:
        """Leave out what scheduled jobs declare, unless a producer declared a more specific path.

        `of_programs`: declared paths that no producer declared.
        """
        places = {place for declared, place in self.places.items() if declared not in of_programs}
        for paths in (self.files, self.gone):
            for path in list(paths) if scheduled else ():
                theirs = nearest(path, scheduled)
                ours = nearest(path, places) or ""
                is_more_specific = ours == path or (theirs is not None and len(ours) > len(theirs))
                if theirs is not None and not is_more_specific:
                    self.withheld[path] = scheduled[theirs]
                    del paths[path]

    def has_unchanged_places(self) -> bool:
        """Return True if a declared path is no changed file: it is unchanged, missing or a folder."""
        return not self.changes.keys() >= set(self.places.values())

    def note_stashed(self, paths: Iterable[str], stash: str) -> None:
        """Note those paths of a stash that the job declares, and of which it has no change."""
        places = set(self.places.values())
        for path in paths:
            if path not in self.changes and not places.isdisjoint((path, *parents(path))):
                self.stashed.setdefault(path, stash)

    def leave_out_conflicts(self, paths: Iterable[str]) -> None:
        """Leave out changed files into which git has written a conflict: nobody saved these contents."""
        for path in paths:
            del self.changes[path]
            self.stashed[path] = ""

    def ignore(self, paths: Iterable[str], reason: Refusal) -> None:
        """Leave out these files; what is declared so is rejected."""
        for path in paths:
            del self.files[path]
            self.ignored[path] = reason
            if path in self.places.values():
                self.rejected[path] = reason

    def find_missing(self, tree: Tree, declared: Iterable[str], lost: Collection[str] = ()) -> None:
        """Find the declared paths that have nothing to publish; `lost`: files that are gone by now."""
        found = {*self.files, *self.gone, *self.withheld, *self.ignored, *self.rejected}.difference(lost)
        found.difference_update(set(declared) - self.places.keys())  # no paths of the site at all
        present = {each for path in found for each in (path, *parents(path))}
        for path, place in self.places.items():
            if path not in self.rejected and place not in present and tree.get(place) is None:
                self.missing.append(path)

    def reject_empty_folders(self, tree: Tree) -> None:
        """Reject a folder in which everything is rejected or ignored."""
        left_out = {**self.rejected, **self.ignored}
        for folder in self.folders:
            carried = any(is_inside(folder, path) for path in (*self.files, *self.gone, *self.withheld))
            first = next((path for path in left_out if is_inside(folder, path)), None)
            if first and not carried and next(tree.below(folder), None) is None:
                text = f"nothing in it may be published ({first}, as {left_out[first].text})"
                self.rejected[folder] = Refusal(text, left_out[first].fix)


def read_tree(repository: Repository, commit: str, places: set[str]) -> dict[str, Entry]:
    """Return what the commit has at, above and below these paths."""
    wanted = {*places, *(each for path in places for each in parents(path))}
    entries = repository.entries(commit, wanted)
    folders = [path for path in places if path in entries and entries[path].mode == FOLDER]
    if folders:
        entries |= repository.entries_below(commit, folders, with_folders=True)
    return entries


def unreadable(path: str, error: OSError | MemoryError) -> PublishError:
    """Return the failure of one job whose file or folder cannot be read."""
    if isinstance(error, MemoryError):
        fix = "make the file smaller, or give the machine more memory"
        return PublishError(FailureCode.UNSETTLED, f"{path} does not fit into memory", fix)
    is_of_machine = error.errno in OS_FIXES and error.errno not in _NO_ACCESS
    code = FailureCode.DISK if is_of_machine else FailureCode.UNSETTLED
    reason = os_error_text(error, with_path=False)
    return PublishError(code, f"{path} cannot be read: {reason}", os_error_fix(error))


def stamp_of(status: os.stat_result) -> Stamp:
    """Return the state of a file."""
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_mode)


def _refusal(path: str, mode: int) -> PathRefusedError:
    """Return the refusal of what is neither a file nor a folder."""
    if stat.S_ISLNK(mode):
        return PathRefusedError(path, "it is, or is below, a symbolic link", "put the file itself there")
    return PathRefusedError(path, "it is not a regular file", "put a regular file there")


def descend(root: int, folder: str, step: Callable[[int, str], int]) -> int:
    """Open a folder part by part; `step` opens one part."""
    found = os.dup(root)
    try:
        for part in folder.split("/") if folder else ():
            below = step(found, part)
            os.close(found)
            found = below
    except BaseException:
        os.close(found)
        raise
    return found


def _open_at(folder: int, name: str, flags: int) -> int:
    try:
        return os.open(name, flags, dir_fd=folder)
    except OSError:
        mode = _mode_at(folder, name)
        if mode is not None and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise _refusal(name, mode) from None
        raise


def _open_folder(above: int, name: str) -> int:
    fd = _open_at(above, name, OPEN_FOLDER)
    try:
        _check_folder(fd, name)
    except PathRefusedError:
        os.close(fd)
        raise
    return fd


def _check_folder(fd: int, folder: str) -> None:
    bare = ("HEAD", "objects", "refs")
    if _mode_at(fd, ".git") is not None or all(_mode_at(fd, name) is not None for name in bare):
        raise PathRefusedError(folder, "it is inside a nested repository", "publish it from that repository")
    for rules in (".gitignore", ".gitattributes"):
        mode = _mode_at(fd, rules)
        if mode is not None and stat.S_ISFIFO(mode):
            text = f"{folder}/{rules} is a pipe, on which git would wait for ever"
            raise PathRefusedError(folder, text, "remove the pipe")


def _mode_at(folder: int, name: str) -> int | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return None


def _kind(entry: os.DirEntry[str]) -> int:
    if entry.is_symlink():
        return stat.S_IFLNK
    if entry.is_dir(follow_symlinks=False):
        return stat.S_IFDIR
    return stat.S_IFREG if entry.is_file(follow_symlinks=False) else stat.S_IFIFO
