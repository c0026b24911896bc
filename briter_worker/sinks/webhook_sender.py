"""The sender of the webhooks: a thread, so that no publication waits for a receiver.

A message that a receiver does not take is sent again, later each time. A receiver that does not answer, or is
overloaded, gets nothing else meanwhile. After the last attempt the message is given up, with a warning.
"""

from __future__ import annotations

import math
import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from briter_worker.events import Event, WorkerStarted
from briter_worker.redaction import one_line
from briter_worker.sinks.store import StoreError
from briter_worker.sinks.webhook_addresses import AddressRefusedError, origin_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from briter_worker.sinks.webhook_client import Answer, WebhookClient
    from briter_worker.sinks.webhooks import Delivery, Outbox

DELAYS_S = (5.0, 30.0, 120.0, 600.0, 1800.0, 7200.0, 21_600.0, 43_200.0)
"""Between attempts; after the last one, nearly a day later, a message is given up."""
CLOSE_TIMEOUT_S = 15.0
"""How long the worker's end may wait for receivers; the next run sends the rest."""
_MAX_WAIT_S = 60.0
_RETRY_STORE_AFTER_S = 5.0
_WARN_EVERY_S = 600.0
_QUIET_S, _MAX_QUIET_S = 0.2, 1.0
"""Nothing is sent until this long after the last event, and not for longer than that."""
_MIN_POST_S = 0.5
"""With less time left than this, no POST is begun."""
_OK, _REDIRECTS, _CLIENT_ERRORS = range(200, 300), range(300, 400), range(400, 500)
_GONE, _TOO_MANY, _REQUEST_TIMEOUT = 410, 429, 408


class Sender:
    """Sends what the outbox holds; one for each process. The thread starts with the first `wake`."""

    def __init__(
        self,
        outbox: Outbox,
        *,
        secret: str = "",
        allow_private: bool = False,
        warn: Callable[[str, str], None],
        clock: Callable[[], float] = time.time,
        delays: Sequence[float] = DELAYS_S,
    ) -> None:
        self._outbox = outbox
        self._secret = secret
        self._allow_private = allow_private
        self._warn = warn
        """Takes a message and a fix."""
        self._clock = clock
        self._delays = delays
        self._changed = threading.Condition()
        self._has_news = False
        self._quiet_at = 0.0
        self._thread: threading.Thread | None = None
        self._client: WebhookClient | None = None
        self._until: float | None = None
        """When the thread has to end, by the monotonic clock."""
        self._warned: dict[str, float] = {}

    def __call__(self, event: Event, /) -> None:
        """Send what an earlier run left, when the worker starts."""
        if isinstance(event, WorkerStarted) and self._outbox.next_due() is not None:
            self.wake()

    def wake(self) -> None:
        """Send what is due, soon."""
        with self._changed:
            self._has_news = True
            self._quiet_at = time.monotonic() + _QUIET_S
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="webhooks", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self, within: float = CLOSE_TIMEOUT_S) -> None:
        """Send what is due, as far as the time suffices."""
        with self._changed:
            self._until = time.monotonic() + within
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(within + 1.0)

    def _run(self) -> None:
        try:
            while self._has_time():
                try:
                    if not self._send_due():
                        break
                except StoreError as error:
                    self._warn_sometimes("", error.message, error.fix)
                    self._wait(_RETRY_STORE_AFTER_S)
        except ImportError as error:
            self._warn(
                f"webhooks are stored but not sent: {error.name} is missing",
                "pip install 'briter-worker[webhooks]'",
            )
        finally:
            if self._client is not None:
                self._client.close()

    def _send_due(self) -> bool:
        """Send what is due, then wait. Return False at the end of the worker."""
        if self._has_news:
            self._let_drain_end()
        while self._has_time() and (delivery := self._outbox.take(self._clock())) is not None:
            self._send(delivery)
        due = self._outbox.next_due()
        if self._until is not None and not self._has_news:
            return False
        self._wait(_MAX_WAIT_S if due is None else due - self._clock())
        return True

    def _let_drain_end(self) -> None:
        """Wait until no more events come: messages would compete with the publications they are about."""
        latest = time.monotonic() + _MAX_QUIET_S
        with self._changed:
            while self._until is None and (left := min(self._quiet_at, latest) - time.monotonic()) > 0:
                self._changed.wait(left)
            self._has_news = False

    def _has_time(self) -> bool:
        return self._until is None or time.monotonic() < self._until - _MIN_POST_S

    def _wait(self, seconds: float) -> None:
        with self._changed:
            if not self._has_news and self._until is None:
                self._changed.wait(min(max(seconds, 0.0), _MAX_WAIT_S))

    def _send(self, delivery: Delivery) -> None:
        if self._client is None:
            from briter_worker.sinks.webhook_client import WebhookClient  # noqa: PLC0415 - an extra

            self._client = WebhookClient(allow_private=self._allow_private)
        headers = self._headers(delivery)
        within = math.inf if self._until is None else self._until - time.monotonic()
        try:
            answer = self._client.post(delivery.url, headers, delivery.body.encode(), within=within)
        except AddressRefusedError as refused:
            self._give_up(delivery, refused.message, refused.fix)
        except Exception as error:  # noqa: BLE001 - whatever a receiver does, the next one is served
            self._fail(delivery, one_line(str(error)) or type(error).__name__, is_busy=True)
        else:
            self._judge(delivery, answer)

    def _judge(self, delivery: Delivery, answer: Answer) -> None:
        status = answer.status
        text = f"the receiver answered {status}"
        if status in _OK:
            self._outbox.remove(delivery)
        elif status == _GONE:
            self._give_up(delivery, f"{text}, gone", "remove the address from the configuration")
        elif status in _REDIRECTS:
            self._give_up(delivery, f"{text}, a redirect, which is not followed", "use the new address")
        else:
            is_busy = status in (_TOO_MANY, _REQUEST_TIMEOUT) or status not in _CLIENT_ERRORS
            self._fail(delivery, text, is_busy=is_busy, retry_after=answer.retry_after)

    def _fail(
        self, delivery: Delivery, error: str, *, is_busy: bool, retry_after: float | None = None
    ) -> None:
        if delivery.attempts <= len(self._delays):
            delay = self._delays[delivery.attempts - 1] if retry_after is None else retry_after
            self._outbox.retry_later(delivery, self._clock() + delay, error, all_of_url=is_busy)
            return
        # A busy receiver got nothing else meanwhile. Messages that waited as long behind this one are given
        # up, too: otherwise one would be given up each day, while a thousand a day may come.
        waited = self._clock() - sum(self._delays) if is_busy else -math.inf
        self._give_up(delivery, error, "check the receiver", also_before=waited)

    def _give_up(self, delivery: Delivery, error: str, fix: str, *, also_before: float = -math.inf) -> None:
        others = self._outbox.give_up(delivery, also_before=also_before) - 1
        what = "build hook" if delivery.build else "webhook"
        what += f" and {others} more" if others > 0 else ""
        origin = origin_of(delivery.url)
        text = f"a {what} to {origin} is given up after attempt {delivery.attempts}: {error}"
        self._warn_sometimes(origin, text, fix)

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
            from standardwebhooks.webhooks import Webhook  # noqa: PLC0415 - an extra

            headers["webhook-signature"] = Webhook(self._secret).sign(delivery.message, now, delivery.body)
        return headers

    def _warn_sometimes(self, about: str, text: str, fix: str) -> None:
        """Warn about each receiver now and then: a thousand messages to a dead one are one warning."""
        now = time.monotonic()
        if about not in self._warned or now - self._warned[about] > _WARN_EVERY_S:
            self._warned[about] = now
            self._warn(text, fix)
