"""Tells one event to many sinks, in order, and lets none of them harm the others or the publication."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

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


class Fan:
    """What stores comes first, `log` last: nobody reads of what a receipt does not know yet."""

    def __init__(self, stores: Sequence[Sink], log: Callable[[Event], None]) -> None:
        self._stores = stores
        self._log = log
        self._failed: set[int] = set()

    def __call__(self, event: Event, /) -> None:
        """Tell everybody. A sink that raises is told of once."""
        for number, sink in enumerate(self._stores):
            try:
                sink(event)
            except Exception as error:  # noqa: BLE001 - a sink's mistake is never a post's
                self._tell(number, sink, error)
        self._log(event)

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


class AtFirstJob(Later):
    """A sink that is opened when a job is tried: a run of cron that finds nothing pays nothing for it."""

    def __init__(self, opened: Callable[[], Sink]) -> None:
        super().__init__(opened, lambda event: isinstance(event, JobEvent))
