"""The dispatch of a cluster: who drains which site when, on a real Postgres, with drains that count rows."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from cluster_host import drain_rows
from cluster_processes import Cluster, Process, until

from briter_worker.cluster.dispatching import Host, Pace
from briter_worker.cluster.engine import Engine, EngineError
from briter_worker.cluster.slots import Left
from briter_worker.cluster.sweep import Sweep
from briter_worker.cluster.waking import wake
from briter_worker.errors import LockLostError, Loss
from briter_worker.events import Event, Reaped, Warned
from briter_worker.settling import Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from postgres import Server

    from briter_worker.cluster.slots import Drain
    from briter_worker.queues.postgres.database import Database

QUICK = Pace(poll=0.5, beat=0.1, silence=1.0)
DEAF = Pace(poll=60.0, beat=0.1, silence=1.0)
"""Whatever happens before the minute is over was not found by looking again."""


@dataclass
class Run:
    """A host in this process."""

    stop: threading.Event = field(default_factory=threading.Event)
    events: list[Event] = field(default_factory=list)
    total: Tally | None = None
    error: BaseException | None = None
    _thread: threading.Thread | None = None

    def start(
        self, url: str, drain: Drain, *, slots: int = 4, pace: Pace = QUICK, once: bool = False
    ) -> None:
        async def run() -> None:
            engine = Engine(url)
            sweep = Sweep(engine, dry_run=False, longest_delay=3600.0)
            host = Host(
                engine, drain, sweep, self.events.append, self.stop, slots=slots, pace=pace, once=once
            )
            self.total = await host.run()

        def main() -> None:
            try:
                asyncio.run(run())
            except BaseException as error:  # noqa: BLE001 - told to the test
                self.error = error

        self._thread = threading.Thread(target=main)
        self._thread.start()

    def ended(self, seconds: float = 30.0) -> Tally:
        """What it has done, when it has ended by itself."""
        assert self._thread is not None
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the host does not end"
        if self.error is not None:
            raise self.error
        assert self.total is not None
        return self.total

    def texts(self) -> list[str]:
        return [event.error for event in self.events if isinstance(event, Warned)]


@contextmanager
def running(cluster: Cluster, drain: Drain, **options: Any) -> Iterator[Run]:  # noqa: ANN401 - Run.start's
    """A host that runs inside, and is told to stop at the end."""
    run = Run()
    known = cluster.hosts()
    run.start(cluster.conninfo, drain, **options)
    try:
        until(lambda: cluster.hosts() > known or run.error is not None)
        yield run
    finally:
        run.stop.set()
        run.ended()


@pytest.fixture
def cluster(database: Database, database_url: str) -> Cluster:
    """Tables, and nothing in them."""
    return Cluster.make(database, database_url)


def counting(cluster: Cluster, **options: Any) -> Drain:  # noqa: ANN401 - drain_rows'
    """A drain that takes the rows."""
    return partial(drain_rows, cluster.database, **options)


def test_a_word_wakes_a_host_long_before_it_would_look(cluster: Cluster) -> None:
    cluster.add_sites("blog")
    waits = []
    with running(cluster, counting(cluster), pace=DEAF):
        until(lambda: cluster.listeners() == 1)
        for _ in range(10):
            began = time.time()
            cluster.save("blog")
            until(lambda: not cluster.waiting())
            waits.append(cluster.last_drained() - began)
    # 10 to 30 ms where nothing else runs.
    assert sorted(waits)[5] < 0.5, waits


def test_a_save_during_a_drain_is_drained_as_soon_as_that_one_ends(cluster: Cluster) -> None:
    cluster.add_sites("blog")
    begun, go_on = threading.Event(), threading.Event()

    def drain(site: str, stopping: Callable[[], bool]) -> Left:
        done = drain_rows(cluster.database, site, stopping)
        begun.set()
        go_on.wait(20)
        # The save came after the look for what is left, so that only its word tells of it.
        return Left(done.tally)

    with running(cluster, drain, pace=DEAF):
        cluster.save("blog")
        assert begun.wait(20)
        cluster.save("blog")
        until(lambda: cluster.words() == {"doing": 1, "todo": 1})
        go_on.set()
        until(lambda: not cluster.waiting())


def test_what_a_drain_leaves_because_it_took_its_share_is_drained_next(cluster: Cluster) -> None:
    cluster.add_sites("blog")
    with running(cluster, counting(cluster, most=2), pace=DEAF):
        cluster.save("blog", 9)
        until(lambda: not cluster.waiting())
    assert cluster.drained() == 9
    assert cluster.words() == {}


def test_a_site_with_much_to_do_does_not_delay_another_by_more_than_a_drain(cluster: Cluster) -> None:
    cluster.add_sites("large", "small")
    order: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def drain(site: str, stopping: Callable[[], bool]) -> Left:
        order.append(site)
        if not begun.is_set():
            begun.set()
            go_on.wait(20)
        return drain_rows(cluster.database, site, stopping, most=1)

    with running(cluster, drain, slots=1, pace=DEAF):
        cluster.save("large", 8)
        assert begun.wait(20)
        cluster.save("small")
        go_on.set()
        until(lambda: not cluster.waiting())
    assert order.index("small") <= 2, order


def test_two_hosts_never_drain_one_site_at_once_and_drain_each_row_once(cluster: Cluster) -> None:
    names = [f"site{number}" for number in range(200)]
    cluster.add_sites(*names)
    busy: set[str] = set()
    overlaps: list[str] = []
    guard = threading.Lock()

    def drain(site: str, stopping: Callable[[], bool]) -> Left:
        with guard:
            if site in busy:
                overlaps.append(site)
            busy.add(site)
        left = drain_rows(cluster.database, site, stopping)
        with guard:
            busy.discard(site)
        return left

    with running(cluster, drain), running(cluster, drain):
        for _ in range(5):
            for name in names:
                cluster.save(name)
        until(lambda: not cluster.waiting(), seconds=60)
    assert overlaps == []
    assert cluster.drained() == 1000
    assert cluster.drained(distinct=True) == 1000


def test_a_post_whose_hold_ends_is_drained_without_a_word(cluster: Cluster) -> None:
    cluster.add_sites("blog")
    with running(cluster, counting(cluster)):
        cluster.hold("blog", until=time.time() + 1.0)
        until(lambda: not cluster.waiting())


def test_a_row_whose_writer_died_before_its_word_is_drained(cluster: Cluster) -> None:
    cluster.add_sites("blog")
    with running(cluster, counting(cluster)):
        cluster.save("blog", word=False)
        until(lambda: not cluster.waiting())


def test_paused_and_removed_sites_and_those_with_nothing_due_are_left_alone(cluster: Cluster) -> None:
    cluster.add_sites("paused", "removed", "later", "over")
    for name in ("paused", "removed", "over"):
        cluster.save(name, word=False)
    cluster.hold("later", until=time.time() + 3600)
    now = time.time()
    cluster.execute(
        "UPDATE sites SET paused = jsonb_build_object('since', %s, 'until', null) WHERE name = 'paused'", now
    )
    cluster.execute(
        "UPDATE sites SET paused = jsonb_build_object('since', %s, 'until', %s) WHERE name = 'over'",
        now - 9,
        now - 1,
    )
    cluster.execute("UPDATE sites SET removed = true WHERE name = 'removed'")
    with running(cluster, counting(cluster), once=True) as run:
        run.ended()
    assert cluster.drained_sites() == {"over"}


def test_what_only_dry_runs_have_tried_is_for_the_live_run(cluster: Cluster) -> None:
    async def swept(*, dry_run: bool) -> list[str]:
        engine = Engine(cluster.conninfo)
        await engine.open()
        found = await Sweep(engine, dry_run=dry_run, longest_delay=60).sweep(time.time(), hurry=True)
        await engine.close()
        return list(found.woken)

    cluster.add_sites("blog")
    cluster.save("blog", word=False)
    cluster.execute("UPDATE publications SET state = 'tried'")
    assert asyncio.run(swept(dry_run=True)) == []
    assert asyncio.run(swept(dry_run=False)) == ["blog"]


def test_a_retry_that_a_clock_running_ahead_put_far_away_is_due(cluster: Cluster) -> None:
    cluster.add_sites("blog")
    cluster.save("blog", word=False)
    cluster.execute("UPDATE publications SET next_attempt_at = %s", time.time() + 1e6)

    async def swept() -> list[str]:
        engine = Engine(cluster.conninfo)
        await engine.open()
        found = await Sweep(engine, dry_run=False, longest_delay=3600).sweep(time.time())
        await engine.close()
        return list(found.woken)

    assert asyncio.run(swept()) == ["blog"]


def test_a_drain_that_fails_is_told_and_repeated_and_keeps_nobody_else_waiting(cluster: Cluster) -> None:
    cluster.add_sites("broken", "well")
    failures: list[str] = []

    def drain(site: str, stopping: Callable[[], bool]) -> Left:
        if site == "broken" and len(failures) < 2:
            failures.append(site)
            raise OSError(28, "No space left on device", "/cache/broken")
        return drain_rows(cluster.database, site, stopping)

    with running(cluster, drain) as run:
        cluster.save("broken")
        cluster.save("well")
        until(lambda: not cluster.waiting())
    assert len(failures) == 2
    assert any(text.startswith("site broken: No space left on device") for text in run.texts())


def test_who_lost_a_site_leaves_it_to_whoever_has_it(cluster: Cluster) -> None:
    cluster.add_sites("blog")
    tried: list[str] = []

    def drain(site: str, _stopping: Callable[[], bool]) -> Left:
        tried.append(site)
        raise LockLostError(Loss.TAKEN, "another worker has the site")

    with running(cluster, drain, pace=DEAF) as run:
        cluster.save("blog")
        until(lambda: tried != [] and cluster.words() == {})
    assert set(run.texts()) == {"site blog: another worker has the site"}
    assert run.total == Tally()


def test_a_host_takes_back_what_it_was_handed_without_getting_to_know_of_it(cluster: Cluster) -> None:
    cluster.add_sites("blog")
    with running(cluster, counting(cluster)) as run:
        # As where the connection breaks between the taking and its answer.
        cluster.execute(
            "INSERT INTO procrastinate_jobs (queue_name, task_name, lock, args, status, worker_id)"
            " SELECT 'drains', 'drain', 'blog', '{}', 'doing', max(id) FROM procrastinate_workers"
        )
        cluster.save("blog")
        until(lambda: not cluster.waiting())
    assert [event.site for event in run.events if isinstance(event, Reaped)] == ["blog"]


def test_a_host_takes_two_connections_beside_those_of_its_drains(cluster: Cluster) -> None:
    with running(cluster, counting(cluster)):
        until(lambda: cluster.listeners() == 1)
        assert cluster.connections() == 2


def test_a_run_that_ends_drains_all_that_is_due_on_all_sites(cluster: Cluster) -> None:
    cluster.add_sites(*(f"site{number}" for number in range(20)))
    for number in range(20):
        cluster.save(f"site{number}", 3, word=number % 2 == 0)
    cluster.hold("site1", until=time.time() + 3600)
    run = Run()
    run.start(cluster.conninfo, counting(cluster, most=2), once=True)
    assert run.ended() == Tally(settled=60)
    assert cluster.waiting() == 1
    assert cluster.words() == {}
    assert cluster.hosts() == 0


def test_a_run_that_ends_gives_a_failing_site_one_chance(cluster: Cluster) -> None:
    cluster.add_sites("broken")
    cluster.save("broken")
    tried: list[str] = []

    def drain(site: str, _stopping: Callable[[], bool]) -> Left:
        tried.append(site)
        raise OSError(28, "No space left on device")

    run = Run()
    run.start(cluster.conninfo, drain, once=True)
    assert run.ended().failed == 1
    assert tried == ["broken"]


def test_a_run_that_ends_waits_until_it_knows_whether_a_silent_host_lives(cluster: Cluster) -> None:
    cluster.add_sites("blog")
    pace = {"poll": 0.5, "beat": 0.1, "silence": 3.0}
    with Process(cluster, seconds=60.0, pace=pace) as dying:
        cluster.begin("blog")
        dying.process.kill()
        until(lambda: cluster.silence() > 1.6)
    run = Run()
    run.start(cluster.conninfo, counting(cluster), once=True, pace=Pace(**pace))
    assert run.ended() == Tally(settled=1)


def test_a_host_that_cannot_reach_postgres_at_its_start_says_so(cluster: Cluster) -> None:
    run = Run()
    run.start("postgresql://nobody@127.0.0.1:1/none", counting(cluster))
    with pytest.raises(EngineError, match="Fix: see that Postgres runs"):
        run.ended(60)


def test_the_next_site_is_found_at_once_among_thousands_that_nobody_expected(cluster: Cluster) -> None:
    # What Postgres knows of the table is that it is empty.
    cluster.vacuum("procrastinate_jobs")
    wake(cluster.database, [f"site{number}" for number in range(5000)])

    async def take() -> float:
        engine = Engine(cluster.conninfo)
        await engine.open()
        began = time.monotonic()
        for _ in range(4):
            order = await engine.take()
            assert order is not None
            await engine.finish(order)
        took = time.monotonic() - began
        await engine.close()
        return took

    assert asyncio.run(take()) < 2.0  # some milliseconds; ten seconds where each is compared with each


# Hosts as processes, which die.


@pytest.mark.slow
def test_the_sites_of_a_killed_host_are_anothers_within_15_seconds(cluster: Cluster) -> None:
    cluster.add_sites("blog")
    with Process(cluster, seconds=60.0) as dying:
        cluster.begin("blog")
        with Process(cluster) as heir:
            dying.process.kill()
            died = time.monotonic()
            until(lambda: not cluster.waiting(), seconds=30)
            assert time.monotonic() - died < 15.0
            assert heir.ended() == 0
    assert "reaped" in heir.output()
    assert cluster.drained() == 1


def test_a_host_that_slept_takes_nothing_from_its_successor(cluster: Cluster) -> None:
    cluster.add_sites("blog")
    quick = {"poll": 0.5, "beat": 0.1, "silence": 3.0}
    # The one drain lasts until the other host has started and has seen it stopped; the other outlasts it.
    with Process(cluster, seconds=6.0, pace=quick) as sleeper:
        cluster.begin("blog")
        with Process(cluster, seconds=8.0, pace=quick) as heir:
            sleeper.process.send_signal(signal.SIGSTOP)
            until(lambda: cluster.worker_of("blog") not in {None, cluster.worker_before})
            taken = cluster.worker_of("blog")
            # Its drain is over at once, and it says so while the successor is in the middle of it.
            sleeper.process.send_signal(signal.SIGCONT)
            until(lambda: cluster.hosts() == 2)
            until(lambda: cluster.drained() == 1 or cluster.worker_of("blog") != taken)
            assert cluster.drained_by() == {heir.process.pid}
            # And it is a host as any other again.
            cluster.save("blog")
            until(lambda: not cluster.waiting())
            assert (sleeper.ended(), heir.ended()) == (0, 0)


def test_postgres_restarts_and_nothing_is_lost_nor_anybody_taken_for_dead(
    cluster: Cluster, postgres_server: Server
) -> None:
    names = [f"site{number}" for number in range(20)]
    cluster.add_sites(*names)
    pace = {"poll": 0.5, "beat": 0.2, "silence": 2.0}
    with Process(cluster, seconds=0.5, pace=pace) as one, Process(cluster, seconds=0.5, pace=pace) as other:
        for name in names:
            cluster.save(name, 2)
        until(lambda: cluster.drained() > 0)
        postgres_server.stop(signal.SIGQUIT)
        time.sleep(2.5)  # the hosts miss their heartbeats for longer than the living do
        postgres_server.start()
        until(lambda: not cluster.waiting(), seconds=60)
        cluster.save("site0")
        until(lambda: not cluster.waiting())
        assert (one.ended(), other.ended()) == (0, 0)
    assert cluster.drained() == cluster.drained(distinct=True) == 41
    for host in (one, other):
        assert "reaped" not in host.output()
        assert host.output().count("the database cannot be worked with") <= 1
        assert host.output().count("wake-ups cannot be heard") == 1


def test_a_host_that_is_told_to_stop_ends_its_drains_and_takes_no_new_ones(cluster: Cluster) -> None:
    cluster.add_sites("first", "second")
    pace = {"poll": 60.0, "beat": 0.1, "silence": 3.0}  # no sweep finds the first one due again
    with Process(cluster, seconds=60.0, slots=1, pace=pace) as host:
        cluster.begin("first")
        cluster.save("second")
        host.process.send_signal(signal.SIGTERM)
        assert host.process.wait(30) == 0
    # A drain's own work is cut short by the wish to stop; what it had done is kept.
    assert cluster.drained_sites() == {"first"}
    # The word for the first may have been said again while it was drained: by the first sweep, or its save.
    assert cluster.words().keys() == {"todo"}
    assert cluster.hosts() == 0


def test_the_heart_of_a_host_beats_until_its_last_drain_has_ended(cluster: Cluster) -> None:
    cluster.add_sites("blog")
    begun, go_on = threading.Event(), threading.Event()

    def drain(site: str, stopping: Callable[[], bool]) -> Left:
        begun.set()
        go_on.wait(30)
        return drain_rows(cluster.database, site, stopping)

    with running(cluster, counting(cluster)) as other:
        with running(cluster, drain) as host:
            other.stop.set()
            other.ended()
            cluster.save("blog")
            assert begun.wait(20)
            host.stop.set()
            draining = cluster.worker_of("blog")
            with running(cluster, counting(cluster)) as heir:
                beats = cluster.beats()
                until(lambda: cluster.beats() > beats + 3 * QUICK.silence)
                # A sweep may have found the row due and said the word once more; nobody may take it.
                assert draining is not None
                assert cluster.worker_of("blog") == draining
                go_on.set()
                until(lambda: not cluster.waiting())
        assert not [event for event in heir.events if isinstance(event, Reaped)]


def test_hosts_that_wake_the_same_sites_in_any_order_never_wait_for_each_other(cluster: Cluster) -> None:
    names = [f"site{number}" for number in range(50)]
    errors: list[Exception] = []

    def rouse(order: list[str]) -> None:
        try:
            for _ in range(40):
                wake(cluster.database, order)
                cluster.execute("DELETE FROM procrastinate_jobs WHERE status = 'todo' AND lock < 'site3'")
        except Exception as error:  # noqa: BLE001 - told to the test
            errors.append(error)

    threads = [threading.Thread(target=rouse, args=(order,)) for order in (names, names[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_word_is_what_procrastinate_itself_would_have_written(cluster: Cluster) -> None:
    def word() -> dict[str, Any]:
        with cluster.database.transaction() as connection:
            cursor = connection.cursor(row_factory=psycopg.rows.dict_row)
            row = cursor.execute("SELECT * FROM procrastinate_jobs").fetchone()
            connection.execute("DELETE FROM procrastinate_jobs")
        assert row is not None
        del row["id"]
        return row

    wake(cluster.database, ["blog", "blog"])
    ours = word()
    cluster.execute(
        "SELECT procrastinate_defer_jobs_v1(ARRAY[ROW('drains', 'drain', 0, 'blog', 'blog',"
        ' \'{"site": "blog"}\'::jsonb, NULL)::procrastinate_job_to_defer_v1])'
    )
    assert ours == word()
