"""The page and the API of all sites of a cluster."""

import base64
import binascii
import time
from typing import Annotated, Literal

from fastapi import APIRouter, Body, Depends, Query, Request
from fastapi.responses import RedirectResponse, Response

from briter_worker.web import models
from briter_worker.web.api import EVENT_STREAM, PROBLEMS, CurrentSite, IdempotencyKey, Json, csrf, next_offset
from briter_worker.web.cluster import Cluster
from briter_worker.web.pages import paging
from briter_worker.web.problems import ProblemError
from briter_worker.web.templating import page

router = APIRouter(responses=PROBLEMS)
"""Below `/`."""
site_router = APIRouter(responses=PROBLEMS)
"""Below `/api/sites/{site}`: what sites of a cluster have beside the routes of `api`."""
PER_PAGE = 100
_SHOW = (
    ("all", "all sites"),
    ("trouble", "sites with failed posts"),
    ("waiting", "sites with waiting posts"),
    ("paused", "paused sites"),
)


def _cluster(request: Request) -> Cluster:
    found: Cluster = request.app.state.shell
    return found


Sites = Annotated[Cluster, Depends(_cluster)]
router.add_api_route("/api/csrf", csrf, response_model=dict[str, str])


@router.get("/", include_in_schema=False)
def all_sites(
    request: Request,
    cluster: Sites,
    q: Annotated[str, Query(max_length=200)] = "",
    show: Annotated[str, Query(max_length=20)] = "all",
    start: Annotated[int, Query(ge=0, le=2**31)] = 0,
) -> Response:
    """Show every site: condition, waiting and failed posts."""
    now = time.time()
    overview = cluster.overview()
    found = overview.chosen(q, show)
    rows = found[start : start + PER_PAGE]
    return page(
        request,
        cluster,
        "sites.html",
        rows=[(row, None if row.oldest is None else max(0.0, now - row.oldest)) for row in rows],
        overview=overview,
        totals=cluster.status_json(),
        q=q,
        show=show,
        choices=_SHOW,
        **paging(len(found), start, PER_PAGE),
    )


@router.get("/sites/{site}", include_in_schema=False)
def first_page(site: CurrentSite) -> Response:
    """Redirect to the first page of a site."""
    return RedirectResponse(f"{site.base}/", status_code=308)


@router.get("/api/sites", response_model=models.Page[models.SiteSummary])
def sites(
    cluster: Sites,
    q: Annotated[str, Query(max_length=200, description="Words of the name or the remote.")] = "",
    show: Literal["all", "trouble", "waiting", "paused"] = "all",
    offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
    limit: Annotated[int, Query(ge=1, le=5000)] = 100,
) -> Response:
    """Return the sites, by name."""
    now = time.time()
    found = cluster.overview().chosen(q, show)
    items = [site.to_json(now) for site in found[offset : offset + limit]]
    return Json({"items": items, "total": len(found), "next": next_offset(offset, len(items), len(found))})


@router.get("/api/status", response_model=models.ClusterStatus)
def status(cluster: Sites) -> Response:
    """Return the jobs of all sites by state, and the number of nodes."""
    return Json(cluster.status_json())


@router.get("/events", response_class=Response, responses=EVENT_STREAM)
async def events(cluster: Sites) -> Response:
    """Stream a `snapshot`, then `status` whenever the number of jobs in any state changes."""
    return cluster.feed.stream()


@site_router.post("/jobs", status_code=201, response_model=models.Enqueued)
def enqueue(
    site: CurrentSite, job: Annotated[models.NewUpload, Body()], idempotency_key: IdempotencyKey = None
) -> Response:
    """Enqueue a post with its files. Requests with the same Idempotency-Key are one job."""
    if job.paths and set(job.paths) != set(job.contents):
        raise ProblemError(422, "paths differs from the paths in contents", "leave paths out")
    contents = {path: _decoded(path, text) for path, text in job.contents.items()}
    body = {**job.model_dump(by_alias=True, exclude={"contents"}), "paths": list(contents)}
    job_id, replayed = site.enqueue(body, idempotency_key, contents)
    return Json({"id": job_id, "slug": job.slug, "replayed": replayed, "warnings": []}, 201)


def _decoded(path: str, text: str | None) -> bytes | None:
    try:
        return None if text is None else base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ProblemError(422, f"contents: {path} is not base64") from None


@site_router.get("", response_model=models.Status)
def site_status(site: CurrentSite) -> Response:
    """Return the status of the site."""
    return Json(site.status_json())
