"""The authors' copies of a cluster's site: what the database remembers in place of a checkout."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from briter_worker.errors import FailureCode, PublishError
from briter_worker.git.merge import Base
from briter_worker.git.payload_source import PayloadSource
from briter_worker.git.publisher import GitPublisher
from briter_worker.ports import BaseVersion

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from briter_worker.allowlist import Allowlist
    from briter_worker.git.commits import Person
    from briter_worker.git.repository import Repository
    from briter_worker.ports import BaseVersions, Payloads, PlanStore, SubmittedFile

_OBJECT_ID = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")


class AuthorCopies:
    """Implements `publisher.Mirror` where no checkout follows the remote."""

    def __init__(
        self, repository: Repository, source: PayloadSource, *, payloads: Payloads, store: BaseVersions
    ) -> None:
        self._repository = repository
        self._source = source
        self._payloads = payloads
        self._store = store

    def agreed(self, tip: str) -> str:
        """Return the tip: what differs from it is known path by path."""
        return tip

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

    def kept(self) -> Mapping[str, str | None]:
        """Return nothing: no work tree follows the remote."""
        return {}

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
    warn: Callable[[str], None],
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
        source=source,
        mirror=AuthorCopies(repository, source, payloads=payloads, store=bases),
        plans=plans,
        bases=bases,
        identity=identity,
        dry_run=dry_run,
        progress=progress,
        warn=warn,
        still_ours=still_ours,
    )
