"""Read what jobs declare from the work tree, and compare it with the remote's tip.

Declared paths pass the allowlist, then each part of them is opened without following links, and what was
opened is what is read. Git itself reads files that its attributes change on the way in: filters, LFS, line
endings.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from bisect import bisect_left
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from briter_worker.allowlist import PathRefusedError, is_inside
from briter_worker.errors import Failure, FailureCode, PublishError
from briter_worker.git.commits import blob_id
from briter_worker.git.folders import (
    PAUSE_S,
    TRIES,
    Expansion,
    Folders,
    Refused,
    changing,
    check_size,
    expand_paths,
    stamp_of,
    unreadable,
)
from briter_worker.git.repository import FOLDER, LINK, SUBMODULE, Entry, Repository
from briter_worker.ports import Change

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from briter_worker.allowlist import Allowlist
    from briter_worker.git.folders import Stamp
    from briter_worker.git.run import Git
    from briter_worker.ports import Request

_ATTRIBUTES = ("filter", "text", "eol", "crlf", "ident", "working-tree-encoding")
_ALL_TEXT = ("true", "input", "1")
_FEW_PATHS = 100
_LARGE = 4 << 20
"""Git reads larger files, so that they are not kept in memory."""
_PROGRESS_STEP = 100
IGNORED = "git ignores it; see git check-ignore -v, and change .gitignore"
_SUBMODULE = "it is inside a nested repository (a submodule)"


@dataclass(frozen=True, slots=True)
class Staged:
    """What one request changes on the remote's tip, and which of its paths it leaves out."""

    changes: tuple[Change, ...] = ()
    contents: Mapping[str, bytes] = field(default_factory=dict)
    """Contents by path; a changed path that is absent has its blob in the repository."""
    rejected: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    """Declared paths that are neither in the work tree nor on the remote."""
    withheld: Mapping[str, float] = field(default_factory=dict)
    """Files that scheduled jobs declare, and the time they are scheduled for."""
    failure: Failure | None = None
    """Set when this request alone cannot be published."""
    uses_lfs: bool = False
    unchanged: Mapping[str, str | None] = field(default_factory=dict)
    """The blobs of paths that came with the request and are what the tip has; empty for a work tree."""


_NO_BASES: Mapping[str, str | None] = {}


@dataclass(slots=True)
class _Draft:
    """One request while it is being staged."""

    request: Request
    found: Expansion = field(default_factory=Expansion)
    files: dict[str, None] = field(default_factory=dict)
    gone: dict[str, None] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    ignored: set[str] = field(default_factory=set)
    withheld: dict[str, float] = field(default_factory=dict)
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class _Read:
    """One file as it was read."""

    entry: Entry
    stamp: Stamp


class _Tree:
    """The part of a commit's tree at and below some paths."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self.entries = entries
        self._paths = sorted(entries)

    def get(self, path: str) -> Entry | None:
        return self.entries.get(path)

    def is_folder(self, path: str) -> bool:
        entry = self.entries.get(path)
        return entry is not None and entry.mode == FOLDER

    def below(self, folder: str) -> Iterator[str]:
        """Yield every file, link and submodule below the folder."""
        at = bisect_left(self._paths, f"{folder}/")
        while at < len(self._paths) and self._paths[at].startswith(f"{folder}/"):
            if not self.is_folder(self._paths[at]):
                yield self._paths[at]
            at += 1

    def is_in_submodule(self, path: str) -> bool:
        entry = self.entries.get(path)
        return any(each.mode == SUBMODULE for each in (entry, *dict(self.above(path)).values()) if each)

    def above(self, path: str) -> Iterator[tuple[str, Entry]]:
        """Yield what is at the path's parents, topmost first."""
        for parent in parents(path):
            entry = self.entries.get(parent)
            if entry is None:
                return
            yield parent, entry


@dataclass(frozen=True, slots=True)
class WorkTreeSource:
    """Stage the files that the CMS has written into its work tree."""

    repository: Repository
    allowlist: Allowlist
    max_file_bytes: int
    progress: Callable[[str, int, int], None]

    def stage(
        self,
        requests: Sequence[Request],
        *,
        tip: str,
        scheduled: Mapping[str, float],
        bases: Mapping[str, str | None] = _NO_BASES,
    ) -> dict[str, Staged]:
        """Return what each request changes on `tip`, by its key. Raises StoppedError after an abort.

        `scheduled` has the paths that scheduled jobs declare: their files are withheld from folders that are
        no more specific. `bases` has the versions of `tip` that the work tree does not have, but others in
        their place, which its files are edits of.
        """
        with closing(Folders(cast("Path", self.repository.git.worktree))) as folders:
            return _Batch(self, folders, tip, bases).stage(requests, scheduled)


class _Batch:
    """One batch of requests, staged against one commit."""

    def __init__(
        self, source: WorkTreeSource, folders: Folders, tip: str, bases: Mapping[str, str | None]
    ) -> None:
        self._source = source
        self._repository = source.repository
        self._git = source.repository.git
        self._folders = folders
        self._tip = tip
        self._keep_modes = self._git.config("core.fileMode", "true").lower() in ("false", "no", "off", "0")
        self._bases = bases
        self._tree = _Tree({})
        self._read: dict[str, _Read | PublishError | None] = {}
        self._contents: dict[str, bytes] = {}
        self._filtered: set[str] = set()
        self._lfs: set[str] = set()

    def stage(self, requests: Sequence[Request], scheduled: Mapping[str, float]) -> dict[str, Staged]:
        drafts = [self._expand(request) for request in requests]
        # Most of git's time here is its start, so two commands start at once.
        with self._finding_filtered({path for draft in drafts for path in draft.found.files}):
            self._tree = self._read_tree(drafts)
            held = {path.removesuffix("/"): at for path, at in scheduled.items()}
            for draft in drafts:
                self._sort(draft)
                _withhold(draft, held)
            self._drop_ignored(drafts)
            self._drop_sparse(drafts)
        for draft in drafts:
            self._reject_barren(draft)
        self._read_files(dict.fromkeys(path for draft in drafts for path in draft.files))
        self._read_changed_again(drafts)
        return {draft.request.key: self._result(draft) for draft in drafts}

    # Which files

    def _expand(self, request: Request) -> _Draft:
        self._git.check_running()
        draft = _Draft(request)
        try:
            draft.found = expand_paths(self._folders, self._source.allowlist, request.paths)
        except PublishError as error:
            draft.failure = error.failure
        return draft

    def _read_tree(self, drafts: Sequence[_Draft]) -> _Tree:
        places = {path for draft in drafts for path in draft.found.places.values()}
        wanted = {*places, *(each for path in places for each in parents(path))}
        entries = self._repository.entries(self._tip, wanted)
        folders = [path for path in places if path in entries and entries[path].mode == FOLDER]
        if folders:
            entries |= self._repository.entries_below(self._tip, folders, with_folders=True)
        for path, blob in self._bases.items():
            if path in places or not places.isdisjoint(parents(path)):
                entries.pop(path, None)
                if blob is not None:
                    entries[path] = Entry("100644", blob)  # a mode that is another counts as a change
        return _Tree(entries)

    def _sort(self, draft: _Draft) -> None:
        """Compare what is in the work tree with the tip: files to read, and paths that are gone."""
        found = draft.found
        for path in found.files:
            if self._tree.is_in_submodule(path):
                found.rejected[path] = _SUBMODULE
            else:
                draft.files[path] = None
        for declared, path in found.places.items():
            if self._tree.is_in_submodule(path):
                found.rejected[declared] = _SUBMODULE
            if declared in found.rejected:
                continue
            entry = self._tree.get(path)
            if entry is None and path in found.absent:
                draft.missing.append(path)
            elif entry is not None and entry.mode != FOLDER and path not in found.files:
                draft.gone[path] = None
            self._find_gone(draft, path)

    def _find_gone(self, draft: _Draft, folder: str) -> None:
        """Find what the tip has below the folder and the work tree has not; what is refused there stays."""
        found = draft.found
        closed = tuple(path for path in found.closed if is_inside(folder, path))
        for path in self._tree.below(folder):
            if path in found.files or any(is_inside(each, path) for each in closed):
                continue
            if self._tree.entries[path].mode == SUBMODULE:
                continue
            try:
                self._source.allowlist.resolve(path)
                draft.gone[path] = None
            except PathRefusedError as refusal:
                found.rejected[path] = refusal.reason

    def _drop_ignored(self, drafts: Sequence[_Draft]) -> None:
        new = sorted({path for draft in drafts for path in draft.files if self._tree.get(path) is None})
        ignored = ignored_paths(self._git, new)
        for draft in drafts:
            for path in ignored & draft.files.keys():
                del draft.files[path]
                draft.ignored.add(path)
                if path in draft.found.places.values():
                    draft.found.rejected[path] = IGNORED

    def _drop_sparse(self, drafts: Sequence[_Draft]) -> None:
        """Nobody deleted what a sparse checkout, or the mirror, leaves out of the work tree."""
        gone = sorted({path for draft in drafts for path in draft.gone} - self._bases.keys())
        skipped = sparse_paths(self._git, gone if len(gone) <= _FEW_PATHS else self._source.allowlist.folders)
        skipped.difference_update(self._bases)
        for draft in drafts:
            for path in skipped & draft.gone.keys():
                del draft.gone[path]

    def _reject_barren(self, draft: _Draft) -> None:
        """Refuse a folder in which everything is refused or ignored."""
        for folder in draft.found.folders:
            carried = any(is_inside(folder, path) for path in (*draft.files, *draft.gone, *draft.withheld))
            refused = [p for p in (*draft.found.closed, *sorted(draft.ignored)) if is_inside(folder, p)]
            if refused and not carried and next(self._tree.below(folder), None) is None:
                reason = f"nothing in it may be published ({refused[0]} is refused or ignored)"
                draft.found.rejected[folder] = reason

    # Their contents

    def _read_files(self, paths: Collection[str]) -> None:
        by_git = self._filtered.intersection(paths)
        for done, path in enumerate(paths):
            self._git.check_running()
            if done % _PROGRESS_STEP == 0:
                self._source.progress("stage", done, len(paths))
            stamp = self._folders.stamp(path)
            if stamp and stamp.size > _LARGE:
                by_git.add(path)
            if path not in by_git:
                self._read[path] = self._try(self._read_file, path)
        if by_git:
            self._read_by_git(sorted(by_git))
        self._source.progress("stage", len(paths), len(paths))

    @contextmanager
    def _finding_filtered(self, paths: Collection[str]) -> Iterator[None]:
        """Find the paths whose contents git changes on their way in, while something else is done."""
        if not paths:
            yield
            return
        command = ("check-attr", "-z", "--stdin", *_ATTRIBUTES)
        what = ".gitattributes could not be read"
        with self._git.run_beside(*command, stdin=_nul_lines(paths), what=what) as read:
            yield
            self._note_filtered(read())

    def _note_filtered(self, out: bytes) -> None:
        fields = os.fsdecode(out).split("\0")[:-1]
        all_text = self._git.config("core.autocrlf").lower() in _ALL_TEXT
        for path, attribute, value in zip(fields[::3], fields[1::3], fields[2::3], strict=True):
            if value not in ("unspecified", "unset") or (
                all_text and (attribute, value) == ("text", "unspecified")
            ):
                self._filtered.add(path)
            if (attribute, value) == ("filter", "lfs"):
                self._lfs.add(path)

    @staticmethod
    def _try(read: Callable[[str], _Read], path: str) -> _Read | PublishError | None:
        """Return what was read, the failure of this file alone, or None if it has just been deleted."""
        try:
            return read(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Refused as refusal:
            return PublishError(FailureCode.NO_PATHS, refusal.reason)
        except PublishError as error:
            return error
        except (OSError, MemoryError) as error:
            return unreadable(path, error)

    def _read_file(self, path: str) -> _Read:
        content, status = self._folders.read(path, self._source.max_file_bytes)
        blob = blob_id(content, like=self._tip)
        was = self._tree.get(path)
        if was is None or was.blob != blob:
            self._contents[path] = content
        return _Read(Entry(self._mode(path, status), blob), stamp_of(status))

    def _look(self, path: str) -> _Read:
        """Return the state of a file that git reads."""
        with self._folders.file(path) as fd:
            status = os.fstat(fd)
        check_size(path, status.st_size, self._source.max_file_bytes)
        return _Read(Entry(self._mode(path, status), ""), stamp_of(status))

    def _mode(self, path: str, status: os.stat_result) -> str:
        was = self._tree.get(path)
        if self._keep_modes and was is not None and was.mode not in (FOLDER, LINK, SUBMODULE):
            return was.mode
        executable = status.st_mode & stat.S_IXUSR and not self._keep_modes
        return "100755" if executable else "100644"

    def _read_by_git(self, paths: Sequence[str]) -> None:
        """Have git read the files. One that changes meanwhile no longer is as it was seen before."""
        self._read.update((path, self._try(self._look, path)) for path in paths)
        seen = {path: each for path in paths if isinstance(each := self._read[path], _Read)}
        for path, blob in self._add_to_index([*seen]).items():
            self._read[path] = _Read(Entry(seen[path].entry.mode, blob), seen[path].stamp)

    def _add_to_index(self, paths: Sequence[str]) -> dict[str, str]:
        """Add the files to an index of their own, as `git add` does; return the blobs.

        `git hash-object` sees neither attributes nor line endings of what is committed. The index holds the
        paths' own entries only: elsewhere in the tree there may be something that git refuses.
        """
        if not paths:
            return {}
        rules = {f"{each}/.gitattributes".lstrip("/") for path in paths for each in ("", *parents(path))}
        known = self._repository.entries(self._tip, rules) | {
            path: entry for path in paths if (entry := self._tree.get(path)) is not None
        }
        with tempfile.TemporaryDirectory(prefix="index-", dir=self._git.state_dir) as folder:
            env = {"GIT_INDEX_FILE": f"{folder}/index"}
            lines = b"".join(
                f"{entry.mode} {entry.blob}\t".encode() + os.fsencode(path) + b"\0"
                for path, entry in known.items()
                if entry.mode not in (FOLDER, SUBMODULE)
            )
            self._git.run("update-index", "--add", "-z", "--index-info", stdin=lines, env=env)
            self._git.run(
                *("update-index", "--add", "--replace", "-z", "--stdin"),
                stdin=_nul_lines(paths),
                env=env,
                what=f"git could not read {paths[0]}",
            )
            out = self._git.run("ls-files", "--stage", "-z", env=env)
        listed = (line.partition("\t") for line in os.fsdecode(out).split("\0") if line)
        found = {path: about.split()[1] for about, _, path in listed}
        return {path: found[path] for path in paths}

    def _read_changed_again(self, drafts: Sequence[_Draft]) -> None:
        """Read again what was rewritten, or came back, while the others were read."""
        for draft in drafts:
            for path in [path for path in draft.gone if self._folders.stamp(path) is not None]:
                # Some editors save by removing the file and writing it anew: that is no deletion.
                del draft.gone[path]
                draft.files[path] = None
        paths = dict.fromkeys(path for draft in drafts for path in draft.files)
        for _ in range(TRIES):
            changed = [path for path in paths if self._has_changed(path)]
            if not changed:
                return
            time.sleep(PAUSE_S)
            with self._finding_filtered(changed):  # of paths that came back, nothing is known yet
                pass
            self._read_files(changed)
        self._read.update((path, changing(path)) for path in paths if self._has_changed(path))

    def _has_changed(self, path: str) -> bool:
        known = self._read.get(path)
        if isinstance(known, PublishError):
            return False
        return self._folders.stamp(path) != (known.stamp if known else None)

    # The result

    def _result(self, draft: _Draft) -> Staged:
        found = draft.found
        read = [self._read.get(path) for path in draft.files]
        failed = [each.failure for each in read if isinstance(each, PublishError)]
        failure = next((each for each in failed if each.code is not FailureCode.NO_PATHS), draft.failure)
        if failure is not None:
            return Staged(rejected=found.rejected, failure=failure)
        changes = self._changes(draft)
        if all(_is_rejected(found, declared) for declared in draft.request.paths):
            failure = Failure(FailureCode.NO_PATHS, *self._why(found.rejected))
            return Staged(rejected=found.rejected, failure=failure)
        return Staged(
            changes=tuple(changes.values()),
            contents={path: self._contents[path] for path in changes if path in self._contents},
            rejected=found.rejected,
            missing=tuple(draft.missing),
            withheld=draft.withheld,
            uses_lfs=not self._lfs.isdisjoint(changes),
        )

    def _changes(self, draft: _Draft) -> dict[str, Change]:
        """Return the changes by path, deletions first; reject paths that cannot be where they are."""
        changes = {path: Change(path, "", None) for path in draft.gone}
        for path in draft.files:
            known = self._read.get(path)
            if isinstance(known, PublishError):
                draft.found.rejected[path] = known.message
            elif known is None:
                if self._tree.get(path) is not None:
                    changes[path] = Change(path, "", None)
            elif reason := self._obstacle(draft, path):
                draft.found.rejected[path] = reason
                if self._tree.is_folder(path):
                    changes = _without_removal(draft, path, changes)
            elif self._tree.get(path) != known.entry:
                changes[path] = Change(path, known.entry.mode, known.entry.blob)
        return changes

    def _obstacle(self, draft: _Draft, path: str) -> str | None:
        """Return why the file cannot be where the tip has a file above it, or a folder in its place.

        What the mirror could not bring into the work tree is the remote's alone: that is a conflict instead.
        """
        above = next((each for each, entry in self._tree.above(path) if entry.mode != FOLDER), None)
        if above is not None and above not in draft.gone and not self._is_remote_link(above):
            return f"it would replace the file {above}; declare that path, too"
        left = (each for each in self._tree.below(path) if each not in draft.gone)
        stays = next((each for each in left if not self._is_remote_link(each)), None)
        if stays is None:
            return None
        reason = f"it would take the place of a folder in which {stays} stays"
        return f"{reason}, as that is scheduled, left out or not allowed"

    def _is_remote_link(self, path: str) -> bool:
        """Return True for a link that the mirror does not bring into the work tree."""
        entry = self._tree.get(path)
        return entry is not None and entry.mode == LINK and bool(sparse_paths(self._git, [path]))

    def _why(self, rejected: Mapping[str, str]) -> tuple[str, str]:
        if not rejected:
            return "the job declares no paths", "list what to publish"
        # No colon behind a path: after such as `config/secret`, redaction would hide what follows.
        first = "; ".join(f"{path}, as {reason}" for path, reason in list(rejected.items())[:3])
        more = f" (and {len(rejected) - 3} more)" if len(rejected) > 3 else ""  # noqa: PLR2004
        allowed = ", ".join(f"{folder}/" for folder in self._source.allowlist.folders)
        return f"none of its paths may be published: {first}{more}", f"declare files under {allowed}"


def _withhold(draft: _Draft, scheduled: Mapping[str, float]) -> None:
    """Leave out what scheduled jobs declare, unless the request's own path is more specific."""
    if not scheduled:
        return
    places = set(draft.found.places.values())
    for paths in (draft.files, draft.gone):
        for path in list(paths):
            lineage = (path, *reversed([*parents(path)]))
            theirs = next((each for each in lineage if each in scheduled), None)
            ours = next((each for each in lineage if each in places), "")
            if theirs is not None and len(theirs) >= len(ours) and ours != path:
                draft.withheld[path] = scheduled[theirs]
                del paths[path]


def _without_removal(draft: _Draft, folder: str, changes: dict[str, Change]) -> dict[str, Change]:
    """Keep what only the refused path would have removed; what the job itself declares is removed."""
    below = [place for place in draft.found.places.values() if place.startswith(f"{folder}/")]
    return {
        path: change
        for path, change in changes.items()
        if not path.startswith(f"{folder}/") or any(is_inside(place, path) for place in below)
    }


def _is_rejected(found: Expansion, declared: str) -> bool:
    return declared in found.rejected or found.places.get(declared) in found.rejected


def parents(path: str) -> Iterator[str]:
    """Yield the folders above a path, topmost first."""
    return (path[:i] for i, c in enumerate(path) if c == "/")


def ignored_paths(git: Git, paths: Collection[str]) -> set[str]:
    """Return which of the paths, none of which is in the index, git ignores."""
    if not paths:
        return set()
    # Without the index: git stops at the first path that is in a submodule there.
    out = git.run("check-ignore", "--no-index", "-z", "--stdin", stdin=_nul_lines(paths), ok=(0, 1))
    return set(os.fsdecode(out).split("\0")[:-1])


def sparse_paths(git: Git, paths: Collection[str]) -> set[str]:
    """Return what the index has at and below the paths, and the work tree deliberately has not."""
    if not paths:
        return set()
    listed = git.run("--literal-pathspecs", "ls-files", "-z", "-t", "--", *paths)
    return {os.fsdecode(line[2:]) for line in listed.split(b"\0") if line.startswith(b"S ")}


def _nul_lines(paths: Iterable[str]) -> bytes:
    return b"".join(os.fsencode(path) + b"\0" for path in paths)
