"""Publish the posts of a flat-file CMS through git, exactly once each."""

import os
import sys

# `python -m` searches the current folder first. No module of a site, such as its git.py, may be loaded.
if sys.argv[:1] == ["-m"] and not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:  # noqa: PTH109
    del sys.path[0]

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from briter_worker.client import Enqueued, enqueue

    __version__: str

__all__ = ["Enqueued", "__version__", "enqueue"]


def __getattr__(name: str) -> object:
    """Import the client when a producer asks for it: `__main__` has to prepare the process first."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415 - takes as long as a tenth of the start

        return version("briter-worker")
    from briter_worker import client  # noqa: PLC0415

    return getattr(client, name)
