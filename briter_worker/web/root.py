"""What every dashboard has at `/`: signing in and out, health, readiness and metrics."""

import dataclasses
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated
from urllib.parse import parse_qs

from fastapi import APIRouter, Query, Request
from fastapi.responses import RedirectResponse, Response

from briter_worker.sinks.store import StoreError
from briter_worker.status import health_problems
from briter_worker.web.access import SESSION_S, Access
from briter_worker.web.api import PROBLEMS, Json
from briter_worker.web.labels import span
from briter_worker.web.problems import ProblemError
from briter_worker.web.security import COOKIE, SIGN_IN, client_address
from briter_worker.web.site import Site
from briter_worker.web.templating import address, page

if TYPE_CHECKING:
    from briter_worker.web.cluster import Cluster

router = APIRouter(responses=PROBLEMS)
Render = Callable[[], tuple[bytes, str]]
Text = Annotated[str, Query(max_length=2000)]


def open_metrics(root: "Site | Cluster") -> Render | None:
    """Return the function that renders the metrics; None where they are not installed."""
    if find_spec("prometheus_client") is None:
        return None
    from briter_worker.sinks.metrics import SiteMeasures, StoredMetrics  # noqa: PLC0415 - the extra [metrics]
    from briter_worker.site_metrics import measure_site  # noqa: PLC0415 - as above

    def measure() -> "Iterable[SiteMeasures]":
        if not isinstance(root, Site):
            return root.measure()
        measures = measure_site(root.snapshot().status)
        with suppress(StoreError):  # the gauges are known all the same
            measures = dataclasses.replace(measures, tallies=root.history.tallies())
        return [measures]

    return StoredMetrics(measure).render


@router.get("/healthz")
def healthz() -> Response:
    """Return ok while the dashboard answers."""
    return Json({"status": "ok"})


@router.get("/readyz")
def readyz(request: Request) -> Response:
    """Return ok if the queue can be used. Signed-in users find the reason at /api/status and /api/doctor."""
    root = request.app.state.shell
    failed = health_problems(root.settings, time.time(), expect_worker=False)
    if isinstance(root, Site) and not failed:
        failed = [root.snapshot().problem]
    if any(failed):
        raise ProblemError(503, "the queue cannot be used", "run briter-worker doctor on the server")
    return Json({"status": "ok"})


@router.get("/metrics", response_class=Response)
def metrics(request: Request) -> Response:
    """Return the metrics for Prometheus."""
    render: Render | None = request.app.state.metrics
    if render is None:
        raise ProblemError(404, "metrics are not installed", "pip install 'briter-worker[metrics]'")
    text, media_type = render()
    return Response(text, headers={"Content-Type": media_type})


async def form_of(request: Request) -> dict[str, str]:
    """Return the fields of a page's form."""
    fields = parse_qs((await request.body()).decode("utf-8", "replace"), keep_blank_values=True)
    return {name: values[0] for name, values in fields.items()}


def local_path(target: str) -> str:
    """Return the target if it is a page of the dashboard, else `/`."""
    fine = target.startswith("/") and not target.startswith(("//", "/\\")) and target.isprintable()
    return target if fine else "/"


@router.get(SIGN_IN, include_in_schema=False)
def sign_in_page(
    request: Request,
    next: Text = "/",  # noqa: A002 - in the address
    key: Annotated[str, Query(max_length=200)] = "",
) -> Response:
    """Ask for the token, or sign in by the key of a one-time link."""
    access: Access = request.app.state.access
    if request.state.visit.signed_in:
        return RedirectResponse(local_path(next), status_code=303)
    if key and access.use_link_key(key):
        return _signed_in(request, "/")
    wrong = "This link was used before, or is too old. Enter the token." if key else ""
    return _form(request, 403 if key else 200, next, wrong)


@router.post(SIGN_IN, include_in_schema=False)
async def sign_in(request: Request) -> Response:
    """Open a session."""
    form = await form_of(request)
    access: Access = request.app.state.access
    target = form.get("next", "/")
    visitor = client_address(request.scope)
    wait = access.seconds_to_wait(visitor)
    if wait:
        answer = _form(request, 429, target, f"Too many wrong tokens. Try again in {span(wait)}.")
        answer.headers["Retry-After"] = str(wait)
        return answer
    if not access.is_token(form.get("token", "").strip()):
        access.count_failure(visitor)
        return _form(request, 401, target, "That is not the token.")
    return _signed_in(request, target)


@router.post("/sign-out", include_in_schema=False)
def sign_out(request: Request) -> Response:
    """End the session."""
    request.app.state.access.end_session(request.state.visit.cookie)
    response = RedirectResponse(address(SIGN_IN, told="signed-out"), status_code=303)
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return response


def _form(request: Request, status: int, target: str, wrong: str) -> Response:
    shell = request.app.state.shell
    more = {"target": local_path(target), "wrong": wrong}
    return page(request, shell, "sign-in.html", status=status, **more)


def _signed_in(request: Request, target: str) -> Response:
    response = RedirectResponse(local_path(target), status_code=303)
    response.set_cookie(
        COOKIE,
        request.app.state.access.open_session(),
        max_age=int(SESSION_S),
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return response
