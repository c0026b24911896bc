"""What happened on a cluster's sites: the same receipts as beside a folder, written by many hosts at once."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from postgres import add_site
from receivers import Receiver, Reply, receiving
from sites import eventually

from briter_worker.cluster import sites, telling
from briter_worker.events import (
    Cancelled,
    ConditionChanged,
    DeadLettered,
    Event,
    Failed,
    HistoryRetired,
    JobStarted,
    NoChange,
    Progress,
    Published,
    Superseded,
    Warned,
)
from briter_worker.settings import load_settings
from briter_worker.sinks.condition import Ailment, ConditionWatch
from briter_worker.sinks.fan import Fan
from briter_worker.sinks.history.reading import FileHistory, HistoryUnreadableError, Receipt
from briter_worker.sinks.history.recording import Target
from briter_worker.sinks.history.retention import Retention
from briter_worker.sinks.history.sink import HistorySink
from briter_worker.sinks.postgres.condition import RowSlate
from briter_worker.sinks.postgres.history import RowHistorySink
from briter_worker.sinks.postgres.outbox import RowOutbox, waiting
from briter_worker.sinks.postgres.reading import RowHistory
from briter_worker.sinks.postgres.webhooks import RowWebhookSink
from briter_worker.sinks.webhooks.outbox import LEASE
from briter_worker.sinks.webhooks.sender import Sender
from briter_worker.sinks.webhooks.sink import Receivers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from postgres import Server
    from sites import Site

    from briter_worker.queues.postgres.database import Database
    from briter_worker.sinks.history.reading import History

DAY = 86400.0
NOW = 1_000_000.0
SHA = "52ed5b9c2a5b45b9a7a0a6f8f1f7be9bd5b2d6b1"
TARGET = Target("main", "origin", "https://example.org/notes/{slug}")
RETENTION = Retention(stale_days=30, keep_days=365)


def start(job: str = "j1", attempt: int = 1, due_at: float | None = None, title: str = "") -> JobStarted:
    return JobStarted(
        job_id=job,
        slug=f"post-{job}",
        attempt=attempt,
        dry_run=False,
        title=title,
        saved_at=NOW - 10,
        due_at=due_at,
    )


def ended(job: str = "j1", attempt: int = 1) -> dict[str, Any]:
    return {"job_id": job, "slug": f"post-{job}", "attempt": attempt, "dry_run": False, "duration_ms": 7}


STORY: list[Event] = [
    # A drain of two, with phases; one is tried again and given up.
    start("j1", title="It's 100 % \\ new"),
    start("j2", due_at=NOW - 3),
    Progress(phase="stage", done=0, total=2),
    Progress(phase="stage", done=2, total=2),
    Progress(phase="push", done=0, total=100),
    Published(**ended("j1"), commit=SHA, rejected_paths=("secret/a.txt",)),
    Failed(**ended("j2"), error="the remote is away\nreally", failure="network", retry_at=NOW + 60),
    start("j2", attempt=2, due_at=NOW - 3),
    DeadLettered(**ended("j2", 2), error="refused", failure="rejected"),
    # What its worker did not live to end; then it is live already.
    start("j3"),
    start("j3", attempt=2),
    NoChange(**ended("j3", 2)),
    # Settled from a dead worker's plan; taken out, and replaced, without any attempt.
    Published(**ended("j4"), commit=SHA[::-1]),
    Superseded(job_id="j5", slug="post-j1", superseded_by="j6"),
    Cancelled(job_id="j6\0", slug="post-j6"),
    ConditionChanged(condition="the remote is away", failure="network"),
    # Under way.
    start("j7", title="Caf\u00e9 au LAIT"),
    Progress(phase="commit", done=1, total=2),
]


@contextmanager
def rows(database: Database, told: list[Event], *, site: str = "blog", now: float = NOW) -> Iterator[Any]:
    """One drain of the site."""
    sink = RowHistorySink(
        database,
        RETENTION,
        announce=told.append,
        complain=lambda text: told.append(Warned(error=text)),
        clock=lambda: now,
    )
    try:
        yield sink.of(site, TARGET)
    finally:
        sink.close()


def plain(receipt: Receipt) -> dict[str, Any]:
    """But for its number, and for what only one of the engines can hold."""
    text = json.dumps({**dataclasses.asdict(receipt), "id": 0})
    return json.loads(text.replace("\\\\x00", "").replace("\\u0000", ""))  # type: ignore[no-any-return]


def is_last(history: History, name: str) -> bool:
    return [moment.event for moment in history.moments(0)][-1:] == [name]


@pytest.mark.parametrize("at_once", [True, False], ids=["in one transaction", "one by one"])
def test_a_cluster_keeps_the_same_history_as_a_folder(
    database: Database, tmp_path: Path, *, at_once: bool
) -> None:
    told: list[Event] = []
    file = HistorySink(
        tmp_path / "history.db",
        TARGET,
        RETENTION,
        announce=told.append,
        complain=pytest.fail,
        clock=lambda: NOW,
    )
    for event in STORY:
        file(event)
    file.close()
    with rows(database, told) as other:
        other(start("j1"))
        other(Published(**ended("j1"), commit=SHA))
    with rows(database, told, site="shop") as note:
        for event in STORY:
            note(event)
            if not at_once and not isinstance(event, JobStarted | Progress):
                eventually(partial(is_last, RowHistory(database, "shop"), event.name))
    assert told == []

    ours, theirs = RowHistory(database, "shop"), FileHistory(tmp_path / "history.db")
    questions: list[Callable[[History], list[Receipt]]] = [
        lambda history: history.receipts(),
        lambda history: history.receipts(slug="post-j1"),
        lambda history: history.receipts(outcomes=("published", "failed"), limit=2),
        lambda history: history.receipts(search="100 %"),
        lambda history: history.receipts(search="\\"),
        lambda history: history.receipts(search="_"),
        lambda history: history.receipts(search="POST-J2", stale=True),
        lambda history: history.receipts(search=SHA[:8]),
        lambda history: history.receipts(before=history.receipts()[2].id),
        lambda history: history.attempts("j2"),
        lambda history: history.under_way(),
    ]
    for number, ask in enumerate(questions):
        found = [plain(each) for each in ask(theirs)]
        assert found or number == 5, number
        assert [plain(each) for each in ask(ours)] == found, number
    assert ours.counts() == theirs.counts()
    assert ours.throughput(NOW - DAY, 3600.0) == theirs.throughput(NOW - DAY, 3600.0)
    assert [(each.event, each.data) for each in ours.moments(0)][:-3] == [
        (each.event, each.data) for each in theirs.moments(0)
    ][:-3]
    first, last = ours.moments(0)[0].id, ours.moments(0)[-1].id
    assert ours.latest() == (last, first)
    assert len(RowHistory(database, "blog").receipts()) == 1
    theirs.close()


def test_a_drain_that_lost_its_site_leaves_the_next_one_its_own_phases(database: Database) -> None:
    sink = RowHistorySink(database, RETENTION, announce=lambda _: None, complain=pytest.fail)
    lost, next_one = sink.of("blog", TARGET), sink.of("blog", TARGET)
    lost(start("j1"))
    lost(start("j2"))
    lost(Progress(phase="push", done=1, total=2))
    next_one(start("j1", attempt=2))
    next_one(Progress(phase="stage", done=1, total=2))
    lost(Progress(phase="settle", done=1, total=2))
    sink.close()
    mine, other, cut_off = sorted(
        [*RowHistory(database, "blog").under_way(), *RowHistory(database, "blog").receipts()],
        key=lambda each: (-each.attempt, each.job_id != "j2"),
    )
    assert [phase.name for phase in mine.phases] == ["validate", "stage"]
    assert (other.job_id, cut_off.outcome) == ("j2", "interrupted")
    assert "stage" not in [phase.name for phase in other.phases]


def test_who_has_seen_a_moment_has_seen_all_before_it(database: Database) -> None:
    """However many hosts write, and however their transactions overlap."""
    history, seen, cursor = RowHistory(database, "blog"), [], 0

    def write(number: int) -> None:
        for each in range(40):
            with rows(database, []) as note:
                note(Cancelled(job_id=f"{number}-{each}", slug="post"))

    writers = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for writer in writers:
        writer.start()
    while True:
        over = not any(writer.is_alive() for writer in writers)
        new = history.moments(cursor, 500)
        seen += [moment.data["jobId"] for moment in new]
        cursor = new[-1].id if new else cursor
        if over and not new:
            break
    assert len(seen) == 120
    assert len(set(seen)) == 120


def test_a_database_that_is_away_delays_receipts_and_nobody_waits(
    postgres_server: Server, database: Database
) -> None:
    told: list[Event] = []
    with rows(database, told) as note:
        postgres_server.stop()
        try:
            note(start("j1"))
            note(Published(**ended("j1"), commit=SHA))
            eventually(lambda: told, within=20)
            with pytest.raises(HistoryUnreadableError):
                RowHistory(database, "blog").receipts()
        finally:
            postgres_server.start()
        eventually(lambda: RowHistory(database, "blog").receipts(), within=20)
    (warning,) = told
    assert isinstance(warning, Warned)
    assert "the history in Postgres cannot be written" in warning.error
    assert "publishing goes on without it" in warning.error
    assert warning.error.count("Fix:") == 1


def test_old_receipts_are_out_of_sight_and_older_ones_deleted_on_all_sites(database: Database) -> None:
    told: list[Event] = []
    for age, site in ((400, "blog"), (40, "blog"), (40, "shop"), (1, "blog")):
        with rows(database, told, site=site, now=NOW - age * DAY) as note:
            note(start(f"j{age}"))
            note(Published(**ended(f"j{age}"), commit=SHA))
    with rows(database, told, site="other") as note:
        note(Cancelled(job_id="j", slug="post"))
    # By those who wrote later, what is old by then.
    blog = RowHistory(database, "blog")
    assert [each.job_id for each in blog.receipts()] == ["j1"]
    assert [each.job_id for each in blog.receipts(stale=True)] == ["j1", "j40"]
    assert RowHistory(database, "shop").receipts() == []
    assert [each.event for each in blog.moments(0)] == ["start", "published"]
    retired = [event for event in told if isinstance(event, HistoryRetired)]
    assert sum(event.deleted for event in retired) == 1
    assert sum(event.stale for event in retired) == 3


# --- condition


def test_a_sites_condition_is_told_once_whichever_host_meets_it(database: Database) -> None:
    told: list[tuple[str, Event]] = []

    def drain(site: str) -> ConditionWatch:
        def note(event: Event) -> None:
            if isinstance(event, ConditionChanged):
                told.append((site, event))

        return ConditionWatch(RowSlate(database, site), Fan([], note))

    away = Failed(**ended(), error="the remote is away", failure="network", retry_at=NOW)
    drain("blog")(away)
    drain("blog")(away)
    drain("shop")(Published(**ended(), commit=SHA))
    drain("blog")(Published(**ended(), commit=SHA))
    drain("blog")(Published(**ended(), commit=SHA))
    assert told == [
        ("blog", ConditionChanged(condition="the remote is away", failure="network")),
        ("blog", ConditionChanged(condition=None, failure=None)),
    ]
    drain("shop")(away)
    assert RowSlate(database, "shop").read() == Ailment("network", "the remote is away")


def test_what_was_wrong_with_an_old_remote_is_nothing_of_the_new_one(database: Database) -> None:
    settings = load_settings({})
    registered = sites.Site("blog", "https://example.org/old.git", "main", "local-mdx", created_at=1.0)
    sites.add(database, registered, settings)
    RowSlate(database, "blog").write(Ailment("network", "the remote is away"))
    sites.change(database, dataclasses.replace(registered, allowed=("static/",)), settings)
    assert RowSlate(database, "blog").read() is not None
    sites.change(database, dataclasses.replace(registered, remote="https://example.org/new.git"), settings)
    assert RowSlate(database, "blog").read() is None


# --- webhooks


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


class Hosts:
    """Hosts that tell the same receivers."""

    def __init__(self, database: Database, receiver: Receiver) -> None:
        self.database = database
        self.now = NOW
        self.complaints: list[str] = []
        self._receivers = Receivers(urls=(f"{receiver.url}/all",), allow_private=True)
        self._build = dataclasses.replace(self._receivers, urls=(), build_hook=f"{receiver.url}/build")

    def open(self, *, build: bool = False) -> RowWebhookSink:
        return RowWebhookSink(
            self.database,
            self._build if build else self._receivers,
            complain=self.complaints.append,
            clock=lambda: self.now,
            sender=Sender(
                partial(RowOutbox, self.database, build_interval=60.0),
                where="the webhooks",
                secret="",
                allow_private=True,
                complain=self.complaints.append,
                clock=lambda: self.now,
                delays=(5.0, 5.0),
            ),
        )

    def left(self) -> int:
        with self.database.transaction() as connection:
            row = connection.execute("SELECT count(*) FROM messages").fetchone()
        return int(row[0]) if row else 0


@pytest.fixture
def hosts(database: Database, receiver: Receiver) -> Hosts:
    return Hosts(database, receiver)


def test_a_message_is_sent_once_however_many_hosts_send(hosts: Hosts, receiver: Receiver) -> None:
    sinks = [hosts.open() for _ in range(3)]
    for number in range(30):
        tell = sinks[number % 3].of(f"site-{number % 2}", TARGET.href)
        tell(Published(**ended(f"j{number}"), commit=SHA))
    for sink in sinks:
        sink.send()
    for sink in sinks:
        sink.close()
    bodies = [json.loads(each.body) for each in receiver.received]
    assert sorted(body["data"]["jobId"] for body in bodies) == sorted(f"j{number}" for number in range(30))
    assert {body["data"]["site"] for body in bodies} == {"site-0", "site-1"}
    assert (hosts.left(), hosts.complaints) == (0, [])


def test_what_a_host_left_another_one_sends(hosts: Hosts, receiver: Receiver) -> None:
    receiver.replies.append(Reply(status=503))
    one = hosts.open()
    one.of("blog", TARGET.href)(Published(**ended(), commit=SHA, webhook=f"{receiver.url}/own"))
    one.close()
    tried = len(receiver.received)
    assert hosts.left() >= 1
    hosts.now += 6
    assert [(url, error) for url, _, error in waiting(hosts.database) if error] != []
    other = hosts.open()
    other.send()
    eventually(lambda: hosts.left() == 0)
    other.close()
    assert waiting(hosts.database) == []
    assert sorted(receiver.paths()[tried:] + receiver.paths()[:tried]).count("/own") >= 1
    assert {"/own", "/all"} == set(receiver.paths())
    assert len({each.headers["webhook-id"] for each in receiver.received}) == 1


def test_what_a_host_was_sending_when_it_died_another_one_sends(hosts: Hosts, receiver: Receiver) -> None:
    sink = hosts.open()
    outbox = RowOutbox(hosts.database, build_interval=60.0)
    sink.of("blog", TARGET.href)(ConditionChanged(condition="away", failure="network"))
    receiver.replies.append(Reply(status=503))
    sink.close()
    hosts.now += 6
    taken = outbox.take(hosts.now)
    assert taken is not None
    assert RowOutbox(hosts.database, build_interval=60.0).take(hosts.now) is None
    again = RowOutbox(hosts.database, build_interval=60.0).take(hosts.now + LEASE)
    assert again is not None
    assert (again.id, again.attempts) == (taken.id, taken.attempts + 1)
    # The first one was only slow: what it has to say does not disturb the second.
    outbox.put_off(taken, hosts.now + 9999, "too slow", all_of_url=False)
    assert outbox.next_due() == hosts.now + 2 * LEASE


def test_hosts_call_a_build_hook_once_for_all_that_waits(hosts: Hosts, receiver: Receiver) -> None:
    for _ in range(3):
        sink = hosts.open(build=True)
        for number in range(5):
            sink.of(f"site-{number}", TARGET.href)(Published(**ended(), commit=SHA))
        sink.close()
    assert receiver.paths() == ["/build"]
    assert hosts.left() == 1
    hosts.now += 61
    last = hosts.open(build=True)
    last.send()
    eventually(lambda: hosts.left() == 0)
    last.close()
    assert receiver.paths() == ["/build", "/build"]


# --- a steerer


def test_what_is_cancelled_beside_the_hosts_is_in_the_history(database: Database, database_url: str) -> None:
    add_site(database, "blog")
    settings = load_settings({"BRITER_DATABASE_URL": database_url, "BRITER_SITE": "blog"})
    told: list[Event] = []
    record = telling.open_record(settings, database, told.append)
    record(Cancelled(job_id="j1", slug="post"))
    record.close()
    (receipt,) = RowHistory(database, "blog").receipts()
    assert (receipt.job_id, receipt.outcome) == ("j1", "cancelled")
    assert [event.name for event in told] == ["cancelled"]


# --- all of it, with the program


def test_the_commands_tell_what_became_of_a_posts_on_one_site(site: Site, database_url: str) -> None:
    site.env["BRITER_DATABASE_URL"] = database_url
    for name in ("blog", "shop"):
        assert site.command("site", "add", name, "--remote", str(site.remote)).returncode == 0
    site.write_post("content/posts/hello.md", "# Hello\n")
    for name, paths in (("blog", "content/posts/hello.md"), ("shop", "content/posts/welcome.md")):
        assert site.command("enqueue", "hello", paths, "--site", name).returncode == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    done = site.command("run", "--once", "--workers", "2", "--metrics-port", port)
    assert done.returncode == 0, done.stderr
    (receipt,) = json.loads(site.command("history", "--site", "blog", "--json").stdout)
    assert (receipt["outcome"], receipt["slug"], receipt["attempt"]) == ("published", "hello", 1)
    assert receipt["commit"] == site.git("rev-parse", "main", cwd=site.remote)
    assert [phase["name"] for phase in receipt["phases"]][-1] in ("push", "settle")
    assert receipt["saveToRemoteMs"] > 0
    shown = json.loads(site.command("show", "hello", "--site", "blog", "--json").stdout)
    assert shown["receipts"] == [receipt]
    (other,) = json.loads(site.command("history", "--site", "shop", "--json").stdout)
    assert other["outcome"] == "nochange"
