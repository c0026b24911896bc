"""The live stream: what happens, sent to everybody who stays. One text is made for all of them.

A reader gets a `snapshot`, then every moment of the history with its id, and `status` whenever the site's
standing changes. One that comes back says what it saw last, and gets what it missed. One that does not read
is dropped: nobody waits for it, and it never holds more than its queue.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from sse_starlette import EventSourceResponse, ServerSentEvent

from briter_worker.job import format_time
from briter_worker.sinks.history.reading import HistoryUnreadableError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from briter_worker.sinks.history.reading import Moment

PING = 15
SEND_TIMEOUT = 10.0
RECONNECT_MS = 2000
MOST_READERS = 2000
_QUEUE = 64
_FOR_EACH_READER = 0.0005
_MOST_GATHERED = 0.5
_MOST_MISSED = 5000
_PAGE = 500

Missed = tuple[int, int, list["Moment"]]
"""The newest and the oldest moment that there are, and those that a reader missed."""


def event(name: str, data: Any, number: int | None = None) -> bytes:  # noqa: ANN401 - any JSON value
    """One event, as it is sent."""
    text = json.dumps(data, separators=(",", ":"))
    shown = ServerSentEvent(text, event=name, id=None if number is None else str(number), sep="\n")
    return shown.encode()


def moment_event(moment: Moment) -> bytes:
    """A moment of the history, under its own name."""
    data = {"id": moment.id, "at": format_time(moment.at), **moment.data, "event": moment.event}
    return event(moment.event, data, moment.id)


class Reader:
    """One connection. What does not fit into its queue ends it."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue(_QUEUE)
        self.dropped = False

    def offer(self, chunk: bytes | None) -> bool:
        """Whether it still keeps up."""
        try:
            self._queue.put_nowait(chunk)
        except asyncio.QueueFull:
            self.dropped = True
            return False
        return True

    async def chunks(self) -> AsyncIterator[bytes]:
        """What it is to be sent, until there is no more."""
        while not self.dropped:
            chunk = await self._queue.get()
            if chunk is None:
                return
            yield chunk


class Hub:
    """All readers. `publish` may be called from any thread, all else from the loop's."""

    def __init__(self, ping: float = PING) -> None:
        self._ping = ping
        self._readers: set[Reader] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._gathered: list[bytes] = []
        self._telling: asyncio.TimerHandle | None = None
        self.cursor = 0
        """The newest moment that was sent to readers."""
        self._next = 0

    def open(self, loop: asyncio.AbstractEventLoop, cursor: int) -> None:
        """From now on there may be readers."""
        self._loop = loop
        self.cursor = self._next = cursor

    def __len__(self) -> int:
        return len(self._readers)

    def publish(self, moments: Sequence[Moment], status: dict[str, Any] | None) -> None:
        """Tell everybody."""
        parts = [moment_event(moment) for moment in moments]
        if status is not None:
            parts.append(event("status", status))
        self._soon(b"".join(parts), moments[-1].id if moments else None)

    def restart(self, cursor: int) -> None:
        """The history began anew: everybody is to come again, and to be given a snapshot."""
        self._soon(None, cursor)

    def _soon(self, chunk: bytes | None, cursor: int | None) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._gather, self._loop, chunk, cursor)

    def _gather(self, loop: asyncio.AbstractEventLoop, chunk: bytes | None, cursor: int | None) -> None:
        """Tell it in a moment, with what comes meanwhile: later, the more readers there are.

        To tell many takes the processor from the publication that it is about, and that makes six moments.
        """
        if cursor is not None:
            self._next = cursor
        if chunk is None:
            self._tell()
            self._fan_out(None)
            return
        self._gathered.append(chunk)
        if self._telling is None:
            wait = min(len(self._readers) * _FOR_EACH_READER, _MOST_GATHERED)
            self._telling = loop.call_later(wait, self._tell)

    def _tell(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        chunk = b"".join(self._gathered)
        self._gathered.clear()
        self.cursor = self._next
        if chunk:
            self._fan_out(chunk)

    def _fan_out(self, chunk: bytes | None) -> None:
        for reader in [reader for reader in self._readers if not reader.offer(chunk)]:
            self._readers.discard(reader)

    def close(self) -> None:
        """Every reader's stream ends."""
        self._closed = True
        self._tell()
        for reader in self._readers:
            if not reader.offer(None):
                reader.dropped = True

    def is_full(self) -> bool:
        """Whether nobody else can be let in."""
        return self._closed or len(self._readers) >= MOST_READERS

    def stream(
        self,
        seen: int | None,
        missed: Callable[[int, int], Awaitable[Missed]],
        snapshot: Callable[[], dict[str, Any]],
        status: Callable[[], dict[str, Any]],
    ) -> EventSourceResponse:
        """The answer for a reader who has seen everything up to `seen`, or nothing."""
        return EventSourceResponse(
            self._chunks(seen, missed, snapshot, status),
            ping=self._ping,
            send_timeout=SEND_TIMEOUT,
            ping_message_factory=lambda: ServerSentEvent("{}", event="ping", sep="\n"),
        )

    async def _chunks(
        self,
        seen: int | None,
        missed: Callable[[int, int], Awaitable[Missed]],
        snapshot: Callable[[], dict[str, Any]],
        status: Callable[[], dict[str, Any]],
    ) -> AsyncIterator[bytes]:
        reader = Reader()
        # Before the past is read: what happens meanwhile waits in the reader's queue.
        cursor = self.cursor
        self._readers.add(reader)
        if self._closed:
            return
        try:
            yield f"retry: {RECONNECT_MS}\n\n".encode()
            caught_up = seen is not None
            if seen is not None:
                async for page in _missed_pages(seen, cursor, missed):
                    if page is None:
                        caught_up = False
                        break
                    yield page
            if caught_up:
                yield event("status", status())
            else:
                yield event("snapshot", {"latest": cursor, **snapshot()}, cursor)
            async for chunk in reader.chunks():
                yield chunk
        finally:
            self._readers.discard(reader)


async def _missed_pages(
    seen: int, cursor: int, missed: Callable[[int, int], Awaitable[Missed]]
) -> AsyncIterator[bytes | None]:
    """All moments after `seen`, up to `cursor`; None where they are not known any more.

    Page by page: after a restart, everybody comes back at once, and each would hold all of it.
    """
    if not 0 <= seen <= cursor or cursor - seen > _MOST_MISSED:
        yield None
        return
    while seen < cursor:
        try:
            _newest, oldest, moments = await missed(seen, _PAGE)
        except HistoryUnreadableError:
            yield None
            return
        if not moments or oldest > seen + 1:
            yield None
            return
        yield b"".join(moment_event(moment) for moment in moments if moment.id <= cursor)
        seen = moments[-1].id
