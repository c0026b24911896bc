"""The pages of one site. They work without JavaScript, which only keeps them up to date."""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import RedirectResponse, Response
from starlette.concurrency import run_in_threadpool

from briter_worker.job import State
from briter_worker.queues.selection import is_retryable
from briter_worker.redaction import one_line
from briter_worker.settings import settings_schema
from briter_worker.sinks.history import History, HistoryUnreadableError, Receipt
from briter_worker.sinks.webhook_addresses import origin_of
from briter_worker.status import PULL_COMMAND, job_to_json, waits_since
from briter_worker.web import charts, labels
from briter_worker.web.api import OUTCOMES, CurrentSite
from briter_worker.web.cache import NotReadYetError
from briter_worker.web.problems import ProblemError
from briter_worker.web.root import form_of, local_path
from briter_worker.web.site import Site
from briter_worker.web.snapshot import headline
from briter_worker.web.templating import page

router = APIRouter()
PER_PAGE = 50
_RECENT = 8
_FIRST = 20
_PAUSE_MINUTES = frozenset({"30", "120", "1440", ""})
Text = Annotated[str, Query(max_length=2000)]
Offset = Annotated[int, Query(ge=0, le=2**31)]
Linked = list[tuple[Receipt, str | None]]


def _read(site: Site, ask: Callable[[History], list[Receipt]]) -> tuple[Linked, str]:
    """Return receipts with the address of each commit, or why the history cannot be read."""
    try:
        receipts = ask(site.history)
    except HistoryUnreadableError as error:
        return [], one_line(str(error))
    template = site.settings.commit_href_template
    return [
        (each, None if each.dry_run else labels.commit_href(template, each.commit)) for each in receipts
    ], ""


@router.get("/")
def now(request: Request, site: CurrentSite) -> Response:
    """Show the state of the site."""
    snapshot = site.snapshot()
    receipts, trouble = _read(site, lambda history: history.receipts(limit=_RECENT))
    return page(
        request,
        site,
        "now.html",
        headline=headline(snapshot),
        number={state.value: len(rows) for state, rows in snapshot.jobs.items()},
        progress=site.progress()[:_FIRST],
        oldest=snapshot.longest_waiting(),
        waits_since=waits_since,
        receipts=receipts,
        trouble=trouble,
        pull_command=PULL_COMMAND,
    )


@router.get("/scheduled")
def scheduled(request: Request, site: CurrentSite, start: Offset = 0) -> Response:
    """Show scheduled posts by day."""
    rows = site.snapshot().jobs[State.SCHEDULED]
    shown = rows[start : start + PER_PAGE]
    days = [
        (day, list(those))
        for day, those in groupby(shown, key=lambda row: labels.local(row.job.scheduled_for or 0.0).date())
    ]
    return page(request, site, "scheduled.html", days=days, **paging(len(rows), start))


@router.get("/failed")
def failed(request: Request, site: CurrentSite, start: Offset = 0) -> Response:
    """Show dead letters, then jobs that will be retried."""
    jobs = site.snapshot().jobs
    rows, retrying = jobs[State.FAILED], jobs[State.RETRYING]
    shown = rows[start : start + PER_PAGE]
    return page(
        request,
        site,
        "failed.html",
        rows=shown,
        retrying=retrying[:PER_PAGE],
        more_retrying=len(retrying[PER_PAGE:]),
        can_help=len(rows) > len(shown) or any(is_retryable(row.job) for row in shown),
        **paging(len(rows), start),
    )


def paging(total: int, start: int, per_page: int = PER_PAGE) -> dict[str, Any]:
    """Return what a template needs to link to the pages before and after."""
    return {
        "total": total,
        "start": start,
        "earlier": max(0, start - per_page) if start else None,
        "later": start + per_page if start + per_page < total else None,
    }


@router.get("/published")
def published(
    request: Request,
    site: CurrentSite,
    q: Annotated[str, Query(max_length=200)] = "",
    show: Annotated[str, Query(max_length=20)] = "published",
    before: Annotated[int | None, Query(ge=1, le=2**63 - 1)] = None,
) -> Response:
    """Show receipts, newest first."""
    outcomes = {**OUTCOMES, "published": ("published", "nochange")}.get(show, ())
    search = q.strip()
    receipts, trouble = _read(
        site,
        lambda history: history.receipts(
            outcomes=outcomes,
            search=search or None,
            before=before,
            limit=PER_PAGE + 1,
            stale=bool(search),
        ),
    )
    more = receipts[PER_PAGE - 1][0].id if len(receipts) > PER_PAGE else None
    shown: dict[str, Any] = {"q": q, "show": show, "before": before, "more": more}
    return page(request, site, "published.html", receipts=receipts[:PER_PAGE], trouble=trouble, **shown)


@router.get("/post")
def post(request: Request, site: CurrentSite, id: Text = "", slug: Text = "") -> Response:  # noqa: A002 - in the address
    """Show one post, from the save to the remote."""
    wanted = id or slug
    snapshot = site.snapshot()
    rows = snapshot.find(id) if id else snapshot.of_slug(slug)

    def ask(history: History) -> list[Receipt]:
        found = history.attempts(id) if id else []
        of = found[0].slug if found else rows[0].job.slug if rows else wanted
        others = history.receipts(slug=of, limit=PER_PAGE, stale=True)
        return sorted({each.id: each for each in [*found, *others]}.values(), key=lambda each: -each.id)

    receipts, trouble = _read(site, ask)
    if not rows and not receipts and not trouble:
        raise ProblemError(404, f"neither the queue nor the history has the post {wanted!r}")
    name = rows[0].job.slug if rows else receipts[0][0].slug if receipts else wanted
    return page(
        request,
        site,
        "post.html",
        name=one_line(name),
        jobs=[(row, _key_texts(job_to_json(row))) for row in rows[:_FIRST]],
        progress={each["jobId"]: each for each in site.progress()},
        receipts=receipts,
        trouble=trouble,
    )


def _key_texts(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    shown = []
    for key, value in document.items():
        if key == "webhook" and isinstance(value, str):
            shown.append((key, one_line(origin_of(value))))  # the rest of the address is often a secret
        elif value is not None:
            parts: Sequence[object] = value if isinstance(value, list) else [value]
            shown.append((one_line(key), ", ".join(one_line(str(part)) for part in parts[:_FIRST])))
    return shown


@router.get("/figures")
def figures(request: Request, site: CurrentSite) -> Response:
    """Show how many posts were published in the last 30 days, and how fast."""
    try:
        columns = site.figures.get()
    except NotReadYetError:
        raise ProblemError(503, "the figures take long to count", "load the page again in a minute") from None
    counts, times = charts.throughput_chart(columns), charts.waits_chart(columns)
    size = {"width": charts.WIDTH, "height": charts.HEIGHT, "left": charts.LEFT}
    return page(request, site, "figures.html", columns=columns, counts=counts, times=times, size=size)


@router.get("/site")
def site_page(request: Request, site: CurrentSite) -> Response:
    """Show the results of the checks, and the settings."""
    rows = []
    for key, schema in settings_schema()["properties"].items():
        value = getattr(site.settings, schema["title"].removeprefix("BRITER_").lower())
        if schema.get("writeOnly"):
            text = "set, not shown" if value else ""
        elif isinstance(value, list | tuple):
            text = ", ".join(map(str, value))
        else:
            text = str(value).lower() if isinstance(value, bool) else str(value)
        rows.append((schema["title"], key, one_line(text), schema["description"].replace("`", "")))
    return page(request, site, "site.html", rows=rows, checks=site.checks)


@router.post("/actions/{action}")
async def act(request: Request, site: CurrentSite, action: str) -> Response:
    """Perform the action of a form, and show the page again."""
    form = await form_of(request)
    notice = await run_in_threadpool(_act, site, action, form)
    target = local_path(form.get("back", "/"))
    joint = "&" if "?" in target else "?"
    return RedirectResponse(f"{target}{joint}told={notice}", status_code=303)


def _act(site: Site, action: str, form: Mapping[str, str]) -> str:
    """Perform the action; return the name of the notice to show."""
    wanted = form.get("id", "")
    match action:
        case "retry":
            site.change(lambda queue, now: queue.retry(wanted, now))
        case "retry-all":
            site.change(lambda queue, now: queue.retry_all(now))
        case "publish-now":
            site.change(lambda queue, now: queue.publish_now(wanted, now))
        case "cancel":
            return "cancel" if site.cancel(wanted).removed else "cancel-asked"
        case "pause":
            minutes = form.get("for", "")
            if minutes not in _PAUSE_MINUTES:
                raise ProblemError(422, "a pause lasts 30, 120 or 1440 minutes, or until somebody resumes")
            until = time.time() + 60 * int(minutes) if minutes else None
            site.pause(until, form.get("reason", "")[:500])
        case "resume":
            site.resume()
        case "examine":
            site.checks.start()
        case _:
            raise ProblemError(404, "this page does not exist")
    return action
