"""The commands that stay: `run` and `serve`."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from briter_worker.commands import output
from briter_worker.errors import UsageError
from briter_worker.settings import load_settings, parse_concurrency
from briter_worker.sinks.fanout import OpenedAtStart
from briter_worker.sinks.log import LogSink, standard_output
from briter_worker.sinks.terminal import TerminalSink
from briter_worker.wiring import run_worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from briter_worker.settings import Settings
    from briter_worker.sinks.metrics import MetricsSink


def run(
    *,
    once: Annotated[bool, typer.Option("--once", help="Publish what is due, then exit.")] = False,
    workers: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Sites to publish at once (cluster only). [env: BRITER_WORKER_CONCURRENCY]",
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65_535, help="Port of the /metrics endpoint. 0 disables it. [env: BRITER_METRICS_PORT]"
        ),
    ] = None,
    metrics_host: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Address of the /metrics endpoint. [env: BRITER_METRICS_HOST]"),
    ] = None,
) -> None:
    """Publish what is due until SIGTERM. Prints one log line per event."""
    settings = load_settings()
    for warning in settings.warnings:
        output.report(f"warning: {warning}")
    settings = settings.model_copy(
        update={
            "metrics_port": settings.metrics_port if metrics_port is None else metrics_port,
            "metrics_host": metrics_host or settings.metrics_host,
        }
    )
    open_metrics = _metrics_of(settings)
    if settings.database_url:
        from briter_worker.cluster.node import run_node  # noqa: PLC0415 - the extra [postgres]

        slots = settings.worker_concurrency if workers is None else _read_workers(settings, workers)
        metrics = open_metrics() if open_metrics else None
        raise typer.Exit(run_node(settings, workers=slots, once=once, log=_open_log(), metrics=metrics))
    if workers is not None:
        raise UsageError(
            "--workers needs a cluster; one worker publishes the jobs of a folder",
            "omit --workers, or set BRITER_DATABASE_URL",
        )
    # Only a worker that gets the site's lock takes the port; a port in use stops no publication.
    sinks = [OpenedAtStart(open_metrics)] if open_metrics else []
    raise typer.Exit(run_worker(settings, once=once, log=_open_log(), metrics=sinks))


def _metrics_of(settings: Settings) -> Callable[[], MetricsSink] | None:
    if not settings.metrics_port:
        return None
    from briter_worker.site_metrics import open_metrics  # noqa: PLC0415 - the extra [metrics]

    return partial(open_metrics, settings)


def _read_workers(settings: Settings, flag: str) -> int:
    workers = parse_concurrency(flag.strip())
    if workers is None:
        workers = settings.worker_concurrency
        output.report(
            f"warning: --workers is {flag}; accepted: a whole number from 1 to 1000; {workers} is used"
        )
    return workers


def _open_log() -> LogSink | TerminalSink:
    log = LogSink(standard_output(), complain=output.report)
    return TerminalSink(log) if output.is_terminal() else log


def serve(
    *,
    host: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Address to listen on. [env: BRITER_DASHBOARD_HOST]")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65_535, help="Port to listen on. 0: any free port. [env: BRITER_DASHBOARD_PORT]"
        ),
    ] = None,
) -> None:
    """Serve the dashboard and its API until SIGTERM. Works with or without a running worker."""
    settings = load_settings()
    missing = [name for name in ("fastapi", "jinja2", "sse_starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UsageError(f"the dashboard needs {', '.join(missing)}", "pip install 'briter-worker[web]'")
    from briter_worker.web import server  # noqa: PLC0415 - the extra [web]

    raise typer.Exit(
        server.serve(
            settings,
            host=host or settings.dashboard_host,
            port=settings.dashboard_port if port is None else port,
            log=LogSink(standard_output(), complain=output.report),
            complain=output.report,
            say=output.write,
        )
    )
