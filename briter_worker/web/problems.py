"""What went wrong, as RFC 9457 has it for programs, and as a page for people. Never a traceback."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from briter_worker.errors import for_people

if TYPE_CHECKING:
    from collections.abc import Mapping

MEDIA_TYPE = "application/problem+json"


class ProblemError(Exception):
    """A request that cannot be done: its status, and what to do instead."""

    def __init__(
        self, status: int, detail: str, *, headers: Mapping[str, str] | None = None, **more: object
    ) -> None:
        self.status = status
        self.detail = for_people(detail)
        self.headers = dict(headers or {})
        self.more = more
        super().__init__(self.detail)


def title_of(status: int) -> str:
    """The status in words."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"


def problem(
    status: int, detail: str, *, headers: Mapping[str, str] | None = None, **more: object
) -> Response:
    """The answer to a program."""
    body: dict[str, Any] = {"type": "about:blank", "title": title_of(status), "status": status}
    body |= {"detail": for_people(detail), **more}
    return Response(json.dumps(body), status_code=status, media_type=MEDIA_TYPE, headers=dict(headers or {}))
