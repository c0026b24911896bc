"""Bounds of what one sender may ask for: the JSON of a request before it is parsed, and requests at once.

A few bytes of JSON become a hundred times as much memory, `[[],[],…` for example. So the bytes are counted as
they arrive. What is inside of texts costs only its length, which the limit of the whole request bounds.
"""

from __future__ import annotations

import asyncio
import binascii
import json
import re
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from briter_worker.web.responses import ProblemError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from starlette.responses import Response

MAX_STRUCTURE_BYTES = 1 << 20
"""Of a document apart from its texts: brackets, numbers, spaces."""
MAX_VALUES = 100_000
"""A post has at most 10,000 paths, each with a content."""
MAX_DEPTH = 64
MAX_WAITING = 100
"""Requests of one sender that wait for their turn."""
_PIECE = 1 << 20
"""Characters of base64: a multiple of four."""
_REST_OF_TEXT = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_BRACKETS = re.compile(rb"[\[\]{}]")


class JsonBounds:
    """Counts the parts of a JSON document as they arrive. What is no JSON is refused by its parser."""

    def __init__(self) -> None:
        self._is_in_text = self._is_escaped = False
        self._size = self._values = self._depth = 0

    def feed(self, part: bytes) -> None:
        """Count the next bytes. Raises ProblemError when the document is out of bounds."""
        position = 0
        while position < len(part):
            if self._is_in_text:
                position = self._skip_text(part, position)
                continue
            quote = part.find(b'"', position)
            end = len(part) if quote < 0 else quote
            self._count(part[position:end], texts=int(quote >= 0))
            self._is_in_text = quote >= 0
            position = end + 1

    def _skip_text(self, part: bytes, position: int) -> int:
        """Return where the text ends, or the part does."""
        if self._is_escaped:
            self._is_escaped = False
            position += 1
        quote = part.find(b'"', position)
        if part.find(b"\\", position, quote if quote >= 0 else len(part)) < 0:  # base64, as a rule
            self._is_in_text = quote < 0
            return len(part) if quote < 0 else quote + 1
        found = _REST_OF_TEXT.match(part, position)
        end = found.end() if found else position
        if end < len(part):
            if part[end : end + 1] == b'"':
                self._is_in_text = False
            else:  # a backslash is the last byte of the part
                self._is_escaped = True
            end += 1
        return end

    def _count(self, structure: bytes, *, texts: int) -> None:
        """Count bytes outside of texts, and the texts between them. Raises ProblemError out of bounds."""
        self._size += len(structure)
        if self._size > MAX_STRUCTURE_BYTES:
            text = f"the document has more than {MAX_STRUCTURE_BYTES} bytes beside its texts"
            raise ProblemError(413, text)
        opened = structure.count(b"[") + structure.count(b"{")
        self._values += texts + structure.count(b",") + opened
        if self._values > MAX_VALUES:
            raise ProblemError(413, f"the document has more than {MAX_VALUES} values")
        self._count_depth(structure, opened)

    def _count_depth(self, structure: bytes, opened: int) -> None:
        if self._depth + opened <= MAX_DEPTH:  # in any order
            self._depth += opened - structure.count(b"]") - structure.count(b"}")
            return
        for bracket in _BRACKETS.findall(structure):
            self._depth += 1 if bracket in b"[{" else -1
            if self._depth > MAX_DEPTH:
                raise ProblemError(422, f"the document is nested deeper than {MAX_DEPTH} levels")


class UploadRoute(APIRoute):
    """A route whose requests are so large that reading one in the event loop delays all others."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, which gets an UploadRequest."""
        handle = super().get_route_handler()

        async def handle_upload(request: Request) -> Response:
            return await handle(UploadRequest(request.scope, request.receive))

        return handle_upload


class UploadRequest(Request):
    """A request with a large body, which is put together and parsed in a thread."""

    _data: bytes | None = None

    async def body(self) -> bytes:
        """Return the body."""
        if self._data is None:
            parts = [part async for part in self.stream()]
            self._data = await run_in_threadpool(b"".join, parts)  # for large parts without the GIL
        return self._data

    async def json(self) -> Any:  # noqa: ANN401 - any JSON
        """Return the parsed body. Raises JSONDecodeError."""
        return await run_in_threadpool(_parse, await self.body())


def _parse(data: bytes) -> Any:  # noqa: ANN401 - any JSON
    try:
        return from_json(data)  # no other thread runs meanwhile, and `json.loads` takes twice as long
    except ValueError:
        return json.loads(data)  # for its error; it also reads lone surrogates, which are refused by name


def decode_base64(text: str) -> bytes:
    """Return the content, decoded in pieces: other threads run in between. Raises ValueError."""
    end = text.find("=")
    if 0 <= end < len(text) - 2:
        raise ValueError("data after the padding")
    pieces = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
    return b"".join([binascii.a2b_base64(piece, strict_mode=True) for piece in pieces])


@dataclass(slots=True)
class _Line:
    """The requests of one sender: those that are answered, and those that wait."""

    free: asyncio.Semaphore
    users: int = 0


class Turns:
    """Lets each sender have some requests answered at once, so that none takes every thread.

    Use it in the event loop only.
    """

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}

    @asynccontextmanager
    async def of(self, sender: str, limit: int) -> AsyncIterator[None]:
        """Wait for a turn of the sender. Raises ProblemError when too many of its requests wait already."""
        line = self._lines.setdefault(sender, _Line(asyncio.Semaphore(limit)))
        if line.users >= limit + MAX_WAITING:
            text = f"{MAX_WAITING} requests of this sender wait already"
            raise ProblemError(
                429, text, "wait for answers before you ask again", headers={"Retry-After": "1"}
            )
        line.users += 1
        try:
            async with line.free:
                yield
        finally:
            line.users -= 1
            if not line.users:
                del self._lines[sender]
