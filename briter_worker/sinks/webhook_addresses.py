"""Addresses of receivers: which may be called, and what of an address may be shown."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self
from urllib.parse import unquote, urlsplit

from briter_worker.errors import FixableError

if TYPE_CHECKING:
    from collections.abc import Iterable

PUBLISHED = "published"
DEAD_LETTERED = "dead-lettered"
CONDITION = "condition"
TOPICS = frozenset({PUBLISHED, DEAD_LETTERED, CONDITION})
MAX_URL_LENGTH = 2000
_PORTS = {"https": 443, "http": 80}
_NO_ADDRESS = "the text is no address such as https://example.org/hook"
_CORRECT_IT = "correct the address"
_ALSO_PRIVATE = tuple(
    ipaddress.ip_network(network)
    for network in (
        "168.63.129.16/32",  # Azure's platform, which each of its machines reaches
        # Not all of these are private to every version of Python.
        *("0.0.0.0/8", "100.64.0.0/10", "192.0.0.0/24", "192.88.99.0/24", "198.18.0.0/15", "240.0.0.0/4"),
        "::/8",  # except NAT64: IPv4 addresses written as IPv6 ones, in ways that nobody uses any more
        *("64:ff9b:1::/48", "100::/64", "2001::/23", "3fff::/20", "5f00::/16", "fc00::/7", "fec0::/10"),
    )
)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class AddressRefusedError(FixableError):
    """The address is never called. Neither message nor fix contains anything secret of it."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One of the site's receivers, and the topics that it wants."""

    url: str
    topics: frozenset[str]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the endpoint: a URL, and after `#` the topics joined by `+`. Without topics: all of them."""
        url, _, wanted = text.partition("#")
        return cls(url, frozenset(wanted.split("+")) & TOPICS or TOPICS)


@dataclass(frozen=True, slots=True)
class Address:
    """A URL in the parts that a request needs."""

    scheme: str
    host: str
    port: int
    target: str
    user: str
    password: str

    @classmethod
    def parse(cls, url: str, *, allow_http: bool) -> Self:
        """Return the parts of the URL. Raises AddressRefusedError."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise AddressRefusedError(_NO_ADDRESS, _CORRECT_IT) from None
        if parts.scheme not in _PORTS or not parts.hostname:
            raise AddressRefusedError(_NO_ADDRESS, _CORRECT_IT)
        if parts.scheme == "http" and not allow_http:
            raise AddressRefusedError("the address does not begin with https://", "use the https address")
        if not re.fullmatch(r"[!-~]+", url) or len(url) > MAX_URL_LENGTH:
            raise AddressRefusedError(
                "the address has characters that no address has, or too many of them", _CORRECT_IT
            )
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return cls(
            parts.scheme,
            parts.hostname,
            _PORTS[parts.scheme] if port is None else port,
            target,
            unquote(parts.username or ""),
            unquote(parts.password or ""),
        )

    @property
    def host_header(self) -> str:
        """Return the value of the Host header."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.port == _PORTS[self.scheme] else f"{name}:{self.port}"


def origin_of(url: str) -> str:
    """Return scheme, host and port. The rest of a URL is often a secret and is never shown."""
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return "an invalid address"
    return f"{parts.scheme}://{parts.hostname}{port}" if parts.hostname else "an invalid address"


def check_public(addresses: Iterable[str]) -> None:
    """Raise AddressRefusedError if any of these IP addresses is inside this machine's network."""
    for address in addresses:
        if not _is_public(ipaddress.ip_address(address.partition("%")[0])):
            raise AddressRefusedError(
                f"the IP address of the host is {address}, which is inside this machine's network",
                "use a public address, or set BRITER_WEBHOOK_ALLOW_PRIVATE=true",
            )


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return _is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        # IPv4 addresses written as IPv6 ones; no resolver answers with them.
        if address.ipv4_mapped or address.sixtofour or address.teredo:
            return False
    is_private = address.is_multicast or any(address in network for network in _ALSO_PRIVATE)
    return address.is_global and not is_private
