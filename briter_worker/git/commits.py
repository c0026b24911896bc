"""Writes blobs and commits: a whole batch with one git process.

Nothing is written until the first blob or commit, so a batch without changes costs no process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from briter_worker.git.growing import Growing
from briter_worker.git.packing import BLOB, COMMIT, Pack

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from briter_worker.git.command import Commands
    from briter_worker.git.objects import Entry, Objects


_TELL_EVERY = 100


def _untold(_phase: str, _done: int, _total: int) -> None:
    """Nobody wants to know how far it is."""


@dataclass(frozen=True, slots=True)
class Person:
    """An author or committer, as git records it."""

    name: str
    email: str

    def line(self, now: float) -> bytes:
        """Name, address and moment, in git's raw format."""
        return f"{self.name} <{self.email}> {int(now)} +0000".encode()


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit to write. `entries` maps each path to what it becomes; None deletes it."""

    message: bytes
    author: bytes
    committer: bytes
    entries: Mapping[str, Entry | None]


class Writer:
    """Writes blobs and commits into the repository; no ref points to them yet."""

    def __init__(
        self, commands: Commands, *, tip: str, progress: Callable[[str, int, int], None] = _untold
    ) -> None:
        self._progress = progress
        self._commands = commands
        self._pack = Pack(commands, len(tip) // 2)

    def hash(self, content: bytes) -> str:
        """The name that git gives this content."""
        return self._pack.name(BLOB, content)

    def blob(self, sha: str, content: bytes) -> None:
        """Store a content under its name; the same content is sent once."""
        if not self._pack.has(sha):
            self._pack.add(sha, BLOB, content)

    def commits(self, objects: Objects, parent: str, commits: Sequence[Commit]) -> list[str]:
        """Write the commits, one upon the other; their names, in order.

        Blobs and commits are durable when it returns.
        """
        tree = Growing(objects, self._pack, objects.tree(parent).sha)
        names: list[str] = []
        for done, commit in enumerate(commits):
            if done % _TELL_EVERY == 0:
                self._progress("commit", done, len(commits))
            content = b"tree %s\nparent %s\nauthor %s\ncommitter %s\n\n%s" % (
                tree.commit(commit.entries).encode(),
                (names[-1] if names else parent).encode(),
                commit.author,
                commit.committer,
                commit.message,
            )
            names.append(self._pack.name(COMMIT, content))
            self._pack.add(names[-1], COMMIT, content)
        self.close()
        self._progress("commit", len(commits), len(commits))
        return names

    def close(self) -> None:
        """What was sent is durable, and can be read, when it returns."""
        self._pack.send()

    def give_up(self) -> None:
        """Forget what has not been written."""
        self._pack.give_up()
