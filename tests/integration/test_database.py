"""Postgres as the worker sees it: reached, lost, too old, too new."""

from __future__ import annotations

import contextlib
import select
import traceback
from typing import TYPE_CHECKING

import psycopg
import pytest
from postgres import PASSWORD, add_site

from briter_worker.errors import for_people
from briter_worker.queues.postgres import tokens, versions
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
    with Database(empty_database_url) as database, pytest.raises(VersionError) as told:
        add_site(database)
    assert str(told.value) == "the database lacks tables of the worker's. Fix: briter-worker db upgrade"


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


def test_a_mistake_in_a_transaction_undoes_all_of_it(database: Database) -> None:
    def write() -> None:
        with database.transaction() as connection:
            connection.execute("INSERT INTO sites (name) VALUES ('one')")
            connection.execute("INSERT INTO sites (name) VALUES ('one')")

    with pytest.raises(psycopg.errors.UniqueViolation):
        write()
    with database.asking() as connection:
        assert connection.execute("SELECT count(*) FROM sites").fetchone() == (0,)
    add_site(database)


def test_who_sleeps_in_the_middle_of_a_save_does_not_hold_the_site(database: Database) -> None:
    add_site(database, "one")

    def sleep() -> None:
        with database.transaction() as connection:
            connection.execute("SET LOCAL idle_in_transaction_session_timeout = '100ms'")
            tokens.lock(connection, "one", None)
            with database.transaction() as other:
                tokens.lock(other, "one", None)  # before its own time is up

    with pytest.raises(DatabaseError):
        sleep()


def test_a_connection_that_ends_while_it_is_used_is_an_error_and_the_next_one_is_good(
    database: Database,
) -> None:
    def go_on() -> None:
        with database.asking() as connection:
            with contextlib.suppress(psycopg.OperationalError):
                connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")
            connection.execute("SELECT 1")

    with pytest.raises(DatabaseError, match="Fix: start Postgres"):
        go_on()
    add_site(database, "one")
    with database.asking() as connection:  # who asked has dealt with it
        for _ in range(2):
            with pytest.raises(psycopg.OperationalError):
                connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")
    add_site(database, "two")


@pytest.mark.parametrize("flushed", [False, True])
def test_only_a_transaction_that_may_be_lost_does_not_wait_for_the_disk(
    database: Database, *, flushed: bool
) -> None:
    with database.transaction(flushed=flushed) as connection:
        assert connection.execute("SHOW synchronous_commit").fetchone() == ("on" if flushed else "off",)
    with database.asking() as connection:
        assert connection.execute("SHOW synchronous_commit").fetchone() == ("on",)


def test_a_connection_that_ended_while_nobody_used_it_is_never_handed_out(
    database: Database, database_url: str
) -> None:
    with database.asking() as connection:
        number = connection.info.backend_pid
    with psycopg.connect(database_url, autocommit=True) as other:
        other.execute("SELECT pg_terminate_backend(%s, 5000)", (number,))
    with database.asking() as connection:
        assert connection.info.backend_pid != number
    add_site(database)


def test_too_few_connections_are_told_from_a_server_that_is_gone(database_url: str) -> None:
    said = r"all 1 connections to Postgres are in use.* Fix: try again"
    with (
        Database(database_url, connections=1, patience=0.2) as database,
        database.asking(),
        pytest.raises(DatabaseError, match=said),
    ):
        add_site(database)


def test_an_upgrade_of_what_cannot_be_reached_says_why(postgres_server: Server) -> None:
    with (
        Database(postgres_server.url("nowhere")) as database,
        pytest.raises(DatabaseError, match='"nowhere" does not exist') as told,
    ):
        database.upgrade()
    assert PASSWORD not in "".join(traceback.format_exception(told.value))


def test_a_server_that_is_too_old_is_refused_before_anything_is_made(
    empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "_OLDEST_SERVER", 10**9)
    with Database(empty_database_url) as database:
        with pytest.raises(DatabaseError, match="version 14 or newer is needed"):
            database.upgrade()
        assert database.version() == 0


@pytest.mark.parametrize(
    ("statement", "remedy"),
    [
        (
            "CREATE ROLE nobody_here; SET LOCAL ROLE nobody_here; SELECT * FROM briter.sites",
            "give the database's user",
        ),
        ("SET LOCAL statement_timeout = '10ms'; SELECT pg_sleep(10)", "look in pg_stat_activity"),
        ("DO $$ BEGIN RAISE SQLSTATE '55P03'; END $$", "look in pg_stat_activity"),
        ("SET LOCAL idle_in_transaction_session_timeout = '10ms'", "this program stood still"),
        ("DO $$ BEGIN RAISE SQLSTATE '40P01'; END $$", "Fix: try again$"),
        ("DO $$ BEGIN RAISE SQLSTATE '40001'; END $$", "Fix: try again$"),
        ("DO $$ BEGIN RAISE SQLSTATE '53100'; END $$", "free some space"),
        ("SET TRANSACTION READ ONLY; DELETE FROM sites", "not a standby"),
        ("DO $$ BEGIN RAISE SQLSTATE '57P01'; END $$", "start Postgres"),
    ],
)
def test_each_refusal_of_the_server_comes_with_what_to_do(
    database: Database, statement: str, remedy: str
) -> None:
    def ask() -> None:
        with database.transaction() as connection:
            connection.execute(statement.encode())
            assert select.select([connection.fileno()], [], [], 10)[0], "the server says no more"
            connection.execute("SELECT 1")

    with pytest.raises(DatabaseError, match=remedy):
        ask()
    add_site(database)
