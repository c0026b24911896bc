"""The pages of one site, and signing in. They work without JavaScript, which only keeps them up to date."""

import mimetypes
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any
from urllib.parse import parse_qs

from fastapi import APIRouter, Query, Request
from fastapi.responses import RedirectResponse, Response
from starlette.concurrency import run_in_threadpool

from briter_worker.actions import open_published
from briter_worker.git import undo
from briter_worker.job import Job, State
from briter_worker.ports import ListedJob
from briter_worker.queues.selection import is_retryable
from briter_worker.redaction import one_line, quote_fix
from briter_worker.settings import settings_schema
from briter_worker.sinks.history import History, Receipt
from briter_worker.sinks.store import StoreError
from briter_worker.status import PULL_COMMAND, job_to_json, waits_since
from briter_worker.web import labels
from briter_worker.web.api import OUTCOMES, CurrentSite
from briter_worker.web.responses import ProblemError, address, page
from briter_worker.web.security import COOKIE, SESSION_S, SIGN_IN, Access, client_address
from briter_worker.web.site import Site

router = APIRouter()
"""Below `/`, in a cluster below `/sites/{site}`."""
sign_in_router = APIRouter()
"""Below `/`."""
PER_PAGE = 50
_RECENT = 8
_FIRST = 20
_WAITING = (State.CLAIMED, State.PENDING, State.RETRYING, State.QUIET, State.TRIED)
_PAUSE_MINUTES = frozenset({"30", "120", "1440", ""})
Text = Annotated[str, Query(max_length=2000, pattern=r"^[^\x00]*$")]
Commit = Annotated[str, Query(pattern="^([0-9a-f]{40}([0-9a-f]{24})?)?$")]
Offset = Annotated[int, Query(ge=0, le=2**31)]
Before = Annotated[int | None, Query(ge=1, le=2**63 - 1)]
Linked = list[tuple[Receipt, str | None]]


def _read(site: Site, ask: Callable[[History], list[Receipt]]) -> tuple[Linked, str]:
    """Return receipts with the address of each commit, or why the history cannot be read."""
    try:
        receipts = ask(site.history)
    except StoreError as error:
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
        headline=snapshot.status.headline(),
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


@router.get("/waiting")
def waiting(request: Request, site: CurrentSite, start: Offset = 0) -> Response:
    """Show posts that are due and wait, with the reason."""
    jobs = site.snapshot().jobs
    rows = [row for state in _WAITING for row in jobs[state]]
    return page(
        request,
        site,
        "waiting.html",
        rows=rows[start : start + PER_PAGE],
        failures=site.failures(rows[start : start + PER_PAGE]),
        progress={each["jobId"]: each for each in site.progress()},
        stopped=_stopped(site, jobs[State.RETRYING]),
        **paging(len(rows), start),
    )


def _stopped(site: Site, rows: Sequence[ListedJob]) -> tuple[int, Job] | None:
    """Return how many of the jobs the site condition holds up, and which is tried next."""
    failure = site.snapshot().status.failure
    found = [row.job for row in rows if failure is not None and row.job.failure == failure]
    return (len(found), min(found, key=lambda job: job.next_attempt_at or 0.0)) if found else None


@router.get("/failed")
def failed(request: Request, site: CurrentSite, start: Offset = 0) -> Response:
    """Show dead letters."""
    rows = site.snapshot().jobs[State.FAILED]
    shown = rows[start : start + PER_PAGE]
    return page(
        request,
        site,
        "failed.html",
        rows=shown,
        failures=site.failures(shown),
        stopped=_stopped(site, rows),
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
    show: Annotated[str, Query(max_length=20)] = "published",
    before: Before = None,
) -> Response:
    """Show receipts, newest first."""
    outcomes = {**OUTCOMES, "published": ("published", "nochange")}.get(show, ())
    return page(request, site, "published.html", show=show, **_receipts(site, before, outcomes=outcomes))


def _receipts(site: Site, before: int | None, **which: Any) -> dict[str, Any]:  # noqa: ANN401 - of History.receipts
    found, trouble = _read(site, lambda history: history.receipts(before=before, limit=PER_PAGE + 1, **which))
    more = found[PER_PAGE - 1][0].id if len(found) > PER_PAGE else None
    return {"receipts": found[:PER_PAGE], "trouble": trouble, "before": before, "more": more}


@router.get("/search")
def search(
    request: Request,
    site: CurrentSite,
    q: Annotated[str, Query(max_length=200)] = "",
    before: Before = None,
) -> Response:
    """Show jobs and receipts with all these words."""
    rows = site.snapshot().search(q) if q.strip() and before is None else []
    more = _receipts(site, before, search=q) if q.strip() else _receipts(site, 1)
    shown = rows[:PER_PAGE]
    return page(
        request, site, "search.html", q=q, rows=shown, number=len(rows), failures=site.failures(shown), **more
    )


@router.get("/post")
def post(
    request: Request,
    site: CurrentSite,
    id: Text = "",  # noqa: A002 - in the address
    slug: Text = "",
    commit: Commit = "",
) -> Response:
    """Show one post, from the save to the remote, and what a commit of it changed."""
    wanted = id or slug
    snapshot = site.snapshot()
    rows = snapshot.find(id, slug)

    def ask(history: History) -> list[Receipt]:
        found = history.attempts(id) if id else []
        of = found[0].slug if found else rows[0].job.slug if rows else wanted
        others = history.receipts(slug=of, limit=PER_PAGE)
        return sorted({each.id: each for each in [*found, *others]}.values(), key=lambda each: -each.id)

    receipts, trouble = _read(site, ask)
    if not rows and not receipts and not trouble:
        raise ProblemError(404, f"neither the queue nor the history has the post {wanted!r}")
    name, message = wanted, ""
    if rows:
        name, message = rows[0].job.slug, rows[0].job.commit_message
    elif receipts:
        name, message = receipts[0][0].slug, receipts[0][0].title
    differences: Sequence[undo.FileDifference] = ()
    if commit:
        with open_published(site.settings) as repository:
            differences = undo.differences(repository, commit)
    return page(
        request,
        site,
        "post.html",
        name=one_line(name),
        title=labels.title_of(name, message),
        plain=address(request.url.path, id=id, slug=slug),
        commit=commit,
        differences=differences,
        jobs=[(row, _key_texts(job_to_json(row))) for row in rows[:_FIRST]],
        progress={each["jobId"]: each for each in site.progress()},
        receipts=receipts,
        published=next((each for each in receipts if _is_on_remote(each[0])), None),
        trouble=trouble,
    )


@router.get("/picture")
def picture(site: CurrentSite, commit: Commit, file: Text, *, before: bool = False) -> Response:
    """Return a picture as a publication's commit has it, or as it was before."""
    if not labels.is_picture(file):
        raise ProblemError(404, "this is no picture")
    with open_published(site.settings) as repository:
        content = undo.file_of(repository, commit, file, before=before)
    return Response(content, media_type=mimetypes.guess_type(file)[0] or "image/webp")


def _is_on_remote(receipt: Receipt) -> bool:
    return receipt.outcome == "published" and not receipt.dry_run


def _key_texts(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    shown = []
    for key, value in document.items():
        if value is not None:
            parts: Sequence[object] = value if isinstance(value, list) else [value]
            shown.append(
                (one_line(key), ", ".join(quote_fix(one_line(str(part))) for part in parts[:_FIRST]))
            )
    return shown


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
    checks = site.checks
    findings = checks.result() if checks is not None and checks.done() else ()
    more: dict[str, Any] = {"checks": checks, "findings": findings, "checked_at": site.checked_at}
    return page(request, site, "site.html", rows=rows, **more)


async def _form_of(request: Request) -> dict[str, str]:
    """Return the fields of a page's form."""
    fields = parse_qs((await request.body()).decode("utf-8", "replace"), keep_blank_values=True)
    return {name: values[0] for name, values in fields.items()}


def _local_path(target: str) -> str:
    """Return the target if it is a page of the dashboard, else `/`."""
    fine = target.startswith("/") and not target.startswith(("//", "/\\")) and target.isprintable()
    return target if fine else "/"


@router.post("/actions/{action}")
async def act(request: Request, site: CurrentSite, action: str) -> Response:
    """Perform the action of a form, and show the page again."""
    form = await _form_of(request)
    notice = await run_in_threadpool(_act, site, action, form)
    target = _local_path(form.get("back", "/"))
    joint = "&" if "?" in target else "?"
    return RedirectResponse(f"{target}{joint}told={notice}", status_code=303)


def _act(site: Site, action: str, form: Mapping[str, str]) -> str:
    """Perform the action; return the name of the notice to show."""
    wanted = form.get("id", "")
    match action:
        case "retry":
            site.steer("retry", lambda queue, now: queue.retry(wanted, now))
        case "retry-all":
            site.steer("retry", lambda queue, now: queue.retry_all(now))
        case "publish-now":
            site.steer("publish-now", lambda queue, now: queue.publish_now(wanted, now))
        case "cancel":
            done = site.steer("cancel", lambda queue, now: queue.cancel(wanted, now))
            return "cancel" if done.removed else "cancel-asked"
        case "undo":
            site.undo(wanted, form.get("to"), form.get("message"))
        case "pause":
            minutes = form.get("for", "")
            if minutes not in _PAUSE_MINUTES:
                raise ProblemError(422, "a pause lasts 30, 120 or 1440 minutes, or until it is resumed")
            reason = form.get("reason", "")[:500]
            site.steer(
                "pause",
                lambda queue, now: queue.pause(
                    now, until=now + 60 * int(minutes) if minutes else None, reason=reason
                ),
            )
        case "resume":
            site.steer("resume", lambda queue, _now: queue.resume())
        case "examine":
            site.examine()
        case _:
            raise ProblemError(404, "this page does not exist")
    return action


@sign_in_router.get(SIGN_IN)
def sign_in_page(
    request: Request,
    next: Text = "/",  # noqa: A002 - in the address
    key: Annotated[str, Query(max_length=200)] = "",
) -> Response:
    """Ask for the token, or sign in by the key of a one-time link."""
    access: Access = request.app.state.access
    if request.state.visit.cookie is not None:
        return RedirectResponse(_local_path(next), status_code=303)
    if key and access.use_link_key(key):
        return _signed_in(request, "/")
    wrong = "This link was used before, or is too old. Enter the token." if key else ""
    return _sign_in_form(request, 403 if key else 200, next, wrong)


@sign_in_router.post(SIGN_IN)
async def sign_in(request: Request) -> Response:
    """Open a session."""
    form = await _form_of(request)
    access: Access = request.app.state.access
    target = form.get("next", "/")
    try:
        access.check_token(form.get("token", "").strip(), client_address(request.scope))
    except ProblemError as refused:
        answer = _sign_in_form(request, refused.status, target, f"{labels.sentence(refused.detail)}.")
        answer.headers.update(refused.headers)
        return answer
    return _signed_in(request, target)


@sign_in_router.post("/sign-out")
def sign_out(request: Request) -> Response:
    """End the session."""
    request.app.state.access.end_session(request.state.visit.cookie)
    response = RedirectResponse(address(SIGN_IN, told="signed-out"), status_code=303)
    response.delete_cookie(COOKIE, httponly=True, samesite="lax")
    return response


def _sign_in_form(request: Request, status: int, target: str, wrong: str) -> Response:
    shell = request.app.state.shell
    more = {"target": _local_path(target), "wrong": wrong}
    return page(request, shell, "sign-in.html", status=status, **more)


def _signed_in(request: Request, target: str) -> Response:
    response = RedirectResponse(_local_path(target), status_code=303)
    cookie = request.app.state.access.open_session()
    # Not strict: a link from a chat opens the page. Changes need the CSRF token.
    secure = request.url.scheme == "https"
    response.set_cookie(COOKIE, cookie, max_age=int(SESSION_S), httponly=True, samesite="lax", secure=secure)
    return response
