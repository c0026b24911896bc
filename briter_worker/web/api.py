"""The API: what the pages can do, for programs. `/openapi.json` describes it."""

import asyncio
import json
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Depends, Header, Query, Request
from fastapi import Path as InPath
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from briter_worker.job import State
from briter_worker.queues.steering import Listed
from briter_worker.standing import ailments, pause_as_json
from briter_worker.views import document_of
from briter_worker.web import models
from briter_worker.web.actions import until_of
from briter_worker.web.dashboard import Dashboard
from briter_worker.web.live import MOST_READERS, Missed
from briter_worker.web.problems import MEDIA_TYPE, ProblemError

PROBLEMS: dict[int | str, dict[str, Any]] = {
    code: {"description": text, "content": {MEDIA_TYPE: {"schema": models.Problem.model_json_schema()}}}
    for code, text in (("4XX", "What is wrong with the request."), ("5XX", "What is wrong here."))
}
router = APIRouter(responses=PROBLEMS)
MEANT = {
    "published": ("published",),
    "nochange": ("nochange",),
    "failed": ("failed", "dead-lettered", "nopaths", "quarantined", "interrupted"),
    "cancelled": ("cancelled", "superseded"),
}
_BIGGEST = 2**63 - 1
_GLANCE = 0.05


class Json(Response):
    """JSON that any text survives."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        """In ASCII: what a file has that is no text stays an escape."""
        return json.dumps(content, separators=(",", ":")).encode()


def dashboard_of(request: Request) -> Dashboard:
    """The dashboard that is asked; who reads is shown what was saved before they asked."""
    # Of a cluster's sites, each has its own.
    dashboard: Dashboard = getattr(request.state, "dashboard", None) or request.app.state.dashboard
    if request.method == "GET":
        dashboard.keeper.catch_up()
    return dashboard


Asked = Annotated[Dashboard, Depends(dashboard_of)]
Id = Annotated[str, InPath(min_length=1, max_length=2000, description="A job's id, or a post's slug.")]
Limit = Annotated[int, Query(ge=1, le=1000)]


@router.get("/api/queue", response_model=models.Queue)
def queue(dashboard: Asked, limit: Annotated[int, Query(ge=1, le=5000)] = 200) -> Response:
    """What is on hold, soonest first, and what failed: what Briter's dashboard shows."""
    snapshot = dashboard.keeper.snapshot
    return Json(
        {
            "scheduled": [document_of(row) for row in snapshot.scheduled[:limit]],
            "failed": [document_of(row) for row in snapshot.failed[:limit]],
            "scheduledTotal": len(snapshot.scheduled),
            "failedTotal": len(snapshot.failed),
        }
    )


@router.get("/api/jobs", response_model=models.Jobs)
def jobs(
    dashboard: Asked,
    state: State | None = None,
    slug: Annotated[str | None, Query(max_length=2000)] = None,
    offset: Annotated[int, Query(ge=0, le=_BIGGEST)] = 0,
    limit: Limit = 50,
) -> Response:
    """The jobs in the queue: in flight, waiting by due time, dead letters."""
    snapshot = dashboard.keeper.snapshot
    states = list(State) if state is None else [state]
    order = [State.CLAIMED, State.PENDING, State.RETRYING, State.SCHEDULED, State.FAILED]
    parts = [snapshot.of(each) for each in order if each in states]
    if slug is not None:
        known = snapshot.of_slug(slug)
        parts = [[row for row in known if row.state in states]]
    total = sum(map(len, parts))
    rows = _slice(parts, offset, limit)
    following = offset + len(rows)
    items = [document_of(row) for row in rows]
    return Json({"items": items, "total": total, "next": following if rows and following < total else None})


def _slice(parts: list[Any], offset: int, limit: int) -> list[Listed]:
    rows: list[Listed] = []
    for part in parts:
        if len(rows) < limit and offset < len(part):
            rows += part[offset : offset + limit - len(rows)]
        offset = max(0, offset - len(part))
    return rows


@router.post("/api/jobs", status_code=201, response_model=models.Enqueued)
def enqueue(
    dashboard: Asked,
    job: Annotated[models.NewJob, Body()],
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
) -> Response:
    """Ask for a post to be published. The same Idempotency-Key is the same job, however often it comes."""
    body = job.model_dump(by_alias=True)
    job_id, replayed = dashboard.actions.enqueue(body, idempotency_key)
    answer = {
        "id": job_id,
        "slug": job.slug,
        "replayed": replayed,
        "warnings": dashboard.actions.refused(job.paths),
    }
    return Json(answer, status_code=201)


@router.post("/api/jobs/{job_id:path}/retry", response_model=models.Steered)
def retry(dashboard: Asked, job_id: Id) -> Response:
    """Try a dead letter again at once, or what waits for a retry."""
    return _steered(dashboard.actions.retry(job_id))


@router.post("/api/jobs/{job_id:path}/publish-now", response_model=models.Steered)
def publish_now(dashboard: Asked, job_id: Id) -> Response:
    """Publish what is on hold at once."""
    return _steered(dashboard.actions.publish_now(job_id))


@router.post("/api/jobs/{job_id:path}/cancel", response_model=models.Cancellation)
def cancel(dashboard: Asked, job_id: Id) -> Response:
    """Take a job out of the queue; one in flight ends unless its push has begun."""
    done = dashboard.actions.cancel(job_id)
    rows = [(job, True) for job in done.gone] + [(job, False) for job in done.asked]
    return Json({"jobs": [{"id": job.id, "slug": job.slug, "cancelled": gone} for job, gone in rows]})


@router.get("/api/jobs/{job_id:path}", response_model=models.JobInFull)
def job(dashboard: Asked, job_id: Id) -> Response:
    """One post: its job with every key of its file, how far it is, and what became of each attempt."""
    rows = dashboard.keeper.snapshot.find(job_id)
    receipts = dashboard.readers.read(
        lambda history: history.attempts(job_id) or history.receipts(slug=job_id, limit=20, stale=True)
    )
    if not rows and not receipts:
        raise ProblemError(404, f"neither the queue nor the history has a job with the id or slug {job_id!r}")
    if rows:
        document = document_of(rows[0])
    else:
        document = {
            "id": receipts[0].job_id,
            "slug": receipts[0].slug,
            "state": receipts[0].outcome or "claimed",
        }
    under_way = next((each for each in receipts if each.outcome is None), None)
    return Json(
        {
            **document,
            "progress": under_way and under_way.as_json(),
            "receipts": [each.as_json() for each in receipts if each.outcome],
        }
    )


@router.post("/api/retry-all", response_model=models.Steered)
def retry_all(dashboard: Asked) -> Response:
    """Try every dead letter again that it can help."""
    return _steered(dashboard.actions.retry_all())


def _steered(jobs: Any) -> Response:  # noqa: ANN401 - jobs of any kind
    return Json({"jobs": [{"id": job.id, "slug": job.slug} for job in jobs]})


@router.post("/api/pause", response_model=models.Pause)
def pause(dashboard: Asked, wanted: Annotated[models.PauseRequest | None, Body()] = None) -> Response:
    """Publish nothing for a time, or until somebody resumes. What is being pushed ends first."""
    wanted = wanted or models.PauseRequest()
    return Json(pause_as_json(dashboard.actions.pause(until_of(wanted.seconds, wanted.until), wanted.reason)))


@router.post("/api/resume", response_model=models.Resumed)
def resume(dashboard: Asked) -> Response:
    """End a pause."""
    return Json({"resumed": dashboard.actions.resume()})


@router.get("/api/history", response_model=models.History)
def history(
    dashboard: Asked,
    slug: Annotated[str | None, Query(max_length=2000)] = None,
    outcome: Literal["published", "nochange", "failed", "cancelled"] | None = None,
    search: Annotated[str | None, Query(max_length=200)] = None,
    before: Annotated[int | None, Query(ge=1, le=_BIGGEST)] = None,
    limit: Limit = 50,
    *,
    stale: bool = False,
) -> Response:
    """What became of each attempt, newest first."""
    receipts = dashboard.readers.read(
        lambda history: history.receipts(
            slug=slug,
            outcomes=() if outcome is None else MEANT[outcome],
            search=search,
            before=before,
            limit=limit + 1,
            stale=stale,
        )
    )
    more = receipts[limit - 1].id if len(receipts) > limit else None
    return Json({"items": [each.as_json() for each in receipts[:limit]], "next": more})


@router.get("/api/status", response_model=models.Status)
def status(dashboard: Asked) -> Response:
    """How many jobs wait and since when, who publishes, what is wrong."""
    return Json(dashboard.status())


@router.get("/api/doctor", response_model=models.Findings)
async def doctor(dashboard: Asked) -> Response:
    """Check everything a publication needs. Whoever asks meanwhile shares the examination."""
    examination = dashboard.examination
    running = examination.start()
    # A thread that waited for it would be one fewer for the pages.
    while running.is_alive():  # noqa: ASYNC110 - a thread sets no asyncio.Event
        await asyncio.sleep(_GLANCE)
    findings = [finding.as_json() for finding in examination.findings]
    return Json({"ok": examination.is_sound, "findings": findings})


@router.get("/api/csrf", response_model=models.Csrf)
def csrf(request: Request) -> Response:
    """What a change without Bearer has to send as X-CSRF-Token."""
    return Json({"token": request.state.visit.csrf})


@router.get("/healthz", response_model=models.Health)
def healthz(dashboard: Asked) -> Response:
    """Whether the dashboard itself is alive."""
    if not dashboard.is_alive:
        raise ProblemError(503, "the queue has not been looked at for a minute")
    return Json({"status": "ok"})


@router.get("/readyz", response_model=models.Health)
def readyz(dashboard: Asked) -> Response:
    """Whether the queue can be used. What is wrong is told to those who are signed in: /api/doctor."""
    if dashboard.keeper.snapshot.is_first and dashboard.keeper.queue_problem is None:
        raise ProblemError(
            503, "the queue is being looked at for the first time", headers={"Retry-After": "1"}
        )
    if ailments(dashboard.settings, time.time(), expect_worker=False) or dashboard.keeper.queue_problem:
        raise ProblemError(503, "the queue cannot be used. Fix: briter-worker doctor, on the server")
    return Json({"status": "ok"})


@router.get("/metrics", response_class=Response)
def metrics(dashboard: Asked) -> Response:
    """For Prometheus."""
    rendered = dashboard.metrics()
    if rendered is None:
        raise ProblemError(404, "metrics are not installed. Fix: pip install 'briter-worker[metrics]'")
    text, media_type = rendered
    return Response(text, headers={"Content-Type": media_type})


@router.get("/events", response_class=Response, responses={200: {"content": {"text/event-stream": {}}}})
async def events(
    dashboard: Asked, last_event_id: Annotated[str | None, Header(max_length=40)] = None
) -> Response:
    """A `snapshot`, then everything that happens, each with its id; `status` when the standing changes."""
    if dashboard.hub.is_full():
        raise ProblemError(503, f"there are {MOST_READERS} readers already", headers={"Retry-After": "30"})
    seen = (
        int(last_event_id) if last_event_id and last_event_id.isascii() and last_event_id.isdigit() else None
    )

    async def missed(after: int, number: int) -> Missed:
        return await run_in_threadpool(
            dashboard.readers.read, lambda past: (*past.latest(), past.moments(after, number))
        )

    return dashboard.hub.stream(seen, missed, dashboard.status, dashboard.keeper.status)
