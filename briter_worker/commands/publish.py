"""Run the worker. Without typer, see `plain`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from briter_worker import views
from briter_worker.commands import read_settings
from briter_worker.errors import UsageError

if TYPE_CHECKING:
    from briter_worker.settings import Settings
    from briter_worker.sinks.log import LogSink
    from briter_worker.sinks.terminal import TerminalSink


def publish(
    *,
    once: bool,
    workers: str | None = None,
    metrics_port: int | None = None,
    metrics_host: str | None = None,
) -> int:
    """Publish whatever is due, until told to stop or with `once` until nothing is; the exit status."""
    settings = read_settings()
    for warning in settings.warnings:
        views.tell(f"warning: {warning}")
    port = settings.metrics_port if metrics_port is None else metrics_port
    metrics = None
    if port:
        from briter_worker.measures import of_worker  # noqa: PLC0415 - an extra, and slow to load

        host = metrics_host or settings.metrics_host
        metrics = partial(of_worker, settings, host=host, port=port)
    if settings.database_url:
        from briter_worker.cluster.host import run  # noqa: PLC0415 - for a cluster only

        return run(settings, workers=_slots(settings, workers), once=once, log=_sink(), metrics=metrics)
    if workers is not None:
        raise UsageError(
            "--workers goes with a cluster, and there is none: BRITER_DATABASE_URL is not set, and the jobs "
            "of a folder are published by one worker. Fix: leave it out, or set BRITER_DATABASE_URL"
        )
    from briter_worker.wiring import run_worker  # noqa: PLC0415

    return run_worker(settings, once=once, log=_sink(), metrics=metrics)


def _slots(settings: Settings, flag: str | None) -> int:
    """How many sites at once: as the flag says, else as the settings do; nonsense stops nothing."""
    if flag is None:
        return settings.worker_concurrency
    from briter_worker.settings import parse_concurrency  # noqa: PLC0415 - loaded by now

    slots = parse_concurrency(flag.strip())
    if slots is None:
        slots = settings.worker_concurrency
        views.tell(f"warning: --workers {flag}: a whole number from 1 to 1000 is wanted; it is {slots}")
        return slots
    return slots


def _sink() -> LogSink | TerminalSink:
    from briter_worker.sinks.log import LogSink, standard_output  # noqa: PLC0415

    log = LogSink(standard_output(), complain=views.tell)
    if not views.is_terminal():
        return log
    from briter_worker.sinks.terminal import TerminalSink  # noqa: PLC0415

    return TerminalSink(log)
