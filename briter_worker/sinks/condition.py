"""The site condition: the environment failure that keeps every post from being published.

The condition is stored, so that a worker that starts into a known condition does not report it again, nor
does each minute's cron. Only the worker that has the site writes it.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from briter_worker.errors import is_environment
from briter_worker.events import ConditionChanged, DeadLettered, Event, Failed, Published
from briter_worker.sinks.store import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from briter_worker.sinks.store import Store

_READ = "SELECT failure FROM conditions WHERE site = ? AND failure IS NOT NULL"
_WRITE = (
    "INSERT INTO conditions (site, failure, condition, fix, changed_at) VALUES (?, ?, ?, ?, ?)"
    " ON CONFLICT (site) DO UPDATE SET failure = excluded.failure, condition = excluded.condition,"
    " fix = excluded.fix, changed_at = excluded.changed_at"
)


class SiteCondition:
    """The condition of one site, as its events begin, change and end it."""

    def __init__(self, store: Store, site: str = "", *, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._site = site
        self._clock = clock
        self._is_read = False
        self._failure: str | None = None

    def follow(self, event: Event) -> ConditionChanged | None:
        """Return the change that the event brings, after it is stored; None for most events."""
        match event:
            case Failed() | DeadLettered() if is_environment(event.failure):
                # The text of one failure may differ from time to time; the condition is the same.
                if self._known() != event.failure:
                    return self._change(event.failure, event.error, event.fix)
            case Published() if self._known() is not None:
                return self._change(None, None, "")
            case _:
                pass
        return None

    def _known(self) -> str | None:
        if not self._is_read:
            self._is_read = True
            with suppress(StoreError):  # the history reports it
                rows = self._store.query(_READ, (self._site,))
                self._failure = str(rows[0][0]) if rows else None
        return self._failure

    def _change(self, failure: str | None, text: str | None, fix: str) -> ConditionChanged:
        self._failure = failure
        # A full disk may be the condition itself; this worker reports it once all the same.
        with suppress(StoreError), self._store.transaction(self._site) as transaction:
            transaction.execute(_WRITE, (self._site, failure, text, fix, self._clock()))
        return ConditionChanged(condition=text, failure=failure, fix=fix)
