"""The sites that this host drains at the moment, each in a thread of its own."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from briter_worker.cluster.engine import EngineError
from briter_worker.errors import (
    AwayError,
    LockLostError,
    Loss,
    PublishError,
    UsageError,
    explained,
    for_people,
)
from briter_worker.events import Warned
from briter_worker.settling import Tally
from briter_worker.worker import pause_after

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from briter_worker.cluster.engine import Engine, Order
    from briter_worker.ports import EventSink

_FIRST_PAUSE = 0.25
_LONGEST_PAUSE = 5.0
_FAREWELL = 10.0
"""How long a host that stops tries to tell Postgres what it has finished: else it is taken for dead."""


@dataclass(frozen=True, slots=True)
class Left:
    """What a drain leaves behind."""

    tally: Tally = field(default_factory=Tally)
    due: bool = False
    """More is due at once: it took its share, or was told to stop."""


class Drain(Protocol):
    """Drains one site; called in a thread. May raise LockLostError, OSError, PublishError."""

    def __call__(self, site: str, stopping: Callable[[], bool], /) -> Left:
        """Take what is due, publish it, settle it."""
        ...


class Outage:
    """Something that Postgres does for this host fails: told when it begins and when it has ended."""

    def __init__(self, emit: EventSink, what: str) -> None:
        self._emit = emit
        self._what = what
        self._since: float | None = None

    def met(self, error: OSError) -> None:
        """It has just failed."""
        if self._since is None:
            self._since = time.monotonic()
            self._emit(Warned(error=for_people(f"{self._what}: {error}")))

    def over(self) -> None:
        """It has just succeeded."""
        if self._since is not None:
            lasted = time.monotonic() - self._since
            self._since = None
            self._emit(Warned(error=f"Postgres is back after {lasted:.0f} s"))

    async def outlast(self, ask: Callable[[], Awaitable[object]], *, until: Callable[[], bool]) -> None:
        """Ask until there is an answer, or nobody waits for it any longer."""
        pause = _FIRST_PAUSE
        while True:
            try:
                await ask()
            except EngineError as error:
                self.met(error)
                if until():
                    return
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
            else:
                return


class Slots:
    """Takes what waits while a slot is free, and gives back each site when its drain has ended."""

    def __init__(
        self,
        engine: Engine,
        drain: Drain,
        emit: EventSink,
        outage: Outage,
        *,
        most: int,
        stopping: Callable[[], bool],
        freed: Callable[[], None],
        once: bool,
    ) -> None:
        self._engine = engine
        self._drain = drain
        self._emit = emit
        self._outage = outage
        self._most = most
        self._stopping = stopping
        self._freed = freed
        self._once = once
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="drain")
        self._running: dict[asyncio.Task[None], Order] = {}
        self._failures: dict[str, int] = {}
        self._later: dict[str, float] = {}
        self.total = Tally()
        self.idle: set[str] = set()
        """Sites whose last drain here settled nothing."""

    @property
    def orders(self) -> Collection[int]:
        """What this host works on, from when it knows of it until it is finished."""
        return {order.id for order in self._running.values()}

    async def fill(self) -> bool:
        """Whether anything was taken. Raises EngineError."""
        before = len(self._running)
        while len(self._running) < self._most and not self._stopping():
            order = await self._engine.take()
            if order is None:
                break
            task = asyncio.create_task(self._work(order))
            self._running[task] = order
            task.add_done_callback(self._ended)
        return len(self._running) > before

    async def empty(self) -> None:
        """Wait until nothing runs any more."""
        while self._running:
            await asyncio.wait(self._running)
        self._threads.shutdown()

    def repeated(self, now: float) -> Collection[str]:
        """Sites whose drain failed, and whose pause is over by this monotonic time. Told once."""
        ready = [site for site, at in self._later.items() if at <= now]
        for site in ready:
            del self._later[site]
        return ready

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self._freed()

    async def _work(self, order: Order) -> None:
        left = await self._drained(order.site)
        self.total.add(left.tally)
        tells_until = float("inf")

        def given_up() -> bool:
            nonlocal tells_until
            if self._stopping():
                tells_until = min(tells_until, time.monotonic() + _FAREWELL)
            return time.monotonic() >= tells_until

        # In this order: it cannot be taken by anybody before it is free, and is never forgotten between.
        if left.due:
            await self._outage.outlast(lambda: self._engine.wake([order.site]), until=given_up)
        await self._outage.outlast(lambda: self._engine.finish(order), until=given_up)

    async def _drained(self, site: str) -> Left:
        if self._stopping():
            return Left(due=True)
        loop = asyncio.get_running_loop()
        try:
            left = await loop.run_in_executor(self._threads, self._drain, site, self._stopping)
        except LockLostError as lost:
            self._warn(site, str(lost))
            if lost.reason is not Loss.ERROR:
                return Left()  # whoever has it goes on with it
            self._put_off(site)
            return Left(Tally(failed=1))
        except AwayError as error:
            self._outage.met(error)
            self._put_off(site)
            return Left(Tally(failed=1))
        except Exception as error:  # noqa: BLE001 - whatever happens to one site is not the others' end
            self._warn(site, _said(error))
            self._put_off(site)
            return Left(Tally(failed=1))
        if left.tally.undecided:
            self._put_off(site)
        else:
            self._failures.pop(site, None)
        if left.tally.settled:
            self.idle.discard(site)
        else:
            self.idle.add(site)
        return left

    def _put_off(self, site: str) -> None:
        self.idle.add(site)
        if self._once:
            return
        self._failures[site] = self._failures.get(site, 0) + 1
        self._later[site] = time.monotonic() + pause_after(self._failures[site], 0.5)

    def _warn(self, site: str, text: str) -> None:
        self._emit(Warned(error=for_people(f"site {site}: {text}")))


def _said(error: Exception) -> str:
    match error:
        case PublishError():
            return error.text
        case UsageError():
            return str(error)
        case OSError():
            return explained(error)
        case _:
            return f"an error in the worker itself: {type(error).__name__}: {error}. Fix: please report it"
