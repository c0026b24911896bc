"""A real receiver of webhooks: answers each POST as the test says, and records it."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from remotes import HOST, Exchange, http_server, says

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@dataclass(frozen=True)
class Received:
    """One POST."""

    path: str
    headers: dict[str, str]
    body: str


@dataclass
class Receiver:
    """Answers by `replies` in turn, then with 200."""

    scheme: str
    port: int = 0
    received: list[Received] = field(default_factory=list)
    replies: deque[Callable[[Exchange], None]] = field(default_factory=deque)
    _guard: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"{self.scheme}://{HOST}:{self.port}"

    def take(self, exchange: Exchange) -> None:
        headers = {name.lower(): value for name, value in exchange.handler.headers.items()}
        with self._guard:
            self.received.append(Received(exchange.handler.path, headers, exchange.body.decode()))
            reply = self.replies.popleft() if self.replies else says(200)
        reply(exchange)

    def paths(self) -> list[str]:
        return [each.path for each in self.received]


def drips(exchange: Exchange) -> None:
    """Send a header that has no end, a byte at a time."""
    exchange.handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Endless: ")
    while not exchange.over.wait(0.02):
        exchange.handler.wfile.write(b"a")


@contextmanager
def receiving(certificate: Path | None = None) -> Iterator[Receiver]:
    """A receiver on this machine; by TLS with a certificate."""
    receiver = Receiver("https" if certificate else "http")
    with http_server(receiver.take, certificate) as receiver.port:
        yield receiver
