"""Read what jobs declare from a work tree, and compare it with the remote's tip.

Declared paths pass the allowlist, then each part of them is opened without following links, and what was
opened is what is read. Git itself reads files that its attributes change on the way in: filters, LFS, line
endings.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, cast

from briter_worker.allowlist import PathRefusedError, Refusal, is_inside, normalized, parents
from briter_worker.errors import Failure, FailureCode, PublishError
from briter_worker.git.checkout import Checkout
from briter_worker.git.command import CommandTimeoutError
from briter_worker.git.commits import write_blobs
from briter_worker.git.folders import (
    Folders,
    Staged,
    Tree,
    read_tree,
    stamp_of,
    unreadable,
)
from briter_worker.git.index import hash_files, set_entries
from briter_worker.git.merge import Base, Edit, Merge
from briter_worker.git.repository import FOLDER, SUBMODULE, Entry, Repository, blob_of
from briter_worker.git.run import nul_lines
from briter_worker.git.traces import conflicts_written_by_git, list_stashes, paths_in_history, written_by_git
from briter_worker.job import Program
from briter_worker.ports import blob_id

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from briter_worker.allowlist import Allowlist
    from briter_worker.git.folders import PlainFiles, Stamp
    from briter_worker.git.merge import Item
    from briter_worker.git.run import Git
    from briter_worker.job import Job
    from briter_worker.ports import Claim

_CHECK_ATTRIBUTES = (
    *("check-attr", "-z", "--stdin"),
    *("filter", "text", "eol", "crlf", "ident", "working-tree-encoding"),
)
ALL_TEXT = ("true", "input", "1")
LARGE = 4 << 20
"""Git reads larger files, so that they are not kept in memory."""
KEPT_BYTES = 32 << 20
"""Bytes of files to keep in memory until their commits are written. More contents go to the repository."""
_PROGRESS_STEP = 100
_TRIES = 10
_PAUSE_S = 0.02
_GONE_S = 1.0
"""Many programs save by moving the old file away first."""
IGNORED = Refusal("git ignores it", "git check-ignore -v names the rule: change .gitignore")


class _Read(NamedTuple):
    """One file as it was read; git reads a file whose blob is empty."""

    file: Entry
    stamp: Stamp


@dataclass(frozen=True, slots=True)
class Staging:
    """Stages the files below the repository's work tree."""

    repository: Repository
    allowlist: Allowlist
    max_file_bytes: int
    progress: Callable[[str, int, int], None]

    def stage(
        self,
        claims: Sequence[Claim],
        *,
        tip: str,
        scheduled: Mapping[str, float],
        bases: Mapping[str, str | None] = MappingProxyType({}),
        files: PlainFiles | None = None,
    ) -> dict[str, Staged]:
        """Return what each claim changes on `tip`, by its key. Raises StoppedError after an abort.

        `scheduled` has the paths that scheduled jobs declare: their files are withheld from folders that are
        no more specific. `bases` has the versions of `tip` that the work tree does not have, but others in
        their place, which its files are edits of. `files` are there instead of a work tree.
        """
        with closing(files or Folders(cast("Path", self.repository.git.worktree))) as folders:
            return _Batch(self, folders, tip, bases).stage(claims, scheduled)


class WorkTreeCopies(Checkout):
    """The authors' copies of the files in the CMS's own clone, which follows the remote."""

    def __init__(
        self,
        staging: Staging,
        warn: Callable[[str, str], None],
        updated: Callable[[str, Sequence[str]], None] = lambda _tip, _paths: None,
        conflicting: Callable[[Sequence[str]], None] = lambda _paths: None,
        record: Callable[[Mapping[str, Entry | None]], None] = lambda _files: None,
    ) -> None:
        super().__init__(
            staging.repository,
            warn,
            updated=updated,
            record=record,
            is_cms_path=lambda path: any(is_inside(each, path) for each in staging.allowlist.folders),
        )
        self._staging = staging
        self._conflicting = conflicting
        self.read = staging.repository.blob  # a version that the repository has lost is damage, no conflict

    def find_conflicts(self, tip: str, bases: Mapping[str, str | None]) -> None:
        """Report the edits of the CMS that cannot be merged into `tip`."""
        root = cast("Path", self.repository.git.worktree)
        here = [path for path in bases if (root / path).is_file() and not (root / path).is_symlink()]
        blobs = dict(zip(here, hash_files(self.repository.git, here, "-w"), strict=True))
        merge = Merge(self.repository, tip, bases, self.read)
        edits = [
            Edit(path, Entry("100644", blobs[path]) if path in blobs else None, Base(base))
            for path, base in bases.items()
        ]
        if conflicts := [edit.path for edit in edits if merge.place([edit])[1]]:
            self._conflicting(conflicts)

    def stage(
        self, claims: Sequence[Claim], *, tip: str, scheduled: Mapping[str, float]
    ) -> Mapping[str, Staged]:
        """Return what differs from the versions that the work tree's files are edits of."""
        kept = {path: base.blob for path, base in self.state().bases.items()}
        return self._staging.stage(claims, tip=self.agreed(tip), scheduled=scheduled, bases=kept)

    def find_stashed(self, claims: Sequence[Claim], staged: Mapping[str, Staged], tip: str) -> None:
        """Note the declared files that seem unchanged, or missing, because a user has stashed them.

        Called after the files were read: no later stash can have taken what was read.
        """
        unchanged = [claim for claim in claims if staged[claim.key].has_unchanged_places()]
        if not unchanged:
            return
        since = {claim.key: _first_saved_at(claim.job) for claim in unchanged}
        for stash in list_stashes(self.repository.git, min(since.values())):
            there = self.repository.entries(tip, stash.versions.keys())
            differing = [path for path, blob in stash.versions.items() if blob != blob_of(there.get(path))]
            differing = self._publishable(differing, there)
            for claim in unchanged:
                if int(since[claim.key]) <= stash.made_at:
                    staged[claim.key].note_stashed(differing, stash.name)

    def _publishable(self, paths: Sequence[str], tree: Mapping[str, Entry]) -> list[str]:
        """Return the paths that a job may publish: `git stash --all` takes excluded and ignored files."""
        found = []
        for path in paths:
            with suppress(PathRefusedError):
                found.append(self._staging.allowlist.resolve(path))
        ignored = ignored_paths(self.repository.git, [path for path in found if path not in tree])
        return [path for path in found if path not in ignored]

    def find_unresolved(self, claims: Sequence[Claim], staged: Mapping[str, Staged]) -> None:
        """Leave out the changed files into which git has written a conflict since the save.

        Called after the files were read: what was read before git wrote it is what the CMS saved.
        """
        git, saved = self.repository.git, dict[str, float]()
        for claim in claims:
            at = claim.job.created_at
            saved |= {path: max(at, saved.get(path, at)) for path in staged[claim.key].changes}
        found = conflicts_written_by_git(git, cast("Path", git.worktree), saved)
        for claim in claims if found else ():
            staged[claim.key].leave_out_conflicts(found & staged[claim.key].changes.keys())

    def find_restored(self, items: Sequence[Item]) -> Mapping[str, str]:
        """Return, by the key of its claim, a declared file that git itself has written since the save."""
        saved: dict[str, float] = {}
        for item in items:
            for path in item.staged.files.keys() & item.staged.places.values():
                saved[path] = max(item.claim.job.created_at, saved.get(path, 0.0))
        found = written_by_git(self.repository.git, cast("Path", self.repository.git.worktree), saved)
        return {
            item.claim.key: path for item in items for path in item.staged.places.values() if path in found
        }

    def ever_had(self, paths: Collection[str]) -> Collection[str]:
        """Return which of these declared paths the branch has, or ever had."""
        places = {normalized(path): path for path in paths}
        return {places[place] for place in paths_in_history(self.repository, places)}

    def bases(self, paths: Collection[str], tip: str) -> Mapping[str, Base]:
        """Return the remembered versions, else those of the commit where mirror and remote agreed."""
        known = self.state().bases
        found = {path: Base(known[path].blob) for path in paths if path in known}
        agreed = self.agreed(tip)
        if agreed != tip:
            entries = self.repository.entries(agreed, paths)
            found = {path: Base.of(entries.get(path)) for path in paths} | found
        return found


@dataclass(eq=False, repr=False)
class _Batch:
    """One batch of claims, staged against one commit."""

    _staging: Staging
    _folders: Folders
    _tip: str
    _bases: Mapping[str, str | None]
    _tree: Tree = field(default_factory=lambda: Tree({}))
    _read: dict[str, _Read | PublishError | None] = field(default_factory=dict)
    """By path: the file, or the failure of that file alone; None where there is no file."""
    _of_watch: set[str] = field(default_factory=set)
    """Paths that a job of `watch` declares: the programs that write them say nothing of their saves."""
    _has_attributes: bool = False
    _filtered: set[str] = field(default_factory=set)
    """Paths whose contents git changes on their way in."""
    _with_program: set[str] = field(default_factory=set)
    """Paths whose contents a program of the site's changes on their way in: a clean filter."""
    _lfs: set[str] = field(default_factory=set)
    _kept: list[Entry] = field(default_factory=list)
    """The files with their contents, which the repository may lack."""
    _kept_bytes: int = 0

    def __post_init__(self) -> None:
        self._repository, self._git = self._staging.repository, self._staging.repository.git
        self._keep_modes = self._git.config("core.fileMode", "true").lower() in ("false", "no", "off", "0")

    def stage(self, claims: Sequence[Claim], scheduled: Mapping[str, float]) -> dict[str, Staged]:
        """Return what each claim changes, by its key, with the contents."""
        batch = {claim.key: self._expand(claim) for claim in claims}
        self._start_attribute_check(batch.values())
        places = set[str]().union(*(staged.places.values() for staged in batch.values()))
        self._tree = self._read_tree(places)
        scheduled = {normalized(path): at for path, at in scheduled.items()}
        for claim in claims:
            staged = batch[claim.key]
            staged.compare(self._tree, self._staging.allowlist)
            staged.withhold(scheduled, claim.job.paths_of_programs)
            if claim.job.made_by is Program.WATCH:
                self._of_watch.update(staged.places.values())
        self._drop_ignored(batch.values())
        self._await_return(set[str]().union(*(staged.gone for staged in batch.values())))
        self._read_files(batch.values())
        for claim in claims:
            self._finish(batch[claim.key], claim.job.paths)
        return batch

    # Which files

    def _expand(self, claim: Claim) -> Staged:
        staged = Staged()
        try:
            for path in claim.job.paths:
                self._git.check_running()
                staged.expand(self._folders, self._staging.allowlist, path)
        except PublishError as error:
            staged.failure = error.failure
        return staged

    def _read_tree(self, places: set[str]) -> Tree:
        entries = read_tree(self._repository, self._tip, places)
        for path, blob in self._bases.items():
            if path in places or not places.isdisjoint(parents(path)):
                entries.pop(path, None)
                if blob is not None:
                    entries[path] = Entry("100644", blob)  # a mode that is another counts as a change
        return Tree(entries)

    def _drop_ignored(self, batch: Collection[Staged]) -> None:
        """Leave out what git ignores, and what it leaves out of the work tree itself: nobody deleted that."""
        new = {path for staged in batch for path in staged.files if self._tree.get(path) is None}
        ignored, skipped = ignored_paths(self._git, sorted(new)), set[str]()
        if any(staged.gone for staged in batch):
            skipped = sparse_paths(self._git, self._staging.allowlist.folders) - self._bases.keys()
        for staged in batch:
            staged.gone = {path: None for path in staged.gone if path not in skipped}
            staged.ignore(sorted(ignored & staged.files.keys()), IGNORED)
            staged.reject_empty_folders(self._tree)

    def _start_attribute_check(self, batch: Iterable[Staged]) -> None:
        """Have git look for attributes of the files, if there are any, while the tree is read."""
        files = dict.fromkeys(chain.from_iterable(staged.files for staged in batch))
        if not files:
            return
        self._has_attributes = _has_rules(self._git, files, ".gitattributes")
        if self._has_attributes:
            self._git.begin(*_CHECK_ATTRIBUTES, stdin=nul_lines(files))

    # Their contents

    def _await_return(self, gone: set[str]) -> None:
        """Wait until the files that are gone have been so for a second, as far as `watch` declared them.

        Their programs have written no job, and may be in the middle of the next save. Until then, a name in
        the folder has changed within the second.
        """
        deadline = time.monotonic() + _GONE_S
        doubtful = gone & self._of_watch
        while doubtful and time.monotonic() < deadline:
            self._git.check_running()
            doubtful = {path for path in doubtful if self._is_doubtful(path)}
            if doubtful:
                time.sleep(_PAUSE_S)

    def _is_doubtful(self, path: str) -> bool:
        if self._folders.stamp(path) is not None:
            return False
        return 0 <= time.time() - self._folders.changed_at(path.rpartition("/")[0]) < _GONE_S

    def _read_files(self, batch: Collection[Staged]) -> None:
        """Read every file until none has changed since it was read.

        Some editors save by removing the file and writing it again: a path that was gone may come back.
        """
        todo = list(dict.fromkeys(path for staged in batch for path in staged.files))
        self._read = dict.fromkeys([*(path for staged in batch for path in staged.gone), *todo])
        for attempt in range(_TRIES):
            if todo:
                self._read_once(todo)
            todo = [path for path in self._read if self._has_changed(path)]
            if not todo:
                return
            if attempt:
                time.sleep(_PAUSE_S)
        for path in todo:
            text = f"{path} keeps changing while it is read"
            self._read[path] = PublishError(FailureCode.UNSETTLED, text, "write it elsewhere, then rename")

    def _has_changed(self, path: str) -> bool:
        read = self._read[path]
        if isinstance(read, PublishError):
            return False
        if self._folders.stamp(path) != (read.stamp if read else None):
            return True
        # A half-written file: `watch` writes another job when it is complete.
        return path in self._of_watch and self._folders.is_being_written(path, time.time())

    def _read_once(self, paths: Sequence[str]) -> None:
        self._find_filtered(paths)
        by_git: dict[str, _Read] = {}
        for done, path in enumerate(paths):
            self._git.check_running()
            if done % _PROGRESS_STEP == 0:
                self._staging.progress("stage", done, len(paths))
            self._read[path] = read = self._read_file(path)
            if isinstance(read, _Read) and not read.file.blob:
                by_git[path] = read
            elif isinstance(read, _Read):
                self._keep(read.file)
        for path, blob in self._add_to_index([*by_git]).items():
            by_git[path].file.blob = blob
        self._staging.progress("stage", len(paths), len(paths))

    def _keep(self, file: Entry) -> None:
        """Keep a file's content in memory; store all kept contents in the repository once they are too large.

        The repository gets the contents that were read. A file that changes later is read and stored again.
        """
        if file.content is None:
            return
        self._kept.append(file)
        self._kept_bytes += len(file.content)
        if self._kept_bytes > KEPT_BYTES:
            write_blobs(self._git, (each.content for each in self._kept if each.content is not None))
            for each in self._kept:
                each.content = None
            self._kept.clear()
            self._kept_bytes = 0

    def _find_filtered(self, paths: Collection[str]) -> None:
        if self._git.config("core.autocrlf").lower() in ALL_TEXT:
            self._filtered.update(paths)
        if not self._has_attributes:
            return
        fields = self._git.fields(*_CHECK_ATTRIBUTES, lines=paths)
        for path, attribute, value in zip(fields[::3], fields[1::3], fields[2::3], strict=True):
            if value not in ("unspecified", "unset"):
                self._filtered.add(path)
            if attribute == "filter" and value not in ("unspecified", "unset"):
                self._with_program.add(path)
            if (attribute, value) == ("filter", "lfs"):
                self._lfs.add(path)

    def _read_file(self, path: str) -> _Read | PublishError | None:
        """Return what was read; without its blob if git has to read it."""
        was, blob = self._tree.get(path), ""
        try:
            most = -1 if path in self._filtered else LARGE
            status, content = self._folders.read(path, self._staging.max_file_bytes, most)
            if content is not None:
                blob = blob_id(content, len(self._tip))
                if was is not None and was.blob == blob:
                    content = None
        except (FileNotFoundError, NotADirectoryError):
            return None
        except PathRefusedError as refused:
            return PublishError(FailureCode.NO_PATHS, *refused.refusal)
        except PublishError as error:
            return error
        except (OSError, MemoryError) as error:
            return unreadable(path, error)
        is_executable = bool(status.st_mode & stat.S_IXUSR)
        if self._keep_modes:
            is_executable = was is not None and was.mode == "100755"
        return _Read(Entry("100755" if is_executable else "100644", blob, content), stamp_of(status))

    def _add_to_index(self, paths: Sequence[str]) -> dict[str, str]:
        """Add the files to an index of their own, as `git add` does; return the blobs.

        A filter that fails concerns its own file alone. What the filter prints decides nothing: git does not
        tell these words from its own, and says of a filter that cannot be started that "the remote hung up".
        """
        try:
            return self._add_all_to_index(paths)
        except CommandTimeoutError:
            raise
        except PublishError:
            if self._with_program.isdisjoint(paths):
                raise
        found = self._add_all_to_index([path for path in paths if path not in self._with_program])
        for path in self._with_program.intersection(paths):
            self._git.check_running()
            try:
                found |= self._add_all_to_index([path])
            except CommandTimeoutError:
                raise
            except PublishError as error:
                self._read[path] = _unfiltered(path, error)
        return found

    def _add_all_to_index(self, paths: Sequence[str]) -> dict[str, str]:
        """Add the files to an index of their own; return the blobs.

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
            files = {path: entry for path, entry in known.items() if entry.mode not in (FOLDER, SUBMODULE)}
            set_entries(self._git, files, env)
            self._git.fields("update-index", "--add", "--replace", "-z", "--stdin", lines=paths, env=env)
            listed = [line.partition("\t") for line in self._git.fields("ls-files", "--stage", "-z", env=env)]
        found = {path: about.split()[1] for about, _, path in listed}
        return {path: found[path] for path in paths}

    # The result

    def _finish(self, staged: Staged, declared: Collection[str]) -> None:
        changes = self._changes(staged)
        lost = [path for path in staged.files if self._read.get(path) is None]
        staged.find_missing(self._tree, declared, lost)
        is_rejected = all({each, path} & staged.rejected.keys() for each, path in staged.places.items())
        if staged.failure is None and is_rejected:
            staged.failure = Failure(FailureCode.NO_PATHS, *self._why(staged.rejected))
        if staged.failure is None:
            staged.changes = changes
            staged.uses_lfs = not self._lfs.isdisjoint(changes)

    def _changes(self, staged: Staged) -> dict[str, Entry | None]:
        """Return the changes by path, deletions first; reject what cannot be read, or be where it is."""
        changes: dict[str, Entry | None] = {}
        for path in (*staged.gone, *staged.files):
            known, was = self._read.get(path), self._tree.get(path)
            if isinstance(known, PublishError):
                staged.rejected[path] = Refusal(known.message, known.fix)
                if known.code is not FailureCode.NO_PATHS:
                    staged.failure = known.failure
            elif known is None:
                if was is not None:
                    changes[path] = None
            elif reason := self._obstacle(staged, path):
                staged.rejected[path] = reason
                # What only this path would have removed stays; what the job itself declares is removed.
                own = [place for place in staged.places.values() if place.startswith(f"{path}/")]
                for each in self._tree.below(path):
                    if not any(is_inside(place, each) for place in own):
                        changes.pop(each, None)
            elif was is None or was != known.file:
                changes[path] = known.file
        return changes

    def _obstacle(self, staged: Staged, path: str) -> Refusal | None:
        """Return why the file cannot be where the tip has a file above it, or a folder in its place."""
        for above in parents(path):
            if (entry := self._tree.get(above)) and entry.mode != FOLDER and above not in staged.gone:
                return Refusal(f"it would replace the file {above}", "declare that path, too")
        stays = next((each for each in self._tree.below(path) if each not in staged.gone), None)
        if stays is None:
            return None
        text = f"it would take the place of a folder in which {stays} stays"
        return Refusal(f"{text}, as that is scheduled, left out or not allowed", "use another name")

    def _why(self, rejected: Mapping[str, Refusal]) -> tuple[str, str]:
        """Return why nothing may be published, and what to do about each of the first paths."""
        if not rejected:
            return "the job declares no paths", "list what to publish"
        # No colon behind a path: after such as `config/secret`, redaction would hide what follows.
        shown = list(rejected.items())[:3]
        first = "; ".join(f"{path}, as {refusal.text}" for path, refusal in shown)
        more = f" (and {len(rejected) - 3} more)" if len(rejected) > 3 else ""  # noqa: PLR2004
        fixes = dict.fromkeys(refusal.fix for _, refusal in shown)
        return f"none of its paths may be published: {first}{more}", "; ".join(fixes)


def _unfiltered(path: str, error: PublishError) -> PublishError:
    """Return the failure of one file whose filter failed."""
    code = error.code if error.code is FailureCode.DISK else FailureCode.UNSETTLED
    fix = "correct or install the filter's program: git check-attr filter -- FILE names the filter"
    return PublishError(code, f"the filter of {path} failed: {error.message}", fix)


def _first_saved_at(job: Job) -> float:
    return min(job.created_at, job.first_saved_at or job.created_at)


def ignored_paths(git: Git, paths: Collection[str]) -> set[str]:
    """Return which of the paths, none of which is in the index, git ignores."""
    if not paths or not _has_rules(git, paths, ".gitignore"):
        return set()
    # Without the index: git stops at the first path that is in a submodule there.
    return {*git.fields("check-ignore", "--no-index", "-z", "--stdin", lines=paths, ok=(0, 1))}


def _has_rules(git: Git, paths: Iterable[str], name: str) -> bool:
    """Return False if a cluster's clone, which has no index, has no such file: then git need not be asked."""
    if (root := git.worktree) is None:
        return False
    folders = {"", *(above for path in paths for above in parents(path))}
    return (git.git_dir / "index").exists() or any(os.path.lexists(root / each / name) for each in folders)


def sparse_paths(git: Git, paths: Collection[str]) -> set[str]:
    """Return what the index has at and below the paths, and the work tree deliberately has not."""
    if not paths:
        return set()
    listed = git.fields("--literal-pathspecs", "ls-files", "-z", "-t", "--", *paths)
    return {line[2:] for line in listed if line.startswith("S ")}
