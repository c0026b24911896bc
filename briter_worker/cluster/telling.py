"""Who is told what happens on a cluster's sites, from one host: history, condition, webhooks, numbers, log.

What stores is one for the whole host, and writes into Postgres in threads of its own: a drain waits for none
of it but the site's condition, which is looked at when something ends, and written when it changes.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

from briter_worker.events import Warned
from briter_worker.outlets import receivers_of, retention_of, target_of
from briter_worker.sinks.condition import ConditionWatch
from briter_worker.sinks.fan import Fan
from briter_worker.sinks.postgres.condition import RowSlate
from briter_worker.sinks.postgres.history import RowHistorySink
from briter_worker.sinks.postgres.webhooks import RowWebhookSink

if TYPE_CHECKING:
    from collections.abc import Callable

    from briter_worker.events import Event
    from briter_worker.ports import EventSink
    from briter_worker.queues.postgres.database import Database
    from briter_worker.settings import Settings


class Log(Protocol):
    """Where events go, of all sites or of one."""

    def __call__(self, event: Event, /) -> None:
        """Take note of the event."""
        ...

    def of(self, site: str) -> EventSink:
        """The same, told whose they are."""
        ...


class Numbers(Protocol):
    """Counts what happens."""

    def beside(self) -> EventSink:
        """What counts for one drain among others."""
        ...

    def close(self) -> None:
        """Count no more."""
        ...


class Telling:
    """One for each host. Safe in several threads."""

    def __init__(
        self, settings: Settings, database: Database, log: Log, *, metrics: Numbers | None = None
    ) -> None:
        self._settings = settings
        self._database = database
        self._log = log
        self._metrics = metrics

        def complain(text: str) -> None:
            log(Warned(error=text))

        self._history = RowHistorySink(database, retention_of(settings), announce=log, complain=complain)
        self._webhooks = RowWebhookSink(database, receivers_of(settings), complain=complain)

    def start(self) -> None:
        """Let old receipts go, and send what other hosts have left, from now on."""
        self._history.start()
        if find_spec("httpcore") is not None:
            self._webhooks.send()

    def of(self, settings: Settings) -> EventSink:
        """Who is told of one drain of the settings' site. In one thread at a time; never to be closed."""
        site, target = settings.site, target_of(settings)
        log = self._log.of(site)
        metrics = None if self._metrics is None else self._metrics.beside()

        def tell(event: Event) -> None:
            if metrics is not None:
                metrics(event)
            log(event)

        stores = [_Note(self._history.of(site, target)), _Note(self._webhooks.of(site, target.href))]
        return ConditionWatch(RowSlate(self._database, site), Fan(stores, tell))

    def close(self) -> None:
        """Finish what is left, within a bounded time."""
        self._history.close()
        self._webhooks.close()


class Records:
    """For who steers many sites, from one process. Safe in several threads."""

    def __init__(self, settings: Settings, database: Database, log: Log) -> None:
        self._log = log
        self._history = RowHistorySink(
            database,
            retention_of(settings),
            announce=log,
            complain=lambda text: log(Warned(error=text)),
        )

    def of(self, settings: Settings) -> Fan:
        """What is done to a job of the settings' site is in its history, then in the log."""
        note = _Note(self._history.of(settings.site, target_of(settings)))
        return Fan([note], self._log.of(settings.site))

    def close(self) -> None:
        """Store what is left."""
        self._history.close()


def open_record(settings: Settings, database: Database, log: EventSink) -> Fan:
    """For who steers the settings' site: what is done to a job is in its history, then in the log."""
    history = RowHistorySink(
        database,
        retention_of(settings),
        announce=log,
        complain=lambda text: log(Warned(error=text)),
    )
    return Fan([_Note(history.of(settings.site, target_of(settings)), history.close)], log)


class _Note:
    """As `Fan` wants it."""

    def __init__(self, note: Callable[[Event], None], close: Callable[[], None] = lambda: None) -> None:
        self._note = note
        self.close = close

    def __call__(self, event: Event, /) -> None:
        self._note(event)
