"""For producers in Python: enqueue a post in one call, safely."""

from __future__ import annotations

import os
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from briter_worker.job import (
    GIT_SYNC,
    SUFFIX,
    WORKERS_KEYS,
    Document,
    Job,
    UnreadableJobError,
    embargo_fault,
    encode_document,
    format_time,
    parse_time,
    read_document,
)
from briter_worker.queues.disk.files import Folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from briter_worker.job import Program

_AUTHOR = re.compile(r"\s*(?P<name>[^<>]*[^<>\s])\s*<(?P<email>[^<>\s]+)>\s*")
_RESERVED = WORKERS_KEYS.union(
    ["id", "slug", "paths", "message", "commitMessage", "author", "scheduledFor", "createdAt"]
)


class Enqueued(NamedTuple):
    """A job that is durably in the queue."""

    id: str
    path: Path


def enqueue(
    slug: str,
    paths: Sequence[str],
    *,
    message: str | None = None,
    at: datetime | str | None = None,
    author: tuple[str, str] | str | None = None,
    queue: Path | None = None,
    **extra: Any,  # noqa: ANN401 - any JSON value: keys that the worker keeps but does not know
) -> Enqueued:
    """Write a job that publishes `paths` as one commit; of several calls for a slug the last one wins.

    When the function returns, the job survives a power cut. `at` schedules it (no offset means UTC). Without
    `queue`, the folder follows from `BRITER_QUEUE_ROOT`, `BRITER_STORAGE_ROOT` and `BRITER_APP_ROOT`.

    Raises ValueError when the worker would refuse the job, OSError when the job could not be written.
    """
    return submit(compose(slug, paths, message=message, at=at, author=author, **extra), queue=queue)


def compose(
    slug: str,
    paths: Sequence[str],
    *,
    message: str | None = None,
    at: datetime | str | None = None,
    author: tuple[str, str] | str | None = None,
    made_by: Program | None = None,
    **extra: Any,  # noqa: ANN401 - as in enqueue
) -> Document:
    """Return the job that `enqueue` would write. Raises ValueError when the worker would refuse it.

    `made_by`: the program of ours that makes the job; a producer leaves it out. The queue lets no such job
    supersede a scheduled save, or publish what a scheduled job declares.
    """
    if isinstance(paths, str | bytes):
        raise ValueError(f"paths is a list of paths, not {paths!r}")  # noqa: TRY004 - one error for all values
    if reserved := sorted(_RESERVED & extra.keys()):
        raise ValueError(f"{', '.join(reserved)}: set by the worker or by an argument of its own")
    # In microseconds: of two calls for a slug, the later one wins.
    created = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    document: Document = {
        "id": str(uuid4()),
        "type": GIT_SYNC,
        "slug": slug,
        "paths": list(paths),
        "createdAt": created,
    }
    if message is not None:
        document["message"] = message
    if at is not None:
        document["scheduledFor"] = format_time(parse_time(str(at)))
    if author is not None:
        name_and_email = parse_author(author) if isinstance(author, str) else author
        document["author"] = dict(zip(("name", "email"), name_and_email, strict=True))
    if made_by is not None:
        document["madeBy"] = made_by.value
    document |= extra
    _encode(document)
    if fault := embargo_fault(document, time.time()):
        raise ValueError(fault)
    return document


def submit(document: Document, *, queue: Path | None = None) -> Enqueued:
    """Write a job of `compose` durably into the queue folder. Raises OSError when it could not be written."""
    folder = default_queue() if queue is None else queue
    data = _encode(document)
    name = f"{document['id']}{SUFFIX}"
    try:
        opened = Folder.open(folder)
    except FileNotFoundError:
        folder.mkdir(parents=True, exist_ok=True)
        opened = Folder.open(folder)
    with opened:
        # The umask decides who may read the file, as for any program's file.
        opened.replace(name, data, mode=0o666)
        opened.sync()
    return Enqueued(document["id"], folder / name)


def parse_author(author: str) -> tuple[str, str]:
    """Return the name and email of `Ada Lovelace <ada@example.org>`. Raises ValueError."""
    match = _AUTHOR.fullmatch(author)
    if match is None:
        raise ValueError(f"{author!r} is no author such as 'Ada Lovelace <ada@example.org>'")
    return match["name"], match["email"]


def _encode(document: Document) -> bytes:
    """Return the job's bytes. Raises ValueError when the worker would refuse them."""
    try:
        data = encode_document(document)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the job cannot be written as JSON: {error}") from None
    try:
        Job.from_document(read_document(data), name=SUFFIX, modified=0.0)
    except UnreadableJobError as error:
        raise ValueError(str(error)) from None
    return data


def default_queue() -> Path:
    """Return the queue folder that the environment names. Raises ValueError in a cluster."""
    if os.environ.get("BRITER_DATABASE_URL", "").strip():
        raise ValueError(
            "BRITER_DATABASE_URL is set, and in a cluster no worker reads the queue folder: "
            "call briter_worker.cluster.submit.enqueue instead, or pass the queue folder"
        )
    app = Path(os.environ.get("BRITER_APP_ROOT") or ".").absolute()
    storage = app / (os.environ.get("BRITER_STORAGE_ROOT") or "storage")
    return app / (os.environ.get("BRITER_QUEUE_ROOT") or storage / "queue")
