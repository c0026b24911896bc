"""Git repositories, read and changed by git's own plumbing: no code is shared with the worker."""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import dataclass
from hashlib import sha1
from typing import TYPE_CHECKING

from sites import PERSON

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

Blob = tuple[str, str]
"""A mode and a blob's id."""
Tree = dict[str, Blob]
GITLINK = "160000"
LAX = ("-c", "core.protectNTFS=false", "-c", "core.protectHFS=false")
"""For a repository that was made where nobody thought of other systems."""
_FORMAT = "--format=%x01%H%x02%P%x02%an <%ae>%x02%cn <%ce>%x02%ct%x02%B%x02"


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit to the letter."""

    sha: str
    parents: tuple[str, ...]
    author: str
    committer: str
    when: int
    message: str
    touched: Mapping[str, Blob]
    """Mode and blob after it, by path; of a merge, nothing."""


def run_git(
    folder: Path, *args: str, stdin: bytes = b"", index: Path | str = ""
) -> subprocess.CompletedProcess[bytes]:
    """Run git as a person, perhaps with another index."""
    env = {**os.environ, "GIT_INDEX_FILE": str(index)} if index else None
    command = ["git", *PERSON, *args]
    return subprocess.run(command, cwd=folder, input=stdin, capture_output=True, env=env, check=False)


def git(
    folder: Path, *args: str, stdin: bytes = b"", index: Path | str = "", ok: tuple[int, ...] = (0,)
) -> str:
    """Run git; return its output without the last line ending. Raises AssertionError."""
    done = run_git(folder, *args, stdin=stdin, index=index)
    assert done.returncode in ok, f"git {' '.join(args)}: {done.stderr.decode(errors='replace')}"
    return os.fsdecode(done.stdout).rstrip("\n")


def try_git(folder: Path, *args: str) -> str | None:
    """Run git; return its output, stripped, or None if it fails or the folder is away."""
    try:
        done = run_git(folder, *args)
    except FileNotFoundError:
        return None
    return os.fsdecode(done.stdout).strip() if done.returncode == 0 else None


def join(paths: Iterable[str]) -> bytes:
    """Encode paths as git reads them with `-z`."""
    return b"".join(os.fsencode(path) + b"\0" for path in paths)


def blob_of(content: bytes) -> str:
    """Return the name that git gives this content."""
    return sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def read_tree(repository: Path, commit: str = "main") -> Tree:
    found: Tree = {}
    for line in git(repository, "ls-tree", "-r", "-z", "--full-tree", commit).split("\0")[:-1]:
        about, _, path = line.partition("\t")
        mode, _, sha = about.split()
        found[path] = (mode, sha)
    return found


def read_blobs(repository: Path, shas: Iterable[str]) -> dict[str, bytes]:
    asked = "".join(f"{sha}\n" for sha in shas).encode()
    raw = run_git(repository, "cat-file", "--batch", stdin=asked).stdout
    found: dict[str, bytes] = {}
    while raw:
        head, _, rest = raw.partition(b"\n")
        sha, _, size = head.decode().split(" ")
        found[sha], raw = rest[: int(size)], rest[int(size) + 1 :]
    return found


def read_files(repository: Path, commit: str = "main") -> dict[str, bytes]:
    """Return the content of every file of a commit."""
    tree = read_tree(repository, commit)
    blobs = read_blobs(repository, {sha for _, sha in tree.values()})
    return {path: blobs[sha] for path, (_, sha) in tree.items()}


def read_history(repository: Path, *options: str, stdin: bytes = b"") -> Iterator[Commit]:
    """Yield the commits that `git log` lists with these options, newest first."""
    raw = ("--raw", "-z", "--no-renames", "--no-abbrev", _FORMAT)
    for entry in git(repository, "log", *raw, *options, stdin=stdin).split("\x01")[1:]:
        sha, parents, author, committer, when, message, changes = entry.split("\x02", 6)
        parts = changes.lstrip("\0\n").split("\0")
        touched: Tree = {}
        for about, path in zip(parts[::2], parts[1::2], strict=False):
            _, mode, _, blob, _ = about.lstrip(":").split()
            touched[path] = (mode, blob)
        yield Commit(sha, tuple(parents.split()), author, committer, int(when), message, touched)


def fsck(repository: Path) -> list[str]:
    """Return what git finds wrong with a repository."""
    done = run_git(repository, "fsck", "--strict", "--no-dangling")
    return [f"fsck of {repository.name}: {done.stdout!r} {done.stderr!r}"] if done.returncode else []


def write_blob(repository: Path, content: bytes) -> Blob:
    return "100644", git(repository, "hash-object", "-w", "--stdin", stdin=content)


def build_commit(repository: Path, parent: str, changes: Mapping[str, Blob | None], message: str) -> str:
    """Return a new commit after `parent`, made without the repository's index and work tree."""
    with tempfile.TemporaryDirectory() as folder:
        index = f"{folder}/index"
        git(repository, *LAX, "read-tree", parent, index=index)
        lines = []
        for path, blob in changes.items():
            mode, sha = blob or ("0", "0" * 40)
            lines.append(f"{mode} {sha}\t{path}")
        git(
            repository,
            *LAX,
            "update-index",
            "--add",
            "--replace",
            "-z",
            "--index-info",
            stdin=join(lines),
            index=index,
        )
        tree = git(repository, *LAX, "write-tree", index=index)
    return git(repository, "commit-tree", tree, "-p", parent, "-m", message)
