"""A real receiver of webhooks: answers each POST as the test says, and records it."""

from __future__ import annotations

import ssl
import threading
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass(frozen=True)
class Received:
    """One POST."""

    path: str
    headers: dict[str, str]
    body: str


@dataclass(frozen=True)
class Reply:
    """What to answer."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    stall: threading.Event | None = None
    """Answer when it is set, or when the receiver ends."""
    drip: bool = False
    """Send a header that has no end, a byte at a time."""


class Receiver:
    """Answers with `replies` in turn, then with 200."""

    def __init__(self, server: ThreadingHTTPServer, scheme: str) -> None:
        self.scheme = scheme
        self.port = server.server_port
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        self.received: list[Received] = []
        self.replies: deque[Reply] = deque()
        self.ended = threading.Event()
        self._guard = threading.Lock()

    def take(self, received: Received) -> Reply:
        """Note it; what to answer."""
        with self._guard:
            self.received.append(received)
            return self.replies.popleft() if self.replies else Reply()

    def paths(self) -> list[str]:
        """Where the POSTs went."""
        return [each.path for each in self.received]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    receiver: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        headers = {name.lower(): value for name, value in self.headers.items()}
        reply = self.receiver.take(Received(self.path, headers, body))
        if reply.stall is not None:
            while not (reply.stall.wait(0.05) or self.receiver.ended.is_set()):
                pass
        if reply.drip:
            self._drip()
            return
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        self.wfile.write(reply.body)

    def _drip(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Endless: ")
        while not self.receiver.ended.wait(0.02):
            self.wfile.write(b"a")

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:
            self.close_connection = True  # the sender has had enough

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # As many as may try at once.
    request_queue_size = 64

    def handle_error(self, *_: object) -> None:
        """A sender that goes away is no mistake of ours."""


@contextmanager
def receiving(certificate: Path | None = None) -> Iterator[Receiver]:
    """A receiver on this machine; by TLS with a certificate."""
    handler = type("Handler", (_Handler,), {})
    server = _Server(("127.0.0.1", 0), handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    receiver = Receiver(server, "http" if certificate is None else "https")
    handler.receiver = receiver  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()
