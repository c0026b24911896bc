"""Who is signed in, and who has tried too often. All of it in memory: a restart signs everybody out."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

LASTS = 12 * 3600.0
_MOST_SESSIONS = 1000
_MOST_ADDRESSES = 10_000
TRIES = 5
WITHIN = 60.0


def same(given: str, expected: str) -> bool:
    """Whether two secrets are one, in a time that tells nothing about either."""
    return hmac.compare_digest(_digest(given), _digest(expected))


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


class Sessions:
    """Sessions by the digest of their cookie, and the CSRF token that belongs to each."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._ends: dict[bytes, float] = {}
        self._guard = threading.Lock()

    def open(self) -> str:
        """A new session's cookie."""
        cookie = secrets.token_urlsafe(32)
        now = self._clock()
        with self._guard:
            if len(self._ends) >= _MOST_SESSIONS:
                self._ends = {key: end for key, end in self._ends.items() if end > now}
            while len(self._ends) >= _MOST_SESSIONS:
                del self._ends[next(iter(self._ends))]
            self._ends[_digest(cookie)] = now + LASTS
        return cookie

    def knows(self, cookie: str | None) -> bool:
        """Whether the cookie is a session's that has not ended."""
        if not cookie:
            return False
        with self._guard:
            return self._ends.get(_digest(cookie), 0.0) > self._clock()

    def end(self, cookie: str | None) -> None:
        """Sign out."""
        with self._guard:
            self._ends.pop(_digest(cookie or ""), None)

    def csrf(self, cookie: str | None) -> str:
        """What a page of this session puts into its forms; that of no session is another."""
        return hmac.new(self._key, b"csrf:" + _digest(cookie or ""), hashlib.sha256).hexdigest()


class Tries:
    """Failed attempts by address: at most a few within a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failed: dict[str, deque[float]] = {}
        self._guard = threading.Lock()

    def wait(self, address: str) -> int:
        """How many seconds this address has to wait before it may try again."""
        with self._guard:
            tries = self._recent(address)
            if tries is None or len(tries) < TRIES:
                return 0
            return max(1, round(tries[0] + WITHIN - self._clock() + 0.5))

    def failed(self, address: str) -> None:
        """Note a failed attempt."""
        with self._guard:
            if len(self._failed) >= _MOST_ADDRESSES:
                del self._failed[next(iter(self._failed))]
            self._failed.setdefault(address, deque(maxlen=TRIES)).append(self._clock())

    def _recent(self, address: str) -> deque[float] | None:
        tries = self._failed.get(address)
        while tries and tries[0] <= self._clock() - WITHIN:
            tries.popleft()
        if not tries:
            self._failed.pop(address, None)
            return None
        return tries
