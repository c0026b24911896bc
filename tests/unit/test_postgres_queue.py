"""Postgres as the worker sees it: the database, the fence around a site, the files that come with jobs."""

from __future__ import annotations

import json
import random
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from postgres import PASSWORD, add_site, count_rows, execute
from queue_backends import LONGEST_DELAY, NOW, control_queue, store, take_queue, take_site

from briter_worker.cluster import sites
from briter_worker.cluster.sites import STATES, summaries
from briter_worker.errors import Failure, FailureCode, LockLostError, one_line
from briter_worker.job import State, format_time
from briter_worker.ports import BaseVersion, Claim, Conflict, Payload, Plan, SubmittedFile, blob_id
from briter_worker.queues.postgres.database import Database, DatabaseError
from briter_worker.queues.postgres.payloads import (
    ContentChangedError,
    PayloadSource,
    PostgresBases,
    PostgresPayloads,
    collect_blobs,
)
from briter_worker.queues.postgres.queue import PostgresPlans, PostgresQueue
from briter_worker.queues.postgres.rows import PENDING, locked, select_saves

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from postgres import Server

    from briter_worker.ports import Claim


def test_a_database_in_another_encoding_is_refused_with_the_fix(postgres_server: Server) -> None:
    with psycopg.connect(postgres_server.url("postgres"), autocommit=True) as connection:
        connection.execute("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    try:
        with closing(Database(postgres_server.url("latin"))) as database:
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
    with closing(Database(database_url)) as database:
        add_site(database, "žluťoučký ✓")
        with database.connection() as connection:
            assert connection.execute("SELECT name FROM sites").fetchone() == ("žluťoučký ✓",)


def test_a_node_goes_on_when_an_upgrade_adds_a_column(database: Database) -> None:
    add_site(database)
    execute(database, "ALTER TABLE sites DROP COLUMN changed_by")
    execute(database, "DELETE FROM migrations WHERE name LIKE '%_actors'")
    for _ in range(10):  # until the statement is prepared
        take_site(database)
    with closing(Database(database.conninfo)) as newer:
        assert newer.upgrade() == ["0005_actors"]
    assert take_site(database)["changed_by"] == ""


def test_whole_numbers_of_sites_that_were_accepted_as_fractions_go_on(database: Database) -> None:
    add_site(database, "plain")
    own = {"historyKeepDays": "30.0", "gitTimeoutMs": 5000.0, "workerBackoffMs": "60000.0,5"}
    own |= {"workerBackoffJitter": "0.0", "gitAuthorName": "Version 2.0"}
    execute(database, "INSERT INTO sites (name, settings) VALUES ('old', %s)", json.dumps(own))
    execute(database, "DELETE FROM migrations WHERE name LIKE '%_whole_numbers'")
    assert database.upgrade() == ["0006_whole_numbers"]
    assert sites.get(database, "plain").settings == {}
    assert sites.get(database, "old").settings == {
        "historyKeepDays": "30",
        "gitTimeoutMs": 5000,
        "workerBackoffMs": "60000,5",
        "workerBackoffJitter": "0.0",
        "gitAuthorName": "Version 2.0",
    }


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


def test_the_password_is_redacted_everywhere() -> None:
    Database("postgresql://u:an-unlikely-secret-0815@127.0.0.1/x")
    assert "0815" not in one_line("the server said: an-unlikely-secret-0815 is wrong")


def test_a_site_counts_its_jobs_in_the_states_that_the_queue_lists(database: Database) -> None:
    add_site(database)
    later = format_time(NOW + 60)
    keys: dict[str, dict[str, object]] = {
        "scheduled": {"scheduledFor": later},
        "retrying": {"nextAttemptAt": later, "attempts": 1},
        "quiet": {"quietUntil": later},
        "tried": {"dryRunAt": later},
        "failed": {"status": "failed"},
    }
    for slug in STATES:
        store(database, {"slug": slug, "paths": ["content/a.md"], **keys.get(slug, {})})
    execute(database, "UPDATE publications SET state = 'claimed' WHERE slug = 'claimed'")
    assert {row.job.slug: row.state.value for row in control_queue(database).jobs(NOW)} == {
        slug: slug for slug in STATES
    }
    assert summaries(database, NOW)[0].jobs == dict.fromkeys(STATES, 1)


def test_many_slugs_are_looked_up_by_a_plan_for_them(database: Database) -> None:
    with database.connection() as connection:

        def count_prepared() -> object:
            query = "SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE %s"
            return connection.execute(query, ("%slug = ANY%",)).fetchone()

        select_saves(connection, "blog", PENDING, [f"post-{number}" for number in range(500)])
        assert count_prepared() == (0,)
        select_saves(connection, "blog", PENDING, ["post"])
        assert count_prepared() == (1,)


# A worker that has lost its site changes nothing of it, whatever it does and whenever it wakes up


TABLES = ("publications", "files", "blobs", "plans", "published", "base_versions", "superseded")
HAS_NOTHING = {"superseded": False, "failed_or_retrying": False, "scheduled": False}
DOWN = Failure(FailureCode.NETWORK, "down", "start it")
PLAN = Plan("id", None, "2" * 40, {"1": "2" * 40}, {"a.md": "3" * 40, "gone.md": None, "\udcff": "4" * 40})


def take(database: Database) -> int:
    return int(take_site(database)["token"])


def save(database: Database, slug: str) -> None:
    files = PayloadSource.of({f"{slug}.md": slug.encode()})
    store(database, {"slug": slug, "paths": [f"{slug}.md"]}, files)


def everything(database: Database) -> dict[str, list[tuple[Any, ...]]]:
    with database.connection() as connection:
        return {
            table: sorted(connection.execute(f"SELECT * FROM {table}").fetchall(), key=repr)  # noqa: S608
            for table in TABLES
        }


ACTIONS: dict[str, Callable[[PostgresQueue, PostgresPlans, PostgresBases, Claim], object]] = {
    "claim": lambda queue, _p, _b, _c: queue.claim(NOW),
    "reclaim": lambda queue, _p, _b, claim: queue.reclaim(claim, NOW),
    "acknowledge": lambda queue, _p, _b, claim: queue.acknowledge([claim], {}),
    "mark_tried": lambda queue, _p, _b, claim: queue.mark_tried([claim], NOW),
    "retry_later": lambda queue, _p, _b, claim: queue.retry_later(claim, DOWN, at=NOW + 9),
    "dead_letter": lambda queue, _p, _b, claim: queue.dead_letter(claim, DOWN),
    "release": lambda queue, _p, _b, claim: queue.release([claim]),
    "requeue": lambda queue, _p, _b, _c: queue.requeue(NOW),
    "record a plan": lambda _q, plans, _b, _c: plans.record(Plan("other", None, "5" * 40, {}, {})),
    "remember a base": lambda _q, _p, bases, _c: bases.remember({"a.md": BaseVersion(None)}, {}),
}


@pytest.mark.parametrize("action", ACTIONS)
def test_a_worker_that_lost_the_site_changes_nothing(database: Database, action: str) -> None:
    add_site(database)
    save(database, "dead letter")
    token = take(database)
    sleeper = PostgresQueue(database, "site", token=token, longest_delay=LONGEST_DELAY, dry_run=False)
    sleeper.dead_letter(sleeper.claim(NOW).claims[0], DOWN)
    save(database, "in flight")
    (claim,) = sleeper.claim(NOW).claims
    save(database, "pending")
    plans = PostgresPlans(database, "site", token=token)
    plans.record(PLAN)
    bases = PostgresBases(database, "site", token=token)

    take(database)
    before = everything(database)
    with pytest.raises(LockLostError, match="another worker has the site"):
        ACTIONS[action](sleeper, plans, bases, claim)
    assert everything(database) == before


def test_a_worker_that_lost_a_site_without_dead_letters_acknowledges_nothing(database: Database) -> None:
    add_site(database)
    save(database, "in flight")
    sleeper = PostgresQueue(
        database, "site", token=take(database), longest_delay=9.0, dry_run=False, has=HAS_NOTHING
    )
    claims = sleeper.claim(NOW).claims
    take(database)
    before = everything(database)
    with pytest.raises(LockLostError, match="another worker has the site"):
        sleeper.acknowledge(claims, {})
    assert everything(database) == before


def test_what_is_scheduled_after_the_lease_is_seen_by_the_second_look(database: Database) -> None:
    add_site(database)
    queue = PostgresQueue(
        database, "site", token=take(database), longest_delay=9.0, dry_run=False, has=HAS_NOTHING
    )
    scheduled = {"slug": "a", "paths": ["a.md"], "scheduledFor": format_time(NOW + 9)}
    store(database, scheduled)
    assert dict(queue.scheduled_paths(NOW)) == {}
    assert dict(queue.scheduled_paths(NOW)) == {"a.md": NOW + 9}


def test_plans_are_kept_in_order_until_they_are_dropped(database: Database) -> None:
    add_site(database)
    plans = PostgresPlans(database, "site", token=take(database))
    second = Plan("another id", "1" * 40, "6" * 40, {}, {})
    plans.record(PLAN)
    plans.record(second)
    successor = PostgresPlans(database, "site", token=take(database))
    assert successor.plans() == [PLAN, second]
    successor.drop(PLAN)
    assert successor.plans() == [second]
    assert successor.dropped == [PLAN.id]


def test_a_removed_site_is_lost_to_its_worker(database: Database) -> None:
    add_site(database)
    queue = take_queue(database)
    execute(database, "UPDATE sites SET removed = true")
    with pytest.raises(LockLostError, match="there is no site"):
        queue.claim(NOW)


def test_taking_a_site_waits_for_the_running_transaction_of_its_worker(database: Database) -> None:
    add_site(database)
    token = take(database)
    taken = threading.Event()

    def take_over() -> None:
        take(database)
        taken.set()

    with locked(database, "site", token) as connection:
        thread = threading.Thread(target=take_over)
        thread.start()
        assert not taken.wait(0.3)
        connection.execute("UPDATE sites SET worker = 'written in time'")
    assert taken.wait(10)
    thread.join()


def test_a_worker_suspended_in_a_transaction_does_not_keep_the_site(database_url: str) -> None:
    hurried = f"{database_url}?options=-c%20idle_in_transaction_session_timeout%3D300ms"
    with closing(Database(hurried)) as sleeper, closing(Database(database_url)) as database:
        add_site(database)
        token = take(database)
        save(database, "a")

        def sleep() -> None:
            with locked(sleeper, "site", token) as connection:
                began = time.monotonic()
                connection.execute("DELETE FROM publications")
                take(database)  # waits until the server ends the sleeper's session
                assert time.monotonic() - began > 0.2

        with pytest.raises(DatabaseError):
            sleep()
        assert [row.job.slug for row in control_queue(database).jobs(NOW)] == ["a"]


def save_path(database: Database, slug: str, path: str, created: float) -> None:
    document = {"id": f"{slug} {path}", "slug": slug, "paths": [path], "createdAt": format_time(created)}
    store(database, document, PayloadSource.of({path: path.encode()}))


def test_many_producers_of_one_post_leave_one_job_with_all_paths(database_url: str) -> None:
    producers, each = 8, 12
    with closing(Database(database_url, connections=producers)) as database:
        add_site(database)

        def produce(producer: int) -> None:
            for number in range(each):
                save_path(database, "a", f"{producer}-{number}", NOW - 1000 + number * producers + producer)

        with ThreadPoolExecutor(producers) as pool:
            list(pool.map(produce, range(producers)))
        found = take_queue(database).claim(NOW)
    (claim,) = found.claims
    assert set(claim.job.paths) == {f"{p}-{n}" for p in range(producers) for n in range(each)}
    assert claim.job.id.endswith(f"-{each - 1}")
    assert len(found.superseded) == producers * each - 1


# The files that come with jobs: stored once, read whole, kept no longer than needed


NOT_UTF8 = b"content/\xff\xfe.md".decode("utf-8", "surrogateescape")
PAYLOAD_TABLES = ("publications", "files", "blobs")


@dataclass
class Bench:
    """One site, its producer, and the drain that has it."""

    database: Database

    def __post_init__(self) -> None:
        add_site(self.database)
        self.queue = take_queue(self.database)

    @property
    def payloads(self) -> PostgresPayloads:
        """The next drain's: each reads what its jobs bring once."""
        return PostgresPayloads(self.database, "site")

    def save(
        self,
        slug: str,
        files: Mapping[str, bytes | None],
        *,
        created: float = NOW,
        folders: tuple[str, ...] = (),
        **keys: object,
    ) -> None:
        paths = [path for path in files if path != NOT_UTF8]  # a job file cannot declare it
        document = {"slug": slug, "paths": paths, "createdAt": format_time(created), **keys}
        source = PayloadSource.of(files)
        source = source._replace(payload=source.payload._replace(folders=folders))
        store(self.database, document, source, now=created)

    def claim(self, now: float = NOW) -> Claim:
        (claim,) = self.queue.claim(now).claims
        return claim

    def publish(self, claim: Claim, *rejected: str) -> None:
        self.queue.acknowledge([claim], {claim.key: rejected} if rejected else {})

    def payload(self, claim: Claim) -> Payload:
        return self.payloads.of([claim.key])[claim.key]

    def files(self, claim: Claim) -> dict[str, bytes | None]:
        return {
            file.path: None if file.blob is None else self.payloads.content(file.blob)
            for file in self.payload(claim).files
        }

    def published(self, *paths: str) -> dict[str, float]:
        """Return when the published version of each path was saved."""
        return {path: each.saved_at for path, each in self.payloads.published(paths).items()}

    def count(self, table: str) -> int:
        return count_rows(self.database, table)

    def blobs(self) -> int:
        """Return the number of blobs that the garbage collection leaves."""
        collect_blobs(self.database)
        return self.count("blobs")


@pytest.fixture
def bench(database: Database) -> Bench:
    return Bench(database)


def test_files_arrive_as_they_were_submitted(bench: Bench) -> None:
    random.seed(6)
    files: dict[str, bytes | None] = {
        "content/a.md": b"hello",
        "content/empty": b"",
        "content/gone.md": None,
        "content/large.png": random.randbytes(3 << 20),
        NOT_UTF8: b"\0\xff\r\n",
        "content/same.md": b"hello",
    }
    bench.save("a", files, folders=("content/", "other"))
    claim = bench.claim()
    assert bench.files(claim) == files
    assert set(bench.payload(claim).folders) == {"content", "other"}
    bench.publish(claim)
    assert bench.blobs() == 0
    assert [bench.count(table) for table in PAYLOAD_TABLES] == [0] * len(PAYLOAD_TABLES)
    with pytest.raises(LookupError, match="the job that it belonged to is gone"):
        bench.payloads.content(blob_id(b"hello"))


def test_a_blob_is_stored_once_and_as_long_as_a_job_needs_it(bench: Bench) -> None:
    bench.save("a", {"a.md": b"shared", "own.md": b"of a"}, created=NOW - 2)
    bench.save("b", {"b.md": b"shared"}, created=NOW - 1, scheduledFor=format_time(NOW + 9))
    assert bench.blobs() == 2
    bench.publish(bench.claim())
    assert bench.blobs() == 1
    claim = bench.claim(NOW + 9)
    assert bench.files(claim) == {"b.md": b"shared"}
    bench.queue.retry_later(claim, DOWN, at=NOW + 20)
    assert bench.blobs() == 1
    bench.queue.cancel("b", NOW)
    assert bench.blobs() == 0


def test_the_version_of_each_file_that_arrived_last_wins_whatever_its_producers_clock_says(
    bench: Bench,
) -> None:
    bench.save("a", {"a.md": b"old", "image.png": b"image"}, created=NOW - 3)
    bench.save("a", {"a.md": b"middle"}, created=NOW - 2, createdAt=format_time(NOW + 3600))
    bench.save("a", {"a.md": b"new", "more.md": None}, created=NOW - 1)
    claim = bench.claim()
    assert claim.job.created_at == NOW - 1
    assert bench.files(claim) == {"a.md": b"new", "image.png": b"image", "more.md": None}
    assert bench.blobs() == 2


def test_files_deleted_from_a_submitted_folder_stay_deleted(bench: Bench) -> None:
    files: dict[str, bytes | None] = {"content/a/x": b"x", "content/a/y": b"y", "content/ab": b"beside"}
    bench.save("a", files, folders=("content/a",))
    bench.save("a", {"content/a/x": b"x2"}, folders=("content/a",))
    assert bench.files(bench.claim()) == {"content/a/x": b"x2", "content/ab": b"beside"}


def test_a_file_saved_after_its_folder_joins_the_folder(bench: Bench) -> None:
    bench.save("a", {"content/a/x": b"x"}, created=NOW - 2, folders=("content/a",))
    bench.save("a", {"content/a/y": b"y"}, created=NOW - 1)
    claim = bench.claim()
    assert bench.files(claim) == {"content/a/x": b"x", "content/a/y": b"y"}
    assert bench.payload(claim).folders == ("content/a",)


def test_a_newer_save_without_a_base_version_keeps_the_older_ones(bench: Bench) -> None:
    for created, content, bases in ((NOW - 2, b"1", ("1", "1")), (NOW - 1, b"2", (None, "2"))):
        values = PayloadSource.of({"a": content, "b": content})
        files = tuple(
            file._replace(base=base and base * 40, has_base=base is not None)
            for file, base in zip(values.payload.files, bases, strict=True)
        )
        document = {"slug": "a", "paths": ["a", "b"], "createdAt": format_time(created)}
        store(bench.database, document, values._replace(payload=Payload(files)))
    found = {file.path: (file.base, file.has_base) for file in bench.payload(bench.claim()).files}
    assert found == {"a": ("1" * 40, True), "b": ("2" * 40, True)}


def test_a_job_that_comes_back_brings_its_files_to_the_newer_save(bench: Bench) -> None:
    bench.save("a", {"a.md": b"old", "image.png": b"image"}, created=NOW - 2)
    claim = bench.claim()
    bench.save("a", {"a.md": b"new"}, created=NOW - 1)
    bench.queue.retry_later(claim, DOWN, at=NOW + 9)
    assert bench.files(bench.claim()) == {"a.md": b"new", "image.png": b"image"}


def test_a_dead_letter_keeps_the_files_that_the_newer_save_did_not_publish(bench: Bench) -> None:
    files: dict[str, bytes | None] = {"a.md": b"old", "dir/x": b"x", "image.png": b"image"}
    bench.save("a", files, created=NOW - 2)
    bench.queue.dead_letter(bench.claim(), DOWN)
    bench.save("a", {"a.md": b"new", "dir": None, "other.md": b"other"}, created=NOW - 1)
    claim = bench.claim()
    assert bench.files(claim) == {"a.md": b"new", "dir": None, "other.md": b"other"}
    bench.publish(claim, "other.md")
    assert bench.published("a.md", "other.md", "image.png") == {"a.md": NOW - 1}
    (letter,) = bench.queue.jobs(NOW)
    assert (letter.state, letter.job.paths) == (State.FAILED, ("image.png",))
    bench.queue.requeue(NOW)
    claim = bench.claim()
    assert bench.files(claim) == {"image.png": b"image"}
    bench.publish(claim)
    assert bench.blobs() == bench.count("publications") == 0


def test_the_time_of_the_published_version_never_goes_back(bench: Bench) -> None:
    later = format_time(NOW + 60)
    bench.save("b", {"a.md": b"old", "b.md": b"b"}, created=NOW - 9, scheduledFor=later)
    bench.save("a", {"a.md": b"new", NOT_UTF8: b"x"}, created=NOW - 1)
    bench.publish(bench.claim())
    paths = ["a.md", NOT_UTF8, "b.md"]
    assert bench.published(*paths) == {"a.md": NOW - 1, NOT_UTF8: NOW - 1}
    bench.publish(bench.claim(NOW + 60))
    assert bench.published(*paths) == {"a.md": NOW - 1, NOT_UTF8: NOW - 1, "b.md": NOW - 9}


def test_a_drain_claims_no_more_than_its_limit_and_the_earliest_first(bench: Bench) -> None:
    for number in range(7):
        bench.save(f"s{number}", {}, created=NOW - 7 + number)
    queue = take_queue(bench.database, limit=3)
    claimed = []
    while claims := queue.claim(NOW).claims:
        claimed.append(([claim.job.slug for claim in claims], claims[0].alone))
        queue.acknowledge(claims, {})
    assert claimed == [(["s0", "s1", "s2"], False), (["s3", "s4", "s5"], False), (["s6"], True)]


def test_a_file_that_changes_while_it_is_read_stores_nothing(bench: Bench) -> None:
    blob = blob_id(b"before")
    source = PayloadSource(
        Payload((SubmittedFile("a.md", "100644", blob, NOW),)), {blob: b"after"}.__getitem__
    )
    with pytest.raises(ContentChangedError):
        store(bench.database, {"slug": "a", "paths": ["a.md"]}, source)
    assert [bench.count(table) for table in PAYLOAD_TABLES] == [0] * len(PAYLOAD_TABLES)


def test_base_versions_are_remembered_until_they_are_replaced(bench: Bench) -> None:
    token = take_site(bench.database)["token"]
    bases = PostgresBases(bench.database, "site", token=token)
    merged, conflict = blob_id(b"merged"), Conflict("1" * 40, None, "conflict/a", "2" * 40, NOW)
    versions = {"a.md": BaseVersion(merged), NOT_UTF8: BaseVersion(None, {"a": conflict})}
    bases.remember(versions, {merged: b"merged"})
    assert bases.bases(["a.md", NOT_UTF8, "unknown"]) == versions
    assert bench.blobs() == 1
    assert bench.payloads.content(merged) == b"merged"
    bases.remember({"a.md": BaseVersion("3" * 40)}, {})
    assert bases.bases(["a.md"]) == {"a.md": BaseVersion("3" * 40)}
    assert bench.blobs() == 0
