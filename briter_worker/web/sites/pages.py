"""The page of all sites."""

import time
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from briter_worker.web.rendering import page
from briter_worker.web.sites.overview import AllSites, chosen

router = APIRouter()
PER_PAGE = 100
SHOWN = (
    ("all", "all sites"),
    ("trouble", "where something failed"),
    ("waiting", "where posts wait"),
    ("paused", "where publishing is paused"),
)


def all_sites(request: Request) -> AllSites:
    """What is asked."""
    found: AllSites = request.app.state.dashboard
    return found


Everything = Annotated[AllSites, Depends(all_sites)]


@router.get("/")
def now(
    request: Request,
    everything: Everything,
    q: Annotated[str, Query(max_length=200)] = "",
    show: Annotated[str, Query(max_length=20)] = "all",
    start: Annotated[int, Query(ge=0, le=2**31)] = 0,
) -> Response:
    """Every site: its condition, what waits and what failed."""
    overview = everything.ask()
    found = chosen(overview.sites, q, show)
    rows = found[start : start + PER_PAGE]
    return page(
        request,
        everything,
        "sites.html",
        rows=rows,
        total=len(found),
        sites=len(overview.sites),
        totals=everything.status(),
        problem=everything.problem,
        ages={row.name: None if row.oldest is None else max(0.0, time.time() - row.oldest) for row in rows},
        q=q,
        show=show,
        shown=SHOWN,
        start=start,
        earlier=max(0, start - PER_PAGE) if start else None,
        later=start + PER_PAGE if start + PER_PAGE < len(found) else None,
    )
