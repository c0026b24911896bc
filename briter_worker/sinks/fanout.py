"""The fan-out: passes each event to every sink. A sink that fails harms neither the others nor a post."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

from briter_worker.errors import FixableError
from briter_worker.events import Event, Warned, WorkerStarted
from briter_worker.redaction import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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
    ) -> None:
        self._stores = stores
        self._others = others
        self._log = log
        self._failing: set[int] = set()

    def __call__(self, event: Event, /) -> None:
        """Store the event, then announce it."""
        self._store([event])
        self._announce(event)

    def deliver(self, events: Sequence[Event], acknowledge: Callable[[], None], /) -> None:
        """Store the events, acknowledge the jobs, then announce the events."""
        self._store(events)
        acknowledge()
        for event in events:
            self._announce(event)

    def close(self) -> None:
        """Close every sink."""
        for store in self._stores:
            self._guarded(store, store.close)
        for other in self._others:
            self._guarded(other, other.close)

    def _store(self, events: Sequence[Event]) -> None:
        for sink in self._stores:
            self._guarded(sink, partial(sink.store, events))

    def _announce(self, event: Event) -> None:
        for sink in self._others:
            self._guarded(sink, partial(sink, event))
        self._log(event)

    def _guarded(self, sink: object, call: Callable[[], None]) -> None:
        """Call the sink. Report the first of several failures in a row."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - a sink's failure is never a post's
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
