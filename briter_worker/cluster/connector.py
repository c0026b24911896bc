"""Procrastinate's connection to Postgres: it outlasts outages, and reports each of them once."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
from procrastinate import PsycopgConnector, exceptions

from briter_worker.events import Warned

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from procrastinate.connector import Notify

T = TypeVar("T")

_FIRST_PAUSE_S = 0.25
_MAX_PAUSE_S = 5.0
_OUTAGES = (psycopg.OperationalError, psycopg.InterfaceError, OSError, TimeoutError)


class Outage:
    """Reports once when Postgres stops answering the dispatch, and when it answers again."""

    def __init__(self, log: Callable[[Warned], None]) -> None:
        self._log = log
        self._since: float | None = None
        self._steady_since = -math.inf

    def begin(self, error: BaseException) -> None:
        """Note a failure."""
        if self._since is None:
            self._since = time.monotonic()
            cause = str(error.__cause__ or error).strip() or type(error).__name__
            text = f"Postgres does not answer, so that sites wait: {cause}"
            self._log(
                Warned(error=text, fix="check that Postgres runs and that BRITER_DATABASE_URL is right")
            )

    def end(self) -> None:
        """Note a success."""
        if self._since is not None:
            self._log(Warned(error=f"Postgres answers again after {time.monotonic() - self._since:.0f} s"))
            self._since = None
            self._steady_since = time.monotonic()

    def is_steady(self, seconds: float) -> bool:
        """Return True if Postgres has answered for so long that every living node sent a heartbeat."""
        return self._since is None and time.monotonic() - self._steady_since > seconds


class LastingConnector(PsycopgConnector):
    """Repeats each statement until Postgres answers, because an error ends Procrastinate's worker."""

    def __init__(self, conninfo: str, outage: Outage, give_up: Callable[[], bool]) -> None:
        super().__init__(
            conninfo=conninfo,
            min_size=1,
            max_size=1,
            timeout=_MAX_PAUSE_S,
            # Shorter than a statement waits: each one starts again, so that no pause grows by doubling.
            reconnect_timeout=_MAX_PAUSE_S - 1,
        )
        self._outage = outage
        self._give_up = give_up

    async def open_async(self, pool: Any = None) -> None:  # noqa: ANN401 - as the base
        """Open the pool without waiting for Postgres: each statement waits for it."""
        if self._async_pool is None and pool is None:
            self._async_pool = await self._create_pool(self._pool_args)
            await self._async_pool.open(wait=False)
        await super().open_async(pool)

    async def execute_query_async(self, query: Any, **arguments: Any) -> None:  # noqa: ANN401 - as the base
        """Run a statement."""
        await self._repeat(partial(super().execute_query_async, query, **arguments))

    async def execute_query_one_async(self, query: Any, **arguments: Any) -> dict[str, Any]:  # noqa: ANN401
        """Return one row."""
        return await self._repeat(partial(super().execute_query_one_async, query, **arguments))

    async def execute_query_all_async(self, query: Any, **arguments: Any) -> list[dict[str, Any]]:  # noqa: ANN401
        """Return all rows."""
        return await self._repeat(partial(super().execute_query_all_async, query, **arguments))

    async def listen_notify(self, on_notification: Notify, channels: Any) -> None:  # noqa: ANN401 - as the base
        """Listen until cancelled; the poll covers what was notified while nobody listened."""
        while True:
            with suppress(exceptions.ConnectorException):
                await super().listen_notify(on_notification=on_notification, channels=channels)
            await asyncio.sleep(1.0)

    async def _repeat(self, call: Callable[[], Awaitable[T]]) -> T:
        pause = _FIRST_PAUSE_S
        while True:
            try:
                result = await call()
            except exceptions.ConnectorException as error:
                if not isinstance(error.__cause__, _OUTAGES) or self._give_up():
                    raise
                self._outage.begin(error)
            else:
                self._outage.end()
                _raise_lost_cancellation()
                return result
            _raise_lost_cancellation()
            await asyncio.sleep(pause)
            pause = min(pause * 2, _MAX_PAUSE_S)


def _raise_lost_cancellation() -> None:
    """Cancel again what was cancelled while it waited for the pool, which then may return a connection.

    asyncio.wait_for of Python 3.11 loses a cancellation so: https://github.com/python/cpython/issues/86296
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
