"""How often Postgres is asked for one post: each question is a way there and back."""

from __future__ import annotations

import io
import re
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from cluster_farm import Farm
from postgres import add_site

from briter_worker.cluster.drains import Drains
from briter_worker.cluster.telling import Telling
from briter_worker.cluster.waking import wake
from briter_worker.plugins import Plugins
from briter_worker.queues.postgres.contents import Values
from briter_worker.queues.postgres.database import Database
from briter_worker.queues.postgres.steering import PostgresSteering
from briter_worker.queues.postgres.writing import submit
from briter_worker.sinks.log import LogSink

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from postgres import Server

_LATE = "2099-01-01T00:00:00Z"
_DRAIN = 20
_TOLD = re.compile(r"\b(attempts|moments|drains|tallies|requests)\b|advisory|^(BEGIN|COMMIT)")
"""What tells of it is written beside it, and in fewer transactions the faster it is."""


@pytest.fixture
def farm(tmp_path: Path, database: Database, database_url: str) -> Iterator[Farm]:
    """No sites yet, and no hosts."""
    farm = Farm(tmp_path, database, database_url)
    try:
        yield farm
    finally:
        farm.end()


@contextmanager
def asked(server: Server, farm: Farm) -> Iterator[list[str]]:
    """What is asked inside by connections that are made inside; in the list when it is left."""
    with farm.database.asking() as connection:
        (name,) = connection.execute("SELECT current_database()").fetchone() or ("",)
        connection.execute(f"ALTER DATABASE {name} SET log_statement = 'all'".encode())
        connection.execute(f"ALTER DATABASE {name} SET log_min_messages = 'log'".encode())
    log = server.folder / "log"
    before = log.stat().st_size
    found: list[str] = []
    yield found
    time.sleep(0.1)
    text = log.read_bytes()[before:].decode()
    found += re.findall(r"LOG:  (?:statement|execute [^:]*): (.*)", text)


def test_a_save_is_one_question_and_so_is_its_word(farm: Farm, postgres_server: Server) -> None:
    farm.add("blog")
    source = Values.of({"content/a.md": b"A\n", "content/b.png": b"B\n"}, saved_at=1.0)
    document = {"slug": "a", "paths": ["content/a.md", "content/b.png"]}
    with asked(postgres_server, farm) as questions, Database(farm.url) as database:
        submit(database, "blog", document, source)
        wake(database, ["blog"])
    assert len(questions) == 2
    assert farm.once().returncode == 0
    assert farm.file("blog", "content/b.png") == "B\n"


def test_a_drain_of_one_post_asks_as_seldom_as_that_of_many(farm: Farm, postgres_server: Server) -> None:
    farm.add("blog")
    settings = farm.settings()
    counts = []
    for posts in (1, 1, 10):
        for number in range(posts):
            farm.save("blog", f"post{number}", f"{posts} {number} {time.time_ns()}\n")
        with asked(postgres_server, farm) as questions, Database(farm.url) as database:
            telling = Telling(settings, database, LogSink(io.BytesIO()))
            drains = Drains(settings, database, Plugins(settings.plugins), telling, worker="host")
            assert drains("blog", lambda: False).tally.settled == posts
            telling.close()
        counts.append(sum(not _TOLD.search(each) or "FOR NO KEY UPDATE" in each for each in questions))
    assert counts == [_DRAIN] * 3


def test_who_looks_again_reads_only_what_has_changed(database: Database) -> None:
    add_site(database, "site")
    for slug in ("a", "b"):
        submit(database, "site", {"slug": slug, "paths": [f"content/{slug}.md"], "scheduledFor": _LATE})
    queue = PostgresSteering(database, "site")
    first = {row.job.slug: row.job for row in queue.jobs(0.0)}
    submit(database, "site", {"slug": "b", "paths": ["content/new.md"], "scheduledFor": _LATE})
    second = {row.job.slug: row.job for row in queue.jobs(0.0)}
    assert second["a"] is first["a"]
    assert set(second["b"].paths) == {"content/b.md", "content/new.md"}
    queue.cancel("a", 0.0)
    assert [row.job.slug for row in queue.jobs(0.0)] == ["b"]
