"""One host of a cluster: takes sites while it has free slots, shows that it lives, looks after the others.

The dispatch runs in one thread and asks over one connection of its own, so that drains, which run in theirs
and may take as long as they like, hold up neither the heartbeat nor the sweep nor the reaper.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from briter_worker.cluster.engine import EngineError
from briter_worker.cluster.reaper import Reaper
from briter_worker.cluster.slots import Outage, Slots

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from briter_worker.cluster.engine import Engine
    from briter_worker.cluster.slots import Drain
    from briter_worker.cluster.sweep import Sweep
    from briter_worker.ports import EventSink
    from briter_worker.settling import Tally

_PATIENCE_ONCE = 30.0
"""How long a run that is to end waits for a database that is away."""

_AT_MOST = 0.2
"""Between two looks, however much becomes due."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How often a host looks, in seconds. A dead host's sites are another's after `silence` and a beat."""

    poll: float = 5.0
    """The backstop of the notifications, and of the sweep."""
    beat: float = 2.0
    silence: float = 10.0
    """Whoever has not shown for so long that it lives is taken for dead."""


class Wish(Protocol):
    """The wish to stop, which comes in another thread."""

    def is_set(self) -> bool:
        """Whether no new site may be taken."""
        ...

    def wait(self, seconds: float, /) -> object:
        """Sleep, unless and until it is set."""
        ...


class Host:
    """Drains sites until it is told to stop, or until nothing is due on any."""

    def __init__(
        self,
        engine: Engine,
        drain: Drain,
        sweep: Sweep,
        emit: EventSink,
        stop: Wish,
        *,
        slots: int,
        pace: Pace,
        once: bool,
    ) -> None:
        self._engine = engine
        self._sweep = sweep
        self._stop = stop
        self._pace = pace
        self._once = once
        self._wake = asyncio.Event()
        self._sides: list[asyncio.Task[None]] = []
        self._outage = Outage(emit, "the database cannot be worked with, so that sites wait")
        self._deafness = Outage(emit, "wake-ups cannot be heard, so that sites are looked for now and then")
        self._reaper = Reaper(engine, emit, silence=pace.silence)
        self._slots = Slots(
            engine,
            drain,
            emit,
            self._outage,
            most=slots,
            stopping=stop.is_set,
            freed=self._wake.set,
            once=once,
        )

    @property
    def total(self) -> Tally:
        """What became of everything that was drained here."""
        return self._slots.total

    async def run(self) -> Tally:
        """Raises EngineError when Postgres cannot be reached at the start, or with `once` for long."""
        await self._engine.open()
        self._sides = [asyncio.create_task(side) for side in self._side_work()]
        try:
            with _heard(self._stop, self._wake.set):
                await (self._until_idle() if self._once else self._until_told())
                # Nothing that runs here is taken for dead as long as it runs: the heartbeat ends after it.
                await self._slots.empty()
        finally:
            await _ended(self._sides)
            with suppress(EngineError):
                await self._engine.close()
        return self.total

    def _side_work(self) -> list[Coroutine[None, None, None]]:
        beating = self._every(self._pace.beat, self._show_life)
        if self._once:
            return [beating]
        return [beating, self._every(self._pace.poll, self._look_around), self._listen()]

    async def _until_told(self) -> None:
        while not self._stop.is_set():
            # Before the look, never after it: what comes meanwhile would be forgotten.
            self._wake.clear()
            await self._outage.outlast(self._slots.fill, until=self._stop.is_set)
            await self._pause(self._pace.poll)

    async def _until_idle(self) -> None:
        answered = time.monotonic()
        while not self._stop.is_set():
            self._wake.clear()
            try:
                found = await self._found()
            except EngineError as error:
                self._outage.met(error)
                if time.monotonic() - answered > _PATIENCE_ONCE:
                    raise
                await asyncio.sleep(1.0)
                continue
            answered = time.monotonic()
            self._outage.over()
            if not found and not self._slots.orders:
                return
            await self._pause(self._pace.beat)

    async def _found(self) -> bool:
        """Whether there is anything to do for a run that ends when there is not."""
        swept = await self._sweep.sweep(time.time(), besides=self._slots.idle, hurry=True)
        if await self._slots.fill() or swept.woken:
            return True
        # Somebody has a site and is silent: in a moment it is known whether that one lives.
        silent = await self._engine.stalled(1.5 * self._pace.beat)
        return any(order.site not in self._slots.idle for order in silent)

    async def _pause(self, seconds: float) -> None:
        for side in self._sides:
            if side.done():
                side.result()  # it only ends by a mistake of ours, and without it this host is none
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), seconds)

    async def _every(self, seconds: float, look: Callable[[], Coroutine[None, None, float | None]]) -> None:
        """Look again and again: each time after so many seconds, or sooner if it says so."""
        while True:
            sooner = None
            try:
                sooner = await look()
            except EngineError as error:
                self._outage.met(error)
            await asyncio.sleep(seconds if sooner is None else max(_AT_MOST, min(seconds, sooner)))

    async def _show_life(self) -> None:
        await self._engine.beat()
        self._outage.over()
        await self._reaper.reap(lambda: self._slots.orders)

    async def _look_around(self) -> float | None:
        await self._engine.wake(self._slots.repeated(time.monotonic()))
        now = time.time()
        swept = await self._sweep.sweep(now)
        return None if swept.next_due is None else swept.next_due - now

    async def _listen(self) -> None:
        while True:
            try:
                await self._engine.listen(self._hear)
            except EngineError as error:
                self._deafness.met(error)
            await asyncio.sleep(1.0)

    def _hear(self) -> None:
        self._deafness.over()
        self._wake.set()


async def _ended(tasks: list[asyncio.Task[None]]) -> None:
    """End them; again and again, as a library that waits with a time limit may swallow the wish."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=1.0)


@contextmanager
def _heard(stop: Wish, wake: Callable[[], None]) -> Iterator[None]:
    """Inside, `wake` is called in this loop when the wish to stop comes, which comes in another thread."""
    loop = asyncio.get_running_loop()
    over = threading.Event()

    def hear() -> None:
        while not over.is_set() and not stop.is_set():
            stop.wait(1.0)
        with suppress(RuntimeError):  # the loop has ended by itself
            loop.call_soon_threadsafe(wake)

    threading.Thread(target=hear, name="stop", daemon=True).start()
    try:
        yield
    finally:
        over.set()
