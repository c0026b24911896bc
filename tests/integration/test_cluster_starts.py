"""What files started from, kept in the database for whichever host publishes their next save."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import psycopg
import pytest
from postgres import add_site

from briter_worker.cluster.starts import Starts
from briter_worker.errors import LockLostError
from briter_worker.git.bases import Base, Conflict
from briter_worker.queues.postgres import tokens

if TYPE_CHECKING:
    from postgres import Server

    from briter_worker.queues.postgres.database import Database

ODD = "content/\udcff post?start.md"


def taken(database: Database, name: str = "blog") -> Starts:
    return Starts(database, name, token=tokens.take(database, name, "host"))


def test_what_is_remembered_is_known_to_the_next_drain_and_nothing_else_is(database: Database) -> None:
    add_site(database, "blog")
    add_site(database, "shop")
    bases = {
        "content/a.md": Base("a" * 40),
        "content/new.md": Base(None),
        "content/b.md": Base("b" * 40, Conflict("c" * 40, None)),
        ODD: Base("d" * 40),
    }
    taken(database).remember(bases, {})
    assert taken(database).bases([*bases, "content/other.md"]) == bases
    assert taken(database).bases(["content/a.md"]) == {"content/a.md": Base("a" * 40)}
    assert taken(database, "shop").bases(bases) == {}


def test_what_is_remembered_anew_takes_the_place_of_what_was(database: Database) -> None:
    add_site(database, "blog")
    starts = taken(database)
    starts.remember({"content/a.md": Base("a" * 40, Conflict("b" * 40, "c" * 40))}, {})
    starts.remember({"content/a.md": Base("d" * 40)}, {})
    assert starts.bases(["content/a.md"]) == {"content/a.md": Base("d" * 40)}


def test_a_content_is_kept_as_long_as_something_started_from_it(database: Database) -> None:
    add_site(database, "blog")
    starts = taken(database)
    one, other = "a" * 40, "b" * 40
    both = {"content/a.md": Base(one), "content/b.md": Base(one)}
    starts.remember(both, {one: b"\0text"})
    starts.remember({"content/a.md": Base(other)}, {other: b""})
    assert (starts.content(one), starts.content(other)) == (b"\0text", b"")
    starts.remember({"content/b.md": Base(None)}, {})
    assert (starts.content(one), starts.content(other)) == (None, b"")


def test_what_is_remembered_outlives_a_crash_of_the_server(
    database: Database, postgres_server: Server
) -> None:
    add_site(database, "blog")
    starts = taken(database)
    base = {"content/a.md": Base("a" * 40)}
    with psycopg.connect(postgres_server.url("postgres"), autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET wal_writer_delay = '10s'")  # what waits for it is lost
        connection.execute("SELECT pg_reload_conf()")
    try:
        starts.remember(base, {"a" * 40: b"text"})
        postgres_server.restart(signal.SIGQUIT)
        # The drain that remembered it goes on with another connection, and settles the post.
        assert starts.bases(base) == base
        assert starts.content("a" * 40) == b"text"
    finally:
        with psycopg.connect(postgres_server.url("postgres"), autocommit=True) as connection:
            connection.execute("ALTER SYSTEM RESET wal_writer_delay")
            connection.execute("SELECT pg_reload_conf()")


def test_who_lost_the_site_remembers_nothing(database: Database) -> None:
    add_site(database, "blog")
    lost = taken(database)
    successor = taken(database)
    with pytest.raises(LockLostError):
        lost.remember({"content/a.md": Base("a" * 40)}, {"a" * 40: b"text"})
    assert successor.bases(["content/a.md"]) == {}
    assert successor.content("a" * 40) is None
