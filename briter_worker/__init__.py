"""Publishes the posts of a flat-file CMS through git, exactly once each."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from briter_worker.client import Enqueued, enqueue

__all__ = ["Enqueued", "enqueue"]


def __getattr__(name: str) -> object:
    # `import briter_worker` happens before every command; only writers need the client.
    if name in __all__:
        from briter_worker import client  # noqa: PLC0415

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
