"""Publish the posts of a flat-file CMS through git, exactly once each."""

import os
import sys

# `python -m` searches the current folder first. No module of a site, such as its git.py, may be loaded.
if sys.argv[:1] == ["-m"] and not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:  # noqa: PTH109
    del sys.path[0]

from briter_worker.client import Enqueued, enqueue  # noqa: E402 - after the search path is safe

__all__ = ["Enqueued", "enqueue"]
