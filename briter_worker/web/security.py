"""Authentication, protection against forged requests, and security headers, around the whole application.

Every path but the health checks, the sign-in page and static files needs a session or the token. A change by
session also needs the CSRF token of the session, from a page of the same origin; a program that sends the
token as Bearer needs neither, because no browser sends that header by itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response

from briter_worker.web.access import is_same
from briter_worker.web.problems import problem

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from briter_worker.web.access import Access

COOKIE = "briter_session"
CSRF_HEADER = "x-csrf-token"
CSRF_FIELD = "csrf"
SIGN_IN = "/sign-in"
MAX_BYTES = 2 << 20
MAX_PUBLIC_BYTES = 16 << 10
MAX_UPLOAD_BYTES = 48 << 20
"""For a job that is submitted with its files in base64."""
_UPLOAD = re.compile(r"/api/sites/[^/]+/jobs")
_PUBLIC = ("/healthz", "/readyz", SIGN_IN)
_FOR_PROGRAMS = ("/api/", "/events", "/metrics", "/openapi.json", "/healthz", "/readyz")
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_FORM = "application/x-www-form-urlencoded"
_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="briter-worker"'}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # Not `no-referrer`: with that, a browser sends its own forms with the origin `null`.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True, slots=True)
class Visit:
    """Who sent the request: the valid session's cookie, if any, and the CSRF token for forms."""

    cookie: str | None
    csrf: str

    @property
    def signed_in(self) -> bool:
        """Return True for a session; a program that sends the token has none."""
        return self.cookie is not None


class Guard:
    """ASGI middleware that refuses what must not reach the application."""

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        *,
        error_page: Callable[[int, str], Response],
        complain: Callable[[str], None],
    ) -> None:
        self._app = app
        self._access = access
        self._error_page = error_page
        self._complain = complain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def protected(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                _add_headers(message, scope["path"])
            await send(message)

        try:
            answer = self._refuse_visitor(scope)
            if answer is None and scope["method"] not in _READING:
                # Not before: only an admitted visitor may fill the memory.
                limit = _body_limit(scope["path"])
                body = await _read_body(scope, receive, limit)
                answer = (
                    problem(413, f"the request has more than {limit} bytes")
                    if body is None
                    else self._refuse_change(scope, body)
                )
                receive = _replay(body or b"", receive)
            await (answer or self._app)(scope, receive, protected)
        except ClientDisconnect:
            pass
        except Exception as error:
            self._complain(f"{scope['method']} {scope['path']}: {type(error).__name__}: {error}")
            if started:
                raise  # the server then closes the connection
            text = "The dashboard failed to answer; its log has the error"
            await self._refusal(scope, 500, text)(scope, receive, protected)

    def _refuse_visitor(self, scope: Scope) -> Response | None:
        """Return the refusal of a visitor who may not enter, decided by the headers alone."""
        headers = Headers(scope=scope)
        cookie = Request(scope).cookies.get(COOKIE)
        if not self._access.has_session(cookie):
            cookie = None
        scope.setdefault("state", {})["visit"] = Visit(cookie, self._access.csrf_token(cookie))
        bearer = _bearer(headers)
        if bearer is not None:
            return self._refuse_bearer(scope, bearer)
        if cookie is None and not _is_public(scope["path"]):
            return _ask_to_sign_in(scope, headers)
        return None

    def _refuse_bearer(self, scope: Scope, bearer: str) -> Response | None:
        if self._access.is_token(bearer):
            return None
        address = client_address(scope)
        wait = self._access.seconds_to_wait(address)
        self._access.count_failure(address)
        if wait:
            return problem(429, "too many wrong tokens", headers={"Retry-After": str(wait)})
        return problem(401, "the token is wrong", headers=_CHALLENGE)

    def _refuse_change(self, scope: Scope, body: bytes) -> Response | None:
        """Return the refusal of a change that a page of another site may have sent."""
        headers = Headers(scope=scope)
        if _bearer(headers) is not None:
            return None
        origin = headers.get("origin")
        foreign = (
            origin is not None and urlsplit(origin).netloc.casefold() != headers.get("host", "").casefold()
        )
        if foreign or headers.get("sec-fetch-site", "same-origin") not in {"same-origin", "none"}:
            return self._refusal(scope, 403, "This change was requested by a page of another site")
        given = headers.get(CSRF_HEADER)
        if given is None and headers.get("content-type", "").startswith(_FORM):
            given = parse_qs(body.decode("utf-8", "replace")).get(CSRF_FIELD, [""])[0]
        if given is not None and is_same(given, scope["state"]["visit"].csrf):
            return None
        if wants_page(scope["path"], headers):
            text = (
                "This page was opened before the dashboard was restarted, or before you signed in. "
                "Go back, load it again, and try again"
            )
            return self._error_page(403, text)
        fix = "take it from GET /api/csrf, or send the token as Authorization: Bearer"
        return problem(403, "X-CSRF-Token is missing or out of date", fix)

    def _refusal(self, scope: Scope, status: int, text: str) -> Response:
        is_page = wants_page(scope["path"], Headers(scope=scope))
        return self._error_page(status, text) if is_page else problem(status, text)


def client_address(scope: Scope) -> str:
    """Return the address that failures are counted by: for IPv6 the /64 network, which one visitor has."""
    client = scope.get("client")
    text = str(client[0]) if client else "unknown"
    try:
        number = ip_address(text.partition("%")[0])
    except ValueError:
        return text
    if isinstance(number, IPv6Address) and number.ipv4_mapped is None:
        return str(IPv6Address(int(number) >> 64 << 64))
    return text


def wants_page(path: str, headers: Headers) -> bool:
    """Return True if a person asks, with a browser."""
    return not path.startswith(_FOR_PROGRAMS) and "text/html" in headers.get("accept", "")


def _is_public(path: str) -> bool:
    return path in _PUBLIC or path.startswith("/static/")


def _body_limit(path: str) -> int:
    if _is_public(path):
        return MAX_PUBLIC_BYTES
    return MAX_UPLOAD_BYTES if _UPLOAD.fullmatch(path) else MAX_BYTES


def _ask_to_sign_in(scope: Scope, headers: Headers) -> Response:
    if not wants_page(scope["path"], headers):
        fix = "sign in, or send the dashboard's token as Authorization: Bearer"
        return problem(401, "this needs a session or the token", fix, headers=_CHALLENGE)
    query = scope["query_string"].decode("latin-1")
    wanted = scope["path"] + (f"?{query}" if query else "")
    target = f"{SIGN_IN}?next={quote(wanted, safe='')}" if scope["method"] == "GET" else SIGN_IN
    return RedirectResponse(target, status_code=303)


def _add_headers(message: Message, path: str) -> None:
    headers = MutableHeaders(scope=message)
    for name, value in _HEADERS.items():
        headers[name] = value
    if not path.startswith("/static/"):
        headers.setdefault("Cache-Control", "no-store")
    del headers["server"]


def _bearer(headers: Headers) -> str | None:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.casefold() == "bearer" else None


async def _read_body(scope: Scope, receive: Receive, limit: int) -> bytes | None:
    """Return the whole body, or None if it is longer than the limit.

    Raises ClientDisconnect when its end did not come: half of a form can be another change.
    """
    body = bytearray()
    async for part in Request(scope, receive).stream():
        body += part
        if len(body) > limit:
            return None
    return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body that was read, then whatever follows."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
