"""The dashboard."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from briter_worker import views
from briter_worker.commands import DeclinedError, read_settings
from briter_worker.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from briter_worker.settings import Settings
    from briter_worker.sinks.log import LogSink
    from briter_worker.standing import Standing
    from briter_worker.web.dashboard import Hook
    from briter_worker.web.serving import Served

_NEEDED = ("fastapi", "jinja2", "sse_starlette", "uvicorn")


def serve(
    *,
    host: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Where to listen; default: BRITER_DASHBOARD_HOST.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65_535, help="0: any free one; default: BRITER_DASHBOARD_PORT.")
    ] = None,
) -> None:
    """The dashboard and its API, until SIGTERM. Beside a worker, or without one."""
    settings = read_settings()
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise UsageError(f"the dashboard needs {', '.join(missing)}. Fix: pip install 'briter-worker[web]'")
    from briter_worker.sinks.log import LogSink, standard_output  # noqa: PLC0415
    from briter_worker.web import serving  # noqa: PLC0415

    try:
        serving.serve(
            settings,
            partial(_application, settings, LogSink(standard_output(), complain=views.tell)),
            host=host or settings.dashboard_host,
            port=settings.dashboard_port if port is None else port,
            ready=lambda address: views.put(f"the dashboard is at {address}"),
        )
    except serving.PortTakenError as error:
        raise DeclinedError(str(error)) from None


def _application(settings: Settings, log: LogSink, host: str) -> Served:
    has_metrics = find_spec("prometheus_client") is not None
    if settings.database_url:
        from briter_worker.web.sites.app import ClusterApplication  # noqa: PLC0415 - for a cluster only

        render = None
        if has_metrics:
            from briter_worker.measures import of_cluster  # noqa: PLC0415 - an extra

            render = of_cluster
        return ClusterApplication(settings, host=host, log=log, complain=views.tell, metrics=render)
    from briter_worker.web.app import Application  # noqa: PLC0415

    return Application(settings, host=host, log=log, complain=views.tell, metrics=_metrics(settings))


def _metrics(settings: Settings) -> Hook | None:
    """What renders the numbers, where the extra is installed."""
    if find_spec("prometheus_client") is None:
        return None
    from briter_worker.measures import Onlooker  # noqa: PLC0415

    def onlooker(standing: Callable[[], Standing]) -> Callable[[], tuple[bytes, str]]:
        return Onlooker(settings, standing).render

    return onlooker
