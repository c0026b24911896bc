"""Read the files that a job declares, to be sent along with it, and write them back into a folder.

Where the folder has a git repository, the payload says which version of each file its author started from,
and leaves out what git ignores.
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from briter_worker.allowlist import Allowlist, PathRefusedError, is_inside
from briter_worker.errors import PublishError, UsageError
from briter_worker.git.commits import blob_id
from briter_worker.git.folders import Expansion, Folders, Refused, expand_paths, read_pieces
from briter_worker.git.repository import FOLDER, SUBMODULE, Repository
from briter_worker.git.run import Git
from briter_worker.git.staging import IGNORED, ignored_paths, sparse_paths
from briter_worker.ports import Payload, SubmittedFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from briter_worker.ports import Payloads

_GIT_TIMEOUT_S = 60.0
_ANY_SIZE = 2**63
_SHA1 = "0" * 40
"""Jobs name their contents by SHA-1."""


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
    sizes: Mapping[str, int]

    def content(self, blob: str) -> Iterator[bytes]:
        """Yield the content in pieces, as it is by now: compare it with its id."""
        with _opened(self.root) as folders, folders.file(self.sources[blob]) as fd:
            yield from read_pieces(fd, _ANY_SIZE)


@dataclass(slots=True)
class _History:
    """What the folder's git knows of some paths; nothing where it has no git."""

    has_git: bool = False
    head: dict[str, str] = field(default_factory=dict)
    """Blobs of the version that the author started from."""
    sparse: set[str] = field(default_factory=set)
    """Paths that a sparse checkout leaves out."""
    ignored: set[str] = field(default_factory=set)

    def submit(self, path: str, mode: str, blob: str | None, saved_at: float) -> SubmittedFile:
        return SubmittedFile(path, mode, blob, saved_at, self.head.get(path), self.has_git)

    def is_sparse(self, path: str) -> bool:
        return any(is_inside(path, each) for each in self.sparse)

    def had(self, path: str) -> bool:
        """Return True if there was a file or a folder of this name, or if that is not known."""
        return not self.has_git or any(is_inside(path, each) for each in self.head)


def gather(
    root: Path, paths: Sequence[str], *, allowlist: Allowlist, max_bytes: int, saved_at: float
) -> Gathered:
    """Return everything below `root` that these paths declare, each file hashed while it held still.

    Raises GatherError for what cannot be sent as a whole, and OSError for what cannot be read.
    """
    try:
        with _opened(root) as folders:
            found = expand_paths(folders, allowlist, paths)
            history = _read_history(root, set(found.places.values()), found.files)
            files = [path for path in found.files if path not in history.ignored]
            read = {path: _read(folders, path, max_bytes) for path in files}
    except PublishError as error:
        raise GatherError(error.message, error.fix) from error
    places = {declared: found.places.get(declared, declared) for declared in paths}
    left_out = {
        places.get(each, each): why for each, why in found.rejected.items() if _is_refused(found, each)
    }
    for path in history.ignored & set(places.values()):
        left_out[path] = IGNORED
    whole, gone = _find_gone(found, history, read.keys() | left_out.keys())
    return Gathered(
        root,
        tuple(dict.fromkeys(path for path in places.values() if path not in left_out)),
        Payload(
            (
                *(history.submit(path, each.mode, each.blob, saved_at) for path, each in read.items()),
                *(history.submit(path, "", None, saved_at) for path in gone),
            ),
            tuple(whole),
        ),
        left_out,
        tuple(path for path in found.absent if path in gone and not history.had(path)),
        {each.blob: path for path, each in read.items()},
        {each.blob: each.size for each in read.values()},
    )


def _is_refused(found: Expansion, path: str) -> bool:
    """Return False for a path that the allowlist refuses: the worker does that, and logs it."""
    return path in found.places or path in found.closed


def _find_gone(found: Expansion, history: _History, kept: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the folders that are sent as a whole, and the paths that were deleted elsewhere.

    The site deletes what it has below a whole folder and the payload lacks. Below another one, only what is
    named is deleted. Nobody deleted what a sparse checkout leaves out.
    """
    gone = {path: None for path in found.absent if not history.is_sparse(path)}
    whole = []
    for folder in (*found.folders, *(path for path in found.absent if history.is_sparse(path))):
        closed = any(is_inside(folder, path) for path in found.closed)
        if folder in found.folders and not closed and not history.is_sparse(folder):
            whole.append(folder)
            continue
        below = (path for path in history.head if is_inside(folder, path) and path not in history.sparse)
        gone |= {path: None for path in below if not any(is_inside(each, path) for each in kept)}
    return whole, list(gone)


def _read_history(root: Path, places: Iterable[str], files: Iterable[str]) -> _History:
    if not (root / ".git").exists():
        return _History()
    history, wanted = _History(has_git=True), sorted(places)
    git = Git(root, remote="origin", timeout=_GIT_TIMEOUT_S)
    try:
        history.sparse = sparse_paths(git, wanted)
        if wanted and git.attempt("rev-parse", "--verify", "--quiet", "HEAD")[0] == 0:
            repository = Repository(git, branch="", remote="origin")
            tree = repository.entries("HEAD", wanted) | repository.entries_below("HEAD", wanted)
            no_files = (FOLDER, SUBMODULE)
            history.head = {path: each.blob for path, each in tree.items() if each.mode not in no_files}
        history.ignored = ignored_paths(git, [path for path in files if path not in history.head])
    finally:
        git.close()
    return history


@dataclass(frozen=True, slots=True)
class _Read:
    """A file as it was read."""

    mode: str
    blob: str
    size: int


def _read(folders: Folders, path: str, max_bytes: int) -> _Read:
    content, status = folders.read(path, max_bytes)
    mode = "100755" if status.st_mode & stat.S_IXUSR else "100644"
    return _Read(mode, blob_id(content, like=_SHA1), len(content))


@contextmanager
def _opened(root: Path) -> Iterator[Folders]:
    folders = Folders(root)
    try:
        yield folders
    except Refused as refused:
        raise GatherError(f"a file cannot be sent: {refused.reason}") from None
    finally:
        folders.close()


def write_files(
    root: Path, allowlist: Allowlist, payloads: Payloads, files: Iterable[SubmittedFile]
) -> dict[str, str]:
    """Write submitted files below `root`, oldest save first, where the CMS has not changed them since.

    Return the reason for each path that was not written.
    """
    wanted = sorted(files, key=lambda file: file.saved_at)
    head = _read_history(root, {file.path for file in wanted if _is_allowed(allowlist, file.path)}, ()).head
    kept: dict[str, str] = {}
    written: dict[str, set[str | None]] = {}
    with _opened(root) as folders:
        for file in wanted:
            try:
                path = allowlist.resolve(file.path)
                kept.pop(path, None)
                here = _blob_at(folders, path)
                expected = {
                    None,
                    head.get(path),
                    *written.get(path, ()),
                    *([file.base] if file.has_base else []),
                }
                if here != file.blob:
                    if here not in expected:
                        kept[path] = "it was changed here since; what is here will be published"
                        continue
                    _write_file(root, folders, path, file, payloads)
                written.setdefault(path, set()).add(file.blob)
            except (PathRefusedError, Refused) as refused:
                kept[file.path] = refused.reason
    return kept


def _is_allowed(allowlist: Allowlist, path: str) -> bool:
    try:
        allowlist.resolve(path)
    except PathRefusedError:
        return False
    return True


def _blob_at(folders: Folders, path: str) -> str | None:
    try:
        return _read(folders, path, _ANY_SIZE).blob
    except (FileNotFoundError, NotADirectoryError):
        return None


def _write_file(root: Path, folders: Folders, path: str, file: SubmittedFile, payloads: Payloads) -> None:
    parent, _, name = path.rpartition("/")
    if file.blob is None:
        os.unlink(name, dir_fd=folders.open(parent))
        return
    # Not where a job's folder could carry it, if this process dies here.
    aside = root / ".git" if (root / ".git").is_dir() else root
    handle, temporary = tempfile.mkstemp(prefix=".briter-", dir=aside)
    try:
        with os.fdopen(handle, "wb") as content:
            content.writelines(payloads.content(file.blob))
            os.fchmod(content.fileno(), 0o755 if file.mode == "100755" else 0o644)
            content.flush()
            os.fsync(content.fileno())
        folder = folders.make(parent)
        if os.geteuid() == 0:  # the CMS has to be able to edit it
            like = os.fstat(folder)
            os.chown(temporary, like.st_uid, like.st_gid)
        os.replace(temporary, name, dst_dir_fd=folder)
    finally:
        with suppress(FileNotFoundError):
            Path(temporary).unlink()
