"""The commands that stay: run, watch, serve."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from briter_worker.commands import Json, check_repository, is_terminal, report, write
from briter_worker.errors import UsageError
from briter_worker.events import WorkerStarted
from briter_worker.settings import Settings, load_settings
from briter_worker.sinks.log import LogSink, QuietLogSink
from briter_worker.sinks.recorder import OpenedLater
from briter_worker.wiring import another_watcher, known_now, open_post_watcher, open_queue, run_worker

if TYPE_CHECKING:
    from collections.abc import Iterable

    from briter_worker.sinks.metrics import MetricsSink, Sample


def run(
    *,
    once: Annotated[bool, typer.Option("--once", help="Publish what is due, then exit.")] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="With --once: print nothing if nothing was due, for cron.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Also turn changed posts into jobs, as the command watch does.")
    ] = False,
    workers: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="Sites published at once (cluster only). [env: BRITER_WORKER_CONCURRENCY]"
        ),
    ] = None,
    metrics_port: Annotated[
        str | None,
        typer.Option(
            metavar="PORT", help="Port of the /metrics endpoint. 0 disables it. [env: BRITER_METRICS_PORT]"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Publish what is due until SIGTERM. Prints one line per event: JSON unless at a terminal."""
    settings = _load(BRITER_WORKER_CONCURRENCY=workers, BRITER_METRICS_PORT=metrics_port)
    if quiet and not once:
        raise UsageError("--quiet is for --once: a worker that stays reports its start", "omit it")
    log = _open_log(QuietLogSink if quiet else LogSink, as_json=as_json)
    open_metrics = None
    if settings.metrics_port:
        if find_spec("prometheus_client") is None:
            raise UsageError("metrics are not installed", "pip install 'briter-worker[metrics]'")
        open_metrics = partial(_open_metrics, settings)
    if settings.database_url:
        from briter_worker.cluster.node import run_node  # noqa: PLC0415 - the extra [postgres]

        metrics = open_metrics() if open_metrics else None
        slots = settings.worker_concurrency
        raise typer.Exit(run_node(settings, workers=slots, once=once, log=log, metrics=metrics))
    if workers is not None:
        raise UsageError("--workers needs a cluster", "omit it, or set BRITER_DATABASE_URL")
    # Only a worker that gets the site's lock takes the port; a port in use stops no publication.
    sinks = (
        [OpenedLater(open_metrics, lambda event: isinstance(event, WorkerStarted))] if open_metrics else []
    )
    if watch and once:
        raise UsageError("--watch needs a worker that stays", "omit --once")
    watcher = open_post_watcher(settings, log) if watch else None
    raise typer.Exit(run_worker(settings, once=once, log=log, metrics=sinks, watcher=watcher))


def watch(
    *,
    again: Annotated[
        bool,
        typer.Option(
            "--again", help="Compare all files with the remote once; a watch that is active does so."
        ),
    ] = False,
) -> None:
    """Turn changed posts into jobs until SIGTERM. Publishes nothing itself."""
    settings = load_settings()
    log = _open_log()
    watcher = open_post_watcher(settings, log)
    if again:
        watcher.order_comparison()
    if not watcher.acquire():
        log(another_watcher(has_order=again))
        return
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    watcher.run(stop.is_set, settings.worker_poll_interval_ms / 1000)


def _open_metrics(settings: Settings) -> MetricsSink:
    """Return a sink that counts, and serves `/metrics`. In a cluster, `serve` shows the sites' status."""
    from briter_worker.sinks.metrics import MetricsSink  # noqa: PLC0415 - the extra [metrics]
    from briter_worker.status import measure_site, read_status  # noqa: PLC0415 - only for metrics

    measure = None
    if not settings.database_url:
        queue, guard = open_queue(settings), threading.Lock()  # each scrape has a thread of its own

        def measure() -> tuple[Iterable[Sample], tuple[()]]:
            with guard:
                return measure_site(
                    read_status(settings, known_now(settings), queue=queue, local_commits=())
                ), ()

    metrics = MetricsSink(measure)
    try:
        metrics.serve(settings.metrics_host, settings.metrics_port)
    except (OSError, OverflowError) as error:
        where = f"{settings.metrics_host}, port {settings.metrics_port}"
        raise UsageError(
            f"metrics cannot be served at {where}: {error}",
            "choose another BRITER_METRICS_PORT or BRITER_METRICS_HOST",
        ) from error
    return metrics


def _open_log(kind: type[LogSink] = LogSink, *, as_json: bool = False) -> LogSink:
    if as_json or not is_terminal():
        return kind.standard(report)
    from briter_worker.commands import output  # noqa: PLC0415 - as a service, the worker prints none of its words

    return kind.standard(report, output.event_text)


def _load(**flags: str | None) -> Settings:
    """Return the settings, with the flags of the command line over the variables of the same names."""
    return load_settings({**os.environ, **{name: text for name, text in flags.items() if text is not None}})


def serve(
    *,
    host: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Address to listen on. [env: BRITER_DASHBOARD_HOST]"),
    ] = None,
    port: Annotated[
        str | None, typer.Option(metavar="PORT", help="Port. 0: any free port. [env: BRITER_DASHBOARD_PORT]")
    ] = None,
) -> None:
    """Serve the dashboard and its API until SIGTERM. Works with or without a running worker."""
    settings = _load(BRITER_DASHBOARD_HOST=host, BRITER_DASHBOARD_PORT=port)
    if not settings.database_url:
        check_repository(settings)
    missing = [name for name in ("fastapi", "jinja2", "sse_starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UsageError(f"the dashboard needs {', '.join(missing)}", "pip install 'briter-worker[web]'")
    from briter_worker.web import server  # noqa: PLC0415 - the extra [web]

    raise typer.Exit(
        server.serve(
            settings,
            host=settings.dashboard_host,
            port=settings.dashboard_port,
            log=_open_log(),
            complain=report,
            say=write,
        )
    )
