"""Who may come in, and what may be changed: the first that a request meets, and the last to touch the answer.

A machine of one's own needs no password: listening on loopback, everybody on the machine may look and steer.
So then only names of this machine are answered (a web page elsewhere may have a name that leads here), and
nothing that a proxy has forwarded. With a token, nobody comes in without it.

A change needs more than a cookie that a browser sends by itself: the page's CSRF token, from the page's own
origin. A program that sends the token as Bearer needs neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse, Response

from briter_worker.web.problems import problem
from briter_worker.web.sessions import Sessions, Tries, same

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "briter_session"
CSRF_HEADER = "x-csrf-token"
CSRF_FIELD = "csrf"
SIGN_IN = "/sign-in"
MOST_BYTES = 2 << 20
MOST_BYTES_OF_STRANGERS = 16 << 10
_PUBLIC = ("/healthz", "/readyz", SIGN_IN)
_FOR_PROGRAMS = ("/api/", "/events", "/metrics", "/openapi.json", "/healthz", "/readyz")
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_FORM = "application/x-www-form-urlencoded"
_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip")
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # Not `no-referrer`: with that, a browser's own forms would come from the origin `null`.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


class _LeftError(Exception):
    """The visitor was gone before all was said."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    if host.casefold() == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Visit:
    """Who asks."""

    cookie: str | None
    signed_in: bool
    """By a session; not by Bearer."""
    csrf: str
    """For this visitor's forms."""


@dataclass(frozen=True, slots=True)
class Door:
    """What the dashboard was told about who may come in."""

    token: str
    host: str
    most_bytes: Callable[[str], int | None] = lambda _path: None
    """How much may be sent to an address, where that is not as everywhere."""


class Guard:
    """Around the application: refuses what must not reach it."""

    def __init__(
        self,
        app: ASGIApp,
        door: Door,
        complain: Callable[[str], None],
        error_page: Callable[[int, str], Response],
    ) -> None:
        self._app = app
        self._door = door
        self._complain = complain
        self._error_page = error_page
        self.sessions = Sessions()
        self.tries = Tries()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def protected(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                _protect(message, scope["path"])
            await send(message)

        try:
            answer = self._admit(scope)
            if answer is None and not _reads(scope):
                # Not before: who has no business here does not get to fill the memory.
                path = scope["path"]
                usual = MOST_BYTES_OF_STRANGERS if _is_public(path) else MOST_BYTES
                limit = self._door.most_bytes(path) or usual
                body = await _read(receive, limit)
                answer = problem(413, f"at most {limit} bytes") if body is None else self._change(scope, body)
                receive = _again(body or b"", receive)
            if answer is None:
                await self._app(scope, receive, protected)
            else:
                await answer(scope, receive, protected)
        except _LeftError:
            pass  # nobody is there to be answered
        except Exception as error:
            self._complain(f"{scope['method']} {scope['path']}: {type(error).__name__}: {error}")
            if started:
                raise  # so that the server ends the connection
            text = "The dashboard made a mistake; its log says more"
            await self._refuse(scope, 500, text)(scope, receive, protected)

    def _admit(self, scope: Scope) -> Response | None:
        """The refusal of who may not come in, told by the headers alone; None when the visitor may."""
        headers = Headers(scope=scope)
        cookie = _cookie(headers)
        signed_in = bool(self._door.token) and self.sessions.knows(cookie)
        if not signed_in:
            cookie = None
        visit = Visit(cookie, signed_in, self.sessions.csrf(cookie))
        scope.setdefault("state", {})["visit"] = visit
        if not self._door.token:
            refusal = self._stranger(headers)
            if refusal is not None:
                return refusal
        bearer = _bearer(headers)
        if bearer is not None and self._door.token:
            return self._let_program_in(scope, bearer)
        if self._door.token and not signed_in and not _is_public(scope["path"]):
            return _sign_in_first(scope, headers)
        return None

    def _change(self, scope: Scope, body: bytes) -> Response | None:
        """The refusal of a change that somebody else may have sent in the visitor's name."""
        headers = Headers(scope=scope)
        if self._door.token and _bearer(headers) is not None:
            return None  # no browser sends it by itself
        return self._forged(scope, headers, body, scope["state"]["visit"])

    def _refuse(self, scope: Scope, status: int, text: str) -> Response:
        return (self._error_page if wants_page(scope["path"], Headers(scope=scope)) else problem)(
            status, text
        )

    def _stranger(self, headers: Headers) -> Response | None:
        name = _host_name(headers.get("host", ""))
        if not (is_loopback(name) or name == self._door.host.casefold()):
            text = (
                "this dashboard answers to localhost only. Fix: for another name, set BRITER_DASHBOARD_TOKEN"
            )
            return problem(421, text)
        if any(header in headers for header in _FORWARDED):
            text = "a proxy forwarded this, and there is no token. Fix: set BRITER_DASHBOARD_TOKEN"
            return problem(403, text)
        return None

    def _forged(self, scope: Scope, headers: Headers, body: bytes, visit: Visit) -> Response | None:
        """The refusal of a change that a page of another site may have sent."""
        origin = headers.get("origin")
        foreign = (
            origin is not None and urlsplit(origin).netloc.casefold() != headers.get("host", "").casefold()
        )
        if foreign or headers.get("sec-fetch-site", "same-origin") not in {"same-origin", "none"}:
            return self._refuse(scope, 403, "This change was asked for by a page of another site")
        given = headers.get(CSRF_HEADER)
        if given is None and headers.get("content-type", "").startswith(_FORM):
            given = parse_qs(body.decode("utf-8", "replace")).get(CSRF_FIELD, [""])[0]
        if given is not None and same(given, visit.csrf):
            return None
        if wants_page(scope["path"], headers):
            text = (
                "This page was opened before the dashboard was restarted, or before you signed in. "
                "Go back, load it again, and try again"
            )
            return self._error_page(403, text)
        return problem(403, "X-CSRF-Token is missing or old. Fix: take it from GET /api/csrf, or send Bearer")

    def _let_program_in(self, scope: Scope, bearer: str) -> Response | None:
        if same(bearer, self._door.token):
            return None
        address = address_of(scope)
        wait = self.tries.wait(address)
        self.tries.failed(address)
        if wait:
            return problem(429, "too many wrong tokens", headers={"Retry-After": str(wait)})
        return problem(
            401, "the token is wrong", headers={"WWW-Authenticate": 'Bearer realm="briter-worker"'}
        )


def _reads(scope: Scope) -> bool:
    return scope["method"] in _READING


def address_of(scope: Scope) -> str:
    """Who asks, for counting failures: of IPv6 the network, as each visitor has 2^64 addresses."""
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
    """Whether a person asks, with a browser."""
    return not path.startswith(_FOR_PROGRAMS) and "text/html" in headers.get("accept", "")


def _is_public(path: str) -> bool:
    return path in _PUBLIC or path.startswith("/static/")


def _sign_in_first(scope: Scope, headers: Headers) -> Response:
    if wants_page(scope["path"], headers):
        wanted = scope["path"] + (
            f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else ""
        )
        target = f"{SIGN_IN}?next={quote(wanted, safe='')}" if scope["method"] == "GET" else SIGN_IN
        return RedirectResponse(target, status_code=303)
    return problem(
        401,
        "sign in, or send BRITER_DASHBOARD_TOKEN as Authorization: Bearer",
        headers={"WWW-Authenticate": 'Bearer realm="briter-worker"'},
    )


def _protect(message: Message, path: str) -> None:
    headers = MutableHeaders(scope=message)
    for name, value in _HEADERS.items():
        headers[name] = value
    if not path.startswith("/static/"):
        headers.setdefault("Cache-Control", "no-store")
    del headers["server"]


def _host_name(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "").casefold()
    except ValueError:
        return ""


def _bearer(headers: Headers) -> str | None:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.casefold() == "bearer" else None


def _cookie(headers: Headers) -> str | None:
    for line in headers.getlist("cookie"):
        for pair in line.split(";"):
            name, _, value = pair.strip().partition("=")
            if name == COOKIE:
                return value
    return None


async def _read(receive: Receive, limit: int) -> bytes | None:
    """The body of a change, which is checked before it is believed; None when it is too long.

    Raises _LeftError when it did not come to its end: half of it might be another change.
    """
    parts = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _LeftError
        parts += message.get("body", b"")
        if len(parts) > limit:
            return None
        if not message.get("more_body", False):
            return bytes(parts)


def _again(body: bytes, receive: Receive) -> Receive:
    """The body that was read, then whatever comes."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
