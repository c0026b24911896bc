"""Reads what a job declares, to be sent along with it: where no worker sees the writer's folder.

Every part of a path is opened without following links, as the worker itself does in a work tree. What a
folder's git tells (which version the author started from, what it ignores) is sent along, where there is one.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from briter_worker.allowlist import Allowlist, PathRefusedError, holds
from briter_worker.git.folders import Folders, Refused, kind_of
from briter_worker.ports import Delivered, Delivery

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from briter_worker.git.command import Commands

PART = 1 << 20
"""So much of a file is in memory at once."""
_TRIES = 5
_PAUSE = 0.02
_GIT_TIMEOUT = 60.0
_ANY_SIZE = 2**63


class GatheringError(ValueError):
    """It cannot be sent as it is; the text says why, and what to do."""


@dataclass(frozen=True)
class Gathered:
    """What a job brings along. Contents stay in their files until they are asked for."""

    root: Path
    paths: tuple[str, ...]
    """To declare: without those that are left out."""
    delivery: Delivery
    left_out: Mapping[str, str]
    """Paths that are declared, or in a declared folder, and are not sent, with the reasons."""
    missing: tuple[str, ...]
    """Declared paths where nothing is, nor was in the version that the author started from."""
    places: Mapping[str, str]
    """For each content, by its git blob id, a file that has it."""
    sizes: Mapping[str, int]

    def content(self, blob: str) -> Iterator[bytes]:
        """A content, part by part, as it is by now: to be compared with its id."""
        with _opened(self.root, self.places[blob]) as fd:
            yield from _parts(fd)


@dataclass
class _Draft:
    files: dict[str, tuple[str, int]] = field(default_factory=dict)
    """For each path its mode and size."""
    gone: dict[str, None] = field(default_factory=dict)
    folders: dict[str, bool] = field(default_factory=dict)
    """Whether all that is in it is sent: then what the site has in it besides is deleted."""
    paths: dict[str, None] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def gather(
    root: Path, paths: Sequence[str], *, allowlist: Allowlist, max_bytes: int, saved_at: float
) -> Gathered:
    """Everything below `root` that these paths declare, each file hashed while it held still.

    Raises GatheringError for what cannot be sent as a whole, and OSError for what cannot be read.
    """
    with _git(root) as history:
        draft = _look(root, paths, allowlist, max_bytes)
        history.look(draft.paths)
        _drop_ignored(draft, history)
        _find_gone(draft, history)
        blobs = {path: _hashed(root, path, max_bytes) for path in draft.files}
        files = [
            Delivered(path, mode, blobs[path][0], saved_at, *history.base(path))
            for path, (mode, _) in draft.files.items()
        ]
        gone = [Delivered(path, "", None, saved_at, *history.base(path)) for path in draft.gone]
        return Gathered(
            root,
            tuple(draft.paths),
            Delivery((*files, *gone), tuple(path for path, whole in draft.folders.items() if whole)),
            draft.left_out,
            tuple(path for path in draft.gone if path in draft.paths and not history.had(path)),
            {blob: path for path, (blob, _) in blobs.items()},
            dict(blobs.values()),
        )


def committed(root: Path, paths: Sequence[str]) -> dict[str, str]:
    """The versions of these files that the folder's git has checked out; nothing where it has no git."""
    with _git(root) as history:
        history.look(paths)
        return {path: base for path in paths if (base := history.base(path)[0]) is not None}


def blob_at(root: Path, path: str) -> str | None:
    """The git blob id of the file that is there; None where nothing is. Raises GatheringError for a link."""
    try:
        return _hashed(root, path, _ANY_SIZE)[0]
    except (FileNotFoundError, NotADirectoryError):
        return None


def _look(root: Path, paths: Sequence[str], allowlist: Allowlist, max_bytes: int) -> _Draft:
    draft = _Draft()
    folders = Folders(root)
    try:
        for declared in paths:
            try:
                path = allowlist.resolve(declared)
            except PathRefusedError:
                draft.paths[declared] = None  # not read; the worker refuses it, and says so in the log
                continue
            try:
                _look_at(folders, path, draft, allowlist)
                draft.paths[path] = None
            except Refused as refused:
                draft.left_out[path] = refused.reason
    finally:
        folders.close()
    for path, (_, size) in draft.files.items():
        if size > max_bytes:
            raise _too_large(path, size, max_bytes)
    return draft


def _look_at(folders: Folders, path: str, draft: _Draft, allowlist: Allowlist) -> None:
    parent, _, name = path.rpartition("/")
    try:
        mode = kind_of(folders.open(parent), name)
    except (FileNotFoundError, NotADirectoryError):
        mode = None
    if mode is None:
        draft.gone[path] = None
    elif stat.S_ISDIR(mode):
        before = len(draft.left_out)
        _expand(folders, path, draft, allowlist)
        draft.folders[path] = len(draft.left_out) == before
    else:
        draft.files[path] = _stat(folders, path)


def _expand(folders: Folders, top: str, draft: _Draft, allowlist: Allowlist) -> None:
    """All below a folder."""
    todo = [top]
    while todo:
        folder = todo.pop()
        try:
            listing = folders.listing(folder)
        except FileNotFoundError:
            continue
        except Refused as refused:
            if folder == top:
                raise
            draft.left_out[folder] = refused.reason
            continue
        for name, mode in listing:
            path = f"{folder}/{name}"
            try:
                allowlist.resolve(path)
                if stat.S_ISDIR(mode):
                    todo.append(path)
                else:
                    draft.files[path] = _stat(folders, path)
            except FileNotFoundError:
                continue
            except (PathRefusedError, Refused) as refused:
                draft.left_out[path] = refused.reason


def _stat(folders: Folders, path: str) -> tuple[str, int]:
    parent, _, name = path.rpartition("/")
    with folders.file(parent, name) as fd:
        status = os.fstat(fd)
    return "100755" if status.st_mode & stat.S_IXUSR else "100644", status.st_size


def _hashed(root: Path, path: str, max_bytes: int) -> tuple[str, int]:
    """The blob id and size of a file that holds still."""
    for _ in range(_TRIES):
        with _opened(root, path) as fd:
            before = os.fstat(fd)
            if before.st_size > max_bytes:
                raise _too_large(path, before.st_size, max_bytes)
            digest = _digest(before.st_size)
            read = 0
            for part in _parts(fd):
                digest.update(part)
                read += len(part)
            after = os.fstat(fd)
        if read == before.st_size and after.st_mtime_ns == before.st_mtime_ns:
            return digest.hexdigest(), read
        time.sleep(_PAUSE)
    raise GatheringError(f"{path} keeps changing while it is read. Fix: write it elsewhere, then rename")


def _too_large(path: str, size: int, most: int) -> GatheringError:
    return GatheringError(
        f"{path} has {size} bytes, more than the {most} allowed. "
        "Fix: make it smaller, or raise BRITER_WORKER_MAX_FILE_BYTES"
    )


def _digest(size: int) -> hashlib._Hash:
    return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)


def _parts(fd: int) -> Iterator[bytes]:
    while part := os.read(fd, PART):
        yield part


@contextmanager
def _opened(root: Path, path: str) -> Iterator[int]:
    folders = Folders(root)
    parent, _, name = path.rpartition("/")
    try:
        with folders.file(parent, name) as fd:
            yield fd
    except Refused as refused:
        raise GatheringError(f"{path} cannot be sent: {refused.reason}") from None
    finally:
        folders.close()


class _History:
    """What the folder's git knows; nothing, where it has none."""

    def __init__(self, commands: Commands | None) -> None:
        self._commands = commands
        self._head: dict[str, str] = {}
        self._sparse: set[str] = set()

    def look(self, paths: Iterable[str]) -> None:
        """Read what there was at the version that the author started from."""
        if self._commands is None or not (wanted := list(paths)):
            return
        literal = "--literal-pathspecs"
        listed = self._commands.run(literal, "ls-files", "-z", "-t", "--", *wanted)
        self._sparse = {os.fsdecode(line[2:]) for line in listed.split(b"\0") if line.startswith(b"S ")}
        if not self._commands.run("rev-parse", "--verify", "--quiet", "HEAD", ok=(0, 1)).strip():
            return
        tree = self._commands.run(literal, "ls-tree", "-r", "-z", "HEAD", "--", *wanted)
        for line in tree.split(b"\0"):
            about, given, path = line.partition(b"\t")
            if given and about.split()[1] == b"blob":
                self._head[os.fsdecode(path)] = about.split()[2].decode()

    def base(self, path: str) -> tuple[str | None, bool]:
        """The version that the author started from, and whether it is known that it is that."""
        return self._head.get(path), self._commands is not None

    def had(self, path: str) -> bool:
        """Whether there was a file, or a folder, of this name."""
        return self._commands is None or path in self._head or any(holds(path, each) for each in self._head)

    def is_sparse(self, path: str) -> bool:
        """Whether a sparse checkout leaves it out, or something below it."""
        return any(holds(path, each) for each in self._sparse)

    def below(self, folder: str) -> list[str]:
        """What there was below the folder, or of its name, that a checkout has."""
        return [path for path in self._head if holds(folder, path) and path not in self._sparse]

    def ignored(self, paths: Iterable[str]) -> set[str]:
        """Of these, what git ignores and never had."""
        new = [path for path in paths if path not in self._head]
        if self._commands is None or not new:
            return set()
        lines = b"".join(os.fsencode(path) + b"\0" for path in new)
        out = self._commands.run("check-ignore", "-z", "--stdin", stdin=lines, ok=(0, 1))
        return set(os.fsdecode(out).split("\0")[:-1])


@contextmanager
def _git(root: Path) -> Iterator[_History]:
    if not (root / ".git").exists():
        yield _History(None)
        return
    from briter_worker.git.command import Commands  # noqa: PLC0415 - GitPython costs 50 ms

    commands = Commands(root, remote="origin", timeout=_GIT_TIMEOUT)
    try:
        yield _History(commands)
    finally:
        commands.watch.close()


def _drop_ignored(draft: _Draft, history: _History) -> None:
    for path in history.ignored(draft.files):
        del draft.files[path]
        if path in draft.paths:
            del draft.paths[path]
            draft.left_out[path] = "git ignores it; see git check-ignore -v, and change .gitignore"


def _find_gone(draft: _Draft, history: _History) -> None:
    """What is not there was deleted; but what a sparse checkout leaves out was not, nor what is refused."""
    for path in [path for path in draft.gone if history.is_sparse(path)]:
        del draft.gone[path]
        draft.folders[path] = False
    for folder, whole in draft.folders.items():
        if whole and not history.is_sparse(folder):
            continue
        draft.folders[folder] = False
        for path in history.below(folder):
            if path not in draft.files and not any(holds(each, path) for each in draft.left_out):
                draft.gone[path] = None
