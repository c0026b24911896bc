"""The files that come with jobs: stored once, read whole, kept no longer than needed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from postgres import add_site
from queue_backends import NOW, store, take_queue

from briter_worker.errors import Failure, FailureCode
from briter_worker.job import State, format_time
from briter_worker.ports import BaseVersion, Conflict, Payload, SubmittedFile, blob_id
from briter_worker.queues.postgres.payloads import (
    ContentChangedError,
    PayloadSource,
    PostgresBases,
    PostgresPayloads,
    collect_blobs,
)
from briter_worker.queues.postgres.rows import take_site

if TYPE_CHECKING:
    from collections.abc import Mapping

    from briter_worker.ports import Claim
    from briter_worker.queues.postgres.database import Database

DOWN = Failure(FailureCode.NETWORK, "the network is down", "start it")
NOT_UTF8 = b"content/\xff\xfe.md".decode("utf-8", "surrogateescape")
TABLES = ("publications", "files", "blobs")


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
        store(self.database, document, PayloadSource.of(files, folders=folders), now=created)

    def claim(self, now: float = NOW) -> Claim:
        (claim,) = self.queue.claim(now).claims
        return claim

    def publish(self, claim: Claim, *rejected: str) -> None:
        self.queue.acknowledge([claim], {claim.key: rejected} if rejected else {})

    def payload(self, claim: Claim) -> Payload:
        return self.payloads.of([claim.key])[claim.key]

    def files(self, claim: Claim) -> dict[str, bytes | None]:
        """Return the files that come with the claim."""
        return {
            file.path: None if file.blob is None else self.payloads.content(file.blob)
            for file in self.payload(claim).files
        }

    def published(self, *paths: str) -> dict[str, float]:
        """Return when the published version of each path was saved."""
        return {path: each.saved_at for path, each in self.payloads.published(paths).items()}

    def count(self, table: str) -> int:
        with self.database.connection() as connection:
            row = connection.execute(f"SELECT count(*) FROM {table}").fetchone()  # noqa: S608
            assert row is not None
            return int(row[0])

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
    assert set(bench.payload(claim).folders) == {"content/", "other/"}
    bench.publish(claim)
    assert bench.blobs() == 0
    assert [bench.count(table) for table in TABLES] == [0] * len(TABLES)
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
    assert bench.payload(claim).folders == ("content/a/",)


def test_a_newer_save_without_a_base_version_keeps_the_older_ones(bench: Bench) -> None:
    for created, content, bases in ((NOW - 2, b"1", ("1", "1")), (NOW - 1, b"2", (None, "2"))):
        values = PayloadSource.of({"a": content, "b": content}, saved_at=created)
        files = tuple(
            file._replace(base=base and base * 40, has_base=base is not None)
            for file, base in zip(values.payload.files, bases, strict=True)
        )
        document = {"slug": "a", "paths": ["a", "b"], "createdAt": format_time(created)}
        store(bench.database, document, values._replace(payload=Payload(files)))
    found = {file.path: (file.base, file.has_base) for file in bench.payload(bench.claim()).files}
    assert found == {"a": ("1" * 40, True), "b": ("2" * 40, True)}


@pytest.mark.parametrize("settle", ["retry", "dead letter", "release"])
def test_a_job_that_comes_back_brings_its_files_to_the_newer_save(bench: Bench, settle: str) -> None:
    bench.save("a", {"a.md": b"old", "image.png": b"image"}, created=NOW - 2)
    claim = bench.claim()
    bench.save("a", {"a.md": b"new"}, created=NOW - 1)
    match settle:
        case "retry":
            bench.queue.retry_later(claim, DOWN, at=NOW + 9)
        case "dead letter":
            bench.queue.dead_letter(claim, DOWN)
        case _:
            bench.queue.release([claim])
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
    assert [bench.count(table) for table in TABLES] == [0] * len(TABLES)


def test_base_versions_are_remembered_until_they_are_replaced(bench: Bench) -> None:
    token = take_site(bench.database, "site", "worker")["token"]
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
