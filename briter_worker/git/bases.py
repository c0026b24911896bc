"""The versions that files in the work tree started from, where that is not what the branch has.

When the remote's edit of a file is taken over while the CMS has an unpublished edit of it, the file in the
work tree is left alone. What it started from is kept here, so that its publication merges with the remote's
edit instead of silently reverting it. A conflict keeps all three versions: publishing the same content again
conflicts again, but any other content is its author's answer to the remote's version.

Kept as a tree below a ref: it moves together with the branch, and git keeps the versions alive.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote, unquote

from briter_worker.git.objects import LINK

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from briter_worker.git.command import Commands
    from briter_worker.git.objects import Objects
    from briter_worker.git.site import Site


@dataclass(frozen=True, slots=True)
class Conflict:
    """The two versions that did not go together."""

    ours: str | None
    theirs: str | None


@dataclass(frozen=True, slots=True)
class Base:
    """What a file in the work tree started from (None: there was none)."""

    start: str | None
    conflict: Conflict | None = None

    def of(self, blob: str | None) -> str | None:
        """The version that this content is an edit of."""
        if self.conflict is None or blob == self.conflict.ours:
            return self.start
        return self.conflict.theirs


Bases = dict[str, Base]


class Versions(Protocol):
    """Where it is kept what files started from: below a ref, or in a database."""

    def bases(self, paths: Collection[str]) -> Mapping[str, Base]:
        """What is known of these paths."""
        ...

    def remember(self, bases: Mapping[str, Base], contents: Mapping[str, bytes]) -> None:
        """Keep these, each in the place of what was known of its path.

        `contents`: of those starts that are nowhere else, by blob; wanted as long as they are starts.
        """
        ...


class StoredVersions(Versions, Protocol):
    """Kept apart from the repository, which may be lost."""

    def content(self, blob: str) -> bytes | None:
        """What was kept of a start's content, if anything was."""
        ...


class KeptVersions:
    """Versions below the ref of one repository's branch."""

    def __init__(self, site: Site, objects: Objects) -> None:
        self._site = site
        self._objects = objects

    def bases(self, paths: Collection[str]) -> Mapping[str, Base]:
        """See `Versions`."""
        known = read_bases(self._site, self._objects)
        return {path: known[path] for path in paths if path in known} if known else known

    def remember(self, bases: Mapping[str, Base], contents: Mapping[str, bytes]) -> None:  # noqa: ARG002
        """See `Versions`. The repository has the contents."""
        all_of_them = read_bases(self._site, self._objects) | dict(bases)
        self._site.update((self._site.bases_ref, write_bases(self._site.commands, all_of_them), None))


# A name in the tree is a path, quoted, and one of these; an absent version is an empty link.
_START, _OURS, _THEIRS = "?start", "?ours", "?theirs"


def read_bases(site: Site, objects: Objects) -> Bases:
    """What is known, by path."""
    tree = site.ref(site.bases_ref)
    if tree is None:
        return {}
    found: dict[str, dict[str, str | None]] = {}
    for name, entry in objects.folder(tree).items():
        path, mark, kind = name.partition("?")
        version = None if entry.mode == LINK else entry.sha
        found.setdefault(unquote(path, errors="surrogateescape"), {})[mark + kind] = version
    return {
        path: Base(
            versions.get(_START),
            Conflict(versions.get(_OURS), versions.get(_THEIRS)) if _OURS in versions else None,
        )
        for path, versions in found.items()
    }


def write_bases(commands: Commands, bases: Mapping[str, Base]) -> str | None:
    """The tree that holds these; None where there is nothing to hold."""
    if not bases:
        return None
    absent = commands.run("hash-object", "-w", "--stdin", "--no-filters").decode().strip()
    lines: list[bytes] = []
    for path, base in bases.items():
        versions = {_START: base.start}
        if base.conflict is not None:
            versions |= {_OURS: base.conflict.ours, _THEIRS: base.conflict.theirs}
        name = quote(os.fsencode(path), safe="")
        for kind, sha in versions.items():
            mode = LINK if sha is None else "100644"
            lines.append(f"{mode} blob {sha or absent}\t{name}{kind}\0".encode())
    return commands.run("mktree", "-z", stdin=b"".join(lines)).decode().strip()
