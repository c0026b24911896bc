"""What differs between two commits, by path."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from briter_worker.git.objects import Entry

if TYPE_CHECKING:
    from briter_worker.git.command import Commands


@dataclass(frozen=True, slots=True)
class Difference:
    """One path that differs between two commits."""

    old: Entry | None
    new: Entry | None


def between(commands: Commands, old: str, new: str) -> dict[str, Difference]:
    """What changed between two commits."""
    return parsed(commands.run("diff-tree", "-r", "-z", "--raw", "--no-renames", "--no-abbrev", old, new))


def parsed(raw: bytes) -> dict[str, Difference]:
    """What git prints with `--raw -z`."""
    fields = raw.split(b"\0")[:-1]
    found: dict[str, Difference] = {}
    for header, name in zip(fields[::2], fields[1::2], strict=True):
        old_mode, new_mode, old, new, _ = header[1:].decode().split(" ")
        found[os.fsdecode(name)] = Difference(
            None if set(old_mode) == {"0"} else Entry(old_mode, old),
            None if set(new_mode) == {"0"} else Entry(new_mode, new),
        )
    return found
