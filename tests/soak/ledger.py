"""What the CMS saved and people committed, and what must be true of the remote then.

The ledger knows nothing of how the worker works.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from soak.repository import blob_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from soak.repository import Commit

WORKER = "Briter Worker <briter-worker@localhost>"
PROMISES = ("lost", "twice", "extra", "wedged", "unsound")
_MODES = {"100644", "100755", "000000"}


@dataclass(frozen=True, slots=True)
class Save:
    """One save of the CMS: a job file that is in the queue for certain."""

    marker: str
    slug: str
    paths: tuple[str, ...]
    files: Mapping[str, bytes | None]
    """What it wrote, by path; None: deleted."""
    message: str
    author: str | None = None
    held_until: float = 0.0


@dataclass(slots=True)
class Ledger:
    """All that happened around the worker, noted by those who did it."""

    saves: list[Save] = field(default_factory=list)
    persons: dict[str, frozenset[str]] = field(default_factory=dict)
    """A person's commits by message, with the paths they meant to commit."""
    committed: set[str] = field(default_factory=set)
    """Those of them that git took, and that have to be on the remote in the end."""
    titles: dict[str, str] = field(default_factory=dict)
    """The first line that another clone has pushed, by path."""
    contested: set[str] = field(default_factory=set)
    """Slugs whose lines another clone changes, too: these may conflict."""

    def newest(self) -> dict[str, Save]:
        """The last save of each slug."""
        return {save.slug: save for save in self.saves}

    def last_writes(self) -> dict[str, tuple[Save, bytes | None]]:
        """What each file of the CMS's has to be in the end, and the save that says so."""
        return {path: (save, content) for save in self.saves for path, content in save.files.items()}


@dataclass(slots=True)
class Found:
    """What broke which promise."""

    lost: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    wedged: list[str] = field(default_factory=list)
    unsound: list[str] = field(default_factory=list)
    """Repositories that `fsck` minds, and files that are left over."""
    figures: Counter[str] = field(default_factory=Counter)

    def add(self, other: Found) -> None:
        for name in PROMISES:
            getattr(self, name).extend(getattr(other, name))
        self.figures.update(other.figures)

    def counts(self) -> dict[str, int]:
        """Return how often each promise was broken, then the other figures."""
        return {name: len(getattr(self, name)) for name in PROMISES} | dict(sorted(self.figures.items()))

    def lines(self) -> list[str]:
        """Return one line for each broken promise."""
        return [f"{name}: {line}" for name in PROMISES for line in getattr(self, name)]


def judge(
    ledger: Ledger, commits: Sequence[Commit], tip: Mapping[str, bytes], dead: Sequence[Mapping[str, Any]]
) -> Found:
    """What of the promises was broken.

    `commits` and `tip` are the remote's, commits newest first; `dead` are the dead letters.
    """
    found = Found()
    by_message = Counter(commit.message for commit in commits)
    saves = Counter(save.message for save in ledger.saves)  # `watch` gives each save of a post the same one
    known = {save.message: save for save in ledger.saves}
    dead_slugs = {letter["slug"] for letter in dead}
    for save in ledger.saves:
        if by_message[save.message] > saves[save.message]:
            found.twice.append(f"{save.marker} of {save.slug} has {by_message[save.message]} commits")
    found.lost += _judge_history(ledger, commits, tip, dead_slugs)
    found.lost += _judge_tip(ledger, tip, dead_slugs)
    found.lost += [f"the commit {each!r} is gone" for each in _gone(ledger, commits)]
    for commit in commits[:-1]:  # the first of all is the fixture's
        found.figures["commits of " + ("the worker" if commit.message in known else "people")] += 1
        if (save_ := known.get(commit.message)) is not None:
            found.extra += _judge_ours(commit, save_, ledger)
        elif commit.message.strip() in ledger.persons:
            wanted = ledger.persons[commit.message.strip()]
            if len(commit.parents) == 1 and commit.touched.keys() != wanted:
                found.extra.append(
                    f"{commit.sha[:10]}, a person's commit of {sorted(wanted)}, has {sorted(commit.touched)}"
                )
        elif len(commit.parents) == 1:
            found.extra.append(f"nobody made {commit.sha[:10]} {commit.message!r}")
    for letter in dead:
        if letter.get("failure") == "conflict" and letter["slug"] not in ledger.contested:
            found.extra.append(f"{letter['slug']} conflicts with nobody: {letter.get('lastError')}")
    return found


def _gone(ledger: Ledger, commits: Sequence[Commit]) -> list[str]:
    there = {commit.message.strip() for commit in commits}
    return sorted(ledger.committed - there)


def _judge_history(
    ledger: Ledger, commits: Sequence[Commit], tip: Mapping[str, bytes], dead_slugs: set[str]
) -> Iterator[str]:
    messages = {commit.message for commit in commits}
    ever = {(path, blob) for commit in commits for path, (_, blob) in commit.touched.items()}
    for slug, save in ledger.newest().items():
        if slug in dead_slugs or slug in ledger.contested or save.message in messages:
            continue
        # Another save's commit may have carried its content, as it is or merged: then nothing was left to do.
        nowhere = [
            path
            for path, data in save.files.items()
            if data is not None
            and (path, blob_of(data)) not in ever
            and data.splitlines()[-1] not in tip.get(path, b"").splitlines()
        ]
        if nowhere:
            yield f"{save.marker} of {slug} has no commit, and {nowhere} is nowhere"


def _judge_tip(ledger: Ledger, tip: Mapping[str, bytes], dead_slugs: set[str]) -> Iterator[str]:
    """Each post has, in the end, the lines of its last save and those that another clone pushed."""
    for path, (save, data) in ledger.last_writes().items():
        if save.slug in dead_slugs or save.slug in ledger.contested:
            continue
        there = tip.get(path)
        if data is None or there is None:
            if there is not data:
                was = "deleted" if data is None else "written"
                yield f"{path} was {was} by {save.marker} of {save.slug}, the remote has {there!r}"
            continue
        lines = there.splitlines()
        if (wanted := data.splitlines()[-1]) not in lines:
            yield f"{path} lacks {wanted!r} of {save.marker}: it has {lines}"
        if (title := ledger.titles.get(path)) is not None and title.encode() not in lines:
            yield f"{path} lacks {title!r} of the other clone: it has {lines}"


def _judge_ours(commit: Commit, save: Save, ledger: Ledger) -> Iterator[str]:
    name = f"{commit.sha[:10]} of {save.marker}"
    # An older save's paths go over to the newer one that supersedes it.
    declared = {path for other in ledger.saves if other.slug == save.slug for path in other.paths}
    for path, (mode, _) in commit.touched.items():
        if path not in declared and not any(path.startswith(f"{folder}/") for folder in declared):
            yield f"{name} touches {path}, which {save.slug} never declared"
        if mode not in _MODES:
            yield f"{name} gives {path} the mode {mode}"
    # A newer save takes the place of one of its slug that was on hold, with all that this had declared.
    replaced = [other for other in ledger.saves[: ledger.saves.index(save)] if other.slug == save.slug]
    early = [
        path
        for other in ledger.saves
        if other.held_until and commit.when + 1 <= other.held_until and other not in replaced
        for path, data in other.files.items()
        if data is not None and commit.touched.get(path, ("", ""))[1] == blob_of(data)
    ]
    if early:
        yield f"{name} publishes {early} before its time"
    if not commit.touched:
        yield f"{name} is empty"
    if len(commit.parents) != 1:
        yield f"{name} has {len(commit.parents)} parents"
    if commit.committer != WORKER:
        yield f"{name} was committed by {commit.committer}"
    if commit.author != (save.author or WORKER):
        yield f"{name} says that {commit.author} wrote it"
