"""The authors' copies of a site's files: the CMS's checkout, or what the database knows of them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from briter_worker.allowlist import is_inside
from briter_worker.errors import FailureCode, PublishError
from briter_worker.git.checkout import Checkout
from briter_worker.git.merge import Base
from briter_worker.git.payload_source import PayloadSource
from briter_worker.git.plans import FileConflicts, FilePlans
from briter_worker.git.publisher import GitPublisher
from briter_worker.git.repository import Repository
from briter_worker.git.staging import WorkTreeSource
from briter_worker.ports import BaseVersion

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from briter_worker.allowlist import Allowlist
    from briter_worker.git.commits import Person
    from briter_worker.git.run import Git
    from briter_worker.git.staging import Staged
    from briter_worker.ports import BaseVersions, Payloads, PlanStore, Request, SubmittedFile

_OBJECT_ID = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")


class WorkTreeCopies:
    """The CMS's own clone. Implements `publisher.Copies`."""

    def __init__(self, repository: Repository, source: WorkTreeSource, checkout: Checkout) -> None:
        self._repository = repository
        self._source = source
        self._checkout = checkout
        self.sync = checkout.sync
        self.catch_up = checkout.catch_up
        self.read = repository.blob  # a version that the repository has lost is damage, and no conflict

    def stage(
        self, requests: Sequence[Request], *, tip: str, scheduled: Mapping[str, float]
    ) -> Mapping[str, Staged]:
        """Return what differs from the versions that the work tree's files are edits of."""
        kept = {path: base.blob for path, base in self._checkout.state().bases.items()}
        return self._source.stage(requests, tip=self._agreed(tip), scheduled=scheduled, bases=kept)

    def bases(self, paths: Collection[str], tip: str) -> Mapping[str, Base]:
        """Return the remembered versions, else those of the commit where mirror and remote agreed."""
        found = {path: Base(blob) for path, blob in self._checkout.bases(paths).items()}
        agreed = self._agreed(tip)
        if agreed != tip:
            entries = self._repository.entries(agreed, paths)
            found = {path: Base.of(entries.get(path)) for path in paths} | found
        return found

    def _agreed(self, tip: str) -> str:
        return self._checkout.agreed(tip) or tip


class SubmittedCopies:
    """The copies of a cluster's authors: nothing follows the remote. Implements `publisher.Copies`."""

    def __init__(
        self, repository: Repository, source: PayloadSource, *, payloads: Payloads, store: BaseVersions
    ) -> None:
        self._repository = repository
        self._source = source
        self._payloads = payloads
        self._store = store
        self.stage = source.stage

    def bases(self, paths: Collection[str], tip: str) -> Mapping[str, Base]:
        """Return what came with the jobs, or what is remembered of earlier publications."""
        known = self._store.bases(paths)
        submitted = {
            path: file for path, file in self._source.submitted(paths).items() if _has_usable_base(file)
        }
        entries = self._repository.entries(tip, known.keys() & submitted.keys())
        found = {path: Base(file.base) for path, file in submitted.items()}
        for path, version in known.items():
            entry, file = entries.get(path), submitted.get(path)
            # The remembered version is what the copy was published as. Where the copy has seen what the
            # remote has now, that is newer.
            if entry is None or file is None or file.base != entry.blob:
                found[path] = Base(version.blob)
        return found

    def read(self, blob: str) -> bytes:
        """Return the content of a blob; of a base version, the database may have the only one."""
        try:
            return b"".join(self._payloads.content(blob))
        except LookupError:
            pass
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
        for path, blob in blobs.items():
            entry = entries.get(path)
            if blob is not None and (entry is None or entry.blob != blob):  # merged on its way
                try:
                    contents[blob] = b"".join(self._payloads.content(blob))
                except LookupError:
                    continue
        self._store.remember({path: BaseVersion(blob) for path, blob in blobs.items()}, contents)

    def catch_up(self) -> None:
        """Do nothing: what is remembered is never late."""


def _has_usable_base(file: SubmittedFile) -> bool:
    return file.has_base and (file.base is None or _OBJECT_ID.fullmatch(file.base) is not None)


def open_disk_publisher(
    git: Git,
    *,
    branch: str,
    remote: str,
    allowlist: Allowlist,
    identity: Person,
    max_file_bytes: int,
    dry_run: bool,
    progress: Callable[[str, int, int], None],
    warn: Callable[[str, str], None],
    still_ours: Callable[[], bool],
) -> GitPublisher:
    """Return the publisher of the CMS's own repository."""
    repository = Repository(git, branch=branch, remote=remote)
    source = WorkTreeSource(repository, allowlist=allowlist, max_file_bytes=max_file_bytes, progress=progress)
    checkout = Checkout(
        repository,
        warn,
        is_cms_path=lambda path: any(is_inside(folder, path) for folder in allowlist.folders),
    )
    return GitPublisher(
        repository,
        copies=WorkTreeCopies(repository, source, checkout),
        plans=FilePlans(git.state_dir, branch),
        bases=FileConflicts(git.state_dir, branch),
        identity=identity,
        dry_run=dry_run,
        progress=progress,
        warn=warn,
        still_ours=still_ours,
    )


def open_cluster_publisher(  # noqa: PLR0913 - all that a publication needs
    repository: Repository,
    *,
    payloads: Payloads,
    bases: BaseVersions,
    plans: PlanStore,
    allowlist: Allowlist,
    identity: Person,
    max_file_bytes: int,
    dry_run: bool,
    progress: Callable[[str, int, int], None],
    warn: Callable[[str, str], None],
    still_ours: Callable[[], bool],
) -> GitPublisher:
    """Return the publisher of one cluster's site from its clone on this node."""
    source = PayloadSource(
        repository,
        payloads,
        bases=bases,
        allowlist=allowlist,
        max_file_bytes=max_file_bytes,
        progress=progress,
    )
    return GitPublisher(
        repository,
        copies=SubmittedCopies(repository, source, payloads=payloads, store=bases),
        plans=plans,
        bases=bases,
        identity=identity,
        dry_run=dry_run,
        progress=progress,
        warn=warn,
        still_ours=still_ours,
    )
