"""Writes blobs and commits: one `git fast-import` for a whole batch.

Nothing is written until the first blob or commit, so a batch without changes costs no process.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, cast

from briter_worker.errors import PublishError
from briter_worker.git import causes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from briter_worker.git.command import Commands, Process
    from briter_worker.git.objects import Entry

_SHA1_DIGITS = 40
_MARKS_AT_ONCE = 500
"""How many answers are asked for before they are read: fewer bytes than a pipe holds."""


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
    """Writes blobs and commits into the repository, below one private ref."""

    def __init__(self, commands: Commands, *, tip: str) -> None:
        self._commands = commands
        self._hash = "sha1" if len(tip) == _SHA1_DIGITS else "sha256"
        self._process: Process | None = None
        self._written: set[str] = set()
        self._marks = 0

    def hash(self, content: bytes) -> str:
        """The name that git gives this content."""
        digest = hashlib.new(self._hash, b"blob %d\0" % len(content), usedforsecurity=False)
        digest.update(content)
        return digest.hexdigest()

    def blob(self, sha: str, content: bytes) -> None:
        """Store a content under its name; the same content is sent once."""
        if sha not in self._written:
            self._written.add(sha)
            self._send(b"blob\ndata %d\n" % len(content), content, b"\n")

    def commits(self, ref: str, parent: str, commits: Sequence[Commit]) -> list[str]:
        """Write the commits, one upon the other, `ref` pointing to the last; their names, in order.

        This ends the session: blobs and commits are durable when it returns.
        """
        for commit in commits:
            self._marks += 1
            start = b"from " + parent.encode() + b"\n" if commit is commits[0] else b""
            self._send(
                b"commit %s\nmark :%d\nauthor %s\ncommitter %s\ndata %d\n"
                % (ref.encode(), self._marks, commit.author, commit.committer, len(commit.message)),
                commit.message,
                b"\n",
                start,
                *_entries(commit.entries),
            )
        names: list[str] = []
        while len(names) < len(commits):
            wanted = range(len(names) + 1, min(len(names) + _MARKS_AT_ONCE, len(commits)) + 1)
            self._send(*(b"get-mark :%d\n" % mark for mark in wanted))
            names += self._answers(len(wanted))
        self.close()
        return names

    def close(self) -> None:
        """End the session: what was sent is durable when it returns."""
        if self._process is None:
            return
        self._send(b"done\n")
        process, self._process = self._process, None
        self._marks = 0
        with self._commands.watched(process, "fast-import"):
            _, err = process.communicate()
        if process.returncode:
            raise _failed(err, process.returncode)

    def give_up(self) -> None:
        """End the session and forget what it was writing."""
        if self._process is not None:
            process, self._process = self._process, None
            with suppress(PublishError), self._commands.watched(process, "fast-import"):
                process.kill()
                process.wait()

    def _send(self, *parts: bytes) -> None:
        process = self._process
        if process is None:
            process = self._process = self._commands.spawn(
                ["fast-import", "--quiet", "--done", "--date-format=raw"], feed=True
            )
        stdin = cast("IO[bytes]", process.stdin)
        try:
            with self._commands.awaiting(process):
                stdin.write(parts[0] if len(parts) == 1 else b"".join(parts))
        except BrokenPipeError:
            self._broke()

    def _answers(self, count: int) -> list[str]:
        process = cast("Process", self._process)
        stdout = cast("IO[bytes]", process.stdout)
        try:
            with self._commands.awaiting(process):
                cast("IO[bytes]", process.stdin).flush()
                answers = [stdout.readline().strip().decode() for _ in range(count)]
        except BrokenPipeError:
            self._broke()
        if not all(answers):
            self._broke()
        return answers

    def _broke(self) -> None:
        process, self._process = self._process, None
        assert process is not None  # noqa: S101 - only called while it runs
        with self._commands.watched(process, "fast-import"):
            err = cast("IO[bytes]", process.stderr).read()
            process.wait()
        raise _failed(err, process.returncode)


def _failed(err: bytes, status: int) -> PublishError:
    # The crash report's path is of no use to a person, and changes each time.
    said = "\n".join(line for line in err.decode(errors="replace").splitlines() if "crash report" not in line)
    return causes.from_git("the commits could not be written", said or causes.wordless(status))


def _entries(entries: Mapping[str, Entry | None]) -> list[bytes]:
    """The changes of a commit; deletions first, as a file may take a folder's place and the reverse."""
    gone = [b"D %s\n" % _quoted(path) for path, entry in entries.items() if entry is None]
    here = [
        b"M %s %s %s\n" % (entry.mode.encode(), entry.sha.encode(), _quoted(path))
        for path, entry in entries.items()
        if entry is not None
    ]
    return gone + here


def _quoted(path: str) -> bytes:
    raw = os.fsencode(path)
    return b'"' + raw.replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n") + b'"'
