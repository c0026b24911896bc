"""What the pages say: failures, times and progress in an editor's words."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from briter_worker.errors import Failure, for_people
from briter_worker.job import State

if TYPE_CHECKING:
    from briter_worker.ports import Pause
    from briter_worker.sinks.history.reading import Receipt

HEADLINES = {
    Failure.NO_PATHS: "none of its files may be published",
    Failure.MALFORMED: "what the editor's program wrote is not a job",
    Failure.UNREADABLE: "what the editor's program wrote cannot be read",
    Failure.UNKNOWN_TYPE: "nothing here knows this kind of job",
    Failure.PLUGIN: "one of the site's own rules does not let it through",
    Failure.PLUGIN_BROKEN: "a plugin of the site is broken",
    Failure.TOO_LARGE: "one of its files is too large",
    Failure.REJECTED: "the remote does not accept this post",
    Failure.CONFLICT: "somebody changed the same lines elsewhere",
    Failure.LOST_RACE: "somebody else kept publishing at the same moment",
    Failure.UNSETTLED: "a file kept changing while it was read",
    Failure.KILLED_WORKER: "the worker died while it published this post",
    Failure.INTERNAL: "the worker made a mistake",
    Failure.NETWORK: "the remote cannot be reached",
    Failure.TIMEOUT: "the remote does not answer in time",
    Failure.AUTH: "the remote refused the password or key",
    Failure.HOST_KEY: "the remote does not prove that it is the right one",
    Failure.REMOTE_MISSING: "the remote repository is not there",
    Failure.REMOTE_REFUSED: "the remote refuses everything at the moment",
    Failure.REMOTE_REWRITTEN: "the remote's history was rewritten",
    Failure.DIVERGED: "this copy of the site and the remote have drifted apart",
    Failure.WRONG_BRANCH: "another branch is checked out on the server",
    Failure.UNFINISHED: "an unfinished merge or rebase is in the way on the server",
    Failure.LOCKED: "another program keeps the site's repository locked",
    Failure.CORRUPT: "the site's repository is damaged",
    Failure.OWNERSHIP: "the site's files belong to another user",
    Failure.NOT_A_REPOSITORY: "the site's folder is no repository",
    Failure.DISK: "the server's disk is full or failing",
    Failure.GIT_MISSING: "git is missing on the server",
}
OUTCOMES = {
    "published": "published",
    "nochange": "was live already",
    "failed": "did not work, is tried again",
    "dead-lettered": "failed",
    "nopaths": "failed",
    "quarantined": "put aside",
    "interrupted": "interrupted",
    "cancelled": "cancelled",
    "snoozed": "put off",
    "handled": "done",
    "superseded": "replaced by a newer save",
}
PHASES = {
    "validate": "checking",
    "stage": "reading its files",
    "commit": "writing the commit",
    "push": "sending it to the remote",
    "settle": "finishing",
}
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_COMMIT = re.compile(r"[0-9a-f]{7,64}")


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a post is not live, for an editor: in short, as the worker said it, and what to do."""

    headline: str
    detail: str
    fix: str


def reason(failure: str | None, error: str | None) -> Reason:
    """A failure in words."""
    detail, _, fix = for_people(error or "").partition(" Fix: ")
    detail = detail.rstrip(".")
    try:
        headline = HEADLINES[Failure(failure or "")]
    except ValueError:
        headline, detail = detail or "it did not work", ""
    return Reason(headline, sentence(detail), sentence(fix))


def sentence(text: str) -> str:
    """Begun with a capital; the rest as it is."""
    return text[:1].upper() + text[1:]


def pause_in_words(pause: Pause) -> str:
    """A pause, for editors."""
    return "Publishing is paused" + (f" until {moment(pause.until)}" if pause.until else "")


def count(number: int, noun: str) -> str:
    """`1 post`, `3 posts`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def phase_in_words(phase: str | None, done: int, total: int) -> str:
    """How far a publication is."""
    text = PHASES.get(phase or "", phase or "starting")
    return f"{text}, {done * 100 // total} %" if total and done < total else text


def outcome_in_words(receipt: Receipt) -> str:
    """What became of an attempt."""
    text = OUTCOMES.get(receipt.outcome or "", receipt.outcome or "under way")
    return f"{text} (dry run)" if receipt.dry_run else text


def fate_in_words(receipt: Receipt) -> str:
    """What has become of a post that has left the queue."""
    if receipt.dry_run or receipt.outcome not in {"published", "nochange"}:
        return outcome_in_words(receipt)
    since = f" since {moment(receipt.ended)}" if receipt.ended and receipt.outcome == "published" else ""
    return f"live{since}"


def tone_of(outcome: str | None) -> str:
    """Its colour."""
    if outcome in {"published", "nochange", "handled"}:
        return "good"
    if outcome in {"failed", "interrupted"}:
        return "warn"
    return "bad" if outcome in {"dead-lettered", "nopaths", "quarantined"} else "quiet"


STATES = {
    State.PENDING: ("busy", "waiting its turn"),
    State.SCHEDULED: ("quiet", "scheduled"),
    State.RETRYING: ("warn", "will be tried again"),
    State.CLAIMED: ("busy", "on its way"),
    State.FAILED: ("bad", "not live"),
}


def span(seconds: float) -> str:
    """A length of time in its largest unit."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < _MINUTE:
        return f"{seconds:.0f} s"
    if seconds < 2 * _HOUR:
        return f"{seconds / _MINUTE:.0f} min"
    if seconds < 2 * _DAY:
        return f"{seconds / _HOUR:.0f} h"
    return f"{seconds / _DAY:.0f} days"


def ago(seconds: float, now: float | None = None) -> str:
    """A moment as seen from now."""
    passed = (time.time() if now is None else now) - seconds
    if abs(passed) < 1:
        return "now"
    return f"{span(passed)} ago" if passed > 0 else f"in {span(-passed)}"


def local(seconds: float) -> datetime:
    """A moment in the server's own time zone. Beyond the calendar: its last day."""
    try:
        return datetime.fromtimestamp(seconds, UTC).astimezone()
    except (ValueError, OverflowError, OSError):
        return datetime.max.replace(tzinfo=UTC) if seconds > 0 else datetime(1, 1, 2, tzinfo=UTC)


def zone() -> str:
    """The name of the server's time zone."""
    return datetime.now(UTC).astimezone().tzname() or "UTC"


def offset(seconds: float) -> float:
    """How many seconds the server's clock is ahead of UTC at that moment."""
    ahead = local(seconds).utcoffset()
    return ahead.total_seconds() if ahead else 0.0


def clock(seconds: float) -> str:
    """`14:05`."""
    return f"{local(seconds):%H:%M}"


def clock_there(seconds: float, now: float | None = None) -> str:
    """`14:05`, or `14:05 CEST` where the clocks will have changed by then, or had not changed yet."""
    there, here = local(seconds), local(time.time() if now is None else now)
    return f"{there:%H:%M}" if there.utcoffset() == here.utcoffset() else f"{there:%H:%M %Z}"


def day_ahead(seconds: float, now: float | None = None) -> str:
    """As `day_of`, with `Today` and `Tomorrow` before it."""
    today = local(time.time() if now is None else now).date()
    near = {0: "Today, ", 1: "Tomorrow, "}.get((local(seconds).date() - today).days, "")
    return near + day_of(seconds)


def day_of(seconds: float, *, short: bool = False) -> str:
    """`Wednesday, 18 November 2026`, or `18 Nov`."""
    day = local(seconds)
    return f"{day.day} {day:%b}" if short else f"{day:%A}, {day.day} {day:%B} {day.year}"


def moment(seconds: float, now: float | None = None) -> str:
    """`14:05` today, else with its day."""
    day, today = local(seconds), local(time.time() if now is None else now)
    if day.date() == today.date():
        return f"{day:%H:%M}"
    year = "" if day.year == today.year else f" {day.year}"
    return f"{day.day} {day:%b}{year}, {clock_there(seconds, now)}"


def commit_href(template: str, commit: str | None) -> str | None:
    """Where the commit can be seen; None when there is no such place."""
    if not template or not commit or not _COMMIT.fullmatch(commit):
        return None
    return template.replace("{commit}", commit)


def is_link(href: str | None) -> bool:
    """Whether it may be a link: nothing but http(s) is."""
    return bool(href) and str(href).startswith(("https://", "http://"))


def percent(done: int, total: int) -> int:
    """For a progress bar."""
    return 0 if not total else math.floor(min(done, total) * 100 / total)
