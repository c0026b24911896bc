"""What jobs carry where the publisher cannot read the CMS's work tree: gather it, and publish from it.

A producer gathers the files that a job declares. Where its folder has a git repository, the payload says
which version of each file its author started from, and leaves out what git ignores.

A node stages a batch's files like the CMS's own: from memory, or from a temporary work tree where git has to
read them, because of their size or of the branch's `.gitattributes` and `.gitignore`. Where several jobs
bring one path, the version saved last counts, whichever job brought it: in the CMS's work tree, too, a file
is there once.
"""

from __future__ import annotations

import io
import stat
import tempfile
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from briter_worker.allowlist import Allowlist, PathRefusedError, is_inside, normalized, parents
from briter_worker.errors import (
    DeclinedError,
    Failure,
    FailureCode,
    PublishError,
    UnavailableError,
    UsageError,
)
from briter_worker.git.folders import Folders, PlainFile, PlainFiles, Staged, Tree, read_tree
from briter_worker.git.merge import Base
from briter_worker.git.repository import FOLDER, Repository, blob_of
from briter_worker.git.run import Git
from briter_worker.git.staging import ALL_TEXT, IGNORED, KEPT_BYTES, LARGE, ignored_paths, sparse_paths
from briter_worker.git.undo import versions_to_restore
from briter_worker.git.work_tree import BlockedError, WorkTree
from briter_worker.ports import RESTORE, BaseVersion, Payload, SubmittedFile, blob_id

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from briter_worker.git.merge import Item
    from briter_worker.git.staging import Staging
    from briter_worker.ports import BaseVersions, Claim, Payloads, PublishedVersion

_GIT_TIMEOUT_S = 60.0
_ANY_SIZE = 2**63
_RULES = (".gitattributes", ".gitignore")
_READ_BY_GIT = frozenset({*_RULES, ".git", "HEAD"})
"""Names of rule files, and of what makes a folder a nested repository."""
_saved_at = attrgetter("saved_at")
_UNKNOWN = 0.0
"""Time of saving of a folder in which nothing was left."""


class GatherError(UsageError, ValueError):
    """Report files that cannot be sent as they are."""


@dataclass(frozen=True)
class Gathered:
    """The payload of a new job. Contents stay in their files until they are asked for."""

    root: Path
    paths: tuple[str, ...]
    """The paths to declare: without those that are left out."""
    payload: Payload
    left_out: Mapping[str, str]
    """Reasons for the paths that are not sent."""
    missing: tuple[str, ...]
    """Declared paths where nothing is, nor was in the version that the author started from."""
    sources: Mapping[str, str]
    """A file for each blob."""

    def content(self, blob: str) -> bytes:
        """Return the content as it is by now: compare it with its id."""
        with _opened(self.root) as folders:
            return folders.read(self.sources[blob], _ANY_SIZE)[1] or b""


def gather(root: Path, paths: Sequence[str], *, allowlist: Allowlist, max_bytes: int) -> Gathered:
    """Return everything below `root` that these paths declare. The database knows when they were saved.

    Raises GatherError for what cannot be sent as a whole, and OSError for what cannot be read.
    """
    found = Staged()
    try:
        with _opened(root) as folders:
            for path in paths:
                found.expand(folders, allowlist, path)
            history = _read_history(root, set(found.places.values()), found.files)
            found.compare(history.tree, allowlist)
            found.find_missing(history.tree, paths)
            sent: dict[str, tuple[str, str | None]] = {}
            for path in [path for path in found.files if path not in history.ignored]:
                status, content = folders.read(path, max_bytes)
                mode = "100755" if status.st_mode & stat.S_IXUSR else "100644"
                sent[path] = mode, blob_id(content or b"")  # jobs name their contents by SHA-1
    except PublishError as error:
        raise GatherError(error.message, error.fix) from error
    # What the allowlist refuses is declared all the same: the worker refuses and logs it.
    unsafe = {*paths} - found.places.keys()
    left_out = {
        found.places.get(each, each): str(found.rejected[each]) for each in found.rejected.keys() - unsafe
    }
    stays = (*left_out, *history.sparse)
    declared = dict.fromkeys(found.places.get(each, each) for each in paths)
    left_out |= dict.fromkeys(history.ignored & declared.keys(), str(IGNORED))
    sources = {blob: path for path, (_, blob) in sent.items() if blob}
    # Absent paths are sent as deleted, also unknown ones: another copy may have them.
    for path in (*found.absent, *found.gone):
        if not any(is_inside(path, each) for each in history.sparse):
            sent[path] = "", None
    files = [
        SubmittedFile(path, *each, _UNKNOWN, history.base(path), history.has_git)
        for path, each in sent.items()
    ]
    whole = [each for each in found.folders if not any(is_inside(each, path) for path in stays)]
    return Gathered(
        root,
        tuple(path for path in declared if path not in left_out),
        Payload(tuple(files), tuple(whole)),
        left_out,
        tuple(path for path in found.missing if history.has_git),
        sources,
    )


@dataclass(slots=True)
class _History:
    """The state of some paths in the folder's git; empty where the folder has none."""

    has_git: bool = False
    tree: Tree = field(default_factory=lambda: Tree({}))
    """The version that the author started from."""
    sparse: set[str] = field(default_factory=set)
    """Paths that a sparse checkout leaves out: nobody deleted them."""
    ignored: set[str] = field(default_factory=set)

    def base(self, path: str) -> str | None:
        return Base.of(self.tree.get(path)).blob


def _read_history(root: Path, places: set[str], files: Iterable[str]) -> _History:
    if not (root / ".git").exists():
        return _History()
    history = _History(has_git=True)
    git = Git(root, remote="origin", timeout=_GIT_TIMEOUT_S)
    try:
        history.sparse = sparse_paths(git, places)
        if places and git.attempt("rev-parse", "--verify", "--quiet", "HEAD")[0] == 0:
            history.tree = Tree(read_tree(Repository(git, branch="", remote="origin"), "HEAD", places))
        history.ignored = ignored_paths(git, [path for path in files if history.tree.get(path) is None])
    finally:
        git.close()
    return history


@contextmanager
def _opened(root: Path) -> Iterator[Folders]:
    folders = Folders(root)
    try:
        yield folders
    except PathRefusedError as refused:
        raise GatherError(f"a file cannot be sent: {refused.reason}") from None
    finally:
        folders.close()


def write_files(
    root: Path, allowlist: Allowlist, payloads: Payloads, files: Iterable[SubmittedFile]
) -> dict[str, str]:
    """Write submitted files below `root`, oldest save first, where the CMS has not changed them since.

    Return the reason for each path that was not written.
    """
    kept: dict[str, str] = {}
    versions: dict[str, list[SubmittedFile]] = {}
    for file in sorted(files, key=_saved_at):
        try:
            versions.setdefault(allowlist.resolve(file.path), []).append(file)
        except PathRefusedError as refused:
            kept[file.path] = refused.reason
    history = _read_history(root, {*versions}, ())
    with tempfile.TemporaryDirectory() as aside, closing(WorkTree(root, Path(aside, "journal"))) as work_tree:
        for path, saves in versions.items():
            file = saves[-1]
            known = {None, history.base(path), *(each.blob for each in saves)}
            known |= {each.base for each in saves if each.has_base}
            try:
                status, here = work_tree.read(path)
                is_done = here in known
                if is_done and here != file.blob:
                    new = None
                    if file.blob is not None:
                        content = io.BytesIO(payloads.content(file.blob))
                        is_executable = file.mode == "100755"
                        new = work_tree.copy_beside(path, content, executable=is_executable, like=status)
                    is_done = work_tree.put(new, path, status)
            except BlockedError as error:
                kept[path] = str(error.strerror)
                continue
            if not is_done:
                kept[path] = "it was changed here since; what is here will be published"
    return kept


class SubmittedCopies:
    """The copies of a cluster's authors: nothing follows the remote."""

    def __init__(self, staging: Staging, payloads: Payloads, store: BaseVersions) -> None:
        self._repository = staging.repository
        self._payloads = payloads
        self._store = store
        self._allowlist = staging.allowlist
        self._staging = staging
        self._saves = _Saves({})
        self._staged_payloads: Mapping[str, Payload] = {}

    def stage(
        self, claims: Sequence[Claim], *, tip: str, scheduled: Mapping[str, float]
    ) -> dict[str, Staged]:
        """Return what each claim changes on `tip`, by its key."""
        payloads = dict(self._payloads.of([claim.key for claim in claims]))
        refused = self._resolve_undos(payloads)
        self._saves = saves = _Saves(payloads)
        self._staged_payloads = payloads
        git = self._repository.git
        try:
            there, rules, is_plain = self._find_files(tip, claims)
            if is_plain and (plain := self._read_files(there)) is not None:
                given = PlainFiles(plain, self.read)
                staged = self._staging.stage(claims, tip=tip, scheduled=scheduled, files=given)
            else:
                with tempfile.TemporaryDirectory(prefix="worktree-", dir=git.state_dir) as folder:
                    self._write_files(Path(folder), there, rules)
                    git.worktree = Path(folder)
                    staged = self._staging.stage(claims, tip=tip, scheduled=scheduled)
        except UnavailableError:
            raise
        except OSError as error:
            raise PublishError.from_os("the posts' files cannot be written", error) from error
        finally:
            git.worktree = None
        paths = set(saves.files).union(*(each.changes for each in staged.values()))
        published = self._payloads.published(paths)
        known = self._store.bases(paths)
        for key, each in staged.items():
            files = payloads[key].files if key in payloads else ()
            self._leave_out_others(key, each, files, published, known)
            failure = refused.get(key) or self._find_outdated(files, published, known)
            if failure is not None:
                each.failure = failure
                each.changes = {}
        return staged

    def _leave_out_others(
        self,
        key: str,
        staged: Staged,
        files: Sequence[SubmittedFile],
        published: Mapping[str, PublishedVersion],
        known: Mapping[str, BaseVersion],
    ) -> None:
        """Leave out changes that are not the CMS's, or older than what is published; note unchanged files."""
        decided = staged.rejected.keys() | staged.changes.keys() | staged.withheld.keys()
        staged.changes = {
            path: change
            for path, change in staged.changes.items()
            if self._saves.is_wanted(path, published.get(path), is_known=path in known)
        }
        staged.missing = [path for path in staged.missing if not self._came_with(key, staged.places[path])]
        staged.unchanged = {}
        for file in files:
            is_newest_save = self._saves.files[file.path].blob == file.blob
            is_older = _is_older(file, published.get(file.path))
            if file.path not in decided and is_newest_save and not is_older:
                staged.unchanged[file.path] = file.blob

    def _find_outdated(
        self,
        files: Sequence[SubmittedFile],
        published: Mapping[str, PublishedVersion],
        known: Mapping[str, BaseVersion],
    ) -> Failure | None:
        """Return the failure of a job if the remote has a later version of one of its files."""
        failure = None
        for file in files:
            version = published.get(file.path)
            if version is None or not version.outdated_by:
                continue
            base = known.get(file.path)
            is_on_remote = base is not None and base.blob == file.blob
            if _is_older(self._saves.files[file.path], version) and not is_on_remote:
                failure = _outdated(file, version, base)
        return failure

    def _came_with(self, key: str, place: str) -> bool:
        """Return True if the job says what is at the path: a content, a deletion, or a complete folder."""
        payload = self._staged_payloads.get(key, Payload())
        if self._saves.last(place) is not None or place in payload.folders:
            return True
        return any(is_inside(place, file.path) for file in payload.files)

    def find_stashed(self, claims: Sequence[Claim], staged: Mapping[str, Staged], tip: str) -> None:
        """Do nothing: jobs carry their contents, whatever happens to the CMS's files."""

    def find_unresolved(self, claims: Sequence[Claim], staged: Mapping[str, Staged]) -> None:
        """Do nothing: git writes into none of these contents."""

    def find_restored(self, items: Sequence[Item]) -> Mapping[str, str]:  # noqa: ARG002 - as of a work tree
        """Return nothing: jobs carry their contents."""
        return {}

    def ever_had(self, paths: Collection[str]) -> Collection[str]:
        """Return which of these declared paths were ever published by the cluster."""
        places = {normalized(path): path for path in paths}
        return {places[place] for place in self._payloads.published(places)}

    def _resolve_undos(self, payloads: dict[str, Payload]) -> dict[str, Failure]:
        """Replace what undos restore by the versions to publish; return the failures of those that cannot."""
        refused = {}
        for key, payload in payloads.items():
            undone = {file.path: file for file in payload.files if file.mode.startswith(RESTORE)}
            if not undone:
                continue
            files = [file for file in payload.files if file.path not in undone]
            _, last, to = next(iter(undone.values())).mode.split(" ")
            try:
                found = versions_to_restore(self._repository, last, to, undone.keys())
            except (DeclinedError, UsageError) as error:
                refused[key], found = Failure(FailureCode.REJECTED, error.message, error.fix), {}
            for path, (wanted, published) in found.items():
                mode, blob = (wanted.mode, wanted.blob) if wanted else ("", None)
                base = published.blob if published else None
                files.append(SubmittedFile(path, mode, blob, undone[path].saved_at, base, has_base=True))
            payloads[key] = payload._replace(files=tuple(files))
        return refused

    def _find_files(
        self, tip: str, claims: Sequence[Claim]
    ) -> tuple[dict[str, SubmittedFile], dict[str, str], bool]:
        """Return the files by path, and the blobs of the tip's rule files along their folders.

        Without the rule files that the CMS has removed. The last one is True if no work tree would say more:
        each path that is declared is a file, with no rules, and no folder or nested repository in its way.
        """
        allowed, folders = dict[str, SubmittedFile | None](), {""}
        for path in (*(path for claim in claims for path in claim.job.paths), *self._saves.files):
            with suppress(PathRefusedError):
                resolved, file = self._allowlist.resolve(path), self._saves.last(path)
                allowed[resolved] = file
                folders.update(parents(resolved if file and file.blob else f"{resolved}/"))
        there = {path: file for path, file in allowed.items() if file and file.blob}
        rules = {f"{folder}/{name}".lstrip("/") for folder in folders for name in _RULES}
        # Asked together with what staging asks for next: the repository remembers it.
        entries = self._repository.entries(tip, rules | allowed.keys() | folders - {""})
        found = {
            path: entry.blob
            for path, entry in entries.items()
            if path in rules
            and entry.mode in ("100644", "100755")
            and (path.endswith(".gitattributes") or (last := self._saves.last(path)) is None or last.blob)
        }
        is_plain = (
            len(there) == len(allowed)
            and not found
            and folders.isdisjoint(there)
            and not any(path in entries and entries[path].mode == FOLDER for path in there)
            and _READ_BY_GIT.isdisjoint(name for path in there for name in path.split("/"))
            and self._repository.git.config("core.autocrlf").lower() not in ALL_TEXT
        )
        return there, found, is_plain

    def _read_files(self, there: Mapping[str, SubmittedFile]) -> dict[str, PlainFile] | None:
        """Return each file, the first ones with their contents; None if one is too large to be kept."""
        files, kept = {}, 0
        for path, file in there.items():
            self._repository.git.check_running()
            content = self.read(str(file.blob))
            if len(content) > min(LARGE, self._staging.max_file_bytes):
                return None
            kept += len(content)
            mode = "100755" if file.mode == "100755" else "100644"
            files[path] = PlainFile(
                mode, len(content), content if kept <= KEPT_BYTES else None, str(file.blob)
            )
        return files

    def _write_files(self, root: Path, there: Mapping[str, SubmittedFile], rules: Mapping[str, str]) -> None:
        for path, file in sorted(there.items(), key=lambda item: item[1].saved_at, reverse=True):
            self._repository.git.check_running()
            _write_new(root / path, self.read(str(file.blob)), 0o755 if file.mode == "100755" else 0o644)
        contents = self._repository.blobs(rules.values()) if rules else []
        for path, content in zip(rules, contents, strict=True):
            _write_new(root / path, content)

    def bases(self, paths: Collection[str], tip: str) -> Mapping[str, Base]:
        """Return what came with the jobs, or what is remembered of earlier publications."""
        known, own = self._store.bases(paths), self._saves.files
        found = {path: Base(own[path].base) for path in paths if path in own and own[path].has_base}
        entries = self._repository.entries(tip, known.keys() & found.keys())
        for path, version in known.items():
            # The remembered version is what the copy was published as. Where the copy has seen what the
            # remote has now, that is newer.
            if path not in entries or found[path].blob != entries[path].blob:
                found[path] = Base(version.blob)
        return found

    def read(self, blob: str) -> bytes:
        """Return the content of a blob; of a base version, the database may have the only one."""
        with suppress(LookupError):
            return self._payloads.content(blob)
        try:
            return self._repository.blob(blob)
        except PublishError as error:
            if error.code is FailureCode.CORRUPT:
                raise LookupError(blob) from error
            raise

    def sync(self, tip: str, blobs: Mapping[str, str | None]) -> None:
        """Remember what the authors' copies are: their next saves are edits of that.

        Raises UnavailableError: nothing of this may be acknowledged before it is remembered.
        """
        if not blobs:
            return
        try:
            entries = self._repository.entries(tip, blobs.keys())
        except PublishError:  # the clone is damaged or gone: then every version is kept
            entries = {}
        contents: dict[str, bytes] = {}
        for blob in {blob for path, blob in blobs.items() if blob and blob != blob_of(entries.get(path))}:
            with suppress(LookupError):  # merged on its way
                contents[blob] = self._payloads.content(blob)
        self._store.remember({path: BaseVersion(blob) for path, blob in blobs.items()}, contents, tip)

    def catch_up(self) -> None:
        """Do nothing: what is remembered is never late."""


def _outdated(file: SubmittedFile, version: PublishedVersion, base: BaseVersion | None) -> Failure:
    theirs = f"the blob {base.blob[:10]}" if base and base.blob else "a deletion"
    ours = f"the blob {file.blob[:10]}" if file.blob else "a deletion"
    return Failure(
        FailureCode.OUTDATED,
        f"the remote has a later version of {file.path}: commit {version.outdated_by[:10]} with {theirs}, "
        f"and this save has {ours}; the database was restored from a backup in between",
        "briter-worker publish-now ID-or-SLUG --over publishes this save; briter-worker cancel drops it",
    )


def _write_new(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write the file, unless one is there, or what was saved later has a folder there or a file above it."""
    with suppress(FileExistsError, NotADirectoryError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            file.write(content)
        path.chmod(mode)


def _is_older(file: SubmittedFile, published: PublishedVersion | None) -> bool:
    return published is not None and file.saved_at < published.saved_at


class _Folder(NamedTuple):
    """All that was below a folder when it was saved."""

    saved_at: float
    paths: Collection[str]
    names_deletions: bool
    """The CMS's own git knows what was there, so that the job names each deleted file."""


class _Saves:
    """The saves of a batch's jobs by path; of several, the last one counts."""

    def __init__(self, payloads: Mapping[str, Payload]) -> None:
        files = sorted((file for each in payloads.values() for file in each.files), key=_saved_at)
        self.files = {file.path: file for file in files}
        # What was deleted may have been a folder.
        gone = (file for file in self.files.values() if file.blob is None)
        folders = [(file.path, _Folder(file.saved_at, (), file.has_base)) for file in gone]
        for payload in payloads.values():
            has_git = any(file.has_base for file in payload.files)
            for folder in payload.folders:
                below = [file for file in payload.files if is_inside(folder, file.path)]
                saved_at = max(map(_saved_at, below or payload.files), default=_UNKNOWN)
                folders.append((folder, _Folder(saved_at, {file.path for file in below}, has_git)))
        self._folders = dict(sorted(folders, key=lambda item: item[1].saved_at))

    def last(self, path: str) -> SubmittedFile | None:
        """Return the file as it was saved last, or as it was absent; None where no job has anything of it."""
        own = [self.files[path]] if path in self.files else []
        above = [folder for each in parents(path) if (folder := self._folders.get(each))]
        absent = [
            SubmittedFile(path, "", None, each.saved_at, None, each.names_deletions)
            for each in above
            if path not in each.paths
        ]
        return max(own + absent, key=_saved_at, default=None)

    def is_wanted(self, path: str, published: PublishedVersion | None, *, is_known: bool) -> bool:
        """Return True if a change of the path is the CMS's, and was not saved before the published version.

        `is_known`: a copy of the CMS's had the file.
        """
        last = self.last(path)
        if last is None or (path not in self.files and last.has_base and not (is_known or published)):
            return False  # a colleague has added the file: no copy of the CMS's had it, nor lost it
        return last.saved_at == _UNKNOWN or not _is_older(last, published)
