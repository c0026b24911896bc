"""Pages from templates: everything escaped, nothing undefined, nothing from elsewhere."""

from __future__ import annotations

import hashlib
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.responses import HTMLResponse

from briter_worker.errors import for_people
from briter_worker.job import format_time
from briter_worker.queues.steering import is_hopeless
from briter_worker.web import words

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request

_HERE = Path(__file__).parent
TOLD = {
    "retry": "It will be tried again now.",
    "retry-all": "All of them will be tried again now.",
    "publish-now": "It will be published now.",
    "cancel": "It is cancelled: what you wrote is kept, but it will not be published.",
    "cancel-asked": "It is on its way already: it will be cancelled unless sending it has begun.",
    "pause": "Publishing is paused.",
    "resume": "Publishing goes on.",
    "signed-out": "You are signed out.",
}
"""What a page says after an action; nothing else can be put there."""


class Shell(Protocol):
    """What stands around a page's content."""

    def everywhere(self) -> dict[str, Any]:
        """What every page shows."""
        ...


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters |= {
        "people": lambda value: for_people(str(value)),
        "when": when,
        "exact": format_time,
        "ago": ago,
        "sentence": words.sentence,
        "span": words.span,
        "ident": ident,
    }
    environment.globals |= {
        "address": address,
        "count": words.count,
        "day_of": words.day_of,
        "day_ahead": words.day_ahead,
        "clock": words.clock_there,
        "fate_in_words": words.fate_in_words,
        "is_hopeless": is_hopeless,
        "is_link": words.is_link,
        "moment": words.moment,
        "outcome_in_words": words.outcome_in_words,
        "phase_in_words": words.phase_in_words,
        "reason": words.reason,
        "states": words.STATES,
        "tone_of": words.tone_of,
        "percent": words.percent,
        "asset": asset,
    }
    return environment


def when(seconds: float | None) -> Markup:
    """A moment, with its exact time for machines."""
    if seconds is None:
        return Markup("")
    return Markup('<time datetime="{}">{}</time>').format(format_time(seconds), words.moment(seconds))


def ago(seconds: float | None) -> Markup:
    """A moment as seen from now; the exact one on request."""
    if seconds is None:
        return Markup("")
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        format_time(seconds), words.moment(seconds), words.ago(seconds)
    )


def ident(text: str) -> str:
    """A name for an element that is the same whenever the page is made."""
    return "j" + hashlib.blake2s(text.encode("utf-8", "replace"), digest_size=6).hexdigest()


def address(path: str, **query: object) -> str:
    """A page's address; what has no value is left out."""
    given = {name: str(value) for name, value in query.items() if value not in (None, "")}
    return f"{path}?{urlencode(given, errors='replace')}" if given else path


@cache
def asset(name: str) -> str:
    """A static file's address, which changes with its content."""
    digest = hashlib.blake2s((_HERE / "static" / name).read_bytes(), digest_size=4).hexdigest()
    return f"/static/{name}?v={digest}"


def page(
    request: Request,
    shell: Shell,
    template: str,
    *,
    status: int = 200,
    **more: Any,  # noqa: ANN401
) -> HTMLResponse:
    """A page with all that every page shows."""
    visit = request.state.visit
    around = _everywhere(shell)
    told = TOLD.get(request.query_params.get("told", ""), "")
    if around["obstacle"] is not None:
        told = told.replace(" now.", " once posts go out again.")
    here = address(request.url.path, **{k: v for k, v in request.query_params.items() if k != "told"})
    shown = {"visit": visit, "told": told, "here": here, **around, **more}
    return HTMLResponse(_environment().get_template(template).render(shown), status_code=status)


def error_page(shell: Shell) -> Callable[[int, str], HTMLResponse]:
    """What a person sees instead of a page."""

    def made(status: int, text: str) -> HTMLResponse:
        shown = {
            **_everywhere(shell),
            "visit": None,
            "told": "",
            "here": "",
            "status": status,
            "text": text,
        }
        return HTMLResponse(_environment().get_template("error.html").render(shown), status_code=status)

    return made


def _everywhere(shell: Shell) -> dict[str, Any]:
    return {"now": time.time(), "zone": words.zone(), "above": "", "obstacle": None, **shell.everywhere()}
