"""Which IP addresses are inside our own network, and what is shown of an address."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from briter_worker.sinks.webhooks import (
    AddressRefusedError,
    is_public,
    origin_of,
    parse_address,
    parse_receiver,
)

INSIDE = {
    "this machine": ["127.0.0.1", "127.255.255.254", "0.0.0.0", "::1", "::"],  # noqa: S104 - values
    "private networks": ["10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "fd00::1", "fec0::1"],
    "the link, and clouds' metadata": ["169.254.169.254", "fe80::1", "fe80::1%eth0", "fd00:ec2::254"],
    "clouds' platforms": ["168.63.129.16", "192.0.0.192", "100.100.100.200"],
    "carrier-grade NAT": ["100.64.0.1", "100.127.255.255"],
    "multicast": ["224.0.0.1", "239.255.255.250", "255.255.255.255", "ff02::1", "ff0e::1"],
    "reserved": ["240.0.0.1", "192.0.2.1", "198.18.0.1", "203.0.113.1", "2001:db8::1"],
    "IPv4 in IPv6": ["::ffff:8.8.8.8", "::ffff:127.0.0.1", "2002:7f00:1::", "2001:0:1::1"],
    "IPv4 in IPv6, in the old way": ["::127.0.0.1", "::10.0.0.1", "::ffff:0:10.0.0.1"],
    "NAT64": ["64:ff9b::127.0.0.1", "64:ff9b::10.0.0.1"],
}
OUTSIDE = [
    "8.8.8.8",
    "1.1.1.1",
    "100.63.255.255",
    "100.128.0.1",
    "172.32.0.1",
    "2606:4700::1111",
    "64:ff9b::8.8.8.8",
]


@pytest.mark.parametrize(
    ("kind", "number"), [(kind, each) for kind, numbers in INSIDE.items() for each in numbers]
)
def test_a_private_address_is_refused(kind: str, number: str) -> None:  # noqa: ARG001 - names the case
    assert not is_public(ipaddress.ip_address(number.partition("%")[0]))


@pytest.mark.parametrize("number", OUTSIDE)
def test_a_public_address_may_be_called(number: str) -> None:
    assert is_public(ipaddress.ip_address(number))


@given(st.ip_addresses())
def test_no_address_that_python_calls_private_passes(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    translated = address in ipaddress.ip_network("64:ff9b::/96") if address.version == 6 else False
    is_outside = address.is_global and not address.is_private and not address.is_multicast
    assert not is_public(address) or translated or is_outside


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://hooks.example.org/services/T0/B0/SECRET?token=x", "https://hooks.example.org"),
        ("https://ada:pa55@example.org:8443/x", "https://example.org:8443"),
        ("nonsense SECRET", "an invalid address"),
        ("https://[::1", "an invalid address"),
        ("https://example.org:SECRET/", "an invalid address"),
    ],
)
def test_only_the_host_of_an_address_is_shown(url: str, said: str) -> None:
    assert origin_of(url) == said


@pytest.mark.parametrize(
    "url", ["https://e.org/a b", "https://e.org/\n", "https://e.org/é", f"https://e.org/{'x' * 2000}"]
)
def test_a_text_that_would_break_a_request_is_no_address(url: str) -> None:
    with pytest.raises(AddressRefusedError):
        parse_address(url, allow_http=True)


def test_the_topics_of_a_receiver_follow_its_address() -> None:
    wanted = parse_receiver("https://e.org/x#published+condition")
    assert wanted == ("https://e.org/x", frozenset({"published", "condition"}))
    assert parse_receiver("https://e.org/x")[1] == {"published", "dead-lettered", "condition", "updated"}
