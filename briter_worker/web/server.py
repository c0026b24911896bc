"""The server: one application for one site or for all sites of a cluster, served until SIGTERM."""

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import anyio.to_thread
import h11
import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Path
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from uvicorn.protocols.http.h11_impl import H11Protocol

from briter_worker.accepted import refusal_text
from briter_worker.errors import (
    DeclinedError,
    FixableError,
    PublishError,
    UnknownJobError,
    UsageError,
    describe,
)
from briter_worker.settings import Settings
from briter_worker.sinks.log import LogSink
from briter_worker.status import health_problems
from briter_worker.web import api, pages
from briter_worker.web.responses import STATIC, Json, ProblemError, page
from briter_worker.web.security import SIGN_IN, Access, Guard, client_address, read_token, wants_page
from briter_worker.web.site import Site
from briter_worker.web.snapshot import in_background

if TYPE_CHECKING:
    from concurrent.futures import Future

    from briter_worker.sinks.history import Tally
    from briter_worker.sinks.metrics import Sample
    from briter_worker.web.cluster import Cluster

THREADS = 8
"""Requests that may read the disk or the database at once."""
READY_S = 5.0
"""Time in which /readyz answers, whatever the database does."""
STUCK_S = 60.0
"""A request of one thread ends before, so that /healthz tells of a dashboard that is to be restarted."""
HEADERS_S = 10.0
"""Time from the opening of a connection to the end of a request's headers."""
READ_S = 30.0
"""Time in which a visitor has to read what is in the buffer of its connection."""
MAX_SMALL_CHUNKS = 2000
"""Of a request whose chunks have less than SMALL_CHUNK bytes on average."""
SMALL_CHUNK = 64
MAX_CONNECTIONS_PER_ADDRESS = 200
"""Of a visitor; a trusted proxy has as many as it needs."""
_KEEP_ALIVE_S = 30
_SHUTDOWN_S = 1
_END_S = 5.0
"""The process ends so long after a signal, whatever its threads wait for."""
_SWITCH_S = 0.0005
"""Time that a request waits for a thread that computes; Python's 5 ms, several times, is a slow page."""
_BACKLOG = 1024
_STATUS: dict[type[Exception], int] = {
    UnknownJobError: 404,
    DeclinedError: 409,
    UsageError: 409,
    PublishError: 409,
    FixableError: 503,
    OSError: 503,
}
"""By the first class of an error that fits."""
_UNEXPECTED = 500

router = APIRouter(responses=api.PROBLEMS)
"""What every dashboard has at `/`."""


@router.get("/healthz")
async def healthz(request: Request) -> Response:
    """Return ok while the dashboard can answer requests. Waits for no thread, and for no database."""
    stuck = request.app.state.pulse.stuck_for()
    if stuck > STUCK_S:
        text = f"requests have waited {stuck:.0f} s for a thread, and none has become free"
        raise ProblemError(503, text, "restart briter-worker serve")
    return Json({"status": "ok"})


@router.get("/readyz")
async def readyz(request: Request) -> Response:
    """Return ok if the queue can be used. Signed-in users find the reason at /api/status and /api/doctor."""
    if not await request.app.state.readiness.is_ready():
        raise ProblemError(503, "the queue cannot be used", "run briter-worker doctor on the server")
    return Json({"status": "ok"})


class Readiness:
    """Checks whether the queue can be used: one check at a time, in its own thread, for all requests."""

    def __init__(self, shell: "Site | Cluster") -> None:
        self._shell = shell
        self._check: Future[bool] | None = None

    async def is_ready(self) -> bool:
        """Return the result of the running check, or of a new one; False if it does not end in time."""
        if self._check is None or self._check.done():
            self._check = in_background(self._can_be_used)
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._check)), READY_S)
        except TimeoutError:
            return False

    def _can_be_used(self) -> bool:
        try:
            self._shell.status_json()
        except ProblemError:
            return False
        return not health_problems(self._shell.settings, time.time(), expect_worker=False)


class Pulse:
    """Watches the threads that answer requests: those of a dashboard that works become free again."""

    def __init__(self) -> None:
        self._busy: Collection[object] = ()
        self._since = time.monotonic()

    def stuck_for(self) -> float:
        """Return for how many seconds requests wait while no thread has become free; 0 if none waits."""
        now, pool = time.monotonic(), anyio.to_thread.current_default_thread_limiter().statistics()
        if not pool.tasks_waiting or set(pool.borrowers) != set(self._busy):
            self._busy, self._since = pool.borrowers, now
        return now - self._since

    async def beat(self) -> None:
        """Look every second, whether anybody asks or not."""
        while True:
            self.stuck_for()
            await asyncio.sleep(1.0)


@router.get("/metrics", response_class=Response)
def metrics(request: Request) -> Response:
    """Return the metrics for Prometheus."""
    if request.app.state.metrics is None:
        raise ProblemError(404, "metrics are not installed", "pip install 'briter-worker[metrics]'")
    text, media_type = request.app.state.metrics()
    return Response(text, headers={"Content-Type": media_type})


def _open_metrics(shell: "Site | Cluster") -> Callable[[], tuple[bytes, str]] | None:
    """Return the function that renders the metrics; None where they are not installed."""
    if find_spec("prometheus_client") is None:
        return None
    from briter_worker.sinks.metrics import render_metrics  # noqa: PLC0415 - the extra [metrics]

    def measure() -> "tuple[Iterable[Sample], Iterable[Tally]]":
        try:
            return shell.measure()
        except ProblemError as error:
            raise OSError(error.detail) from None

    return partial(render_metrics, measure)


def create_application(
    settings: Settings, access: Access, *, log: LogSink, complain: Callable[[str], None]
) -> Guard:
    """Return the ASGI application, with the guard around it."""
    app = FastAPI(
        title="Briter Worker",
        version="1",
        description="Publish posts, follow and control them. Errors are problem documents (RFC 9457). "
        "Programs send the dashboard's token as `Authorization: Bearer`.",
        docs_url=None,  # loads scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        lifespan=_lifespan,
    )
    if settings.database_url:
        shell: Site | Cluster = _add_cluster(app, settings, access, log, complain)
    else:
        shell = _add_site(app, settings, log, complain)
    app.include_router(router)
    app.include_router(pages.sign_in_router, include_in_schema=False)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.state.shell = shell
    app.state.readiness = Readiness(shell)
    app.state.pulse = Pulse()
    app.state.access = access
    app.state.metrics = _open_metrics(shell)
    refuse = partial(_refuse, shell, complain)
    for kind in (HTTPException, RequestValidationError, FixableError, OSError, Exception):
        app.add_exception_handler(kind, refuse)
    app.add_exception_handler(ClientDisconnect, lambda *_: Response(status_code=400))
    return Guard(app, access, refuse)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    anyio.to_thread.current_default_thread_limiter().total_tokens = THREADS
    beat = asyncio.create_task(app.state.pulse.beat())
    # The first look at a large queue takes seconds: begin before the first request.
    threading.Thread(target=app.state.shell.page_context, daemon=True).start()
    yield
    beat.cancel()


def _add_site(app: FastAPI, settings: Settings, log: LogSink, complain: Callable[[str], None]) -> Site:
    with suppress(OSError):  # /readyz and the pages report it
        settings.queue_root.mkdir(parents=True, exist_ok=True)
    site = Site(settings, name=settings.git_worktree.name, log=log, complain=complain)
    app.state.open_site = lambda _name: site
    app.include_router(api.router, prefix="/api")
    app.include_router(api.folder_router, prefix="/api")
    app.include_router(api.live_router)
    app.include_router(pages.router, include_in_schema=False)
    return site


def _add_cluster(
    app: FastAPI, settings: Settings, access: Access, log: LogSink, complain: Callable[[str], None]
) -> "Cluster":
    from briter_worker.web import cluster as all_sites  # noqa: PLC0415 - needs the extra [postgres]

    def site_name(site: str = Path(max_length=100, description="The site's name.")) -> None:
        """Describe the parameter for OpenAPI; `current_site` reads it."""

    cluster = all_sites.Cluster(settings, log=log, complain=complain)
    access.find_api_token = cluster.find_api_token
    app.state.open_site = cluster.open_site
    named = [Depends(site_name)]
    app.include_router(all_sites.router)
    for each in (all_sites.site_router, api.router):
        app.include_router(each, prefix="/api/sites/{site}", dependencies=named)
    app.include_router(api.live_router, prefix="/sites/{site}", dependencies=named)
    app.include_router(pages.router, prefix="/sites/{site}", include_in_schema=False)
    return cluster


def _refuse(
    shell: "Site | Cluster", complain: Callable[[str], None], request: Request, error: Exception
) -> Response:
    """Return a page for a browser, a problem document for a program."""
    problem = _problem_of(error)
    if problem.status_code == _UNEXPECTED:
        complain(f"{request.method} {request.url.path}: {type(error).__name__}: {error}")
    if not wants_page(request.url.path, request.headers):
        return problem.response()
    context = getattr(request.state, "site", shell).page_context() | {
        "text": problem.detail,
        "fix": problem.fix,
    }
    # Without the visitor, the page shows nothing of the site: this may be a stranger.
    status, hidden = problem.status_code, {"visit": None, "told": "", "here": ""}
    answer = page(request, context | {"code": status}, "error.html", status=status, **hidden)
    answer.headers.update(problem.headers or {})
    return answer


def _problem_of(error: Exception) -> ProblemError:
    match error:
        case ProblemError():
            return error
        case HTTPException():
            text = "this page does not exist" if error.status_code == 404 else str(error.detail)  # noqa: PLR2004
            return ProblemError(error.status_code, text, headers=error.headers)
        case RequestValidationError():
            wrong = [_describe_refusal(each) for each in error.errors()]
            text = "; ".join(f"{each['where']}: {each['what']}" for each in wrong)
            return ProblemError(422, text, errors=wrong)
    status = next((status for kind, status in _STATUS.items() if isinstance(error, kind)), _UNEXPECTED)
    if status == _UNEXPECTED:
        return ProblemError(status, "The dashboard failed to answer; its log has the error")
    return ProblemError(status, *describe(error))


def _describe_refusal(error: Any) -> dict[str, str]:  # noqa: ANN401
    """Return where a value was, and what is wrong with it."""
    source, *names = map(str, error["loc"])
    if error["type"] == "json_invalid":  # the place is the number of a character
        return {"where": source, "what": f"is no JSON: {error['ctx']['error']}, at character {names[0]}"}
    if source == "header":  # with a colon, the name of a key looks like one with its value
        return {"where": source, "what": f"{names[0]} {refusal_text(error)}"}
    return {"where": ".".join([source, *names]), "what": refusal_text(error)}


class Protocol(H11Protocol):
    """HTTP/1.1 that closes a connection of a slow visitor, or of a greedy address."""

    _deadline: asyncio.TimerHandle | None = None
    _chunks = _bytes = 0
    """Parts of the request's body, and their length."""
    _stall: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect the first request."""
        super().connection_made(transport)
        self.conn.next_event = partial(self._count_chunk, self.conn.next_event)  # type: ignore[method-assign]
        self._expect_request(HEADERS_S)
        if len(self.connections) > MAX_CONNECTIONS_PER_ADDRESS and self._is_one_too_many():
            transport.close()

    def _count_chunk(self, read: Callable[[], Any]) -> Any:  # noqa: ANN401 - an event of h11
        """Return the next event of the request, whoever sends it. Raises RemoteProtocolError.

        A quarter of a megabyte is read at once, and is parsed before any other request: as chunks of a byte
        each, for three seconds.
        """
        event = read()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks += 1
            self._bytes += len(event.data)
            if self._chunks > MAX_SMALL_CHUNKS and self._bytes < SMALL_CHUNK * self._chunks:
                raise h11.RemoteProtocolError("the chunks of the body are too small")
        return event

    def _is_one_too_many(self) -> bool:
        # Only behind a proxy, uvicorn wraps the application in what knows the trusted ones.
        trusted = getattr(self.config.loaded_app, "trusted_hosts", ())
        if self.client is None or self.client[0] in trusted:
            return False
        others = [each for each in self.connections if isinstance(each, Protocol)]
        addresses = [client_address({"client": each.client}) for each in others]
        return addresses.count(client_address({"client": self.client})) > MAX_CONNECTIONS_PER_ADDRESS

    def on_response_complete(self) -> None:
        """Expect the next request."""
        super().on_response_complete()
        self._expect_request(_KEEP_ALIVE_S + HEADERS_S)

    def pause_writing(self) -> None:
        """Expect the visitor to read on."""
        super().pause_writing()
        self._stall = self.loop.call_later(READ_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Write on."""
        super().resume_writing()
        self._stall.cancel()

    def _expect_request(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()  # to close would wait until the last answer is read


def serve(
    settings: Settings,
    *,
    host: str,
    port: int,
    log: LogSink,
    complain: Callable[[str], None],
    say: Callable[[str], None],
) -> int:
    """Serve the dashboard until SIGTERM; return the exit status. `say` prints the addresses.

    Raises UsageError and DeclinedError.
    """
    listener = _listen(host, port)
    # A reader that disconnects is no event; the application reports its errors itself.
    for name in ("uvicorn", "uvicorn.error", "asyncio", "sse_starlette"):
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
    sys.setswitchinterval(_SWITCH_S)
    access = Access(read_token(settings), pull_secret=settings.pull_secret)
    application = create_application(settings, access, log=log, complain=complain)
    config = uvicorn.Config(
        application,
        http=Protocol,
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=_SHUTDOWN_S,
        timeout_keep_alive=_KEEP_ALIVE_S,
        # Explicitly, because uvicorn believes every proxy on loopback by default.
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=list(settings.trusted_proxies),
    )
    server = uvicorn.Server(config)

    def stop(_number: int, _frame: object) -> None:
        if not server.should_exit:
            # Threads wait for git, for a disk or for Postgres, and Python waits for threads.
            ending = threading.Timer(_END_S, os._exit, [0])
            ending.daemon = True
            ending.start()
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        # Before uvicorn handles the signal, and when uvicorn raises it again after the shutdown.
        signal.signal(number, stop)
    address = _url(listener)
    say(f"the dashboard is at {address}")
    if not settings.dashboard_token:
        key = access.create_link_key()
        say(f"sign in, once and within 15 minutes, at {address}{SIGN_IN}?key={key}")
    server.run(sockets=[listener])
    return 0


def _url(listener: socket.socket) -> str:
    name, port = listener.getsockname()[:2]
    if name in {"0.0.0.0", "::"}:  # noqa: S104 - no address to visit
        name = "localhost"
    return f"http://{f'[{name}]' if ':' in name else name}:{port}"


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        # Opened again: only then it has the protocol's number. Without that, asyncio does not turn off
        # Nagle's algorithm, and each answer waits 40 ms for an acknowledgement.
        return socket.socket(fileno=listener.detach())
    except OSError as error:
        fix = {
            errno.EADDRINUSE: "end the program that listens there, or choose another --port",
            errno.EACCES: "choose a --port of 1024 or above",
        }.get(error.errno or 0, "choose an address of this machine as --host")
        message = f"the dashboard cannot listen on {host} port {port}: {error.strerror or error}"
        raise DeclinedError(message, fix) from None
