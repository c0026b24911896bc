"""Findings of checks: a state, a message and one fix."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from briter_worker.errors import FixableError, describe, one_line

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
    """One checked thing: its state, a message and one fix. Message and fix are safe to show."""

    check: str
    state: State
    message: str
    fix: str | None = None

    def to_json(self) -> dict[str, str | None]:
        """Return the finding for programs."""
        return asdict(self)


def ok(check: str, message: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(check, State.OK, one_line(message))


def warning(check: str, message: str, fix: str) -> Finding:
    """Return a finding that restricts publishing."""
    return Finding(check, State.WARNING, one_line(message), one_line(fix))


def error(check: str, message: str, fix: str) -> Finding:
    """Return a finding that stops publishing."""
    return Finding(check, State.ERROR, one_line(message), one_line(fix))


def unless(problem: object, check: str, message: str, fix: str, fine: str = "none") -> Finding:
    """Return a warning if there is a problem, else what is fine."""
    return warning(check, message, fix) if problem else ok(check, fine)


def attempt(check: str, look: Callable[[], object], message: str = "") -> Finding:
    """Return a finding with the message, or what `look` returns, or the failure that it raises."""
    try:
        found = look()
    except (FixableError, OSError) as failure:
        text, fix = describe(failure)
        return error(check, text, fix or "see the message")
    return ok(check, message or str(found))
