"""The search in the history, in a file and in Postgres: what is found, and that nobody waits for it."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from typing import TYPE_CHECKING

import psycopg
import pytest
from histories import SHA, Book, failed, outcome, published, start

from briter_worker.events import Cancelled, JobStarted, Published
from briter_worker.sinks import search
from briter_worker.sinks.history import History
from briter_worker.sinks.search import IndexingError
from briter_worker.sinks.store import PostgresStore, SqliteStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from briter_worker.queues.postgres.database import Database

SHOP = "Shop@2"
INDEX = "indexrelid = 'attempts_words'::regclass"


@pytest.fixture(params=["file", "postgres"])
def book(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Book]:
    """Return an empty book of either dialect, as the site `Shop@2`."""
    if request.param == "file":
        book = Book(lambda: SqliteStore(tmp_path / "history.db"), SHOP)
    else:
        database = request.getfixturevalue("database")
        book = Book(lambda: PostgresStore(database.connection, database.transaction), SHOP)
    yield book
    book.history.close()


def publish(book: Book, slug: str, title: str = "", author: str = "", *, commit: str = SHA) -> None:
    started = JobStarted(
        job_id=f"job-{slug}",
        slug=slug,
        attempt=1,
        dry_run=False,
        title=title,
        author=author,
        saved_at=999_990.0,
        due_at=None,
    )
    facts = {**outcome("j1", 1), "job_id": f"job-{slug}", "slug": slug}
    book.write(started, Published(**facts, dry_run=False, commit=commit))


def found(book: Book, words: str, **which: object) -> list[str]:
    return [each.slug for each in book.history.receipts(search=words, **which)]  # type: ignore[arg-type]


def test_a_word_is_found_where_a_word_of_the_post_begins(book: Book) -> None:
    publish(book, "2026/my-first-post", "Café crème: «l'été»", "Ada Lovelace <ada@example.org>")
    publish(book, "cheese", "東京の天気 100% sure_thing", "Łukasz", commit=SHA[::-1])
    for words, slugs in {
        "first": ["2026/my-first-post"],
        "FIRST my": ["2026/my-first-post"],
        "my-first": ["2026/my-first-post"],
        "first-my": [],
        "irst": [],
        "caf ada@exa": ["2026/my-first-post"],
        "été": ["2026/my-first-post"],
        "Łuka": ["cheese"],
        "天気": ["cheese"],
        "京東": [],
        "100%": ["cheese"],
        "sure_th": ["cheese"],
        "c": ["cheese", "2026/my-first-post"],
        SHA[:7]: ["2026/my-first-post"],
        SHA[::-1]: ["cheese"],
        "cheese first": [],
        "— ! % ' \" \\": [],
        "cheese —": ["cheese"],
        "words : cheese": [],
        'cheese" OR "first': [],
        "cheese* NEAR(a)": [],
        "che:* & ese|'": [],
        f"{'x' * 150}": [],
    }.items():
        assert found(book, words) == slugs, words


def test_a_failure_is_found_by_its_reason_and_by_its_meaning(book: Book) -> None:
    book.write(start("j1"), failed("j1"), start("j2"), published("j2"))
    for words in ("remote down", "REACHED", "post-j1 reached", "cannot publish"):
        assert found(book, words) == ["post-j1"], words
    assert found(book, "cannot post-j2") == []


def test_a_search_has_the_newest_first_in_pages_and_other_conditions(book: Book) -> None:
    for number in range(7):
        publish(book, f"post-{number}", "One post")
    book.write(Cancelled(job_id="c", slug="post-c"))
    assert found(book, "post", limit=2) == ["post-c", "post-6"]
    third = book.history.receipts(search="post", limit=3)[-1].id
    assert found(book, "post", limit=2, before=third) == ["post-4", "post-3"]
    assert found(book, "post", outcomes=("cancelled", "superseded")) == ["post-c"]
    assert found(book, "one", slug="post-2") == ["post-2"]
    assert found(book, "one", slug="post-2", outcomes=("failed",)) == []


def test_what_has_just_ended_is_found_and_what_has_not_ended_is_not(book: Book) -> None:
    assert found(book, "post") == []
    worker = book.open()
    worker(start("j1"))
    worker(start("j2"))
    worker(published("j2"))
    assert found(book, "post") == ["post-j2"]
    worker(published("j1"))
    assert sorted(found(book, "post")) == ["post-j1", "post-j2"]
    worker.close()
    book.now += 400 * 86400
    publish(book, "new-post")
    assert found(book, "post") == ["new-post"]


def test_a_site_finds_nothing_of_another(database: Database) -> None:
    store = PostgresStore(database.connection, database.transaction)
    books = {name: Book(lambda: store, name) for name in ("shop", "Shop", "shop@2", "shop.b")}
    for name, book in books.items():
        publish(book, f"of-{name}")
    for name, book in books.items():
        assert found(book, "of") == [f"of-{name}"]


# --- the index in memory


@pytest.fixture
def notes(tmp_path: Path) -> Iterator[Book]:
    book = Book(lambda: SqliteStore(tmp_path / "history.db"))
    yield book
    book.history.close()


def test_a_search_says_how_far_its_index_is_and_waits_for_it_no_longer(
    notes: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        publish(notes, f"post-{number}")
    goes_on, read_two = threading.Event(), threading.Event()
    read = SqliteStore.query

    def slow(store: SqliteStore, statement: str, values: tuple[object, ...] = ()) -> list[object]:
        if "id > ?" in statement and values[1] == 2:
            read_two.set()
            assert goes_on.wait(20)
        return read(store, statement, values)

    monkeypatch.setattr(search, "_AT_ONCE", 2)
    monkeypatch.setattr(search, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(SqliteStore, "query", slow)
    for _ in range(2):
        with pytest.raises(IndexingError, match=r"is being prepared for the search: (0|50) %") as waiting:
            found(notes, "post")
        assert waiting.value.fix == "search again in a moment"
        assert read_two.wait(20)
    publish(notes, "post-4")  # the worker waits for nobody
    goes_on.set()
    monkeypatch.setattr(search, "_PATIENCE_S", 20.0)
    assert len(found(notes, "post")) == 5


def test_the_index_follows_another_file_and_one_that_an_earlier_version_wrote(
    notes: Book, tmp_path: Path
) -> None:
    publish(notes, "first-post")
    publish(notes, "second-post")
    assert len(found(notes, "post")) == 2
    with closing(sqlite3.connect(tmp_path / "history.db")) as earlier, earlier:
        earlier.execute(
            "INSERT INTO attempts (job_id, slug, outcome, ended)"
            " VALUES ('e', 'earlier-post', 'published', 1e6)"
        )
        assert earlier.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall() == []
    assert found(notes, "earlier") == ["earlier-post"]
    for file in tmp_path.glob("history.db*"):
        file.unlink()
    assert found(notes, "post") == []
    for slug in ("a-post", "b-post", "c-post", "d-post"):
        publish(notes, slug)
    assert found(notes, "post") == ["d-post", "c-post", "b-post", "a-post"]


def test_an_index_of_receipts_that_are_deleted_is_made_anew(
    notes: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_index, opened = search.open_index, list[sqlite3.Connection]()

    def note() -> sqlite3.Connection:
        opened.append(open_index())
        return opened[-1]

    monkeypatch.setattr(search, "open_index", note)
    monkeypatch.setattr(search, "_MIN_RETIRED", 2)
    for number in range(6):
        publish(notes, f"post-{number}")
    assert len(found(notes, "post")) == 6
    with SqliteStore.transaction(notes.open_store()) as transaction:  # type: ignore[arg-type]
        transaction.execute("DELETE FROM attempts WHERE id < 6")
    assert found(notes, "post") == ["post-5"]
    (index,) = [each for each in opened if each is not opened[0]]
    assert index.execute("SELECT count(*) FROM receipts WHERE receipts MATCH 'post'").fetchone() == (1,)


# --- the index in Postgres


def test_no_search_in_postgres_reads_all_receipts(database: Database) -> None:
    with database.connection() as connection:
        connection.execute(
            "INSERT INTO attempts (site, job_id, slug, outcome)"
            " SELECT %s, 'j' || n, 'post-' || n, 'published' FROM generate_series(1, 3000) n",
            (SHOP,),
        )
        connection.execute("ANALYZE attempts")
    asked: list[str] = []

    class Explaining(PostgresStore):
        def _run(self, connection, statement, values):  # type: ignore[no-untyped-def,override] # noqa: ANN001, ANN202
            if statement.startswith("WITH found"):
                rows = super()._run(connection, f"EXPLAIN {statement}", values)
                asked.append("\n".join(row for (row,) in rows))
            return super()._run(connection, statement, values)

    store = Explaining(database.connection, database.transaction)
    history = History(store, SHOP)
    for words in ("post", "nothing", "post-77", "p 1 2"):
        history.receipts(search=words)
    assert len(asked) == 4
    for plan in asked:
        assert "attempts_words" in plan
        assert "Seq Scan on attempts" not in plan


def test_an_upgrade_makes_the_index_while_receipts_are_recorded(database: Database) -> None:
    publish(Book(lambda: PostgresStore(database.connection, database.transaction), SHOP), "before")
    with database.connection() as connection:
        connection.execute("DELETE FROM migrations WHERE name LIKE '%_search_index'")
        connection.execute(f"UPDATE pg_index SET indisvalid = false WHERE {INDEX}")  # noqa: S608 - our own
    applied: list[list[str]] = []
    with psycopg.connect(database.conninfo) as writer:
        # Not committed yet.
        writer.execute("INSERT INTO attempts (site, job_id, slug) VALUES ('x', 'x', 'x')")
        upgrades = [threading.Thread(target=lambda: applied.append(database.upgrade())) for _ in range(2)]
        for each in upgrades:
            each.start()
        book = Book(lambda: PostgresStore(database.connection, database.transaction), SHOP)
        publish(book, "meanwhile")
        assert book.warnings() == []
        writer.commit()
        for each in upgrades:
            each.join(20)
    assert sorted(map(len, applied)) == [0, 1]
    assert found(book, "before") == ["before"]
    assert found(book, "meanwhile") == ["meanwhile"]
    with database.connection() as connection:
        rows = connection.execute(f"SELECT indisvalid FROM pg_index WHERE {INDEX}")  # noqa: S608 - our own
        assert rows.fetchone() == (True,)
