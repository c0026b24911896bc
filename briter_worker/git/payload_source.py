"""Stage the files that jobs carry, where the publisher cannot read the CMS's work tree.

The batch's files are written into a temporary work tree and staged like the CMS's own, with the branch's
`.gitattributes` and `.gitignore`. Where several jobs bring one path, the version saved last counts, whichever
job brought it: in the CMS's work tree, too, a file is there once.
"""

from __future__ import annotations

import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from briter_worker.allowlist import PathRefusedError
from briter_worker.errors import Failure, FailureCode, PublishError, UnavailableError
from briter_worker.git.commits import blob_id
from briter_worker.git.staging import WorkTreeSource, parents

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from briter_worker.allowlist import Allowlist
    from briter_worker.git.repository import Repository
    from briter_worker.git.staging import Staged
    from briter_worker.ports import BaseVersions, Change, Payload, Payloads, Request, SubmittedFile

_RULES = (".gitattributes", ".gitignore")
_FILES = ("100644", "100755")
_UNKNOWN = 0.0
"""Time of saving of a folder in which nothing was left."""


class PayloadSource:
    """Stage what a batch's jobs carry."""

    def __init__(
        self,
        repository: Repository,
        payloads: Payloads,
        *,
        bases: BaseVersions,
        allowlist: Allowlist,
        max_file_bytes: int,
        progress: Callable[[str, int, int], None],
    ) -> None:
        self._repository = repository
        self._payloads = payloads
        self._bases = bases
        self._allowlist = allowlist
        self._max_file_bytes = max_file_bytes
        self._source = WorkTreeSource(
            repository=repository, allowlist=allowlist, max_file_bytes=max_file_bytes, progress=progress
        )
        self._newest = _Newest({})

    def submitted(self, paths: Collection[str]) -> Mapping[str, SubmittedFile]:
        """Return the version of each path saved last, as far as the last batch brought it."""
        return {path: self._newest.files[path] for path in paths if path in self._newest.files}

    def stage(
        self, requests: Sequence[Request], *, tip: str, scheduled: Mapping[str, float]
    ) -> dict[str, Staged]:
        """Return what each request changes on `tip`, by its key."""
        payloads = self._payloads.of([request.key for request in requests])
        self._newest = _Newest(payloads)
        git = self._repository.git
        try:
            with tempfile.TemporaryDirectory(prefix="worktree-", dir=git.state_dir) as folder:
                unsound = self._write_files(Path(folder))
                self._write_rules(Path(folder), tip, requests)
                with git.in_worktree(Path(folder)):
                    staged = self._source.stage(requests, tip=tip, scheduled=scheduled)
        except UnavailableError:
            raise
        except OSError as error:
            raise PublishError.from_os("the posts' files cannot be written", error) from error
        paths = {change.path for each in staged.values() for change in each.changes}
        paths |= self._newest.files.keys()
        published = self._payloads.published(paths)
        known = published.keys() | self._bases.bases(paths).keys()
        return {
            key: self._judge(each, payloads.get(key), unsound, published, known)
            for key, each in staged.items()
        }

    def _write_files(self, root: Path) -> dict[str, str]:
        """Write the files; return the reason for each path whose content is not what was saved."""
        unsound = {}
        for file in self._newest.present():
            # What was saved later may be a file where this has a folder, or the other way round.
            with suppress(PathRefusedError, FileExistsError, NotADirectoryError):
                path = root / self._allowlist.resolve(file.path)
                content = self._read_content(str(file.blob))
                is_whole = len(content) <= self._max_file_bytes  # staging refuses the other
                if is_whole and blob_id(content, like=str(file.blob)) != file.blob:
                    unsound[file.path] = f"the content of {file.path} is not what was saved"
                    continue
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("xb") as written:
                    written.write(content)
                path.chmod(0o755 if file.mode == "100755" else 0o644)
        return unsound

    def _read_content(self, blob: str) -> bytes:
        """Return the content, or the beginning of one that is too large; empty if the store has none."""
        pieces, size = [], 0
        with suppress(LookupError):
            for piece in self._payloads.content(blob):
                self._repository.git.check_running()
                pieces.append(piece)
                size += len(piece)
                if size > self._max_file_bytes:
                    break
        return b"".join(pieces)

    def _write_rules(self, root: Path, tip: str, requests: Sequence[Request]) -> None:
        """Write the rule files along the folders, unless the CMS changed or removed them."""
        folders = {""}
        for path in (*self._newest.files, *(path for request in requests for path in request.paths)):
            with suppress(PathRefusedError):
                folders.update(parents(f"{self._allowlist.resolve(path)}/"))
        rules = {f"{folder}/{name}".lstrip("/") for folder in folders for name in _RULES}
        found = {
            path: entry.blob
            for path, entry in self._repository.entries(tip, rules).items()
            if entry.mode in _FILES
            and (path.endswith(".gitattributes") or self._newest.gone_at(path) is None)
        }
        contents = {blob: b"".join(pieces) for blob, pieces in self._repository.blobs(set(found.values()))}
        for path, blob in found.items():
            with suppress(FileExistsError, NotADirectoryError):
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                with (root / path).open("xb") as file:
                    file.write(contents[blob])

    def _judge(
        self,
        staged: Staged,
        payload: Payload | None,
        unsound: Mapping[str, str],
        published: Mapping[str, float],
        known: Collection[str],
    ) -> Staged:
        files = payload.files if payload else ()
        if broken := next((file.path for file in files if file.path in unsound), None):
            return replace(
                staged,
                changes=(),
                failure=Failure(FailureCode.INTERNAL, unsound[broken], "save the post again"),
            )
        rejected = dict(staged.rejected)
        for file in files:
            try:
                self._allowlist.resolve(file.path)
            except PathRefusedError as refusal:
                rejected.setdefault(file.path, refusal.reason)
        changes = tuple(each for each in staged.changes if self._is_wanted(each, published, known))
        left = rejected.keys() | {change.path for change in staged.changes} | staged.withheld.keys()
        unchanged = {
            file.path: file.blob
            for file in files
            if file.path not in left
            and self._newest.files[file.path].blob == file.blob
            and file.saved_at >= published.get(file.path, file.saved_at)
        }
        return replace(staged, changes=changes, rejected=rejected, unchanged=unchanged)

    def _is_wanted(self, change: Change, published: Mapping[str, float], known: Collection[str]) -> bool:
        """Return False for what nobody saved, and for what is older than the published version."""
        own = self._newest.files.get(change.path)
        saved_at = self._newest.gone_at(change.path)
        if change.blob is not None and own is not None:
            saved_at = own.saved_at
        if saved_at is None:
            return False
        if change.blob is None and change.path not in known and self._newest.was_never_there(change.path):
            return False  # a colleague has added it to the branch
        return saved_at == _UNKNOWN or saved_at >= published.get(change.path, saved_at)


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """All that was below a folder when it was saved."""

    saved_at: float
    paths: frozenset[str]
    names_deletions: bool
    """The CMS's own git knows what was there, so that the job names each deleted file."""


class _Newest:
    """Of all that a batch's jobs brought, the version of each path saved last."""

    def __init__(self, payloads: Mapping[str, Payload]) -> None:
        self.files: dict[str, SubmittedFile] = {}
        self._snapshots: dict[str, _Snapshot] = {}
        for payload in payloads.values():
            for file in payload.files:
                known = self.files.get(file.path)
                if known is None or file.saved_at > known.saved_at:
                    self.files[file.path] = file
            for folder in payload.folders:
                self._add_folder(folder.rstrip("/"), payload)
        for file in self.files.values():
            if file.blob is None:  # it may have been a folder
                self._add(file.path, _Snapshot(file.saved_at, frozenset(), file.has_base))

    def _add_folder(self, folder: str, payload: Payload) -> None:
        below = [file for file in payload.files if file.path.startswith(f"{folder}/")]
        saved_at = max((file.saved_at for file in below or payload.files), default=_UNKNOWN)
        present = frozenset(file.path for file in below if file.blob is not None)
        names_deletions = any(file.has_base for file in payload.files)
        self._add(folder, _Snapshot(saved_at, present, names_deletions))

    def _add(self, folder: str, snapshot: _Snapshot) -> None:
        known = self._snapshots.get(folder)
        if known is None or snapshot.saved_at > known.saved_at:
            self._snapshots[folder] = snapshot

    def present(self) -> list[SubmittedFile]:
        """Return the files that are there, newest first."""
        found = [file for file in self.files.values() if file.blob is not None and not self._is_gone(file)]
        return sorted(found, key=lambda file: -file.saved_at)

    def _is_gone(self, file: SubmittedFile) -> bool:
        gone = self.gone_at(file.path)
        return gone is not None and gone > file.saved_at

    def gone_at(self, path: str) -> float | None:
        """Return when the path was last seen to be absent; None if it never was."""
        times = [snapshot.saved_at for snapshot in self._lacking(path)]
        own = self.files.get(path)
        if own is not None and own.blob is None:
            times.append(own.saved_at)
        return max(times, default=None)

    def was_never_there(self, path: str) -> bool:
        """Return True if the CMS's copy of a folder lacks the path and did not lose it."""
        above = list(self._lacking(path))
        return path not in self.files and bool(above) and all(each.names_deletions for each in above)

    def _lacking(self, path: str) -> Iterator[_Snapshot]:
        for folder in parents(path):
            snapshot = self._snapshots.get(folder)
            if snapshot is not None and path not in snapshot.paths:
                yield snapshot
