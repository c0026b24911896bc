"""The live stream (server-sent events): a snapshot, then the events of the history and changes of the status.

One task per site reads for all readers, while there are any, and keeps the latest events. A reader that
reconnects with `Last-Event-ID`, or is late, gets the events that it missed if they are kept, else a snapshot.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool

from briter_worker.job import format_time
from briter_worker.web.responses import ProblemError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from briter_worker.sinks.history import Moment

MAX_READERS = 500
MAX_READERS_PER_SESSION = 20
MAX_READERS_PER_ADDRESS = 100
MAX_KEPT = 2000
PING_S = 15
_SEND_TIMEOUT_S = 10.0
_RECONNECT_MS = 2000
_POLL_S = 0.5
_CHECK_S = 1.0
"""A stream ends this time after its session."""


@dataclass(frozen=True, slots=True)
class News:
    """The result of a poll: the status, and all moments after `since`, at most MAX_KEPT."""

    status: dict[str, Any]
    latest: int = 0
    """Id of the newest moment."""
    since: int = 0
    moments: Sequence[Moment] = ()


def _encode(name: str, data: dict[str, Any], number: int | None = None) -> bytes:
    event_id = None if number is None else str(number)
    text = json.dumps(data, separators=(",", ":"))
    return ServerSentEvent(text, event=name, id=event_id, sep="\n").encode()


def _encode_moment(moment: Moment) -> tuple[int, bytes]:
    data = {"id": moment.id, "at": format_time(moment.at), **moment.data, "event": moment.event}
    return moment.id, _encode(moment.event, data, moment.id)


class Feed:
    """The readers of one site. Use it in the event loop only.

    `read(after)` runs in a thread, returns what happened after that moment, and raises nothing.
    """

    def __init__(self, read: Callable[[int], News], *, poll: float = _POLL_S, ping: float = PING_S) -> None:
        self._read = read
        self._poll_seconds = poll
        self._ping = ping
        self._readers = 0
        self._shares: Counter[str] = Counter()
        """The number of readers of each address, and of each session."""
        self._joining = asyncio.Lock()
        self._poller: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._kept: list[tuple[int, bytes]] = []
        """Every moment after `_floor`, encoded."""
        self._floor = 0
        self._latest = 0
        self._status: dict[str, Any] = {}
        self._version = 0
        """Grows when the status changes."""

    def __len__(self) -> int:
        return self._readers

    def stream(
        self,
        last_event_id: str | None = None,
        *,
        address: str = "",
        session: str | None = None,
        is_open: Callable[[], Awaitable[bool]] | None = None,
    ) -> EventSourceResponse:
        """Return the response for a new reader, which ends when `is_open` returns False.

        Raises ProblemError when there are too many readers, or too many of this address or session.
        """
        shares = {address: MAX_READERS_PER_ADDRESS, **({session: MAX_READERS_PER_SESSION} if session else {})}
        full = [limit for share, limit in shares.items() if self._shares[share] >= limit]
        if full or len(self) >= MAX_READERS:
            text = f"the live stream has {full[0] if full else len(self)} readers already"
            raise ProblemError(503, text, headers={"Retry-After": "30"})
        last = last_event_id if last_event_id and last_event_id.isascii() and last_event_id.isdigit() else ""
        return EventSourceResponse(
            self._chunks(int(last[:18]) if last else -1, list(shares), is_open),
            ping=self._ping,
            send_timeout=_SEND_TIMEOUT_S,
            ping_message_factory=lambda: ServerSentEvent("{}", event="ping", sep="\n"),
        )

    async def _chunks(
        self, cursor: int, shares: Sequence[str], is_open: Callable[[], Awaitable[bool]] | None
    ) -> AsyncIterator[bytes]:
        self._readers += 1
        self._shares.update(shares)
        version = 0
        try:
            await self._start()
            yield f"retry: {_RECONNECT_MS}\n\n".encode()
            while is_open is None or await is_open():
                changed = self._changed
                chunk = self._chunk_after(cursor, version)
                cursor, version = self._latest, self._version
                if chunk:
                    yield chunk
                with suppress(TimeoutError):
                    async with asyncio.timeout(_CHECK_S):
                        await changed.wait()
        finally:
            self._readers -= 1
            self._shares.subtract(shares)
            self._shares += Counter()  # without those that are 0

    def _chunk_after(self, cursor: int, version: int) -> bytes:
        """Return what a reader lacks that has everything up to these."""
        if not self._floor <= cursor <= self._latest:
            return _encode("snapshot", {**self._status, "latest": self._latest}, self._latest)
        missed = b"".join(chunk for number, chunk in self._kept if number > cursor)
        return missed if version == self._version else missed + _encode("status", self._status)

    async def _start(self) -> None:
        """Begin to poll, unless that goes on."""
        async with self._joining:
            if self._poller is None or self._poller.done():
                await self._look()
                self._poller = asyncio.create_task(self._poll())

    async def _poll(self) -> None:
        while len(self):
            await asyncio.sleep(self._poll_seconds)
            await self._look()

    async def _look(self) -> None:
        news = await run_in_threadpool(self._read, self._latest)
        if news.status == self._status and not news.moments and news.latest == self._latest:
            return
        if news.since != self._latest:  # too much has happened, or the history was replaced
            self._kept, self._floor = [], news.since
        self._kept += map(_encode_moment, news.moments)
        if len(self._kept) > MAX_KEPT:
            self._floor = self._kept[-MAX_KEPT - 1][0]
            del self._kept[:-MAX_KEPT]
        self._latest = news.moments[-1].id if news.moments else news.latest
        if news.status != self._status:
            self._status = news.status
            self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()
