"""The dashboard."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from briter_worker import views
from briter_worker.commands import DeclinedError, read_settings
from briter_worker.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from briter_worker.settings import Settings
    from briter_worker.standing import Standing
    from briter_worker.web.dashboard import Hook

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
    """The dashboard and its API, until SIGTERM; beside a worker, or without one."""
    settings = read_settings()
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise UsageError(f"the dashboard needs {', '.join(missing)}. Fix: pip install 'briter-worker[web]'")
    from briter_worker.sinks.log import LogSink, standard_output  # noqa: PLC0415
    from briter_worker.web import serving  # noqa: PLC0415

    try:
        serving.serve(
            settings,
            host=host or settings.dashboard_host,
            port=settings.dashboard_port if port is None else port,
            log=LogSink(standard_output(), complain=views.tell),
            complain=views.tell,
            ready=lambda address: views.put(f"the dashboard is at {address}"),
            metrics=_metrics(settings),
        )
    except serving.PortTakenError as error:
        raise DeclinedError(str(error)) from None


def _metrics(settings: Settings) -> Hook | None:
    """What renders the numbers, where the extra is installed."""
    if find_spec("prometheus_client") is None:
        return None
    from briter_worker.measures import Onlooker  # noqa: PLC0415

    def onlooker(standing: Callable[[], Standing]) -> Callable[[], tuple[bytes, str]]:
        return Onlooker(settings, standing).render

    return onlooker
