"""For writers in Python: ask for a post to be published, safely, in one call."""

from __future__ import annotations

import os
import re
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from briter_worker.queues.files import SUFFIX, sync_folder, write_new

if TYPE_CHECKING:
    from collections.abc import Sequence

_AUTHOR = re.compile(r"\s*(?P<name>[^<>]*[^<>\s])\s*<(?P<email>[^<>\s]+)>\s*")
_OURS = frozenset(
    {"id", "slug", "paths", "message", "scheduledFor", "createdAt", "author"}
    | {"status", "attempts", "nextAttemptAt", "lastError", "failure", "updatedAt", "commitMessage", "attempt"}
)
_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class Enqueued:
    """A job that is in the queue, durably."""

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
    """Ask for `paths` to be published as one commit; of several calls for a slug the last one wins.

    When it returns, the job survives a power cut. `at` holds it until then (no offset means UTC). Without
    `queue`, the folder is found as the worker finds it, by `BRITER_QUEUE_ROOT`, `BRITER_STORAGE_ROOT` and
    `BRITER_APP_ROOT`.

    Raises ValueError when the worker would refuse the job, OSError when it could not be written.
    """
    document = _document(slug, paths, message=message, at=at, author=author, **extra)
    return _put(document["id"], _checked(document), queue)


def compose(
    slug: str,
    paths: Sequence[str],
    *,
    message: str | None = None,
    at: datetime | str | None = None,
    author: tuple[str, str] | str | None = None,
    **extra: Any,  # noqa: ANN401 - as above
) -> dict[str, Any]:
    """The job that `enqueue` would write, with an id of its own. Raises ValueError as `enqueue` does."""
    document = _document(slug, paths, message=message, at=at, author=author, **extra)
    _checked(document)
    return document


def _document(
    slug: str,
    paths: Sequence[str],
    *,
    message: str | None,
    at: datetime | str | None,
    author: tuple[str, str] | str | None,
    **extra: Any,  # noqa: ANN401 - as above
) -> dict[str, Any]:
    # Here, so that a program that only may enqueue does not wait for pydantic when it starts.
    from briter_worker.job import format_time  # noqa: PLC0415

    if isinstance(paths, str | bytes):
        raise ValueError(f"paths is a list of paths, not {paths!r}")  # noqa: TRY004 - one error for all values
    if taken := sorted(_OURS & extra.keys()):
        raise ValueError(f"{', '.join(taken)}: set by the worker or by an argument of its own")
    created = _moment(slug)
    document: dict[str, Any] = {
        "id": _sortable_id(created),
        "type": "git-sync",
        "slug": slug,
        "paths": list(paths),
        "createdAt": format_time(created / 1000),
    }
    if message is not None:
        document["message"] = message
    if at is not None:
        document["scheduledFor"] = _time(at)
    if author is not None:
        document["author"] = _author(author)
    document.update(extra)
    return document


def submit(document: dict[str, Any], *, queue: Path | None = None) -> Enqueued:
    """Put what `compose` has made into the queue, durably. Raises OSError when it could not be written."""
    return _put(document["id"], _encoded(document), queue)


def _put(job_id: str, data: bytes, queue: Path | None) -> Enqueued:
    folder = _default_queue() if queue is None else queue
    return Enqueued(job_id, _write(folder, job_id, data))


def _encoded(document: dict[str, Any]) -> bytes:
    from briter_worker.strictjson import encode  # noqa: PLC0415 - as in compose

    try:
        return encode(document)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the job cannot be written as JSON: {error}") from None


def _write(folder: Path, job_id: str, data: bytes) -> Path:
    temp = folder / f".{job_id}.tmp"
    path = folder / f"{job_id}{SUFFIX}"
    # As any program's file: who may read it is the umask's to say.
    try:
        write_new(temp, data, mode=0o666)
    except FileNotFoundError:
        folder.mkdir(parents=True, exist_ok=True)
        write_new(temp, data, mode=0o666)
    try:
        temp.rename(path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    sync_folder(folder)
    return path


def _checked(document: dict[str, Any]) -> bytes:
    """Its bytes, as the worker would take them. Raises ValueError where it would not."""
    from briter_worker.jobfile import parse_job  # noqa: PLC0415
    from briter_worker.strictjson import MalformedJobError, read_document  # noqa: PLC0415

    data = _encoded(document)
    try:
        parse_job(read_document(data), name=SUFFIX, modified=0.0)
    except MalformedJobError as error:
        raise ValueError(error.reason) from None
    return data


_last: dict[str, int] = {}
_last_lock = threading.Lock()


def _moment(slug: str) -> int:
    """Milliseconds since 1970, later than any that this process has given for the slug."""
    now = time.time_ns() // 1_000_000
    with _last_lock:
        moment = max(now, _last.get(slug, 0) + 1)
        if len(_last) >= _REMEMBERED:
            for other in [key for key, last in _last.items() if last < now]:
                del _last[other]
        _last[slug] = moment
    return moment


def _sortable_id(milliseconds: int) -> str:
    """A UUID of version 7: those made later sort later."""
    value = (milliseconds << 80) | int.from_bytes(os.urandom(10), "big")
    value = (value & ~(0xF << 76)) | (7 << 76)
    value = (value & ~(0b11 << 62)) | (0b10 << 62)
    return str(UUID(int=value))


def _time(at: datetime | str) -> str:
    from briter_worker.job import format_time, parse_time  # noqa: PLC0415

    if isinstance(at, str):
        return format_time(parse_time(at))
    moment = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return format_time(moment.timestamp())


def parse_author(author: str) -> dict[str, str]:
    """The name and email of `Ada Lovelace <ada@example.org>`. Raises ValueError."""
    match = _AUTHOR.fullmatch(author)
    if match is None:
        raise ValueError(f"{author!r} is no author such as 'Ada Lovelace <ada@example.org>'")
    return match.groupdict()


def _author(author: tuple[str, str] | str) -> dict[str, str]:
    if isinstance(author, str):
        return parse_author(author)
    name, email = author
    return {"name": name, "email": email}


def _default_queue() -> Path:
    if os.environ.get("BRITER_DATABASE_URL", "").strip():
        raise ValueError(
            "BRITER_DATABASE_URL is set: in a cluster nobody reads the folder. Fix: call the enqueue of "
            "briter_worker.cluster.asking, or name the queue's folder"
        )
    app = Path(os.environ.get("BRITER_APP_ROOT") or ".").absolute()
    storage = app / (os.environ.get("BRITER_STORAGE_ROOT") or "storage")
    return app / (os.environ.get("BRITER_QUEUE_ROOT") or storage / "queue")
