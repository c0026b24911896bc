"""The history's file: what it keeps of what happened, and that nobody waits for it or fails with it."""

from __future__ import annotations

import sqlite3
import threading
from typing import TYPE_CHECKING

import pytest
from mounts import full, small
from sites import eventually

from briter_worker.events import (
    Cancelled,
    Event,
    Failed,
    HistoryRetired,
    JobStarted,
    NoChange,
    Progress,
    Published,
    Superseded,
)
from briter_worker.sinks.history.reading import FileHistory, HistoryUnreadableError, Receipt
from briter_worker.sinks.history.recording import Target
from briter_worker.sinks.history.retention import Retention
from briter_worker.sinks.history.sink import HistorySink

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DAY = 86400.0
SHA = "52ed5b9c2a5b45b9a7a0a6f8f1f7be9bd5b2d6b1"


class Book:
    """A history, its writer and its reader, and what the writer had to say."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = 1_000_000.0
        self.told: list[Event] = []
        self.complaints: list[str] = []
        self.reader = FileHistory(path)

    def open(self) -> HistorySink:
        """A worker's sink."""
        return HistorySink(
            self.path,
            Target("main", "origin", "https://example.org/notes/{slug}"),
            Retention(stale_days=30, keep_days=365),
            announce=self.told.append,
            complain=self.complaints.append,
            clock=lambda: self.now,
        )

    def write(self, *events: Event) -> None:
        """One worker's life."""
        sink = self.open()
        for event in events:
            sink(event)
        sink.close()

    def receipts(self) -> list[Receipt]:
        """Newest first."""
        return self.reader.receipts()


@pytest.fixture
def book(tmp_path: Path) -> Iterator[Book]:
    """An empty one."""
    book = Book(tmp_path / "history.db")
    yield book
    book.reader.close()


def start(job: str = "j1", attempt: int = 1, due_at: float | None = None) -> JobStarted:
    """A job's attempt begins; it was saved ten seconds ago."""
    return JobStarted(
        job_id=job,
        slug=f"post-{job}",
        attempt=attempt,
        dry_run=False,
        title="Publish it",
        saved_at=999_990.0,
        due_at=due_at,
    )


def published(job: str = "j1", attempt: int = 1, *, dry_run: bool = False) -> Published:
    """It is on the remote."""
    return Published(
        job_id=job, slug=f"post-{job}", attempt=attempt, dry_run=dry_run, duration_ms=80, commit=SHA
    )


def failed(job: str = "j1", attempt: int = 1) -> Failed:
    """It will be tried again."""
    return Failed(
        job_id=job,
        slug=f"post-{job}",
        attempt=attempt,
        dry_run=False,
        duration_ms=5,
        error="the remote is down\x1b[31m",
        failure="network",
        retry_at=1_000_060.0,
    )


def test_a_publication_leaves_a_receipt_with_all_an_author_asks(book: Book) -> None:
    book.write(start(), published())
    (receipt,) = book.receipts()
    assert (receipt.slug, receipt.outcome, receipt.commit) == ("post-j1", "published", SHA)
    assert (receipt.branch, receipt.remote) == ("main", "origin")
    assert receipt.href == "https://example.org/notes/post-j1"
    assert receipt.save_to_remote == 10.0


def test_a_held_post_has_waited_since_it_was_due_not_since_it_was_saved(book: Book) -> None:
    book.write(start(due_at=999_998.0), published())
    (receipt,) = book.receipts()
    assert receipt.save_to_remote == 2.0


def test_a_dry_run_brings_nothing_to_the_remote(book: Book) -> None:
    book.write(start(), published(dry_run=True))
    (receipt,) = book.receipts()
    assert receipt.dry_run
    assert receipt.save_to_remote is None


def test_each_attempt_has_its_own_receipt_newest_first(book: Book) -> None:
    book.write(start(), failed(), start(attempt=2), published(attempt=2))
    assert [(each.attempt, each.outcome) for each in book.receipts()] == [(2, "published"), (1, "failed")]
    assert [each.attempt for each in book.reader.attempts("j1")] == [2, 1]
    assert book.receipts()[1].retry_at == 1_000_060.0


def test_what_others_wrote_cannot_command_a_terminal(book: Book) -> None:
    book.write(start(), failed())
    assert "\x1b" not in str(book.receipts()[0].error)


def test_phases_follow_one_another_and_the_open_attempt_shows_them(book: Book) -> None:
    book.write(
        start(),
        Progress(phase="stage", done=0, total=1),
        Progress(phase="stage", done=1, total=1),
        Progress(phase="push", done=1, total=4),
    )
    (open_one,) = book.reader.under_way()
    assert [phase.name for phase in open_one.phases] == ["validate", "stage", "push"]
    assert [phase.ended is None for phase in open_one.phases] == [False, False, True]
    assert (open_one.phase, open_one.done, open_one.total) == ("push", 1, 4)
    assert book.receipts() == []


def test_a_phase_lasts_until_the_next_one_and_the_last_until_nothing_is_open(book: Book) -> None:
    sink = book.open()
    steps = [
        start(),
        Progress(phase="push", done=0, total=0),
        Progress(phase="push", done=4, total=4),
        Progress(phase="settle", done=1, total=1),
        published(),
    ]
    for step in steps:
        sink(step)
        book.now += 1
    sink.close()
    (receipt,) = book.receipts()
    lasted = {phase.name: (phase.ended or 0) - phase.began for phase in receipt.phases}
    assert lasted == {"validate": 1, "push": 2, "settle": 1}


@pytest.mark.parametrize("end", [[Cancelled(job_id="j", slug="a")], []], ids=["cancelled", "put back"])
def test_what_ends_without_an_outcome_lends_its_phases_to_no_later_drain(
    book: Book, end: list[Event]
) -> None:
    book.write(
        start("first"),
        start("j"),
        Progress(phase="stage", done=0, total=1),
        published("first"),
        *end,
        start("other"),
        Progress(phase="push", done=0, total=1),
        published("other"),
    )
    found = {each.job_id: [phase.name for phase in each.phases] for each in book.receipts()}
    assert found["other"] == ["validate", "push"]


def test_a_flood_of_progress_costs_a_few_rows_only(book: Book) -> None:
    sink = book.open()
    sink(start())
    for done in range(10_000):
        sink(Progress(phase="stage", done=done, total=10_000))
    sink.close()
    (open_one,) = book.reader.under_way()
    assert open_one.phase == "stage"
    assert open_one.done < 10_000


def test_the_attempt_of_a_worker_that_died_ends_with_the_next_one(book: Book) -> None:
    book.write(start())
    book.write(start(attempt=2), published(attempt=2))
    assert [(each.attempt, each.outcome) for each in book.receipts()] == [
        (2, "published"),
        (1, "interrupted"),
    ]
    assert book.reader.under_way() == []


def test_what_a_dead_worker_had_pushed_is_settled_on_its_own_attempt(book: Book) -> None:
    book.write(start())
    book.write(published())
    (receipt,) = book.receipts()
    assert (receipt.outcome, receipt.title, receipt.save_to_remote) == ("published", "Publish it", 10.0)


def test_a_save_that_was_never_tried_has_a_receipt_too(book: Book) -> None:
    book.write(
        Superseded(job_id="old", slug="a", superseded_by="new"),
        Cancelled(job_id="gone", slug="b"),
    )
    assert [(each.job_id, each.outcome, each.superseded_by) for each in book.receipts()] == [
        ("gone", "cancelled", None),
        ("old", "superseded", "new"),
    ]


def test_receipts_are_found_by_post_outcome_and_words(book: Book) -> None:
    book.write(
        *(start("one"), published("one")),
        *(start("two"), NoChange(job_id="two", slug="post-two", attempt=1, dry_run=False, duration_ms=1)),
    )
    found = book.reader.receipts
    assert [each.job_id for each in found(slug="post-one")] == ["one"]
    assert [each.job_id for each in found(outcomes=["nochange"])] == ["two"]
    assert [each.job_id for each in found(search="POST-T")] == ["two"]
    assert [each.job_id for each in found(search=SHA[:8])] == ["one"]
    assert [each.job_id for each in found(search="%")] == []
    assert [each.job_id for each in found(before=found()[0].id)] == ["one"]


def test_the_stream_goes_on_where_a_reader_left_it(book: Book) -> None:
    book.write(start(), published())
    first, second = book.reader.moments(0)
    assert (first.event, second.event) == ("start", "published")
    assert second.data["commit"] == SHA
    assert [moment.id for moment in book.reader.moments(first.id)] == [second.id]
    assert book.reader.latest() == (second.id, first.id)


def test_old_receipts_go_out_of_sight_then_away_and_that_is_told(book: Book) -> None:
    book.write(start("old"), published("old"))
    book.now += 31 * DAY
    book.write(start("new"), published("new"))
    assert [each.job_id for each in book.receipts()] == ["new"]
    assert [each.job_id for each in book.reader.receipts(stale=True)] == ["new", "old"]
    assert book.told == [HistoryRetired(stale=1, deleted=0)]
    book.now += 340 * DAY
    book.write(start("newest"), published("newest"))
    assert [each.job_id for each in book.reader.receipts(stale=True)] == ["newest", "new"]
    assert book.told[1:] == [HistoryRetired(stale=1, deleted=1)]


def test_a_spoilt_file_is_kept_aside_and_a_new_one_begun(book: Book) -> None:
    book.path.write_bytes(b"this is no database at all, whatever its name says" * 100)
    with pytest.raises(HistoryUnreadableError, match=r"history\.db cannot be read"):
        book.receipts()
    book.write(start(), published())
    assert [each.outcome for each in book.receipts()] == ["published"]
    (aside,) = book.path.parent.glob("history.db.spoilt-*")
    assert aside.read_bytes().startswith(b"this is no database")


def test_a_file_that_is_spoilt_meanwhile_is_begun_anew(book: Book) -> None:
    sink = book.open()
    sink(start())
    sink(published())
    assert_soon(lambda: len(book.receipts()) == 1)
    size = book.path.stat().st_size
    book.path.write_bytes(b"x" * size)
    sink(start("j2"))
    sink(published("j2"))
    sink.close()
    assert len(book.complaints) <= 1
    book.write(start("j3"), published("j3"))
    assert "j3" in [each.job_id for each in book.receipts()]


def test_events_wait_for_a_locked_file_and_the_worker_does_not(book: Book) -> None:
    book.write(start("before"), published("before"))
    other = sqlite3.connect(book.path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    sink = book.open()
    sink(start())
    sink(published())
    assert_soon(lambda: bool(book.complaints))
    other.execute("COMMIT")
    other.close()
    sink.close()
    assert [each.job_id for each in book.receipts()] == ["j1", "before"]
    assert len(book.complaints) == 1
    assert "publishing goes on" in book.complaints[0]


def test_a_full_disk_delays_receipts_and_nobody_waits_for_it(tmp_path: Path) -> None:
    with small(tmp_path / "disk", size="1M") as disk:
        book = Book(disk / "history.db")
        book.write(start("before"), published("before"))
        sink = book.open()
        with full(disk):
            sink(start())
            sink(published())
            eventually(lambda: book.complaints)
            assert "full" in book.complaints[0]
            assert "publishing goes on without it" in book.complaints[0]
        sink.close()
        assert [each.job_id for each in book.receipts()] == ["j1", "before"]
        assert len(book.complaints) == 1
        book.reader.close()


def test_a_job_whose_file_has_a_name_that_is_no_text_has_a_receipt_too(book: Book) -> None:
    odd = "caf\udce9"  # what Python makes of the byte 0xe9
    book.write(start(odd), published(odd), start(), published())
    assert len(book.receipts()) == 2
    assert book.reader.attempts(odd)[0].outcome == "published"
    assert len(book.reader.receipts(slug=f"post-{odd}")) == 1
    assert book.complaints == []


def test_what_no_file_could_take_costs_no_other_receipt(book: Book) -> None:
    sink = book.open()
    sink(start("a"))
    sink(published("a"))
    sink(published("b", attempt=2**63))  # more than SQLite's integers hold
    sink(published("c"))
    sink.close()
    sink = book.open()
    sink(published("d"))
    sink.close()
    assert [each.job_id for each in book.receipts()] == ["d", "c", "a"]
    (complaint,) = book.complaints
    assert "OverflowError" in complaint


def test_a_folder_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    book = Book(tmp_path / "missing" / "history.db")
    book.write(start(), published())
    assert len(book.complaints) == 1
    assert book.receipts() == []


def assert_soon(holds: object) -> None:
    """Wait for what another thread brings about."""
    assert callable(holds)
    for _ in range(1000):
        if holds():
            return
        threading.Event().wait(0.01)
    pytest.fail("it did not come about within ten seconds")
