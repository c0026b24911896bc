"""Many at once, and some of them die: writers, drains, a person, and a server that cuts them off."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from postgres import add_site
from psycopg import conninfo
from queue_engines import LONGEST_DELAY, NOW

from briter_worker.errors import Failure, LockLostError
from briter_worker.job import State, format_time
from briter_worker.ports import Plan
from briter_worker.queues.postgres import contents, tokens
from briter_worker.queues.postgres.contents import Values
from briter_worker.queues.postgres.database import Database, DatabaseError
from briter_worker.queues.postgres.queue import PostgresQueue
from briter_worker.queues.postgres.writing import submit, submit_many

if TYPE_CHECKING:
    from collections.abc import Iterator

    from briter_worker.ports import Batch, Claim

ATTEMPTS = 1_000
"""None of these tests is about jobs that use them up."""


def drain(database: Database, *, most: int = 500) -> PostgresQueue:
    return PostgresQueue(
        database,
        "site",
        token=tokens.take(database, "site", "worker"),
        max_attempts=ATTEMPTS,
        longest_delay=LONGEST_DELAY,
        most=most,
        clock=lambda: NOW,
    )


def save(database: Database, slug: str, path: str, created: float) -> None:
    document = {"id": f"{slug} {path}", "slug": slug, "paths": [path], "createdAt": format_time(created)}
    submit(database, "site", document, Values.of({path: path.encode()}, saved_at=created), now=created)


def leftovers(database: Database) -> dict[str, int]:
    """What is not gone though nothing is to be done any more."""
    tables = ("publications", "delivered", "folders", "contents", "content_parts", "batches", "plans")
    with database.transaction() as connection:
        return {
            table: count
            for table in tables
            for (count,) in connection.execute(f"SELECT count(*) FROM {table}".encode())  # noqa: S608
            if count
        }


def test_many_writers_of_one_post_leave_one_job_with_all_they_declared(database_url: str) -> None:
    writers, each = 8, 12
    with Database(database_url, connections=writers) as database:
        add_site(database)

        def write(writer: int) -> None:
            for number in range(each):
                save(database, "a", f"{writer}-{number}", NOW - 1000 + number * writers + writer)

        with ThreadPoolExecutor(writers) as pool:
            list(pool.map(write, range(writers)))
        found = drain(database).claim(NOW)
    assert found.batch is not None
    (claim,) = found.batch.claims
    everything = {f"{writer}-{number}" for writer in range(writers) for number in range(each)}
    assert set(claim.job.paths) == everything
    assert claim.job.id == f"a {writers - 1}-{each - 1}"
    assert len(found.superseded) == writers * each - 1


@dataclass
class Publisher:
    """Drains with every way to settle, and dies now and then; whoever takes over recovers."""

    database: Database
    choice: random.Random = field(default_factory=lambda: random.Random(99))
    published: set[str] = field(default_factory=set)

    def run(self, writers_are_done: threading.Event) -> None:
        queue = drain(self.database, most=4)
        while not writers_are_done.is_set() or queue.jobs(NOW):
            batch = queue.claim(NOW).batch
            if self.choice.random() < 0.2:
                queue = drain(self.database, most=4)  # what was claimed is left in flight
                for left in queue.recover(NOW):
                    for part in queue.retake(left, NOW):
                        self.settle(queue, part)
            elif batch is not None:
                self.settle(queue, batch)
            queue.revive(NOW)

    def settle(self, queue: PostgresQueue, batch: Batch) -> None:
        for claim in batch.claims:
            match self.choice.randrange(5):
                case 0:
                    queue.put_off(batch, claim, Failure.NETWORK, "down", NOW)
                case 1:
                    queue.bury(batch, claim, Failure.NETWORK, "down")
                case 2:
                    queue.release(batch, [claim])
                case _:
                    self.published.update(claim.job.paths)
                    queue.finish(batch, [claim])
        queue.close(batch)


def test_nothing_is_lost_while_posts_are_saved_claimed_and_settled_at_once(database_url: str) -> None:
    writers, each = 4, 40
    done = threading.Event()
    with Database(database_url, connections=writers + 3) as database:
        add_site(database)
        publisher = Publisher(database)

        def write(writer: int) -> None:
            choice = random.Random(writer)
            for number in range(each):
                slug = f"s{choice.randrange(6)}"
                save(database, slug, f"{writer}-{number}", NOW - 1000 + choice.random() * 900)

        def steer() -> None:
            person = PostgresQueue(
                database, "site", token=None, max_attempts=ATTEMPTS, longest_delay=LONGEST_DELAY
            )
            while not done.is_set():
                person.retry_all(NOW)
                time.sleep(0.005)

        with ThreadPoolExecutor(writers + 2) as pool:
            writing = [pool.submit(write, writer) for writer in range(writers)]
            others = [pool.submit(publisher.run, done), pool.submit(steer)]
            for each_one in writing:
                each_one.result(60)
            done.set()
            for each_one in others:
                each_one.result(60)
        assert leftovers(database) == {}
    assert publisher.published == {
        f"{writer}-{number}" for writer in range(writers) for number in range(each)
    }


def test_two_writers_of_the_same_contents_do_not_wait_for_one_another_in_a_circle(database_url: str) -> None:
    with Database(database_url, connections=6) as database:
        for name in ("one", "two", "three"):
            add_site(database, name)
        files = {f"{n}.bin": bytes([n]) * 100 for n in range(30)}

        def write(site: str) -> None:
            choice = random.Random(site)
            for number in range(30):
                names = choice.sample([*files], 20)
                saves = [
                    ({"slug": f"s{number}", "paths": [name]}, Values.of({name: files[name]}, saved_at=NOW))
                    for name in names
                ]
                submit_many(database, site, saves)
                if number % 3 == 0:
                    person = PostgresQueue(database, site, token=None, max_attempts=8, longest_delay=9.0)
                    person.cancel(f"s{number}", NOW)

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(write, ("one", "two", "three")))
        with database.transaction() as connection:
            missing = connection.execute(
                "SELECT count(*) FROM delivered d WHERE NOT EXISTS"
                " (SELECT FROM content_parts p WHERE p.blob = d.blob)"
            ).fetchone()
        assert missing == (0,)
        assert contents.tidy(database) == 0


_WORKER = """
import sys, time
sys.path.insert(0, {tests!r})
from test_postgres_crowds import work
work(sys.argv[1], sys.argv[2])
"""


def work(url: str, log: str) -> None:
    """A worker that publishes by writing each path, durably, into a file; until it is killed."""
    with Database(url, connections=1) as database, Path(log).open("a", buffering=1) as remote:
        queue = drain(database, most=5)
        todo = [part for batch in queue.recover(NOW) for part in retaken(queue, batch, Path(log))]
        while True:
            next_one = todo.pop(0) if todo else queue.claim(NOW).batch
            if next_one is None:
                time.sleep(0.001)
                continue
            queue.begin(next_one)
            queue.record(next_one, plan(next_one))
            remote.write("".join(f"{next_one.key} {claim.job.id}\n" for claim in next_one.claims))
            queue.finish(next_one, next_one.claims)
            queue.close(next_one)


def plan(batch: Batch) -> Plan:
    return Plan(
        "1" * 40, batch.key, "ref", {claim.key: batch.key for claim in batch.claims}, {}, dry_run=False
    )


def retaken(queue: PostgresQueue, batch: Batch, log: Path) -> list[Batch]:
    """What landed is settled by its plan; the rest is to be tried again."""
    landed = {line.split()[0] for line in log.read_text().splitlines()}
    if any(each.new in landed for each in batch.plans):
        queue.finish(batch, batch.claims)
        queue.close(batch)
        return []
    return list(queue.retake(batch, NOW))


@pytest.mark.slow
def test_workers_killed_at_any_line_lose_nothing_and_publish_nothing_twice(
    database: Database, database_url: str, tmp_path: Path
) -> None:
    add_site(database)
    log = tmp_path / "remote"
    log.touch()
    choice = random.Random(5)
    count = 60
    command = [sys.executable, "-c", _WORKER.format(tests=str(Path(__file__).parent)), database_url, str(log)]
    saves = [
        (
            {"id": str(n), "slug": f"s{n}", "paths": [f"{n}.md"]},
            Values.of({f"{n}.md": str(n).encode()}, saved_at=NOW),
        )
        for n in range(count)
    ]
    kills = 0
    while saves or leftovers(database):
        worker = subprocess.Popen(command, env={"PYTHONPATH": str(Path(__file__).parents[1])})
        for one in saves[:15]:
            submit(database, "site", *one, now=NOW - 1)
        saves = saves[15:]
        deadline = time.monotonic() + 20
        before = log.stat().st_size
        while log.stat().st_size == before and leftovers(database) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(choice.random() * 0.03)
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        kills += 1
        assert kills < 100
    published = [line.split()[1] for line in log.read_text().splitlines()]
    assert sorted(published, key=int) == [str(n) for n in range(count)]


class Cut:
    """Stands between a worker and Postgres, and cuts their connection after so many messages."""

    def __init__(self, url: str) -> None:
        parts = conninfo.conninfo_to_dict(url)
        self._target = (str(parts["host"]), int(str(parts["port"])))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = conninfo.make_conninfo(url, host="127.0.0.1", port=self._listener.getsockname()[1])
        self.left = 10**9
        self.passed = 0
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            threading.Thread(target=self._pass, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client, False), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, counts: bool) -> None:  # noqa: FBT001
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if counts and self.left <= 0:
                    break
                target.sendall(data)
                if counts:
                    self.left -= 1
                    self.passed += 1
                    if self.left <= 0 and self.passed % 2:
                        break  # every other time, the answer is lost, not the question
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


@contextmanager
def cut(url: str) -> Iterator[Cut]:
    between = Cut(url)
    try:
        yield between
    finally:
        between.close()


def session(database: Database) -> None:
    """One drain with every way to settle."""
    queue = drain(database)
    for left in queue.recover(NOW):
        for part in queue.retake(left, NOW):
            queue.begin(part)
            queue.release(part, part.claims)
            queue.close(part)
    batch = queue.claim(NOW).batch
    if batch is None:
        return
    queue.record(batch, plan(batch))
    claims: dict[str, list[Claim]] = {}
    for claim in batch.claims:
        claims.setdefault(claim.job.slug[0], []).append(claim)
    queue.finish(batch, claims.get("f", []))
    for claim in claims.get("p", []):
        queue.put_off(batch, claim, Failure.LOST_RACE, "lost", NOW)
    for claim in claims.get("b", []):
        queue.bury(batch, claim, Failure.REJECTED, "no")
    queue.release(batch, claims.get("r", []))
    queue.drop(batch, claims.get("d", []))
    queue.close(batch)


@pytest.mark.slow
def test_a_connection_cut_at_any_statement_leaves_every_job_in_one_place(database_url: str) -> None:
    slugs = ["f1", "f2", "p1", "b1", "r1", "d1"]
    with Database(database_url) as database, cut(database_url) as between:
        add_site(database)
        cuts = 0
        # Each run tries every fourth, one of the next three the next time: all of them take a minute.
        for messages in range(1 + int(os.environ.get("BRITER_SOAK_SEED", "0")) % 4, 400, 4):
            for slug in slugs:
                save(database, slug, f"{slug}.md", NOW - 1)
            between.left = messages
            with Database(between.url, connections=1, patience=0.2) as shaky:
                try:
                    session(shaky)
                    is_cut = False
                except (DatabaseError, LockLostError):
                    is_cut = True
                    cuts += 1
            between.left = 10**9
            # Whatever was cut off: its successor brings each job to where it belongs. What the server was
            # asked for last, it may do after that: then the site is the dead one's once more.
            for _ in range(5):
                with suppress(LockLostError):
                    session(database)
                    break
            rows = {row.job.slug: row.state for row in drain(database).jobs(NOW)}
            assert rows == {"p1": State.PENDING, "b1": State.FAILED, "r1": State.PENDING}, messages
            person = PostgresQueue(database, "site", token=None, max_attempts=8, longest_delay=9.0)
            for slug in rows:
                person.cancel(slug, NOW)
            assert leftovers(database) == {}, messages
            if not is_cut:
                break
        assert cuts > 5
