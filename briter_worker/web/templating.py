"""Pages from templates: everything is escaped, nothing may be undefined, nothing is loaded from elsewhere."""

from __future__ import annotations

import hashlib
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.responses import HTMLResponse

from briter_worker.job import format_time
from briter_worker.queues.selection import is_retryable
from briter_worker.redaction import one_line
from briter_worker.web import labels

if TYPE_CHECKING:
    from starlette.requests import Request

    from briter_worker.web.cluster import Cluster
    from briter_worker.web.site import Site

_FUNCTIONS = (
    *("clock", "count", "day_ahead", "is_link", "moment", "outcome_text", "percent"),
    *("phase_text", "reason", "result_text", "tone_of"),
)
STATIC = Path(__file__).parent / "static"
NOTICES = {
    "retry": "It will be retried now.",
    "retry-all": "All of them will be retried now.",
    "publish-now": "It will be published now.",
    "cancel": "It is cancelled: the files stay as they are, but they will not be published.",
    "cancel-asked": "It is being published: it will be cancelled unless the push has begun.",
    "pause": "Publishing is paused.",
    "resume": "Publishing continues.",
    "signed-out": "You are signed out.",
}
"""What a page may say after an action."""


def when(seconds: float | None) -> Markup:
    """Return a time, with the exact one for machines."""
    if seconds is None:
        return Markup("")
    return Markup('<time datetime="{}">{}</time>').format(format_time(seconds), labels.moment(seconds))


def ago(seconds: float | None) -> Markup:
    """Return a time relative to now, with the exact one as its title."""
    if seconds is None:
        return Markup("")
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        format_time(seconds), labels.moment(seconds), labels.ago(seconds)
    )


def element_id(text: str) -> str:
    """Return an id for an element that is the same in every version of the page."""
    return "j" + hashlib.blake2s(text.encode("utf-8", "replace"), digest_size=6).hexdigest()


def address(path: str, **query: object) -> str:
    """Return the address of a page; parameters without a value are left out."""
    given = {name: str(value) for name, value in query.items() if value not in (None, "")}
    return f"{path}?{urlencode(given, errors='replace')}" if given else path


@cache
def asset(name: str) -> str:
    """Return the address of a static file, which changes with its content."""
    digest = hashlib.blake2s((STATIC / name).read_bytes(), digest_size=4).hexdigest()
    return f"/static/{name}?v={digest}"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters |= {
        "people": lambda value: one_line(str(value)),
        "when": when,
        "exact": format_time,
        "ago": ago,
        "sentence": labels.sentence,
        "span": labels.span,
        "ident": element_id,
    }
    environment.globals |= {name: getattr(labels, name) for name in _FUNCTIONS} | {
        "address": address,
        "asset": asset,
        "is_retryable": is_retryable,
        "states": labels.STATES,
    }
    return environment


def page(
    request: Request,
    shell: Site | Cluster,
    template: str,
    *,
    status: int = 200,
    **more: Any,  # noqa: ANN401 - any value of a template
) -> HTMLResponse:
    """Return a page, with all that every page shows."""
    context = shell.page_context()
    notice = NOTICES.get(request.query_params.get("told", ""), "")
    if context["obstacle"] is not None:
        notice = notice.replace(" now.", " when posts are published again.")
    here = address(request.url.path, **{k: v for k, v in request.query_params.items() if k != "told"})
    return _render(
        template, status, {**context, "visit": request.state.visit, "notice": notice, "here": here, **more}
    )


def error_page(shell: Site | Cluster, status: int, text: str, fix: str = "") -> HTMLResponse:
    """Return the page that shows an error."""
    more = {"visit": None, "notice": "", "here": "", "status": status, "text": text, "fix": fix}
    return _render("error.html", status, {**shell.page_context(), **more})


def _render(template: str, status: int, context: dict[str, Any]) -> HTMLResponse:
    context = {"now": time.time(), "zone": labels.zone(), **context}
    return HTMLResponse(_environment().get_template(template).render(context), status_code=status)
