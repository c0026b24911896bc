"""Errors as RFC 9457 problem documents for programs."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from briter_worker.errors import os_error_fix, os_error_text
from briter_worker.redaction import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

MEDIA_TYPE = "application/problem+json"


class ProblemError(Exception):
    """Refuse a request with this HTTP status, message and fix."""

    def __init__(
        self, status: int, detail: str, fix: str = "", *, headers: Mapping[str, str] | None = None
    ) -> None:
        self.status = status
        self.detail = one_line(detail)
        self.fix = fix
        self.headers = dict(headers or {})
        super().__init__(self.detail)


def problem(
    status: int, detail: str, fix: str = "", *, headers: Mapping[str, str] | None = None, **more: object
) -> Response:
    """Return the problem document as a response; `fix` is present only if there is one."""
    title = HTTPStatus(status).phrase
    body: dict[str, Any] = {"type": "about:blank", "title": title, "status": status}
    body |= {"detail": one_line(detail), **({"fix": fix} if fix else {}), **more}
    return Response(json.dumps(body), status_code=status, media_type=MEDIA_TYPE, headers=dict(headers or {}))


def explain(error: OSError) -> tuple[str, str]:
    """Return the message and the fix of an operating system's or a database's error."""
    fix = getattr(error, "fix", None)
    if isinstance(fix, str):
        return one_line(str(error)), fix
    return os_error_text(error), os_error_fix(error)
