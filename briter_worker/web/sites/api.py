"""The API of a cluster: its sites, and what of a site's own API is different there.

All else of a site is as in `web/api.py`, at `/api/sites/{site}` in the place of `/api`.
"""

import base64
import binascii
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Header, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from briter_worker.web import api as one_site
from briter_worker.web import models
from briter_worker.web.api import PROBLEMS, Asked, Json
from briter_worker.web.live import MOST_READERS, Missed
from briter_worker.web.problems import ProblemError
from briter_worker.web.sites.overview import chosen
from briter_worker.web.sites.pages import Everything

router = APIRouter(responses=PROBLEMS)
"""Of all sites."""
site_router = APIRouter(responses=PROBLEMS)
"""Of each site, before the routes that all engines share."""


class Site(BaseModel):
    """How one site stands."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)

    name: str
    remote: str
    branch: str
    jobs: dict[str, int]
    oldest_waiting_seconds: float | None
    paused: models.Pause | None
    condition: Annotated[str | None, Field(description="What keeps any post of it from being published.")]
    failure: str | None


class Sites(BaseModel):
    """A page of sites, by name; `next` is the offset of the next one, null at the end."""

    items: list[Site]
    total: int
    next: int | None


class Total(BaseModel):
    """All sites together."""

    model_config = ConfigDict(extra="allow")

    sites: int
    hosts: int
    jobs: dict[str, int]


class NewPost(models.NewJob):
    """A post to publish, with its files. Keys that are not named here are kept in the job as they are."""

    paths: Annotated[
        list[str],
        Field(
            max_length=10_000,
            description="If there are any, the same as in `contents`.",
            default_factory=list,
        ),
    ]
    contents: Annotated[
        dict[str, str | None],
        Field(
            min_length=1,
            max_length=10_000,
            description="What to publish: by its path, relative to the repository, each file's content in"
            " base64, or null to delete it.",
        ),
    ]


@router.get("/api/sites", response_model=Sites)
def sites(
    everything: Everything,
    q: Annotated[str, Query(max_length=200, description="In the name, or the remote.")] = "",
    show: Literal["all", "trouble", "waiting", "paused"] = "all",
    offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
    limit: Annotated[int, Query(ge=1, le=5000)] = 100,
) -> Response:
    """The sites, by name: condition, what waits and what failed."""
    now = time.time()
    found = chosen(everything.ask().sites, q, show)
    rows = found[offset : offset + limit]
    following = offset + len(rows)
    return Json(
        {
            "items": [site.as_json(now) for site in rows],
            "total": len(found),
            "next": following if rows and following < len(found) else None,
        }
    )


@router.get("/api/status", response_model=Total)
def status(everything: Everything) -> Response:
    """All sites together: how many jobs there are in each state, and how many hosts."""
    everything.ask()
    return Json(everything.status())


@router.get("/api/csrf", response_model=models.Csrf)
def csrf(request: Request) -> Response:
    """What a change without Bearer has to send as X-CSRF-Token."""
    return one_site.csrf(request)


@router.get("/healthz", response_model=models.Health)
def healthz() -> Response:
    """Whether the dashboard itself is alive."""
    return Json({"status": "ok"})


@router.get("/readyz", response_model=models.Health)
def readyz(everything: Everything) -> Response:
    """Whether the database can be used. What is wrong is told to those who are signed in: /api/status."""
    everything.ask()
    if everything.problem is not None:
        raise ProblemError(503, "the database cannot be used. Fix: briter-worker doctor, on the server")
    return Json({"status": "ok"})


@router.get("/metrics", response_class=Response)
def metrics(request: Request) -> Response:
    """For Prometheus, each number with its site."""
    render = request.app.state.metrics
    if render is None:
        raise ProblemError(404, "metrics are not installed. Fix: pip install 'briter-worker[metrics]'")
    text, media_type = render()
    return Response(text, headers={"Content-Type": media_type})


@router.get("/events", response_class=Response, responses={200: {"content": {"text/event-stream": {}}}})
async def events(everything: Everything) -> Response:
    """A `snapshot`, then a `status` whenever the number of jobs in any state changes."""
    if everything.hub.is_full():
        raise ProblemError(503, f"there are {MOST_READERS} readers already", headers={"Retry-After": "30"})

    async def missed(_after: int, _number: int) -> Missed:
        return 0, 0, []

    return everything.hub.stream(None, missed, everything.status, everything.status)


@site_router.post("/api/jobs", status_code=201, response_model=models.Enqueued)
def enqueue(
    dashboard: Asked,
    job: Annotated[NewPost, Body()],
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
) -> Response:
    """Ask for a post to be published, with its files. The same Idempotency-Key is the same job."""
    body = job.model_dump(by_alias=True, exclude={"contents"})
    if job.paths and set(job.paths) != set(job.contents):
        raise ProblemError(422, "paths are not those in contents. Fix: leave paths out")
    files = {path: _decoded(path, text) for path, text in job.contents.items()}
    body["paths"] = list(files)
    job_id, replayed = dashboard.actions.enqueue(body, idempotency_key, files)
    return Json({"id": job_id, "slug": job.slug, "replayed": replayed, "warnings": []}, status_code=201)


def _decoded(path: str, text: str | None) -> bytes | None:
    try:
        return None if text is None else base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ProblemError(422, f"contents: {path} is not base64") from None


def described(whole: dict[str, Any], of_site: dict[str, Any]) -> dict[str, Any]:
    """The OpenAPI of the cluster: its own, and each site's API at the site's address."""
    name = {"name": "site", "in": "path", "required": True, "schema": {"type": "string"}}
    paths = dict(whole["paths"])
    for path, operations in of_site["paths"].items():
        if not path.startswith("/api/"):
            continue
        paths[f"/api/sites/{{site}}{path.removeprefix('/api')}"] = {
            method: {
                **operation,
                "operationId": f"site_{operation['operationId']}",
                "parameters": [name, *operation.get("parameters", ())],
            }
            for method, operation in operations.items()
        }
    schemas = {**of_site["components"]["schemas"], **whole["components"]["schemas"]}
    return {**whole, "paths": paths, "components": {"schemas": schemas}}
