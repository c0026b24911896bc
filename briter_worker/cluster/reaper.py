"""Takes back the sites of hosts that have died in a drain, so that another one takes them up.

Not by `retry_job`: the dead may only have slept. Awake again, it would finish its job by the number, and so
take it from the host that has it by now. A finished number never comes back, so what it does about it has no
effect.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from briter_worker.events import Reaped

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from briter_worker.cluster.engine import Engine, Order
    from briter_worker.ports import EventSink


class Reaper:
    """Looks for the dead when it is asked to, on behalf of all hosts: whichever looks first takes back."""

    def __init__(self, engine: Engine, emit: EventSink, *, silence: float) -> None:
        self._engine = engine
        self._emit = emit
        self._silence = silence
        self._strays: set[int] = set()
        self._looked = time.monotonic()
        self._steady_since = -math.inf

    async def reap(self, working_on: Callable[[], Collection[int]]) -> None:
        """Free what the dead hold, and what this host was handed without getting to know of it.

        The latter, whose answer was lost on the way, was a stray at the last look already.
        Raises EngineError.
        """
        if self._is_fair(time.monotonic(), await self._engine.up_for()):
            for order in await self._engine.stalled(self._silence):
                if order.id not in working_on():  # on a slow machine, this host's own
                    await self._take_back(order)
            await self._engine.forget(self._silence)
        strays = [order for order in await self._engine.ours() if order.id not in working_on()]
        for order in strays:
            if order.id in self._strays and order.id not in working_on():
                await self._take_back(order)
        self._strays = {order.id for order in strays}

    def _is_fair(self, now: float, up_for: float) -> bool:
        """Whether the others could have shown by now that they live: not while Postgres was away for all."""
        if now - self._looked > self._silence / 2:
            self._steady_since = now
        self._looked = now
        return up_for > self._silence and now - self._steady_since > self._silence

    async def _take_back(self, order: Order) -> None:
        if not await self._engine.finish(order):
            return  # another host was faster, or it has just ended
        self._emit(Reaped(site=order.site, worker=order.worker))
        await self._rouse([order.site])

    async def _rouse(self, sites: Sequence[str]) -> None:
        woken = await self._engine.wake(sites)
        if len(woken) < len(sites):
            # It was waiting already, behind the dead: nobody is told by itself that it waits no more.
            await self._engine.notify()
