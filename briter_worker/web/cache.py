"""A cached value that a background thread reads again when somebody asks for it and it is old.

Reading a queue of 100,000 jobs takes longer than a page may. So a page waits a moment for the new value,
and shows the old one if it does not come in time.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
_SHARE = 10.0
"""Reading takes at most about a tenth of one CPU, whatever it costs."""


class NotReadYetError(Exception):
    """The value has never been read, and reading it takes longer than the caller waits."""


class CachedValue(Generic[T]):
    """The result of `read`, kept for a second, or ten times as long as reading takes."""

    def __init__(self, read: Callable[[], T], *, lifetime: float = 1.0, patience: float = 0.1) -> None:
        self._read = read
        self._lifetime = lifetime
        self._patience = patience
        self._guard = threading.Lock()
        self._known: Future[T] | None = None
        self._coming: Future[T] | None = None
        self._expires = 0.0

    def get(self, first_wait: float = 10.0) -> T:
        """Return the value, or raise what the last `read` raised.

        Raises NotReadYetError when the very first `read` takes longer than `first_wait` seconds.
        """
        known, coming = self._begin()
        patience = first_wait if known is None else self._patience
        if coming is not None and wait([coming], patience).done:
            known = coming
        if known is None:
            raise NotReadYetError
        return known.result()

    def renew(self, within: float = 1.0) -> None:
        """Read again, because something changed; return when that is done, or after some seconds."""
        _, running = self._begin()
        if running is not None:
            wait([running], within)  # it may have begun before the change
        with self._guard:
            self._expires = 0.0
        _, coming = self._begin()
        if coming is not None:
            wait([coming], within)

    def _begin(self) -> tuple[Future[T] | None, Future[T] | None]:
        """Begin to read if the value is old. Return the last read and the running one."""
        with self._guard:
            if self._coming is None and time.monotonic() >= self._expires:
                self._coming = Future()
                threading.Thread(target=self._refresh, args=[self._coming], daemon=True).start()
            return self._known, self._coming

    def _refresh(self, coming: Future[T]) -> None:
        began = time.monotonic()
        try:
            finish = partial(coming.set_result, self._read())
        except Exception as error:  # noqa: BLE001 - raised to whoever asks for the value
            finish = partial(coming.set_exception, error)
        took = time.monotonic() - began
        with self._guard:
            self._known, self._coming = coming, None
            self._expires = time.monotonic() + max(self._lifetime, _SHARE * took)
        finish()
