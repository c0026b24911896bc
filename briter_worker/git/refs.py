"""The worker's own refs, and how any ref is read: without git, as that is asked many times a batch.

Not with GitPython, which knows SHA-1 only, and fails an assertion where a power cut has emptied a file.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PRIVATE = "refs/briter"
"""Everything below is the worker's own."""
DRY_RUN = "dry-run"
UNINDEXED = "unindexed"
TEMPORARY = "briter-new-"
"""How the names of files begin, in the git folder, that are about to be moved into the work tree."""

_VALUE = re.compile(rb"([0-9a-f]{64}|[0-9a-f]{40})(?:\s|\Z)")
_SYMBOLIC = re.compile(rb"ref:\s*(refs/[^\s\0]+)\s*\Z")
_DEEPEST = 5


class BrokenRefError(Exception):
    """A ref's file holds nothing that git could have written."""

    def __init__(self, name: str, path: Path) -> None:
        super().__init__(f"{path} is damaged")
        self.name = name
        self.path = path


def of_branch(branch: str) -> str:
    """Below what is kept for this branch, and for no other."""
    # As one part of a name: the refs of branches `a` and `a/dry-run` must not be in each other's way.
    return f"{PRIVATE}/branches/{branch.replace('%', '%25').replace('/', '%2F')}"


def read(common: Path, name: str) -> str | None:
    """What a ref below `refs/` points to; None where there is none. Raises BrokenRefError."""
    for _ in range(_DEEPEST):
        try:
            content = (common / name).read_bytes()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return _packed(common, name)
        if value := _VALUE.match(content):
            return value[1].decode()
        if not (target := _SYMBOLIC.match(content)):
            break
        name = target[1].decode(errors="surrogateescape")
    raise BrokenRefError(name, common / name)


def write(common: Path, name: str, value: str | None) -> None:
    """Have a ref point there, or be gone, where each is a file, and nobody else's. Raises OSError."""
    path = common / name
    if value is None:
        path.unlink(missing_ok=True)
        return
    lock = path.with_name(f"{path.name}.lock")
    try:
        lock.write_text(f"{value}\n")
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.write_text(f"{value}\n")
    lock.replace(path)


def head(git_dir: Path) -> str | None:
    """The branch's ref that is checked out, also before its first commit; None where HEAD is detached."""
    content = (git_dir / "HEAD").read_bytes()
    if target := _SYMBOLIC.match(content):
        return target[1].decode(errors="surrogateescape")
    if _VALUE.match(content):
        return None
    raise BrokenRefError("HEAD", git_dir / "HEAD")


def last_logged(common: Path, name: str) -> str | None:
    """What a ref last pointed to, as its log tells."""
    try:
        entries = (common / "logs" / name).read_bytes().splitlines()
    except OSError:
        return None
    for entry in reversed(entries):
        _, _, after = entry.partition(b" ")
        if (value := _VALUE.match(after)) and value[1].strip(b"0"):
            return value[1].decode()
    return None


def _packed(common: Path, name: str) -> str | None:
    try:
        packed = (common / "packed-refs").read_bytes()
    except FileNotFoundError:
        return None
    end = packed.find(f" {name}\n".encode(errors="surrogateescape"))
    if end < 0:
        return None
    value = _VALUE.match(packed[packed.rfind(b"\n", 0, end) + 1 : end])
    return value[1].decode() if value else None
