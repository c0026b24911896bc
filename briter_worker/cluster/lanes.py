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
    """The slots of one node. In the event loop's thread.

    `permits` returns the semaphore by which Procrastinate's worker fetches: one permit for each slot.
    """

    def __init__(self, slots: int, per_host: int, permits: Callable[[], asyncio.Semaphore]) -> None:
        self.slow = max(1, slots // 4)
        """The slots of slow sites."""
        self.threads = 4 * slots + self.slow
        """The most drains at once, those that gave their slot back included."""
        self._left = 3 * slots
        """How many slots may be given back still."""
        self._permits = permits
        self._hosts: dict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(per_host or max(1, slots // 2))
        )
        self._began: dict[str, list[float]] = defaultdict(list)
        self._returning: set[asyncio.Task[None]] = set()

    async def run(self, host: str, drain: Callable[[], asyncio.Future[T]]) -> T | None:
        """Run the drain when the host is free. Return None if the host hangs meanwhile."""
        if not host:
            return await self._run(drain)
        limit = self._hosts[host]
        given = self._give_back() if limit.locked() else None
        try:
            while True:
                try:
                    await asyncio.wait_for(limit.acquire(), CRAWL_S)
                except TimeoutError:
                    if self._crawls(host):
                        return None
                else:
                    break
        finally:
            self._take_again(given)
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
        given = None
        try:
            future = drain()
            await asyncio.wait([future], timeout=_PARK_S)
            if not future.done():
                given = self._give_back()
            return await future
        finally:
            self._take_again(given)

    def _give_back(self) -> asyncio.Semaphore | None:
        """Let the worker fetch another site meanwhile. Return None if too many slots are given back."""
        if not self._left:
            return None
        self._left -= 1
        permits = self._permits()
        permits.release()
        return permits

    def _take_again(self, permits: asyncio.Semaphore | None) -> None:
        """Take the next slot that is free out of use: the drain's own becomes free when it ends."""
        if permits is not None:
            task = asyncio.create_task(self._take(permits))
            self._returning.add(task)
            task.add_done_callback(self._returning.discard)

    async def _take(self, permits: asyncio.Semaphore) -> None:
        self._left += 1
        await permits.acquire()
