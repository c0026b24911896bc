"""A network that falls silent: it acknowledges everything, and answers nothing."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class FreezingProxy:
    """Passes connections on to a port of this machine, until `freeze`."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=50)
        self.port = int(self._listener.getsockname()[1])
        self._is_frozen = threading.Event()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def freeze(self) -> None:
        """From now on, bytes are taken and go nowhere, also those of new connections."""
        self._is_frozen.set()

    def thaw(self) -> None:
        """Pass on what comes from now on. What was lost stays lost."""
        self._is_frozen.clear()

    def serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._sockets.append(client)
                server = socket.create_connection(("127.0.0.1", self._target))
                self._sockets.append(server)
                for source, sink in ((client, server), (server, client)):
                    thread = threading.Thread(target=self._pass_on, args=(source, sink))
                    thread.start()
                    self._threads.append(thread)

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                if not self._is_frozen.is_set():
                    sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def stop(self) -> None:
        """Take no more connections."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def close(self) -> None:
        """Cut all connections."""
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()


@contextmanager
def freezing(url: str, port: int) -> Iterator[tuple[FreezingProxy, str]]:
    """Yield a proxy before the server at this port, and the URL that goes through it."""
    proxy = FreezingProxy(port)
    thread = threading.Thread(target=proxy.serve)
    thread.start()
    try:
        yield proxy, url.replace(f":{port}/", f":{proxy.port}/")
    finally:
        proxy.stop()
        thread.join()
        proxy.close()
