"""One finding: what was checked, its state, and one fix."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from briter_worker.errors import FixableError, PublishError, os_error_fix, os_error_text
from briter_worker.redaction import one_line

if TYPE_CHECKING:
    from collections.abc import Callable


class State(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    """Posts can be published, with a restriction."""
    ERROR = "error"
    """No post can be published."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of the doctor. Message and fix are safe to show."""

    check: str
    state: State
    message: str
    fix: str | None = None

    def to_json(self) -> dict[str, str | None]:
        """Return the finding for programs."""
        return {"check": self.check, "state": self.state.value, "message": self.message, "fix": self.fix}


def ok(check: str, message: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(check, State.OK, one_line(message))


def warning(check: str, message: str, fix: str) -> Finding:
    """Return a finding that restricts publishing."""
    return Finding(check, State.WARNING, one_line(message), one_line(fix))


def error(check: str, message: str, fix: str) -> Finding:
    """Return a finding that stops publishing."""
    return Finding(check, State.ERROR, one_line(message), one_line(fix))


def from_failure(check: str, failure: PublishError | FixableError | OSError) -> Finding:
    """Return the finding for a failure that every publication would meet."""
    message = os_error_text(failure) if isinstance(failure, OSError) else failure.message
    fix = getattr(failure, "fix", "") or (os_error_fix(failure) if isinstance(failure, OSError) else "")
    return error(check, message, fix or "see the message")


def attempt(check: str, look: Callable[[], object], message: str) -> Finding:
    """Return a finding without a problem, or the failure that `look` raises."""
    try:
        look()
    except (PublishError, FixableError, OSError) as failure:
        return from_failure(check, failure)
    return ok(check, message)
