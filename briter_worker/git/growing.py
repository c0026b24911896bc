"""Trees that grow from commit to commit, each written as what it changes of the one before.

A folder of 10,000 posts is 400 kB of tree, and each commit has another one: most of what a publication
costs. Here a new version costs its hash and a few copied bytes, however many entries it has.
"""

from __future__ import annotations

import os
import zlib
from bisect import bisect_left
from typing import TYPE_CHECKING

from briter_worker.git.objects import ENTRY, FOLDER, Entry, span
from briter_worker.git.packing import TREE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from briter_worker.git.objects import Objects
    from briter_worker.git.packing import Pack, Piece

_DEEPEST = 50
"""So many versions build on one another, as many as git itself puts on one another."""
_SMALL = 1 << 10
"""Bytes of a folder that is not worth a delta."""

_Edit = tuple[int, int, bytes, bytes]
"""From where to where an entry was, what it is sorted by, and what takes its place."""


class Growing:
    """One commit's tree, to be changed and written again and again."""

    def __init__(self, objects: Objects, pack: Pack, tree: str) -> None:
        self._root = _Folder(objects, pack, tree)

    def commit(self, entries: Mapping[str, Entry | None]) -> str:
        """Put these changes into the tree, and add what changed to the pack; the new tree's name.

        Removals come first, as a file may take a folder's place; a folder that becomes empty is gone.
        """
        for path, entry in sorted(entries.items(), key=lambda item: item[1] is not None):
            *folders, name = os.fsencode(path).split(b"/")
            self._root.change(folders, name, entry)
        return self._root.write()


class _Folder:
    """One folder: as it was last written, and what changed since."""

    def __init__(self, objects: Objects, pack: Pack, sha: str | None) -> None:
        self._objects = objects
        self._pack = pack
        self._sha = sha
        self._size = pack.size
        self.raw = objects.folder(sha).raw if sha else b""
        self._depth = 0
        self._inside: dict[bytes, _Folder] = {}
        self._dirty: dict[bytes, _Folder] = {}
        self._changes: dict[bytes, tuple[bytes, bytes] | None] = {}
        """What each name becomes: what it is sorted by, and the entry."""
        self._keys: list[bytes] | None = None
        self._lengths: list[int] = []

    def change(self, folders: list[bytes], name: bytes, entry: Entry | None) -> None:
        """Put a file there, or take it away, this many folders below."""
        if not folders:
            if entry is not None or self._below(name) is None:  # a file is to go, not a folder of its name
                self._put(name, entry)
            return
        first, *rest = folders
        inside = self._below(first)
        if inside is None:
            if entry is None:
                return
            inside = self._inside[first] = _Folder(self._objects, self._pack, None)
        self._dirty[first] = inside
        inside.change(rest, name, entry)

    def write(self) -> str:
        """The name of this folder's tree; it, and all that changed below, is in the pack."""
        for name, inside in self._dirty.items():
            sha = inside.write()
            self._changes[name] = _entry(name, Entry(FOLDER, sha)) if inside.raw else None
        self._dirty.clear()
        before, pieces = self.raw, self._applied()
        sha = self._pack.name(TREE, self.raw)
        if sha != self._sha and not self._pack.has(sha):
            if self._sha is None or self._depth >= _DEEPEST or len(before) < _SMALL:
                self._depth = 0
                # Most of it are names of objects, which no effort makes smaller.
                self._pack.add(sha, TREE, self.raw, level=zlib.Z_BEST_SPEED)
            else:
                self._depth += 1
                self._pack.add_delta(sha, self._sha, (len(before), len(self.raw)), pieces)
        self._sha = sha
        return sha

    def _below(self, name: bytes) -> _Folder | None:
        known = self._inside.get(name)
        if known is None and name not in self._changes:
            place = span(self.raw, name, self._size)
            if place is not None and self._is_folder(place):
                sha = self.raw[place[1] - self._size : place[1]].hex()
                known = self._inside[name] = _Folder(self._objects, self._pack, sha)
        return known

    def _put(self, name: bytes, entry: Entry | None) -> None:
        self._inside.pop(name, None)
        self._dirty.pop(name, None)
        self._changes[name] = None if entry is None else _entry(name, entry)

    def _is_folder(self, place: tuple[int, int]) -> bool:
        return self.raw.startswith(FOLDER.encode() + b" ", place[0])

    def _applied(self) -> list[Piece]:
        """Take the changes over; how the new version comes out of the one before."""
        edits: list[_Edit] = []
        for name, change in self._changes.items():
            place = span(self.raw, name, self._size)
            was = None if place is None else name + b"/" if self._is_folder(place) else name
            if place and was and (change is None or change[0] != was):
                edits.append((*place, was, b""))
            if change is not None:
                start, end = place if place and change[0] == was else self._gap(change[0])
                edits.append((start, end, *change))
        edits.sort()
        pieces: list[Piece] = []
        parts: list[bytes] = []
        at = 0
        for start, end, _, entry in edits:
            if start > at:
                pieces.append((at, start))
                parts.append(self.raw[at:start])
            if entry:
                pieces.append(entry)
                parts.append(entry)
            at = end
        if at < len(self.raw):
            pieces.append((at, len(self.raw)))
            parts.append(self.raw[at:])
        self.raw = b"".join(parts)
        self._reorder(edits)
        self._changes.clear()
        return pieces

    def _gap(self, key: bytes) -> tuple[int, int]:
        """Where an entry with this key belongs."""
        if self._keys is None:
            found = ENTRY[self._size].findall(self.raw)
            self._keys = [name + b"/" if mode == FOLDER.encode() else name for mode, name, _ in found]
            self._lengths = [len(mode) + len(name) + 2 + self._size for mode, name, _ in found]
        at = sum(self._lengths[: bisect_left(self._keys, key)])
        return at, at

    def _reorder(self, edits: list[_Edit]) -> None:
        for start, end, key, entry in edits:
            if self._keys is None:
                return
            i = bisect_left(self._keys, key)
            if start != end:
                if self._keys[i : i + 1] != [key]:
                    self._keys = None  # somebody's tool wrote it out of order
                    return
                del self._keys[i], self._lengths[i]
            if entry:
                self._keys.insert(i, key)
                self._lengths.insert(i, len(entry))


def _entry(name: bytes, entry: Entry) -> tuple[bytes, bytes]:
    key = name + b"/" if entry.is_folder else name
    return key, b"%s %s\0%s" % (entry.mode.encode(), name, bytes.fromhex(entry.sha))
