"""The application: one FastAPI for one site or for all sites of a cluster."""

from __future__ import annotations

import threading
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import anyio.to_thread
from fastapi import Depends, FastAPI, Path
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from briter_worker.errors import FixableError
from briter_worker.web import api, health, pages, sign_in
from briter_worker.web.access import Access
from briter_worker.web.problems import ProblemError, problem
from briter_worker.web.security import Guard, wants_page
from briter_worker.web.site import Site, explain
from briter_worker.web.templating import STATIC, error_page

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.requests import Request
    from starlette.responses import Response

    from briter_worker.settings import Settings
    from briter_worker.sinks.log import LogSink
    from briter_worker.web.cluster import Cluster

THREADS = 8
"""Requests that may read the disk or the database at once."""


class Application:
    """The ASGI application, with the guard around it."""

    def __init__(
        self,
        settings: Settings,
        *,
        token: str,
        log: LogSink,
        complain: Callable[[str], None],
    ) -> None:
        self.access = Access(token)
        self._root: Site | Cluster
        app = _new_app()
        if settings.database_url:
            self._root = _add_cluster(app, settings, log, complain)
        else:
            self._root = _add_site(app, settings, log, complain)
        app.include_router(health.router)
        app.include_router(sign_in.router, include_in_schema=False)
        app.mount("/static", StaticFiles(directory=STATIC), name="static")
        app.state.shell = self._root
        app.state.access = self.access
        app.state.metrics = health.open_metrics(self._root)
        self._guard = Guard(
            app,
            self.access,
            error_page=lambda status, text: error_page(self._root, status, text),
            complain=complain,
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - ASGI's own
        """Answer one request."""
        await self._guard(scope, receive, send)


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
    from briter_worker.web import overview  # noqa: PLC0415 - needs the extra [postgres]
    from briter_worker.web.cluster import Cluster  # noqa: PLC0415 - as above

    def site_name(site: str = Path(max_length=100, description="The site's name.")) -> None:
        """Describe the parameter for OpenAPI; `current_site` reads it."""

    cluster = Cluster(settings, log=log, complain=complain)
    app.state.open_site = cluster.open_site
    named = [Depends(site_name)]
    app.include_router(overview.router)
    for router in (overview.site_router, api.router):
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
