"""A worker that has lost its site changes nothing of it, whatever it does and whenever it wakes up."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from postgres import add_site
from queue_backends import LONGEST_DELAY, NOW, control_queue, store, take_queue

from briter_worker.errors import Failure, FailureCode, LockLostError
from briter_worker.job import format_time
from briter_worker.ports import BaseVersion, Claim, Plan
from briter_worker.queues.postgres.database import Database, DatabaseError
from briter_worker.queues.postgres.payloads import PayloadSource, PostgresBases
from briter_worker.queues.postgres.queue import PostgresPlans, PostgresQueue
from briter_worker.queues.postgres.rows import (
    SiteMissingError,
    locked,
    take_site,
)

if TYPE_CHECKING:
    from collections.abc import Callable


TABLES = ("publications", "files", "blobs", "plans", "published", "base_versions", "superseded")
DOWN = Failure(FailureCode.NETWORK, "down", "start it")
PLAN = Plan("id", None, "2" * 40, {"1": "2" * 40}, {"a.md": "3" * 40, "gone.md": None, "\udcff": "4" * 40})


def take(database: Database) -> int:
    return int(take_site(database, "site", "worker")["token"])


def save(database: Database, slug: str) -> None:
    files = PayloadSource.of({f"{slug}.md": slug.encode()}, saved_at=NOW)
    store(database, {"slug": slug, "paths": [f"{slug}.md"]}, files)


def everything(database: Database) -> dict[str, list[tuple[Any, ...]]]:
    with database.connection() as connection:
        return {
            table: sorted(connection.execute(f"SELECT * FROM {table}").fetchall(), key=repr)  # noqa: S608
            for table in TABLES
        }


ACTIONS: dict[str, Callable[[PostgresQueue, PostgresPlans, PostgresBases, Claim], object]] = {
    "claim": lambda queue, _p, _b, _c: queue.claim(NOW),
    "reclaim": lambda queue, _p, _b, claim: queue.reclaim(claim, NOW),
    "acknowledge": lambda queue, _p, _b, claim: queue.acknowledge([claim], {}),
    "mark_tried": lambda queue, _p, _b, claim: queue.mark_tried([claim], NOW),
    "retry_later": lambda queue, _p, _b, claim: queue.retry_later(claim, DOWN, at=NOW + 9),
    "dead_letter": lambda queue, _p, _b, claim: queue.dead_letter(claim, DOWN),
    "release": lambda queue, _p, _b, claim: queue.release([claim]),
    "drop": lambda queue, _p, _b, claim: queue.release([claim]),
    "requeue": lambda queue, _p, _b, _c: queue.requeue(NOW),
    "record a plan": lambda _q, plans, _b, _c: plans.record(Plan("other", None, "5" * 40, {}, {})),
    "drop a plan": lambda _q, plans, _b, _c: plans.drop(PLAN),
    "remember a base": lambda _q, _p, bases, _c: bases.remember({"a.md": BaseVersion(None)}, {}),
}


@pytest.mark.parametrize("action", ACTIONS)
def test_a_worker_that_lost_the_site_changes_nothing(database: Database, action: str) -> None:
    add_site(database)
    save(database, "dead letter")
    token = take(database)
    sleeper = PostgresQueue(database, "site", token=token, longest_delay=LONGEST_DELAY, dry_run=False)
    sleeper.dead_letter(sleeper.claim(NOW).claims[0], DOWN)
    save(database, "in flight")
    (claim,) = sleeper.claim(NOW).claims
    save(database, "pending")
    plans = PostgresPlans(database, "site", token=token)
    plans.record(PLAN)
    bases = PostgresBases(database, "site", token=token)

    take(database)
    before = everything(database)
    with pytest.raises(LockLostError, match="another worker has the site"):
        ACTIONS[action](sleeper, plans, bases, claim)
    assert everything(database) == before


def test_plans_are_kept_in_order_until_they_are_dropped(database: Database) -> None:
    add_site(database)
    plans = PostgresPlans(database, "site", token=take(database))
    second = Plan("another id", "1" * 40, "6" * 40, {}, {})
    plans.record(PLAN)
    plans.record(second)
    successor = PostgresPlans(database, "site", token=take(database))
    assert successor.plans() == [PLAN, second]
    successor.drop(PLAN)
    successor.drop(PLAN)
    assert successor.plans() == [second]


def test_a_removed_site_is_lost_to_its_worker(database: Database) -> None:
    add_site(database)
    queue = take_queue(database)
    with database.connection() as connection:
        connection.execute("UPDATE sites SET removed = true")
    with pytest.raises(LockLostError, match="there is no site"):
        queue.claim(NOW)
    with pytest.raises(LockLostError, match="there is no site"):
        take(database)


def test_a_removed_site_takes_no_jobs_and_no_commands(database: Database) -> None:
    add_site(database)
    save(database, "a")
    with database.connection() as connection:
        connection.execute("UPDATE sites SET removed = true")
    before = everything(database)
    for act in (lambda: control_queue(database).cancel("a", NOW), lambda: save(database, "b")):
        with pytest.raises(SiteMissingError, match="there is no site 'site'"):
            act()
    assert everything(database) == before


def test_taking_a_site_waits_for_the_running_transaction_of_its_worker(database: Database) -> None:
    add_site(database)
    token = take(database)
    taken = threading.Event()

    def take_over() -> None:
        take(database)
        taken.set()

    with locked(database, "site", token) as connection:
        thread = threading.Thread(target=take_over)
        thread.start()
        assert not taken.wait(0.3)
        connection.execute("UPDATE sites SET worker = 'written in time'")
    assert taken.wait(10)
    thread.join()


def test_a_worker_suspended_in_a_transaction_does_not_keep_the_site(database_url: str) -> None:
    hurried = f"{database_url}?options=-c%20idle_in_transaction_session_timeout%3D300ms"
    with Database(hurried) as sleeper, Database(database_url) as database:
        add_site(database)
        token = take(database)
        save(database, "a")

        def sleep() -> None:
            with locked(sleeper, "site", token) as connection:
                began = time.monotonic()
                connection.execute("DELETE FROM publications")
                take(database)  # waits until the server ends the sleeper's session
                assert time.monotonic() - began > 0.2

        with pytest.raises(DatabaseError):
            sleep()
        assert [row.job.slug for row in control_queue(database).jobs(NOW)] == ["a"]


# Many producers at once


def save_path(database: Database, slug: str, path: str, created: float) -> None:
    document = {"id": f"{slug} {path}", "slug": slug, "paths": [path], "createdAt": format_time(created)}
    store(database, document, PayloadSource.of({path: path.encode()}))


def test_many_producers_of_one_post_leave_one_job_with_all_paths(database_url: str) -> None:
    producers, each = 8, 12
    with Database(database_url, connections=producers) as database:
        add_site(database)

        def produce(producer: int) -> None:
            for number in range(each):
                save_path(database, "a", f"{producer}-{number}", NOW - 1000 + number * producers + producer)

        with ThreadPoolExecutor(producers) as pool:
            list(pool.map(produce, range(producers)))
        found = take_queue(database).claim(NOW)
    (claim,) = found.claims
    assert set(claim.job.paths) == {f"{p}-{n}" for p in range(producers) for n in range(each)}
    assert claim.job.id.endswith(f"-{each - 1}")
    assert len(found.superseded) == producers * each - 1
