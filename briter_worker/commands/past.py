"""What became of the posts: receipts, and one job from its save to the remote."""

from __future__ import annotations

import time
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from briter_worker import views
from briter_worker.commands import DeclinedError, read_site, words
from briter_worker.commands.options import Json, OfSite, Wanted  # noqa: TC001 - typer reads them
from briter_worker.errors import for_people

if TYPE_CHECKING:
    from collections.abc import Iterator

    from briter_worker.queues.disk import DiskQueue
    from briter_worker.queues.postgres.queue import PostgresQueue
    from briter_worker.queues.steering import Shown
    from briter_worker.settings import Settings
    from briter_worker.sinks.history.reading import History, Receipt

_DUE = frozenset({"pending", "retrying"})
_GLANCE = 0.2
_RECEIPT_LATE = 3.0
"""A receipt that is not there by then is not coming."""


class Outcome(StrEnum):
    """Which receipts to print."""

    PUBLISHED = "published"
    NOCHANGE = "nochange"
    FAILED = "failed"
    CANCELLED = "cancelled"


_MEANT = {
    Outcome.PUBLISHED: ("published",),
    Outcome.NOCHANGE: ("nochange",),
    Outcome.FAILED: ("failed", "dead-lettered", "nopaths", "quarantined", "interrupted"),
    Outcome.CANCELLED: ("cancelled", "superseded"),
}


def history(
    *,
    slug: Annotated[str | None, typer.Option(metavar="SLUG", help="Only of this post.")] = None,
    outcome: Annotated[Outcome | None, typer.Option(help="Only those that ended so.")] = None,
    search: Annotated[
        str | None, typer.Option(metavar="WORDS", help="Only with this in the slug, message or commit.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="At most so many.")] = 50,
    stale: Annotated[bool, typer.Option("--stale", help="Old ones, too.")] = False,
    site: OfSite = None,
    as_json: Json = False,
) -> None:
    """What became of each attempt, newest first. With commit, branch, remote and how long it took."""
    with _reading(read_site(site)) as past:
        receipts = past.receipts(
            slug=slug,
            outcomes=() if outcome is None else _MEANT[outcome],
            search=search,
            limit=limit,
            stale=stale,
        )
    if as_json:
        views.put_json([receipt.as_json() for receipt in receipts])
    else:
        words.put_receipts(receipts, time.time())


def show(
    wanted: Wanted,
    *,
    watch: Annotated[bool, typer.Option("--watch", help="Until it is published, or will not be.")] = False,
    site: OfSite = None,
    as_json: Json = False,
) -> None:
    """One post: its job, and what became of each attempt. With every key of the job's file."""
    settings = read_site(site)
    if watch:
        _watch(settings, wanted)
        return
    found = _look(settings, wanted)
    if as_json:
        views.put_json(found.as_json())
    else:
        found.put()


class _Found:
    """A post as it is known: its jobs in the queue, newest first, and its receipts."""

    def __init__(
        self, rows: list[Shown], receipts: list[Receipt], under_way: Receipt | None, obstacle: str
    ) -> None:
        self.rows = rows
        self.receipts = receipts
        self.under_way = under_way
        self.obstacle = obstacle
        """Why it waits though it is due, where that is not its own last error."""

    def as_json(self) -> dict[str, Any]:
        """The newest job's keys, or the last receipt's, with `receipts`."""
        if self.rows:
            document = views.document_of(self.rows[0])
        else:
            last = self.receipts[0] if self.receipts else self.under_way
            assert last is not None  # noqa: S101 - else nothing was found
            document = {"id": last.job_id, "slug": last.slug, "state": last.outcome or "claimed"}
        progress = None if self.under_way is None else self.under_way.as_json()
        return {**document, "progress": progress, "receipts": [each.as_json() for each in self.receipts]}

    def put(self) -> None:
        """Print it for a person."""
        if self.rows:
            views.put_job(self.rows[0])
            for other in self.rows[1:]:
                views.tell(f"an older save of this post is {other.state.value}: job {other.job.id}")
        if self.obstacle:
            views.tell(self.obstacle)
        if self.under_way is not None:
            views.put_facts([("phase", words.progress_in_words(self.under_way))])
        if self.receipts:
            words.put_receipts(self.receipts, time.time())


def _look(settings: Settings, wanted: str) -> _Found:
    from briter_worker.wiring import open_queue  # noqa: PLC0415

    queue = open_queue(settings)
    rows: list[Shown] = [*queue.find(wanted, time.time())]
    # Of one post in flight, waiting and failed, its newest save is what a person means.
    rows.sort(key=lambda row: row.job.created_at, reverse=True)
    with _reading(settings) as past:
        receipts = past.attempts(wanted) or past.receipts(slug=wanted, limit=20, stale=True)
        under_way = next((each for each in past.under_way() if wanted in (each.job_id, each.slug)), None)
    if not rows and not receipts and under_way is None:
        raise DeclinedError(f"neither the queue nor the history has a job with the id or slug {wanted!r}")
    return _Found(
        rows, [each for each in receipts if each.outcome], under_way, _obstacle(settings, queue, rows[:1])
    )


def _obstacle(settings: Settings, queue: DiskQueue | PostgresQueue, rows: list[Shown]) -> str:
    if not rows or rows[0].state.value not in _DUE:
        return ""
    from briter_worker.job import format_time  # noqa: PLC0415 - only a post that waits pays for it
    from briter_worker.standing import stand  # noqa: PLC0415 - as above

    standing = stand(settings, time.time(), queue=queue, rows=rows)
    if standing.paused is not None:
        pause = standing.paused
        until = "briter-worker resume" if pause.until is None else format_time(pause.until)
        return f"paused until {until}" + (f": {for_people(pause.reason)}" if pause.reason else "")
    return "" if standing.has_worker else "no worker is running: the next one publishes it"


def _watch(settings: Settings, wanted: str) -> None:
    """Print each change of the post's until it has come to an end."""
    told: list[object] = []
    gone_at: float | None = None
    while True:
        try:
            found = _look(settings, wanted)
        except DeclinedError:
            # Cancelled, say: it has left the queue, and its receipt is about to be written.
            gone_at = gone_at or time.monotonic()
            if not told or time.monotonic() - gone_at > _RECEIPT_LATE:
                raise
            time.sleep(_GLANCE)
            continue
        if found.rows:
            gone_at = None  # it is back, or was saved again
        text, *news = _standing(found)
        if news != told:
            views.put(text)
            told = news
        ended = not any(row.state.value != "failed" for row in found.rows)
        if ended and not found.rows and found.under_way is not None:
            # It has left the queue, and its receipt is about to be written; unless the worker died just then.
            gone_at = gone_at or time.monotonic()
            ended = time.monotonic() - gone_at > _RECEIPT_LATE
        if ended:
            raise typer.Exit(0 if not found.rows else 1)
        time.sleep(_GLANCE)


def _standing(found: _Found) -> tuple[str, *tuple[object, ...]]:
    """What to say, and what has to change for it to be said again: time alone is no news."""
    if found.under_way is not None and (not found.rows or found.rows[0].state.value == "claimed"):
        text = words.progress_in_words(found.under_way)
        return text, text
    if found.rows:
        row = found.rows[0]
        text = words.row_in_words(row, time.time())
        text = f"{text}; {found.obstacle}" if found.obstacle else text
        return text, row.state, row.job.next_attempt_at, row.job.last_error, found.obstacle
    text = words.receipt_in_words(found.receipts[0])
    return text, text


@contextmanager
def _reading(settings: Settings) -> Iterator[History]:
    """The history, open for a moment."""
    from briter_worker.sinks.history.reading import HistoryUnreadableError  # noqa: PLC0415
    from briter_worker.wiring import open_history  # noqa: PLC0415

    past = open_history(settings)
    try:
        yield past
    except HistoryUnreadableError as error:
        raise DeclinedError(f"{error}. Fix: give this user read and write access to its folder") from error
    finally:
        past.close()
