"""Many clients at once, some of which die: producers, drains, and a user."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from postgres import add_site
from postgres_queues import NOW, store, take_queue

from briter_worker.job import format_time
from briter_worker.queues.postgres.database import Database
from briter_worker.queues.postgres.payloads import PayloadSource


def save(database: Database, slug: str, path: str, created: float) -> None:
    document = {"id": f"{slug} {path}", "slug": slug, "paths": [path], "createdAt": format_time(created)}
    store(database, document, PayloadSource.of({path: path.encode()}))


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
    assert claim.job.id.endswith(f"-{each - 1}")
    assert len(found.superseded) == producers * each - 1
