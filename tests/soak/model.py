"""What must be true of a site, independent of how the worker decides.

The model knows what was asked for: which version of each file the CMS wrote, which saves were made, scheduled
and cancelled, and what others did on the remote. It knows nothing of batches and pushes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum

from soak.users import FILLER, post_path

FOLDER_SLUG = "all"
POSTS = tuple(post_path(f"p{number}") for number in range(4))
MEDIA = tuple(f"content/media/p{number}.txt" for number in range(4))
LINK = "content/posts/link.md"
REFUSED = frozenset(
    {"nopaths", "malformed", "unreadable", "unknown-type", "too-large", "rejected", "conflict"}
)
ENVIRONMENT = frozenset(
    {"network", "timeout", "remote-missing", "remote-refused", "wrong-branch", "unfinished-operation"}
)
"""Failures of what is around these sites; any other failure is a defect, here or there."""


def post_text(first: str, last: str) -> str:
    """Return a post: the CMS writes its first line, a colleague its last one."""
    return "\n".join([first, *FILLER, last, ""])


def first_line(content: bytes | None) -> str | None:
    """Return the CMS's line; None where there is no file."""
    return None if content is None else content.decode().split("\n", 1)[0]


def last_line(content: bytes) -> str:
    """Return the colleague's line."""
    return content.decode().splitlines()[-1]


def iso(moment: float) -> str:
    """Return the time as JavaScript writes it."""
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Fate(Enum):
    """What became of a save, as far as events say."""

    OPEN = "open"
    DONE = "published, or nothing to publish"
    SUPERSEDED = "superseded"
    CANCELLED = "cancelled"
    UNKNOWN = "gone while a worker died"


@dataclass(slots=True)
class Save:
    """One job that the CMS wrote."""

    id: str
    slug: str
    paths: tuple[str, ...]
    created: float
    until: float
    refused: str = ""
    """The failure code with which it must be refused."""
    fate: Fate = Fate.OPEN
    attempts: int = 0
    deaths: int = 0
    is_tried: bool = False
    """A dry run has built it."""


@dataclass(slots=True)
class Model:
    """Everything that the site was asked for."""

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
        """Note that the CMS wrote this version."""
        self.versions.setdefault(path, []).append(version)

    def save(self, save: Save, now: float, existing: list[str]) -> None:
        """Note the save; `existing` are the posts that a folder stands for."""
        self.saves[save.id] = save
        if save.refused:
            return
        scheduled_paths = self.scheduled_paths(now)
        for path in existing if save.slug == FOLDER_SLUG else save.paths:
            if path in self.versions and path not in scheduled_paths:
                self.owed[save.slug, path] = len(self.versions[path]) - 1
        if save.slug != FOLDER_SLUG:
            for path in save.paths:
                if path in self.versions:
                    self.owed[save.slug, path] = len(self.versions[path]) - 1
                if save.until > now:
                    self.owed.pop((FOLDER_SLUG, path), None)  # no folder may carry it now

    def excuse(self, slug: str) -> None:
        """Expect nothing of this slug any more: it was cancelled, or refused with a reason."""
        for key in [key for key in self.owed if key[0] == slug]:
            del self.owed[key]

    def open(self, slug: str) -> list[Save]:
        """Return the slug's saves of which no event told the end, newest first."""
        found = [save for save in self.saves.values() if save.slug == slug and save.fate is Fate.OPEN]
        return sorted(found, key=lambda save: save.created, reverse=True)

    def scheduled_paths(self, now: float, waiting: set[str] | None = None) -> set[str]:
        """Return the paths of scheduled saves: the newest save of a slug counts for all of them."""
        paths: set[str] = set()
        for slug in {save.slug for save in self.saves.values()} - {FOLDER_SLUG}:
            saves = [save for save in self.open(slug) if waiting is None or save.id in waiting]
            if saves and saves[0].until > now:
                paths.update(path for save in saves for path in save.paths)
        return paths

    def secrets(self, now: float, waiting: set[str]) -> set[str]:
        """Return the versions that may not be in git before their time."""
        latest = {
            self.versions[path][-1] for path in self.scheduled_paths(now, waiting) if path in self.versions
        }
        return {version for version in latest if version is not None} - self.seen

    def is_contested(self, path: str) -> bool:
        """Return True if a conflict over this file would be a true one."""
        return path in self.disputed or (path in self.touched and None in self.versions.get(path, ()))

    def may_fail_with(self, save: Save, code: str) -> bool:
        """Return True if this failure code can be right for this save."""
        match code:
            case "conflict":
                return save.slug == FOLDER_SLUG or any(self.is_contested(path) for path in save.paths)
            case "rejected":
                return self.refusing
            case "killed-worker":
                return save.deaths > 0  # with failures before it, the first may be one too many
            case _:
                return code == save.refused or code in ENVIRONMENT

    def is_settled(self, path: str, number: int, first_line: str | None) -> bool:
        """Return True if the remote's first line is that version of the CMS's, or a later one."""
        return first_line in self.versions[path][number:]
