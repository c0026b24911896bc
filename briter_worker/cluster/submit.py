"""For producers in Python, in a cluster: enqueue a post with its files, in one call.

The files are stored with the job, so that any node can publish them and the producer may change its copies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from briter_worker.allowlist import Allowlist, PathRefusedError
from briter_worker.client import compose
from briter_worker.cluster import sites
from briter_worker.errors import UsageError
from briter_worker.git.payloads import GatherError, gather
from briter_worker.queues.postgres.payloads import ContentChangedError, PayloadSource, submit
from briter_worker.settings import load_settings
from briter_worker.wiring import open_database, quiet_time_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime
    from pathlib import Path

    from briter_worker.job import Document
    from briter_worker.settings import Settings

_MAX_TRIES = 5


@dataclass(frozen=True, slots=True)
class Sent:
    """A job that is durably in the database, with its files."""

    id: str
    site: str
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Declared paths that are not published, with the reasons."""
    missing: Sequence[str] = ()
    """Declared paths without a file: they are deleted from the site, or mistakes."""


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
    """Enqueue a job that publishes `paths` below `root` as one commit; of several for a slug the last wins.

    Or pass the `files` themselves, by path; None deletes one. When the function returns, only the loss of the
    database can lose the job. `site` and `root` default to BRITER_SITE and BRITER_GIT_WORKTREE.

    Raises ValueError when the worker would refuse the job, UsageError and DeclinedError for the
    configuration, OSError when a file or the database cannot be read.
    """
    settings = load_settings() if settings is None else settings
    name = site or settings.site
    if not settings.database_url or not name:
        fix = "set BRITER_DATABASE_URL, and BRITER_SITE or the argument site"
        raise UsageError("the site to publish to is unknown", fix)
    if files is not None and (paths or root):
        raise ValueError("files come with their paths: leave paths and root out")
    settings = sites.settings_of(sites.get(open_database(settings), name), settings)
    declared = list(paths) if files is None else list(files)
    document = compose(slug, declared, message=message, at=at, author=author, **extra)
    return send(settings, document, root=root, files=files)


def send(
    settings: Settings,
    document: Document,
    *,
    root: Path | None = None,
    files: Mapping[str, bytes | None] | None = None,
) -> Sent:
    """Store a job of `compose` with its files for the settings' site, and wake the site.

    Raises as `enqueue` does.
    """
    database = open_database(settings)
    allowlist = settings.allowlist()
    left_out: Mapping[str, str] = {}
    missing: Sequence[str] = ()
    for _ in range(_MAX_TRIES):
        if files is not None:
            source = _values(files, allowlist, settings.worker_max_file_bytes)
        else:
            found = gather(
                root or settings.git_worktree,
                document["paths"],
                allowlist=allowlist,
                max_bytes=settings.worker_max_file_bytes,
            )
            left_out, missing = found.left_out, found.missing
            if left_out and not (found.payload.files or found.payload.folders):
                raise GatherError("; ".join(f"{path}: {reason}" for path, reason in left_out.items()))
            document = {**document, "paths": list(found.paths)}
            source = PayloadSource(found.payload, found.content)
        try:
            with database.transaction() as connection:
                submit(connection, settings.site, document, source, quiet=quiet_time_of(settings))
        except ContentChangedError:
            continue
        sites.wake(database, [settings.site])
        return Sent(document["id"], settings.site, left_out, missing)
    raise GatherError("the files keep changing while they are read: write them elsewhere, then rename them")


def _values(files: Mapping[str, bytes | None], allowlist: Allowlist, max_bytes: int) -> PayloadSource:
    """Return the payload of files passed by value. Raises GatherError for what cannot be published."""
    resolved: dict[str, bytes | None] = {}
    for declared, content in files.items():
        try:
            path = allowlist.resolve(declared)
        except PathRefusedError as refused:
            raise GatherError(f"{declared}: {refused.reason}") from None
        if content is not None and len(content) > max_bytes:
            raise GatherError(f"{path} has {len(content)} bytes, more than the {max_bytes} allowed")
        resolved[path] = content
    return PayloadSource.of(resolved)
