"""Retry and cancel. A running worker notices the changed files by itself."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from briter_worker import views
from briter_worker.commands import DeclinedError, read_settings
from briter_worker.commands.options import Json, Wanted  # noqa: TC001 - typer reads them
from briter_worker.errors import UsageError, for_people

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from briter_worker.job import Job


def retry(
    wanted: Annotated[
        str | None, typer.Argument(metavar="ID-or-SLUG", help="A job's id, or a post's slug.")
    ] = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="Every dead letter that it can help.")] = False,
    as_json: Json = False,
) -> None:
    """Have dead letters tried again at once."""
    settings = read_settings()
    if everything is (wanted is not None):
        raise UsageError("retry needs one of ID-or-SLUG and --all")
    from briter_worker.wiring import open_queue  # noqa: PLC0415

    queue = open_queue(settings)
    with _declining():
        jobs = queue.retry_all(time.time()) if wanted is None else queue.retry(wanted, time.time())
    if as_json or views.is_terminal():
        _report("will be tried again", jobs, as_json=as_json)
    else:
        views.put_columns(["retried", job.slug, job.id] for job in jobs)


def cancel(wanted: Wanted, *, as_json: Json = False) -> None:
    """Take a waiting or failed job out of the queue."""
    settings = read_settings()
    from briter_worker.wiring import open_queue  # noqa: PLC0415

    with _declining():
        jobs = open_queue(settings).cancel(wanted, time.time())
    if as_json or views.is_terminal():
        _report("cancelled", jobs, as_json=as_json)
    else:
        # A cancelled job is gone without a trace: this line is what a log keeps of it.
        from briter_worker.events import Cancelled  # noqa: PLC0415
        from briter_worker.sinks.log import LogSink, standard_output  # noqa: PLC0415

        log = LogSink(standard_output(), complain=views.tell)
        for job in jobs:
            log(Cancelled(job_id=job.id, slug=job.slug))


@contextmanager
def _declining() -> Iterator[None]:
    from briter_worker.queues.steering import SteeringError  # noqa: PLC0415

    try:
        yield
    except SteeringError as error:
        raise DeclinedError(str(error)) from None


def _report(what: str, jobs: Sequence[Job], *, as_json: bool) -> None:
    if as_json:
        views.put_json([{"id": job.id, "slug": job.slug} for job in jobs])
    else:
        lines = [f"{for_people(job.slug)} {what} (job {for_people(job.id)})" for job in jobs]
        views.put("\n".join(lines) or "No job needs that.")
