"""The API of one site. `/openapi.json` describes it. Errors are problem documents (RFC 9457)."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Depends, Header, Query, Request
from fastapi import Path as InPath
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel
from starlette.concurrency import run_in_threadpool

from briter_worker import wiring
from briter_worker.doctor import State as FindingState
from briter_worker.job import Author, Job, State, parse_time
from briter_worker.sinks.history import FAILED
from briter_worker.status import job_to_json, post_to_json
from briter_worker.web.live import Feed
from briter_worker.web.responses import PROBLEM_TYPE, Json, ProblemError
from briter_worker.web.security import Access, Visit, bearer_of, client_address
from briter_worker.web.site import Site
from briter_worker.web.snapshot import Snapshot

_PROBLEM = {"type": "object", "required": ["type", "title", "status", "detail"]}
PROBLEMS: dict[int | str, dict[str, Any]] = {
    code: {"description": text, "content": {PROBLEM_TYPE: {"schema": _PROBLEM}}}
    for code, text in (("4XX", "The request is refused."), ("5XX", "The dashboard cannot answer."))
}
EVENT_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
OUTCOMES = {
    "published": ("published",),
    "nochange": ("nochange",),
    "failed": FAILED,
    "cancelled": ("cancelled", "superseded"),
}
_ORDER = (
    *(State.CLAIMED, State.PENDING, State.TRIED, State.RETRYING),
    *(State.QUIET, State.SCHEDULED, State.FAILED),
)
_MAX_ID = 2**63 - 1
_MAX_PATHS = 10_000
_TEXT = r"^[^\x00-\x1f\x7f]+$"
_TIME: dict[str, Any] = {"anyOf": [{"type": "string", "format": "date-time"}, {"type": "null"}]}

router = APIRouter(responses=PROBLEMS)
"""Below `/api`, in a cluster below `/api/sites/{site}`."""
folder_router = APIRouter(responses=PROBLEMS)
"""The same, for a site with a queue folder."""
live_router = APIRouter(responses=PROBLEMS)
"""Below `/`, in a cluster below `/sites/{site}`."""


Message = Annotated[
    str | None, Field(max_length=100_000, pattern=r"^[^\x00]*$", description="Absent: made of the slug.")
]


class NewJob(BaseModel):
    """A post to publish. Other keys are kept in the job as they are."""

    model_config = ConfigDict(alias_generator=to_camel, extra="allow")

    slug: str = Field(min_length=1, max_length=1000, pattern=_TEXT, description="The post.")
    paths: list[str] = Field(
        max_length=_MAX_PATHS, description="What to publish, relative to the repository, `/` between parts."
    )
    message: Message = None
    scheduled_for: str | None = Field(
        None, description="Not published before. Absent: now.", json_schema_extra=_TIME
    )
    author: Author | None = None


class NewUpload(NewJob):
    """A post to publish, with its files. Other keys are kept in the job as they are."""

    paths: list[str] = Field([], max_length=_MAX_PATHS, description="If present, the paths of `contents`.")
    contents: dict[str, str | None] = Field(
        min_length=1,
        max_length=_MAX_PATHS,
        description="The files to publish: for each path, relative to the repository, the content in "
        "base64, or null to delete the file.",
    )


class UndoRequest(BaseModel):
    """The version to publish again; without `to`, the one before the last publication."""

    model_config = ConfigDict(extra="forbid")

    to: str | None = Field(None, max_length=200, description="A commit of the branch.")
    message: Message = None


class PauseRequest(BaseModel):
    """A pause; without `until`, it lasts until `resume`."""

    model_config = ConfigDict(alias_generator=to_camel, extra="forbid")

    until: str | None = Field(None, description="End of the pause.", json_schema_extra=_TIME)
    reason: str = Field("", max_length=500)


def current_site(request: Request) -> Site:
    """Return the site that the address names, or the only one."""
    site: Site = request.app.state.open_site(request.path_params.get("site"))
    request.state.site = site
    return site


CurrentSite = Annotated[Site, Depends(current_site)]


def current_snapshot(site: CurrentSite) -> Snapshot:
    """Return the site's queue and status. Raises ProblemError."""
    return site.snapshot()


CurrentSnapshot = Annotated[Snapshot, Depends(current_snapshot)]
JobId = Annotated[str, InPath(min_length=1, max_length=2000, description="A job's id, or a post's slug.")]
Limit = Annotated[int, Query(ge=1, le=1000)]
IdempotencyKey = Annotated[str | None, Header(min_length=1, max_length=255)]


@router.get("/queue")
def queue(site: CurrentSite, limit: Annotated[int, Query(ge=1, le=5000)] = 200) -> Response:
    """Return scheduled jobs, soonest first, and failed ones."""
    jobs = site.snapshot().jobs
    scheduled, failed = jobs[State.SCHEDULED], jobs[State.FAILED]
    return Json(
        {
            "scheduled": [job_to_json(row) for row in scheduled[:limit]],
            "failed": [job_to_json(row) for row in failed[:limit]],
            "scheduledTotal": len(scheduled),
            "failedTotal": len(failed),
        }
    )


@router.get("/jobs")
def jobs(
    site: CurrentSite,
    state: State | None = None,
    slug: Annotated[str | None, Query(max_length=2000)] = None,
    offset: Annotated[int, Query(ge=0, le=_MAX_ID)] = 0,
    limit: Limit = 50,
) -> Response:
    """Return the jobs in the queue: in flight, waiting by due time, dead letters."""
    jobs = site.snapshot().jobs
    rows = [
        row
        for each in _ORDER
        if state in {None, each}
        for row in jobs[each]
        if slug is None or row.job.slug == slug
    ]
    return listed([job_to_json(row) for row in rows[offset : offset + limit]], offset, len(rows))


def listed(items: Sequence[object], offset: int, total: int) -> Response:
    """Return one page of a list, with the offset of the next one."""
    end = offset + len(items)
    return Json({"items": items, "total": total, "next": end if items and end < total else None})


@folder_router.post("/jobs", status_code=201)
def enqueue(
    site: CurrentSite, job: Annotated[NewJob, Body()], idempotency_key: IdempotencyKey = None
) -> Response:
    """Enqueue a post. Requests with the same Idempotency-Key are one job."""
    job_id, replayed = site.enqueue(job.model_dump(by_alias=True), idempotency_key)
    return Json({"id": job_id, "slug": job.slug, "replayed": replayed}, 201)


@router.post("/jobs/{job_id:path}/retry")
def retry(site: CurrentSite, job_id: JobId) -> Response:
    """Retry a failed or retrying job at once."""
    return _changed(site.steer("retry", lambda queue, now: queue.retry(job_id, now)))


@router.post("/jobs/{job_id:path}/publish-now")
def publish_now(site: CurrentSite, job_id: JobId) -> Response:
    """Publish a scheduled, retrying or quiet job at once."""
    return _changed(site.steer("publish-now", lambda queue, now: queue.publish_now(job_id, now)))


@router.post("/jobs/{job_id:path}/cancel")
def cancel(site: CurrentSite, job_id: JobId) -> Response:
    """Remove a job from the queue; a job in flight ends unless its push has begun."""
    done = site.steer("cancel", lambda queue, now: queue.cancel(job_id, now))
    rows = [(job, True) for job in done.removed] + [(job, False) for job in done.requested]
    return Json({"jobs": [{"id": job.id, "slug": job.slug, "cancelled": gone} for job, gone in rows]})


@router.post("/jobs/{job_id:path}/undo")
def undo(site: CurrentSite, job_id: JobId, wanted: Annotated[UndoRequest | None, Body()] = None) -> Response:
    """Publish the version before the post's last publication, unless the CMS has changed its files since."""
    return Json({"jobs": [{"id": site.undo(job_id, **dict(wanted or ())), "slug": job_id}]})


@router.get("/jobs/{job_id:path}")
def job(site: CurrentSite, job_id: JobId) -> Response:
    """Return one job with every key of its file, its progress, and the receipts of its attempts."""
    rows, receipts = site.snapshot().find(job_id), site.history.of_post(job_id)
    if not rows and not receipts:
        raise ProblemError(404, f"neither the queue nor the history has a job with the id or slug {job_id!r}")
    return Json(post_to_json(rows, receipts))


@router.post("/retry-all")
def retry_all(site: CurrentSite) -> Response:
    """Retry every failed job that a retry can help."""
    return _changed(site.steer("retry", lambda queue, now: queue.retry_all(now)))


def _changed(jobs: Sequence[Job]) -> Response:
    return Json({"jobs": [{"id": job.id, "slug": job.slug} for job in jobs]})


@router.post("/pause")
def pause(site: CurrentSite, wanted: Annotated[PauseRequest | None, Body()] = None) -> Response:
    """Pause publishing for a time, or until `resume`. A push that has begun ends first."""
    wanted = wanted or PauseRequest()
    try:
        until = None if wanted.until is None else parse_time(wanted.until)
    except ValueError as error:
        raise ProblemError(422, str(error)) from None
    if until is not None and until <= wiring.known_now(site.settings):
        raise ProblemError(409, f"{wanted.until} is in the past")
    made = site.steer("pause", lambda queue, now: queue.pause(now, until=until, reason=wanted.reason))
    return Json(made.to_json())


@router.post("/resume")
def resume(site: CurrentSite) -> Response:
    """End the pause."""
    return Json({"resumed": site.steer("resume", lambda queue, _now: queue.resume())})


async def _check_pull(request: Request) -> None:
    if request.state.visit.is_signed:
        await request.app.state.access.check_pull(request)


@router.post("/pull", status_code=202, dependencies=[Depends(_check_pull)])
def pull(site: CurrentSite) -> Response:
    """Have the worker bring the remote's edits into the site, in a cluster report them, at its next poll.

    A git host's webhook needs no token: it signs with BRITER_PULL_SECRET, as GitHub, GitLab and Gitea do.
    """
    site.order_pull()
    return Json({"ordered": True}, 202)


@router.get("/history")
def history(
    site: CurrentSite,
    slug: Annotated[str | None, Query(max_length=2000)] = None,
    outcome: Literal["published", "nochange", "failed", "cancelled"] | None = None,
    search: Annotated[str | None, Query(max_length=200)] = None,
    before: Annotated[int | None, Query(ge=1, le=_MAX_ID)] = None,
    limit: Limit = 50,
) -> Response:
    """Return receipts, newest first."""
    receipts = site.history.receipts(
        slug=slug,
        outcomes=() if outcome is None else OUTCOMES[outcome],
        search=search or "",
        before=before,
        limit=limit + 1,
    )
    more = receipts[limit - 1].id if len(receipts) > limit else None
    return Json({"items": [each.to_json() for each in receipts[:limit]], "next": more})


@router.get("/status")
def status(site: CurrentSite) -> Response:
    """Return the status: jobs by state, the worker, and what is wrong."""
    return Json(site.status_json())


@router.get("/doctor")
async def doctor(site: CurrentSite) -> Response:
    """Run the checks of `doctor`. Requests at the same time share one run."""
    findings = await asyncio.wrap_future(site.examine())
    is_ok = all(finding.state is not FindingState.ERROR for finding in findings)
    return Json({"ok": is_ok, "findings": [each.to_json() for each in findings]})


@live_router.get("/events", response_class=Response, responses=EVENT_STREAM)
async def events(
    request: Request, site: CurrentSite, last_event_id: Annotated[str | None, Header(max_length=40)] = None
) -> Response:
    """Stream a `snapshot`, then every event with its id, and `status` when the status changes."""
    return stream(request, site.feed, last_event_id)


def stream(request: Request, feed: Feed, last_event_id: str | None = None) -> Response:
    """Return a live stream, which ends with the session of its reader, or with the API token's rights."""
    access: Access = request.app.state.access
    visit: Visit = request.state.visit

    async def is_open() -> bool:
        if visit.token is None:
            return visit.cookie is None or access.has_session(visit.cookie)
        with suppress(ProblemError):  # the database is away, and there is no news
            token = await run_in_threadpool(access.find_api_token, bearer_of(request.headers) or "")
            return token == visit.token
        return True

    return feed.stream(
        last_event_id, address=client_address(request.scope), session=visit.cookie, is_open=is_open
    )
