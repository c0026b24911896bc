"""The server's process: listens, serves until SIGTERM, and then ends at once."""

from __future__ import annotations

import errno
import logging
import signal
import socket
import sys
from typing import TYPE_CHECKING

import uvicorn

from briter_worker.errors import DeclinedError
from briter_worker.web.app import Application
from briter_worker.web.security import SIGN_IN
from briter_worker.web.token import read_token

if TYPE_CHECKING:
    from collections.abc import Callable

    from briter_worker.settings import Settings
    from briter_worker.sinks.log import LogSink

_SHUTDOWN_S = 1
_SWITCH_S = 0.0005
"""A request waits so long for a thread that computes; Python's 5 ms, several times, is a slow page."""
_BACKLOG = 1024


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
    application = Application(settings, token=read_token(settings), log=log, complain=complain)
    server = uvicorn.Server(_configure(application, settings))

    def stop(_number: int, _frame: object) -> None:
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        # Before uvicorn handles the signal, and when uvicorn raises it again after the shutdown.
        signal.signal(number, stop)
    address = _url(listener)
    say(f"the dashboard is at {address}")
    if not settings.dashboard_token:
        key = application.access.create_link_key()
        say(f"sign in, once and within 15 minutes, at {address}{SIGN_IN}?key={key}")
    server.run(sockets=[listener])
    return 0


def _configure(application: Application, settings: Settings) -> uvicorn.Config:
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
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # With the protocol's number: without it, asyncio does not turn off Nagle's algorithm, and each answer
        # waits 40 ms for an acknowledgement.
        listener = socket.socket(family, kind, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        fix = {
            errno.EADDRINUSE: "end the program that listens there, or choose another --port",
            errno.EACCES: "choose a --port of 1024 or above",
        }.get(error.errno or 0, "choose an address of this machine as --host")
        message = f"the dashboard cannot listen on {host} port {port}: {error.strerror or error}"
        raise DeclinedError(message, fix) from None
    return listener
