"""Webhooks: events become messages, which wait in an outbox until they are received or given up.

Threads send them, so that neither a publication nor another receiver waits for one that hangs. A message that
a receiver does not take is sent again, later each time. A message in delivery is leased: if its sender dies,
it is due again.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import ipaddress
import json
import math
import re
import socket
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, unquote, urlsplit
from uuid import uuid4

from briter_worker import events
from briter_worker.errors import FixableError, one_line, quote_fix
from briter_worker.job import count, format_time
from briter_worker.sinks.log import log_entry
from briter_worker.sinks.store import Delivery, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from briter_worker.sinks.store import Outbox

DELAYS_S = (5.0, 30.0, 120.0, 600.0, 1800.0, 7200.0, 21_600.0, 43_200.0)
"""Between attempts; after the last one, nearly a day later, a message is given up."""
_CLOSE_TIMEOUT_S = 15.0
"""How long the worker's end may wait for receivers; the next run sends the rest."""
_POST_TIMEOUT_S = 10.0
_MIN_POST_S = 0.5
"""With less time left than this, no POST is begun."""
_MAX_SENDING = 8
"""So many receivers that hang delay no other one; a host has at most one of them."""
_MAX_WAIT_S = 60.0
_RETRY_STORE_AFTER_S = 5.0
_MAX_RETRY_AFTER_S = 86_400.0
_WARN_EVERY_S = 600.0
_MAX_TEXT = 1900
"""Discord takes 2,000 characters."""
_MAX_URL = 2000
_PORTS = {"https": 443, "http": 80}
_OK, _REDIRECTS, _CLIENT_ERRORS = range(200, 300), range(300, 400), range(400, 500)
_GONE, _BUSY = 410, (408, 429)
_JSON = "application/json"
_TOPICS: dict[type[events.Event], str] = {
    events.Published: "published",
    events.DeadLettered: "dead-lettered",
    events.NoPaths: "dead-lettered",
    events.Quarantined: "dead-lettered",
    events.ConditionChanged: "condition",
    events.SiteUpdated: "updated",
}
"""Receivers are notified of these events only."""
_TYPES = {
    "published": "post.published",
    "dead-lettered": "post.dead-lettered",
    "condition": "site.condition",
    "updated": "site.updated",
}
_INSIDE = tuple(
    ipaddress.ip_network(network)
    for network in (
        "168.63.129.16/32",  # Azure's platform, which each of its machines reaches
        # Not all of these are private to every version of Python; the last two have IPv4 addresses inside.
        *("192.0.0.0/24", "192.88.99.0/24", "3fff::/20", "2001::/23", "2002::/16"),
    )
)
_UNICAST, _NAT64 = ipaddress.ip_network("2000::/3"), ipaddress.ip_network("64:ff9b::/96")


class AddressRefusedError(FixableError):
    """The address is never called. Neither message nor fix contains anything secret of it."""


class UndeliveredError(Exception):
    """Nobody answered; the text says why, without anything secret of the address."""


# --- addresses


def parse_receiver(text: str) -> tuple[str, frozenset[str]]:
    """Return the URL and the topics that follow it after `#`, joined by `+`. Without topics: all of them."""
    url, _, wanted = text.partition("#")
    return url, frozenset(wanted.split("+")) & frozenset(_TYPES) or frozenset(_TYPES)


def parse_address(url: str, *, allow_http: bool) -> SplitResult:
    """Return the parts of a URL that may be called. Raises AddressRefusedError."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in _PORTS and bool(parts.hostname) and parts.port is not False
    except ValueError:
        is_address = False
    if not is_address or not re.fullmatch(rf"[!-~]{{1,{_MAX_URL}}}", url):
        raise AddressRefusedError(
            f"the text is no address such as https://example.org/hook of at most {_MAX_URL} characters",
            "correct the address",
        )
    if parts.scheme == "http" and not allow_http:
        raise AddressRefusedError("the address does not begin with https://", "use the https address")
    return parts


def origin_of(url: str) -> str:
    """Return scheme, host and port. The rest of a URL is often a secret and is never shown."""
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return "an invalid address"
    return f"{parts.scheme}://{parts.hostname}{port}" if parts.hostname else "an invalid address"


def resolve(address: SplitResult, *, allow_private: bool) -> list[tuple[str, int]]:
    """Return the IP addresses and the port. Raises AddressRefusedError if one is inside the network."""
    host, port = address.hostname or "", address.port
    port = _PORTS[address.scheme] if port is None else port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise UndeliveredError(f"{host}: {reason or 'not the name of a host'}") from None
    numbers = dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found)
    for number in [] if allow_private else numbers:
        if not is_public(ipaddress.ip_address(number.partition("%")[0])):
            raise AddressRefusedError(
                f"the IP address of the host is {number}, which is inside this machine's network",
                "use a public address, or set BRITER_WEBHOOK_ALLOW_PRIVATE=true",
            )
    return [(number, port) for number in numbers]


def is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Return True if the IP address is outside every private, local and reserved network."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address not in _UNICAST:
            return False
    is_inside = address.is_multicast or any(address in network for network in _INSIDE)
    return address.is_global and not is_inside


# --- messages


@dataclass(eq=False)
class WebhookSink:
    """Stores the messages of one site's events, in the caller's thread, and wakes the sender."""

    sender: Sender
    receivers: Sequence[str] = ()
    template: str = "json"
    build_hook: str = ""
    href: Callable[[str], str | None] = lambda _: None
    site: str | None = None
    """Without a site, the sender is the sink's own and is closed with the sink."""
    clock: Callable[[], float] = time.time

    def store(self, batch: Sequence[events.Event], /) -> None:
        """Store the messages, and wake the sender. Raises StoreError; then the messages are lost."""
        now = self.clock()
        if deliveries := [each for event in batch for each in self._compose(event, now)]:
            self.sender.outbox.add(deliveries)
        is_start = any(isinstance(event, events.WorkerStarted) for event in batch)
        if deliveries or (is_start and self.sender.outbox.next_due() < math.inf):
            self.sender.wake()

    def close(self) -> None:
        """Send what is due, within a bounded time."""
        if self.site is None:
            self.sender.close()

    def _compose(self, event: events.Event, now: float) -> Iterator[Delivery]:
        own = event.webhook if isinstance(event, events.JobOutcome) else None
        topic = _TOPICS.get(type(event))
        if topic is not None and (own or self.receivers):
            message, data = self._id_of(event), self._data_of(event, now)
            content_type, body = _encode(self.template, topic, now, data)
            for url, topics in map(parse_receiver, self.receivers):
                if topic in topics:
                    yield Delivery(message, url, now, content_type, body)
            if own:
                # A longer one is cut so that it is still too long: half an address is another address.
                yield Delivery(message, own[: _MAX_URL + 1], now, *_encode("json", topic, now, data))
        if self.build_hook and isinstance(event, events.Published) and not event.dry_run:
            yield Delivery(f"build_{uuid4().hex}", self.build_hook, now, build=True)

    def _id_of(self, event: events.Event) -> str:
        if not isinstance(event, events.Published):
            return f"msg_{uuid4().hex}"
        # The same publication may be delivered twice: the worker died before it acknowledged the job.
        facts = f"{self.site or ''}\0{event.job_id}\0{event.commit}"
        return f"msg_{hashlib.sha256(facts.encode(errors='backslashreplace')).hexdigest()[:32]}"

    def _data_of(self, event: events.Event, now: float) -> dict[str, Any]:
        data = log_entry(event, now, self.site)
        for key in ("time", "level", "event"):
            del data[key]
        match event:
            case events.ConditionChanged():
                data = {"condition": None, "failure": None} | data
            case events.Published():
                data["href"] = self.href(event.slug)
            case events.NoPaths():
                data["failure"] = events.NoPaths.name
            case _:
                pass
        return data


def _encode(template: str, topic: str, at: float, data: dict[str, Any]) -> tuple[str, str]:
    """Return the content type and the body of a message."""
    match template:
        case "slack":
            # Text between < and > would be a command, such as one that notifies everybody.
            text = _text_of(topic, data).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
            return _JSON, json.dumps({"text": text})
        case "discord":
            return _JSON, json.dumps({"content": _text_of(topic, data), "allowed_mentions": {"parse": []}})
        case "text":
            return "text/plain; charset=utf-8", f"{_text_of(topic, data)}\n"
        case _:
            body = {"type": _TYPES[topic], "timestamp": format_time(at), "data": data}
            return _JSON, json.dumps(body, ensure_ascii=False, separators=(",", ":"))


def _text_of(topic: str, data: dict[str, Any]) -> str:
    """Return the message for people, in one line."""
    if topic == "published":
        done = "Would be published (dry run)" if data["dryRun"] else "Published"
        link = f" {data['href']}" if data.get("href") else ""
        text = f"{done}: {data['slug']}{link} ({data['commit'][:10]})"
    elif topic == "dead-lettered":
        text = f"Not published: {data['slug']}: {data.get('error', '')}"
    elif topic == "updated":
        text = f"{count(data['total'], 'file')} updated from the remote, such as {data['paths'][0]}"
    elif data["condition"] is None:
        text = "Publishing works again"
    else:
        text = f"No post can be published: {data['condition']}"
    fix = f". To fix it: {data['fix']}" if data.get("fix") else ""
    site = f"{data['site']}: " if data.get("site") else ""
    return f"{site}{quote_fix(text)}{fix}"[:_MAX_TEXT]


# --- the sender


@dataclass(eq=False)
class Sender:
    """Sends what the outbox holds; one for each process. The thread starts with the first `wake`."""

    outbox: Outbox
    warn: Callable[[str, str], None]
    """Takes a message and a fix."""
    secret: str = ""
    allow_private: bool = False
    clock: Callable[[], float] = time.time
    _news: threading.Event = field(default_factory=threading.Event)
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None
    _until: float = math.inf
    """The end of the thread's time, by the monotonic clock."""
    _busy: set[str] = field(default_factory=set)
    """The beginnings of the addresses, up to the path, that a message is being sent to."""
    _warned: dict[str, float] = field(default_factory=dict)

    def wake(self) -> None:
        """Send what is due, soon."""
        self._news.set()
        with self._guard:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="webhooks", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Send what is due, as far as the time suffices."""
        self._until = time.monotonic() + _CLOSE_TIMEOUT_S
        self._news.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S + 1.0)

    def _run(self) -> None:
        is_done = False
        while not is_done:
            self._news.clear()
            # What was stored before the end is sent now.
            is_last, busy, due = self._until < math.inf, tuple(self._busy), math.inf
            try:
                if len(busy) < _MAX_SENDING and self._time_left() > _MIN_POST_S:
                    if each := self.outbox.take(self.clock(), busy):
                        host = "/".join(each.url.split("/", 3)[:3])
                        self._busy.add(host)
                        threading.Thread(target=self._deliver, args=(each, host), daemon=True).start()
                        continue
                    due = self.outbox.next_due(busy)
            except StoreError as error:
                self._warn_sometimes("", error.message, error.fix)
                due = self.clock() + _RETRY_STORE_AFTER_S
            is_done = is_last and not busy
            if not is_done:
                self._news.wait(min(max(due - self.clock(), 0.0), _MAX_WAIT_S))

    def _deliver(self, delivery: Delivery, host: str) -> None:
        try:
            self._send(delivery)
        except StoreError as error:
            self._warn_sometimes("", error.message, error.fix)
        finally:
            self._busy.discard(host)
            self._news.set()

    def _time_left(self) -> float:
        return self._until - time.monotonic()

    def _send(self, delivery: Delivery) -> None:
        within = min(self._time_left(), _POST_TIMEOUT_S)
        try:
            headers, body = self._headers(delivery), delivery.body.encode()
            private = self.allow_private
            answer, _ = request("POST", delivery.url, headers, body, allow_private=private, within=within)
        except AddressRefusedError as refused:
            self._give_up(delivery, refused.message, refused.fix)
            return
        except Exception as error:  # noqa: BLE001 - whatever a receiver does, the next one is served
            self._fail(delivery, one_line(str(error)) or type(error).__name__, is_busy=True)
            return
        status, pause = answer.status, answer.getheader("Retry-After", "")
        text = f"the receiver answered {status}"
        if status in _OK:
            self.outbox.remove(delivery)
        elif status == _GONE:
            self._give_up(delivery, f"{text}, gone", "remove the address from the configuration")
        elif status in _REDIRECTS:
            self._give_up(delivery, f"{text}, a redirect, which is not followed", "use the new address")
        else:
            is_busy = status in _BUSY or status not in _CLIENT_ERRORS
            retry_after = min(float(pause), _MAX_RETRY_AFTER_S) if pause.isdecimal() else None
            self._fail(delivery, text, is_busy=is_busy, retry_after=retry_after)

    def _fail(
        self, delivery: Delivery, error: str, *, is_busy: bool, retry_after: float | None = None
    ) -> None:
        if delivery.attempts > len(DELAYS_S):
            self._give_up(delivery, error, "check the receiver")
        else:
            delay = DELAYS_S[delivery.attempts - 1] if retry_after is None else retry_after
            self.outbox.retry_later(delivery, self.clock() + delay, error, all_of_url=is_busy)

    def _give_up(self, delivery: Delivery, error: str, fix: str) -> None:
        # With it, what waited as long for the same receiver, which may have deferred everything: otherwise
        # one message would be given up each day, while a thousand a day may come.
        others = self.outbox.remove(delivery, also_before=self.clock() - sum(DELAYS_S)) - 1
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
        if self.secret:
            from standardwebhooks.webhooks import Webhook  # noqa: PLC0415 - an extra

            headers["webhook-signature"] = Webhook(self.secret).sign(delivery.message, now, delivery.body)
        return headers

    def _warn_sometimes(self, about: str, text: str, fix: str) -> None:
        """Warn about each receiver now and then: a thousand messages to a dead one are one warning."""
        now = time.monotonic()
        if about not in self._warned or now - self._warned[about] > _WARN_EVERY_S:
            self._warned[about] = now
            self.warn(text, fix)


def request(
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: bytes = b"",
    *,
    allow_private: bool,
    within: float,
    max_bytes: int = 0,
) -> tuple[http.client.HTTPResponse, bytes]:
    """Send one request; return the answer, and of its content one byte more than `max_bytes` at most.

    The host's name is resolved once, and the connection is made to an IP address that was checked. Redirects
    are not followed, proxies are not used. Raises AddressRefusedError and UndeliveredError.
    """
    deadline = time.monotonic() + within
    address = parse_address(url, allow_http=allow_private)
    sent = {"User-Agent": "briter-worker", **headers}
    if address.username or address.password:
        pair = f"{unquote(address.username or '')}:{unquote(address.password or '')}"
        sent["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    connection = kind(address.hostname or "", address.port)
    target = (address.path or "/") + (f"?{address.query}" if address.query else "")
    watchdog = None
    try:
        place = resolve(address, allow_private=allow_private)[0]
        connection.sock = socket.create_connection(place, timeout=within)
        if address.scheme == "https":
            tls = ssl.create_default_context()
            connection.sock = tls.wrap_socket(connection.sock, server_hostname=address.hostname)
        # The timeout of a socket bounds one read. A receiver may send a byte at a time.
        watchdog = threading.Timer(deadline - time.monotonic(), _shut_down, [connection.sock])
        watchdog.start()
        connection.request(method, target, body or None, sent)
        response = connection.getresponse()
        content = response.read(max_bytes + 1) if max_bytes else b""
        if time.monotonic() >= deadline:
            raise TimeoutError  # what was cut off by the watchdog is no answer
    except (OSError, http.client.HTTPException) as error:
        text = str(error) or type(error).__name__
        if time.monotonic() >= deadline or isinstance(error, TimeoutError):
            text = f"no answer within {within:.0f} s"
        raise UndeliveredError(text) from None
    else:
        return response, content
    finally:
        if watchdog is not None:
            watchdog.cancel()
        connection.close()


def _shut_down(connected: socket.socket) -> None:
    # Not the method of an SSL socket, which the other thread is using.
    with suppress(OSError):  # the receiver has closed it
        socket.socket.shutdown(connected, socket.SHUT_RDWR)
