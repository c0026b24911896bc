"""Words of the pages for editors: failures and times. The templates have the other words."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime

from briter_worker.errors import failure_text, one_line, quote_fix, sentence
from briter_worker.status import Headline

PICTURES = (".avif", ".gif", ".jpeg", ".jpg", ".png", ".webp")
_COMMIT = re.compile(r"[0-9a-f]{7,64}")


def reason(failure: str | None, error: str | None, fix: str | None = None) -> Headline:
    """Return why a post is not on the remote: the failure, the worker's message, and the fix verbatim."""
    detail, text = quote_fix(one_line(error or "")).rstrip("."), failure_text(failure)
    if not text:
        text, detail = detail or "it failed", ""
    return Headline("bad", text, sentence(detail), one_line(fix or ""))


def title_of(slug: str, message: str) -> str:
    """Return the first line of a commit message as the post's title; empty for the default message."""
    line = one_line(message.partition("\n")[0])
    return "" if line == f"Publish {one_line(slug)}" else line


def local(seconds: float) -> datetime:
    """Return a time in the server's time zone, clamped to the calendar."""
    try:
        return datetime.fromtimestamp(seconds, UTC).astimezone()
    except (ValueError, OverflowError, OSError):
        return datetime.max.replace(tzinfo=UTC) if seconds > 0 else datetime(1, 1, 2, tzinfo=UTC)


def zone() -> str:
    """Return the name of the server's time zone."""
    return datetime.now(UTC).astimezone().tzname() or "UTC"


def clock(seconds: float) -> str:
    """Return `14:05 CET`."""
    return f"{local(seconds):%H:%M %Z}"


def day_ahead(seconds: float, now: float | None = None) -> str:
    """Return `Wednesday, 18 November 2026`, after `Today, ` or `Tomorrow, ` where it is that."""
    day, today = local(seconds), local(time.time() if now is None else now)
    near = {0: "Today, ", 1: "Tomorrow, "}.get((day.date() - today.date()).days, "")
    return f"{near}{day:%A}, {day.day} {day:%B} {day.year}"


def moment(seconds: float, now: float | None = None) -> str:
    """Return `14:05` for today, else the day, the time and its zone: clocks change between two days."""
    day, today = local(seconds), local(time.time() if now is None else now)
    if day.date() == today.date():
        return f"{day:%H:%M}"
    return f"{day.day} {day:%b} {day.year}, {clock(seconds)}"


def commit_href(template: str, commit: str | None) -> str | None:
    """Return the address of a commit's page, or None."""
    if not template or not commit or not _COMMIT.fullmatch(commit):
        return None
    return template.replace("{commit}", commit)


def is_link(href: str | None) -> bool:
    """Return True if the text may become a link: only http(s) may."""
    return bool(href) and str(href).startswith(("https://", "http://"))


def is_picture(path: str) -> bool:
    """Return True if a browser shows the file as a picture, in which no script can be."""
    return path.lower().endswith(PICTURES)
