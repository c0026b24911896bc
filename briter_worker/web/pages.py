"""The pages of one site, and signing in. They work without JavaScript, which only keeps them up to date."""

import mimetypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import RedirectResponse, Response

from briter_worker.errors import one_line, sentence
from briter_worker.git import undo
from briter_worker.job import State
from briter_worker.settings import settings_schema
from briter_worker.sinks.history import Receipt
from briter_worker.sinks.store import StoreError
from briter_worker.status import job_to_json
from briter_worker.web import labels
from briter_worker.web.api import OUTCOMES, CurrentSite, CurrentSnapshot
from briter_worker.web.responses import ProblemError, address, page
from briter_worker.web.security import COOKIE, SESSION_S, SIGN_IN, Access, client_address, read_form
from briter_worker.web.site import Site

router = APIRouter(dependencies=[Depends(read_form)])
"""Below `/`, in a cluster below `/sites/{site}`."""
sign_in_router = APIRouter(dependencies=[Depends(read_form)])
"""Below `/`."""
Form = Annotated[dict[str, str], Depends(read_form)]
PER_PAGE = 50
_RECENT = 8
_FIRST = 20
_WAITING = (State.CLAIMED, State.PENDING, State.RETRYING, State.QUIET, State.TRIED)
_PAUSE_MINUTES = frozenset({"30", "120", "1440", ""})
Text = Annotated[str, Query(max_length=2000, pattern=r"^[^\x00]*$")]
Commit = Annotated[str, Query(pattern="^([0-9a-f]{40}([0-9a-f]{24})?)?$")]
Offset = Annotated[int, Query(ge=0, le=2**31)]
Before = Annotated[int | None, Query(ge=1, le=2**63 - 1)]


def _renderer(request: Request, site: CurrentSite) -> Callable[..., Response]:
    return partial(page, request, site.page_context())


Render = Annotated[Callable[..., Response], Depends(_renderer)]
"""Takes a template and its values; returns the page of the site."""


def _read(ask: Callable[[], list[Receipt]]) -> dict[str, Any]:
    """Return receipts, or why the history cannot be read."""
    try:
        return {"receipts": ask(), "trouble": ""}
    except StoreError as error:
        return {"receipts": [], "trouble": one_line(str(error))}


@router.get("/")
def now(site: CurrentSite, render: Render, _: CurrentSnapshot) -> Response:
    """Show the state of the site."""
    return render("now.html", **_read(lambda: site.history.receipts(limit=_RECENT)))


@router.get("/scheduled")
def scheduled(render: Render, snapshot: CurrentSnapshot, start: Offset = 0) -> Response:
    """Show scheduled posts by day."""
    shown = paged(snapshot.jobs[State.SCHEDULED], start)
    by_day = groupby(shown["rows"], key=lambda row: labels.local(row.job.scheduled_for or 0.0).date())
    days = [(day, list(rows)) for day, rows in by_day]
    return render("scheduled.html", days=days, **shown)


@router.get("/waiting")
def waiting(render: Render, snapshot: CurrentSnapshot, start: Offset = 0) -> Response:
    """Show posts that are due and wait, with the reason."""
    rows = [row for state in _WAITING for row in snapshot.jobs[state]]
    return render("waiting.html", **paged(rows, start))


@router.get("/failed")
def failed(render: Render, snapshot: CurrentSnapshot, start: Offset = 0) -> Response:
    """Show dead letters."""
    return render("failed.html", **paged(snapshot.jobs[State.FAILED], start))


def paged(rows: Sequence[Any], start: int, per_page: int = PER_PAGE) -> dict[str, Any]:
    """Return a part of the rows, and what a template needs to link to those before and after."""
    return {
        "rows": rows[start : start + per_page],
        "total": len(rows),
        "start": start,
        "earlier": max(0, start - per_page) if start else None,
        "later": start + per_page if start + per_page < len(rows) else None,
    }


@router.get("/published")
def published(
    site: CurrentSite,
    render: Render,
    show: Annotated[str, Query(max_length=20)] = "published",
    before: Before = None,
) -> Response:
    """Show receipts, newest first."""
    outcomes = {**OUTCOMES, "published": ("published", "nochange")}.get(show, ())
    return render("published.html", show=show, **_receipts(site, before, outcomes=outcomes))


def _receipts(site: Site, before: int | None, **which: Any) -> dict[str, Any]:  # noqa: ANN401 - of History.receipts
    found = _read(lambda: site.history.receipts(before=before, limit=PER_PAGE + 1, **which))
    receipts = found["receipts"]
    more = receipts[PER_PAGE - 1].id if len(receipts) > PER_PAGE else None
    return {**found, "receipts": receipts[:PER_PAGE], "before": before, "more": more}


@router.get("/search")
def search(
    site: CurrentSite,
    render: Render,
    snapshot: CurrentSnapshot,
    q: Annotated[str, Query(max_length=200)] = "",
    before: Before = None,
) -> Response:
    """Show jobs and receipts with all these words."""
    found = paged(snapshot.search(q) if q.strip() and before is None else [], 0)
    found |= _receipts(site, before, search=q) if q.strip() else _receipts(site, 1)
    return render("search.html", q=q, **found)


@router.get("/post")
def post(
    site: CurrentSite,
    render: Render,
    snapshot: CurrentSnapshot,
    id: Text = "",  # noqa: A002 - in the address
    slug: Text = "",
    commit: Commit = "",
) -> Response:
    """Show one post, from the save to the remote, and what a commit of it changed."""
    wanted = id or slug
    rows = snapshot.find(id, slug)

    def ask() -> list[Receipt]:
        found = site.history.attempts(id) if id else []
        of = found[0].slug if found else rows[0].job.slug if rows else wanted
        others = site.history.receipts(slug=of, limit=PER_PAGE)
        return sorted({each.id: each for each in [*found, *others]}.values(), key=lambda each: -each.id)

    found = _read(ask)
    receipts: list[Receipt] = found["receipts"]
    name, message = wanted, ""
    if rows:
        name, message = rows[0].job.slug, rows[0].job.commit_message
    elif receipts:
        name, message = receipts[0].slug, receipts[0].title
    elif not found["trouble"]:
        raise ProblemError(404, f"neither the queue nor the history has the post {wanted!r}")
    live = {each.outcome: each for each in reversed(receipts) if not each.dry_run}
    differences: Sequence[undo.FileDifference] = ()
    if commit:
        if all(each.commit != commit for each in receipts):
            raise ProblemError(404, "this is no commit of the post")
        with site.repository() as repository:
            differences = undo.differences(repository, commit)
    return render(
        "post.html",
        name=one_line(name),
        title=labels.title_of(name, message),
        plain=address(f"{site.base}/post", id=id, slug=slug),
        commit=commit,
        differences=differences,
        jobs=[(row, job_to_json(row)) for row in rows[:_FIRST]],
        published=live.get("published"),
        unchanged=live.get("nochange"),
        **found,
    )


@router.get("/picture")
def picture(site: CurrentSite, commit: Commit, file: Text, *, before: bool = False) -> Response:
    """Return a picture as a publication's commit has it, or as it was before."""
    if not labels.is_picture(file):
        raise ProblemError(404, "this is no picture")
    of = [each for each in site.history.receipts(search=commit) if each.commit == commit]
    if all(file != change.path for each in of for change in each.changes):
        raise ProblemError(404, "no publication of this commit changed the picture")
    with site.repository() as repository:
        content = undo.file_of(repository, commit, file, before=before)
    return Response(content, media_type=mimetypes.guess_type(file)[0] or "image/webp")


@router.get("/site")
def site_page(site: CurrentSite, render: Render) -> Response:
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
    return render("site.html", rows=rows)


def _local_path(target: str) -> str:
    """Return the target if it is a page of the dashboard, else `/`."""
    fine = target.startswith("/") and not target.startswith(("//", "/\\")) and target.isprintable()
    return target if fine else "/"


@router.post("/actions/{action}")
def act(site: CurrentSite, action: str, form: Form) -> Response:
    """Perform the action of a form, and show the page again."""
    notice = _act(site, action, form)
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
def sign_in(request: Request, form: Form) -> Response:
    """Open a session."""
    access: Access = request.app.state.access
    target = form.get("next", "/")
    try:
        access.check_token(form.get("token", "").strip(), client_address(request.scope))
    except ProblemError as refused:
        answer = _sign_in_form(request, refused.status_code, target, f"{sentence(refused.detail)}.")
        answer.headers.update(refused.headers or {})
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
    context = request.app.state.shell.page_context()
    more = {"target": _local_path(target), "wrong": wrong}
    return page(request, context, "sign-in.html", status=status, **more)


def _signed_in(request: Request, target: str) -> Response:
    response = RedirectResponse(_local_path(target), status_code=303)
    cookie = request.app.state.access.open_session()
    # Not strict: a link from a chat opens the page. Changes need the CSRF token.
    secure = request.url.scheme == "https"
    response.set_cookie(COOKIE, cookie, max_age=int(SESSION_S), httponly=True, samesite="lax", secure=secure)
    return response
