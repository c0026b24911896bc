"""Run the worker. Without typer, see `plain`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from briter_worker import views
from briter_worker.commands import read_settings

if TYPE_CHECKING:
    from briter_worker.ports import EventSink


def publish(*, once: bool, metrics_port: int | None = None, metrics_host: str | None = None) -> int:
    """Publish whatever is due, until told to stop or with `once` until nothing is; the exit status."""
    settings = read_settings()
    from briter_worker.wiring import run_worker  # noqa: PLC0415

    port = settings.metrics_port if metrics_port is None else metrics_port
    metrics = None
    if port:
        from briter_worker.measures import of_worker  # noqa: PLC0415 - an extra, and slow to load

        host = metrics_host or settings.metrics_host
        metrics = partial(of_worker, settings, host=host, port=port)
    return run_worker(settings, once=once, log=_sink(), metrics=metrics)


def _sink() -> EventSink:
    from briter_worker.sinks.log import LogSink, standard_output  # noqa: PLC0415

    log = LogSink(standard_output(), complain=views.tell)
    if not views.is_terminal():
        return log
    from briter_worker.sinks.terminal import TerminalSink  # noqa: PLC0415

    return TerminalSink(log)
