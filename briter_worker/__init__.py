"""Publishes the posts of a flat-file CMS through git, exactly once each."""

from briter_worker.client import Enqueued, enqueue

__all__ = ["Enqueued", "enqueue"]
