"""For producers in Python, in a cluster: enqueue a post with its files, in one call.

The files are stored with the job, so that any node can publish them and the producer may change its copies.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from briter_worker.allowlist import Allowlist, PathRefusedError
from briter_worker.client import compose
from briter_worker.cluster import sites
from briter_worker.errors import DeclinedError, UsageError, one_line
from briter_worker.git.payloads import GatherError, gather
from briter_worker.git.undo import check_allowed, check_not_scheduled
from briter_worker.job import Program, UnreadableJobError
from briter_worker.ports import RESTORE, Payload, SubmittedFile
from briter_worker.queues.postgres.payloads import ContentChangedError, PayloadSource, submit
from briter_worker.queues.postgres.rows import locked, select
from briter_worker.settings import load_settings
from briter_worker.wiring import open_database, open_postgres_queue, quiet_time_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime
    from pathlib import Path

    from briter_worker.job import Document
    from briter_worker.settings import Settings
    from briter_worker.sinks.history import Receipt

_MAX_TRIES = 5
_SHOWN = 200
"""Characters of a path in a message: the reason that follows is read, too."""


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
    saved_at: float | None = None,
) -> Sent:
    """Store a job of `compose` with its files for the settings' site, and wake the site.

    `saved_at`: when a save from elsewhere was made. Raises as `enqueue` does, and NewerSaveError for such a
    save if the site has a newer one of the post.
    """
    database = open_database(settings)
    allowlist = settings.allowlist()
    left_out: Mapping[str, str] = {}
    missing: Sequence[str] = ()
    for _ in range(_MAX_TRIES):
        if files is not None:
            source = _payload_of(files, allowlist, settings.worker_max_file_bytes)
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
            with database.transaction(is_pipelined=True) as connection:
                quiet = quiet_time_of(settings)
                submit(connection, settings.site, document, source, saved_at=saved_at, quiet=quiet)
        except ContentChangedError:
            continue
        except UnreadableJobError as error:  # what only the database's limits refuse
            raise ValueError(str(error)) from None
        sites.wake(database)
        return Sent(document["id"], settings.site, left_out, missing)
    raise GatherError("the files keep changing while they are read: write them elsewhere, then rename them")


def send_undo(
    settings: Settings, slug: str, publications: Sequence[Receipt], *, to: str | None, message: str | None
) -> Sent:
    """Store a job that restores the post's files, with its publications newest first; a node finds the files.

    Raises DeclinedError and UsageError, with nothing changed.
    """
    if to and not re.fullmatch("[0-9a-f]{7,64}", to):
        raise UsageError(f"--to is {to!r}, which is no commit", f"briter-worker history --slug {slug}")
    undone = publications if to else publications[:1]
    paths = sorted({change.path for each in undone for change in each.changes})
    if not paths or any(each.files_changed > len(each.changes) for each in undone):
        text = "the history does not have every file that the publications changed"
        raise DeclinedError(text, "git revert COMMIT in a clone of the site")
    check_allowed(settings.allowlist(), paths)
    mode = f"{RESTORE} {publications[0].commit} {to or ''}"
    payload = Payload(tuple(SubmittedFile(path, mode, None, 0.0) for path in paths))
    document = compose(slug, paths, message=message or f"Restore {slug}", made_by=Program.UNDO)
    scheduled = open_postgres_queue(settings).scheduled_paths(open_database(settings).read_clock())
    check_not_scheduled(scheduled, paths)
    with locked(open_database(settings), settings.site) as connection:
        if select(connection, "site = %(site)s AND slug = %(slug)s", {"site": settings.site, "slug": slug}):
            text = f"the queue has a save of {slug}, and the undo would take it back unpublished"
            raise DeclinedError(text, f"briter-worker cancel {slug}, or undo when it is published")
        source = PayloadSource.of({})._replace(payload=payload)
        submit(connection, settings.site, document, source, quiet=quiet_time_of(settings))
    sites.wake(open_database(settings))
    return Sent(document["id"], settings.site)


def _payload_of(files: Mapping[str, bytes | None], allowlist: Allowlist, max_bytes: int) -> PayloadSource:
    """Return the payload of files passed by value. Raises GatherError for what cannot be published."""
    resolved: dict[str, bytes | None] = {}
    for declared, content in files.items():
        try:
            path = allowlist.resolve(declared)
        except PathRefusedError as refused:
            raise GatherError(f"{one_line(declared, _SHOWN)}: {refused.reason}") from None
        is_folder = path != declared  # the trailing slash is gone
        if content is not None and is_folder:
            raise GatherError(f"{one_line(declared, _SHOWN)} names a folder, and has a content")
        if content is not None and len(content) > max_bytes:
            raise GatherError(
                f"{one_line(path, _SHOWN)} has {len(content)} bytes, more than the {max_bytes} allowed"
            )
        resolved[path] = content
    return PayloadSource.of(resolved)
