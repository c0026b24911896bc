"""The fan-out: passes each event to every sink. A sink that fails harms neither the others nor a post."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Protocol

from briter_worker.errors import FixableError
from briter_worker.events import Event, Warned, WorkerStarted
from briter_worker.redaction import one_line
from briter_worker.sinks.store import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from briter_worker.sinks.condition import SiteCondition

_RETRY_STORE_AFTER_S = 10.0
"""A store that waits for its file costs a second; a drain has many events."""


class StoringSink(Protocol):
    """A sink that stores events: history and webhooks."""

    def store(self, events: Sequence[Event], /) -> None:
        """Store the events durably."""
        ...

    def close(self) -> None:
        """Finish what is left, within a bounded time."""
        ...


class CountingSink(Protocol):
    """A sink that follows events as they are announced: metrics."""

    def __call__(self, event: Event, /) -> None:
        """Take note of the event."""
        ...

    def close(self) -> None:
        """Finish what is left, within a bounded time."""
        ...


class FanOut:
    """Stores events, then announces them; the log comes last, so that a logged event is in the history."""

    def __init__(
        self,
        stores: Sequence[StoringSink],
        log: Callable[[Event], None],
        others: Sequence[CountingSink] = (),
        *,
        condition: SiteCondition | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stores = stores
        self._others = others
        self._log = log
        self._condition = condition
        self._clock = clock
        self._failing: set[int] = set()
        self._resting: dict[int, float] = {}
        """Until when a store that did not accept events gets none."""

    def __call__(self, event: Event, /) -> None:
        """Store the event, then announce it."""
        self.deliver([event], lambda: None)

    def deliver(self, events: Sequence[Event], acknowledge: Callable[[], None], /) -> None:
        """Store the events, acknowledge the jobs, then announce the events and the site's new condition."""
        for sink in self._stores:
            if self._clock() >= self._resting.get(id(sink), 0.0):
                self._guarded(sink, partial(sink.store, events))
        acknowledge()
        for event in events:
            for other in self._others:
                self._guarded(other, partial(other, event))
            self._log(event)
        for event in events:
            if self._condition is not None and (change := self._condition.follow(event)) is not None:
                self(change)

    def close(self) -> None:
        """Close every sink."""
        for store in self._stores:
            self._guarded(store, store.close)
        for other in self._others:
            self._guarded(other, other.close)

    def _guarded(self, sink: object, call: Callable[[], None]) -> None:
        """Call the sink. Report the first of several failures in a row."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - a sink's failure is never a post's
            if isinstance(error, StoreError):
                self._resting[id(sink)] = self._clock() + _RETRY_STORE_AFTER_S
            if id(sink) in self._failing:
                return
            self._failing.add(id(sink))
            what, fix = f"{type(sink).__name__}: {type(error).__name__}: {error}", ""
            if isinstance(error, FixableError):
                what, fix = error.message, error.fix
            self._log(Warned(error=one_line(f"{what}; publishing goes on without it"), fix=fix))
        else:
            self._failing.discard(id(sink))


class OpenedAtStart:
    """A sink that is opened when the worker has its lock: a worker that is skipped takes no port."""

    def __init__(self, open_sink: Callable[[], CountingSink]) -> None:
        self._open = open_sink
        self._sink: CountingSink | None = None

    def __call__(self, event: Event, /) -> None:
        """Pass the event on, from the worker's start on."""
        if self._sink is None and isinstance(event, WorkerStarted):
            self._sink = self._open()
        if self._sink is not None:
            self._sink(event)

    def close(self) -> None:
        """Close the sink if it was opened."""
        if self._sink is not None:
            self._sink.close()
