"""Who is to be told, and whether they can be."""

from __future__ import annotations

import socket
import sqlite3
from importlib.util import find_spec
from typing import TYPE_CHECKING

from briter_worker.doctor.finding import ok, warning
from briter_worker.sinks.sqlite import open_to_read
from briter_worker.sinks.webhooks.endpoints import Address, AddressRefusedError, Endpoint, check, origin_of
from briter_worker.sinks.webhooks.outbox import waiting
from briter_worker.wiring import open_database

if TYPE_CHECKING:
    from collections.abc import Iterator

    from briter_worker.doctor.finding import Finding
    from briter_worker.settings import Settings

_CHECK = "webhooks"
_NEEDED = ("httpcore", "standardwebhooks")


def examine(settings: Settings) -> Iterator[Finding]:
    """Nothing where nobody is told. None of it keeps a post from being published: these are warnings."""
    urls = [*(Endpoint.of(url).url for url in settings.webhook_urls), settings.build_hook_url]
    urls = [url for url in urls if url]
    found = list(_configuration(settings, urls))
    for url in urls:
        try:
            _reachable(url, allow_private=settings.webhook_allow_private)
        except AddressRefusedError as refused:
            reason, _, fix = str(refused).partition(" Fix: ")
            fix = fix or "correct BRITER_WEBHOOK_URLS or BRITER_BUILD_HOOK_URL"
            found.append(warning(_CHECK, f"{origin_of(url)} gets nothing: {reason}", fix))
    found += _unsent(settings)
    if urls and not found:
        found.append(ok(_CHECK, ", ".join(dict.fromkeys(origin_of(url) for url in urls))))
    yield from found


def _configuration(settings: Settings, urls: list[str]) -> Iterator[Finding]:
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if urls and missing:
        text = f"webhooks are stored but not sent, as {', '.join(missing)} is missing"
        yield warning(_CHECK, text, "pip install 'briter-worker[webhooks]'")
    if settings.webhook_urls and settings.webhook_template == "json" and not settings.webhook_secret:
        yield warning(
            _CHECK,
            "webhooks are not signed: whoever knows a receiver's address can send what it takes for ours",
            "set BRITER_WEBHOOK_SECRET here and at the receivers: echo whsec_$(openssl rand -base64 32)",
        )


def _reachable(url: str, *, allow_private: bool) -> None:
    """Raises AddressRefusedError when nothing would be sent there as it is now."""
    address = Address.of(url, allow_http=allow_private)
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise AddressRefusedError("its host has no address. Fix: correct it, or see to the DNS") from None
    if not allow_private:
        check(str(sockaddr[0]) for *_, sockaddr in found)


def _waiting(settings: Settings) -> list[tuple[str, int, str]]:
    if settings.database_url:
        from briter_worker.sinks.postgres.outbox import waiting as waiting_rows  # noqa: PLC0415 - for a cluster only

        return waiting_rows(open_database(settings))
    if not settings.webhooks_mark.exists():
        return []
    connection = open_to_read(settings.webhooks_path)
    try:
        return list(waiting(connection))
    finally:
        connection.close()


def _unsent(settings: Settings) -> Iterator[Finding]:
    try:
        rows = _waiting(settings)
    except sqlite3.Error as error:
        text = f"{settings.webhooks_path} cannot be read: {error}"
        yield warning(_CHECK, text, "give the worker's user access to it")
        return
    except OSError:
        return  # the database: that it cannot be read is told already
    for url, count, said in rows:
        what = "1 message waits" if count == 1 else f"{count} messages wait"
        yield warning(
            _CHECK, f"{what} for {origin_of(url)}: {said or 'being sent'}", "see to the receiver, or wait"
        )
