"""What jobs carry: it arrives whole, once, and stays no longer than it is needed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
from postgres import add_site
from queue_engines import LONGEST_DELAY, MAX_ATTEMPTS, NOW

from briter_worker.errors import Failure
from briter_worker.job import State, format_time
from briter_worker.ports import Delivered, Delivery
from briter_worker.queues.postgres import contents, tokens
from briter_worker.queues.postgres.contents import PART, ContentChangedError, Values, blob_of
from briter_worker.queues.postgres.database import Database
from briter_worker.queues.postgres.deliveries import PostgresDeliveries
from briter_worker.queues.postgres.queue import PostgresQueue
from briter_worker.queues.postgres.tokens import SiteMissingError
from briter_worker.queues.postgres.writing import submit, submit_many
from briter_worker.strictjson import MalformedJobError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from postgres import Server

    from briter_worker.ports import Batch
    from briter_worker.queues.postgres.database import Connection


@dataclass
class Bench:
    """One site, its writer, and the drain that has it."""

    database: Database

    def __post_init__(self) -> None:
        add_site(self.database)
        self.queue = self.drain()

    def drain(self, *, dry_run: bool = False, most: int = 500) -> PostgresQueue:
        return PostgresQueue(
            self.database,
            "site",
            token=tokens.take(self.database, "site", "worker"),
            max_attempts=MAX_ATTEMPTS,
            longest_delay=LONGEST_DELAY,
            dry_run=dry_run,
            most=most,
            clock=lambda: NOW,
        )

    def save(
        self,
        slug: str,
        files: Mapping[str, bytes | None],
        *,
        created: float = NOW,
        folders: tuple[str, ...] = (),
        **keys: object,
    ) -> None:
        paths = [path for path in files if path != NO_TEXT]  # that no job file can say
        document = {"slug": slug, "paths": paths, "createdAt": format_time(created), **keys}
        submit(self.database, "site", document, Values.of(files, saved_at=created, folders=folders), now=NOW)

    def claim(self, now: float = NOW) -> Batch:
        batch = self.queue.claim(now).batch
        assert batch is not None
        return batch

    def finish(self, batch: Batch) -> None:
        self.queue.finish(batch, batch.claims)
        self.queue.close(batch)

    def delivery(self, batch: Batch) -> Delivery:
        (claim,) = batch.claims
        return PostgresDeliveries(self.database, "site").of([claim.key])[claim.key]

    def files(self, batch: Batch) -> dict[str, bytes | None]:
        """What the only claim brings along."""
        (claim,) = batch.claims
        deliveries = PostgresDeliveries(self.database, "site")
        return {
            file.path: None if file.blob is None else b"".join(deliveries.content(file.blob))
            for file in deliveries.of([claim.key])[claim.key].files
        }

    def count(self, table: str) -> int:
        with self.database.transaction() as connection:
            row = connection.execute(f"SELECT count(*) FROM {table}".encode()).fetchone()  # noqa: S608
            assert row is not None
            return int(row[0])


@pytest.fixture
def bench(database: Database) -> Bench:
    return Bench(database)


NO_TEXT = b"content/\xff\xfe.md".decode("utf-8", "surrogateescape")


def test_what_comes_with_a_job_is_what_was_sent(bench: Bench) -> None:
    random.seed(6)
    files: dict[str, bytes | None] = {
        "content/a.md": b"hello",
        "content/empty": b"",
        "content/gone.md": None,
        "content/large.png": random.randbytes(3 * PART + 5),
        "content/exactly.bin": random.randbytes(2 * PART),
        "content/medium.bin": random.randbytes(PART // 2),
        NO_TEXT: b"\0\xff\r\n",
        "content/same.md": b"hello",
    }
    bench.save("a", files, folders=("content/", "other"))
    batch = bench.claim()
    assert bench.files(batch) == files
    assert set(bench.delivery(batch).folders) == {"content/", "other"}
    with bench.database.transaction() as connection:
        (longest,) = connection.execute("SELECT max(length(bytes)) FROM content_parts").fetchone() or (0,)
    assert longest == PART
    bench.finish(batch)
    assert [bench.count(table) for table in ("contents", "content_parts", "delivered", "folders")] == [0] * 4


def test_the_versions_a_writer_started_from_come_along(bench: Bench) -> None:
    values = Values.of({"a": b"a", "b": b"b", "c": None}, saved_at=NOW - 5)
    a, b, c = values.delivery.files
    sent = (
        replace(a, base="1" * 40, knows_base=True, mode="100755"),
        replace(b, knows_base=True),
        replace(c, base="2" * 40, knows_base=True),
    )
    source = Values(Delivery(sent), values.contents)
    submit(bench.database, "site", {"slug": "a", "paths": ["a", "b", "c"]}, source, now=NOW)
    assert bench.delivery(bench.claim()).files == sent


def test_many_small_contents_are_fetched_in_a_few_statements(bench: Bench) -> None:
    files: dict[str, bytes | None] = {f"content/{n}.md": str(n).encode() for n in range(300)}
    bench.save("a", files)
    batch = bench.claim()
    asked = 0
    opened = bench.database._opened  # noqa: SLF001 - each use of a connection goes through it

    def counted() -> object:
        nonlocal asked
        asked += 1
        return opened()

    bench.database._opened = counted  # type: ignore[method-assign,assignment]  # noqa: SLF001
    assert bench.files(batch) == files
    assert asked < 10


def test_a_content_is_kept_once_and_as_long_as_any_job_needs_it(bench: Bench) -> None:
    bench.save("a", {"a.md": b"shared", "own.md": b"of a"}, created=NOW - 2)
    bench.save("b", {"b.md": b"shared"}, created=NOW - 1, scheduledFor=format_time(NOW + 9))
    assert bench.count("contents") == 2
    bench.finish(bench.claim())
    assert bench.count("contents") == 1
    batch = bench.claim(NOW + 9)
    assert bench.files(batch) == {"b.md": b"shared"}
    bench.queue.put_off(batch, batch.claims[0], Failure.NETWORK, "down", NOW + 20)
    bench.queue.close(batch)
    assert bench.count("contents") == 1
    bench.finish(bench.claim(NOW + 20))
    assert bench.count("contents") == 0


@pytest.mark.parametrize("way", ["cancelled", "dropped"])
def test_what_nobody_wants_any_more_takes_its_contents_along(bench: Bench, way: str) -> None:
    bench.save("a", {"a.md": b"a"})
    if way == "cancelled":
        bench.queue.cancel("a", NOW)
    else:
        batch = bench.claim()
        bench.queue.drop(batch, batch.claims)
    assert (bench.count("contents"), bench.count("delivered")) == (0, 0)


def test_a_new_save_brings_the_newest_of_each_file_and_keeps_the_others(bench: Bench) -> None:
    bench.save("a", {"a.md": b"old", "image.png": b"image"}, created=NOW - 2)
    bench.save("a", {"a.md": b"new", "more.md": None}, created=NOW - 1)
    assert bench.files(bench.claim()) == {"a.md": b"new", "image.png": b"image", "more.md": None}
    assert bench.count("contents") == 2


def test_an_older_save_that_is_written_later_replaces_nothing_newer(bench: Bench) -> None:
    bench.save("a", {"a.md": b"new"}, created=NOW - 1)
    bench.save("a", {"a.md": b"old", "image.png": b"image"}, created=NOW - 2)
    batch = bench.claim()
    assert batch.claims[0].job.created_at == NOW - 1
    assert bench.files(batch) == {"a.md": b"new", "image.png": b"image"}


@pytest.mark.parametrize("order", [1, -1], ids=["in order", "the newer first"])
def test_a_folder_that_was_sent_whole_does_not_get_back_what_was_deleted_in_it(
    bench: Bench, order: int
) -> None:
    saves = [
        ({"content/a/x": b"x", "content/a/y": b"y", "content/ab": b"beside"}, NOW - 2),
        ({"content/a/x": b"x2"}, NOW - 1),
    ]
    for files, created in saves[::order]:
        document = {"slug": "a", "paths": ["content/a"], "createdAt": format_time(created)}
        source = Values.of(files, saved_at=created, folders=["content/a"])
        submit(bench.database, "site", document, source, now=NOW)
    assert bench.files(bench.claim()) == {"content/a/x": b"x2", "content/ab": b"beside"}


def test_a_file_saved_after_its_folder_joins_it(bench: Bench) -> None:
    bench.save("a", {"content/a/x": b"x"}, created=NOW - 2, folders=("content/a",))
    bench.save("a", {"content/a/y": b"y"}, created=NOW - 1)
    batch = bench.claim()
    assert bench.files(batch) == {"content/a/x": b"x", "content/a/y": b"y"}
    assert bench.delivery(batch).folders == ("content/a",)


def test_what_the_newer_save_does_not_know_it_started_from_the_older_one_may(bench: Bench) -> None:
    old = Values.of({"a": b"1", "b": b"1"}, saved_at=NOW - 2)
    known = tuple(replace(file, base="1" * 40, knows_base=True) for file in old.delivery.files)
    document = {"slug": "a", "paths": ["a", "b"]}
    submit(bench.database, "site", document, Values(Delivery(known), old.contents), now=NOW - 2)
    new = Values.of({"a": b"2", "b": b"2"}, saved_at=NOW - 1)
    a, b = new.delivery.files
    files = (a, replace(b, base="2" * 40, knows_base=True))
    submit(bench.database, "site", document, Values(Delivery(files), new.contents), now=NOW - 1)
    bases = {file.path: (file.base, file.knows_base) for file in bench.delivery(bench.claim()).files}
    assert bases == {"a": ("1" * 40, True), "b": ("2" * 40, True)}


def test_what_comes_back_from_flight_joins_what_was_saved_meanwhile(bench: Bench) -> None:
    bench.save("a", {"a.md": b"old", "image.png": b"image"}, created=NOW - 2)
    batch = bench.claim()
    bench.save("a", {"a.md": b"new"}, created=NOW - 1)
    bench.queue.put_off(batch, batch.claims[0], Failure.NETWORK, "down", NOW + 9)
    bench.queue.close(batch)
    assert bench.files(bench.claim()) == {"a.md": b"new", "image.png": b"image"}


def test_what_an_unlucky_dead_letter_carried_goes_out_with_the_newer_save(bench: Bench) -> None:
    bench.save("a", {"a.md": b"old", "image.png": b"image"}, created=NOW - 2)
    batch = bench.claim()
    bench.queue.bury(batch, batch.claims[0], Failure.NETWORK, "down")
    bench.queue.close(batch)
    bench.save("a", {"a.md": b"new"}, created=NOW - 1)
    batch = bench.claim()
    assert bench.files(batch) == {"a.md": b"new", "image.png": b"image"}
    assert {row.state for row in bench.queue.jobs(NOW)} == {State.CLAIMED, State.FAILED}
    bench.finish(batch)
    assert [bench.count(table) for table in ("publications", "contents", "delivered")] == [0, 0, 0]


def test_what_was_published_last_is_known_by_the_time_of_its_save(bench: Bench) -> None:
    bench.save("a", {"a.md": b"new", NO_TEXT: b"x"}, created=NOW - 1)
    bench.finish(bench.claim())
    bench.save("b", {"a.md": b"old", "b.md": b"b"}, created=NOW - 9)
    batch = bench.claim()
    published = PostgresDeliveries(bench.database, "site").published(["a.md", NO_TEXT, "b.md"])
    assert published == {"a.md": NOW - 1, NO_TEXT: NOW - 1}
    bench.finish(batch)
    published = PostgresDeliveries(bench.database, "site").published(["a.md", "b.md"])
    assert published == {"a.md": NOW - 1, "b.md": NOW - 9}


def test_what_a_dry_run_published_is_published_by_the_first_live_run(bench: Bench) -> None:
    bench.save("a", {"a.md": b"1", "image.png": b"image"}, created=NOW - 3)
    bench.save("b", {"b.md": b"b"}, created=NOW - 2)
    bench.queue = bench.drain(dry_run=True)
    bench.finish(bench.claim())
    bench.save("a", {"a.md": b"2"}, created=NOW - 1)
    bench.finish(bench.claim())
    assert bench.queue.jobs(NOW) == []
    assert (bench.queue.claim(NOW).batch, bench.queue.next_due(NOW)) == (None, None)
    assert PostgresDeliveries(bench.database, "site").published(["a.md"]) == {}

    bench.queue = bench.drain()
    bench.save("b", {"b.md": b"newer"}, created=NOW)
    assert bench.queue.next_due(NOW) == 0.0
    found = bench.queue.claim(NOW)
    assert found.batch is not None
    deliveries = PostgresDeliveries(bench.database, "site")
    sent = {
        claim.job.slug: {
            file.path: b"".join(deliveries.content(file.blob or ""))
            for file in deliveries.of([claim.key])[claim.key].files
        }
        for claim in found.batch.claims
    }
    assert sent == {"a": {"a.md": b"2", "image.png": b"image"}, "b": {"b.md": b"newer"}}
    bench.finish(found.batch)
    assert bench.count("publications") == bench.count("contents") == 0


def test_a_drain_takes_no_more_than_it_may_and_the_earliest_first(bench: Bench) -> None:
    for number in range(7):
        bench.save(f"s{number}", {}, created=NOW - number)
    bench.queue = bench.drain(most=3)
    taken = []
    while (found := bench.queue.claim(NOW)).batch is not None:
        taken.append([claim.job.slug for claim in found.batch.claims])
        bench.finish(found.batch)
    assert taken == [["s6", "s5", "s4"], ["s3", "s2", "s1"], ["s0"]]


@pytest.mark.parametrize("count", [3, 60])
def test_jobs_sent_together_join_one_another_and_what_waits(bench: Bench, count: int) -> None:
    bench.save("s1", {"s1.md": b"before", "kept.md": b"kept"}, created=NOW - 99)
    saves = []
    for number in range(count):
        files: dict[str, bytes | None] = {f"s{number}.md": f"content {number}".encode(), "logo.png": b"logo"}
        document = {"slug": f"s{number}", "paths": ["x"], "createdAt": format_time(NOW - 90 + number)}
        saves.append((document, Values.of(files, saved_at=NOW - 90 + number, folders=["f"])))
    twice = Values.of({"s2.md": b"the newest"}, saved_at=NOW - 1)
    saves.append(({"slug": "s2", "paths": ["y"], "createdAt": format_time(NOW - 1)}, twice))
    dead = {"slug": "dead", "paths": ["x"], "status": "failed", "failure": "network", "attempts": 8, "own": 1}
    jobs = submit_many(bench.database, "site", [*saves, (dead, None)], now=NOW)
    assert [job.slug for job in jobs] == [*(f"s{n}" for n in range(count)), "s2", "dead"]
    rows = {row.job.slug: row for row in bench.queue.jobs(NOW)}
    assert len(rows) == count + 1
    assert (rows["dead"].state, rows["dead"].document["own"]) == (State.FAILED, 1)
    found = bench.queue.claim(NOW)
    assert found.batch is not None
    assert sorted(each.slug for each in found.superseded) == ["s1", "s2"]
    claims = {claim.job.slug: claim for claim in found.batch.claims}
    assert (set(claims["s1"].job.paths), claims["s2"].job.paths) == ({"x", "s1.md", "kept.md"}, ("y", "x"))
    deliveries = PostgresDeliveries(bench.database, "site")
    carried = deliveries.of([claim.key for claim in found.batch.claims])
    expected = {"s1.md": b"content 1", "kept.md": b"kept", "logo.png": b"logo"}
    files_of_s1 = {
        f.path: b"".join(deliveries.content(f.blob or "")) for f in carried[claims["s1"].key].files
    }
    assert files_of_s1 == expected
    bench.finish(found.batch)
    assert bench.count("contents") == 0


@dataclass
class Liar:
    """A file that changes between the look and the sending."""

    delivery: Delivery
    sizes: dict[str, int]

    def content(self, blob: str) -> Iterator[bytes]:
        assert blob
        yield b"changed"


@pytest.mark.parametrize("size", [7, 2 * PART])
def test_a_content_that_is_not_what_it_was_is_not_taken_nor_anything_with_it(bench: Bench, size: int) -> None:
    blob = blob_of(b"x" * size)
    source = Liar(Delivery((Delivered("a.md", "100644", blob, NOW),)), {blob: size})
    with pytest.raises(ContentChangedError):
        submit_many(
            bench.database,
            "site",
            [
                ({"slug": "b", "paths": ["b"]}, Values.of({"b": b"b"}, saved_at=NOW)),
                ({"slug": "a", "paths": ["a.md"]}, source),
            ],
        )
    assert [bench.count(table) for table in ("publications", "contents", "content_parts")] == [0, 0, 0]


@pytest.mark.parametrize(
    "document",
    [
        {"slug": "a"},
        {"slug": "a\0", "paths": []},
        {"slug": "a", "paths": ["a\0b"]},
        {"slug": "a", "paths": ["\ud800"]},
        {"slug": "a", "paths": [], "own": "\0"},
        {"slug": "a", "paths": [], "own": "\x000", "number": 1.5},
        {"slug": "ü" * 600, "paths": []},
        {"slug": "a", "paths": [], "id": "i" * 2000},
        {"slug": "a", "paths": [], "createdAt": "yesterday"},
    ],
)
def test_what_is_no_job_is_refused_at_once(bench: Bench, document: dict[str, object]) -> None:
    with pytest.raises(MalformedJobError):
        submit(bench.database, "site", document)
    assert bench.count("publications") == 0


@pytest.mark.parametrize(
    "paths", [["a", "a"], ["a\0b"], ["p" * 3000]], ids=["twice", "with a NUL", "too long for an index"]
)
def test_a_delivery_that_cannot_be_kept_is_refused_at_once(bench: Bench, paths: list[str]) -> None:
    delivery = Delivery(tuple(Delivered(path, "", None, NOW) for path in paths))
    with pytest.raises(MalformedJobError):
        submit(bench.database, "site", {"slug": "a", "paths": ["a"]}, Values(delivery, {}))


def test_odd_texts_come_back_as_they_were(bench: Bench) -> None:
    document = {
        "slug": "Grüße \N{GRINNING FACE}\N{RIGHT-TO-LEFT OVERRIDE}",
        "paths": ["content/\\u0000.md", "content/'; DROP TABLE publications; --", "{a,b}", "", '"', "NULL"],
        "message": "tab\tnewline\n%s {}",
        "own": {"deep": [1.50, 10**40, None, "\\"]},
    }
    submit(bench.database, "site", document)
    (row,) = bench.queue.jobs(NOW)
    assert {key: row.document[key] for key in document} == document
    assert set(bench.queue.held_paths(0)) == set()
    submit(bench.database, "site", {**document, "scheduledFor": format_time(NOW + 9)})
    assert set(bench.queue.held_paths(NOW)) == set(document["paths"])


def test_contents_that_something_else_left_behind_are_tidied_up(bench: Bench) -> None:
    for number in range(3):
        bench.save(f"s{number}", {"x": b"shared", f"{number}": str(number).encode()})
    with bench.database.transaction() as connection:
        connection.execute("DELETE FROM publications WHERE slug <> 's0'")
    assert contents.tidy(bench.database) == 2
    assert bench.files(bench.claim()) == {"x": b"shared", "0": b"0"}
    assert contents.tidy(bench.database) == 0


def test_a_post_for_a_site_that_is_not_there_is_refused(bench: Bench) -> None:
    with pytest.raises(SiteMissingError, match="site add elsewhere"):
        submit(bench.database, "elsewhere", {"slug": "a", "paths": ["a"]})


def test_a_drain_takes_as_many_statements_for_many_jobs_as_for_one(
    postgres_server: Server, database_url: str
) -> None:
    told = "-c%20log_statement%3Dall%20-c%20log_min_messages%3Dlog"
    counts = []
    with Database(f"{database_url}?options={told}", connections=1) as database:
        bench = Bench(database)
        log = postgres_server.folder / "log"
        for count in (1, 1, 150):
            saves = [
                ({"slug": f"s{n}", "paths": ["x"]}, Values.of({f"{n}.md": str(n).encode()}, saved_at=NOW))
                for n in range(count)
            ]
            submit_many(database, "site", saves, now=NOW)
            before = log.stat().st_size
            bench.queue = bench.drain()
            assert bench.queue.recover(NOW) == ()
            batch = bench.claim()
            assert len(batch.claims) == count
            bench.queue.held_paths(NOW)
            bench.queue.cancelled(batch)
            bench.finish(batch)
            bench.queue.revive(NOW)
            bench.queue.next_due(NOW)
            with log.open("rb") as lines:
                lines.seek(before)
                counts.append(sum(b"LOG:  " in line for line in lines))
        assert bench.count("publications") == 0
    assert 10 < counts[1] < 40
    assert counts[2] == counts[1]


@pytest.mark.parametrize("size", [0, 1, PART, PART + 1])
def test_a_content_of_any_size_is_read_part_by_part(bench: Bench, size: int) -> None:
    content = random.randbytes(size)
    bench.save("a", {"a": content})
    parts = list(contents.read(bench.database, blob_of(content)))
    assert b"".join(parts) == content
    assert [len(part) for part in parts] == {0: [], 1: [1], PART: [PART], PART + 1: [PART, 1]}[size]


def test_a_content_that_has_gone_with_its_post_is_an_error_that_says_so(bench: Bench) -> None:
    bench.save("a", {"a": b"a"})
    bench.finish(bench.claim())
    with pytest.raises(LookupError, match="is not there any more"):
        list(contents.read(bench.database, blob_of(b"a")))


def test_what_comes_with_a_job_overtakes_nothing_in_flight(bench: Bench) -> None:
    bench.save("a", {"a": b"old"}, created=NOW - 1)
    batch = bench.claim()
    bench.save("a", {"a": b"new"}, scheduledFor=format_time(NOW + 9))
    assert set(bench.queue.overtaken(batch, NOW)) == set()
    assert bench.files(batch) == {"a": b"old"}


def test_a_job_is_found_at_its_site_and_row(bench: Bench) -> None:
    bench.save("a", {"a": b"a"})
    (row,) = bench.queue.jobs(NOW)
    (claim,) = bench.claim().claims
    assert row.place == f"site site, row {claim.key}"


def test_no_posts_at_all_ask_nothing_of_the_database(bench: Bench) -> None:
    assert submit_many(bench.database, "a site that is not there", []) == []


def test_what_is_to_be_done_first_is_done_in_the_same_transaction(bench: Bench) -> None:
    def first(connection: Connection, *, fails: bool) -> None:
        connection.execute("INSERT INTO sites (name) VALUES ('another')")
        if fails:
            raise ValueError("enough")

    document = {"slug": "a", "paths": []}
    with pytest.raises(ValueError, match="enough"):
        submit(bench.database, "site", document, now=NOW, first=partial(first, fails=True))
    assert (bench.count("sites"), bench.count("publications")) == (1, 0)
    submit(bench.database, "site", document, now=NOW, first=partial(first, fails=False))
    assert (bench.count("sites"), bench.count("publications")) == (2, 1)
