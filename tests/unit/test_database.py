"""Postgres as the worker sees it: reachable, unreachable, too old, too new."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

import psycopg
import pytest
from postgres import PASSWORD, add_site

from briter_worker.queues.postgres.database import Database, DatabaseError
from briter_worker.queues.postgres.rows import PENDING, select_saves, take_site
from briter_worker.redaction import one_line

if TYPE_CHECKING:
    from postgres import Server


def test_a_database_in_another_encoding_is_refused_with_the_fix(postgres_server: Server) -> None:
    with psycopg.connect(postgres_server.url("postgres"), autocommit=True) as connection:
        connection.execute("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    try:
        with Database(postgres_server.url("latin")) as database:
            for use in (database.upgrade, database.check):
                with pytest.raises(DatabaseError, match="the encoding LATIN1") as refused:
                    use()
                assert "ENCODING 'UTF8'" in refused.value.fix
    finally:
        postgres_server.drop("latin")


@pytest.mark.parametrize("source", ["url", "environment"])
def test_the_connection_is_utf8_whatever_the_client_is_configured_for(
    database_url: str, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    if source == "environment":
        monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    else:
        database_url += "?client_encoding=LATIN1"
    with Database(database_url) as database:
        add_site(database, "žluťoučký ✓")
        with database.connection() as connection:
            assert connection.execute("SELECT name FROM sites").fetchone() == ("žluťoučký ✓",)


def test_a_node_goes_on_when_an_upgrade_adds_a_column(database: Database) -> None:
    add_site(database)
    with database.connection() as connection:
        connection.execute("ALTER TABLE sites DROP COLUMN changed_by")
        connection.execute("DELETE FROM migrations WHERE name LIKE '%_actors'")
    for _ in range(10):  # until the statement is prepared
        take_site(database, "site", "node")
    with Database(database.conninfo) as newer:
        assert newer.upgrade() == ["0005_actors"]
    assert take_site(database, "site", "node")["changed_by"] == ""


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
    with pytest.raises(DatabaseError, match="BRITER_DATABASE_URL") as refused:
        Database(url)
    assert PASSWORD not in "".join(traceback.format_exception(refused.value))


def test_a_missing_database_is_reported_without_the_password(postgres_server: Server) -> None:
    with Database(postgres_server.url("nowhere")) as database, pytest.raises(DatabaseError) as refused:
        database.version()
    assert "nowhere" in str(refused.value)
    assert PASSWORD not in "".join(traceback.format_exception(refused.value))


def test_the_password_is_redacted_everywhere() -> None:
    Database("postgresql://u:an-unlikely-secret-0815@127.0.0.1/x")
    assert "0815" not in one_line("the server said: an-unlikely-secret-0815 is wrong")


def test_many_slugs_are_looked_up_by_a_plan_for_them(database: Database) -> None:
    with database.connection() as connection:

        def count_prepared() -> object:
            query = "SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE %s"
            return connection.execute(query, ("%slug = ANY%",)).fetchone()

        select_saves(connection, "blog", PENDING, [f"post-{number}" for number in range(500)])
        assert count_prepared() == (0,)
        select_saves(connection, "blog", PENDING, ["post"])
        assert count_prepared() == (1,)
