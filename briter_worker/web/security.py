"""Who may enter: the token, one-time links and sessions, and the guard around the application.

Every path but the health checks, the sign-in page and static files needs a session or the token. A token of a
cluster's API opens some sites' paths below `/api/sites/` only. A change by session is a form of our pages,
with the session's CSRF token. A change by the API needs the token as Bearer: no browser sends it by itself.
Sessions and links are kept in memory, so that a restart signs everybody out.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import re
import secrets
import threading
import time
from contextlib import AsyncExitStack, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from briter_worker import wiring
from briter_worker.errors import PublishError, UsageError, os_error_fix, os_error_text
from briter_worker.job import span
from briter_worker.web.bounds import JsonBounds, Turns
from briter_worker.web.responses import ProblemError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from briter_worker.cluster.tokens import ApiToken
    from briter_worker.settings import Settings

SESSION_S = 12 * 3600.0
LINK_S = 900.0
MAX_FAILURES = 5
FAILURES_WITHIN_S = 60.0
BODY_S = 30.0
"""A body has to be there by then; 48 MiB need a line of 13 Mbit/s."""
COOKIE = "briter_session"
CSRF_FIELD = "csrf"
SIGN_IN = "/sign-in"
MAX_BYTES = 2 << 20
MAX_PUBLIC_BYTES = 16 << 10
MAX_UPLOAD_BYTES = 48 << 20
"""For a job that is submitted with its files in base64."""
MAX_UPLOADS = 2
"""Of one sender at the same time, as each takes memory; others wait for their turn."""
MAX_REQUESTS = 3
"""Of one sender at the same time: an API token, a session, or a visitor's address; others wait."""
MAX_WITH_REMOTES = 3
"""Of all senders at the same time, where a remote is asked, which may not answer: other threads are free."""
MAX_FIELDS = 100
"""Of a form."""
MAX_HOOK_BYTES = 25 << 20
"""GitHub sends no more. The body of a git host's call is only hashed, not kept."""
_MAX_ADDRESSES = 10_000
_MIN_LENGTH = 16
_PULL = re.compile(r"/api/(?:sites/[^/]+/)?pull")
_UPLOAD = re.compile(r"/api/sites/[^/]+/jobs")
_SITE = re.compile(r"/api/sites/([^/]+)/(?!doctor$).+|/sites/([^/]+)/events")
"""What API tokens open. The checks tell of the nodes, which are the operator's."""
_ASKS_REMOTE = re.compile(r"/sites/[^/]+/(?:post|picture)")
"""With a commit, these pages show what is in a clone."""
_PUBLIC = ("/healthz", "/readyz", SIGN_IN)
_AT_ONCE = re.compile(r"/healthz|/readyz|(?:/sites/[^/]+)?/events")
"""Paths without turns: health checks wait for nothing, and live streams have limits of their own."""
_FOR_PROGRAMS = ("/api/", "/events", "/metrics", "/openapi.json", "/healthz", "/readyz")
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
ACTOR = ContextVar("ACTOR", default="dashboard")
"""Who sends the request, for the history: a session, the dashboard's token, or an API token by its name."""
_GITHUB, _GITLAB, _GITEA = "x-hub-signature-256", "x-gitlab-token", "x-gitea-signature"
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


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _is_same(given: str, expected: str) -> bool:
    """Return True if both secrets are equal, in constant time."""
    return hmac.compare_digest(_digest(given), _digest(expected))


class Access:
    """Everything that decides whether a visitor is signed in. Safe in several threads."""

    def __init__(
        self, token: str, clock: Callable[[], float] = time.monotonic, *, pull_secret: str = ""
    ) -> None:
        self._token = token
        self._pull_secret = pull_secret
        self._clock = clock
        self._csrf_key = secrets.token_bytes(32)
        self._ends: dict[bytes, float] = {}
        """The end of each session and each link, by the digest of its key."""
        self._failures: dict[str, list[float]] = {}
        self._guard = threading.Lock()
        self.find_api_token: Callable[[str], ApiToken | None] = lambda _token: None
        """Return what a token of a cluster's API opens."""

    def check_token(self, given: str, address: str) -> None:
        """Raise ProblemError unless this is the dashboard's token, or if the address sent too many others."""
        self._check(_is_same(given, self._token), address)

    def check_bearer(self, given: str, address: str) -> ApiToken | None:
        """Return the API token that this is; None for the dashboard's token, which opens everything.

        Raises ProblemError as `check_token`.
        """
        with self._guard:
            self._recent_failures(address)  # before the database is asked
        api_token = self.find_api_token(given)
        self._check(api_token is not None or _is_same(given, self._token), address)
        return api_token

    def is_signed_pull(self, scope: Scope) -> bool:
        """Return True for the call of a git host's webhook, which `check_pull` has to check."""
        is_signed = not {_GITHUB, _GITLAB, _GITEA}.isdisjoint(Headers(scope=scope).keys())
        is_pull = scope["method"] == "POST" and _PULL.fullmatch(scope["path"])
        return bool(is_pull and is_signed and self._pull_secret)

    async def check_pull(self, request: Request) -> None:
        """Raise ProblemError unless the git host knows the secret: GitLab sends it, the others sign."""
        headers, signature = request.headers, hmac.new(self._pull_secret.encode(), None, "sha256")
        async for part in request.stream():
            signature.update(part)
        given, expected = headers.get(_GITLAB), self._pull_secret
        if given is None:
            given, expected = headers.get(_GITHUB) or headers.get(_GITEA, ""), signature.hexdigest()
        self._check(_is_same(given.removeprefix("sha256="), expected), client_address(request.scope))

    def _check(self, is_right: bool, address: str) -> None:  # noqa: FBT001 - the one question
        with self._guard:
            failures = self._recent_failures(address)
            if is_right:
                return
            if len(self._failures) >= _MAX_ADDRESSES:
                del self._failures[next(iter(self._failures))]
            self._failures[address] = [*failures, self._clock()]
        raise ProblemError(401, "that is not the token", headers=_CHALLENGE)

    def _recent_failures(self, address: str) -> list[float]:
        """Return the times of the address's wrong tokens. Raises ProblemError if they are too many."""
        now = self._clock()
        recent = [each for each in self._failures.get(address, ()) if each > now - FAILURES_WITHIN_S]
        if len(recent) >= MAX_FAILURES:  # for the right token, too: an answer would end the guessing
            wait = max(1, round(recent[0] + FAILURES_WITHIN_S - now + 0.5))
            text = f"too many wrong tokens; try again in {span(wait)}"
            raise ProblemError(429, text, headers={"Retry-After": str(wait)})
        return recent

    def create_link_key(self) -> str:
        """Return the key of a sign-in link that works once, for 15 minutes."""
        return self._issue("link", LINK_S)

    def use_link_key(self, key: str) -> bool:
        """Return True if the key was valid. It is not valid again."""
        with self._guard:
            return self._ends.pop(_digest(f"link:{key}"), 0.0) > self._clock()

    def open_session(self) -> str:
        """Return the cookie of a new session."""
        return self._issue("session", SESSION_S)

    def has_session(self, cookie: str | None) -> bool:
        """Return True if the cookie belongs to a session that has not ended."""
        with self._guard:
            return self._ends.get(_digest(f"session:{cookie}"), 0.0) > self._clock()

    def end_session(self, cookie: str | None) -> None:
        """Sign out."""
        with self._guard:
            self._ends.pop(_digest(f"session:{cookie}"), None)

    def csrf_token(self, cookie: str | None) -> str:
        """Return the CSRF token of this session; visitors without a session share another one."""
        return hmac.new(self._csrf_key, _digest(cookie or ""), hashlib.sha256).hexdigest()

    def _issue(self, kind: str, seconds: float) -> str:
        key, now = secrets.token_urlsafe(32), self._clock()
        with self._guard:
            self._ends = {digest: end for digest, end in self._ends.items() if end > now}
            self._ends[_digest(f"{kind}:{key}")] = now + seconds
        return key


def read_token(settings: Settings) -> str:
    """Return BRITER_DASHBOARD_TOKEN, else the kept token, which is made when there is none.

    Raises UsageError when the token can be neither read nor kept, and OSError for the database.
    """
    if settings.dashboard_token:
        return settings.dashboard_token
    if settings.database_url:
        return wiring.open_database(settings).value_or_set("dashboard.token", secrets.token_urlsafe(32))
    try:
        path = wiring.open_git(settings).state_dir / "dashboard.token"
    except PublishError:
        return secrets.token_urlsafe(32)  # there is no repository: until the next start
    try:
        with suppress(FileExistsError), open(path, "x", opener=_open_private) as file:
            file.write(f"{secrets.token_urlsafe(32)}\n")
        token = path.read_text().strip()
    except OSError as error:
        message = f"the dashboard's token cannot be kept in {path}: {os_error_text(error, with_path=False)}"
        raise UsageError(message, os_error_fix(error) or "set BRITER_DASHBOARD_TOKEN") from None
    if len(token) < _MIN_LENGTH:  # an empty token would let everybody in
        raise UsageError(f"{path} has no token", "delete the file, or set BRITER_DASHBOARD_TOKEN")
    return token


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@dataclass(frozen=True, slots=True)
class Visit:
    """The sender of a request: the cookie of a valid session, if any, and the CSRF token for forms."""

    cookie: str | None
    csrf: str
    token: ApiToken | None = None
    """The API token that the request came with."""
    is_signed: bool = False
    """Marks the call of a git host, whose signature is not checked yet."""


class Guard:
    """ASGI middleware that refuses what must not reach the application, by the headers alone."""

    def __init__(
        self, app: ASGIApp, access: Access, refuse: Callable[[Request, ProblemError], Response]
    ) -> None:
        self._app = app
        self._access = access
        self._refuse = refuse
        self._turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                if not scope["path"].startswith("/static/"):
                    headers.setdefault("Cache-Control", "no-store")
            await send(message)

        scope.setdefault("state", {})
        try:
            answer = await self._admit(scope)
        except ProblemError as refused:
            answer = self._refuse(Request(scope), refused)
        async with AsyncExitStack() as stack:
            if answer is None and not _AT_ONCE.fullmatch(scope["path"]):
                try:
                    await stack.enter_async_context(self._turn(scope))
                    if _ASKS_REMOTE.fullmatch(scope["path"]) and b"commit=" in scope["query_string"]:
                        await stack.enter_async_context(self._turns.of("remotes", MAX_WITH_REMOTES))
                except ProblemError as refused:
                    answer = self._refuse(Request(scope), refused)
            await (answer or self._app)(scope, _limit(scope, receive), protected)

    def _turn(self, scope: Scope) -> AbstractAsyncContextManager[None]:
        """Return the context in which the request of this sender has its turn."""
        visit: Visit = scope["state"]["visit"]
        sender = client_address(scope)
        if visit.token is not None:
            sender = f"token {visit.token.name}"
        elif visit.cookie is not None:
            sender = f"session {visit.cookie}"
        if _UPLOAD.fullmatch(scope["path"]) and scope["method"] == "POST":
            return self._turns.of(f"{sender} uploads", MAX_UPLOADS)
        return self._turns.of(sender, MAX_REQUESTS)

    async def _admit(self, scope: Scope) -> Response | None:
        """Return the sign-in page's address for a visitor who has to sign in. Raises ProblemError."""
        headers, path = Headers(scope=scope), scope["path"]
        if "\0" in path or b"%00" in scope.get("query_string", b""):
            raise ProblemError(404, "this page does not exist")  # no text of Postgres has a NUL
        cookie = Request(scope).cookies.get(COOKIE)
        if not self._access.has_session(cookie):
            cookie = None
        visit = Visit(cookie, self._access.csrf_token(cookie))
        bearer = bearer_of(headers)
        ACTOR.set("dashboard" if bearer is None else "token")
        if bearer is not None:
            token = await asyncio.to_thread(self._access.check_bearer, bearer, client_address(scope))
            if token is not None:
                ACTOR.set(f"token {token.name}")
                _check_rights(token, scope)
                visit = Visit(None, "", token)
        elif self._access.is_signed_pull(scope):
            visit = Visit(None, "", is_signed=True)
        elif cookie is None and not _is_public(path):
            return _ask_to_sign_in(scope, headers)
        else:
            _check_page(scope, headers)
        scope["state"]["visit"] = visit
        return None


def _check_page(scope: Scope, headers: Headers) -> None:
    """Raise ProblemError for what a page of another site sent, and for a change by a script."""
    is_change, is_api = scope["method"] not in _READING, scope["path"].startswith("/api/")
    if (is_change or is_api) and _is_foreign(headers):
        fix = "if it was the dashboard's own page: have the reverse proxy pass the header Host"
        raise ProblemError(403, "This was requested by a page of another site", fix)
    if is_change and is_api:
        raise ProblemError(403, "this needs the token", "send it as Authorization: Bearer")


async def read_form(request: Request) -> dict[str, str]:
    """Return the fields of a page's form. Raises ProblemError unless it was made for this session."""
    if request.method in _READING:
        return {}
    body = (await request.body()).decode("utf-8", "replace")
    try:
        fields = parse_qs(body, keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError:
        raise ProblemError(413, f"the form has more than {MAX_FIELDS} fields") from None
    form = {name: values[0] for name, values in fields.items()}
    if not _is_same(form.get(CSRF_FIELD, ""), request.state.visit.csrf):
        text = (
            "This page was opened before the dashboard was restarted, or before you signed in. "
            "Go back, load it again, and try again"
        )
        raise ProblemError(403, text)
    return form


def _check_rights(token: ApiToken, scope: Scope) -> None:
    """Raise ProblemError unless the token opens this request: some sites' API, by the kind of request."""
    path = scope["path"]
    site = _SITE.fullmatch(path)
    right = "enqueue" if _UPLOAD.fullmatch(path) else "act"
    if scope["method"] in _READING:
        right = "read"
    if site is None or (site[1] or site[2]) not in token.sites or right not in token.rights:
        text = f"the token {token.name} does not open this"
        raise ProblemError(403, text, "briter-worker token list shows its sites and rights")


def client_address(scope: Scope) -> str:
    """Return the address that a visitor is counted by: for IPv6 the /64 network, which one visitor has."""
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
    """Return True if a user asks, with a browser."""
    return not path.startswith(_FOR_PROGRAMS) and "text/html" in headers.get("accept", "")


def _is_public(path: str) -> bool:
    return path in _PUBLIC or path.startswith("/static/")


def _is_foreign(headers: Headers) -> bool:
    """Return True if a page of another site sent the request."""
    origin = headers.get("origin")
    try:
        own = origin is None or urlsplit(origin).netloc.casefold() == headers.get("host", "").casefold()
    except ValueError:
        return True
    return not own or headers.get("sec-fetch-site", "none") not in {"same-origin", "none"}


def _ask_to_sign_in(scope: Scope, headers: Headers) -> Response:
    if not wants_page(scope["path"], headers):
        fix = "sign in, or send the dashboard's token as Authorization: Bearer"
        raise ProblemError(401, "this needs a session or the token", fix, headers=_CHALLENGE)
    query = scope["query_string"].decode("latin-1")
    wanted = scope["path"] + (f"?{query}" if query else "")
    target = f"{SIGN_IN}?next={quote(wanted, safe='')}" if scope["method"] == "GET" else SIGN_IN
    return RedirectResponse(target, status_code=303)


def bearer_of(headers: Headers) -> str | None:
    """Return the token that a program sends."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.casefold() == "bearer" else None


def _body_limit(path: str, *, is_hook: bool) -> int:
    """Return how many bytes the body of a request may have."""
    if is_hook:
        return MAX_HOOK_BYTES
    if _is_public(path):
        return MAX_PUBLIC_BYTES
    if _UPLOAD.fullmatch(path):
        return MAX_UPLOAD_BYTES
    return MAX_BYTES


def _limit(scope: Scope, receive: Receive) -> Receive:
    """Return a `receive` that raises ProblemError for a body that is too long, or not there in time."""
    visit = scope["state"].get("visit")
    is_hook = visit is not None and visit.is_signed
    limit = _body_limit(scope["path"], is_hook=is_hook)
    deadline = asyncio.get_running_loop().time() + BODY_S
    size = 0
    is_complete = False
    bounds = JsonBounds() if scope["path"].startswith("/api/") and not is_hook else None

    async def receive_part() -> Message:
        nonlocal size, is_complete
        try:
            async with asyncio.timeout_at(None if is_complete else deadline):
                message = await receive()
        except TimeoutError:
            text = f"the request was not complete after {BODY_S:.0f} s"
            raise ProblemError(408, text) from None
        size += len(message.get("body", b""))
        if size > limit:
            raise ProblemError(413, f"the request has more than {limit} bytes")
        if bounds is not None:
            bounds.feed(message.get("body", b""))
        is_complete = not message.get("more_body", False)
        return message

    return receive_part
