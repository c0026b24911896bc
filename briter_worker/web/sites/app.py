"""The application of a cluster: one door, the page of all sites, and behind it each site's own application.

`/sites/NAME/…` are the pages of a site, `/api/sites/NAME/…` is its API: the same as beside a folder.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio.to_thread
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.responses import RedirectResponse

from briter_worker.cluster.sites import SiteError, UnknownSiteError
from briter_worker.errors import UsageError, explained
from briter_worker.queues.postgres.tokens import SiteMissingError
from briter_worker.web import api as one_site
from briter_worker.web import door
from briter_worker.web import pages as pages_of_one
from briter_worker.web.app import THREADS, new_app, static
from briter_worker.web.problems import problem
from briter_worker.web.rendering import error_page
from briter_worker.web.security import Door, Guard, wants_page
from briter_worker.web.sites import api, pages
from briter_worker.web.sites.dashboards import Dashboards
from briter_worker.web.sites.overview import AllSites
from briter_worker.wiring import open_database

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import Response

    from briter_worker.cluster.telling import Log
    from briter_worker.queues.postgres.database import Database
    from briter_worker.settings import Settings
    from briter_worker.web.dashboard import Dashboard

_SITE = re.compile(r"/(?P<api>api/)?sites/(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,99})(?P<rest>/.*)?", re.DOTALL)
MOST_UPLOAD = 48 << 20
"""As base64, and with everything else that a request says."""


class ClusterApplication:
    """The ASGI application of a cluster's dashboard."""

    def __init__(
        self,
        settings: Settings,
        *,
        host: str,
        log: Log,
        complain: Callable[[str], None],
        metrics: Callable[[Database], Callable[[], tuple[bytes, str]]] | None = None,
    ) -> None:
        database = open_database(settings)
        self._everything = AllSites(settings, database)
        self._dashboards = Dashboards(settings, database, log, complain)
        self._site = _site_app()
        self._whole = self._whole_app(None if metrics is None else metrics(database))
        self.guard = Guard(
            self._route,
            Door(settings.dashboard_token, host, _most_bytes),
            complain,
            error_page(self._everything),
        )
        self._everything.guard = self.guard

    def leave(self) -> None:
        """Have the readers that stay leave."""
        self._everything.hub.close()
        self._dashboards.leave()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - ASGI's own
        """Answer one request."""
        await self.guard(scope, receive, send)

    def _whole_app(self, metrics: Callable[[], tuple[bytes, str]] | None) -> FastAPI:
        everything = self._everything

        @asynccontextmanager
        async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
            anyio.to_thread.current_default_thread_limiter().total_tokens = THREADS
            everything.open(asyncio.get_running_loop())
            try:
                yield
            finally:
                everything.close()
                self._dashboards.close()

        app = new_app(lambda _request: everything, lifespan=lifespan)
        app.state.dashboard = everything
        app.state.metrics = metrics
        app.include_router(api.router)
        app.include_router(pages.router, include_in_schema=False)
        app.include_router(door.router, include_in_schema=False)
        app.mount("/static", static(), name="static")
        own = app.openapi

        def openapi() -> dict[str, Any]:
            if app.openapi_schema is None or "/api/sites/{site}/jobs" not in app.openapi_schema["paths"]:
                app.openapi_schema = api.described(own(), self._site.openapi())
            return app.openapi_schema

        app.openapi = openapi  # type: ignore[method-assign]
        return app

    async def _route(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - ASGI's own
        found = _SITE.fullmatch(scope["path"]) if scope["type"] == "http" else None
        if found is None:
            await self._whole(scope, receive, send)
            return
        name, rest = found["name"], found["rest"]
        dashboard, refusal = await self._dashboard(name, scope)
        if dashboard is None or refusal is not None:
            assert refusal is not None  # noqa: S101 - one of the two
            await refusal(scope, receive, send)
            return
        if found["api"]:
            rest = f"/api{'/status' if rest in (None, '/') else rest}"
        elif rest is None:
            await RedirectResponse(f"/sites/{name}/", status_code=308)(scope, receive, send)
            return
        root = f"/sites/{name}"
        path = root + rest
        state = {**scope.get("state", {}), "dashboard": dashboard}
        inner = {**scope, "root_path": root, "path": path, "raw_path": path.encode(), "state": state}
        await self._site(inner, receive, send)

    async def _dashboard(self, name: str, scope: Any) -> tuple[Dashboard | None, Response | None]:  # noqa: ANN401
        dashboard = self._dashboards.known(name)
        if dashboard is not None:
            return dashboard, None
        try:
            loop = asyncio.get_running_loop()
            return await run_in_threadpool(self._dashboards.get, name, loop), None
        except UnknownSiteError as error:
            status, text = 404, str(error)
        except (SiteError, UsageError) as error:
            status, text = 409, str(error)
        except OSError as error:
            status, text = 503, explained(error)
        if wants_page(scope["path"], Headers(scope=scope)):
            return None, error_page(self._everything)(status, text)
        return None, problem(status, text)


def _site_app() -> FastAPI:
    """What each site has: one application for all of them, told with each request whose it is."""

    def dashboard_of(request: Request) -> Dashboard:
        found: Dashboard = request.state.dashboard
        return found

    app = new_app(dashboard_of, openapi_url=None)
    # The first that fits answers; the folder's way to enqueue is not described, either.
    app.include_router(api.site_router)
    for route in one_site.router.routes:
        if not (route.path == "/api/jobs" and "POST" in route.methods):  # type: ignore[attr-defined]
            app.router.routes.append(route)
    app.include_router(pages_of_one.router, include_in_schema=False)

    async def on_missing(_request: Request, error: Exception) -> Response:
        return problem(404, str(error))

    app.add_exception_handler(SiteMissingError, on_missing)
    return app


def _most_bytes(path: str) -> int | None:
    """Where more may be sent than elsewhere: a job brings its files along."""
    found = _SITE.fullmatch(path)
    return MOST_UPLOAD if found is not None and found["api"] and found["rest"] == "/jobs" else None
