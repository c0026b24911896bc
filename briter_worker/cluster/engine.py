"""Procrastinate, as one host uses it: it hands a site to one host at a time, and knows which hosts live.

Its tables, locks, notifications and heartbeats are used, and its `Worker` is not. That one looks for a job
whose lock was taken only at its next poll (a save during a site's drain would wait for it), forgets a
notification that comes while it fetches, stops its heartbeat before its last jobs end, and leaves a job
locked for good when Postgres is away at the moment in which it ends.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, LiteralString

import psycopg
from procrastinate import App, PsycopgConnector, exceptions
from procrastinate.jobs import Status
from procrastinate.manager import get_channel_for_queues
from psycopg.sql import SQL, Identifier

from briter_worker.cluster.waking import QUEUE, WAKE
from briter_worker.errors import for_people

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence


# A cut cable says nothing: without these, who waits for an answer waits for a quarter of an hour.
_CONNECTION: dict[str, Any] = {
    "application_name": "briter-worker dispatch",
    "connect_timeout": 5,
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}
_PATIENCE = 5.0
"""How long a question may wait for the one connection of the dispatch, and for its answer."""
_PROBE = 20.0
"""After so long a silence it is asked whether the other side is still there."""

_OURS: LiteralString = """
SELECT id, lock AS site, worker_id FROM procrastinate_jobs
WHERE status = 'doing' AND queue_name = %(queue)s AND worker_id = %(worker)s
"""
_UP_FOR: LiteralString = """
SELECT extract(epoch FROM clock_timestamp() - pg_postmaster_start_time())::float8 AS seconds
"""
_KNOWN: LiteralString = "SELECT id FROM procrastinate_workers WHERE id = %(worker)s"
_NOTIFY: LiteralString = """
SELECT pg_notify(%(channel)s, '{"type": "job_inserted", "job_id": 0}')
"""


class EngineError(OSError):
    """The dispatch cannot be asked. Asking again later is all there is to do; the text is for people."""

    def __init__(self, error: BaseException) -> None:
        cause = error.__cause__ or error
        why = for_people(str(cause)) or type(cause).__name__
        super().__init__(f"{why}. Fix: see that Postgres runs and that BRITER_DATABASE_URL is right")


@dataclass(frozen=True, slots=True)
class Order:
    """`drain site`, handed to one host."""

    id: int
    site: str
    worker: int | None
    """Whom it was handed to; None when nothing is known of that one any more."""


class Engine:
    """The dispatch, seen from one host. Takes two connections: one asks, one listens.

    Everything but `listen` raises EngineError when Postgres does not answer.
    """

    def __init__(self, conninfo: str) -> None:
        for name in ("procrastinate", "psycopg", "psycopg.pool", "asyncio"):
            _silence(name)
        self._conninfo = conninfo
        self._connector = PsycopgConnector(
            conninfo=conninfo,
            kwargs=_CONNECTION,
            configure=_configure,
            min_size=1,
            max_size=1,
            timeout=_PATIENCE,
            # Shorter than a question waits: the next one starts anew, so that no pause grows by doubling.
            reconnect_timeout=_PATIENCE - 1,
        )
        self._jobs = App(connector=self._connector).job_manager
        self.worker: int | None = None
        """Who this host is, since it was enlisted."""

    async def open(self) -> None:
        """Connect, and be known as a host that lives."""
        with _asking():
            # The pool tries for half a minute, and then does not say why it could not.
            await (await psycopg.AsyncConnection.connect(self._conninfo, **_CONNECTION)).close()
            await self._connector.open_async()
        await self.enlist()

    async def close(self) -> None:
        """Be known no more. What was handed to this host and not finished is anybody's."""
        with _asking():
            try:
                if self.worker is not None:
                    await self._jobs.unregister_worker(self.worker)
            finally:
                await self._connector.close_async()

    async def enlist(self) -> None:
        """Be known as a new host."""
        with _asking():
            self.worker = await self._jobs.register_worker()

    async def beat(self) -> None:
        """Show that this host lives. Where it was taken for dead, it is a new host from now on."""
        with _asking():
            await self._jobs.update_heartbeat(self._known())
        if not await self.ask(_KNOWN, worker=self._known()):
            await self.enlist()

    async def take(self) -> Order | None:
        """The next site to be drained, this host's until it is finished; None when there is none."""
        with _asking():
            try:
                job = await self._jobs.fetch_job([QUEUE], self._known())
            except exceptions.ConnectorException as error:
                if not isinstance(error.__cause__, psycopg.errors.ForeignKeyViolation):
                    raise
                # This host was silent for so long that it was taken for dead: suspended, as a rule.
                self.worker = await self._jobs.register_worker()
                job = await self._jobs.fetch_job([QUEUE], self._known())
        return None if job is None else Order(job.id or 0, job.lock or "", self.worker)

    async def finish(self, order: Order) -> bool:
        """The site is free for the next one; False when it had been taken from this host before."""
        with _asking():
            try:
                await self._jobs.finish_job_by_id_async(order.id, Status.SUCCEEDED, delete_job=True)
            except exceptions.ConnectorException as error:
                if isinstance(error.__cause__, psycopg.errors.RaiseException):
                    return False
                raise
        return True

    async def wake(self, sites: Collection[str]) -> Sequence[str]:
        """Have these drained; those of which that was not waiting to be done already."""
        return [row["site"] for row in await self.ask(WAKE, sites=list(sites))] if sites else []

    async def notify(self) -> None:
        """Have every host look for what waits."""
        for channel in get_channel_for_queues([QUEUE]):
            await self.ask(_NOTIFY, channel=channel)

    async def up_for(self) -> float:
        """For how many seconds Postgres has been running."""
        (row,) = await self.ask(_UP_FOR)
        return float(row["seconds"])

    async def stalled(self, silence: float) -> Sequence[Order]:
        """What was handed to hosts that have been silent for so many seconds, or are known no more."""
        with _asking():
            found = await self._jobs.get_stalled_jobs(queue=QUEUE, seconds_since_heartbeat=silence)
        return [Order(job.id or 0, job.lock or "", job.worker_id) for job in found]

    async def forget(self, silence: float) -> None:
        """Drop hosts that have been silent for so long from the list."""
        with _asking():
            await self._jobs.prune_stalled_workers(silence)

    async def ours(self) -> Sequence[Order]:
        """What was handed to this host."""
        rows = await self.ask(_OURS, queue=QUEUE, worker=self._known())
        return [Order(row["id"], row["site"], row["worker_id"]) for row in rows]

    async def listen(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever a site is to be drained, until this is cancelled or Postgres is away.

        And once when it begins to hear, as what was told before was not heard.
        """
        with _asking():
            async with await psycopg.AsyncConnection.connect(
                self._conninfo, autocommit=True, **_CONNECTION
            ) as connection:
                for channel in get_channel_for_queues([QUEUE]):
                    await connection.execute(SQL("LISTEN {}").format(Identifier(channel)))
                wake()
                while True:
                    async for _ in connection.notifies(timeout=_PROBE):
                        wake()
                    await connection.execute("SELECT")  # is anybody there?

    async def ask(self, query: LiteralString, **arguments: object) -> list[dict[str, Any]]:
        """The rows of a question of our own."""
        with _asking():
            rows: list[dict[str, Any]] = await self._connector.execute_query_all_async(query, **arguments)
            return rows

    def _known(self) -> int:
        if self.worker is None:
            raise EngineError(RuntimeError("this host is not enlisted"))
        return self.worker


async def _configure(connection: psycopg.AsyncConnection) -> None:
    await connection.set_autocommit(True)  # every question is one statement
    # The words that wait are to be walked in their order, up to the first that may go. Where the table was
    # empty when Postgres looked at it last, as it mostly is, it would rather compare each with each, and
    # sort: ten seconds for ten thousand sites.
    await connection.execute(
        "SELECT set_config('statement_timeout', %s, false), set_config('enable_sort', 'off', false)",
        (str(round(_PATIENCE * 1000)),),
    )


@contextmanager
def _asking() -> Iterator[None]:
    try:
        yield
    except (exceptions.ProcrastinateException, psycopg.Error, OSError) as error:
        raise EngineError(error) from error


def _silence(name: str) -> None:
    """Libraries that say what they met would say it unredacted, and without a handler on standard error."""
    log = logging.getLogger(name)
    log.propagate = False
    if not log.handlers:
        log.addHandler(logging.NullHandler())
