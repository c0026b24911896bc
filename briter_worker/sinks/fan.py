"""Tells one event to many sinks, in order, and lets none of them harm the others or the publication."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from briter_worker.errors import UsageError
from briter_worker.events import Event, JobEvent, Warned

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Sink(Protocol):
    """What can be told events, and has something to finish at the end."""

    def __call__(self, event: Event, /) -> None:
        """Take note of the event."""
        ...

    def close(self) -> None:
        """Finish what is left, within a bounded time."""
        ...


@runtime_checkable
class Keeper(Sink, Protocol):
    """A sink that can say when it has stored something."""

    def keep(self, events: Sequence[Event]) -> None:
        """As if told of these; they are stored when it returns, if they can be in a moment."""
        ...


class Fan:
    """What stores comes first, `log` last: nobody reads of what a receipt does not know yet."""

    def __init__(self, stores: Sequence[Sink], log: Callable[[Event], None]) -> None:
        self._stores = stores
        self._log = log
        self._failed: set[int] = set()
        self._kept: dict[int, Event] = {}
        """By their identity: the events that the keepers know already."""

    def __call__(self, event: Event, /) -> None:
        """Tell everybody. A sink that raises is told of once."""
        is_kept = self._kept.pop(id(event), None) is not None
        for number, sink in enumerate(self._stores):
            if is_kept and isinstance(sink, Keeper):
                continue
            try:
                sink(event)
            except Exception as error:  # noqa: BLE001 - a sink's mistake is never a post's
                self._tell(number, sink, error)
        self._log(event)

    def keep(self, events: Sequence[Event]) -> None:
        """See `Keeper`: those who keep are told now, and not once more when everybody is."""
        for number, sink in enumerate(self._stores):
            if isinstance(sink, Keeper):
                try:
                    sink.keep(events)
                except Exception as error:  # noqa: BLE001 - as above
                    self._tell(number, sink, error)
        self._kept = {id(event): event for event in events}

    def close(self) -> None:
        """Have each finish what is left."""
        for number, sink in enumerate(self._stores):
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001 - as above
                self._tell(number, sink, error)

    def _tell(self, number: int, sink: Sink, error: Exception) -> None:
        if number not in self._failed:
            self._failed.add(number)
            what = f"{type(sink).__name__} failed: {type(error).__name__}: {error}; publishing goes on"
            if isinstance(error, UsageError):  # it says all that there is to say
                what = str(error)
            self._log(Warned(error=what))


class Later:
    """A sink that is opened with the first event it is wanted for: who has none pays nothing for it."""

    def __init__(self, opened: Callable[[], Sink], wanted: Callable[[Event], bool]) -> None:
        self._open = opened
        self._wanted = wanted
        self._sink: Sink | None = None

    def __call__(self, event: Event, /) -> None:
        """Pass the event on, from the first one wanted."""
        if self._sink is None:
            if not self._wanted(event):
                return
            self._sink = self._open()
        self._sink(event)

    def close(self) -> None:
        """Close what was opened."""
        if self._sink is not None:
            self._sink.close()


class AtFirstJob:
    """A keeper that is opened when a job is tried: a run of cron that finds nothing pays nothing for it."""

    def __init__(self, opened: Callable[[], Keeper]) -> None:
        self._open = opened
        self._keeper: Keeper | None = None

    def __call__(self, event: Event, /) -> None:
        """Pass the event on, from the first job's on."""
        if self._keeper is None:
            if not isinstance(event, JobEvent):
                return
            self._keeper = self._open()
        self._keeper(event)

    def keep(self, events: Sequence[Event]) -> None:
        """See `Keeper`."""
        if self._keeper is None:
            self._keeper = self._open()
        self._keeper.keep(events)

    def close(self) -> None:
        """Close what was opened."""
        if self._keeper is not None:
            self._keeper.close()
