"""Many clients at once, some of which die: producers, drains, and a user."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from postgres import add_site
from postgres_queues import NOW, control_queue, store, take_queue

from briter_worker.errors import Failure, FailureCode
from briter_worker.job import format_time
from briter_worker.ports import Plan
from briter_worker.queues.postgres.database import Database
from briter_worker.queues.postgres.payloads import PayloadValues, collect_blobs
from briter_worker.queues.postgres.queue import PostgresPlans, PostgresQueue
from briter_worker.queues.postgres.rows import take_site

DOWN = Failure(FailureCode.NETWORK, "down", "start it")


def save(database: Database, slug: str, path: str, created: float) -> None:
    document = {"id": f"{slug} {path}", "slug": slug, "paths": [path], "createdAt": format_time(created)}
    store(database, document, PayloadValues.of({path: path.encode()}, saved_at=created))


def left_rows(database: Database) -> dict[str, int]:
    """Return the tables that are not empty although no job is left to publish."""
    collect_blobs(database)
    tables = ("publications", "files", "blobs", "plans")
    with database.connection() as connection:
        return {
            table: count
            for table in tables
            for (count,) in connection.execute(f"SELECT count(*) FROM {table}")  # noqa: S608
            if count
        }


def test_many_producers_of_one_post_leave_one_job_with_all_paths(database_url: str) -> None:
    producers, each = 8, 12
    with Database(database_url, connections=producers) as database:
        add_site(database)

        def produce(producer: int) -> None:
            for number in range(each):
                save(database, "a", f"{producer}-{number}", NOW - 1000 + number * producers + producer)

        with ThreadPoolExecutor(producers) as pool:
            list(pool.map(produce, range(producers)))
        found = take_queue(database).claim(NOW)
    (claim,) = found.claims
    assert set(claim.job.paths) == {f"{p}-{n}" for p in range(producers) for n in range(each)}
    assert claim.job.id == f"a {producers - 1}-{each - 1}"
    assert len(found.superseded) == producers * each - 1


def test_producers_of_the_same_blobs_never_deadlock(database_url: str) -> None:
    sites = ("one", "two", "three")
    done = threading.Event()
    with Database(database_url, connections=6) as database:
        for name in sites:
            add_site(database, name)
        files = {f"{n}.bin": bytes([n]) * 100 for n in range(30)}

        def produce(site: str) -> None:
            choice = random.Random(site)
            for number in range(30):
                names = choice.sample([*files], 20)
                values = PayloadValues.of({name: files[name] for name in names}, saved_at=NOW)
                store(database, {"slug": f"s{number}", "paths": names}, values, site=site)
                if number % 3 == 0:
                    control_queue(database, site).cancel(f"s{number}", NOW)

        def collect() -> None:
            while not done.is_set():
                collect_blobs(database)

        with ThreadPoolExecutor(4) as pool:
            collecting = pool.submit(collect)
            try:
                list(pool.map(produce, sites))
            finally:
                done.set()
            collecting.result(60)


_WORKER = """
import sys
sys.path[:0] = {paths!r}
from test_postgres_concurrency import work
work(sys.argv[1], sys.argv[2])
"""


def work(url: str, log: str) -> None:
    """Publish by appending each job to a file, until the process is killed."""
    with Database(url, connections=1) as database, Path(log).open("a", buffering=1) as remote:
        token = take_site(database, "site", "worker", NOW)["token"]
        queue = PostgresQueue(database, "site", token=token, longest_delay=1800, dry_run=False, limit=5)
        plans = PostgresPlans(database, "site", token=token)
        landed = {line.split()[0] for line in Path(log).read_text().splitlines()}
        todo = queue.recover(NOW)
        for plan in plans.plans():
            queue.acknowledge([c for c in todo if plan.tip in landed and c.key in plan.commits], {})
            plans.drop(plan)
        todo = [queue.reclaim(claim, NOW) for claim in queue.recover(NOW)]
        while True:
            claims = [todo.pop()] if todo else queue.claim(NOW).claims
            if not claims:
                time.sleep(0.001)
                continue
            key = f"{token}-{claims[0].key}-{claims[0].attempt}"
            plan = Plan(key, None, key, {claim.key: key for claim in claims}, {})
            plans.record(plan)
            remote.write("".join(f"{key} {claim.job.id}\n" for claim in claims))
            queue.acknowledge(claims, {})
            plans.drop(plan)


@pytest.mark.slow
def test_workers_killed_at_any_line_lose_nothing_and_publish_nothing_twice(
    database: Database, database_url: str, tmp_path: Path
) -> None:
    add_site(database)
    log = tmp_path / "remote"
    log.touch()
    choice = random.Random(5)
    count = 60
    folder = Path(__file__).parent
    code = _WORKER.format(paths=[str(folder), str(folder.parent)])
    saves = list(range(count))
    kills = 0
    while saves or left_rows(database):
        worker = subprocess.Popen([sys.executable, "-c", code, database_url, str(log)])
        for number in saves[:15]:
            files = PayloadValues.of({f"{number}.md": str(number).encode()}, saved_at=NOW)
            document = {"id": str(number), "slug": f"s{number}", "paths": [f"{number}.md"]}
            store(database, document, files, now=NOW - 1)
        saves = saves[15:]
        deadline = time.monotonic() + 20
        before = log.stat().st_size
        while log.stat().st_size == before and left_rows(database) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(choice.random() * 0.03)
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        kills += 1
        assert kills < 100
    published = [line.split()[1] for line in log.read_text().splitlines()]
    assert sorted(published, key=int) == [str(n) for n in range(count)]
