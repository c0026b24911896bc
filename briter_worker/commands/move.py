"""Move a site between its folder and the cluster."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import typer

from briter_worker import views
from briter_worker.commands import DeclinedError, read_cluster, read_site
from briter_worker.commands.options import Json, OfSite  # noqa: TC001 - typer reads them
from briter_worker.errors import for_people

if TYPE_CHECKING:
    from collections.abc import Callable

    from briter_worker.cluster.moving import Moved
    from briter_worker.settings import Settings


def import_(*, site: OfSite = None, as_json: Json = False) -> None:
    """Move this folder's jobs into a site of the cluster. With their files: holds, dead letters, all."""
    read_cluster("import")
    settings = read_site(site)
    from briter_worker.cluster.moving import bring_in  # noqa: PLC0415 - see app

    _move(bring_in, settings, f"from {settings.queue_root} to the site {settings.site}", as_json=as_json)


def export(*, site: OfSite = None, as_json: Json = False) -> None:
    """Move a site's jobs out of the cluster, into this folder. And their files into the work tree."""
    read_cluster("export")
    settings = read_site(site)
    from briter_worker.cluster.moving import take_out  # noqa: PLC0415 - see app

    _move(take_out, settings, f"from the site {settings.site} to {settings.queue_root}", as_json=as_json)


def _move(move: Callable[[Settings, float], Moved], settings: Settings, way: str, *, as_json: bool) -> None:
    from briter_worker.cluster.sites import SiteError  # noqa: PLC0415 - loaded by now

    try:
        moved = move(settings, time.time())
    except (SiteError, ValueError) as error:
        raise DeclinedError(for_people(str(error))) from None
    for path, reason in moved.remarks.items():
        views.tell(f"warning: {path} is not brought along: {reason}")
    for slug, reason in moved.stayed.items():
        views.tell(f"{slug} stays where it is: {reason}")
    if as_json:
        views.put_json({"jobs": moved.jobs, "stayed": moved.stayed, "remarks": moved.remarks})
    else:
        views.put(f"{moved.jobs} jobs moved {way}")
    raise typer.Exit(1 if moved.stayed else 0)
