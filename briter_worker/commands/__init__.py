"""What each command does. Heavy imports wait until a command needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from briter_worker.settings import Settings


class DeclinedError(Exception):
    """What was asked for cannot be done; the text says why: exit 1, one line."""


def read_settings() -> Settings:
    """The configuration. Raises UsageError."""
    from briter_worker.settings import load_settings  # noqa: PLC0415

    return load_settings()
