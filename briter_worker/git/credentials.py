"""Which secrets git's configuration holds, so that nobody shows them who repeats an address by parts.

What some secrets look like is known (`errors.redacted`). Here it is known what they *are*: the site's
addresses may have a password with a slash in it, or a token in their path, which looks like anything.
"""

from __future__ import annotations

import base64
import html
import re
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, unquote

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from briter_worker.git.environment import Setting

LISTED = (
    r"^((remote|lfs)\.(.*\.)?(lfs)?(push)?url|(remote|http)\.(.*\.)?proxy|url\..*\.(push)?insteadof"
    r"|http\.(.*\.)?extraheader|credential\.(.*\.)?helper)$"
)
"""The keys that hold an address, in their value or in their own middle, and those of helpers and headers."""
_SHORTEST = 4
"""Shorter ones are hidden together with their user only: they are part of too many words."""
_ORDINARY = frozenset(
    {"git", "token", "oauth2", "x-access-token", "x-token-auth", "x-oauth-basic", "gitlab-ci-token", "user"}
    | {"http", "https", "main", "origin", "anonymous", "private", "basic", "bearer"}
)
"""What stands where a secret may, and is none."""
_TELLING = re.compile(
    r"(?:^|[-_.])(?:(?:api)?keys?|tokens?|secrets?|(?:web)?hooks?|o?auth2?)$", re.IGNORECASE
)
"""After such a part of a path comes what opens it."""
_RANDOM = 16
_HOST = re.compile(r"(?:\[[0-9a-f:.]+\]|localhost|[\w-]+(?:\.[\w-]+)+)(?::\d*)?", re.IGNORECASE)
_BESIDE_SSH = re.compile(r"(?P<userinfo>[^/@]+)@(?P<host>\[[^\]/]+\]|[^/:@\[\]]+):")
_SAID = re.compile(r"(?:pass\w*|token|secret)\s*[=:]\s*[\"']?([^\s;&\"']+)", re.IGNORECASE)
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


def secrets_in(settings: Iterable[Setting]) -> frozenset[str]:
    """Every spelling of each secret that these settings hold."""
    found: set[str] = set()
    for key, value in settings:
        _, _, rest = key.partition(".")
        middle, _, name = rest.rpartition(".")
        found.update(_of_address(middle))
        if name == "extraheader":
            found.update(value.partition(":")[2].split())
        elif name == "helper":
            found.update(_SAID.findall(value))
        else:
            found.update(_of_address(value))
    spelt = {spelling for secret in found for spelling in _spellings(secret)}
    return frozenset(each for each in spelt if len(each) >= _SHORTEST and each.lower() not in _ORDINARY)


def _spellings(secret: str) -> Iterator[str]:
    plain = unquote(secret)
    for each in {secret, plain}:
        yield from (each, quote(each, safe=""), quote(each), html.escape(each))


def _of_address(address: str) -> Iterator[str]:
    """The secrets of an URL, or of what `ssh` takes; of a path, none: it is no address of anybody's."""
    scheme, given, rest = address.partition("://")
    if not given:
        beside = _BESIDE_SSH.match(address)
        if beside:
            yield from _of_user(beside["userinfo"], alone=False)
        return
    if scheme.endswith("file"):
        return
    userinfo, rest = _split(rest)
    yield from _of_user(userinfo, alone=not scheme.endswith("ssh"))
    place, hidden, more = _cut(rest)
    yield from _of_path(place.split("/")[1:])
    if hidden:
        yield more
        for part in re.split("[#?]", more):
            yield from (value for _, value in parse_qsl(part))
            yield part


def _split(rest: str) -> tuple[str, str]:
    """The part before the last @ that ends it, and the part after: the password may hold any character."""
    authority = _cut(rest)[0].partition("/")[0]
    before, given, host = authority.rpartition("@")
    if given and _HOST.fullmatch(host):
        return before, rest[len(before) + 1 :]
    if not given and _HOST.fullmatch(authority):
        return "", rest
    before, _, after = rest.rpartition("@")
    return before, after


def _cut(rest: str) -> tuple[str, str, str]:
    found = re.search("[?#]", rest)
    return (rest[: found.start()], found[0], rest[found.end() :]) if found else (rest, "", "")


def _of_user(userinfo: str, *, alone: bool) -> Iterator[str]:
    """`alone`: a user without a password is one, as hosts take a token there."""
    user, given, password = userinfo.partition(":")
    if not userinfo:
        return
    if not given:
        if alone or _is_random(user):
            yield from _parts(user)
        return
    yield userinfo
    yield from _parts(password)
    # As in a header; where it ends depends on what follows it, so without its end.
    yield base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode().rstrip("=")
    if password in {"", "x", "x-oauth-basic"} or _is_random(user):
        yield from _parts(user)


def _parts(secret: str) -> Iterator[str]:
    """Also by itself, as whoever reads the address otherwise than we do takes a part for a host or a port."""
    yield secret
    for each in (secret, unquote(secret)):
        yield from re.split("[/:@?#]", each)


def _of_path(parts: list[str]) -> Iterator[str]:
    for before, part in zip(["", *parts], parts, strict=False):
        name = part.removesuffix(".git")
        if _TELLING.search(before) or _is_random(name):
            yield name


def _is_random(text: str) -> bool:
    """Whether it looks drawn, not named: letters and digits in one long piece."""
    pieces = re.split("[-_.~]", text)
    longest = max(pieces, key=len)
    mixed = re.search(r"\d", longest) and re.search("[A-Za-z]", longest)
    return bool(_UUID.fullmatch(text)) or len(longest) >= (_RANDOM if mixed else 2 * _RANDOM)
