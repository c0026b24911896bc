"""Stores what is to be told, then has it sent."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from uuid import uuid4

from briter_worker.events import Event, Flushed, JobOutcome, Published
from briter_worker.sinks.storing import FileStoring
from briter_worker.sinks.webhooks.endpoints import MAX_URL, Endpoint
from briter_worker.sinks.webhooks.messages import TEMPLATES, Message, as_json, topic_of
from briter_worker.sinks.webhooks.outbox import MODE, SCHEMA, Delivery, Outbox, add
from briter_worker.sinks.webhooks.sender import Sender

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from briter_worker.sinks.webhooks.outbox import Mark

LAST_POSTS = 15.0
"""How long the worker's end may wait for receivers; what is left then is for the next run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receivers:
    """Whom a site tells, and how."""

    urls: Sequence[str] = ()
    template: str = "json"
    secret: str = ""
    allow_private: bool = False
    build_hook: str = ""
    build_interval: float = 60.0
    href: Callable[[str], str | None] = lambda _slug: None


class Composer:
    """Writes what is to be sent to whom."""

    def __init__(self, receivers: Receivers) -> None:
        self._receivers = receivers
        self._endpoints = [Endpoint.of(url) for url in receivers.urls]

    def compose(
        self, event: Event, at: float, href: Callable[[str], str | None], site: str | None = None
    ) -> Iterator[Delivery]:
        """What the event is worth; in a cluster, `site` says whose it is."""
        message = Message.of(event, at, href, site)
        if message is not None:
            content_type, body = TEMPLATES[self._receivers.template](message)
            for endpoint in self._endpoints:
                if message.topic in endpoint.topics:
                    yield Delivery(message.id, endpoint.url, at, content_type, body)
            own = event.webhook if isinstance(event, JobOutcome) else None
            if own:
                # A longer one is cut so that it is still too long: half an address is another address.
                yield Delivery(message.id, own[: MAX_URL + 1], at, *as_json(message))
        if self._receivers.build_hook and _changes_the_site(event):
            yield Delivery(f"build_{uuid4().hex}", self._receivers.build_hook, at, build=True)


class WebhookSink(FileStoring[tuple[float, Event]]):
    """Is told events; what is stored by then reaches its receivers in the end, or is given up and told."""

    def __init__(
        self,
        path: Path,
        mark: Mark,
        receivers: Receivers,
        *,
        complain: Callable[[str], None],
        clock: Callable[[], float] = time.time,
        sender: Sender | None = None,
    ) -> None:
        super().__init__(path, SCHEMA, what="webhooks' file", complain=complain, mode=MODE)
        self._mark = mark
        self._receivers = receivers
        self._composer = Composer(receivers)
        self._clock = clock
        self._sender = sender or Sender(
            partial(Outbox, path, mark, build_interval=receivers.build_interval),
            where=f"the webhooks' file {path}",
            secret=receivers.secret,
            allow_private=receivers.allow_private,
            complain=complain,
        )

    def send(self) -> None:
        """Send what an earlier run has left."""
        self._sender.wake()

    def __call__(self, event: Event) -> None:
        """Take note of the event, if anybody is to be told."""
        if is_wanted(event, self._receivers):
            self.put((self._clock(), event))

    def record(self, connection: sqlite3.Connection, items: list[tuple[float, Event]]) -> None:
        """Store the messages of these events."""
        self._mark.set(self._clock())
        for at, event in items:
            for delivery in self._composer.compose(event, at, self._receivers.href):
                add(connection, delivery)

    def tidy(self, connection: sqlite3.Connection) -> None:  # noqa: ARG002 - what is stored may be sent
        """Have it sent."""
        self._sender.wake()

    def close(self) -> None:
        """Store what is left, then send what can be sent in a bounded time."""
        super().close()
        self._sender.close(LAST_POSTS)


def is_wanted(event: Event, receivers: Receivers) -> bool:
    """Whether the event is worth a message to anybody, or a build."""
    if receivers.build_hook and _changes_the_site(event):
        return True
    own = isinstance(event, JobOutcome) and event.webhook
    return bool(receivers.urls or own) and topic_of(event) is not None


def _changes_the_site(event: Event) -> bool:
    return isinstance(event, Flushed) or (isinstance(event, Published) and not event.dry_run)
