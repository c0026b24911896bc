"""Which posts to enqueue, given what changed: a function of values, without a look at anything."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from briter_worker.allowlist import is_inside, parents

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from briter_worker.watch.ledger import Version

_PAGE_FILES = {"kirby": "*.txt", "grav": "*.md"}
"""A folder with such a file is one post; for every other kind of site, a folder with an `index.*` is."""
EMPTY_BLOBS = frozenset(
    {
        "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391",
        "473a0f4c3be8a93681a267e3b1e9a7dcda1185436fe141f7749120a303721813",
    }
)


class Change(NamedTuple):
    """A file that differs from the ledger."""

    path: str
    old: Version | None
    """The version that was handed over last; None for a new file."""
    new: Version | None
    """None for a file that is gone."""


class Save(NamedTuple):
    """A job to write."""

    slug: str
    paths: tuple[str, ...]
    message: str | None = None
    """None: the worker's own words."""


@dataclass(frozen=True)
class Posts:
    """The rules by which files belong to posts."""

    folders: Sequence[str]
    """The allowed folders."""
    adapter: str
    names_in: Callable[[str], Iterable[str]]
    """Returns the names of the files in a folder: those there now, and those of the ledger."""
    _pages: dict[str, bool] = field(default_factory=dict)

    def slug(self, path: str) -> str:
        """Return the post's name: its path below the allowed folder, without its extension."""
        top = max((folder for folder in self.folders if is_inside(folder, path)), key=len)
        place = PurePosixPath(path).relative_to(top)
        for folder in place.parents[:-1]:
            if self.is_page(f"{top}/{folder}"):
                return str(folder)
        return str(place.with_suffix("")) if place.suffix else str(place)

    def is_page(self, folder: str) -> bool:
        """Return True if the folder is one post."""
        if folder not in self._pages:
            self._pages[folder] = any(self.is_page_file(name) for name in self.names_in(folder))
        return self._pages[folder]

    def is_page_file(self, name: str) -> bool:
        """Return True if a file of this name makes its folder one post."""
        return fnmatchcase(name, _PAGE_FILES.get(self.adapter, "index.*"))


def decide(changes: Collection[Change], posts: Posts, remains: Callable[[str], bool]) -> list[Save]:
    """Return the jobs to write: one a post.

    A post that was renamed is one job, and so are files that take the place of a folder, or the reverse.
    `remains` returns True if the post of this slug still has files.
    """
    groups: dict[str, list[Change]] = {}
    for change in sorted(changes):
        groups.setdefault(posts.slug(change.path), []).append(change)
    _join_places(groups)
    renamed = _join_renamed(groups)
    saves = []
    for slug, files in groups.items():
        message = None
        if slug in renamed:
            message = f"Rename {renamed[slug]} to {slug}"
        elif all(file.new is None for file in files) and not remains(slug):
            message = f"Remove {slug}"
        saves.append(Save(slug, tuple(file.path for file in files), message))
    return saves


def renames_of(changes: Iterable[Change]) -> dict[str, list[str]]:
    """Return the new files, by path, that have the content of a file that is gone; and those."""
    gone: dict[str, list[str]] = {}
    new: dict[str, str] = {}
    for change in changes:
        if change.new is None and change.old is not None and change.old.blob not in EMPTY_BLOBS:
            gone.setdefault(change.old.blob, []).append(change.path)
        elif change.old is None and change.new is not None:
            new[change.path] = change.new.blob
    return {path: gone[blob] for path, blob in new.items() if blob in gone}


def replaced_by(changes: Iterable[Change]) -> dict[str, list[str]]:
    """Return the files that are there, by path, in whose place others are gone: above or below; and those."""
    gone: set[str] = set()
    below: dict[str, list[str]] = {}
    there: list[str] = []
    for change in changes:
        if change.new is not None:
            there.append(change.path)
            continue
        gone.add(change.path)
        for folder in parents(change.path):
            below.setdefault(folder, []).append(change.path)
    found = {}
    for path in there:
        if replaced := [*(folder for folder in parents(path) if folder in gone), *below.get(path, ())]:
            found[path] = replaced
    return found


def _join_places(groups: dict[str, list[Change]]) -> None:
    """Put files that are gone into the job of those that are where they were, or below, or above.

    A job that would replace a file by a folder, or a folder by a file, has to declare both.
    """
    gone = {change.path: slug for slug, files in groups.items() for change in files if change.new is None}
    replaced = replaced_by([change for files in groups.values() for change in files])
    for slug in list(groups):
        for change in groups.get(slug, []):
            for other in {gone[path] for path in replaced.get(change.path, ())} - {slug}:
                _merge(groups, other, slug)
                gone.update((each.path, slug) for each in groups[slug] if each.new is None)


def _join_renamed(groups: dict[str, list[Change]]) -> dict[str, str]:
    """Put a post that is gone into the job of the new one with its files; return old slugs by new."""
    partners = renames_of([change for files in groups.values() for change in files])
    slug_of = {change.path: slug for slug, files in groups.items() for change in files}
    renamed: dict[str, str] = {}
    for path, old_paths in partners.items():
        new_slug = slug_of[path]
        old_slugs = {slug_of[old] for old in old_paths} - {new_slug} - set(renamed.values())
        for old_slug in sorted(old_slugs):
            is_gone = old_slug in groups and all(file.new is None for file in groups[old_slug])
            is_new = new_slug not in renamed and all(file.old is None for file in groups[new_slug])
            if is_gone and is_new:
                renamed[new_slug] = old_slug
                _merge(groups, old_slug, new_slug)
                break
    return renamed


def _merge(groups: dict[str, list[Change]], other: str, slug: str) -> None:
    """Move the files of one job into another one."""
    groups[slug] = sorted([*groups[slug], *groups.pop(other)])


def is_declared(path: str, declared: Mapping[str, object] | Collection[str]) -> bool:
    """Return True if the path, or a folder above it, is declared."""
    return path in declared or any(above in declared for above in parents(path))
