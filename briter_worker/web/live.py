"""The live stream (server-sent events): a snapshot, then the events of the history and changes of the status.

One task per site reads for all readers, while there are any. A reader that reconnects with `Last-Event-ID`
gets the events that it missed if they are few, else a snapshot. A reader that does not keep up is dropped.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool

from briter_worker.job import format_time
from briter_worker.web.problems import ProblemError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from briter_worker.sinks.history import Moment

MAX_READERS = 500
MAX_MISSED = 500
PING_S = 15
_SEND_TIMEOUT_S = 10.0
_RECONNECT_MS = 2000
_POLL_S = 0.5
_MAX_WAITING_CHUNKS = 64


@dataclass(frozen=True, slots=True)
class News:
    """What a poll found: the status, and the moments after the given one (at most MAX_MISSED)."""

    status: dict[str, Any]
    latest: int = 0
    """Id of the newest moment."""
    moments: Sequence[Moment] = ()


def encode_event(name: str, data: Any, number: int | None = None) -> bytes:  # noqa: ANN401 - any JSON value
    """Return one server-sent event."""
    text = json.dumps(data, separators=(",", ":"))
    event_id = None if number is None else str(number)
    return ServerSentEvent(text, event=name, id=event_id, sep="\n").encode()


def _encode_moment(moment: Moment) -> bytes:
    data = {"id": moment.id, "at": format_time(moment.at), **moment.data, "event": moment.event}
    return encode_event(moment.event, data, moment.id)


class Feed:
    """The readers of one site. Use it in the event loop only.

    `read(after)` runs in a thread and raises nothing; `after` None asks for the status and `latest` alone.
    `snapshot` returns what a new reader gets first.
    """

    def __init__(
        self,
        read: Callable[[int | None], News],
        snapshot: Callable[[], dict[str, Any]],
        *,
        poll: float = _POLL_S,
        ping: float = PING_S,
    ) -> None:
        self._read = read
        self._snapshot = snapshot
        self._poll_seconds = poll
        self._ping = ping
        self._readers: set[asyncio.Queue[bytes | None]] = set()
        self._joining = asyncio.Lock()
        self._poller: asyncio.Task[None] | None = None
        self._cursor = 0
        """The newest moment that readers were sent."""
        self._status: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self._readers)

    def stream(self, last_event_id: str | None = None) -> EventSourceResponse:
        """Return the response for a new reader. Raises ProblemError when there are too many."""
        if len(self._readers) >= MAX_READERS:
            text = f"the live stream has {MAX_READERS} readers already"
            raise ProblemError(503, text, headers={"Retry-After": "30"})
        last = last_event_id if last_event_id and last_event_id.isascii() and last_event_id.isdigit() else ""
        return EventSourceResponse(
            self._chunks(int(last[:18]) if last else None),
            ping=self._ping,
            send_timeout=_SEND_TIMEOUT_S,
            ping_message_factory=lambda: ServerSentEvent("{}", event="ping", sep="\n"),
        )

    async def _chunks(self, last_id: int | None) -> AsyncIterator[bytes]:
        reader: asyncio.Queue[bytes | None] = asyncio.Queue(_MAX_WAITING_CHUNKS)
        cursor = await self._join(reader)
        try:
            yield f"retry: {_RECONNECT_MS}\n\n".encode()
            yield await self._first_chunk(last_id, cursor)
            while (chunk := await reader.get()) is not None:
                yield chunk
        finally:
            self._readers.discard(reader)

    async def _join(self, reader: asyncio.Queue[bytes | None]) -> int:
        """Add the reader, and return the moment after which its queue has everything."""
        async with self._joining:
            if self._poller is None or self._poller.done():
                news = await run_in_threadpool(self._read, None)
                self._cursor, self._status = news.latest, news.status
                self._poller = asyncio.create_task(self._poll())
            self._readers.add(reader)
            return self._cursor

    async def _first_chunk(self, last_id: int | None, cursor: int) -> bytes:
        if last_id is not None and 0 <= cursor - last_id <= MAX_MISSED:
            news = await run_in_threadpool(self._read, last_id)
            missed = [moment for moment in news.moments if moment.id <= cursor]
            if not missed or missed[0].id == last_id + 1:
                return b"".join([*map(_encode_moment, missed), encode_event("status", news.status)])
        return encode_event("snapshot", {**await run_in_threadpool(self._snapshot), "latest": cursor}, cursor)

    async def _poll(self) -> None:
        behind = False
        while self._readers:
            if not behind:
                await asyncio.sleep(self._poll_seconds)
            news = await run_in_threadpool(self._read, self._cursor)
            behind = len(news.moments) >= MAX_MISSED
            parts = list(map(_encode_moment, news.moments))
            if news.latest < self._cursor:  # the history was replaced
                parts = [encode_event("snapshot", {**news.status, "latest": news.latest}, news.latest)]
                self._cursor = news.latest
            elif news.moments:
                self._cursor = news.moments[-1].id
            if news.status != self._status:
                self._status = news.status
                parts.append(encode_event("status", news.status))
            if parts:
                self._send(b"".join(parts))

    def _send(self, chunk: bytes) -> None:
        for reader in list(self._readers):
            try:
                reader.put_nowait(chunk)
            except asyncio.QueueFull:
                self._drop(reader)

    def _drop(self, reader: asyncio.Queue[bytes | None]) -> None:
        self._readers.discard(reader)
        while not reader.empty():
            reader.get_nowait()
        reader.put_nowait(None)
