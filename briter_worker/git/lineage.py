"""How files on the remote came to be as they are: by the worker's own commits, or by somebody else's.

A post whose push landed and was never settled is on the remote, and nobody knows: the author's next save is
an edit of that, not of what was settled last. A cache has no history, and the push may have been another
host's, so it is asked of the remote; only for a file that is not as its author found it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from briter_worker.git.cache import Cache
    from briter_worker.git.commits import Person

_COMMIT = "\x01"
_MORE = (50, 1000)
"""How many more commits are fetched at a time: what is further back than that was settled long ago."""


class _Step(NamedTuple):
    is_ours: bool
    old: str | None
    new: str | None


class Lineage:
    """Follows files back through the remote's history. Used within one publication."""

    def __init__(self, cache: Cache, identity: Person) -> None:
        self._cache = cache
        self._commands = cache.commands
        self._identity = f"{identity.name} <{identity.email}>"
        self._known: dict[tuple[str, str, str | None], str | None] = {}
        """By commit, path and start, what the start has become by our hands."""

    def versions_of_ours(self, starts: Mapping[str, str | None], tip: str) -> dict[str, str | None]:
        """What the worker's own commits have made of these versions, of those they have made anything of."""
        new = {path: start for path, start in starts.items() if (tip, path, start) not in self._known}
        if new:
            found = self._followed(new, tip)
            self._known |= {(tip, path, start): found.get(path, start) for path, start in new.items()}
        known = {path: self._known[tip, path, start] for path, start in starts.items()}
        return {path: version for path, version in known.items() if version != starts[path]}

    def _followed(self, starts: Mapping[str, str | None], tip: str) -> dict[str, str | None]:
        found: dict[str, str | None] = {}
        open_ = dict(starts)
        further = iter(_MORE)
        while True:
            steps = self._steps(open_, tip)
            for path in list(open_):
                chain = _since(steps.get(path, []), open_[path])
                if chain is not None:
                    found[path] = _by_us(chain, open_.pop(path))
            more = next(further, None) if open_ else None
            if more is None or not self._cache.deepen(more):
                return found

    def _steps(self, paths: Mapping[str, str | None], tip: str) -> dict[str, list[_Step]]:
        """What each commit of the branch that is here did to these paths, newest first."""
        out = self._commands.run(
            *("--literal-pathspecs", "log", "--first-parent", "-m", "--raw", "-z", "--no-renames"),
            *("--no-abbrev", "--encoding=UTF-8", f"--format={_COMMIT}%H %cn <%ce>", "--stdin"),
            stdin="\n".join([tip, "--", *paths, ""]).encode(errors="surrogateescape"),
            doing="the remote's history could not be read",
        )
        boundary = set(self._cache.boundary())
        steps: dict[str, list[_Step]] = {}
        is_ours = at_boundary = False
        fields = iter(os.fsdecode(out).split("\0"))
        for part in fields:
            text = part.lstrip("\n")
            if text.startswith(_COMMIT):
                sha, _, committer = text.removeprefix(_COMMIT).partition(" ")
                is_ours, at_boundary = committer.strip() == self._identity, sha in boundary
            elif text.startswith(":"):
                old_mode, new_mode, old, new, _ = text[1:].split(" ")
                path = next(fields)
                if not at_boundary:  # what it changed is not known: its parent is not here
                    steps.setdefault(path, []).append(
                        _Step(
                            is_ours,
                            None if set(old_mode) == {"0"} else old,
                            None if set(new_mode) == {"0"} else new,
                        )
                    )
        return steps


def _since(steps: list[_Step], start: str | None) -> list[_Step] | None:
    """The steps that lead on from this version, oldest first; None where it is not found."""
    for i, step in enumerate(steps):
        if step.old == start:
            return steps[i::-1]
    return None


def _by_us(steps: list[_Step], start: str | None) -> str | None:
    for step in steps:
        if not step.is_ours or step.old != start:
            break
        start = step.new
    return start
