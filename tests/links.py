"""A link with a round-trip time, in front of a server on loopback. It counts; it can be frozen and cut."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

HOST = "127.0.0.1"
_PIECE = 1 << 16


class Link:
    """A TCP proxy. Bytes arrive `delay` seconds after they were sent, in both directions."""

    def __init__(self, target: int, delay: float) -> None:
        self.target = target
        self.delay = delay
        self.port = 0
        self.connections = 0
        """Connections opened so far."""
        self.round_trips = 0
        """How often the server answered something that the client had sent, the handshake included."""
        self.received = 0
        """Bytes that came from the client."""
        self.open: set[_Connection] = set()
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None

    def freeze(self) -> None:
        """Let nothing pass on the connections that are open now, as a router does that forgot them."""
        for each in [*self.open]:
            each.freeze()

    def cut(self) -> None:
        """End the connections that are open now, as a host does that starts again."""
        for each in [*self.open]:
            self._loop.call_soon_threadsafe(each.cut)

    def count(self) -> tuple[int, int]:
        """Return connections and round trips since the last call."""
        counted = self.connections, self.round_trips
        self.connections = self.round_trips = 0
        return counted

    def serve(self) -> None:
        """Run the proxy in this thread until `close`."""
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._handle, HOST, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for each in [*self.open]:
            each.cut()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.round_trips += 1
        await asyncio.sleep(2 * self.delay)  # the handshake
        try:
            there = await asyncio.open_connection(HOST, self.target)
        except OSError:
            writer.transport.abort()
            return
        connection = _Connection(self, (reader, writer), there)
        self.open.add(connection)
        try:
            await connection.run()
        finally:
            self.open.discard(connection)
            for each in (writer, there[1]):
                each.close()


class _Connection:
    def __init__(
        self,
        link: Link,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        server: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self._link = link
        self._client = client
        self._server = server
        self._is_frozen = False
        self._is_asked = False

    def freeze(self) -> None:
        self._is_frozen = True

    def cut(self) -> None:
        for _, writer in (self._client, self._server):
            writer.transport.abort()

    async def run(self) -> None:
        there = self._pass_on(self._client[0], self._server[1], is_client=True)
        back = self._pass_on(self._server[0], self._client[1], is_client=False)
        await asyncio.gather(there, back, return_exceptions=True)

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_client: bool
    ) -> None:
        sent: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        arriving = asyncio.create_task(self._deliver(sent, writer))
        clock = asyncio.get_running_loop().time
        with suppress(OSError):
            while data := await reader.read(_PIECE):
                if is_client:
                    self._link.received += len(data)
                else:
                    self._link.round_trips += self._is_asked
                self._is_asked = is_client
                sent.put_nowait((clock() + self._link.delay, data))
        sent.put_nowait((clock() + self._link.delay, b""))
        await arriving

    async def _deliver(self, sent: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            at, data = await sent.get()
            await asyncio.sleep(max(0.0, at - clock()))
            if not data and not self._is_frozen:
                with suppress(OSError):
                    writer.write_eof()
            if not data:
                return
            if self._is_frozen:
                continue
            writer.write(data)
            with suppress(OSError):
                await writer.drain()


@contextmanager
def link(target: int, delay: float = 0.0) -> Iterator[Link]:
    """A link to a port of loopback, with so many seconds one way."""
    made = Link(target, delay)
    thread = threading.Thread(target=made.serve)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(made.start(), made._loop).result()  # noqa: SLF001
        yield made
    finally:
        asyncio.run_coroutine_threadsafe(made.stop(), made._loop).result()  # noqa: SLF001
        made._loop.call_soon_threadsafe(made._loop.stop)  # noqa: SLF001
        thread.join()
        made._loop.close()  # noqa: SLF001
