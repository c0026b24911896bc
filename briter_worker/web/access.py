"""Sign-in: the token, the one-time link, sessions, and the limit on failed attempts.

Sessions and the link are kept in memory, so that a restart signs everybody out. The token is configured, or
random and kept where only the operator writes.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from briter_worker import wiring
from briter_worker.errors import PublishError, UsageError, os_error_fix, os_error_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from briter_worker.settings import Settings

SESSION_S = 12 * 3600.0
LINK_S = 900.0
MAX_FAILURES = 5
FAILURES_WITHIN_S = 60.0
_MAX_ADDRESSES = 10_000
_MIN_LENGTH = 16


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
        oldest = self._clock() - FAILURES_WITHIN_S
        with self._guard:
            recent = [each for each in self._failures.get(address, ()) if each > oldest]
        return 0 if len(recent) < MAX_FAILURES else max(1, round(recent[0] - oldest + 0.5))

    def count_failure(self, address: str) -> None:
        """Count a wrong token."""
        with self._guard:
            if len(self._failures) >= _MAX_ADDRESSES:
                del self._failures[next(iter(self._failures))]
            self._failures.setdefault(address, deque(maxlen=MAX_FAILURES)).append(self._clock())


def read_token(settings: Settings) -> str:
    """Return BRITER_DASHBOARD_TOKEN, else the kept token, which is made when there is none.

    Raises UsageError when the token can be neither read nor kept, and OSError for the database.
    """
    if settings.dashboard_token:
        return settings.dashboard_token
    if settings.database_url:
        return wiring.open_database(settings).value_or_set("dashboard.token", secrets.token_urlsafe(32))
    try:
        path = wiring.open_git(settings).state_dir / "dashboard.token"
    except PublishError:
        return secrets.token_urlsafe(32)  # there is no repository: until the next start
    try:
        if not path.exists():
            _create(path)
        token = path.read_text().strip()
    except OSError as error:
        message = f"the dashboard's token cannot be kept in {path}: {os_error_text(error, with_path=False)}"
        raise UsageError(message, os_error_fix(error) or "set BRITER_DASHBOARD_TOKEN") from None
    if len(token) < _MIN_LENGTH:  # an empty token would let everybody in
        raise UsageError(f"{path} has no token", "delete the file, or set BRITER_DASHBOARD_TOKEN")
    return token


def _create(path: Path) -> None:
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{secrets.token_urlsafe(32)}\n")
    with suppress(FileExistsError):  # another dashboard has just created it
        os.link(temporary, path)
    temporary.unlink()
