"""Ask for a publication. Without typer, see `plain`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from briter_worker import views
from briter_worker.commands import read_settings
from briter_worker.errors import UsageError, for_people

if TYPE_CHECKING:
    from briter_worker.commands.plain import Enqueue
    from briter_worker.settings import Settings


def ask(asked: Enqueue) -> None:
    """Write a job, safely, and say which."""
    settings = read_settings()
    from briter_worker import client  # noqa: PLC0415 - only when there is a configuration

    try:
        job = client.enqueue(
            asked.slug,
            asked.paths,
            message=asked.message,
            at=asked.at,
            author=asked.author,
            queue=settings.queue_root,
        )
    except ValueError as error:
        raise UsageError(for_people(str(error))) from None
    _warn_of_refusals(settings, asked)
    if asked.as_json:
        views.put_json({"id": job.id, "slug": asked.slug, "file": str(job.path)})
    elif views.is_terminal():
        views.put(f"{for_people(asked.slug)} waits to be published, as job {job.id}")
    else:
        views.put(job.id)


def _warn_of_refusals(settings: Settings, asked: Enqueue) -> None:
    """A person at a terminal learns at once what the worker would say later."""
    from briter_worker.allowlist import Allowlist, PathRefusedError  # noqa: PLC0415 - loaded by now

    allowlist = Allowlist(settings.folders)
    for path in asked.paths:
        try:
            allowlist.resolve(path)
        except PathRefusedError as refused:
            views.tell(f"warning: {path} will not be published: {refused.reason}")
