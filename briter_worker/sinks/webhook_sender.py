"""The sender of the webhooks: a thread, so that no publication waits for a receiver.

A message that a receiver does not take is sent again, later each time. A receiver that does not answer, or is
overloaded, gets nothing else meanwhile. After the last attempt the message is given up, with a warning.
"""

from __future__ import annotations

import base64
import http.client
import math
import socket
import ssl
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from briter_worker.events import Event, WorkerStarted
from briter_worker.redaction import one_line
from briter_worker.sinks.store import StoreError
from briter_worker.sinks.webhook_addresses import Address, AddressRefusedError, check_public, origin_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from briter_worker.sinks.webhooks import Delivery, Outbox

DELAYS_S = (5.0, 30.0, 120.0, 600.0, 1800.0, 7200.0, 21_600.0, 43_200.0)
"""Between attempts; after the last one, nearly a day later, a message is given up."""
CLOSE_TIMEOUT_S = 15.0
"""How long the worker's end may wait for receivers; the next run sends the rest."""
_POST_TIMEOUT_S = 10.0
_MAX_WAIT_S = 60.0
_RETRY_STORE_AFTER_S = 5.0
_MAX_RETRY_AFTER_S = 86_400.0
_WARN_EVERY_S = 600.0
_MIN_POST_S = 0.5
"""With less time left than this, no POST is begun."""
_OK, _REDIRECTS, _CLIENT_ERRORS = range(200, 300), range(300, 400), range(400, 500)
_GONE, _TOO_MANY, _REQUEST_TIMEOUT = 410, 429, 408


class UndeliveredError(Exception):
    """Nobody answered; the text says why, without anything secret of the address."""


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
        """Start nothing yet. `warn` takes a message and a fix."""
        self._outbox = outbox
        self._secret = secret
        self._allow_private = allow_private
        self._warn = warn
        self._clock = clock
        self._delays = delays
        self._changed = threading.Condition()
        self._has_news = False
        self._thread: threading.Thread | None = None
        self._tls: ssl.SSLContext | None = None
        self._until = math.inf
        """When the thread has to end, by the monotonic clock."""
        self._warned: dict[str, float] = {}

    def __call__(self, event: Event, /) -> None:
        """Send what an earlier run left, when the worker starts."""
        if isinstance(event, WorkerStarted) and self._outbox.next_due() < math.inf:
            self.wake()

    def wake(self) -> None:
        """Send what is due, soon."""
        with self._changed:
            self._has_news = True
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
        while True:
            self._has_news = False
            try:
                while self._time_left() > _MIN_POST_S and (each := self._outbox.take(self._clock())):
                    self._send(each)
                due = self._outbox.next_due()
            except StoreError as error:
                self._warn_sometimes("", error.message, error.fix)
                due = self._clock() + _RETRY_STORE_AFTER_S
            with self._changed:
                if self._has_news and self._time_left() > _MIN_POST_S:
                    continue
                if self._until < math.inf:
                    return
                self._changed.wait(min(max(due - self._clock(), 0.0), _MAX_WAIT_S))

    def _time_left(self) -> float:
        return self._until - time.monotonic()

    def _send(self, delivery: Delivery) -> None:
        try:
            if self._tls is None:
                self._tls = ssl.create_default_context()
            address = Address.parse(delivery.url, allow_http=self._allow_private)
            status, retry_after = post(
                address,
                self._headers(delivery),
                delivery.body.encode(),
                tls=self._tls,
                allow_private=self._allow_private,
                within=min(self._time_left(), _POST_TIMEOUT_S),
            )
        except AddressRefusedError as refused:
            self._give_up(delivery, refused.message, refused.fix)
        except Exception as error:  # noqa: BLE001 - whatever a receiver does, the next one is served
            self._fail(delivery, one_line(str(error)) or type(error).__name__, is_busy=True)
        else:
            self._judge(delivery, status, retry_after)

    def _judge(self, delivery: Delivery, status: int, retry_after: float | None) -> None:
        text = f"the receiver answered {status}"
        if status in _OK:
            self._outbox.remove(delivery)
        elif status == _GONE:
            self._give_up(delivery, f"{text}, gone", "remove the address from the configuration")
        elif status in _REDIRECTS:
            self._give_up(delivery, f"{text}, a redirect, which is not followed", "use the new address")
        else:
            is_busy = status in (_TOO_MANY, _REQUEST_TIMEOUT) or status not in _CLIENT_ERRORS
            self._fail(delivery, text, is_busy=is_busy, retry_after=retry_after)

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

    def _headers(self, delivery: Delivery) -> dict[str, str]:
        if delivery.build:
            return {}
        now = datetime.now(UTC)
        headers = {
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


def post(
    address: Address,
    headers: Mapping[str, str],
    body: bytes,
    *,
    tls: ssl.SSLContext,
    allow_private: bool,
    within: float = _POST_TIMEOUT_S,
) -> tuple[int, float | None]:
    """Send one POST; return the status, and after how many seconds the receiver wants to be asked again.

    The host's name is resolved once, and the connection is made to an IP address that was checked. Redirects
    are not followed, proxies are not used. Raises AddressRefusedError and UndeliveredError.
    """
    deadline = time.monotonic() + within
    sent = {"Host": address.host_header, "User-Agent": "briter-worker", **headers}
    if address.user or address.password:
        pair = f"{address.user}:{address.password}".encode()
        sent["Authorization"] = f"Basic {base64.b64encode(pair).decode()}"
    connection = http.client.HTTPConnection(address.host, address.port)
    watchdog = None
    try:
        connection.sock = _connect(address, tls, allow_private=allow_private, deadline=deadline)
        # The timeout of a socket bounds one read. A receiver may send a byte at a time.
        watchdog = threading.Timer(_left(deadline), _shut_down, [connection.sock])
        watchdog.start()
        connection.request("POST", address.target, body, sent)
        response = connection.getresponse()
        _left(deadline)  # headers that were cut off by the watchdog are no answer
        return response.status, _retry_after(response.getheader("Retry-After", ""))
    except (OSError, http.client.HTTPException) as error:
        text = str(error) or type(error).__name__
        if time.monotonic() >= deadline or isinstance(error, TimeoutError):
            text = f"no answer within {within:.0f} s"
        raise UndeliveredError(text) from None
    finally:
        if watchdog is not None:
            watchdog.cancel()
        connection.close()


def _connect(address: Address, tls: ssl.SSLContext, *, allow_private: bool, deadline: float) -> socket.socket:
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise UndeliveredError(f"{address.host}: {reason or 'not the name of a host'}") from None
    numbers = list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))
    if not allow_private:
        check_public(numbers)
    failure = OSError(f"{address.host} has no IP address")
    for number in numbers:
        try:
            connected = socket.create_connection((number, address.port), timeout=_left(deadline))
        except OSError as error:
            failure = error
            continue
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if address.scheme == "http":
            return connected
        try:
            return tls.wrap_socket(connected, server_hostname=address.host)
        except BaseException:
            connected.close()
            raise
    raise failure


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _shut_down(connected: socket.socket) -> None:
    # Not the method of an SSL socket, which the other thread is using.
    with suppress(OSError):  # the receiver has closed it
        socket.socket.shutdown(connected, socket.SHUT_RDWR)


def _retry_after(text: str) -> float | None:
    if text.isascii() and text.isdigit():
        seconds = float(text[:9])
    else:
        try:
            moment = parsedate_to_datetime(text)
        except ValueError:
            return None
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        seconds = moment.timestamp() - time.time()
    return min(max(seconds, 1.0), _MAX_RETRY_AFTER_S)
