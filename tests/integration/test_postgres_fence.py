"""Who has lost a site changes nothing of it, whatever it does and whenever it wakes."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from postgres import add_site
from queue_engines import LONGEST_DELAY, MAX_ATTEMPTS, NOW

from briter_worker.errors import Failure, LockLostError, Loss
from briter_worker.ports import Batch, Claim, Plan
from briter_worker.queues.postgres import tokens
from briter_worker.queues.postgres.contents import Values
from briter_worker.queues.postgres.database import Database, DatabaseError
from briter_worker.queues.postgres.queue import PostgresQueue
from briter_worker.queues.postgres.tokens import SiteMissingError
from briter_worker.queues.postgres.writing import submit, submit_many

if TYPE_CHECKING:
    from collections.abc import Callable

    from postgres import Server

_TABLES = ("publications", "delivered", "folders", "contents", "batches", "plans", "versions", "superseded")


def queue(database: Database, token: int | None) -> PostgresQueue:
    return PostgresQueue(
        database,
        "site",
        token=token,
        max_attempts=MAX_ATTEMPTS,
        longest_delay=LONGEST_DELAY,
        clock=lambda: NOW,
    )


def save(database: Database, slug: str) -> None:
    files = Values.of({f"{slug}.md": slug.encode()}, saved_at=NOW)
    submit(database, "site", {"slug": slug, "paths": [f"{slug}.md"]}, files, now=NOW)


def everything(database: Database) -> dict[str, list[tuple[Any, ...]]]:
    with database.transaction() as connection:
        return {
            table: sorted(connection.execute(f"SELECT * FROM {table}".encode()).fetchall(), key=repr)  # noqa: S608
            for table in _TABLES
        }


PLAN = Plan("1" * 40, "2" * 40, "refs/briter/x", {}, {}, dry_run=False)
ACTIONS: dict[str, Callable[[PostgresQueue, Batch, Claim], object]] = {
    "claim": lambda q, _b, _c: q.claim(NOW),
    "finish": lambda q, b, _c: q.finish(b, b.claims),
    "put_off": lambda q, b, c: q.put_off(b, c, Failure.NETWORK, "no", NOW + 9),
    "snooze": lambda q, b, c: q.snooze(b, c, "later", NOW + 9),
    "bury": lambda q, b, c: q.bury(b, c, Failure.REJECTED, "no"),
    "release": lambda q, b, _c: q.release(b, b.claims),
    "drop": lambda q, b, _c: q.drop(b, b.claims),
    "begin": lambda q, b, _c: q.begin(b),
    "record": lambda q, b, _c: q.record(b, PLAN),
    "close": lambda q, b, _c: q.close(b),
    "retake": lambda q, b, _c: q.retake(b, NOW),
    "revive": lambda q, _b, _c: q.revive(NOW),
    "recover": lambda q, _b, _c: q.recover(NOW),
}


@pytest.mark.parametrize("action", ACTIONS)
def test_who_lost_the_site_changes_nothing_of_it(database: Database, action: str) -> None:
    add_site(database)
    save(database, "left over")
    queue(database, tokens.take(database, "site", "the dead")).claim(NOW)
    save(database, "dead letter")
    sleeper = queue(database, tokens.take(database, "site", "sleeper"))
    letter = sleeper.claim(NOW).batch
    assert letter is not None
    sleeper.bury(letter, letter.claims[0], Failure.NETWORK, "down")
    save(database, "in flight")
    save(database, "waiting on hold")
    batch = sleeper.claim(NOW).batch
    assert batch is not None
    save(database, "waiting")

    tokens.take(database, "site", "successor")
    before = everything(database)
    with pytest.raises(LockLostError) as lost:
        ACTIONS[action](sleeper, batch, batch.claims[0])
    assert lost.value.reason is Loss.TAKEN
    assert everything(database) == before


@pytest.mark.parametrize("action", ACTIONS)
def test_who_never_had_the_site_cannot_work_on_it(database: Database, action: str) -> None:
    add_site(database)
    save(database, "a")
    worker = queue(database, tokens.take(database, "site", "worker"))
    batch = worker.claim(NOW).batch
    assert batch is not None
    worker.bury(batch, batch.claims[0], Failure.NETWORK, "down")
    before = everything(database)
    with pytest.raises(LockLostError):
        ACTIONS[action](queue(database, None), batch, batch.claims[0])
    assert everything(database) == before


def test_the_last_token_alone_is_still_good(database: Database) -> None:
    add_site(database)
    first = tokens.take(database, "site", "one")
    assert tokens.still(database, "site", first)
    tokens.hold(database, "site", first)
    second = tokens.take(database, "site", "two")
    assert second > first
    assert not tokens.still(database, "site", first)
    assert tokens.still(database, "site", second)
    with pytest.raises(LockLostError, match="another worker has the site"):
        tokens.hold(database, "site", first)


def test_each_way_to_lose_a_site_has_its_word(postgres_server: Server, database_url: str) -> None:
    with Database(database_url, patience=1) as database:
        add_site(database)
        token = tokens.take(database, "site", "worker")
        worker = queue(database, token)
        save(database, "a")
        batch = worker.claim(NOW).batch
        assert batch is not None
        worker.close(batch)
        with pytest.raises(LockLostError) as done:
            worker.record(batch, PLAN)
        postgres_server.stop()
        try:
            with pytest.raises(LockLostError) as error:
                tokens.hold(database, "site", token)
            with pytest.raises(DatabaseError):
                tokens.still(database, "site", token)
        finally:
            postgres_server.start()
        with database.transaction() as connection:
            connection.execute("UPDATE sites SET removed = true")
        with pytest.raises(LockLostError) as missing:
            worker.claim(NOW)
        with pytest.raises(LockLostError) as gone:
            tokens.take(database, "site", "worker")
        with pytest.raises(SiteMissingError, match="briter-worker site add"):
            save(database, "b")
        assert not tokens.still(database, "site", token)
    words = [each.value.reason for each in (done, error, missing, gone)]
    assert words == [Loss.DONE, Loss.ERROR, Loss.MISSING, Loss.MISSING]


def test_a_site_is_taken_only_after_what_its_last_worker_was_writing(database: Database) -> None:
    add_site(database)
    token = tokens.take(database, "site", "slow")
    taken = threading.Event()

    def take() -> None:
        tokens.take(database, "site", "next")
        taken.set()

    with database.transaction() as connection:
        tokens.lock(connection, "site", token)
        thread = threading.Thread(target=take)
        thread.start()
        assert not taken.wait(0.3)
        connection.execute("UPDATE sites SET tip = 'written in time'")
    assert taken.wait(10)
    thread.join()


def test_who_is_stopped_while_it_writes_does_not_keep_the_site(database_url: str) -> None:
    hurried = f"{database_url}?options=-c%20idle_in_transaction_session_timeout%3D300ms"
    with Database(hurried) as sleeper, Database(database_url) as database:
        add_site(database)
        token = tokens.take(database, "site", "sleeper")
        save(database, "a")

        def sleep() -> None:
            with sleeper.transaction() as connection:
                tokens.lock(connection, "site", token)
                connection.execute("DELETE FROM publications")
                began = time.monotonic()
                tokens.take(database, "site", "successor")  # has to wait for the sleeper to be ended
                assert time.monotonic() - began > 0.2

        with pytest.raises(DatabaseError):
            sleep()
        assert [row.job.slug for row in queue(database, None).jobs(NOW)] == ["a"]


def test_writers_and_steerers_need_no_token(database: Database) -> None:
    add_site(database)
    save(database, "a")
    person = queue(database, None)
    person.pause(NOW)
    assert person.paused(NOW) is not None
    assert person.resume()
    assert [job.slug for job in person.cancel("a", NOW).gone] == ["a"]


def test_who_steers_or_writes_for_a_site_that_was_removed_is_told_so(database: Database) -> None:
    add_site(database)
    person = queue(database, None)
    save(database, "a")
    with database.transaction() as connection:
        connection.execute("UPDATE sites SET removed = true")
    before = everything(database)
    saves: list[tuple[dict[str, Any], None]] = [({"slug": slug, "paths": [slug]}, None) for slug in "bc"]
    for act in (lambda: person.cancel("a", NOW), lambda: submit_many(database, "site", saves, now=NOW)):
        with pytest.raises(SiteMissingError, match="briter-worker site add site"):
            act()
    assert everything(database) == before


def test_a_transaction_of_another_site_is_in_nobodys_way(database: Database) -> None:
    add_site(database)
    add_site(database, "other")
    with database.transaction() as connection:
        tokens.lock(connection, "other", None)
        with database.transaction() as second:
            second.execute("SET LOCAL lock_timeout = '1s'")
            tokens.lock(second, "site", None)
            with pytest.raises(psycopg.errors.LockNotAvailable):
                tokens.lock(second, "other", None)
