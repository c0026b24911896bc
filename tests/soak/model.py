"""What must be true of a site, told without a word of how the worker decides.

The model knows what was asked for: which version of each file the CMS wrote, which saves were made, held,
cancelled, and what others did on the remote. It knows nothing of batches, pushes or settling.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

FOLDER_SLUG = "all"
REFUSED = frozenset(
    {"nopaths", "malformed", "unreadable", "unknown-type", "too-large", "rejected", "conflict"}
)
SURROUNDINGS = frozenset(
    {"network", "timeout", "remote-missing", "remote-refused", "wrong-branch", "unfinished-operation"}
)
"""What can go wrong around these sites; anything else that is told is a defect, here or there."""


class Fate(Enum):
    """What became of a save, as far as anybody was told."""

    OPEN = "open"
    DONE = "published, or nothing to publish"
    SUPERSEDED = "superseded"
    CANCELLED = "cancelled"
    UNTOLD = "gone while a worker died"


@dataclass(slots=True)
class Save:
    """One job that the CMS wrote."""

    id: str
    slug: str
    paths: tuple[str, ...]
    created: float
    until: float
    refused: str = ""
    """The word with which it must be refused."""
    fate: Fate = Fate.OPEN
    attempts: int = 0
    deaths: int = 0


@dataclass(slots=True)
class Model:
    """Everything that was asked of the site."""

    saves: dict[str, Save] = field(default_factory=dict)
    versions: dict[str, list[str | None]] = field(default_factory=dict)
    """What the CMS wrote into each file's first line, in order; None where it deleted the file."""
    owed: dict[tuple[str, str], int] = field(default_factory=dict)
    """For a slug and a path: the number of the version that the remote must have in the end, or a later."""
    feet: dict[str, str] = field(default_factory=dict)
    """What somebody else wrote last into each file's last line, on the remote."""
    touched: set[str] = field(default_factory=set)
    """Paths that somebody else changed in any way."""
    disputed: set[str] = field(default_factory=set)
    """Paths in which somebody else changed what the CMS writes, too."""
    seen: set[str] = field(default_factory=set)
    """Versions that were in git once: they are no secret any more."""
    refusing: bool = False
    """Whether the remote has ever refused what it was sent."""

    def write(self, path: str, version: str | None) -> None:
        """The CMS wrote this version."""
        self.versions.setdefault(path, []).append(version)

    def save(self, save: Save, now: float, existing: list[str]) -> None:
        """The CMS asks for the save; `existing` are the posts that a folder stands for."""
        self.saves[save.id] = save
        if save.refused:
            return
        on_hold = self.on_hold(now)
        for path in existing if save.slug == FOLDER_SLUG else save.paths:
            if path in self.versions and path not in on_hold:
                self.owed[save.slug, path] = len(self.versions[path]) - 1
        if save.slug != FOLDER_SLUG:
            for path in save.paths:
                if path in self.versions:
                    self.owed[save.slug, path] = len(self.versions[path]) - 1
                if save.until > now:
                    self.owed.pop((FOLDER_SLUG, path), None)  # no folder may carry it now

    def excuse(self, slug: str) -> None:
        """What this slug asked for need not come: it was cancelled, or refused with a reason."""
        for key in [key for key in self.owed if key[0] == slug]:
            del self.owed[key]

    def leave_out(self, path: str, version: str | None) -> None:
        """A dry run committed this version, and the remote has rejected it: it is kept, and told of.

        The job had left the queue as published, by the contract; so nobody is owed it who is not waiting.
        """
        for slug, number in [(slug, number) for (slug, each), number in self.owed.items() if each == path]:
            if version in self.versions[path][number:] and not self.open(slug):
                del self.owed[slug, path]

    def open(self, slug: str) -> list[Save]:
        """The slug's saves of which nobody has been told the end, newest first."""
        found = [save for save in self.saves.values() if save.slug == slug and save.fate is Fate.OPEN]
        return sorted(found, key=lambda save: save.created, reverse=True)

    def on_hold(self, now: float, waiting: set[str] | None = None) -> set[str]:
        """The paths that only a save on hold declares: the newest save of a slug counts for all of them."""
        paths: set[str] = set()
        for slug in {save.slug for save in self.saves.values()} - {FOLDER_SLUG}:
            saves = [save for save in self.open(slug) if waiting is None or save.id in waiting]
            if saves and saves[0].until > now:
                paths.update(path for save in saves for path in save.paths)
        return paths

    def secrets(self, now: float, waiting: set[str]) -> set[str]:
        """The versions that may not get into git before their time."""
        latest = {self.versions[path][-1] for path in self.on_hold(now, waiting) if path in self.versions}
        return {version for version in latest if version is not None} - self.seen

    def is_contested(self, path: str) -> bool:
        """Whether a conflict over this file would be a true one."""
        return path in self.disputed or (path in self.touched and None in self.versions.get(path, ()))

    def may_fail_with(self, save: Save, word: str) -> bool:
        """Whether this word can be the truth about this save."""
        match word:
            case "conflict":
                return save.slug == FOLDER_SLUG or any(self.is_contested(path) for path in save.paths)
            case "rejected":
                return self.refusing
            case "killed-worker":
                return save.deaths > 0  # with failures before it, the first may be one too many
            case _:
                return word == save.refused or word in SURROUNDINGS

    def is_settled(self, path: str, number: int, first_line: str | None) -> bool:
        """Whether the remote's first line of a file is that version of the CMS's, or a later one."""
        return first_line in self.versions[path][number:]
