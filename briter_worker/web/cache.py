"""A cached value that a background thread reads again when somebody asks for it and it is old.

Reading a queue of 100,000 jobs takes longer than a page may. So a page waits a moment for the new value,
and shows the old one if it does not come in time.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class NotReadYetError(Exception):
    """The value has never been read, and reading it takes longer than the caller waits."""


_SHARE = 10.0
"""Reading takes at most about a tenth of one CPU, whatever it costs."""


class CachedValue(Generic[T]):
    """The result of `read`, kept for `shortest` to `longest` seconds, depending on how long reading takes."""

    def __init__(
        self, read: Callable[[], T], *, shortest: float, longest: float, patience: float = 0.1
    ) -> None:
        self._read = read
        self._shortest, self._longest = shortest, longest
        self._patience = patience
        self._changed = threading.Condition()
        self._value: T | None = None
        self._error: Exception | None = None
        self._expires = 0.0
        self._started = self._finished = self._wanted = 0
        """Numbers of the last read that was started, finished and wanted."""

    def get(self, first_wait: float = 10.0) -> T:
        """Return the value, or raise what the last `read` raised.

        Raises NotReadYetError when the very first `read` takes longer than `first_wait` seconds.
        """
        with self._changed:
            if self._started == self._finished and time.monotonic() >= self._expires:
                self._wanted = self._started + 1
            self._wait_for(self._wanted, self._patience if self._finished else first_wait)
            if not self._finished:
                raise NotReadYetError
            if self._error is not None:
                raise self._error
            return self._value  # type: ignore[return-value]  # T may include None

    def renew(self, wait: float = 1.0) -> None:
        """Read again, because something changed; return when that is done, or after `wait` seconds."""
        with self._changed:
            self._wanted = self._started + 1  # a running read may have begun before the change
            self._wait_for(self._wanted, wait)

    def _wait_for(self, number: int, seconds: float) -> None:
        def is_read() -> bool:
            if self._started == self._finished < number:
                self._started += 1
                threading.Thread(target=self._refresh, name="dashboard-read", daemon=True).start()
            return self._finished >= number

        self._changed.wait_for(is_read, seconds)

    def _refresh(self) -> None:
        began = time.monotonic()
        value, error = None, None
        try:
            value = self._read()
        except Exception as caught:  # noqa: BLE001 - raised to whoever asks for the value
            error = caught
        took = time.monotonic() - began
        with self._changed:
            self._value, self._error = value, error
            self._expires = time.monotonic() + min(self._longest, max(self._shortest, _SHARE * took))
            self._finished = self._started
            self._changed.notify_all()
