"""One POST to an address that may be anybody's: within a bounded time, and never into our own network.

A name is resolved once, every number that it stands for is checked, and the connection is made to one of
those; so a name that is asked again cannot lead elsewhere. Redirects are not followed, proxies not used, and
of the answer only the status, the headers and a few KiB are read.
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

from briter_worker.sinks.webhooks.endpoints import Address, AddressRefusedError, check

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_AT_MOST = 10.0
_READ = 8192
"""As much of an answer's body is read, so that the connection can be used again; a longer one closes it."""
_LONGEST_RETRY_AFTER = 86_400.0


class UndeliveredError(Exception):
    """Nobody answered; the text says why, without anything secret of the address."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the receiver said."""

    status: int
    retry_after: float | None
    """In how many seconds it wants to be asked again."""


class Poster:
    """Sends, one POST after another. Use it in one thread."""

    def __init__(self, *, allow_private: bool) -> None:
        self._allow_private = allow_private
        self._deadline = math.inf
        self._pool = httpcore.ConnectionPool(
            ssl_context=ssl.create_default_context(),
            network_backend=_CheckedNetwork(self),
            max_keepalive_connections=4,
            keepalive_expiry=5.0,
        )

    @property
    def allows_private(self) -> bool:
        """Whether receivers may be inside this machine's network."""
        return self._allow_private

    def remaining(self) -> float:
        """Seconds that the running POST has left."""
        return self._deadline - time.monotonic()

    def post(
        self, url: str, headers: Mapping[bytes | str, bytes | str], body: bytes, *, within: float = _AT_MOST
    ) -> Answer:
        """The receiver's answer. Raises UndeliveredError, and AddressRefusedError when it is never tried."""
        address = Address.of(url, allow_http=self._allow_private)
        self._deadline = time.monotonic() + min(within, _AT_MOST)
        sent: dict[bytes | str, bytes | str] = {
            "User-Agent": "briter-worker",
            "Content-Length": str(len(body)),
            **headers,
        }
        if address.user or address.password:
            pair = f"{address.user}:{address.password}".encode()
            sent["Authorization"] = f"Basic {base64.b64encode(pair).decode()}"
        try:
            return self._post(address, sent, body)
        except AddressRefusedError:
            raise
        except httpcore.TimeoutException:
            raise UndeliveredError(f"no answer within {min(within, _AT_MOST):.0f} s") from None
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError, ssl.SSLError) as error:
            raise UndeliveredError(str(error) or type(error).__name__) from None

    def close(self) -> None:
        """Let go of the connections."""
        self._pool.close()

    def _post(self, address: Address, headers: Mapping[bytes | str, bytes | str], body: bytes) -> Answer:
        default = {"https": 443, "http": 80}[address.scheme]
        name = f"[{address.host}]" if ":" in address.host else address.host
        host = name if address.port == default else f"{name}:{address.port}"
        url = httpcore.URL(scheme=address.scheme, host=address.host, port=address.port, target=address.target)
        with self._pool.stream(
            "POST", url, headers={"Host": host, **headers}, content=body, extensions=_TIMEOUTS
        ) as response:
            read = 0
            for part in response.iter_stream():
                read += len(part)
                if read > _READ:
                    break
            found = {name.lower(): value for name, value in response.headers}
            return Answer(response.status, _retry_after(found.get(b"retry-after", b"").decode("latin-1")))


_TIMEOUTS = {"timeout": {"connect": _AT_MOST, "read": _AT_MOST, "write": _AT_MOST, "pool": _AT_MOST}}


class _CheckedNetwork(httpcore.NetworkBackend):
    """Connects to numbers that were checked, not to names."""

    def __init__(self, poster: Poster) -> None:
        self._poster = poster
        self._sockets = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        """Raises AddressRefusedError when any number of the name is inside our network."""
        numbers = _resolve(host, port)
        if not self._poster.allows_private:
            check(numbers)
        failure: Exception = httpcore.ConnectError(f"{host} has no address")
        for number in numbers:
            try:
                limit = _bounded(self._poster, timeout)
                stream = self._sockets.connect_tcp(number, port, limit, local_address, socket_options)
                return _BoundedStream(stream, self._poster)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure


class _BoundedStream(httpcore.NetworkStream):
    """However slowly the other side talks, the whole POST ends in time."""

    def __init__(self, stream: httpcore.NetworkStream, poster: Poster) -> None:
        self._stream = stream
        self._poster = poster

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _bounded(self._poster, timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _bounded(self._poster, timeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        limit = _bounded(self._poster, timeout)
        return _BoundedStream(self._stream.start_tls(ssl_context, server_hostname, limit), self._poster)

    def get_extra_info(self, info: str) -> Any:  # noqa: ANN401 - as in httpcore
        return self._stream.get_extra_info(info)


def _bounded(poster: Poster, timeout: float | None) -> float:
    left = poster.remaining()
    if left <= 0:
        raise httpcore.ReadTimeout
    return left if timeout is None else min(left, timeout)


def _resolve(host: str, port: int) -> list[str]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        said = error.strerror if isinstance(error, OSError) else None
        raise httpcore.ConnectError(f"{host}: {said or 'no name of a host'}") from None
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
    return min(max(seconds, 1.0), _LONGEST_RETRY_AFTER)
