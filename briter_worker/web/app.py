"""The application, put together: rooms, door, static files, and what is said when something goes wrong."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio.to_thread
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from briter_worker.errors import explained
from briter_worker.sinks.history.reading import HistoryUnreadableError
from briter_worker.web import api, door, pages
from briter_worker.web.dashboard import Dashboard, of_folder
from briter_worker.web.problems import ProblemError, problem
from briter_worker.web.security import Door, Guard, wants_page

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.requests import Request
    from starlette.responses import Response

    from briter_worker.ports import EventSink
    from briter_worker.settings import Settings
    from briter_worker.web.dashboard import Hook
    from briter_worker.web.rendering import Shell

THREADS = 8
"""Requests that may read the disk at once."""


class Application:
    """The ASGI application of one site's dashboard."""

    def __init__(
        self,
        settings: Settings,
        *,
        host: str,
        log: EventSink,
        complain: Callable[[str], None],
        metrics: Hook | None = None,
    ) -> None:
        self.dashboard = Dashboard(settings, of_folder(settings, log), log, complain, metrics)
        app = _fastapi(self.dashboard)
        self.guard = Guard(
            app, Door(settings.dashboard_token, host), complain, pages.error_page(self.dashboard)
        )
        self.dashboard.guard = self.guard

    def leave(self) -> None:
        """Have the readers that stay leave."""
        self.dashboard.hub.close()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - ASGI's own
        """Answer one request."""
        await self.guard(scope, receive, send)


def _fastapi(dashboard: Dashboard) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        anyio.to_thread.current_default_thread_limiter().total_tokens = THREADS
        dashboard.open(asyncio.get_running_loop())
        try:
            yield
        finally:
            dashboard.close()

    app = new_app(lambda _request: dashboard, lifespan=lifespan)
    app.state.dashboard = dashboard
    app.include_router(api.router)
    app.include_router(pages.router, include_in_schema=False)
    app.include_router(door.router, include_in_schema=False)
    app.mount("/static", static(), name="static")
    return app


def static() -> StaticFiles:
    """What pages load: style, script and icon."""
    return StaticFiles(directory=Path(__file__).parent / "static")


def new_app(shell_of: Callable[[Request], Shell], **options: Any) -> FastAPI:  # noqa: ANN401 - FastAPI's own
    """An application without rooms, which says what goes wrong as a page or as a problem."""
    app = FastAPI(
        title="Briter Worker",
        version="1",
        description="Publish posts, see what became of them, and steer. Errors are problem+json (RFC 9457). "
        "Programs send BRITER_DASHBOARD_TOKEN as `Authorization: Bearer`.",
        docs_url=None,  # its scripts would come from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        **options,
    )

    def refuse(
        request: Request, status: int, text: str, headers: dict[str, str] | None = None, **more: object
    ) -> Response:
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        if wants_page(path, request.headers):
            answer = pages.error_page(shell_of(request))(status, text)
            answer.headers.update(headers or {})
            return answer
        return problem(status, text, headers=headers, **more)

    async def on_problem(request: Request, error: Exception) -> Response:
        assert isinstance(error, ProblemError)  # noqa: S101 - registered for it
        return refuse(request, error.status, error.detail, error.headers, **error.more)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101 - as above
        text = "there is nothing here" if error.status_code == 404 else str(error.detail)  # noqa: PLR2004
        return refuse(request, error.status_code, text, dict(error.headers or {}))

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)  # noqa: S101 - as above
        wrong = [
            {"where": ".".join(str(part) for part in each["loc"]), "what": each["msg"]}
            for each in error.errors()
        ]
        text = "; ".join(f"{each['where']}: {each['what']}" for each in wrong)
        return refuse(request, 422, text, errors=wrong)

    async def on_unreadable(request: Request, error: Exception) -> Response:
        return refuse(request, 503, str(error))

    async def on_disk(request: Request, error: Exception) -> Response:
        assert isinstance(error, OSError)  # noqa: S101 - as above
        return refuse(request, 503, explained(error))

    app.add_exception_handler(ProblemError, on_problem)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HistoryUnreadableError, on_unreadable)
    app.add_exception_handler(OSError, on_disk)
    return app
