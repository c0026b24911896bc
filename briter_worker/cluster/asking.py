"""For writers in Python, in a cluster: ask for a post to be published, with its files, in one call.

The files are sent along, so that any worker can publish them, and the writer may change its own at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from briter_worker.allowlist import Allowlist, PathRefusedError
from briter_worker.client import compose
from briter_worker.cluster.sites import get, settings_of
from briter_worker.cluster.waking import wake
from briter_worker.errors import UsageError
from briter_worker.gathering import GatheringError, gather
from briter_worker.job import parse_time
from briter_worker.ports import Delivered, Delivery
from briter_worker.queues.postgres.contents import ContentChangedError, blob_of
from briter_worker.queues.postgres.writing import submit
from briter_worker.settings import load_settings
from briter_worker.wiring import open_database

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from datetime import datetime
    from pathlib import Path

    from briter_worker.queues.postgres.contents import Source
    from briter_worker.queues.postgres.database import Connection
    from briter_worker.settings import Settings

_TRIES = 5


@dataclass(frozen=True, slots=True)
class Sent:
    """A job that is in the database, durably, with its files."""

    id: str
    site: str
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Declared paths that are not published, with the reasons."""
    missing: Sequence[str] = ()
    """Declared paths where nothing is: what the site has there is deleted, or they are mistakes."""


def enqueue(
    slug: str,
    paths: Sequence[str] = (),
    *,
    site: str | None = None,
    root: Path | None = None,
    files: Mapping[str, bytes | None] | None = None,
    message: str | None = None,
    at: datetime | str | None = None,
    author: tuple[str, str] | str | None = None,
    settings: Settings | None = None,
    **extra: Any,  # noqa: ANN401 - any JSON value: keys that the worker keeps but does not know
) -> Sent:
    """Ask for `paths` below `root` to be published as one commit; of several calls for a slug the last wins.

    Or give the `files` themselves, by their paths; None deletes one. When it returns, the job survives a
    power cut of everything but the database. `site` and `root` are by default BRITER_SITE, and the site's
    folder as the settings name it (BRITER_GIT_WORKTREE).

    Raises ValueError when the worker would refuse the job or it cannot be sent as it is, UsageError and
    SiteError for the configuration, OSError when a file cannot be read or the database cannot be reached.
    """
    settings = load_settings() if settings is None else settings
    name = site or settings.site
    if not settings.database_url or not name:
        raise UsageError("where to? Fix: set BRITER_DATABASE_URL, and BRITER_SITE or the argument site")
    settings = settings_of(get(open_database(settings), name), settings)
    if files is not None and (paths or root):
        raise ValueError("files come with their paths: leave paths and root out")
    declared = list(paths) if files is None else list(files)
    document = compose(slug, declared, message=message, at=at, author=author, **extra)
    return send(settings, document, root=root, files=files)


def send(
    settings: Settings,
    document: dict[str, Any],
    *,
    root: Path | None = None,
    files: Mapping[str, bytes | None] | None = None,
    first: Callable[[Connection], None] | None = None,
) -> Sent:
    """Put what `compose` has made into the queue of the settings' site, with the files.

    `first` is done in the transaction that writes the job, before it; what it raises leaves nothing written.

    Raises as `enqueue` does.
    """
    saved_at = parse_time(document["createdAt"])
    allowlist = Allowlist(settings.folders)
    for _ in range(_TRIES):
        source: Source
        left_out: Mapping[str, str] = {}
        missing: Sequence[str] = ()
        if files is not None:
            source = _Values(files, allowlist, settings, saved_at)
        else:
            source = found = gather(
                root or settings.git_worktree,
                document["paths"],
                allowlist=allowlist,
                max_bytes=settings.worker_max_file_bytes,
                saved_at=saved_at,
            )
            left_out, missing = found.left_out, found.missing
            if left_out and not (found.delivery.files or found.delivery.folders):
                raise GatheringError("; ".join(f"{path}, as {reason}" for path, reason in left_out.items()))
            document = {**document, "paths": list(found.paths)}
        try:
            submit(open_database(settings), settings.site, document, source, first=first)
        except ContentChangedError:
            continue  # while it was sent
        # The row first: a word that overtook it would find nothing, and be gone.
        wake(open_database(settings), [settings.site])
        return Sent(document["id"], settings.site, left_out, missing)
    raise GatheringError(
        "its files keep changing while they are sent. Fix: write them elsewhere, then rename them"
    )


class _Values:
    """Files that are given as what they contain."""

    def __init__(
        self, files: Mapping[str, bytes | None], allowlist: Allowlist, settings: Settings, saved_at: float
    ) -> None:
        self._contents: dict[str, bytes] = {}
        delivered = []
        for declared, content in files.items():
            try:
                path = allowlist.resolve(declared)
            except PathRefusedError as refused:
                raise GatheringError(f"{declared}: {refused.reason}") from None
            if content is None:
                delivered.append(Delivered(path, "", None, saved_at))
                continue
            if len(content) > settings.worker_max_file_bytes:
                raise GatheringError(
                    f"{path} has {len(content)} bytes, more than the {settings.worker_max_file_bytes} allowed"
                )
            blob = blob_of(content)
            self._contents[blob] = content
            delivered.append(Delivered(path, "100644", blob, saved_at))
        self.delivery = Delivery(tuple(delivered))
        self.sizes = {blob: len(content) for blob, content in self._contents.items()}

    def content(self, blob: str) -> Iterator[bytes]:
        yield self._contents[blob]
