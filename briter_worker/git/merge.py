"""Merge: place edits on a commit that others may have changed since, path by path and line by line.

An edit knows its base, the version that its author started from. Where the tree still has the base, the
edit is taken as it is. Where both sides changed a file, their lines are merged. Overlapping lines are a
conflict of that one claim, whose version is kept on a branch of the remote.
"""

from __future__ import annotations

import re
import shlex
import tempfile
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from briter_worker.allowlist import parents
from briter_worker.errors import Failure, FailureCode, PublishError
from briter_worker.git.commits import Commit, Person, write_commits
from briter_worker.git.push import move_side_branch
from briter_worker.git.repository import FOLDER, LINK, SUBMODULE, Entry, blob_of
from briter_worker.ports import BaseVersion, Conflict, Outcome, Remainder, Result, blob_id

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from briter_worker.git.folders import Staged
    from briter_worker.git.repository import Repository
    from briter_worker.ports import BaseVersions, Claim

_MAX_CONFLICTS = 127
"""`git merge-file` exits with the number of conflicts, at most this one."""
_MAX_NAME_BYTES = 100
"""The name of a branch is a file's name on the remote, of at most 255 bytes."""
_SAVE_AGAIN = "take the remote's changes over into the post, and save it again"


@dataclass(frozen=True, slots=True)
class Base:
    """The version that an edit started from (None: there was no file). `mode` may be unknown: empty."""

    blob: str | None
    mode: str = ""

    @classmethod
    def of(cls, entry: Entry | None) -> Base:
        """Return what a tree has at a path."""
        return cls(None) if entry is None or entry.mode == FOLDER else cls(entry.blob, entry.mode)


@dataclass(frozen=True, slots=True)
class Edit:
    """One path of one claim: the new file (None: deleted), and its base (None: what the tree has)."""

    path: str
    file: Entry | None
    base: Base | None = None

    @property
    def blob(self) -> str | None:
        """Return the blob of the new file."""
        return blob_of(self.file)


class Item(NamedTuple):
    """A claim that is ready to be built."""

    claim: Claim
    staged: Staged
    edits: tuple[Edit, ...]

    @property
    def blobs(self) -> dict[str, str | None]:
        """Return the author's version of each path."""
        return {**self.staged.unchanged, **{edit.path: edit.blob for edit in self.edits}}

    def commit(self, identity: Person, now: float, files: Mapping[str, Entry | None]) -> Commit:
        """Return the commit that makes these changes for the claim."""
        named = self.claim.job.author
        author = Person(named.name, named.email) if named else identity
        return Commit(self.claim.job.full_message.encode(), author.line(now), identity.line(now), files)

    def outcome(
        self, result: Result, *, commit: str | None = None, failure: Failure | None = None
    ) -> Outcome:
        """Return the claim's outcome."""
        return Outcome(
            self.claim.key,
            result,
            commit,
            failure,
            rejected_paths=tuple(self.staged.rejected),
            missing=tuple(self.staged.missing),
            withheld=self.staged.withheld,
            stashed=self.staged.stashed,
        )

    @property
    def remainder(self) -> Remainder:
        """Return what the claim declares and its commit lacks."""
        staged = self.staged
        return Remainder(tuple(staged.rejected), tuple(staged.missing), staged.withheld, staged.stashed)


class Merge:
    """Places claims on one commit's tree, one after another."""

    def __init__(
        self, repository: Repository, tip: str, paths: Iterable[str], read: Callable[[str], bytes]
    ) -> None:
        """`paths`: every path of every edit. `read` returns a blob, or raises LookupError."""
        self._repository = repository
        self.tip = tip
        self._read = read
        wanted = {above for path in paths for above in (path, *parents(path))}
        self.entries = repository.entries(tip, wanted)
        self._changed: dict[str, Entry | None] = {}
        self._last: dict[str, tuple[Edit, Entry | None]] = {}
        """By path: the edit that was placed last, and its result."""
        self._filled: set[str] = set()
        """Folders in which a file was placed."""

    def place(self, edits: Sequence[Edit]) -> tuple[dict[str, Entry | None], list[str]]:
        """Return what the edits change, and the paths that conflict: then nothing is placed."""
        files: dict[str, Entry | None] = {}
        conflicts: list[str] = []
        results: dict[str, tuple[Edit, Entry | None]] = {}
        deleted: set[str] = set()
        # Deletions first: another file of the claim may take the place.
        for edit in sorted(edits, key=lambda each: each.file is not None):
            path, theirs = edit.path, self._current(edit.path)
            if self._last.get(path) == (edit, theirs):
                continue
            try:
                ours = self._merge(edit, theirs, deleted)
            except _ConflictError:
                conflicts.append(path)
                continue
            if ours is None:
                deleted.add(path)
            results[path] = (edit, ours)
            if ours != theirs:
                files[path] = ours
        if conflicts:
            return {}, conflicts
        # Another claim may bring the same edit. Merged with its own result, the edit could conflict with
        # itself, where neighbouring lines are alike.
        self._last.update(results)
        self._changed.update(files)
        self._filled.update(above for path, file in files.items() if file for above in parents(path))
        return files, []

    def _current(self, path: str) -> Entry | None:
        if path in self._changed:
            return self._changed[path]
        entry = self.entries.get(path)
        return None if entry is None or entry.mode == FOLDER else entry

    def _is_in_the_way(self, path: str, deleted: set[str]) -> bool:
        """Return True if writing the file would remove others: a folder, or a file above it."""
        if any(above not in deleted and self._current(above) for above in parents(path)):
            return True
        below: set[str] = set()
        if path in self._filled:
            below = {name for name, file in self._changed.items() if file and name.startswith(f"{path}/")}
        entry = self.entries.get(path)
        if entry is not None and entry.mode == FOLDER:
            there = self._repository.entries_below(self.tip, [path])
            below |= {name for name in there if self._changed.get(name, True)}
        return not below <= deleted

    def _merge(self, edit: Edit, theirs: Entry | None, deleted: set[str]) -> Entry | None:
        ours, their_blob = edit.file, blob_of(theirs)
        base = edit.base or Base(their_blob, theirs.mode if theirs else "")
        has_new_mode = ours is not None and base.mode not in ("", ours.mode)
        is_special = theirs is None or theirs.mode in (LINK, SUBMODULE)
        if edit.blob == base.blob != their_blob and (is_special or not has_new_mode):
            return theirs  # only the other side changed the file
        if ours is not None and self._is_in_the_way(edit.path, deleted):
            raise _ConflictError
        is_unchanged_there = their_blob in (base.blob, edit.blob)
        if ours is None or theirs is None or is_special:
            if is_unchanged_there and not (theirs and theirs.mode == SUBMODULE):
                return ours
            raise _ConflictError
        mode = ours.mode if has_new_mode else theirs.mode
        if is_unchanged_there:
            return Entry(mode, ours.blob, ours.content)
        if ours.blob == base.blob:
            return Entry(mode, theirs.blob, theirs.content)
        merged = self._merge_lines(base.blob, ours, theirs)
        return Entry(mode, blob_id(merged, len(self.tip)), merged)

    def _merge_lines(self, base: str | None, ours: Entry, theirs: Entry) -> bytes:
        git = self._repository.git
        try:
            versions = {
                "ours": self._content(ours),
                "base": b"" if base is None else self._read(base),
                "theirs": self._content(theirs),
            }
        except LookupError:  # nobody has the base any more
            raise _ConflictError from None
        with tempfile.TemporaryDirectory(prefix="briter-merge-") as folder:
            for name, content in versions.items():
                Path(folder, name).write_bytes(content)
            paths = [str(Path(folder, name)) for name in versions]
            status, merged, error = git.attempt("merge-file", "-p", "-q", *paths)
        if 0 < status <= _MAX_CONFLICTS or "binary" in error:
            raise _ConflictError
        if status:
            raise git.failure(["merge-file"], error, status)
        if git.worktree is not None and ours.content is not None:  # the base of the author's next edit
            git.run("hash-object", "-w", "--stdin", "--no-filters", stdin=ours.content)
        return merged

    def _content(self, file: Entry) -> bytes:
        return self._read(file.blob) if file.content is None else file.content


class _ConflictError(Exception):
    """Both sides changed the same lines, or one of them the kind of file."""


@dataclass(eq=False, repr=False)
class Conflicts:
    """Keeps the versions of posts that conflict on branches of the remote, until the conflicts are over.

    A conflict is over when its path is published: with the author's answer, or after a user has merged the
    branch.
    """

    _repository: Repository
    _store: BaseVersions
    _identity: Person
    _read: Callable[[str], bytes]
    _open: dict[str, BaseVersion] = field(default_factory=dict)
    """By path: the version that the author started from, and the conflicts."""
    _merged: set[str] = field(default_factory=set)
    """Commits of conflict branches that a user has merged."""

    def load(self, paths: Collection[str], tip: str) -> None:
        """Read what is known of the paths' conflicts, as of the remote's `tip`."""
        known = self._store.bases(paths) if paths else {}
        self._open = {path: each for path, each in known.items() if each.conflicts}
        kept = {each.commit for version in self._open.values() for each in version.conflicts.values()}
        self._merged = {each for each in kept if each and self._repository.is_ancestor(each, tip)}

    def rebase(self, edit: Edit, claim: Claim) -> Edit:
        """Return the edit; if its path has an open conflict, with the base that follows from that.

        Another content of the same post, saved after the conflict was recorded, is the author's answer to the
        remote's version. What was saved without knowing of the conflict conflicts again.
        """
        if edit.path not in self._open:
            return edit
        start, conflicts = self._open[edit.path]
        own, base = conflicts.get(claim.job.slug), start
        if own is not None and claim.job.created_at > own.recorded_at and edit.blob != own.ours:
            base = own.theirs
        base = next((each.ours for each in conflicts.values() if each.commit in self._merged), base)
        return replace(edit, base=Base(base))

    def settle(
        self, item: Item, paths: Sequence[str], merge: Merge, *, clock: Callable[[], float], dry_run: bool
    ) -> Outcome:
        """Return the failure of a claim that conflicts; its version is kept, and remembered as such."""
        message, fix = f"the remote changed {', '.join(paths)} in the same lines", _SAVE_AGAIN
        if not dry_run:
            try:
                parent = self._find_parent(item, paths[0], merge.tip)
                branch, commit = self._keep(item, parent, clock())
                self._remember(item, paths, merge, Conflict(None, None, branch, commit, clock()))
            except PublishError as error:  # other posts of the push are on the remote: none of them may fail
                branch, parent = "", merge.tip
                message = f"{message}; its version could not be kept ({error.message})"
            where = f"on the branch {branch} of the remote" if branch else "where it was saved"
            message = f"{message}; the post's version is {where}"
            if branch and parent != merge.tip:  # else git would see no conflict, and drop theirs
                remote, main = self._repository.remote, self._repository.branch
                fix = (
                    f"{fix}; or merge both, in another clone: git fetch {remote} && git switch {main} && "
                    f"git merge --ff-only {remote}/{main} && "
                    f"git merge {shlex.quote(f'{remote}/{branch}')}; resolve and commit; "
                    f"git push {remote} {main}, then retry the post"
                )
        return item.outcome(Result.FAILED, failure=Failure(FailureCode.CONFLICT, message, fix))

    def close(self, paths: Collection[str]) -> None:
        """Forget the conflicts of paths that are published, and delete their branches. May be repeated."""
        over = {path: self._open.pop(path) for path in paths if path in self._open}
        kept = {(each.branch, each.commit) for base in over.values() for each in base.conflicts.values()}
        for branch, commit in kept:
            if branch:
                move_side_branch(self._repository, "", branch, commit)
        if over:
            self._store.remember({path: BaseVersion(base.blob) for path, base in over.items()}, {})

    def _keep(self, item: Item, parent: str, now: float) -> tuple[str, str | None]:
        """Push the claim's version as one commit on `parent`; return the branch, or nothing."""
        repository, slug = self._repository, item.claim.job.slug
        merge = Merge(repository, parent, item.blobs, self._read)
        files, _ = merge.place([replace(edit, base=None) for edit in item.edits])
        if not files:
            return "", None
        ref = f"{repository.own_refs}/conflict/{uuid.uuid4().hex}"
        commits = [item.commit(self._identity, now, files)]
        (commit,) = write_commits(repository.git, commits, parent=parent, ref=ref, progress=lambda *_: None)
        name = _branch_name(slug)
        # Git keeps no branch below another one: for `a/b` beside `a`, a name without a slash is free.
        free = (f"conflict/{name}", f"conflict/{name.replace('/', '-')}-{commit[:8]}")
        own = [base.conflicts[slug] for base in self._open.values() if slug in base.conflicts]
        candidates = {each.branch: each.commit for each in own if each.branch}
        wanted = [*candidates.items(), *((branch, None) for branch in free)]
        kept = (branch for branch, expect in wanted if move_side_branch(repository, ref, branch, expect))
        branch = next(kept, "")
        repository.update_refs((ref, None, None))
        return branch, commit if branch else None

    def _find_parent(self, item: Item, path: str, tip: str) -> str:
        """Return the newest commit that has the version the author started from, or the tip."""
        base = next((edit.base for edit in item.edits if edit.path == path), None)
        if base is None or base.blob is None or self._repository.git.worktree is None:
            return tip  # a bare clone has no history
        out = self._repository.git.run(
            *("--literal-pathspecs", "log", "-1", "--no-merges", "--format=%H %P"),
            *(f"--find-object={base.blob}", tip, "--", path),
        )
        for commit in out.decode().split():
            entry = self._repository.entries(commit, [path]).get(path)
            if entry is not None and entry.blob == base.blob:
                return commit
        return tip

    def _remember(self, item: Item, paths: Sequence[str], merge: Merge, new: Conflict) -> None:
        slug, bases = item.claim.job.slug, {edit.path: edit.base for edit in item.edits}
        for path in paths:
            base, theirs = bases[path], Base.of(merge.entries.get(path)).blob
            known = self._open.get(path, BaseVersion(base.blob if base else theirs))
            own = known.conflicts.get(slug)
            # An author to whom this version was reported before has seen it since.
            at = own.recorded_at if own and own.theirs == theirs else new.recorded_at
            conflict = new._replace(ours=item.blobs[path], theirs=theirs, recorded_at=at)
            self._open[path] = BaseVersion(known.blob, {**known.conflicts, slug: conflict})
        self._store.remember({path: self._open[path] for path in paths}, {})


def _branch_name(slug: str) -> str:
    """Return a slug as part of a branch's name: whatever git or a shell does not take becomes a dash."""
    name = re.sub(r"[^\w/.-]+|\.\.+|/[/.]+|\.lock(?=/|$)", "-", slug).strip("/.-")
    name = name.encode()[:_MAX_NAME_BYTES].decode(errors="ignore").rstrip("/.-")
    return re.sub(r"\.lock$", "-lock", name) or "post"
