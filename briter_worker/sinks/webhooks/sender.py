"""Sends what the outbox holds, in a thread of its own: nobody waits for a receiver.

What a receiver does not take is tried again, later each time; a receiver that does not answer, or is
overloaded, gets nothing else meanwhile. After the last attempt a message is given up, which is told.
"""

from __future__ import annotations

import math
import sqlite3
import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol

from briter_worker.errors import for_people
from briter_worker.sinks.webhooks.endpoints import AddressRefusedError, origin_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from standardwebhooks.webhooks import Webhook

    from briter_worker.sinks.webhooks.outbox import Delivery
    from briter_worker.sinks.webhooks.posting import Answer, Poster

DELAYS = (5.0, 30.0, 120.0, 600.0, 1800.0, 7200.0, 21_600.0, 43_200.0)
"""Between attempts; after the last, a message is given up: nearly a day later."""
_LONGEST_REST = 60.0
_TROUBLE = 5.0
_TELL_AGAIN = 600.0
_QUIET, _LONGEST_QUIET = 0.2, 1.0
"""Nothing is sent until so long after the last news, and not for longer than that."""
_LAST_POST = 0.5
"""With less time left than this, no POST is begun."""
_OK, _REDIRECTS, _CLIENT_ERRORS = range(200, 300), range(300, 400), range(400, 500)
_GONE, _TOO_MANY, _REQUEST_TIMEOUT = 410, 429, 408


class Box(Protocol):
    """What is to be sent. Raises sqlite3.Error and OSError; then nothing was changed."""

    def take(self, now: float) -> Delivery | None:
        """The next that is due, leased, its attempt counted; None when nothing is due."""
        ...

    def remove(self, delivery: Delivery) -> None:
        """It was received, or is given up."""
        ...

    def give_up(self, delivery: Delivery, *, also_before: float) -> int:
        """It, and what has waited for its receiver since before then, is not sent; how many those are."""
        ...

    def put_off(self, delivery: Delivery, due: float, error: str, *, all_of_url: bool) -> None:
        """To be tried again then; with `all_of_url`, nothing else is sent there before."""
        ...

    def next_due(self) -> float | None:
        """When there is something to send; None when nothing is left."""
        ...

    def is_current(self) -> bool:
        """Whether it need not be opened anew."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class Sender:
    """One for each process; it starts with the first `wake`."""

    def __init__(
        self,
        opened: Callable[[], Box],
        *,
        where: str,
        secret: str,
        allow_private: bool,
        complain: Callable[[str], None],
        clock: Callable[[], float] = time.time,
        delays: Sequence[float] = DELAYS,
    ) -> None:
        self._open = opened
        self._where = where
        self._secret = secret
        self._allow_private = allow_private
        self._complain = complain
        self._clock = clock
        self._delays = delays
        self._wake = threading.Condition()
        self._news = False
        self._quiet_at = 0.0
        self._thread: threading.Thread | None = None
        self._until: float | None = None
        """When it has to end, by the monotonic clock; None: not yet."""
        self._told: dict[str, float] = {}

    def wake(self) -> None:
        """There is something to send."""
        with self._wake:
            self._news = True
            self._quiet_at = time.monotonic() + _QUIET
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="webhooks", daemon=True)
                self._thread.start()
            self._wake.notify()

    def close(self, within: float) -> None:
        """Send what is due, as far as it gets in this time; the rest is for the next run."""
        with self._wake:
            self._until = time.monotonic() + within
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(within + 1.0)

    def _run(self) -> None:
        try:
            from briter_worker.sinks.webhooks.posting import Poster  # noqa: PLC0415 - an extra, and slow to load
        except ImportError as error:
            self._complain(
                f"webhooks are stored but not sent, as {error.name} is missing. "
                "Fix: pip install 'briter-worker[webhooks]'"
            )
            return
        poster = Poster(allow_private=self._allow_private)
        try:
            done = False
            while not done and self._is_to_go_on():
                try:
                    done = self._work(poster)
                except (sqlite3.Error, OSError) as error:
                    self._tell("", f"{self._where} cannot be used: {error}")
                    self._rest(_TROUBLE)
        finally:
            poster.close()

    def _work(self, poster: Poster) -> bool:
        """Send until the worker ends; False when the box is to be opened anew. Raises as `Box` does."""
        outbox = self._open()
        try:
            while self._is_to_go_on():
                if self._news:
                    self._let_drain_end()
                delivery = outbox.take(self._clock())
                if delivery is not None:
                    self._send(poster, outbox, delivery)
                    continue
                due = outbox.next_due()
                if self._until is not None and not self._news:
                    break
                self._rest(_LONGEST_REST if due is None else due - self._clock())
                if not outbox.is_current():
                    return False
            outbox.next_due()
            return True
        finally:
            outbox.close()

    def _let_drain_end(self) -> None:
        """A thousand messages would compete with the thousand publications that they are about."""
        latest = time.monotonic() + _LONGEST_QUIET
        with self._wake:
            while self._until is None and (left := min(self._quiet_at, latest) - time.monotonic()) > 0:
                self._wake.wait(left)
            self._news = False

    def _is_to_go_on(self) -> bool:
        return self._until is None or time.monotonic() < self._until - _LAST_POST

    def _rest(self, seconds: float) -> None:
        with self._wake:
            if not self._news and self._until is None:
                self._wake.wait(min(max(seconds, 0.0), _LONGEST_REST))
            self._news = False

    def _send(self, poster: Poster, outbox: Box, delivery: Delivery) -> None:
        left = {} if self._until is None else {"within": self._until - time.monotonic()}
        try:
            answer = poster.post(delivery.url, self._headers(delivery), delivery.body.encode(), **left)
        except AddressRefusedError as refused:
            self._give_up(outbox, delivery, str(refused))
        except Exception as error:  # noqa: BLE001 - whatever a receiver does, the next one is served
            self._fail(outbox, delivery, for_people(str(error)) or type(error).__name__, busy=True)
        else:
            self._settle(outbox, delivery, answer)

    def _settle(self, outbox: Box, delivery: Delivery, answer: Answer) -> None:
        status = answer.status
        said = f"it answers {status}"
        if status in _OK:
            outbox.remove(delivery)
        elif status == _GONE:
            self._give_up(outbox, delivery, f"{said}, gone. Fix: take the address out")
        elif status in _REDIRECTS:
            self._give_up(
                outbox, delivery, f"{said}, a redirect, which is not followed. Fix: use the new address"
            )
        else:
            busy = status in (_TOO_MANY, _REQUEST_TIMEOUT) or status not in _CLIENT_ERRORS
            self._fail(outbox, delivery, said, busy=busy, wait=answer.retry_after)

    def _fail(
        self, outbox: Box, delivery: Delivery, error: str, *, busy: bool, wait: float | None = None
    ) -> None:
        if delivery.attempts > len(self._delays):
            # Nothing else was sent there meanwhile. What has waited behind this message for as long as it may
            # goes with it: else one would be given up each day, and a thousand a day may come.
            waited = self._clock() - sum(self._delays) if busy else -math.inf
            self._give_up(outbox, delivery, error, also_before=waited)
            return
        delay = self._delays[delivery.attempts - 1] if wait is None else wait
        outbox.put_off(delivery, self._clock() + delay, error, all_of_url=busy)

    def _give_up(
        self, outbox: Box, delivery: Delivery, error: str, *, also_before: float = -math.inf
    ) -> None:
        others = outbox.give_up(delivery, also_before=also_before) - 1
        what = "build hook" if delivery.build else "webhook"
        if others > 0:
            what += f" and {others} more"
        where = origin_of(delivery.url)
        self._tell(where, f"a {what} to {where} is given up after attempt {delivery.attempts}: {error}")

    def _headers(self, delivery: Delivery) -> dict[bytes | str, bytes | str]:
        if delivery.build:
            return {}
        now = datetime.now(UTC)
        headers: dict[bytes | str, bytes | str] = {
            "Content-Type": delivery.content_type,
            "webhook-id": delivery.message,
            "webhook-timestamp": str(int(now.timestamp())),
        }
        if self._secret:
            headers["webhook-signature"] = _signer(self._secret).sign(delivery.message, now, delivery.body)
        return headers

    def _tell(self, about: str, text: str) -> None:
        """Each receiver's trouble now and then: a thousand messages to one that is gone are one warning."""
        now = time.monotonic()
        if about not in self._told or now - self._told[about] > _TELL_AGAIN:
            self._told[about] = now
            self._complain(text)


def _signer(secret: str) -> Webhook:
    from standardwebhooks.webhooks import Webhook  # noqa: PLC0415 - as the poster

    return Webhook(secret)
