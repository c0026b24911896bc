"""Log in by https with the first request, where the credentials are known.

Git asks without credentials first, and again with them: one round trip more for each command. Git 2.46 can do
without (`http.proactiveAuth`), but then fails where no helper has any credentials. So the worker asks the
helpers itself, as git does (`git credential fill`), and has git send the answer as a header. The header is in
git's environment, for this one host, and no redirect is followed with it. A host that does not accept the
header is asked again as ever, by git alone.
"""

from __future__ import annotations

import base64
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from briter_worker.git.configuration import Setting

_KEEP_S = 60.0
_AUTHORIZATION = re.compile(r"http\.(?:.*\.)?extraheader", re.DOTALL)
_NOT_ACCEPTED = re.compile(
    r"returned error: (?:30\d|401|403)|Authentication failed|could not read (?:Username|Password)|redirect",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Login:
    """Credentials for the host of one URL. The repr shows no secret."""

    host: str
    """Scheme, name and port."""
    username: str
    password: str

    def __repr__(self) -> str:
        return f"Login({self.host!r})"

    def as_address(self) -> list[Setting]:
        """Return the secrets in the form in which `find_secrets` knows every spelling of them."""
        user, password = quote(self.username, safe=""), quote(self.password, safe="")
        return [("remote.login.url", self.host.replace("://", f"://{user}:{password}@"))]

    def _encoded(self) -> str:
        return base64.b64encode(os.fsencode(f"{self.username}:{self.password}")).decode()

    def settings(self) -> list[Setting]:
        """Return the settings with which git logs in at once, and asks no helper where that fails."""
        return [
            (f"http.{self.host}/.extraHeader", f"Authorization: Basic {self._encoded()}"),
            ("http.followRedirects", "false"),
            ("credential.helper", ""),
        ]

    def described(self, url: str) -> bytes:
        """Return what `git credential approve` reads."""
        return os.fsencode(f"url={url}\nusername={self.username}\npassword={self.password}\n\n")


class Logins:
    """The credentials that remotes accepted a moment ago: the helpers need not be asked for each command."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, Login]] = {}
        self._refused: set[str] = set()

    def get(self, url: str, now: float) -> Login | None:
        """Return what was accepted a moment ago."""
        until, login = self._known.get(url, (0.0, None))
        return login if now < until else None

    def keep(self, url: str, login: Login, now: float) -> None:
        """Remember credentials that were accepted."""
        self._known[url] = now + _KEEP_S, login

    def forget(self, url: str, *, is_fresh: bool) -> None:
        """Forget credentials that were not accepted; if they were just found, leave the login to git."""
        self._known.pop(url, None)
        if is_fresh:
            self._refused.add(url)

    def is_refused(self, url: str) -> bool:
        """Return True if the host did not accept credentials with the first request."""
        return url in self._refused


def parse_login(url: str, filled: bytes) -> Login | None:
    """Return what `git credential fill` found for the URL; None if a part is missing."""
    fields = dict(line.partition("=")[::2] for line in os.fsdecode(filled).splitlines())
    username, password = fields.get("username"), fields.get("password")
    if not username or not password:
        return None
    return Login(f"https://{urlsplit(url).netloc.rpartition('@')[2]}", username, password)


def has_own_header(settings: Iterable[Setting]) -> bool:
    """Return True if git's configuration logs in by a header already."""
    headers = [value for key, value in settings if _AUTHORIZATION.fullmatch(key)]
    return any(value.lower().startswith("authorization:") for value in headers)


def is_not_accepted(text: str) -> bool:
    """Return True if git's words say that the host wants another login, or is elsewhere: nothing was sent."""
    return _NOT_ACCEPTED.search(text) is not None


def add_settings(variables: Mapping[str, str], settings: Iterable[Setting]) -> dict[str, str]:
    """Return git's environment with more settings, which win over those that it has."""
    count, made = int(variables["GIT_CONFIG_COUNT"]), dict(variables)
    for number, (key, value) in enumerate(settings, count):
        made |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
        made["GIT_CONFIG_COUNT"] = str(number + 1)
    return made
