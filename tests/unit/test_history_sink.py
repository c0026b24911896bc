"""The history, in a file and in Postgres: what it keeps, and that no publication fails with it."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from histories import SHA, Book, failed, outcome, published, start

from briter_worker.events import (
    Cancelled,
    DeclaredSave,
    NoChange,
    Published,
    Warned,
)
from briter_worker.job import Job
from briter_worker.sinks.earlier import EarlierSaves
from briter_worker.sinks.history import History
from briter_worker.sinks.store import PostgresStore, SqliteStore, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from postgres import Server

    from briter_worker.queues.postgres.database import Database

DAY = 86400.0


@pytest.fixture(params=["file", "postgres"])
def book(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Book]:
    """Return an empty book of either dialect."""
    if request.param == "file":
        book = Book(lambda: SqliteStore(tmp_path / "history.db"))
    else:
        database = request.getfixturevalue("database")
        book = Book(lambda: PostgresStore(database.connection, database.transaction))
    yield book
    book.history.close()


in_a_file = pytest.mark.parametrize("book", ["file"], indirect=True)


# --- receipts


def test_the_attempt_of_a_dead_worker_is_interrupted_by_the_next_one(book: Book) -> None:
    book.write(start())
    book.write(start(attempt=2), published(attempt=2))
    assert [(each.attempt, each.outcome) for each in book.receipts()] == [
        (2, "published"),
        (1, "interrupted"),
    ]
    assert book.history.under_way() == []


def test_a_post_is_partly_published_until_its_newest_publication_leaves_no_path_out(book: Book) -> None:
    for job in ("j1", "j2", "j1"):
        facts = {**outcome(job, 1), "dry_run": False, "commit": SHA, "rejected_paths": ("../outside.md",)}
        book.write(start(job), Published(**facts))
    book.write(start("j3"), published("j3"), start(), failed(), start("j2"), published("j2", dry_run=True))
    nothing = NoChange(**{**outcome("j4", 1), "dry_run": False, "rejected_paths": ("missing.md",)})
    book.write(start("j4"), nothing)
    assert book.history.partly_published() == ["post-j1", "post-j2"]
    book.write(start(), published(commit=SHA[::-1]))
    assert book.history.partly_published() == ["post-j2"]


# --- many nodes, each for many sites


def test_moments_of_a_site_become_visible_in_the_order_of_their_ids(database: Database) -> None:
    """A reader who has seen a moment asks for later ids only."""
    store = PostgresStore(database.connection, database.transaction)
    blog, shop = (Book(lambda: store, name) for name in ("blog", "shop"))
    writer = threading.Thread(target=blog.write, args=(Cancelled(job_id="2", slug="post"),))
    with store.transaction("blog") as slow:
        insert = (
            "INSERT INTO moments (site, at, event, data) VALUES ('blog', 1e6, 'first', '{}') RETURNING id"
        )
        slow.execute(insert).fetchone()  # waits for the lock, too: statements are sent in a pipeline
        writer.start()
        shop.write(Cancelled(job_id="3", slug="post"))
        writer.join(0.3)
        assert blog.history.moments(0) == []
    writer.join()
    assert [moment.event for moment in blog.history.moments(0)] == ["first", "cancelled"]


def test_a_database_that_is_away_costs_receipts(postgres_server: Server, database: Database) -> None:
    book = Book(lambda: PostgresStore(database.connection, database.transaction))
    postgres_server.stop()
    try:
        book.write(start(), published())
        with pytest.raises(StoreError) as unreadable:
            book.receipts()
    finally:
        postgres_server.start()
    book.write(Cancelled(job_id="j2", slug="b"))
    assert [each.job_id for each in book.receipts()] == ["j2"]
    (warning,) = (event for event in book.logged if isinstance(event, Warned))
    assert "the history in Postgres cannot be used" in warning.error
    assert warning.fix == unreadable.value.fix != ""


def test_old_receipts_are_deleted(book: Book) -> None:
    book.write(start("old"), published("old"))
    book.now += 31 * DAY
    book.write(start("new"), published("new"))
    assert [each.job_id for each in book.receipts()] == ["new", "old"]
    book.now += 340 * DAY
    book.write(start("newest"), published("newest"))
    assert [each.job_id for each in book.receipts()] == ["newest", "new"]
    for table in ("drains", "moments"):
        assert len(book.open_store().query(f"SELECT 1 FROM {table}")) == 2, table  # noqa: S608


# --- files that are damaged, foreign, locked or full


@in_a_file
@pytest.mark.parametrize("name", ["history.db", "history.db-wal"])
def test_a_link_is_not_followed(book: Book, tmp_path: Path, name: str) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"")
    (tmp_path / name).symlink_to(target)
    book.write(start(), published())
    assert target.read_bytes() == b""
    (warning,) = book.warnings()
    assert "no regular file" in warning
    with pytest.raises(StoreError) as unreadable:
        History(SqliteStore(tmp_path / "history.db")).receipts()
    assert unreadable.value.fix == f"remove {tmp_path / name}"


@in_a_file
def test_a_file_of_another_program_is_set_aside(book: Book, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "history.db")) as file:
        file.executescript("CREATE VIEW attempts AS SELECT 1; PRAGMA user_version = 2;")
    with pytest.raises(StoreError, match="another program"):
        book.receipts()
    book.write(start(), published())
    assert len(book.receipts()) == 1


@in_a_file
def test_a_locked_file_costs_receipts_and_publishing_waits_for_it_once(book: Book, tmp_path: Path) -> None:
    book.write(start("before"), published("before"))
    sinks = book.open()
    with closing(sqlite3.connect(tmp_path / "history.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        for number in range(100):  # waiting a second for each would take two minutes
            sinks(start(f"j{number}"))
            sinks(published(f"j{number}"))
        other.execute("COMMIT")
    book.monotonic += 10
    sinks(start("after"))
    sinks(published("after"))
    sinks.close()
    assert [each.job_id for each in book.receipts()] == ["after", "before"]
    (warning,) = book.warnings()
    assert "locked; publishing goes on" in warning


def test_a_history_of_an_earlier_version_learns_what_saves_declared_and_keeps_its_receipts(
    tmp_path: Path,
) -> None:
    file = tmp_path / "history.db"
    book = Book(lambda: SqliteStore(file))
    book.write(Cancelled(job_id="before", slug="a"))
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("DROP TABLE declared")
    saves = EarlierSaves(SqliteStore(file), clock=lambda: 1_000_000.0)
    job = Job(id="j1", slug="a", paths=("content/a.md", "content/x/"), created_at=5.0)
    assert saves.declared(job, ["content/a.md"]) == set()
    saves.store([Cancelled(job_id="j1", slug="a", save=DeclaredSave.of(job))])
    newer = job.model_copy(update={"id": "j2", "created_at": 6.0})
    assert saves.declared(newer, ["content/a.md", "content/x", "content/b.md"]) == {
        "content/a.md",
        "content/x",
    }
    assert saves.declared(job, ["content/a.md"]) == set(), "a save proves nothing of itself"
    assert saves.declared(newer.model_copy(update={"slug": "b"}), ["content/a.md"]) == set()
    assert [receipt.job_id for receipt in book.receipts()] == ["before"]


def test_a_save_that_was_missing_itself_makes_no_path_known(tmp_path: Path) -> None:
    saves = EarlierSaves(SqliteStore(tmp_path / "history.db"))
    job = Job(id="j1", slug="a", paths=("content/a.md",), created_at=5.0, failure="missing")
    saves.store([Cancelled(job_id="j1", slug="a", save=DeclaredSave.of(job))])
    assert saves.declared(job.model_copy(update={"id": "j2"}), ["content/a.md"]) == set()
