"""Lanes: slow remotes do not hold every slot of a node.

A drain that takes long gives its slot back while it goes on. At most some drains at once reach one remote
host. A site whose last drain crawled comes from a queue of its own, and has few slots.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_PARK_S = 1.0
"""A drain that takes longer gives its slot back, and goes on."""
CRAWL_S = 5.0
"""A drain crawls that takes longer than this, and"""
CRAWL_PER_JOB_S = 0.1
"""so much more for each job."""


class Lanes:
    """The slots of one node. In the event loop's thread."""

    def __init__(self, slots: int, per_host: int) -> None:
        self.slow = max(1, slots // 4)
        """The slots of slow sites."""
        self.fetched = 4 * slots
        """How many other sites the node has at once, those that gave their slot back or wait included."""
        self.threads = self.fetched + self.slow
        self._slots = asyncio.Semaphore(slots)
        self._hosts: dict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(per_host or max(1, slots // 2))
        )
        self._began: dict[str, list[float]] = defaultdict(list)

    async def run(self, host: str, drain: Callable[[], asyncio.Future[T]]) -> T | None:
        """Run the drain when the host and a slot are free. Return None if the host hangs meanwhile."""
        if not host:
            return await self._run(drain)
        limit = self._hosts[host]
        while True:
            try:
                await asyncio.wait_for(limit.acquire(), CRAWL_S)
            except TimeoutError:
                if self._crawls(host):
                    return None
            else:
                break
        began = time.monotonic()
        self._began[host].append(began)
        try:
            return await self._run(drain)
        finally:
            self._began[host].remove(began)
            limit.release()

    def _crawls(self, host: str) -> bool:
        return any(time.monotonic() - began > CRAWL_S for began in self._began[host])

    async def _run(self, drain: Callable[[], asyncio.Future[T]]) -> T:
        await self._slots.acquire()
        is_held = True
        try:
            future = drain()
            await asyncio.wait([future], timeout=_PARK_S)
            if not future.done():
                self._slots.release()
                is_held = False
            return await future
        finally:
            if is_held:
                self._slots.release()
