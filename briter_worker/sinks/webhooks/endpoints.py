"""Whom to tell: addresses, what may be reached at them, and what of an address may be shown."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterable

PUBLISHED = "published"
DEAD_LETTERED = "dead-lettered"
CONDITION = "condition"
TOPICS = frozenset({PUBLISHED, DEAD_LETTERED, CONDITION})
_PORTS = {"https": 443, "http": 80}
MAX_URL = 2000
_ALSO_INSIDE = tuple(
    ipaddress.ip_network(network)
    for network in (
        "168.63.129.16/32",  # Azure's platform: a public number that each of its machines reaches as its host
        # Not all of these are private to every Python.
        *("0.0.0.0/8", "100.64.0.0/10", "192.0.0.0/24", "192.88.99.0/24", "198.18.0.0/15", "240.0.0.0/4"),
        # All of `::/8` but NAT64's: IPv4 numbers written as IPv6 ones, in ways that nobody uses any more.
        *(
            "::/8",
            "64:ff9b:1::/48",
            "100::/64",
            "2001::/23",
            "3fff::/20",
            "5f00::/16",
            "fc00::/7",
            "fec0::/10",
        ),
    )
)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class AddressRefusedError(Exception):
    """Nothing is sent there; the text says why, without anything secret of the address."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One of the site's receivers, and what it wants to hear of."""

    url: str
    topics: frozenset[str]

    @classmethod
    def of(cls, text: str) -> Self:
        """`text` may end in `#` and the topics wanted, with `+` between them; without, it is all of them."""
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
    def of(cls, url: str, *, allow_http: bool) -> Self:
        """Raises AddressRefusedError."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise AddressRefusedError("it is no address such as https://example.org/hook") from None
        if parts.scheme not in ("https", "http") or not parts.hostname:
            raise AddressRefusedError("it is no address such as https://example.org/hook")
        if parts.scheme == "http" and not allow_http:
            raise AddressRefusedError("it has to begin with https://")
        if not re.fullmatch(r"[!-~]+", url) or len(url) > MAX_URL:
            raise AddressRefusedError("it has characters that no address has, or too many of them")
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return cls(
            parts.scheme,
            parts.hostname,
            _PORTS[parts.scheme] if port is None else port,
            target,
            unquote(parts.username or ""),
            unquote(parts.password or ""),
        )


def origin_of(url: str) -> str:
    """Scheme, host and port: what may be shown of a URL, as the rest is often a secret."""
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return "an address that is none"
    return f"{parts.scheme}://{parts.hostname}{port}" if parts.hostname else "an address that is none"


def check(addresses: Iterable[str]) -> None:
    """Raises AddressRefusedError when any of these numbers leads into this machine or its network."""
    for number in addresses:
        if not _is_public(ipaddress.ip_address(number.partition("%")[0])):
            raise AddressRefusedError(
                f"its host is {number}, which is inside this machine's network. "
                "Fix: use a public address, or set BRITER_WEBHOOK_ALLOW_PRIVATE=true"
            )


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if address.version == 6:  # noqa: PLR2004 - the protocol's number
        if address in _NAT64:
            return _is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        # Ways to write an IPv4 address as another one; no resolver answers with them.
        if address.ipv4_mapped or address.sixtofour or address.teredo:
            return False
    inside = address.is_multicast or any(address in network for network in _ALSO_INSIDE)
    return address.is_global and not inside
