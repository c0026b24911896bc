"""Stores what is to be told of any site of a cluster, then has it sent, by whichever host comes first."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from briter_worker.sinks.postgres.database import RowStoring
from briter_worker.sinks.postgres.outbox import RowOutbox, add
from briter_worker.sinks.webhooks.sender import Sender
from briter_worker.sinks.webhooks.sink import LAST_POSTS, Composer, is_wanted

if TYPE_CHECKING:
    from collections.abc import Callable

    from briter_worker.events import Event
    from briter_worker.sinks.postgres.database import Connection, Database
    from briter_worker.sinks.webhooks.sink import Receivers


@dataclass(frozen=True, slots=True)
class News:
    """What somebody is to be told."""

    site: str
    at: float
    event: Event
    href: Callable[[str], str | None]


class RowWebhookSink(RowStoring[News]):
    """What is stored reaches its receivers in the end, or is given up and told; one for each host."""

    def __init__(
        self,
        database: Database,
        receivers: Receivers,
        *,
        complain: Callable[[str], None],
        clock: Callable[[], float] = time.time,
        sender: Sender | None = None,
    ) -> None:
        super().__init__(database, what="webhooks", complain=complain)
        self._receivers = receivers
        self._composer = Composer(receivers)
        self._clock = clock
        self._sender = sender or Sender(
            partial(RowOutbox, database, build_interval=receivers.build_interval),
            where="the webhooks in Postgres",
            secret=receivers.secret,
            allow_private=receivers.allow_private,
            complain=complain,
        )

    def send(self) -> None:
        """Send what others have left, and what comes, until it is closed."""
        self._sender.wake()

    def of(self, site: str, href: Callable[[str], str | None]) -> Callable[[Event], None]:
        """What takes note of the site's events, if anybody is to be told."""

        def note(event: Event) -> None:
            if is_wanted(event, self._receivers):
                self.put(News(site, self._clock(), event, href))

        return note

    def record(self, connection: Connection, items: list[News]) -> None:
        """Store the messages of these events."""
        add(
            connection,
            [
                each
                for news in items
                for each in self._composer.compose(news.event, news.at, news.href, news.site)
            ],
        )

    def rest(self) -> None:
        """Have it sent."""
        self._sender.wake()

    def close(self) -> None:
        """Store what is left, then send what can be sent in a bounded time."""
        super().close()
        self._sender.close(LAST_POSTS)
