"""One thing that was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from briter_worker.errors import PublishError, for_people

if TYPE_CHECKING:
    from collections.abc import Callable


class State(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    """Posts can be published, but not all, not for long, or not as was meant."""
    ERROR = "error"
    """No post can be published until it is mended."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, how it is, and what to do about it. Safe to show."""

    check: str
    state: State
    message: str
    fix: str | None = None

    def as_json(self) -> dict[str, str | None]:
        """For programs."""
        return {"check": self.check, "state": self.state.value, "message": self.message, "fix": self.fix}


def ok(check: str, message: str) -> Finding:
    """All is well."""
    return Finding(check, State.OK, for_people(message))


def warning(check: str, message: str, fix: str) -> Finding:
    """Publishing works, with this caveat."""
    return Finding(check, State.WARNING, for_people(message), for_people(fix))


def error(check: str, message: str, fix: str) -> Finding:
    """Nothing can be published."""
    return Finding(check, State.ERROR, for_people(message), for_people(fix))


def refused(check: str, failure: PublishError) -> Finding:
    """What would fail every publication, in the words in which it would."""
    message, _, fix = failure.text.partition(" Fix: ")
    return error(check, message.rstrip("."), fix or "see the message")


def tried(check: str, look: Callable[[], str]) -> Finding:
    """What `look` says is well, or the failure that it raises."""
    try:
        return ok(check, look())
    except PublishError as failure:
        return refused(check, failure)
    except OSError as problem:
        where = f" ({problem.filename})" if problem.filename else ""
        return error(
            check, f"{problem.strerror or problem}{where}", "give the worker's user access, or mend the disk"
        )
