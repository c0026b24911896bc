"""The pages, for people. They work without JavaScript: what it adds is that they follow what happens."""

import time
from itertools import groupby
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import RedirectResponse, Response
from starlette.concurrency import run_in_threadpool

from briter_worker.errors import for_people
from briter_worker.queues.steering import is_hopeless
from briter_worker.settings import settings_schema
from briter_worker.sinks.history.reading import History, HistoryUnreadableError, Receipt
from briter_worker.sinks.webhooks.endpoints import origin_of
from briter_worker.standing import waits_since
from briter_worker.views import document_of
from briter_worker.web import plots, words
from briter_worker.web.api import MEANT, Asked
from briter_worker.web.condition import condition_of
from briter_worker.web.dashboard import Dashboard
from briter_worker.web.door import form_of, local
from briter_worker.web.problems import ProblemError
from briter_worker.web.rendering import error_page, page

__all__ = ["error_page", "router"]

router = APIRouter()
PER_PAGE = 50
_RECENT = 8
_FIRST = 20
_SPANS = frozenset({"30", "120", "1440", ""})
Text = Annotated[str, Query(max_length=2000)]
Offset = Annotated[int, Query(ge=0, le=2**31)]


def _read(dashboard: Dashboard, ask: Any) -> tuple[list[Receipt], str | None]:  # noqa: ANN401 - a question
    """Receipts, or why there are none: a page is more than its history."""
    try:
        return dashboard.readers.read(ask), None
    except HistoryUnreadableError as error:
        return [], for_people(str(error))


def _linked(dashboard: Dashboard, receipts: list[Receipt]) -> list[tuple[Receipt, str | None]]:
    template = dashboard.settings.commit_href_template
    return [(each, None if each.dry_run else words.commit_href(template, each.commit)) for each in receipts]


@router.get("/")
def now(request: Request, dashboard: Asked) -> Response:
    """How the site is, and what is happening."""
    keeper = dashboard.keeper
    snapshot = keeper.snapshot
    receipts, trouble = _read(dashboard, lambda history: history.receipts(limit=_RECENT))
    return page(
        request,
        dashboard,
        "now.html",
        condition=condition_of(snapshot, keeper.queue_problem),
        progress=keeper.progress()[:_FIRST],
        oldest=snapshot.longest_waiting,
        waits_since=waits_since,
        receipts=_linked(dashboard, receipts),
        trouble=trouble,
    )


@router.get("/scheduled")
def scheduled(request: Request, dashboard: Asked, start: Offset = 0) -> Response:
    """What is on hold, by day."""
    rows = dashboard.keeper.snapshot.scheduled
    shown = rows[start : start + PER_PAGE]
    days = [
        (day, list(those))
        for day, those in groupby(shown, key=lambda row: words.local(row.job.scheduled_for or 0.0).date())
    ]
    return page(request, dashboard, "scheduled.html", days=days, **_paged(rows, start))


@router.get("/failed")
def failed(request: Request, dashboard: Asked, start: Offset = 0) -> Response:
    """What did not go live: dead letters, then what is tried again."""
    snapshot = dashboard.keeper.snapshot
    shown = snapshot.failed[start : start + PER_PAGE]
    retrying = snapshot.retrying[:PER_PAGE]
    can_help = len(snapshot.failed) > len(shown) or not all(is_hopeless(row.job) for row in shown)
    return page(
        request,
        dashboard,
        "failed.html",
        rows=shown,
        retrying=retrying,
        can_help=can_help,
        **_paged(snapshot.failed, start),
    )


def _paged(rows: Any, start: int) -> dict[str, Any]:  # noqa: ANN401 - rows of any kind
    total = len(rows)
    return {
        "total": total,
        "start": start,
        "earlier": max(0, start - PER_PAGE) if start else None,
        "later": start + PER_PAGE if start + PER_PAGE < total else None,
    }


@router.get("/published")
def published(
    request: Request,
    dashboard: Asked,
    q: Annotated[str, Query(max_length=200)] = "",
    show: Annotated[str, Query(max_length=20)] = "published",
    before: Annotated[int | None, Query(ge=1, le=2**63 - 1)] = None,
) -> Response:
    """Receipts, newest first."""
    outcomes = {**MEANT, "published": ("published", "nochange")}.get(show, ())

    def ask(history: History) -> list[Receipt]:
        return history.receipts(
            outcomes=outcomes,
            search=q.strip() or None,
            before=before,
            limit=PER_PAGE + 1,
            stale=bool(q.strip()),
        )

    receipts, trouble = _read(dashboard, ask)
    more = receipts[PER_PAGE - 1].id if len(receipts) > PER_PAGE else None
    return page(
        request,
        dashboard,
        "published.html",
        receipts=_linked(dashboard, receipts[:PER_PAGE]),
        trouble=trouble,
        q=q,
        show=show,
        before=before,
        more=more,
    )


@router.get("/post")
def post(request: Request, dashboard: Asked, id: Text = "", slug: Text = "") -> Response:  # noqa: A002 - in the address
    """One post, from its save to the remote."""
    wanted = id or slug
    rows = dashboard.keeper.snapshot.find(wanted) if wanted else ()
    if not id:
        rows = dashboard.keeper.snapshot.of_slug(slug)

    def ask(history: History) -> list[Receipt]:
        found = history.attempts(id) if id else []
        of = found[0].slug if found else rows[0].job.slug if rows else wanted
        others = history.receipts(slug=of, limit=PER_PAGE, stale=True)
        return sorted({each.id: each for each in [*found, *others]}.values(), key=lambda each: -each.id)

    receipts, trouble = _read(dashboard, ask)
    if not rows and not receipts and trouble is None:
        raise ProblemError(404, f"Neither the queue nor the history knows the post {wanted!r}")
    name = rows[0].job.slug if rows else receipts[0].slug if receipts else wanted
    jobs = [(row, _keys(document_of(row))) for row in rows[:_FIRST]]
    progress = {each["jobId"]: each for each in dashboard.keeper.progress()}
    return page(
        request,
        dashboard,
        "post.html",
        name=for_people(name),
        jobs=jobs,
        progress=progress,
        receipts=_linked(dashboard, receipts),
        trouble=trouble,
    )


def _keys(document: dict[str, Any]) -> list[tuple[str, str]]:
    shown = []
    for key, value in document.items():
        if key == "webhook" and isinstance(value, str):
            shown.append((key, for_people(origin_of(value))))  # the rest of it is often a secret
        elif value is not None:
            parts = value if isinstance(value, list) else [value]
            shown.append((for_people(key), ", ".join(for_people(str(part)) for part in parts[:_FIRST])))
    return shown


@router.get("/figures")
def figures(request: Request, dashboard: Asked) -> Response:
    """How much, and how fast."""
    known = dashboard.keeper.figures
    parts = [
        ("day", "The last 24 hours", known.day, plots.throughput(known.day), plots.waits(known.day)),
        ("month", "The last 30 days", known.month, plots.throughput(known.month), plots.waits(known.month)),
    ]
    size = {"width": plots.WIDTH, "height": plots.HEIGHT, "left": plots.LEFT}
    return page(request, dashboard, "figures.html", parts=parts, size=size)


@router.get("/site")
def site(request: Request, dashboard: Asked) -> Response:
    """The doctor's findings, and the settings that hold."""
    rows = []
    for key, what in settings_schema()["properties"].items():
        value = getattr(dashboard.settings, what["title"].removeprefix("BRITER_").lower())
        if what.get("writeOnly"):
            text = "set, not shown" if value else ""
        elif isinstance(value, list | tuple):
            text = ", ".join(map(str, value))
        else:
            text = str(value).lower() if isinstance(value, bool) else str(value)
        rows.append((what["title"], key, for_people(text), what["description"].replace("`", "")))
    return page(request, dashboard, "site.html", rows=rows, examination=dashboard.examination)


def _back(form: dict[str, str], told: str) -> Response:
    target = local(form.get("back", "/"))
    joint = "&" if "?" in target else "?"
    return RedirectResponse(f"{target}{joint}told={told}", status_code=303)


@router.post("/actions/{action}")
async def act(request: Request, dashboard: Asked, action: str) -> Response:
    """Do it, and show the page again."""
    form = await form_of(request)
    actions = dashboard.actions
    wanted = form.get("id", "")
    match action:
        case "retry":
            await run_in_threadpool(actions.retry, wanted)
        case "retry-all":
            await run_in_threadpool(actions.retry_all)
        case "publish-now":
            await run_in_threadpool(actions.publish_now, wanted)
        case "cancel":
            done = await run_in_threadpool(actions.cancel, wanted)
            return _back(form, "cancel" if done.gone else "cancel-asked")
        case "pause":
            if form.get("for", "") not in _SPANS:
                raise ProblemError(422, "a pause lasts 30, 120 or 1440 minutes, or until somebody resumes")
            until = time.time() + 60 * int(form["for"]) if form.get("for") else None
            await run_in_threadpool(actions.pause, until, form.get("reason", "")[:500])
        case "resume":
            await run_in_threadpool(actions.resume)
        case "examine":
            dashboard.examination.start()
        case _:
            raise ProblemError(404, "there is nothing here")
    return _back(form, action)
