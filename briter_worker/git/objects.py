"""Reads objects: commits, trees and blobs, all through one `git cat-file --batch`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cached_property
from typing import IO, TYPE_CHECKING, NoReturn, Self, cast

from briter_worker.errors import Failure, PublishError
from briter_worker.git import causes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from briter_worker.git.command import Commands
    from briter_worker.git.watch import Process

FOLDER, LINK, NESTED = "40000", "120000", "160000"
_FETCHED_LATE = "from promisor remote"
"""Git was to get an object from where a clone without contents has them all."""
_NOT_THERE = re.compile(r"not our ref|unadvertised object")


@dataclass(frozen=True, slots=True)
class Entry:
    """What a tree holds under a name."""

    mode: str
    sha: str

    @property
    def is_folder(self) -> bool:
        """Whether it is a tree."""
        return self.mode == FOLDER


class MissingError(PublishError):
    """There is no such object, neither here nor where this repository gets what it has not."""

    def __init__(self, kind: str, sha: str) -> None:
        super().__init__(
            Failure.CORRUPT,
            f"the repository has no {kind} {sha}. "
            "Fix: restore it from the remote (git fetch --refetch) or a backup, see git fsck --full",
        )


class Objects:
    """The repository's objects. Close it after the batch: it holds a process."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._process: Process | None = None
        self._trees: dict[str, Tree] = {}
        self._folders: dict[str, Folder] = {}
        self.elsewhere: Callable[[str], bytes | None] | None = None
        """Where a version may be kept that the repository has not."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            with self._commands.watch.watched(process, "cat-file"):
                cast("IO[bytes]", process.stdin).close()
                process.wait()

    def read(self, name: str) -> tuple[str, bytes] | None:
        """The kind and content of an object, or None where there is none of that name."""
        process = self._process
        if process is None:
            process = self._process = self._commands.spawn(["cat-file", "--batch"], feed=True)
        with self._commands.watch.awaiting(process):
            found = _ask(process, name)
        return self._ended(process, name) if found is None else found or None

    def _ended(self, process: Process, name: str) -> NoReturn:
        self._process = None
        with self._commands.watch.watched(process, "cat-file"):
            said = cast("IO[bytes]", process.stderr).read().decode(errors="replace")
        if _FETCHED_LATE in said:
            failure = causes.from_git("a version of a file could not be fetched", said)
            if failure.failure in (Failure.INTERNAL, Failure.CORRUPT) or _NOT_THERE.search(said):
                raise MissingError("object", name)
            raise failure
        raise PublishError(
            Failure.CORRUPT,
            f"the repository could not be read: {said or 'git cat-file ended'}. "
            "Fix: look at what is damaged with git fsck --full",
        )

    def blob(self, sha: str | None) -> bytes:
        """A blob's content; nothing for None, which stands for a file that is not there."""
        return b"" if sha is None else self._need(sha, "blob")

    def version(self, sha: str | None) -> bytes:
        """As `blob`, of what may be kept elsewhere alone."""
        kept = self.elsewhere(sha) if self.elsewhere is not None and sha is not None else None
        return self.blob(sha) if kept is None else kept

    def tree(self, commit: str) -> Tree:
        """The tree of a commit."""
        known = self._trees.get(commit)
        if known is None:
            header = self._need(commit, "commit")
            known = self._trees[commit] = Tree(self, header[5 : header.index(b"\n")].decode())
        return known

    def folder(self, sha: str) -> Folder:
        """What a tree object holds itself."""
        known = self._folders.get(sha)
        if known is None:
            known = self._folders[sha] = Folder(self._need(sha, "tree"), len(sha) // 2)
        return known

    def _need(self, sha: str, kind: str) -> bytes:
        found = self.read(sha)
        if found is None or found[0] != kind:
            raise MissingError(kind, sha)
        return found[1]


def _ask(process: Process, name: str) -> tuple[str, bytes] | tuple[()] | None:
    """An object's kind and content; nothing where there is none; None where git ended before all was read."""
    stdin, stdout = cast("IO[bytes]", process.stdin), cast("IO[bytes]", process.stdout)
    try:
        stdin.write(os.fsencode(name) + b"\n")
        stdin.flush()
    except BrokenPipeError:
        return None
    line = stdout.readline()
    if not line.endswith(b"\n"):
        return None
    header = line.split()
    if len(header) != 3:  # noqa: PLR2004 - sha, kind, size
        return ()
    size = int(header[2])
    content = stdout.read(size + 1)
    return (header[1].decode(), content[:size]) if len(content) == size + 1 else None


ENTRY = {size: re.compile(rb"([0-7]+) ([^\0]+)\0(.{%d})" % size, re.DOTALL) for size in (20, 32)}
_MODES = (b"100644", b"40000", b"100755", b"120000", b"160000")
_ODD = re.compile(rb"[0-7]{5,6} ")
_FEW = 32
"""So many entries are found one by one; to find more, all are read."""


def span(raw: bytes, name: bytes, size: int) -> tuple[int, int] | None:
    """From where to where a tree object has its entry of this name; `size`: of the names of objects.

    Found without reading all entries, as a folder may have 100,000, and a post is looked for in it.
    """
    wanted = b" %s\0" % name
    at = raw.find(wanted)
    while at >= 0:
        mode = next((mode for mode in _MODES if raw.endswith(mode, 0, at)), b"")
        start = at - len(mode)
        if start == 0 and mode:
            return 0, at + len(wanted) + size
        if not mode and raw[at - 1] in b"01234567":
            return _scan(raw, name, size)  # a mode that git does not write any more, or no entry
        if mode and start > size and not raw[start - size - 1]:
            # Another entry's name may end like this one, and a NUL be there by chance: then its mode is here.
            if _ODD.search(raw, raw.rfind(b"\0", 0, start) + 1, start):
                return _scan(raw, name, size)
            return start, at + len(wanted) + size
        at = raw.find(wanted, at + 1)
    return None


def _scan(raw: bytes, name: bytes, size: int) -> tuple[int, int] | None:
    return next((found.span() for found in ENTRY[size].finditer(raw) if found[2] == name), None)


class Folder:
    """What one tree object holds."""

    def __init__(self, content: bytes = b"", size: int = 20) -> None:
        self.raw = content
        self._size = size
        self._asked = 0

    def get(self, name: str) -> Entry | None:
        """What is there under this name."""
        wanted = os.fsencode(name)
        self._asked += 1
        if self._asked > _FEW:
            found = self._all.get(wanted)
            return None if found is None else _entry(found)
        place = span(self.raw, wanted, self._size)
        return (
            None
            if place is None
            else _entry(cast("re.Match[bytes]", ENTRY[self._size].match(self.raw, *place)).groups())
        )

    def items(self) -> Iterator[tuple[str, Entry]]:
        """All of it, in git's order."""
        for found in self._all.values():
            yield os.fsdecode(found[1]), _entry(found)

    @cached_property
    def _all(self) -> dict[bytes, tuple[bytes, ...]]:
        return {found[1]: found for found in ENTRY[self._size].findall(self.raw)}


def _entry(found: Sequence[bytes]) -> Entry:
    return Entry(found[0].decode(), found[2].hex())


_NOTHING = Folder()


class Tree:
    """A commit's tree, read folder by folder as it is asked for."""

    def __init__(self, objects: Objects, sha: str) -> None:
        self._objects = objects
        self.sha = sha
        self._folders: dict[str, Folder] = {"": objects.folder(sha)}

    def entry(self, path: str) -> Entry | None:
        """What is at `path`; None where nothing is, also where a parent is no folder."""
        parent, _, name = path.rpartition("/")
        return self._folder(parent).get(name)

    def _folder(self, path: str) -> Folder:
        known = self._folders.get(path)
        if known is None:
            entry = self.entry(path)
            known = self._objects.folder(entry.sha) if entry is not None and entry.is_folder else _NOTHING
            self._folders[path] = known
        return known

    def files(self, folder: str, *, nested: bool = False) -> Iterator[tuple[str, Entry]]:
        """Every file and link below `folder`; `nested`: also each repository, which is not looked into."""
        for name, entry in self._folder(folder).items():
            path = f"{folder}/{name}" if folder else name
            if entry.is_folder:
                yield from self.files(path, nested=nested)
            elif nested or entry.mode != NESTED:
                yield path, entry
