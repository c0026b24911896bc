"""What machines ask for: health, readiness and metrics."""

import dataclasses
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from fastapi.responses import Response

from briter_worker.status import health_problems
from briter_worker.web.api import PROBLEMS, Json
from briter_worker.web.problems import ProblemError
from briter_worker.web.site import Site

if TYPE_CHECKING:
    from briter_worker.web.cluster import Cluster

router = APIRouter(responses=PROBLEMS)
Render = Callable[[], tuple[bytes, str]]


def open_metrics(root: "Site | Cluster") -> Render | None:
    """Return the function that renders the metrics; None where they are not installed."""
    if find_spec("prometheus_client") is None:
        return None
    from briter_worker.sinks.metrics import SiteMeasures, StoredMetrics  # noqa: PLC0415 - the extra [metrics]
    from briter_worker.site_metrics import measure_site  # noqa: PLC0415 - as above

    def measure() -> "Iterable[SiteMeasures]":
        if not isinstance(root, Site):
            return root.measure()
        return [dataclasses.replace(measure_site(root.snapshot().status), tallies=root.history.tallies())]

    return StoredMetrics(measure).render


@router.get("/healthz", response_model=dict[str, str])
def healthz() -> Response:
    """Return ok while the dashboard answers."""
    return Json({"status": "ok"})


@router.get("/readyz", response_model=dict[str, str])
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
