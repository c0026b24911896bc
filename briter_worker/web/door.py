"""Signing in and out: the pages that whoever is not in yet may see."""

from typing import Annotated, Any, Protocol
from urllib.parse import parse_qs

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import RedirectResponse, Response

from briter_worker.settings import Settings
from briter_worker.web import words
from briter_worker.web.rendering import address, page
from briter_worker.web.security import COOKIE, SIGN_IN, Guard, address_of
from briter_worker.web.sessions import LASTS, same

router = APIRouter()
Text = Annotated[str, Query(max_length=2000)]


class Behind(Protocol):
    """The dashboard behind the door."""

    settings: Settings
    guard: Guard | None

    def everywhere(self) -> dict[str, Any]:
        """What every page shows."""
        ...


def behind(request: Request) -> Behind:
    """The dashboard that is asked."""
    found: Behind = request.app.state.dashboard
    return found


Answering = Annotated[Behind, Depends(behind)]


async def form_of(request: Request) -> dict[str, str]:
    """The fields of a page's form."""
    fields = parse_qs((await request.body()).decode("utf-8", "replace"), keep_blank_values=True)
    return {name: values[0] for name, values in fields.items()}


def local(target: str) -> str:
    """A page of ours, whatever a form says."""
    fine = target.startswith("/") and not target.startswith(("//", "/\\")) and target.isprintable()
    return target if fine else "/"


@router.get(SIGN_IN)
def sign_in_page(request: Request, dashboard: Answering, next: Text = "/") -> Response:  # noqa: A002 - in the address
    """Where a token is asked for."""
    if not dashboard.settings.dashboard_token or request.state.visit.signed_in:
        return RedirectResponse(local(next), status_code=303)
    return page(request, dashboard, "sign-in.html", target=local(next), wrong="")


@router.post(SIGN_IN)
async def sign_in(request: Request, dashboard: Answering) -> Response:
    """Begin a session."""
    form = await form_of(request)
    guard = _guard(dashboard)
    target = local(form.get("next", "/"))
    token = dashboard.settings.dashboard_token
    if not token:
        return RedirectResponse(target, status_code=303)
    who = address_of(request.scope)
    wait = guard.tries.wait(who)
    if wait:
        text = f"Too many wrong tokens. Try again in {words.span(wait)}."
        answer = page(request, dashboard, "sign-in.html", status=429, target=target, wrong=text)
        answer.headers["Retry-After"] = str(wait)
        return answer
    if not same(form.get("token", "").strip(), token):
        guard.tries.failed(who)
        text = "That is not the token. It is what BRITER_DASHBOARD_TOKEN is set to on the server."
        return page(request, dashboard, "sign-in.html", status=401, target=target, wrong=text)
    response = RedirectResponse(target, status_code=303)
    response.set_cookie(
        COOKIE,
        guard.sessions.open(),
        max_age=int(LASTS),
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return response


@router.post("/sign-out")
async def sign_out(request: Request, dashboard: Answering) -> Response:
    """End the session."""
    _guard(dashboard).sessions.end(request.state.visit.cookie)
    response = RedirectResponse(address(SIGN_IN, told="signed-out"), status_code=303)
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return response


def _guard(dashboard: Behind) -> Guard:
    assert dashboard.guard is not None  # noqa: S101 - set before anything is served
    return dashboard.guard
