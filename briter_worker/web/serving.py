"""The server's process: opens the port, serves, and ends at once when it is told to."""

from __future__ import annotations

import errno
import logging
import resource
import signal
import socket
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

import uvicorn

from briter_worker.errors import UsageError
from briter_worker.web.live import MOST_READERS
from briter_worker.web.security import is_loopback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from briter_worker.settings import Settings

_GRACE = 1
_GONE_MS = 60_000
"""A reader whose machine takes nothing for so long is gone, whatever its connection says."""
_SWITCH = 0.0005
"""A request waits so long for a thread that computes; several times Python's 5 ms is a slow page."""
_BACKLOG = 1024
_FILES = MOST_READERS + 500
"""Each connection is an open file; a shell and a service begin with 1,024, and may have far more."""


class PortTakenError(Exception):
    """Nobody can listen there; the text says why, and what to do."""


class Served(Protocol):
    """An ASGI application with readers that stay."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - ASGI's own
        """Answer one request."""
        ...

    def leave(self) -> None:
        """Have the readers leave."""
        ...


class _Server(uvicorn.Server):
    """Ends by signal with exit status 0, and has the readers that stay leave first."""

    def __init__(self, config: uvicorn.Config, application: Served) -> None:
        super().__init__(config)
        self._application = application

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        def end(number: int, frame: FrameType | None) -> None:
            self._application.leave()
            self.handle_exit(number, frame)

        before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(
    settings: Settings,
    application_of: Callable[[str], Served],
    *,
    host: str,
    port: int,
    ready: Callable[[str], None],
) -> None:
    """Serve until SIGTERM what is made for that host. `ready` is given the address once readers can come.

    Raises UsageError when everybody could come in, and PortTakenError.
    """
    if not is_loopback(host) and not settings.dashboard_token:
        raise UsageError(
            f"{host} can be reached from other machines, so the dashboard needs a token. "
            "Fix: set BRITER_DASHBOARD_TOKEN (openssl rand -hex 32 makes one), or listen on 127.0.0.1"
        )
    listener = _listen(host, port)
    _allow_files(_FILES)
    # What these would say of a reader that left is nobody's business; mistakes are told by the application.
    for name in ("uvicorn", "uvicorn.error", "asyncio", "sse_starlette"):
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
    sys.setswitchinterval(_SWITCH)
    application = application_of(host)
    config = uvicorn.Config(
        application,
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=True,
        lifespan="on",
        ws="none",
        timeout_graceful_shutdown=_GRACE,
        timeout_keep_alive=30,
    )
    name, bound = listener.getsockname()[:2]
    ready(f"http://{f'[{name}]' if ':' in name else name}:{bound}")
    with suppress(KeyboardInterrupt):
        _Server(config, application).run(sockets=[listener])


def _allow_files(wanted: int) -> None:
    """Else many readers would leave none for the queue and the history."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (wanted if hard == unlimited else min(wanted, hard), hard)
            )


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # With the protocol's number: without it, asyncio does not turn off Nagle's algorithm, and each answer
        # waits 40 ms for an acknowledgement.
        listener = socket.socket(family, kind, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Connections have what the listener has.
            with suppress(OSError, AttributeError):
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GONE_MS)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        fix = {
            errno.EADDRINUSE: "end what listens there, or choose another --port",
            errno.EACCES: "a port below 1024 needs rights; choose another --port",
        }.get(error.errno or 0, "--host is an address of this machine")
        text = f"cannot listen on {host} port {port}: {error.strerror or error}. Fix: {fix}"
        raise PortTakenError(text) from None
    return listener
