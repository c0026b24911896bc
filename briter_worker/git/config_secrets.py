"""Find the secrets in git's configuration, so that they can be redacted.

`redaction` knows what some secrets look like. This module knows what they are: a password with a slash in it,
or a token in the path of a URL, looks like anything.
"""

from __future__ import annotations

import base64
import html
import re
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, unquote

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_KEYS = re.compile(
    r"((remote|lfs)\.(.*\.)?(lfs)?(push)?url|(remote|http)\.(.*\.)?proxy|url\..*\.(push)?insteadof"
    r"|http\.(.*\.)?extraheader|credential\.(.*\.)?helper)",
    re.DOTALL,
)
"""Keys with a URL in their value or between their dots, and those of headers and credential helpers."""
_MIN_LENGTH = 4
"""A shorter secret is hidden together with its user only: alone it is part of too many words."""
_NOT_SECRET = frozenset(
    {"git", "token", "oauth2", "x-access-token", "x-token-auth", "x-oauth-basic", "gitlab-ci-token", "user"}
    | {"http", "https", "main", "origin", "anonymous", "private", "basic", "bearer"}
)
_RANDOM_LENGTH = 16
_HOST = re.compile(r"(?:\[[0-9a-f:.]+\]|localhost|[\w-]+(?:\.[\w-]+)+)(?::\d*)?", re.IGNORECASE)
_SCP_STYLE = re.compile(r"(?P<userinfo>[^/@]+)@(?P<host>\[[^\]/]+\]|[^/:@\[\]]+):")
_PASSWORD = re.compile(r"(?:pass\w*|token|secret)\s*[=:]\s*[\"']?([^\s;&\"']+)", re.IGNORECASE)
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


def find_secrets(settings: Iterable[tuple[str, str]]) -> frozenset[str]:
    """Return every spelling of each secret that these settings hold."""
    found: set[str] = set()
    for key, value in settings:
        if not _KEYS.fullmatch(key):
            continue
        middle, _, name = key.partition(".")[2].rpartition(".")
        found.update(_in_url(middle))
        if name == "extraheader":
            found.update(value.partition(":")[2].split())
        elif name == "helper":
            found.update(_PASSWORD.findall(value))
        else:
            found.update(_in_url(value))
    spelt = {
        spelling
        for secret in found
        for plain in (secret, unquote(secret))
        for spelling in (plain, quote(plain, safe=""), quote(plain), html.escape(plain))
    }
    return frozenset(each for each in spelt if len(each) >= _MIN_LENGTH and each.lower() not in _NOT_SECRET)


def _in_url(url: str) -> Iterator[str]:
    """Yield the secrets of a URL, or of an scp-style address; the path of a file holds none."""
    scheme, given, rest = url.partition("://")
    if not given:
        if address := _SCP_STYLE.match(url):
            yield from _in_userinfo(address["userinfo"], lone_user=False)
        return
    if scheme.endswith("file"):
        return
    userinfo, rest = _split_userinfo(rest)
    yield from _in_userinfo(userinfo, lone_user=not scheme.endswith("ssh"))
    place, more = _split_query(rest)
    yield from filter(_is_random, (part.removesuffix(".git") for part in place.split("/")[1:]))
    yield more
    for part in re.split("[#?]", more):
        yield from (value for _, value in parse_qsl(part))
        yield part


def _split_userinfo(rest: str) -> tuple[str, str]:
    """Return the part before the @ that ends it, and the part after; a password may hold any character."""
    authority = _split_query(rest)[0].partition("/")[0]
    before, given, host = authority.rpartition("@")
    if given and _HOST.fullmatch(host):
        return before, rest[len(before) + 1 :]
    if not given and _HOST.fullmatch(authority):
        return "", rest
    before, _, after = rest.rpartition("@")
    return before, after


def _split_query(rest: str) -> tuple[str, str]:
    found = re.search("[?#]", rest)
    return (rest[: found.start()], rest[found.end() :]) if found else (rest, "")


def _in_userinfo(userinfo: str, *, lone_user: bool) -> Iterator[str]:
    """Yield its secrets. `lone_user`: a user without a password is one, as some hosts take a token there."""
    user, given, password = userinfo.partition(":")
    if not userinfo:
        return
    if not given:
        if lone_user or _is_random(user):
            yield from _with_parts(user)
        return
    yield userinfo
    yield from _with_parts(password)
    # As in a header. The end of the base64 text depends on what follows, so it is left out.
    yield base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode().rstrip("=")
    if password in {"", "x", "x-oauth-basic"} or _is_random(user):
        yield from _with_parts(user)


def _with_parts(secret: str) -> Iterator[str]:
    """Yield also the parts: another reader of the URL may take one for a host or a port."""
    yield secret
    for each in (secret, unquote(secret)):
        yield from re.split("[/:@?#]", each)


def _is_random(text: str) -> bool:
    """Return True if the text looks generated: letters and digits in one long piece."""
    longest = max(re.split("[-_.~]", text), key=len)
    mixed = re.search(r"\d", longest) and re.search("[A-Za-z]", longest)
    return bool(_UUID.fullmatch(text)) or len(longest) >= (_RANDOM_LENGTH if mixed else 2 * _RANDOM_LENGTH)
