"""The doctor: check everything that a publication needs. Checking changes nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from briter_worker.errors import FixableError, describe
from briter_worker.redaction import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from briter_worker.settings import Settings


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


def attempt(check: str, look: Callable[[], object], message: str = "") -> Finding:
    """Return a finding with the message, or what `look` returns, or the failure that it raises."""
    try:
        found = look()
    except (FixableError, OSError) as failure:
        text, fix = describe(failure)
        return error(check, text, fix or "see the message")
    return ok(check, message or str(found))


def examine(settings: Settings, now: float) -> Iterator[Finding]:
    """Yield each finding as soon as it is known, at least one per check."""
    # Both import the findings from here.
    from briter_worker.doctor import environment, repository  # noqa: PLC0415

    yield from environment.check_configuration(settings)
    yield environment.check_plugins(settings)
    yield from environment.check_webhooks(settings)
    if settings.database_url:
        yield environment.check_writable("cache", settings.cache_root)
        yield from environment.check_quiet_time(settings, now)
        yield from repository.examine_cluster(settings)
        return
    yield from environment.check_folders(settings)
    yield from environment.check_disk(settings)
    yield from environment.check_queue(settings, now)
    yield from repository.examine(settings)
