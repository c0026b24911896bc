"""A plugin for Briter Worker: no drafts, no launches on Friday evenings, a note of each publication."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from briter_worker.plugins import Change, JobKind, Publication, RefusedError, SnoozedError, hookimpl

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from briter_worker.job import Job

FRIDAY, EVENING = 4, 16


@hookimpl
def allowed_paths() -> list[str]:
    """The newsletter's folder may be published, too."""
    return ["newsletter/"]


@hookimpl
def before_publish(job: Job, changes: Sequence[Change]) -> None:
    """Refuse drafts; defer posts that would go live outside working hours."""
    drafts = [change.path for change in changes if change.blob and "/drafts/" in change.path]
    if drafts:
        raise RefusedError(f"{drafts[0]} is a draft. Fix: move it out of drafts/, and save it again")
    now = datetime.now(UTC)
    if job.slug.startswith("launch-") and now.weekday() == FRIDAY and now.hour >= EVENING:
        raise SnoozedError((now + timedelta(minutes=30)).timestamp(), "no launches on a Friday evening")


@hookimpl
@contextmanager
def around_attempt(job: Job, attempt: int) -> Iterator[None]:
    """Note how long each attempt takes."""
    began = time.monotonic()
    try:
        yield
    finally:
        _note(f"{job.slug} attempt {attempt} took {time.monotonic() - began:.3f} s")


@hookimpl
def after_publish(publication: Publication) -> None:
    """Note what went live."""
    _note(f"{publication.job.slug} is live as {publication.commit}")


@hookimpl
def job_kinds(settings: Mapping[str, Any]) -> dict[str, JobKind]:
    """Jobs of the type `purge-cache` empty a folder of cached pages."""
    mine = settings.get("editorial-rules", {})
    cache = Path(mine.get("cache", "cache"))

    def purge(job: Job) -> None:
        for path in job.paths:
            page = (cache / path).resolve()
            if cache.resolve() not in page.parents:
                raise RefusedError(f"{path} is not in the cache. Fix: name a page below it")
            page.unlink(missing_ok=True)

    return {"purge-cache": JobKind(purge, max_attempts=3, delays=(5.0, 60.0))}


def _note(text: str) -> None:
    # Beside the worker's log: a service has no folder of its own that a file could lie in.
    print(f"editorial-rules: {text}", file=sys.stderr, flush=True)
