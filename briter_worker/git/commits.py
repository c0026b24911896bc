"""Commits: write a batch of them with one `git fast-import`, and find the worker's own ones again."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from briter_worker.git.run import Git

_SHA1_DIGITS = 40
_PROGRESS_STEP = 100
_COMMIT = "\x01"


@dataclass(frozen=True, slots=True)
class Person:
    """An author or committer, as git records it."""

    name: str
    email: str

    def line(self, now: float) -> bytes:
        """Return name, address and time in git's raw format."""
        return f"{self} {int(now)} +0000".encode()

    def __str__(self) -> str:
        """Return name and address, as git shows them."""
        return f"{self.name} <{self.email}>"


@dataclass(frozen=True, slots=True)
class File:
    """A file of a commit. `content` is given where the repository may lack the blob."""

    mode: str
    blob: str
    content: bytes | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit to write. `files` maps each changed path to its new file; None deletes the path."""

    message: bytes
    author: bytes
    committer: bytes
    files: Mapping[str, File | None]


@dataclass(frozen=True, slots=True)
class OwnCommit:
    """A commit of the worker's on the remote, and the blobs of each path before and after it."""

    sha: str
    message: bytes
    blobs: Mapping[str, tuple[str | None, str | None]]


def blob_id(content: bytes, like: str) -> str:
    """Return git's object id of a file's content; `like` is any id of the same repository."""
    kind = hashlib.sha1 if len(like) == _SHA1_DIGITS else hashlib.sha256
    digest = kind(b"blob %d\0" % len(content), usedforsecurity=False)
    digest.update(content)
    return digest.hexdigest()


def write_commits(
    git: Git,
    commits: Sequence[Commit],
    *,
    parent: str,
    ref: str,
    progress: Callable[[str, int, int], None],
) -> list[str]:
    """Write the commits on top of `parent`, point `ref` at the last one, and return their ids in order.

    Commits, trees, blobs and the ref are durable when this returns. Raises PublishError.
    """
    names: list[str] = []
    # With core.ignoreCase, fast-import would write a file to another one whose name differs in case only.
    command = ("-c", "core.ignoreCase=false", "fast-import", "--quiet", "--done")
    with git.open(*command, what="the commits could not be written") as process:
        send, answers = cast("IO[bytes]", process.stdin), cast("IO[bytes]", process.stdout)
        for number, commit in enumerate(commits, start=1):
            if number % _PROGRESS_STEP == 1:
                progress("commit", number - 1, len(commits))
            _send_commit(send, commit, ref=ref, mark=number, parent="" if names else parent)
            name = answers.readline().decode().strip()
            if not name:
                raise EOFError
            names.append(name)
        send.write(b"done\n")
    progress("commit", len(commits), len(commits))
    return names


def _send_commit(send: IO[bytes], commit: Commit, *, ref: str, mark: int, parent: str) -> None:
    send.write(b"commit %s\nmark :%d\n" % (ref.encode(), mark))
    send.write(b"author %s\ncommitter %s\n" % (commit.author, commit.committer))
    _send_data(send, commit.message)
    if parent:
        send.write(b"from %s\n" % parent.encode())
    # Deletions first, because a file may take a folder's place.
    for path, file in sorted(commit.files.items(), key=lambda item: item[1] is not None):
        if file is None:
            send.write(b"D %s\n" % _quote(path))
        elif file.content is None:
            send.write(b"M %s %s %s\n" % (file.mode.encode(), file.blob.encode(), _quote(path)))
        else:
            send.write(b"M %s inline %s\n" % (file.mode.encode(), _quote(path)))
            _send_data(send, file.content)
    send.write(b"\nget-mark :%d\n" % mark)
    send.flush()


def _send_data(send: IO[bytes], data: bytes) -> None:
    send.write(b"data %d\n" % len(data))
    send.write(data)
    send.write(b"\n")


def _quote(path: str) -> bytes:
    escaped = os.fsencode(path).replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n")
    return b'"%s"' % escaped


def read_own_commits(git: Git, since: str, tip: str, identity: Person) -> list[OwnCommit]:
    """Return the commits between `since` and `tip` whose committer is the worker, oldest first."""
    out = git.run(
        *("log", "--reverse", "--topo-order", "--no-merges", "--raw", "-z", "--no-renames", "--no-abbrev"),
        *("--encoding=UTF-8", "--fixed-strings", f"--committer={identity}", f"--format={_COMMIT}%H%n%B"),
        *(f"{since}..{tip}", "--"),
        what="the remote's new commits could not be read",
    )
    found: list[OwnCommit] = []
    blobs: dict[str, tuple[str | None, str | None]] = {}
    fields = iter(out.split(b"\0"))
    for part in fields:
        text = part.lstrip(b"\n")
        if text.startswith(_COMMIT.encode()):
            sha, _, message = text[1:].partition(b"\n")
            blobs = {}
            found.append(OwnCommit(sha.decode(), message.strip(), blobs))
        elif text.startswith(b":"):
            old_mode, new_mode, old, new, _ = text[1:].decode().split(" ")
            path = os.fsdecode(next(fields))
            blobs[path] = (old if old_mode.strip("0") else None, new if new_mode.strip("0") else None)
    return found
