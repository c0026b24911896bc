"""Publish, and ask for a publication."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from briter_worker import views
from briter_worker.commands import read_settings
from briter_worker.commands.options import Json  # noqa: TC001 - typer reads it
from briter_worker.commands.publish import publish
from briter_worker.errors import UsageError, for_people

if TYPE_CHECKING:
    from collections.abc import Sequence

    from briter_worker.settings import Settings


def run(
    *,
    once: Annotated[bool, typer.Option("--once", help="Drain what is due, and exit.")] = False,
) -> None:
    """Publish whatever is due, until SIGTERM; one log line per event."""
    raise typer.Exit(publish(once=once))


def enqueue(
    slug: Annotated[str, typer.Argument(metavar="SLUG", help="The post.")],
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="What to publish, relative to the repository.")
    ],
    *,
    message: Annotated[
        str | None, typer.Option("--message", "-m", help="The commit message, used exactly as it is.")
    ] = None,
    at: Annotated[
        str | None, typer.Option(metavar="ISO", help="Hold it until then, such as 2026-01-31T09:00:00Z.")
    ] = None,
    author: Annotated[str | None, typer.Option(metavar="'NAME <MAIL>'", help="The commit's author.")] = None,
    as_json: Json = False,
) -> None:
    """Ask for a post to be published: write a job, safely."""
    settings = read_settings()
    from briter_worker import client  # noqa: PLC0415

    try:
        job = client.enqueue(slug, paths, message=message, at=at, author=author, queue=settings.queue_root)
    except ValueError as error:
        raise UsageError(for_people(str(error))) from None
    _warn_of_refusals(settings, paths)
    if as_json:
        views.put_json({"id": job.id, "slug": slug, "file": str(job.path)})
    elif views.is_terminal():
        views.put(f"{for_people(slug)} waits to be published, as job {job.id}")
    else:
        views.put(job.id)


def _warn_of_refusals(settings: Settings, paths: Sequence[str]) -> None:
    """A person at a terminal learns at once what the worker would say later."""
    from briter_worker.allowlist import Allowlist, PathRefusedError  # noqa: PLC0415

    allowlist = Allowlist(settings.folders)
    for path in paths:
        try:
            allowlist.resolve(path)
        except PathRefusedError as refused:
            views.tell(f"warning: {path} will not be published: {refused.reason}")
