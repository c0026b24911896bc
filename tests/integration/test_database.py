"""Postgres as the worker sees it: reached, lost, too old, too new."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

import psycopg
import pytest
from postgres import PASSWORD, add_site

from briter_worker.errors import for_people
from briter_worker.queues.postgres import versions
from briter_worker.queues.postgres.database import Database, DatabaseError, VersionError

if TYPE_CHECKING:
    from postgres import Server


def test_an_upgrade_makes_the_tables_once(empty_database_url: str) -> None:
    with Database(empty_database_url) as database:
        assert database.version() == 0
        with pytest.raises(VersionError, match="Fix: briter-worker db upgrade"):
            database.check()
        done = database.upgrade()
        assert "0001_publications" in done
        assert "procrastinate schema" in done
        assert database.upgrade() == []
        assert database.version() == versions.needed()
        database.check()


def test_an_upgrade_is_needed_before_anything_else_and_says_so(empty_database_url: str) -> None:
    with Database(empty_database_url) as database, pytest.raises(VersionError, match="db upgrade"):
        add_site(database)


def test_tables_that_only_a_newer_program_understands_are_refused(database: Database) -> None:
    with database.transaction() as connection:
        connection.execute("INSERT INTO migrations (name, version, oldest) VALUES ('9998_more', 9998, 1)")
    database.check()  # more tables and columns are in nobody's way
    with database.transaction() as connection:
        connection.execute("INSERT INTO migrations (name, version, oldest) VALUES ('9999_other', 9999, 9999)")
    with pytest.raises(VersionError, match="install the briter-worker that upgraded it"):
        database.check()


def test_what_leaves_a_transaction_undoes_it(database: Database) -> None:
    def fail() -> None:
        with database.transaction() as connection:
            connection.execute("INSERT INTO sites (name) VALUES ('site')")
            raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        fail()
    add_site(database)


def test_a_server_that_goes_and_comes_back_is_used_again(postgres_server: Server, database_url: str) -> None:
    with Database(database_url, connections=2, patience=1) as database:
        add_site(database, "before")
        postgres_server.stop()
        try:
            with pytest.raises(DatabaseError, match="Fix: start Postgres") as told:
                add_site(database, "meanwhile")
        finally:
            postgres_server.start()
        assert PASSWORD not in "".join(traceback.format_exception(told.value))
        add_site(database, "after")


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://u:{PASSWORD}%@host/x",
        f"postgresql://u:{PASSWORD}@host/x?nonsense=1",
        f"postgresql://u:{PASSWORD}@[::1/x",
        f"user=u pasword={PASSWORD}",
    ],
)
def test_a_url_that_cannot_be_read_is_not_shown(url: str) -> None:
    with pytest.raises(DatabaseError, match="BRITER_DATABASE_URL") as told:
        Database(url)
    assert PASSWORD not in "".join(traceback.format_exception(told.value))


def test_a_name_that_is_not_there_is_told_without_the_password(postgres_server: Server) -> None:
    with Database(postgres_server.url("nowhere")) as database, pytest.raises(DatabaseError) as told:
        database.version()
    assert "nowhere" in str(told.value)
    assert PASSWORD not in "".join(traceback.format_exception(told.value))


def test_the_password_is_shown_nowhere_once_the_url_is_known() -> None:
    Database("postgresql://u:an-unlikely-secret-0815@127.0.0.1/x")
    assert "0815" not in for_people("the server said: an-unlikely-secret-0815 is wrong")


def test_a_pipeline_in_which_nobody_waits_for_an_answer_is_committed_all_the_same(database: Database) -> None:
    with database.transaction(pipelined=True) as connection:
        connection.execute("INSERT INTO sites (name) VALUES ('one')")
        connection.execute("INSERT INTO sites (name) VALUES ('two')")
    with database.asking() as connection:
        assert connection.execute("SELECT count(*) FROM sites").fetchone() == (2,)


def test_a_mistake_in_a_pipeline_undoes_all_of_it(database: Database) -> None:
    def write() -> None:
        with database.transaction(pipelined=True) as connection:
            connection.execute("INSERT INTO sites (name) VALUES ('one')")
            connection.execute("INSERT INTO sites (name) VALUES ('one')")

    with pytest.raises(psycopg.errors.UniqueViolation):
        write()
    with database.asking() as connection:
        assert connection.execute("SELECT count(*) FROM sites").fetchone() == (0,)
    add_site(database)
