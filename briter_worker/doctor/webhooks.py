"""Checks of the webhooks. They never stop a publication, so each problem is a warning."""

from __future__ import annotations

import socket
from importlib.util import find_spec
from typing import TYPE_CHECKING

from briter_worker.doctor.finding import ok, warning
from briter_worker.errors import FixableError
from briter_worker.sinks.webhook_addresses import (
    Address,
    AddressRefusedError,
    Endpoint,
    check_public,
    origin_of,
)
from briter_worker.sinks.webhooks import unsent
from briter_worker.wiring import open_outbox

if TYPE_CHECKING:
    from collections.abc import Iterator

    from briter_worker.doctor.finding import Finding
    from briter_worker.settings import Settings

_CHECK = "webhooks"


def examine(settings: Settings) -> Iterator[Finding]:
    """Yield the findings about webhooks; none if there are no webhooks."""
    urls = [*(Endpoint.parse(url).url for url in settings.webhook_urls), settings.build_hook_url]
    urls = [url for url in urls if url]
    found = list(_check_setup(settings, urls))
    for url in urls:
        try:
            _check_address(url, allow_private=settings.webhook_allow_private)
        except AddressRefusedError as refused:
            fix = refused.fix or "correct BRITER_WEBHOOK_URLS or BRITER_BUILD_HOOK_URL"
            found.append(warning(_CHECK, f"{origin_of(url)} gets nothing: {refused.message}", fix))
    found += _check_unsent(settings)
    if urls and not found:
        found.append(ok(_CHECK, ", ".join(dict.fromkeys(origin_of(url) for url in urls))))
    yield from found


def _check_setup(settings: Settings, urls: list[str]) -> Iterator[Finding]:
    if urls and settings.webhook_secret and find_spec("standardwebhooks") is None:
        message = "webhooks are stored but not sent: standardwebhooks is not installed"
        yield warning(_CHECK, message, "pip install 'briter-worker[webhooks]'")
    if settings.webhook_urls and settings.webhook_template == "json" and not settings.webhook_secret:
        yield warning(
            _CHECK,
            "webhooks are not signed, so that receivers cannot tell them from forged ones",
            "set BRITER_WEBHOOK_SECRET here and at the receivers: echo whsec_$(openssl rand -base64 32)",
        )


def _check_address(url: str, *, allow_private: bool) -> None:
    address = Address.parse(url, allow_http=allow_private)
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise AddressRefusedError("its host name has no IP address", "correct it, or check the DNS") from None
    if not allow_private:
        check_public(str(sockaddr[0]) for *_, sockaddr in found)


def _check_unsent(settings: Settings) -> Iterator[Finding]:
    try:
        rows = unsent(open_outbox(settings))
    except FixableError as problem:
        yield warning(_CHECK, problem.message, problem.fix)
        return
    except OSError:
        return  # another check reports that the database cannot be reached
    for url, count, problem_text in rows:
        what = "1 message waits" if count == 1 else f"{count} messages wait"
        message = f"{what} for {origin_of(url)}: {problem_text or 'being sent'}"
        yield warning(_CHECK, message, "check the receiver, or wait")
