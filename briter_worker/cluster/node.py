"""One node of a cluster: threads that take sites and drain them, and a loop that keeps the node alive.

A slot is the right to take a site. A drain that takes long gives its slot back while it goes on, so that
slow remotes do not hold every slot; a site whose last drain crawled comes in a lane with few slots. At most
some drains at once reach one remote host.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import threading
import time
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import psycopg

from briter_worker.cluster.drain_site import HostFullError, NodeSinks, SiteDrains
from briter_worker.cluster.health import Health, describe_node, forget_node, report_node
from briter_worker.cluster.leases import Leases
from briter_worker.cluster.sites import CHANNEL
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
from briter_worker.events import Event, Reaped, Warned, WorkerStarted, WorkerStopped
from briter_worker.plugins import Plugins
from briter_worker.queues.postgres.control import PostgresControl
from briter_worker.queues.postgres.database import Database, DatabaseError, VersionError
from briter_worker.queues.postgres.payloads import collect_blobs
from briter_worker.sinks.store import StoreError
from briter_worker.wiring import open_ssh
from briter_worker.worker import Stop, loop_backoff

if TYPE_CHECKING:
    from collections.abc import Callable

    from briter_worker.cluster.drain_site import Taken
    from briter_worker.settings import Settings
    from briter_worker.sinks.log import LogSink
    from briter_worker.sinks.metrics import MetricsSink

_TICK_S = 0.1
_REPORT_S = 2.0
_STEADY_S = 10.0
"""Every living node has reported itself once Postgres has answered for this time."""
_HOUSEKEEPING_S = 600.0
_LISTEN_S = 30.0
_REPORT_WITHIN_S = 5.0
"""A heartbeat that takes longer is none: the connection is opened again."""
_FIRST_PAUSE_S = 0.5
_PARK_S = 1.0
"""A drain that takes longer gives its slot back, and goes on."""
_MANY_JOBS = 500
"""After a drain of so many jobs, the next site has its turn."""


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
    logging.getLogger("psycopg").propagate = False  # a plugin's handlers would show it unredacted
    url, plans = settings.database_url, "force_generic_plan"  # to plan a statement costs more than to run it
    with (
        closing(Database(url, connections=workers, plan_cache_mode=plans)) as database,
        # The drains' statements are planned in few connections.
        closing(Database(url, connections=1, answer_within=_REPORT_WITHIN_S)) as own,
    ):
        if once:
            database.check()
        node = Node(settings, database, own, log, metrics, slots=workers)
        try:
            with node.stop.on_signals():
                log(WorkerStarted(pid=os.getpid(), dry_run=settings.worker_dry_run))
                if once:
                    node.run_once()
                else:
                    node.run_forever()
        finally:
            log(WorkerStopped(drained=node.counts.completed))
            node.sinks.close()
            node.ssh.close()
    return 1 if once and (node.counts.failed or node.counts.undecided) else 0


class _Outage:
    """Reports once when Postgres stops answering, and when it answers again."""

    def __init__(self, log: Callable[[Warned], None]) -> None:
        self._log = log
        self._since: float | None = None
        self._steady_since = -math.inf

    def begin(self, error: BaseException) -> None:
        if self._since is None:
            self._since = time.monotonic()
            text = f"Postgres does not answer, so that sites wait: {error}"
            fix = "check that Postgres runs and that BRITER_DATABASE_URL is right"
            self._log(Warned(error=text, fix=fix))

    def end(self) -> None:
        since, self._since = self._since, None
        if since is not None:
            self._steady_since = now = time.monotonic()
            self._log(Warned(error=f"Postgres answers again after {now - since:.0f} s"))

    def is_steady(self) -> bool:
        """Return True if Postgres has answered for so long that every living node has reported itself."""
        return self._since is None and time.monotonic() - self._steady_since > _STEADY_S


class _Lane:
    """Slots for sites that are slow, or for those that are not. Its node's lock guards it."""

    def __init__(self, guard: threading.RLock, slots: int, kinds: tuple[bool, ...], parked: int = 0) -> None:
        self.kinds = kinds
        """Values of `slow` of the sites that the lane takes."""
        self.free = slots
        self.parked = parked
        """Number of drains that may still give their slots back."""
        self.looked = -1
        """The number of the wake-up after which nothing was found."""
        self.changed = threading.Condition(guard)


@dataclass(slots=True)
class _Running:
    """A drain that runs. `is_parked`: its slot is given back."""

    lane: _Lane
    began: float = field(default_factory=time.monotonic)
    is_parked: bool = False


class Node:
    """Drains sites, up to `slots` at once."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        own: Database,
        log: LogSink,
        metrics: MetricsSink | None,
        *,
        slots: int,
    ) -> None:
        self.counts = Counts()
        self.sinks = NodeSinks(settings, database, log, metrics)
        self._settings = settings
        self._database, self._own = database, own
        self._log = log
        self._slots = slots
        # Containers with their host's network have one name and the process 1.
        self._name = f"{socket.gethostname()}-{secrets.token_hex(3)}:{os.getpid()}"
        self._health = Health(settings, log)
        self._leases = Leases(database, self._name, settings)
        self._sweeps = Leases(own, self._name, settings)
        plugins = Plugins(settings.plugins)
        self.ssh = open_ssh(settings)
        self._drains = SiteDrains(
            settings, database, plugins, self.sinks, self._health, self._leases, self.ssh
        )
        limit = settings.worker_shutdown_timeout_ms / 1000
        self.stop = Stop(self._announce_stop, limit=limit, abort=self._drains.abort)
        self._per_host = settings.worker_per_host or max(1, slots // 2)
        self._poll = settings.worker_poll_interval_ms / 1000
        self._outage = _Outage(log)
        self._taking = threading.Lock()
        """Held while a site is taken, so that the limit of a host holds."""
        self._guard = threading.RLock()
        """Guards what follows."""
        self._lanes: list[_Lane] = []
        self._is_once = self._is_ending = False
        self._wakes = 0
        self._running: dict[str, _Running] = {}
        self._swept: list[str] = []
        """Sites that have something to do beside due jobs."""
        self._report_at = self._poll_at = -math.inf
        self._look_at = self._probe_at = math.inf
        """By the monotonic clock, as these: when a job becomes due, and when to probe a sick node."""
        self._failures: dict[str, int] = {}
        self._retry_at: dict[str, float] = {}
        """Sites that this node leaves alone until then."""
        self._idle: set[str] = set()
        """Sites whose last drain completed nothing; for `run_once`."""

    def run_forever(self) -> None:
        """Drain sites until stopped. Raises VersionError."""
        if not self._wait_for_database():
            return
        slow = max(1, self._slots // 4)
        self._lanes = [
            _Lane(self._guard, self._slots, (False,), parked=3 * self._slots),
            _Lane(self._guard, slow, (True,)),
        ]
        threads = [
            threading.Thread(target=self._work, args=(lane,), name="drain")
            for lane in self._lanes
            for _ in range(lane.free + lane.parked)
        ]
        helpers = [threading.Thread(target=each, daemon=True) for each in (self._listen, self._keep_house)]
        for thread in (*threads, *helpers):
            thread.start()
        try:
            while not self.stop.is_set():
                self._tick()
                time.sleep(_TICK_S)
        finally:
            self._is_ending = True
            self._wake()
            for thread in threads:
                thread.join()
        with suppress(DatabaseError):
            forget_node(self._own, self._name)

    def run_once(self) -> None:
        """Drain sites until nothing is due that this node can publish. Raises DatabaseError."""
        self._is_once, self._poll_at = True, math.inf
        while not self.stop.is_set() and self._health.problem is None:
            before = self.counts.completed
            self._tick()
            steady = self._outage.is_steady()
            self._swept = self._leases.sweep(is_steady=steady, besides=self._idle, doubt=0.0)
            self._lanes = [_Lane(self._guard, self._slots, (False, True))]
            threads = [threading.Thread(target=self._work, args=self._lanes) for _ in range(self._slots)]
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(_TICK_S)
                    self._tick()
            if self.counts.completed == before:
                break
        with suppress(DatabaseError):
            collect_blobs(self._own)
            forget_node(self._own, self._name)

    def _announce_stop(self, event: Event) -> None:
        self._log(event)
        self._database.give_up(self._own)

    # The node's own loop

    def _wait_for_database(self) -> bool:
        """Wait until Postgres can be used; return False when stopped."""
        while not self.stop.is_set():
            try:
                self._own.check()
            except VersionError:
                raise
            except DatabaseError as error:
                self._outage.begin(error)
                time.sleep(_FIRST_PAUSE_S)
            else:
                self._outage.end()
                return True
        return False

    def _tick(self) -> None:
        """Do what is due: report this node, look for sites, give slots back, probe a sick node."""
        now = time.monotonic()
        try:
            if now >= self._report_at:
                self._report_at = now + _REPORT_S
                report_node(self._own, self._name, describe_node(self._settings, self._health, self._own))
                self._database.set_clock(self._own.now())  # one that took no site knows the time, too
            if now >= self._poll_at:
                self._poll_at = self._look_at = now + self._poll
                self._swept = self._sweeps.sweep(is_steady=self._outage.is_steady(), besides=self._resting())
                self._wake()
        except DatabaseError as error:
            self._outage.begin(error)
            self._own.give_up(self._database)  # the drains' threads wait for the same server
        if now >= self._look_at:
            self._look_at = math.inf
            self._wake()
        if self._health.problem is None:
            self._probe_at = math.inf
        elif math.isinf(self._probe_at):
            self._probe_at = now + self._health.pause()
        elif now >= self._probe_at:
            self._probe_at = math.inf
            self._health.probe()
            self._wake()
        with self._guard:
            for running in self._running.values():
                lane = running.lane
                if not running.is_parked and lane.parked and now - running.began > _PARK_S:
                    running.is_parked = True
                    lane.parked -= 1
                    lane.free += 1
                    lane.changed.notify()

    def _listen(self) -> None:
        """Wake the drains' threads when a site is woken; the poll covers what nobody heard."""
        while not self._is_ending:
            with suppress(DatabaseError, psycopg.Error), self._own.connected() as connection:
                connection.execute(f"LISTEN {CHANNEL}")
                while not self._is_ending:
                    self._wake()
                    for _ in connection.notifies(timeout=_LISTEN_S, stop_after=1):
                        pass
                    connection.execute("SELECT 1")  # a listener that hears nothing may be cut off
            time.sleep(1.0)

    def _keep_house(self) -> None:
        """Delete blobs that nothing refers to, and old receipts. No failure of a step ends the thread."""
        while not self._is_ending:
            for step in (partial(collect_blobs, self._database), self.sinks.retire):
                try:
                    step()
                except (DatabaseError, StoreError):
                    pass  # the outage is reported, and the next time comes
                except Exception as error:  # noqa: BLE001 - as in `_attempt`
                    text = f"an error in the housekeeping: {type(error).__name__}: {error}"
                    self._log(Warned(error=text, fix="report it to the developers of Briter Worker"))
            time.sleep(_HOUSEKEEPING_S)

    def _wake(self) -> None:
        """Have the lanes look for sites."""
        with self._guard:
            self._wakes += 1
            for lane in self._lanes:
                lane.changed.notify_all() if self._is_ending else lane.changed.notify()

    def _look_in(self, seconds: float) -> None:
        """Look for sites in so many seconds, at the latest."""
        self._look_at = min(self._look_at, time.monotonic() + seconds)

    def _resting(self) -> set[str]:
        """Return the sites that this node does not take now: what it drains, and what it leaves alone."""
        with self._guard:
            now = time.monotonic()
            self._retry_at = {site: at for site, at in self._retry_at.items() if at > now}
            return {*self._running, *self._retry_at, *(self._idle if self._is_once else ())}

    # The drains' threads

    def _work(self, lane: _Lane) -> None:
        """Take sites and drain them, until the end; once: until there is none."""
        while self._may_take(lane):
            if (taken := self._take(lane)) is not None:
                try:
                    self._drain(taken)
                finally:
                    self._finish(taken)

    def _may_take(self, lane: _Lane) -> bool:
        """Wait for a slot and a reason to look for a site. Return False at the end."""
        with self._guard:
            while True:
                if self._is_ending or self.stop.is_set():
                    return False
                if lane.free and lane.looked < self._wakes:
                    if self._health.problem is None:
                        lane.free -= 1
                        return True
                    lane.looked = self._wakes
                if self._is_once:
                    return False
                lane.changed.wait()

    def _take(self, lane: _Lane) -> Taken | None:
        """Lease a site whose host is not full, and claim its jobs. Return None if there is none now."""
        taken = None
        with self._taking:
            with self._guard:
                wakes, name = self._wakes, self._swept.pop() if self._swept else None
                hosts = self._drains.hosts
                busy = Counter(hosts[site] for site in self._running if hosts[site])
                full = {host for host, number in busy.items() if number >= self._per_host}
                resting = self._resting() | {site for site, host in hosts.items() if host in full}
            since = self._database.now()
            try:
                taken = self._drains.take(
                    self.stop.is_set,
                    is_steady=self._outage.is_steady(),
                    besides=resting,
                    lanes=(False, True) if name else lane.kinds,
                    full_hosts=full,
                    name=name,
                )
                if taken is None and name is None:
                    lane.looked = wakes
                    self._look_in(self._leases.next_due(since))
                self._outage.end()
            except HostFullError:
                pass  # the next look leaves the site out
            except DatabaseError as error:
                self._outage.begin(error)
                lane.looked = wakes
                self._look_in(_FIRST_PAUSE_S)
            with self._guard:
                if taken is None:
                    lane.free += 1
                else:
                    self._running[taken.site.name] = _Running(lane)
                    if lane.free:
                        lane.changed.notify()  # there may be more
        return taken

    def _finish(self, taken: Taken) -> None:
        """Give the slot back, unless the drain took so long that it did before."""
        with self._guard:
            ended, host = self._running.pop(taken.site.name), self._drains.hosts[taken.site.name]
            if ended.is_parked:
                ended.lane.parked += 1
            else:
                ended.lane.free += 1
            others = sum(self._drains.hosts[site] == host for site in self._running)
            was_full = host and others + 1 >= self._per_host
            if was_full or taken.is_slow != taken.row["slow"]:
                self._wake()
            else:
                self._wakes += 1  # this thread looks again: for saves of the site that came meanwhile

    def _drain(self, taken: Taken) -> None:
        """Drain the site, and end the lease."""
        site = taken.site.name
        if (left_by := taken.row["left_by"]) not in (None, self._name):
            self._log(Reaped(site=site, worker=left_by))
        try:
            counts = self._attempt(taken)
            plans = () if taken.error else taken.plans.dropped
            self._leases.release(site, taken.token, is_slow=taken.is_slow, plans=plans)
        except UnavailableError as error:  # the lease stays: what is in flight comes first
            self._outage.begin(error)
            counts = self._fail(site)
        with self._guard:
            self.counts.add(counts)

    def _attempt(self, taken: Taken) -> Counts:
        """Drain the site; whatever happens to one site does not end the others. Raises UnavailableError."""
        site = taken.site.name
        try:
            counts = self._drains.drain(taken, self.stop.is_set)
        except LockLostError as lost:
            self._warn(site, str(lost), "")
            return Counts()
        except NodeFailureError as error:
            if self._health.problem is None:
                self._warn(site, f"{error}; the site is cloned again", "")
                return Counts()
            for away in self._health.unreachable_sites():  # no fault of their posts
                with suppress(DatabaseError, DeclinedError):
                    PostgresControl(self._database, away).forgive(FailureCode.NETWORK, self._database.now())
        except UnavailableError:
            raise
        except (PublishError, UsageError) as error:
            self._warn(site, error.message, error.fix)
        except OSError as error:
            self._warn(site, os_error_text(error), os_error_fix(error))
        except Exception as error:  # noqa: BLE001 - as above
            text = f"an error in the worker itself: {type(error).__name__}: {error}"
            self._warn(site, text, "report it to the developers of Briter Worker")
        else:
            self._note(site, counts)
            return counts
        return self._fail(site)

    def _note(self, site: str, counts: Counts) -> None:
        """Note what became of a drain."""
        with self._guard:
            if counts.undecided:
                self._defer(site)
            else:
                self._failures.pop(site, None)
            if counts.completed > counts.failed:
                self._health.succeed(site)
            (self._idle.discard if counts.completed else self._idle.add)(site)
            if counts.completed >= _MANY_JOBS and not self._is_once:
                self._rest(site, _TICK_S)

    def _fail(self, site: str) -> Counts:
        """Note a drain that failed as a whole; return its counts."""
        self._defer(site)
        return Counts(failed=1)

    def _defer(self, site: str) -> None:
        """Have this node leave the site alone for a while: longer after each failure."""
        with self._guard:
            self._idle.add(site)
            self._failures[site] = self._failures.get(site, 0) + 1
            self._rest(site, loop_backoff(self._failures[site], _FIRST_PAUSE_S))

    def _rest(self, site: str, seconds: float) -> None:
        self._retry_at[site] = time.monotonic() + seconds
        self._look_in(seconds)

    def _warn(self, site: str, text: str, fix: str) -> None:
        self._log(Warned(error=f"site {site}: {text}", fix=fix))
