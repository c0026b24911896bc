"""Git's configuration in one place, and the secrets in it.

`errors` knows what some secrets look like. This module knows what they are: a password with a slash in it,
or a token in the path of a URL, looks like anything.
"""

from __future__ import annotations

import base64
import copy
import html
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, unquote

from git.config import get_config_path

from briter_worker.errors import conceal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
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
_PASSWORD = re.compile(r"(?:pass\w*|token|secret)\s*[=:]\s*[\"']?([^\s;&\"']+)", re.IGNORECASE)
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)

Setting = tuple[str, str]
"""A key of git's configuration, and its value."""


class Configuration:
    """Git's configuration in one place, and whether the files still are what it was read from."""

    def __init__(self, listed: bytes, place: Path) -> None:
        """Take what `git config --null --list --show-origin` printed."""
        fields = os.fsdecode(listed).split("\0")[:-1]
        self.settings: list[Setting] = []
        levels = (get_config_path(level) for level in ("system", "global", "user"))
        files = dict.fromkeys([f"{place}/config", f"{place}/.git/config", *levels])
        for origin, text in zip(fields[::2], fields[1::2], strict=True):
            kind, _, file = origin.partition(":")
            key, given, value = text.partition("\n")
            if kind == "file":
                self.settings.append((key, value if given else "true"))
                files[str(place / file)] = None
        self._files = tuple(map(Path, files))
        self._state = self._read_state()

    def for_clone(self, url: str) -> Configuration:
        """Return the configuration of another clone that this program made: the address is another one."""
        other, name = copy.copy(self), "remote.origin.url"
        other.settings = [*(each for each in self.settings if each[0] != name), (name, url)]
        return other

    def is_current(self) -> bool:
        """Return False if a file has changed since, or if one may be included that did not exist."""
        has_includes = any(key.startswith(("include.", "includeif.")) for key, _ in self.settings)
        return not has_includes and self._state == self._read_state()

    def _read_state(self) -> list[tuple[Path, int, int, int]]:
        found = []
        for file in self._files:
            with suppress(OSError):
                status = file.stat()
                found.append((file, status.st_ino, status.st_size, status.st_mtime_ns))
        return found


def normalize_key(key: str) -> str:
    """Return a key as git lists it: section and name in lower case, the part between them as it is."""
    section, _, rest = key.partition(".")
    middle, dot, name = rest.rpartition(".")
    return f"{section.lower()}.{middle}{dot}{name.lower()}"


def conceal_secrets(settings: Iterable[Setting]) -> None:
    """Hide the secrets that git's configuration and the proxy variables hold, in every text from now on."""
    proxies = [("http.proxy", os.environ[name]) for name in PROXIES if name in os.environ]
    conceal(find_secrets([*settings, *proxies]))


def find_secrets(settings: Iterable[Setting]) -> frozenset[str]:
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
    """Yield the secrets of a URL; the path of a file holds none, and an scp-style address neither."""
    scheme, given, rest = url.partition("://")
    if not given or scheme.endswith("file"):
        return
    # A password may hold any character, the @ that ends it, too.
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    is_host = _HOST.fullmatch(authority.rpartition("@")[2])
    userinfo, given, _ = (authority if is_host else rest).rpartition("@")
    user, has_password, password = userinfo.partition(":")
    # Some hosts take a token for the user.
    is_token = not scheme.endswith("ssh") if not has_password else password in {"", "x", "x-oauth-basic"}
    for secret in (password, user if is_token or _is_random(user) else ""):
        for each in (secret, unquote(secret)):  # and the parts: another reader may take one for a host
            yield from (each, *re.split("[/:@?#]", each))
    if has_password:
        yield userinfo
        # As in a header. The end of the base64 text depends on what follows, so it is left out.
        yield base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode().rstrip("=")
    place, *more = re.split("[?#]", rest[len(userinfo + given) :])
    yield from filter(_is_random, (part.removesuffix(".git") for part in place.split("/")[1:]))
    for part in more:
        yield from (part, *(value for _, value in parse_qsl(part)))


def _is_random(text: str) -> bool:
    """Return True if the text looks generated: letters and digits in one long piece."""
    longest = max(re.split("[-_.~]", text), key=len)
    mixed = re.search(r"\d", longest) and re.search("[A-Za-z]", longest)
    return bool(_UUID.fullmatch(text)) or len(longest) >= (_RANDOM_LENGTH if mixed else 2 * _RANDOM_LENGTH)
