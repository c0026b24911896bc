"""The HTTP client of the webhooks: one POST to an address that anybody may have chosen.

A name is resolved once, every IP address that it has is checked, and the connection is made to one of those;
so a name cannot lead elsewhere when it is resolved again. Redirects are not followed, proxies are not used,
the whole POST is bounded in time, and only status, headers and a few KiB of the answer are read.
"""

from __future__ import annotations

import base64
import math
import socket
import ssl
import time
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

import httpcore

from briter_worker.sinks.webhook_addresses import Address, check_public

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    Headers = Mapping[bytes | str, bytes | str]

_TIMEOUT_S = 10.0
_MAX_BODY_BYTES = 8192
"""A body of this size is read, so that the connection can be used again; a longer one closes it."""
_MAX_RETRY_AFTER_S = 86_400.0
_TIMEOUTS = {"timeout": dict.fromkeys(("connect", "read", "write", "pool"), _TIMEOUT_S)}


class UndeliveredError(Exception):
    """Nobody answered; the text says why, without anything secret of the address."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The receiver's answer."""

    status: int
    retry_after: float | None
    """Seconds after which the receiver wants to be asked again."""


class WebhookClient:
    """Sends one POST after another. Not for two threads."""

    def __init__(self, *, allow_private: bool) -> None:
        self._allow_private = allow_private
        self._deadline = math.inf
        self._pool = httpcore.ConnectionPool(
            ssl_context=ssl.create_default_context(),
            network_backend=_CheckedNetwork(self, allow_private=allow_private),
            max_keepalive_connections=4,
            keepalive_expiry=5.0,
        )

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()

    def post(self, url: str, headers: Headers, body: bytes, *, within: float = _TIMEOUT_S) -> Answer:
        """Return the receiver's answer.

        Raises UndeliveredError, and AddressRefusedError if the address is never called.
        """
        address = Address.parse(url, allow_http=self._allow_private)
        limit = min(within, _TIMEOUT_S)
        self._deadline = time.monotonic() + limit
        sent: dict[bytes | str, bytes | str] = {
            "Host": address.host_header,
            "User-Agent": "briter-worker",
            "Content-Length": str(len(body)),
            **headers,
        }
        if address.user or address.password:
            pair = f"{address.user}:{address.password}".encode()
            sent["Authorization"] = f"Basic {base64.b64encode(pair).decode()}"
        try:
            return self._send(address, sent, body)
        except httpcore.TimeoutException:
            raise UndeliveredError(f"no answer within {limit:.0f} s") from None
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
            raise UndeliveredError(str(error) or type(error).__name__) from None

    def _send(self, address: Address, headers: Headers, body: bytes) -> Answer:
        url = httpcore.URL(scheme=address.scheme, host=address.host, port=address.port, target=address.target)
        with self._pool.stream("POST", url, headers=headers, content=body, extensions=_TIMEOUTS) as response:
            size = 0
            for part in response.iter_stream():
                size += len(part)
                if size > _MAX_BODY_BYTES:
                    break
            found = {name.lower(): value for name, value in response.headers}
            return Answer(response.status, _retry_after(found.get(b"retry-after", b"").decode("latin-1")))

    def remaining(self, timeout: float | None) -> float:
        """Return the seconds that the next step of the POST may take."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise httpcore.ReadTimeout
        return left if timeout is None else min(left, timeout)


class _CheckedNetwork(httpcore.NetworkBackend):
    """Connects to IP addresses that were checked, not to names."""

    def __init__(self, client: WebhookClient, *, allow_private: bool) -> None:
        self._client = client
        self._allow_private = allow_private
        self._sockets = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        """Connect to the host. Raises AddressRefusedError if any of its IP addresses is private."""
        addresses = _resolve(host, port)
        if not self._allow_private:
            check_public(addresses)
        failure: Exception = httpcore.ConnectError(f"{host} has no IP address")
        for address in addresses:
            try:
                limit = self._client.remaining(timeout)
                stream = self._sockets.connect_tcp(address, port, limit, local_address, socket_options)
                return _BoundedStream(stream, self._client)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure


class _BoundedStream(httpcore.NetworkStream):
    """A connection on which the whole POST ends in time, however slowly the other side sends."""

    def __init__(self, stream: httpcore.NetworkStream, client: WebhookClient) -> None:
        self._stream = stream
        self._client = client

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._client.remaining(timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._client.remaining(timeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        limit = self._client.remaining(timeout)
        return _BoundedStream(self._stream.start_tls(ssl_context, server_hostname, limit), self._client)

    def get_extra_info(self, info: str) -> Any:  # noqa: ANN401 - as in httpcore
        return self._stream.get_extra_info(info)


def _resolve(host: str, port: int) -> list[str]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise httpcore.ConnectError(f"{host}: {reason or 'not the name of a host'}") from None
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


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
