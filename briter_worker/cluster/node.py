"""One node of a cluster: Procrastinate's worker hands it sites, and it drains each in a thread.

Procrastinate's `Worker` is used as it is. Around it: a connector that outlasts outages of Postgres, and one
loop that frees the sites of dead nodes and wakes sites that have something due. The fencing token makes a
node harmless that was taken for dead and is not. test_procrastinate.py pins the behaviour that this needs.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from procrastinate import App, JobContext, exceptions
from procrastinate.jobs import Status
from procrastinate.worker import Worker as ProcrastinateWorker

from briter_worker.cluster.connector import LastingConnector, Outage
from briter_worker.cluster.drain_site import NodeSinks, SiteDrains, mark_slow
from briter_worker.cluster.health import Health, describe_node, forget_node, host_of, report_node
from briter_worker.cluster.lanes import Lanes
from briter_worker.cluster.sites import DRAIN_QUEUE, DRAIN_TASK, SLOW_QUEUE, get, wake
from briter_worker.drain import Counts
from briter_worker.errors import (
    DeclinedError,
    FailureCode,
    LockLostError,
    NodeFailureError,
    PublishError,
    UnavailableError,
    UsageError,
    os_error_fix,
    os_error_text,
)
from briter_worker.events import Reaped, Warned, WorkerStarted, WorkerStopped
from briter_worker.plugins import Plugins
from briter_worker.queues.postgres.control import PostgresControl
from briter_worker.queues.postgres.database import Database, DatabaseError, VersionError
from briter_worker.queues.postgres.payloads import collect_blobs
from briter_worker.sinks.store import StoreError
from briter_worker.wiring import open_backoff
from briter_worker.worker import Stop, loop_backoff

if TYPE_CHECKING:
    from collections.abc import Collection

    from procrastinate.jobs import Job

    from briter_worker.settings import Settings
    from briter_worker.sinks.log import LogSink
    from briter_worker.sinks.metrics import MetricsSink

_POLL_S = 0.5
"""A notification can be lost while a job is fetched, and none follows when a site is free again."""
_LOOP_S = 2.0
_STOP_LOOK_S = 0.1
_DEAD_S = 10.0
"""A node without a heartbeat for this time is taken for dead."""
_FORGET_S = 86_400.0
_HOUSEKEEPING_S = 600.0
_FIRST_PAUSE_S = 0.25
_LAST_TRIES_S = 10.0
"""How long a node that stops tries to tell Postgres what it completed."""
_DOUBT_S = 60.0
"""How long a site rests whose jobs in flight wait for an answer of the remote."""
# Sites that have something due and no drain waiting: posts whose schedule or backoff ended, producers that
# died between their commit and the wake-up, drains that were cut off. A retry further away than any backoff
# was written by a clock that ran ahead, and is due. A site whose drain waits or runs looks for itself.
_DUE_SITES = """
SELECT s.name FROM sites s
WHERE NOT s.removed
  AND (s.paused IS NULL OR (s.paused->>'until')::float8 <= %(now)s)
  AND s.name <> ALL (%(besides)s::text[])
  AND (
    s.pull_at <= %(now)s OR (s.pull_at IS NULL AND %(pulls)s)
    OR EXISTS (
      SELECT FROM publications p
      WHERE p.site = s.name AND p.state = 'pending' AND p.due_at <= %(now)s
        AND NOT (p.tried AND coalesce((s.settings->>'workerDryRun')::boolean, %(dry_run)s))
    )
    OR EXISTS (
      SELECT FROM publications p
      WHERE p.site = s.name AND p.state = 'pending' AND p.next_attempt_at > %(furthest)s
    )
    OR (
      coalesce(s.taken_at, 0) <= %(now)s - %(doubt)s
      AND EXISTS (SELECT FROM publications p WHERE p.site = s.name AND p.state = 'claimed')
    )
  )
  AND NOT EXISTS (
    SELECT FROM procrastinate_jobs j WHERE j.lock = s.name AND j.status IN ('todo', 'doing')
  )
"""


def run_node(
    settings: Settings,
    *,
    workers: int,
    once: bool,
    log: LogSink,
    metrics: MetricsSink | None = None,
) -> int:
    """Publish for all sites, up to `workers` at once, until stopped; return the exit status.

    With `once`, until nothing is due; then DatabaseError is raised when Postgres cannot be used.
    """
    for name in ("procrastinate", "psycopg", "psycopg.pool", "asyncio"):
        log_of_library = logging.getLogger(name)  # would be unredacted
        log_of_library.propagate = False
        log_of_library.addHandler(logging.NullHandler())
    with Database(settings.database_url, connections=workers) as database:
        if once:
            database.check()
        name, health = f"{socket.gethostname()}:{os.getpid()}", Health(settings, log)
        sinks = NodeSinks(settings, database, log, metrics)
        drains = SiteDrains(settings, database, Plugins(settings.plugins), sinks, health, node=name)
        stop = Stop(log, limit=settings.worker_shutdown_timeout_ms / 1000, abort=drains.abort)
        node = Node(settings, database, drains, sinks, log, stop, health=health, name=name, slots=workers)
        try:
            with stop.on_signals():
                log(WorkerStarted(pid=os.getpid(), dry_run=settings.worker_dry_run))
                if once:
                    asyncio.run(node.run_once())
                elif node.wait_for_database():
                    asyncio.run(node.run_forever())
        finally:
            log(WorkerStopped(drained=node.counts.completed))
            sinks.close()
    return 1 if once and (node.counts.failed or node.counts.undecided) else 0


class Node:
    """Drains sites, up to `slots` at once."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        drains: SiteDrains,
        sinks: NodeSinks,
        log: LogSink,
        stop: Stop,
        *,
        health: Health,
        name: str,
        slots: int,
    ) -> None:
        self.counts = Counts()
        self._settings = settings
        self._database = database
        self._drains = drains
        self._sinks = sinks
        self._health = health
        self._log = log
        self._stop = stop
        self._name = name
        self._slots = slots
        self._lanes = Lanes(slots, settings.worker_per_host, self._permits)
        self._threads = ThreadPoolExecutor(self._lanes.threads, thread_name_prefix="drain")
        self._running: set[int] = set()
        """Procrastinate's numbers of the jobs that this node works on."""
        self._strays: set[int] = set()
        self._failures: dict[str, int] = {}
        self._retry_at: dict[str, float] = {}
        """Sites whose drain failed, and the monotonic time until which this node does not wake them."""
        self._idle: set[str] = set()
        """Sites whose last drain completed nothing; for `run_once`."""
        self._swept_at = -math.inf
        """When, by the monotonic clock, to look next for sites that have something due."""
        self._sooner = asyncio.Event()
        self._stopping_since: float | None = None
        self._workers: list[ProcrastinateWorker] = []
        self._outage = Outage(log)
        connector = LastingConnector(database.conninfo, self._outage, self._gives_up)
        self._app = App(connector=connector)
        self._app.task(name=DRAIN_TASK, queue=DRAIN_QUEUE, pass_context=True)(self._drain_site)

    def wait_for_database(self) -> bool:
        """Wait until Postgres can be used; return False when stopped. Raises VersionError."""
        while not self._stop.is_set():
            try:
                self._database.check()
            except VersionError:
                raise
            except DatabaseError as error:
                self._outage.begin(error)
                time.sleep(_FIRST_PAUSE_S)
            else:
                self._outage.end()
                return True
        return False

    async def run_forever(self) -> None:
        """Drain sites until stopped."""
        async with self._app.open_async():
            loops = [
                asyncio.create_task(self._watch_cluster()),
                asyncio.create_task(self._keep_house()),
            ]
            try:
                while not self._stop.is_set():
                    if self._health.problem is None:
                        await asyncio.gather(
                            self._run_worker([DRAIN_QUEUE], self._slots, wait=True),
                            self._run_worker([SLOW_QUEUE], self._lanes.slow, wait=True),
                        )
                    else:
                        await self._rest()
            finally:
                for task in loops:
                    task.cancel()
                await asyncio.gather(*loops, return_exceptions=True)
        with suppress(DatabaseError):
            forget_node(self._database, self._name)
        self._threads.shutdown()

    async def _rest(self) -> None:
        """Wait before a sick node looks whether it may take sites again."""
        until = time.monotonic() + self._health.pause()
        while time.monotonic() < until and not self._stop.is_set():  # noqa: ASYNC110 - set in another thread
            await asyncio.sleep(_STOP_LOOK_S)
        await asyncio.to_thread(self._health.probe)

    async def run_once(self) -> None:
        """Drain sites until nothing is due that this node can publish."""
        async with self._app.open_async():
            while not self._stop.is_set() and self._health.problem is None:
                before = self.counts.completed
                woken, _ = await asyncio.to_thread(self._wake_due, self._idle, doubt=0.0)
                await self._run_worker([DRAIN_QUEUE, SLOW_QUEUE], self._slots, wait=False)
                if not woken and self.counts.completed == before and not await self._free_dead_sites():
                    break
        with suppress(DatabaseError):
            collect_blobs(self._database)
        self._threads.shutdown()

    async def _run_worker(self, queues: list[str], size: int, *, wait: bool) -> None:
        """Run Procrastinate's worker until it stops; an error of its own ends it, and a new one follows."""
        worker = ProcrastinateWorker(
            self._app,
            queues=queues,
            concurrency=size,
            wait=wait,
            fetch_job_polling_interval=_POLL_S,
            delete_jobs="always",
            listen_notify=wait,
            install_signal_handlers=False,
            update_heartbeat_interval=_LOOP_S,
            stalled_worker_timeout=_FORGET_S,
        )
        stopping = asyncio.create_task(self._stop_in_time(worker))
        self._workers.append(worker)
        try:
            await worker.run()  # type: ignore[no-untyped-call]  # of Procrastinate
        except exceptions.ProcrastinateException as error:
            self._outage.begin(error)
            for other in self._workers:
                other.stop()  # type: ignore[no-untyped-call]  # of Procrastinate
        finally:
            stopping.cancel()
            self._workers.remove(worker)
        if wait and not self._stop.is_set() and self._health.problem is None:
            await asyncio.sleep(1.0)  # an error ended it: no loop without a pause

    async def _stop_in_time(self, worker: ProcrastinateWorker) -> None:
        """Stop the worker when the order comes, or the node is sick; both come from another thread."""
        while not self._stop.is_set() and self._health.problem is None:  # noqa: ASYNC110 - as said
            await asyncio.sleep(_STOP_LOOK_S)
        worker.stop()  # type: ignore[no-untyped-call]  # of Procrastinate

    async def _drain_site(self, context: JobContext, site: str) -> None:
        """Drain one site; Procrastinate's task."""
        number = context.job.id or 0
        self._running.add(number)
        try:
            if self._stop.is_set():
                return  # the sweep of another node finds it
            counts, next_due = await self._drain_in_lane(site, is_slow=context.job.queue == SLOW_QUEUE)
            self.counts.add(counts)
            if self._health.problem is not None:
                for worker in self._workers:
                    worker.stop()  # type: ignore[no-untyped-call]  # another node takes the site
            if next_due > 0:
                self._sweep_in(next_due)
            elif not self._stop.is_set():
                await asyncio.to_thread(wake, self._database, [site])
        except DatabaseError as error:
            self._outage.begin(error)
        finally:
            self._running.discard(number)

    async def _drain_in_lane(self, site: str, *, is_slow: bool) -> tuple[Counts, float]:
        """Drain the site in a thread, when its lane and its host let it."""

        def drain() -> asyncio.Future[tuple[Counts, float]]:
            return asyncio.get_running_loop().run_in_executor(self._threads, self._drain, site)

        if is_slow:
            return await drain()
        host = self._drains.hosts.get(site)
        if host is None:
            host = await asyncio.to_thread(self._read_host, site)
        found = await self._lanes.run(host, drain)
        if found is None:  # its host hangs
            await asyncio.to_thread(mark_slow, self._database, site, is_slow=True)
            return Counts(), 0.0
        return found

    def _permits(self) -> asyncio.Semaphore:
        """Return the semaphore by which the worker of the ordinary lane fetches."""
        return self._workers[0]._job_semaphore  # noqa: SLF001 - test_procrastinate.py pins it

    def _read_host(self, site: str) -> str:
        with suppress(DeclinedError):  # it was removed meanwhile
            return host_of(get(self._database, site).remote)
        return ""

    def _sweep_in(self, seconds: float) -> None:
        """Look no later for sites that have something due."""
        at = time.monotonic() + seconds
        if at < self._swept_at:
            self._swept_at = at
            self._sooner.set()

    def _drain(self, site: str) -> tuple[Counts, float]:
        """Drain the site in this thread; whatever happens to one site does not end the others."""
        try:
            counts, next_due = self._drains.drain(site, self._stop.is_set)
        except LockLostError as lost:
            self._warn(site, str(lost), "")
            return Counts(), math.inf
        except NodeFailureError as error:
            if self._health.problem is None:
                self._warn(site, f"{error}; the site is cloned again", "")
                return Counts(), 0.0
            self._defer(site)
            self._forgive()
            return Counts(failed=1), 0.0
        except UnavailableError as error:
            self._outage.begin(error)
        except (PublishError, UsageError) as error:
            self._warn(site, error.message, error.fix)
        except OSError as error:
            self._warn(site, os_error_text(error), os_error_fix(error))
        except Exception as error:  # noqa: BLE001 - as above
            text = f"an error in the worker itself: {type(error).__name__}: {error}"
            self._warn(site, text, "report it to the developers of Briter Worker")
        else:
            self._note(site, counts)
            return counts, next_due
        self._defer(site)
        return Counts(failed=1), math.inf

    def _note(self, site: str, counts: Counts) -> None:
        """Note what became of a drain."""
        if counts.undecided:
            self._defer(site)
        else:
            self._failures.pop(site, None)
        if counts.completed > counts.failed:
            self._health.succeed(site)
        (self._idle.discard if counts.completed else self._idle.add)(site)

    def _forgive(self) -> None:
        """Uncount the attempts that failed because this node had no network."""
        for site in self._health.unreachable_sites():
            with suppress(DatabaseError, DeclinedError):
                PostgresControl(self._database, site).forgive(FailureCode.NETWORK, self._database.now())

    def _defer(self, site: str) -> None:
        """Have this node leave the site alone for a while: longer after each failure."""
        self._idle.add(site)
        self._failures[site] = self._failures.get(site, 0) + 1
        self._retry_at[site] = time.monotonic() + loop_backoff(self._failures[site], _POLL_S)

    def _warn(self, site: str, text: str, fix: str) -> None:
        self._log(Warned(error=f"site {site}: {text}", fix=fix))

    async def _watch_cluster(self) -> None:
        """Free the sites of dead nodes, and wake sites that have something due, again and again."""
        poll, reported_at = self._settings.worker_poll_interval_ms / 1000, -math.inf
        while True:
            try:
                await self._free_dead_sites()
                now = time.monotonic()
                if now >= reported_at + _LOOP_S:
                    reported_at = now
                    facts = describe_node(self._settings, self._health, self._database)
                    await asyncio.to_thread(report_node, self._database, self._name, facts)
                resting = [site for site, at in self._retry_at.items() if at > now]
                self._retry_at = {site: self._retry_at[site] for site in resting}
                if now >= self._swept_at:
                    self._swept_at = now + poll
                    _, next_due = await asyncio.to_thread(self._wake_due, resting)
                    self._sweep_in(max(0.0, next_due))
            except (DatabaseError, exceptions.ProcrastinateException) as error:
                self._outage.begin(error)
            self._sooner.clear()
            wait = max(0.1, min(_LOOP_S, self._swept_at - time.monotonic()))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._sooner.wait(), wait)

    async def _free_dead_sites(self) -> bool:
        """Free what dead nodes hold, and what this node was handed in an answer that was lost."""
        manager = self._app.job_manager
        freed: list[Job] = []
        if self._outage.is_steady(_DEAD_S):
            stalled = await manager.get_stalled_jobs(seconds_since_heartbeat=_DEAD_S)
            freed += [job for job in stalled if job.id not in self._running]
        strays: dict[int, Job] = {}
        for worker in [each.worker_id for each in self._workers if each.worker_id is not None]:
            ours = await manager.list_jobs_async(status="doing", worker_id=worker)
            strays |= {job.id or 0: job for job in ours if job.id not in self._running}
        freed += [job for number, job in strays.items() if number in self._strays]
        self._strays = set(strays)
        for job in freed:
            await self._free(job)
        return bool(freed)

    async def _free(self, job: Job) -> None:
        """Delete the job and wake the site again.

        Not by `retry_job`, which keeps the number: a node that only slept would finish the new attempt.
        """
        site = job.lock or ""
        try:
            await self._app.job_manager.finish_job_by_id_async(job.id or 0, Status.SUCCEEDED, delete_job=True)
        except exceptions.ConnectorException:
            return  # another node was faster
        self._log(Reaped(site=site, worker=job.worker_id))
        await asyncio.to_thread(wake, self._database, [site])

    async def _keep_house(self) -> None:
        """Delete blobs that nothing refers to, old receipts and the rows of nodes that are long gone."""
        while True:
            with suppress(DatabaseError, StoreError):
                await asyncio.to_thread(collect_blobs, self._database)
                await asyncio.to_thread(self._sinks.retire)
            await asyncio.sleep(_HOUSEKEEPING_S)

    def _wake_due(self, besides: Collection[str], *, doubt: float = _DOUBT_S) -> tuple[list[str], float]:
        """Wake the sites that have something due, except `besides`. Return them, and the wait for a next one.

        `doubt`: how long a site rests whose jobs in flight wait for the remote. Raises DatabaseError.
        """
        now = self._database.read_clock()
        values = {
            "now": now,
            "furthest": now + open_backoff(self._settings).longest,
            "besides": list(besides),
            "dry_run": self._settings.worker_dry_run,
            "doubt": doubt,
            "pulls": self._settings.git_pull_interval_ms > 0,
        }
        with self._database.connection() as connection:
            names = [name for (name,) in connection.execute(_DUE_SITES, values)]
            row = connection.execute(
                "SELECT min(due_at) FROM publications WHERE state = 'pending' AND due_at > %s", (now,)
            ).fetchone()
        if names:
            wake(self._database, names)
        return names, row[0] - now if row and row[0] is not None else math.inf

    def _gives_up(self) -> bool:
        """Return True if the node stops and Postgres has been away for too long to wait for it."""
        if not self._stop.is_set():
            return False
        self._stopping_since = self._stopping_since or time.monotonic()
        return time.monotonic() - self._stopping_since > _LAST_TRIES_S
