"""The job: one post to publish. Its file is the contract with everything outside the worker.

`Job` is what the worker works with; `jobfile` reads it, by the table in `contract`. Whatever keys a writer
put into the file survive every rewrite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from briter_worker.strictjson import Document

GIT_SYNC = "git-sync"


class Status(StrEnum):
    """What the file says. Where the job is (waiting, in flight, gone) is the queue's knowledge."""

    PENDING = "pending"
    FAILED = "failed"


class State(StrEnum):
    """What a person asks: where does this job stand?"""

    PENDING = "pending"
    SCHEDULED = "scheduled"
    RETRYING = "retrying"
    CLAIMED = "claimed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Author:
    """Who wrote the post; git shows it as the commit's author."""

    name: str
    email: str


@dataclass(frozen=True, slots=True)
class Job:
    """One post to publish. Times are seconds since 1970."""

    id: str
    slug: str
    paths: tuple[str, ...]
    created_at: float
    type: str = GIT_SYNC
    message: str | None = None
    author: Author | None = None
    scheduled_for: float | None = None
    status: Status = Status.PENDING
    attempts: int = 0
    next_attempt_at: float | None = None
    last_error: str | None = None
    failure: str | None = None
    webhook: str | None = None
    """Who is to be told what became of it."""
    changed_at: float = math.inf
    """When it last came into another state, or was written; of interest where a retry is waited for."""

    @property
    def commit_message(self) -> str:
        """The message, to the letter, or the default one."""
        return f"Publish {self.slug}" if self.message is None else self.message

    def due_at(self, now: float, longest_delay: float) -> float:
        """When it may be published. No retry waits for longer than the longest delay after it was written.

        One that was written in the future is due: the clock was set back.
        """
        retry = self.next_attempt_at or 0.0
        if retry > now + longest_delay:
            retry = 0.0 if self.changed_at > now else self.changed_at + longest_delay
        return max(self.scheduled_for or 0.0, retry)

    def state(self, now: float) -> State:
        """Where it stands while it waits in the queue."""
        if self.status is Status.FAILED:
            return State.FAILED
        if (self.scheduled_for or 0.0) > now:
            return State.SCHEDULED
        if (self.next_attempt_at or 0.0) > now:
            return State.RETRYING
        return State.PENDING


def parse_time(text: str) -> float:
    """Seconds since 1970 of an ISO-8601 text; a date alone is midnight UTC, no offset means UTC.

    Raises ValueError with the text and what is accepted.
    """
    try:
        moment = datetime.fromisoformat(text.strip().upper())
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return moment.timestamp()
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is no ISO-8601 time such as 2026-01-31T09:00:00Z") from None


def last_change(document: Mapping[str, Any], modified: float) -> float:
    """When the worker last wrote it, as it says, else when its file was modified."""
    try:
        return parse_time(document["updatedAt"])
    except (KeyError, ValueError, AttributeError):
        return modified


def format_time(seconds: float) -> str:
    """ISO-8601 in UTC with milliseconds, as JavaScript writes it. Beyond the calendar: its last moment."""
    try:
        moment = datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        moment = datetime.max.replace(tzinfo=UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


OLD_SPELLINGS = {"commitMessage": "message", "attempt": "attempts"}


def rewritten(
    document: Mapping[str, Any],
    *,
    status: Status,
    attempts: int,
    now: float,
    next_attempt_at: float | None = None,
    last_error: str | None = None,
    failure: str | None = None,
) -> Document:
    """The document with the worker's keys set anew, and every other key as its writer left it."""
    changed: Document = {}
    for key, value in document.items():
        current = OLD_SPELLINGS.get(key, key)
        if current == key or current not in document:
            changed[current] = value
    changed["status"] = status.value
    changed["attempts"] = attempts
    changed["nextAttemptAt"] = None if next_attempt_at is None else format_time(next_attempt_at)
    changed["lastError"] = last_error
    changed["failure"] = failure
    changed["updatedAt"] = format_time(now)
    return changed


def joined(newer: Sequence[str], *older: Sequence[str]) -> tuple[str, ...]:
    """The newer job's paths, then those that only the older ones declared."""
    return tuple(dict.fromkeys([*newer, *(path for paths in older for path in paths)]))
