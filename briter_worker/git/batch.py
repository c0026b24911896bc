"""A batch: requests that are ready to be built, and their commits on one tip."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from briter_worker.errors import Failure, FailureCode
from briter_worker.git.commits import Commit, Person, write_commits
from briter_worker.git.merge import Base, Merge
from briter_worker.ports import Outcome, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from briter_worker.git.commits import File, OwnCommit
    from briter_worker.git.merge import Edit
    from briter_worker.git.repository import Repository
    from briter_worker.git.staging import Staged
    from briter_worker.ports import Request


@dataclass(frozen=True, slots=True)
class Item:
    """A request that is ready to be built."""

    request: Request
    staged: Staged
    edits: tuple[Edit, ...]

    @property
    def key(self) -> str:
        """Return the request's key."""
        return self.request.key

    @property
    def blobs(self) -> dict[str, str | None]:
        """Return the author's version of each path."""
        edited = {edit.path: edit.blob for edit in self.edits}
        return {**self.staged.unchanged, **edited}

    def commit(self, identity: Person, now: float, files: Mapping[str, File | None]) -> Commit:
        """Return the commit that makes these changes for the request."""
        author = Person(*self.request.author) if self.request.author else identity
        return Commit(self.request.message.encode(), author.line(now), identity.line(now), files)

    def rebased(self, bases: Mapping[str, Base], own: Sequence[OwnCommit]) -> Item:
        """Return the same edits, of these bases and of what the worker's own commits made of them."""
        edits = []
        for edit in self.edits:
            base = edit.base or bases.get(edit.path)
            edits.append(replace(edit, base=base and _advance(edit.path, base, own)))
        return replace(self, edits=tuple(edits))

    def outcome(
        self, result: Result, *, commit: str | None = None, failure: Failure | None = None
    ) -> Outcome:
        """Return the request's outcome."""
        rejected = (*self.staged.rejected, *self.staged.missing)
        return Outcome(self.key, result, commit, failure, rejected_paths=rejected)

    def deferred(self) -> Outcome:
        """Return the outcome of a request whose files are those of scheduled posts."""
        path, until = min(self.staged.withheld.items(), key=lambda each: each[1])
        failure = Failure(
            FailureCode.UNSETTLED,
            f"{path} belongs to a scheduled post and is not published before its time",
            "publish the scheduled post now, or cancel it",
        )
        return self.outcome(Result.FAILED, failure=failure)._replace(retry_at=until)


@dataclass(slots=True)
class Tip:
    """The commit that a batch is built on."""

    commit: str
    expect: str | None
    """The remote's tip as last seen; None if the remote has no branch yet."""
    is_fresh: bool
    """The remote was asked within this publication."""
    own_commits: list[OwnCommit] = field(default_factory=list)
    """Commits of the worker's that turned out to be on the remote: pushes whose answers were lost."""


@dataclass(slots=True)
class Built:
    """A batch, built on a tip."""

    merge: Merge
    tip: str
    commits: dict[str, str] = field(default_factory=dict)
    """The commit of each request that this push carries."""
    unchanged: list[Item] = field(default_factory=list)
    conflicts: list[tuple[Item, tuple[str, ...]]] = field(default_factory=list)

    def blobs(self, items: Sequence[Item]) -> dict[str, str | None]:
        """Return the authors' versions of what the remote has once this is pushed."""
        conflicting = {item.key for item, _ in self.conflicts}
        done = (item.blobs for item in items if item.key not in conflicting)
        return {path: blob for blobs in done for path, blob in blobs.items()}


def build_batch(
    repository: Repository,
    items: Sequence[Item],
    tip: Tip,
    *,
    ref: str,
    identity: Person,
    now: float,
    read: Callable[[str], bytes],
    progress: Callable[[str, int, int], None],
) -> Built:
    """Merge the items into the tip, one after another, and write their commits onto `ref`."""
    paths = {edit.path for item in items for edit in item.edits}
    merge = Merge(repository, tip.commit, paths, read)
    built = Built(merge, tip.commit)
    commits: list[Commit] = []
    keys: list[str] = []
    carriers: dict[str, str] = {}
    for item in items:
        placed = merge.place(item.edits)
        if placed.conflicts:
            built.conflicts.append((item, placed.conflicts))
        elif placed.files:
            commits.append(item.commit(identity, now, placed.files))
            keys.append(item.key)
            carriers.update(dict.fromkeys(placed.files, item.key))
        elif carrier := next((carriers[p] for p in item.blobs if p in carriers), None):
            built.commits[item.key] = carrier
        else:
            built.unchanged.append(item)
    if commits:
        names = write_commits(repository.git, commits, parent=tip.commit, ref=ref, progress=progress)
        own = dict(zip(keys, names, strict=True))
        built.commits = {key: own[carrier] for key, carrier in built.commits.items()} | own
        built.tip = names[-1]
    return built


def _advance(path: str, base: Base, own: Sequence[OwnCommit]) -> Base:
    """Return what the worker's own commits made of a base version: the author's next edit started from it."""
    for commit in own:
        if path in commit.blobs and commit.blobs[path][0] == base.blob:
            base = Base(commit.blobs[path][1])
    return base


def find_receipt(item: Item, own: Sequence[OwnCommit]) -> str | None:
    """Return the commit of a push whose answer was lost, if it carried this request."""
    message = item.request.message.encode().strip()
    found = (
        each.sha
        for each in reversed(own)
        if each.message == message and not each.blobs.keys().isdisjoint(item.blobs)
    )
    return next(found, None)
