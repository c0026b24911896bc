"""Publish, and ask for a publication, as a person may spell it."""

from __future__ import annotations

from typing import Annotated

import typer

from briter_worker.commands import plain
from briter_worker.commands.ask import ask
from briter_worker.commands.options import Json, OfSite  # noqa: TC001 - typer reads them
from briter_worker.commands.publish import publish


def run(
    *,
    once: Annotated[bool, typer.Option(plain.ONCE, help="Drain what is due, and exit.")] = False,
    workers: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="In a cluster: sites to publish at once; default: BRITER_WORKER_CONCURRENCY."
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65_535, help="Answer Prometheus here; 0: not at all; default: BRITER_METRICS_PORT."
        ),
    ] = None,
    metrics_host: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="At this address; default: BRITER_METRICS_HOST."),
    ] = None,
) -> None:
    """Publish whatever is due, until SIGTERM. One log line per event."""
    raise typer.Exit(
        publish(once=once, workers=workers, metrics_port=metrics_port, metrics_host=metrics_host)
    )


def enqueue(
    slug: Annotated[str, typer.Argument(metavar="SLUG", help="The post.")],
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="What to publish, relative to the repository.")
    ],
    *,
    message: Annotated[
        str | None, typer.Option(*plain.MESSAGE, help="The commit message, used exactly as it is.")
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(*plain.AT, metavar="ISO", help="Hold it until then, such as 2026-01-31T09:00:00Z."),
    ] = None,
    author: Annotated[
        str | None, typer.Option(*plain.AUTHOR, metavar="'NAME <MAIL>'", help="The commit's author.")
    ] = None,
    site: OfSite = None,
    root: Annotated[
        str | None,
        typer.Option(
            plain.ROOT,
            metavar="FOLDER",
            help="In a cluster: where the files are, to be sent along; default: the site's folder here.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Ask for a post to be published. Writes a job, safely; in a cluster, with its files."""
    ask(plain.Enqueue(slug, paths, message, at, author, as_json, site, root))
