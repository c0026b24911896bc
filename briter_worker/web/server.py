"""The server: one application for one site or for all sites of a cluster, served until SIGTERM."""

from __future__ import annotations

import errno
import logging
import signal
import socket
import sys
import threading
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import anyio.to_thread
import uvicorn
from fastapi import Depends, FastAPI, Path
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from briter_worker.errors import DeclinedError, FixableError
from briter_worker.web import api, pages, root
from briter_worker.web.access import Access, read_token
from briter_worker.web.problems import ProblemError, explain, problem
from briter_worker.web.security import SIGN_IN, Guard, wants_page
from briter_worker.web.site import Site
from briter_worker.web.templating import STATIC, error_page

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.requests import Request
    from starlette.responses import Response

    from briter_worker.settings import Settings
    from briter_worker.sinks.log import LogSink
    from briter_worker.web.cluster import Cluster

_SHUTDOWN_S = 1
_SWITCH_S = 0.0005
"""A request waits so long for a thread that computes; Python's 5 ms, several times, is a slow page."""
_BACKLOG = 1024
THREADS = 8
"""Requests that may read the disk or the database at once."""


def create_application(
    settings: Settings, access: Access, *, log: LogSink, complain: Callable[[str], None]
) -> Guard:
    """Return the ASGI application, with the guard around it."""
    app = _new_app()
    add = _add_cluster if settings.database_url else _add_site
    shell = add(app, settings, log, complain)
    app.include_router(root.router)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.state.shell = shell
    app.state.access = access
    app.state.metrics = root.open_metrics(shell)
    return Guard(
        app, access, error_page=lambda status, text: error_page(shell, status, text), complain=complain
    )


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


def _add_cluster(app: FastAPI, settings: Settings, log: LogSink, complain: Callable[[str], None]) -> Cluster:
    from briter_worker.web import cluster as all_sites  # noqa: PLC0415 - needs the extra [postgres]

    def site_name(site: str = Path(max_length=100, description="The site's name.")) -> None:
        """Describe the parameter for OpenAPI; `current_site` reads it."""

    cluster = all_sites.Cluster(settings, log=log, complain=complain)
    app.state.open_site = cluster.open_site
    named = [Depends(site_name)]
    app.include_router(all_sites.router)
    for router in (all_sites.site_router, api.router):
        app.include_router(router, prefix="/api/sites/{site}", dependencies=named)
    app.include_router(api.live_router, prefix="/sites/{site}", dependencies=named)
    app.include_router(pages.router, prefix="/sites/{site}", include_in_schema=False)
    return cluster


def _new_app() -> FastAPI:
    """Return an application without routes, which answers errors with a page or a problem document."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        anyio.to_thread.current_default_thread_limiter().total_tokens = THREADS
        # The first look at a large queue takes seconds: begin before the first request.
        threading.Thread(target=app.state.shell.page_context, daemon=True).start()
        yield

    app = FastAPI(
        title="Briter Worker",
        version="1",
        description="Publish posts, follow and control them. Errors are problem documents (RFC 9457). "
        "Programs send the dashboard's token as `Authorization: Bearer`.",
        docs_url=None,  # loads scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    for kind in (ProblemError, HTTPException, RequestValidationError, FixableError, OSError):
        app.add_exception_handler(kind, _on_error)
    return app


def _on_error(request: Request, error: Exception) -> Response:
    status, text, fix, headers, more = 503, str(error), "", {}, {}
    match error:
        case ProblemError():
            status, fix, headers = error.status, error.fix, error.headers
        case HTTPException():
            status, headers = error.status_code, dict(error.headers or {})
            text = "this page does not exist" if status == 404 else str(error.detail)  # noqa: PLR2004
        case RequestValidationError():
            wrong = [
                {"where": ".".join(map(str, each["loc"])), "what": each["msg"]} for each in error.errors()
            ]
            status, more = 422, {"errors": wrong}
            text = "; ".join(f"{each['where']}: {each['what']}" for each in wrong)
        case FixableError():
            text, fix = error.message, error.fix
        case OSError():
            text, fix = explain(error)
    path = request.scope["path"]
    if wants_page(path, request.headers):
        shell = getattr(request.state, "site", None) or request.app.state.shell
        answer = error_page(shell, status, text, fix)
        answer.headers.update(headers)
        return answer
    return problem(status, text, fix, headers=headers, **more)


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
    access = Access(read_token(settings))
    application = create_application(settings, access, log=log, complain=complain)
    server = uvicorn.Server(_configure(application, settings))

    def stop(_number: int, _frame: object) -> None:
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


def _configure(application: Guard, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        application,
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=True,
        lifespan="on",
        ws="none",
        timeout_graceful_shutdown=_SHUTDOWN_S,
        timeout_keep_alive=30,
        # Explicitly, because uvicorn believes every proxy on loopback by default.
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=list(settings.trusted_proxies),
    )


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
