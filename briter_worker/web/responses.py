"""Answers: pages from templates, JSON, and problem documents (RFC 9457) for programs.

Pages escape everything, contain no control characters, allow nothing undefined, and load nothing from
elsewhere.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from fastapi import HTTPException
from jinja2 import Environment, FileSystemLoader, StrictUndefined, pass_context
from markupsafe import Markup, escape
from starlette.responses import HTMLResponse, Response

from briter_worker.errors import is_environment, one_line, printable, quote_fix, sentence
from briter_worker.job import ago, count, format_time, span
from briter_worker.queues.selection import is_retryable
from briter_worker.status import PULL_COMMAND, waits_since
from briter_worker.web import labels

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jinja2.runtime import Context
    from starlette.requests import Request

PROBLEM_TYPE = "application/problem+json"
STATIC = Path(__file__).parent / "static"
_FUNCTIONS = ("clock", "commit_href", "day_ahead", "is_link", "is_picture", "moment", "reason", "title_of")


class ProblemError(HTTPException):
    """Refuse a request with this HTTP status, message and fix."""

    def __init__(
        self,
        status: int,
        detail: str,
        fix: str = "",
        *,
        headers: Mapping[str, str] | None = None,
        **more: object,
    ) -> None:
        self.fix = fix
        self.more = more
        super().__init__(status, one_line(detail), headers)

    def __str__(self) -> str:
        return str(self.detail)

    def response(self) -> Response:
        """Return the problem document; `fix` is present only if there is one."""
        body: dict[str, Any] = {"type": "about:blank", "title": HTTPStatus(self.status_code).phrase}
        body |= {"status": self.status_code, "detail": self.detail, **({"fix": self.fix} if self.fix else {})}
        return Response(json.dumps(body | self.more), self.status_code, self.headers, PROBLEM_TYPE)


class Json(Response):
    """JSON in ASCII, so that a lone surrogate in a file's name stays an escape."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        """Encode the content."""
        return json.dumps(content, separators=(",", ":")).encode()


@pass_context
def _when(context: Context, seconds: float | None, *, relative: bool = False) -> Markup:
    """Return a time for people, by the page's clock, with the exact one for machines."""
    if seconds is None:
        return Markup("")
    now = context["now"]
    exact, mark = labels.moment(seconds, now), Markup(" data-ago") if relative else ""
    return Markup('<time datetime="{}" title="{}"{}>{}</time>').format(
        format_time(seconds), exact, mark, ago(seconds - now) if relative else exact
    )


@pass_context
def _ago(context: Context, seconds: float | None) -> Markup:
    """Return a time as its distance from now."""
    return _when(context, seconds, relative=True)


def _finalize(value: object) -> object:
    """Return what a template shows of a value: no text brings a control character into a page."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _hidden_value(text: str) -> Markup:
    """Return a text for a hidden field, exactly: what is not printable becomes a reference to its number."""
    return Markup("").join(escape(c) if c.isprintable() else Markup("&#{};").format(ord(c)) for c in text)


def _element_id(text: str) -> str:
    """Return an id for an element that is the same in every version of the page."""
    return "j" + hashlib.blake2s(text.encode("utf-8", "replace"), digest_size=6).hexdigest()


def address(path: str, /, **query: object) -> str:
    """Return the address of a page; parameters without a value are left out."""
    given = {name: str(value) for name, value in query.items() if value not in (None, "")}
    return f"{path}?{urlencode(given, errors='replace')}" if given else path


@cache
def _asset(name: str) -> str:
    """Return the address of a static file, which changes with its content."""
    digest = hashlib.blake2s((STATIC / name).read_bytes(), digest_size=4).hexdigest()
    return f"/static/{name}?v={digest}"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        finalize=_finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    filters: dict[str, Callable[..., object]] = {
        "people": lambda value: one_line(str(value)),
        "quoted": lambda value: quote_fix(one_line(str(value))),
        "when": _when,
        "exact": format_time,
        "ago": _ago,
        "sentence": sentence,
        "span": span,
        "ident": _element_id,
        "hidden": _hidden_value,
    }
    environment.filters |= filters
    environment.tests["retryable"] = is_retryable
    environment.globals |= {name: getattr(labels, name) for name in _FUNCTIONS} | {
        "address": address,
        "asset": _asset,
        "count": count,
        "is_environment": is_environment,
        "is_retryable": is_retryable,
        "waits_since": waits_since,
        "pull_command": PULL_COMMAND,
    }
    return environment


def page(
    request: Request,
    context: dict[str, Any],
    template: str,
    *,
    status: int = 200,
    **more: Any,  # noqa: ANN401 - any value of a template
) -> HTMLResponse:
    """Return a page. The context is what every page shows: `page_context` of a site, or of the cluster."""
    asked = dict(request.query_params)
    common = {"visit": getattr(request.state, "visit", None), "zone": labels.zone()}
    common |= {"told": asked.pop("told", ""), "here": address(request.url.path, **asked)}
    return HTMLResponse(_environment().get_template(template).render(context | common | more), status)
