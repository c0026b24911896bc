"""Webhooks: stored first, signed, sent again until received, and never sent into our own network."""

from __future__ import annotations

import json
import socket
import sqlite3
import threading
import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import pytest
from receivers import Receiver, drips, receiving
from remotes import Exchange, says, stalls
from sites import Site, eventually, lines_of
from standardwebhooks.webhooks import Webhook

from briter_worker.events import (
    ConditionChanged,
    DeadLettered,
    Event,
    NoChange,
    NoPaths,
    Published,
    Quarantined,
    Warned,
    WorkerStarted,
)
from briter_worker.sinks.recorder import FanOut
from briter_worker.sinks.store import Outbox, PostgresStore, SqliteStore
from briter_worker.sinks.webhooks import DELAYS_S, Sender, UndeliveredError, WebhookSink, request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from briter_worker.sinks.store import Store

SHA = "52ed5b9c2a5b45b9a7a0a6f8f1f7be9bd5b2d6b1"
SECRET = "whsec_" + "c2VjcmV0IHNlY3JldCBzZWNyZXQgc2VjcmV0"
NOW = 1_800_000_000.0
POST = "content/posts/hello.md"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """One that takes everything, until it is told otherwise."""
    with receiving() as found:
        yield found


class Station:
    """One worker after another with the same outbox, each with the clock at `now`."""

    def __init__(self, open_store: Callable[[], Store]) -> None:
        self.open_store = open_store
        self.now = NOW
        self.warnings: list[str] = []
        self.fixes: list[str] = []

    def open(
        self, *urls: str, template: str = "json", build_hook: str = "", allow_private: bool = True
    ) -> FanOut:
        sender = Sender(
            Outbox(self.open_store()),
            secret=SECRET,
            allow_private=allow_private,
            warn=self.warn,
            clock=lambda: self.now,
        )
        sink = WebhookSink(
            sender,
            urls,
            template=template,
            build_hook=build_hook,
            href=lambda slug: f"https://example.org/{slug}",
            clock=lambda: self.now,
        )
        return FanOut([sink], self.log)

    def warn(self, message: str, fix: str) -> None:
        self.warnings.append(message)
        self.fixes.append(fix)

    def log(self, event: Event) -> None:
        """Note a logged warning."""
        if isinstance(event, Warned):
            self.warn(event.error, event.fix)

    def tell(self, sinks: FanOut, *events: Event) -> None:
        """Deliver the events of a worker's whole life."""
        sinks.deliver(events, lambda: None)
        sinks.close()

    def later(self, seconds: float) -> None:
        """Run a worker that publishes nothing, so many seconds later."""
        self.now += seconds
        self.tell(self.open(), WorkerStarted(pid=1, dry_run=False))

    def unsent(self) -> int:
        return int(self.open_store().query("SELECT count(*) FROM messages")[0][0])


@pytest.fixture
def station(request: pytest.FixtureRequest, tmp_path: Path) -> Station:
    """One with its outbox in a file, unless the test wants Postgres."""
    if getattr(request, "param", "file") == "file":
        return Station(lambda: SqliteStore(tmp_path / "webhooks.db", "outbox"))
    database = request.getfixturevalue("database")
    return Station(lambda: PostgresStore(database.connection, database.transaction))


of_either_store = pytest.mark.parametrize("station", ["file", "postgres"], indirect=True)


def published(slug: str = "hello", *, dry_run: bool = False, webhook: str | None = None) -> Published:
    return Published(
        job_id=f"job-{slug}",
        slug=slug,
        attempt=1,
        dry_run=dry_run,
        duration_ms=80,
        commit=SHA,
        webhook=webhook,
    )


def dead(webhook: str | None = None) -> DeadLettered:
    return DeadLettered(
        job_id="job-1",
        slug="hello",
        attempt=8,
        dry_run=False,
        duration_ms=5,
        error="<!channel> refused. To fix it: curl evil",
        failure="rejected",
        webhook=webhook,
    )


# What is said, and to whom


def test_a_publication_is_sent_signed_by_standard_webhooks(station: Station, receiver: Receiver) -> None:
    station.tell(station.open(f"{receiver.url}/in?a=b"), published())
    (got,) = receiver.received
    assert got.path == "/in?a=b"
    told = Webhook(SECRET).verify(got.body, got.headers)
    assert told["type"] == "post.published"
    assert told["timestamp"] == "2027-01-15T08:00:00.000Z"
    assert (told["data"]["slug"], told["data"]["commit"]) == ("hello", SHA)
    assert told["data"]["href"] == "https://example.org/hello"
    assert station.unsent() == 0


def test_each_receiver_gets_only_the_topics_that_it_asked_for(station: Station, receiver: Receiver) -> None:
    urls = [
        f"{receiver.url}/all",
        f"{receiver.url}/bad#dead-lettered+condition",
        f"{receiver.url}/good#published",
    ]
    events = [
        published(),
        dead(),
        NoPaths(job_id="2", slug="b", attempt=1, dry_run=False, duration_ms=1, error="none"),
        Quarantined(job_id="3", slug="c", error="no JSON", file="c.json"),
        ConditionChanged(condition="no network", failure="network"),
        NoChange(job_id="4", slug="d", attempt=1, dry_run=False, duration_ms=1),
    ]
    station.tell(station.open(*urls), *events)
    told: dict[str, list[str]] = {}
    for got in receiver.received:
        told.setdefault(got.path, []).append(json.loads(got.body)["type"])
    bad = ["post.dead-lettered"] * 3 + ["site.condition"]
    assert told == {"/all": ["post.published", *bad], "/bad": bad, "/good": ["post.published"]}


@pytest.mark.parametrize("template", ["slack", "discord", "text"])
def test_a_chat_message_cannot_mention_everybody(station: Station, receiver: Receiver, template: str) -> None:
    station.tell(station.open(receiver.url, template=template), dead(), published())
    bad, good = receiver.received
    if template == "slack":
        text = json.loads(bad.body)["text"]
        assert "<!" not in text
    elif template == "discord":
        assert json.loads(bad.body)["allowed_mentions"] == {"parse": []}
        text = json.loads(bad.body)["content"]
    else:
        assert bad.headers["content-type"].startswith("text/plain")
        text = bad.body
    assert "hello" in text
    assert "refused. To 'fix it': curl evil" in text, "a remote's words are no fix of ours"
    assert "https://example.org/hello" in good.body


# Receivers that fail


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503])
def test_a_failed_message_is_sent_again_with_the_same_id_and_a_new_signature(
    station: Station, receiver: Receiver, status: int
) -> None:
    receiver.replies.append(says(status))
    station.tell(station.open(receiver.url), published())
    assert station.unsent() == 1
    station.later(DELAYS_S[0] - 1)
    assert len(receiver.received) == 1, "not before its time"
    station.later(1)
    first, second = receiver.received
    assert first.headers["webhook-id"] == second.headers["webhook-id"]
    Webhook(SECRET).verify(second.body, second.headers)
    assert station.unsent() == 0


def test_retry_after_decides_when_a_message_is_sent_again(station: Station, receiver: Receiver) -> None:
    receiver.replies.append(says(429, Retry_After="90"))
    station.tell(station.open(receiver.url), published())
    station.later(89)
    assert len(receiver.received) == 1
    station.later(1)
    assert len(receiver.received) == 2
    assert station.unsent() == 0


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_never_followed_and_the_message_is_given_up(
    station: Station, receiver: Receiver, status: int
) -> None:
    with receiving() as elsewhere:
        receiver.replies.append(says(status, Location=f"{elsewhere.url}/inside"))
        station.tell(station.open(receiver.url), published())
        assert elsewhere.received == []
    assert station.unsent() == 0
    (warning,) = station.warnings
    assert "redirect" in warning
    assert station.fixes == ["use the new address"]


def test_a_post_to_a_stalled_or_slow_receiver_ends_in_time(receiver: Receiver) -> None:
    receiver.replies += [stalls, drips]
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(UndeliveredError, match="no answer within"):
            request("POST", receiver.url, {}, b"x", allow_private=True, within=0.6)
        assert time.monotonic() - began < 8, "the limit of one read would be 10 s"


# Addresses inside our own network


@pytest.mark.parametrize(
    "url",
    [
        "https://127.0.0.1:{port}/",
        "https://localhost:{port}/",
        "https://[::1]:{port}/",
        "https://[::ffff:127.0.0.1]:{port}/",
        "https://0.0.0.0:{port}/",
        "https://2130706433:{port}/",
        "http://example.org/",
        "ftp://example.org/",
        "https:///x",
        "no address",
    ],
)
def test_a_job_cannot_call_an_address_inside_the_network(
    station: Station, receiver: Receiver, url: str
) -> None:
    own = url.format(port=receiver.port)
    station.tell(station.open(allow_private=False), published(webhook=own))
    assert receiver.received == []
    assert station.unsent() == 0, "it is given up at once"
    (warning,) = station.warnings
    assert warning.startswith("a webhook to ")


def test_a_name_is_resolved_once_and_the_checked_address_is_called(
    monkeypatch: pytest.MonkeyPatch, receiver: Receiver
) -> None:
    """The only part that is not real: a DNS that lies cannot be had."""
    asked: list[str] = []
    real = socket.getaddrinfo

    def lying(host: str, *args: object, **keys: object) -> object:
        asked.append(host)
        return real("192.0.2.1" if len(asked) == 1 else "127.0.0.1", *args, **keys)  # type: ignore[arg-type]

    connected: list[object] = []
    monkeypatch.setattr(socket, "getaddrinfo", lying)
    monkeypatch.setattr(socket, "create_connection", lambda address, *_, **__: connected.append(address))
    monkeypatch.setattr("briter_worker.sinks.webhooks.is_public", lambda _: True)
    with pytest.raises(Exception):  # noqa: B017, PT011 - nothing is connected in truth
        request("POST", f"https://rebind.example:{receiver.port}/", {}, allow_private=False, within=5.0)
    assert asked == ["rebind.example"]
    assert connected == [("192.0.2.1", receiver.port)]


# Stored first


@pytest.mark.parametrize("station", ["postgres"], indirect=True)
def test_a_message_is_sent_once_by_many_nodes(station: Station, receiver: Receiver) -> None:
    nodes = [station.open(receiver.url) for _ in range(3)]
    for number in range(30):
        nodes[number % 3](published(f"{number}"))
    for node in nodes:
        node.close()
    slugs = [json.loads(got.body)["data"]["slug"] for got in receiver.received]
    assert sorted(slugs, key=int) == [f"{number}" for number in range(30)]
    assert (station.unsent(), station.warnings) == (0, [])


@of_either_store
def test_a_message_of_a_killed_worker_is_sent_once_by_the_next_one(
    station: Station, receiver: Receiver
) -> None:
    receiver.replies.append(stalls)
    sink = station.open(receiver.url)
    sink(published())
    eventually(lambda: receiver.received)
    # The worker dies here, in the middle of the POST: nothing of it is closed. Its lease lasts a while.
    station.later(59)
    assert len(receiver.received) == 1
    station.later(1)
    first, second = receiver.received
    assert first.headers["webhook-id"] == second.headers["webhook-id"]
    station.later(100_000)
    assert len(receiver.received) == 2


@of_either_store
def test_receivers_that_hang_delay_no_other_one(station: Station, receiver: Receiver) -> None:
    with ExitStack() as stack:
        hanging = [stack.enter_context(receiving()) for _ in range(5)]
        for each in hanging:
            each.replies += [stalls, stalls]
        sinks = station.open(*(f"{each.url}/{path}" for each in hanging for path in "ab"), receiver.url)
        sinks(published())
        waited = eventually(lambda: receiver.received)
        sinks(published("next"))
        waited += eventually(lambda: len(receiver.received) == 2)
        assert [len(each.received) for each in hanging] == [1] * 5, "one message at a time for a host"
    assert waited < 8, "one POST takes 10 s"


def test_a_locked_outbox_delays_no_publication(station: Station, receiver: Receiver, tmp_path: Path) -> None:
    station.tell(station.open(receiver.url), published("first"))
    sinks = station.open(receiver.url)
    with closing(sqlite3.connect(tmp_path / "webhooks.db", isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        began = time.monotonic()
        for number in range(20):
            sinks(published(f"lost-{number}"))
        assert time.monotonic() - began < 10, "a second for each would be 20 s"
        holder.execute("COMMIT")
    sinks.close()
    assert [json.loads(got.body)["data"]["slug"] for got in receiver.received] == ["first"]
    (warning,) = station.warnings
    assert "locked; publishing goes on" in warning


@of_either_store
def test_one_build_covers_a_batch_and_another_one_later_changes(station: Station, receiver: Receiver) -> None:
    hook = f"{receiver.url}/build"
    station.tell(station.open(build_hook=hook), *(published(f"a{number}") for number in range(20)))
    first = len(receiver.received)
    assert first >= 1
    station.now += 10
    station.tell(station.open(build_hook=hook), published("b"), published("c"))
    assert len(receiver.received) == first, "at most one a minute"
    station.later(49.5)
    assert len(receiver.received) == first
    station.later(1)
    assert len(receiver.received) == first + 1, "the last change is built all the same"
    station.later(10_000)
    assert len(receiver.received) == first + 1
    assert {(each.path, each.body) for each in receiver.received} == {("/build", "")}


# The whole worker


def env(receiver: Receiver, **more: str) -> dict[str, str]:
    return {
        "BRITER_WEBHOOK_URLS": f"{receiver.url}/site",
        "BRITER_WEBHOOK_SECRET": SECRET,
        "BRITER_WEBHOOK_ALLOW_PRIVATE": "true",
        **more,
    }


def told(receiver: Receiver) -> list[str]:
    """The types, in order."""
    return [json.loads(got.body)["type"] for got in receiver.received]


def test_a_run_of_cron_sends_its_messages_before_it_ends(site: Site, receiver: Receiver) -> None:
    site.save_post("hello", "Hello\n", webhook=f"{receiver.url}/own")
    run = site.run_once(**env(receiver))
    assert run.returncode == 0
    assert sorted(receiver.paths()) == ["/own", "/site"]
    for got in receiver.received:
        assert Webhook(SECRET).verify(got.body, got.headers)["data"]["commit"] == site.remote_log()[0][0]
    assert receiver.url not in run.stdout, "nobody but the sender has the address"
    assert site.remote_file(POST) == "Hello\n"


def test_a_dead_receiver_delays_no_publication(site: Site, receiver: Receiver) -> None:
    release = threading.Event()

    def answer_late(exchange: Exchange) -> None:
        release.wait(100)
        exchange.reply(200)

    receiver.replies.append(answer_late)
    with site.running("run", **env(receiver)) as worker:
        lines = lines_of(worker)
        commits = []
        for number in range(4):
            site.save_post("hello", f"{number}\n")
            commits.append(next(line for line in lines if line["event"] == "published")["commit"])
            eventually(lambda: receiver.received)
        assert site.remote_file(POST) == "3\n"
        assert len(receiver.received) == 1, "it has not let go of the first message yet"
        release.set()
        eventually(
            lambda: {json.loads(got.body)["data"]["commit"] for got in receiver.received} == {*commits}
        )


def test_a_site_condition_is_sent_once_and_once_when_it_ends(site: Site, receiver: Receiver) -> None:
    settings = env(receiver, BRITER_WORKER_BACKOFF_MS="0")
    settings["BRITER_WEBHOOK_URLS"] += "#condition"
    away = site.remote.rename(site.root / "away.git")
    site.save_post("hello", "Hello\n")
    for _ in range(3):  # each minute's cron, until it is a dead letter and beyond
        site.run_once(**settings, BRITER_WORKER_MAX_ATTEMPTS="2")
    (said,) = receiver.received
    assert json.loads(said.body)["data"]["failure"] == "remote-missing"
    site.git("checkout", "--quiet", "--detach")
    site.save("other", [POST])
    site.run_once(**settings, BRITER_WORKER_MAX_ATTEMPTS="1")
    assert json.loads(receiver.received[1].body)["data"]["failure"] == "wrong-branch"
    site.git("checkout", "--quiet", "main")
    away.rename(site.remote)
    site.save("third", [POST])
    run = site.run_once(**settings)
    assert run.names().count("condition") == 1
    site.save("fourth", [POST])
    site.write_post(POST, "More\n")
    site.run_once(**settings)
    assert [json.loads(got.body)["data"]["failure"] for got in receiver.received] == [
        "remote-missing",
        "wrong-branch",
        None,
    ]


def test_the_doctor_names_problems_of_webhooks(site: Site, receiver: Receiver) -> None:
    bad = site.command("doctor", "--json", BRITER_WEBHOOK_URLS="https://localhost/T0KEN")
    found = [each for each in json.loads(bad.stdout)["findings"] if each["check"] == "webhooks"]
    assert len(found) == 2
    assert {each["state"] for each in found} == {"warning"}
    assert "BRITER_WEBHOOK_SECRET" in found[0]["fix"]
    assert "BRITER_WEBHOOK_ALLOW_PRIVATE" in found[1]["fix"]
    assert "T0KEN" not in bad.stdout
    good = site.command("doctor", "--json", **env(receiver))
    fine = good.finding("webhooks")
    assert (fine["state"], fine["message"]) == ("ok", receiver.url)


def test_a_receiver_with_an_untrusted_certificate_gets_no_message(
    station: Station, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with receiving(certificate) as receiver:
        station.tell(station.open(receiver.url), published())
        assert receiver.received == []
        assert station.unsent() == 1
        monkeypatch.setenv("SSL_CERT_FILE", f"{certificate}.crt")
        station.later(DELAYS_S[0])
        assert len(receiver.received) == 1
        monkeypatch.undo()
