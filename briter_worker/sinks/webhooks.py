"""Webhooks: events become messages, which wait in an outbox until they are received or given up.

A message in delivery is leased: if its sender dies, it is due again, with the attempt counted.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from briter_worker.events import (
    ConditionChanged,
    DeadLettered,
    Event,
    JobOutcome,
    NoPaths,
    Published,
    Quarantined,
)
from briter_worker.job import format_time
from briter_worker.sinks.log import log_entry
from briter_worker.sinks.webhook_addresses import (
    CONDITION,
    DEAD_LETTERED,
    MAX_URL_LENGTH,
    PUBLISHED,
    Endpoint,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from briter_worker.sinks.store import Store, Transaction

LEASE_S = 60.0
_MAX_DELAY_S = 2 * 86400.0
"""A message that is due later than this was deferred before the clock was set back."""
_MAX_TEXT = 1900
"""Discord takes 2,000 characters."""
_SHORT_COMMIT = 10
_JSON = "application/json"
_TOPICS: dict[type[Event], str] = {
    Published: PUBLISHED,
    DeadLettered: DEAD_LETTERED,
    NoPaths: DEAD_LETTERED,
    Quarantined: DEAD_LETTERED,
    ConditionChanged: CONDITION,
}
"""Receivers are notified of these events only."""
_TYPES = {PUBLISHED: "post.published", DEAD_LETTERED: "post.dead-lettered", CONDITION: "site.condition"}

_ADD = (
    "INSERT INTO messages (message, url, build, content_type, body, created, due)"
    " SELECT ?, ?, ?, ?, ?, ?, ? WHERE NOT EXISTS (SELECT 1 FROM messages WHERE url = ? AND "
)
_ADD_MESSAGE = f"{_ADD} message = ?)"
_ADD_BUILD = f"{_ADD} build AND lease IS NULL)"
_NEXT = (
    "SELECT message, url, created, content_type, body, build, id, attempts FROM messages"
    " WHERE due <= ? OR due > ? ORDER BY due, id LIMIT 1"
)
_CALL_BUILD = (
    "INSERT INTO builds (url, called) VALUES (?, ?) ON CONFLICT (url) DO UPDATE SET called = excluded.called"
)
_COVERED_BUILDS = "DELETE FROM messages WHERE url = ? AND build AND lease IS NULL AND id <> ?"


@dataclass(frozen=True, slots=True)
class Receivers:
    """Receivers of a site's webhooks, and the form of what they get."""

    urls: Sequence[str] = ()
    template: str = "json"
    build_hook: str = ""


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message for one receiver, or one call of a build hook."""

    message: str
    url: str
    created: float
    content_type: str = ""
    body: str = ""
    build: bool = False
    id: int = 0
    attempts: int = 0
    """The number of attempts, with the running one."""


def _text_of(topic: str, data: dict[str, Any]) -> str:
    """Return the message for people, in one line."""
    if topic == PUBLISHED:
        done = "Would be published (dry run)" if data["dryRun"] else "Published"
        link = f" {data['href']}" if data.get("href") else ""
        text = f"{done}: {data['slug']}{link} ({data['commit'][:_SHORT_COMMIT]})"
    elif topic == DEAD_LETTERED:
        text = f"Not published: {data['slug']}: {data.get('error', '')}"
    elif data["condition"] is None:
        text = "Publishing works again"
    else:
        text = f"No post can be published: {data['condition']}"
    fix = f". To fix it: {data['fix']}" if data.get("fix") else ""
    site = f"{data['site']}: " if data.get("site") else ""
    return f"{site}{text}{fix}"[:_MAX_TEXT]


def _encode(template: str, topic: str, at: float, data: dict[str, Any]) -> tuple[str, str]:
    """Return the content type and the body of a message."""
    match template:
        case "slack":
            # Text between < and > would be a command, such as one that notifies everybody.
            text = _text_of(topic, data).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
            return _JSON, json.dumps({"text": text})
        case "discord":
            return _JSON, json.dumps({"content": _text_of(topic, data), "allowed_mentions": {"parse": []}})
        case "text":
            return "text/plain; charset=utf-8", f"{_text_of(topic, data)}\n"
        case _:
            body = {"type": _TYPES[topic], "timestamp": format_time(at), "data": data}
            return _JSON, json.dumps(body, ensure_ascii=False, separators=(",", ":"))


class WebhookSink:
    """Stores the messages of one site's events, in the caller's thread, and wakes the sender."""

    def __init__(
        self,
        outbox: Outbox,
        receivers: Receivers,
        wake: Callable[[], None],
        *,
        href: Callable[[str], str | None] = lambda _: None,
        site: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._outbox = outbox
        self._endpoints = [Endpoint.parse(url) for url in receivers.urls]
        self._template = receivers.template
        self._build_hook = receivers.build_hook
        self._wake = wake
        self._href = href
        self._site = site
        self._clock = clock

    def store(self, events: Sequence[Event]) -> None:
        """Store the messages, and wake the sender. Raises StoreError; then the messages are lost."""
        now = self._clock()
        if deliveries := [each for event in events for each in self._compose(event, now)]:
            self._outbox.add(deliveries)
            self._wake()

    def close(self) -> None:
        """Do nothing: everything is stored."""

    def _compose(self, event: Event, now: float) -> Iterator[Delivery]:
        own = event.webhook if isinstance(event, JobOutcome) else None
        topic = _TOPICS.get(type(event))
        if topic is not None and (own or self._endpoints):
            message, data = self._id_of(event), self._data_of(event, now)
            content_type, body = _encode(self._template, topic, now, data)
            for endpoint in self._endpoints:
                if topic in endpoint.topics:
                    yield Delivery(message, endpoint.url, now, content_type, body)
            if own:
                # A longer one is cut so that it is still too long: half an address is another address.
                yield Delivery(message, own[: MAX_URL_LENGTH + 1], now, *_encode("json", topic, now, data))
        if self._build_hook and isinstance(event, Published) and not event.dry_run:
            yield Delivery(f"build_{uuid4().hex}", self._build_hook, now, build=True)

    def _id_of(self, event: Event) -> str:
        if not isinstance(event, Published):
            return f"msg_{uuid4().hex}"
        # The same publication may be delivered twice: the worker died before it acknowledged the job.
        facts = f"{self._site or ''}\0{event.job_id}\0{event.commit}"
        return f"msg_{hashlib.sha256(facts.encode(errors='backslashreplace')).hexdigest()[:32]}"

    def _data_of(self, event: Event, now: float) -> dict[str, Any]:
        data = log_entry(event, now, self._site)
        for key in ("time", "level", "event"):
            del data[key]
        match event:
            case ConditionChanged():
                data = {"condition": None, "failure": None} | data
            case Published():
                data["href"] = self._href(event.slug)
            case NoPaths():
                data["failure"] = NoPaths.name
            case _:
                pass
        return data


class Outbox:
    """Messages that are not received yet. Raises StoreError; then nothing was changed."""

    def __init__(self, store: Store, *, build_interval: float = 60.0) -> None:
        self._store = store
        self._build_interval = build_interval
        self._lease = uuid4().hex

    def add(self, deliveries: Sequence[Delivery]) -> None:
        """Add messages, each once for each address. A build that waits already covers another one."""
        with self._store.transaction() as transaction:
            for each in deliveries:
                row = (each.message, each.url, each.build, each.content_type, each.body, each.created)
                if each.build:
                    due = self._build_due(transaction, each)
                    transaction.execute(_ADD_BUILD, (*row, due, each.url))
                else:
                    transaction.execute(_ADD_MESSAGE, (*row, each.created, each.url, each.message))

    def _build_due(self, transaction: Transaction, build: Delivery) -> float:
        """Return when the build hook may be called again."""
        found = transaction.execute("SELECT called FROM builds WHERE url = ?", (build.url,)).fetchone()
        # A last call in the future was made before the clock was set back.
        if found is None or found[0] > build.created:
            return build.created
        return max(build.created, float(found[0]) + self._build_interval)

    def take(self, now: float) -> Delivery | None:
        """Return the next message that is due, leased, with its attempt counted; None if nothing is due."""
        with self._store.transaction() as transaction:
            row = transaction.execute(_NEXT + self._store.skip_locked, (now, now + _MAX_DELAY_S)).fetchone()
            if row is None:
                return None
            message, url, created, content_type, body, build, number, attempts = row
            if build:  # the call is for every build that waits
                transaction.execute(_CALL_BUILD, (url, now))
                transaction.execute(_COVERED_BUILDS, (url, number))
            transaction.execute(
                "UPDATE messages SET lease = ?, attempts = attempts + 1, due = ? WHERE id = ?",
                (self._lease, now + LEASE_S, number),
            )
        return Delivery(message, url, created, content_type, body, bool(build), number, attempts + 1)

    def remove(self, delivery: Delivery) -> None:
        """Remove a message that was received."""
        with self._store.transaction() as transaction:
            transaction.execute("DELETE FROM messages WHERE id = ?", (delivery.id,))

    def give_up(self, delivery: Delivery, *, also_before: float) -> int:
        """Remove the message, and older ones that wait for the same receiver. Return their number."""
        with self._store.transaction() as transaction:
            statement = "DELETE FROM messages WHERE id = ? OR (url = ? AND created < ? AND lease IS NULL)"
            return int(transaction.execute(statement, (delivery.id, delivery.url, also_before)).rowcount)

    def retry_later(self, delivery: Delivery, due: float, error: str, *, all_of_url: bool) -> None:
        """Defer the message; with `all_of_url`, everything else for the receiver, too."""
        with self._store.transaction() as transaction:
            # Not a message that another node has leased since, because this one was too slow.
            transaction.execute(
                "UPDATE messages SET lease = NULL, due = ?, error = ? WHERE id = ? AND lease = ?",
                (due, error, delivery.id, self._lease),
            )
            if all_of_url:
                transaction.execute(
                    "UPDATE messages SET due = ? WHERE url = ? AND lease IS NULL AND due < ?",
                    (due, delivery.url, due),
                )

    def next_due(self) -> float:
        """Return when the next message is due; infinity if there is none."""
        rows = self._store.query("SELECT min(due) FROM messages")
        return math.inf if not rows or rows[0][0] is None else float(rows[0][0])


def unsent(store: Store) -> list[tuple[str, int, str]]:
    """Return what could not be sent so far: address, number of messages, error of the last attempt."""
    return [
        (url, number, error)
        for url, number, error in store.query(
            "SELECT url, count(*), max(error) FROM messages WHERE attempts > 0 GROUP BY url ORDER BY url"
        )
    ]
