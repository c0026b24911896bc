"""Retry, cancel, hurry and pause. A running worker notices the changed files by itself."""

from __future__ import annotations

import re
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from briter_worker import views
from briter_worker.commands import DeclinedError, read_site, wake
from briter_worker.commands.options import Json, OfSite, Wanted  # noqa: TC001 - typer reads them
from briter_worker.errors import UsageError, for_people

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from briter_worker.job import Job
    from briter_worker.ports import EventSink
    from briter_worker.settings import Settings
    from briter_worker.sinks.fan import Fan


Span = Annotated[str | None, typer.Option("--for", metavar="SPAN", help="For so long: 90s, 30m, 2h, 1d.")]
Until = Annotated[str | None, typer.Option(metavar="ISO", help="Until then.")]
Reason = Annotated[str, typer.Option(help="Why, for whoever wonders.")]


def retry(
    wanted: Annotated[
        str | None, typer.Argument(metavar="ID-or-SLUG", help="A job's id, or a post's slug.")
    ] = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="Every dead letter that it can help.")] = False,
    site: OfSite = None,
    as_json: Json = False,
) -> None:
    """Have dead letters tried again at once."""
    settings = read_site(site)
    if everything is (wanted is not None):
        raise UsageError("retry needs one of ID-or-SLUG and --all")
    from briter_worker.wiring import open_queue  # noqa: PLC0415

    queue = open_queue(settings)
    with _declining():
        jobs = queue.retry_all(time.time()) if wanted is None else queue.retry(wanted, time.time())
    wake(settings)
    if as_json or views.is_terminal():
        _report("will be tried again", jobs, as_json=as_json)
    else:
        views.put_columns(["retried", job.slug, job.id] for job in jobs)


def cancel(wanted: Wanted, *, site: OfSite = None, as_json: Json = False) -> None:
    """Take a job out of the queue. Stops one in flight, too, while it is not being pushed."""
    settings = read_site(site)
    from briter_worker.wiring import open_queue  # noqa: PLC0415

    with _declining():
        done = open_queue(settings).cancel(wanted, time.time())
    _record_cancelled(settings, done.gone, print_lines=not as_json and not views.is_terminal())
    if as_json:
        views.put_json(
            [{"id": job.id, "slug": job.slug, "cancelled": True} for job in done.gone]
            + [{"id": job.id, "slug": job.slug, "cancelled": False} for job in done.asked]
        )
        return
    for job in done.asked:
        views.tell(
            f"{for_people(job.slug)} is in flight: it will be cancelled unless its push has begun "
            f"(briter-worker show {for_people(job.id)} tells what became of it)"
        )
    if views.is_terminal():
        views.put(
            "".join(f"{for_people(job.slug)} cancelled (job {for_people(job.id)})\n" for job in done.gone)
        )


def _record_cancelled(settings: Settings, jobs: Sequence[Job], *, print_lines: bool) -> None:
    """What is gone is in the history; and in the log, where one is kept of what is printed."""
    if not jobs:
        return
    from briter_worker.events import Cancelled, Event, Warned  # noqa: PLC0415
    from briter_worker.sinks.log import LogSink, standard_output  # noqa: PLC0415

    lines = LogSink(standard_output(), complain=views.tell)

    def log(event: Event) -> None:
        if isinstance(event, Warned):
            views.tell(event.error)
        elif print_lines:
            lines(event)

    record = _open_record(settings, log)
    for job in jobs:
        record(Cancelled(job_id=job.id, slug=job.slug))
    record.close()


def _open_record(settings: Settings, log: EventSink) -> Fan:
    if settings.database_url:
        from briter_worker.cluster import telling  # noqa: PLC0415 - for a cluster only
        from briter_worker.wiring import open_database  # noqa: PLC0415

        return telling.open_record(settings, open_database(settings), log)
    from briter_worker.outlets import open_record  # noqa: PLC0415

    return open_record(settings, log)


def publish_now(wanted: Wanted, *, site: OfSite = None, as_json: Json = False) -> None:
    """Have a job on hold published at once. Also one that waits for its retry."""
    settings = read_site(site)
    from briter_worker.wiring import open_queue  # noqa: PLC0415

    with _declining():
        jobs = open_queue(settings).publish_now(wanted, time.time())
    wake(settings)
    if as_json or views.is_terminal():
        _report("is due now", jobs, as_json=as_json)
    else:
        views.put_columns(["due", job.slug, job.id] for job in jobs)


def pause(
    *,
    span: Span = None,
    until: Until = None,
    reason: Reason = "",
    site: OfSite = None,
    as_json: Json = False,
) -> None:
    """Publish nothing until `resume`, or for a time. What is being pushed right now ends first."""
    settings = read_site(site)
    now = time.time()
    end = _end(span, until, now)
    from briter_worker.wiring import open_queue  # noqa: PLC0415

    made = open_queue(settings).pause(now, until=end, reason=reason)
    if as_json:
        from briter_worker.standing import pause_as_json  # noqa: PLC0415

        views.put_json(pause_as_json(made))
    else:
        views.put(views.pause_in_words(made, now))


def resume(*, site: OfSite = None, as_json: Json = False) -> None:
    """End a pause."""
    settings = read_site(site)
    from briter_worker.wiring import open_queue  # noqa: PLC0415

    ended = open_queue(settings).resume()
    wake(settings)
    if as_json:
        views.put_json({"resumed": ended})
    else:
        views.put("publishing goes on" if ended else "nothing was paused")


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _end(span: str | None, until: str | None, now: float) -> float | None:
    if span is not None and until is not None:
        raise UsageError("pause takes one of --for and --until")
    if span is not None:
        found = re.fullmatch(r"([0-9]{1,6})([smhd])", span.strip())
        if found is None:
            raise UsageError(f"--for {for_people(span)!r}: a number and a unit, such as 90s, 30m, 2h or 1d")
        return now + int(found.group(1)) * _UNITS[found.group(2)]
    if until is None:
        return None
    from briter_worker.job import parse_time  # noqa: PLC0415

    try:
        end = parse_time(until)
    except ValueError as error:
        raise UsageError(f"--until {for_people(str(error))}") from None
    if end <= now:
        raise UsageError(f"--until {for_people(until)}: that is over already")
    return end


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
