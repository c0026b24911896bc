"""Sign-in: the token, the one-time link, sessions, and the limit on failed attempts.

Sessions and the link are kept in memory, so that a restart signs everybody out.
"""

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

SESSION_S = 12 * 3600.0
LINK_S = 900.0
MAX_FAILURES = 5
FAILURES_WITHIN_S = 60.0
_MAX_ADDRESSES = 10_000


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def is_same(given: str, expected: str) -> bool:
    """Return True if both secrets are equal, in constant time."""
    return hmac.compare_digest(_digest(given), _digest(expected))


class Access:
    """Everything that decides whether a visitor is signed in. Safe in several threads."""

    def __init__(self, token: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._token = token
        self._clock = clock
        self._csrf_key = secrets.token_bytes(32)
        self._sessions: dict[bytes, float] = {}
        """When each session ends, by the digest of its cookie."""
        self._links: dict[bytes, float] = {}
        self._failures: dict[str, deque[float]] = {}
        self._guard = threading.Lock()

    def is_token(self, given: str) -> bool:
        """Return True if this is the dashboard's token."""
        return is_same(given, self._token)

    def create_link_key(self) -> str:
        """Return the key of a sign-in link that works once, for 15 minutes."""
        key = secrets.token_urlsafe(32)
        with self._guard:
            self._links[_digest(key)] = self._clock() + LINK_S
        return key

    def use_link_key(self, key: str) -> bool:
        """Return True if the key was valid. It is not valid again."""
        with self._guard:
            return self._links.pop(_digest(key), 0.0) > self._clock()

    def open_session(self) -> str:
        """Return the cookie of a new session."""
        cookie = secrets.token_urlsafe(32)
        now = self._clock()
        with self._guard:
            self._sessions = {key: end for key, end in self._sessions.items() if end > now}
            self._sessions[_digest(cookie)] = now + SESSION_S
        return cookie

    def has_session(self, cookie: str | None) -> bool:
        """Return True if the cookie belongs to a session that has not ended."""
        if not cookie:
            return False
        with self._guard:
            return self._sessions.get(_digest(cookie), 0.0) > self._clock()

    def end_session(self, cookie: str | None) -> None:
        """Sign out."""
        with self._guard:
            self._sessions.pop(_digest(cookie or ""), None)

    def csrf_token(self, cookie: str | None) -> str:
        """Return the CSRF token of this session; visitors without a session share another one."""
        return hmac.new(self._csrf_key, b"csrf:" + _digest(cookie or ""), hashlib.sha256).hexdigest()

    def seconds_to_wait(self, address: str) -> int:
        """Return for how many seconds the address may not try again, after too many failures."""
        with self._guard:
            failures = self._recent(address)
            if failures is None or len(failures) < MAX_FAILURES:
                return 0
            return max(1, round(failures[0] + FAILURES_WITHIN_S - self._clock() + 0.5))

    def count_failure(self, address: str) -> None:
        """Count a wrong token."""
        with self._guard:
            if len(self._failures) >= _MAX_ADDRESSES:
                del self._failures[next(iter(self._failures))]
            self._failures.setdefault(address, deque(maxlen=MAX_FAILURES)).append(self._clock())

    def _recent(self, address: str) -> deque[float] | None:
        failures = self._failures.get(address)
        while failures and failures[0] <= self._clock() - FAILURES_WITHIN_S:
            failures.popleft()
        if not failures:
            self._failures.pop(address, None)
            return None
        return failures
