"""Where a site is published to, and by which credentials: what may be written into the database.

It is shared, copied and backed up: nothing in it opens anything. A credential stands there as the place where
each worker finds it: a variable of its environment, or a file.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from briter_worker.errors import UsageError, for_people, redacted
from briter_worker.git.credentials import secrets_in

if TYPE_CHECKING:
    from collections.abc import Mapping

_HOST = r"(?:[A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9a-fA-F:.]+\])(?::[0-9]{1,5})?"
_USER = r"[A-Za-z0-9_][A-Za-z0-9._+-]*"
_REST = r"[^\s\x00-\x1f\x7f-\x9f\ud800-\udfff\\?#]*"
_WEB = rf"https?://{_HOST}/{_REST}"
_SSH = rf"ssh://(?:{_USER}@)?{_HOST}/{_REST}|(?:{_USER}@)?[A-Za-z0-9][A-Za-z0-9._-]*:(?!:|//|$){_REST}"
_OPEN = rf"git://{_HOST}/{_REST}|file:///{_REST}|/{_REST}"
_MOST = 2000
_ACCEPTED = (
    "https://host/path, ssh://host/path, git@host:path, git://host/path, file:///path or an absolute "
    "path, without a password, token, query or fragment"
)
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]{0,199}"
_NAMED = r"[^\s\x00-\x1f\x7f-\x9f:@]{1,200}"
Credentials = dict[str, str]


def checked_remote(url: str) -> str:
    """The address, as a repository's that anybody may read in the database. Raises UsageError."""
    if len(url) > _MOST or not re.fullmatch(f"{_WEB}|{_SSH}|{_OPEN}", url):
        # Not shown: what is wrong with it may be the secret in it.
        raise UsageError(f"--remote is not accepted; accepted: {_ACCEPTED}. {_REFER}")
    plain = re.sub(f"ssh://{_USER}@", "ssh://", url)  # who logs in by ssh is no secret
    if secrets_in([("remote.site.url", url)]) or redacted(plain) != plain:
        raise UsageError(f"--remote has something in it that looks like a credential. {_REFER}")
    return url


_REFER = (
    "What opens it is named with --credential-env NAME, --credential-file PATH or --ssh-key PATH: "
    "it is never in the database"
)


def checked_credentials(remote: str, said: Mapping[str, Any] | None) -> Credentials | None:
    """Where the workers find what opens the remote: `env` or `file` with a `username`, or `sshKey`.

    Raises UsageError.
    """
    given = {key: value for key, value in (said or {}).items() if value is not None}
    if not given:
        return None
    places = [key for key in ("env", "file", "sshKey") if key in given]
    odd = given.keys() - {*places, "username"} or given.keys() == {"username", "sshKey"}
    if len(places) != 1 or odd:
        raise UsageError(
            "credentials are one of --credential-env, --credential-file and --ssh-key; "
            "--credential-user goes with the first two"
        )
    (place,) = places
    _check_kind(remote, place)
    value = given[place]
    if place == "env":
        if not isinstance(value, str) or not re.fullmatch(_VARIABLE, value) or redacted(value) != value:
            raise UsageError(
                "--credential-env is not accepted; accepted: the name of a variable in the workers' "
                "environment, such as BLOG_TOKEN; not the credential itself"
            )
        if value.startswith("BRITER_"):
            raise UsageError(f"--credential-env {value}: it belongs to the worker; use a name of your own")
    elif not isinstance(value, str) or not value.startswith("/") or not value.isprintable():
        raise UsageError(
            for_people(f"{_FLAGS[place]}: an absolute path on the workers' hosts, such as /run/secrets/blog")
        )
    user = given.get("username")
    if user is not None and (not isinstance(user, str) or not re.fullmatch(_NAMED, user)):
        raise UsageError("--credential-user is not accepted; accepted: a name without spaces, : and @")
    return {key: str(value) for key, value in given.items()}


_FLAGS = {"env": "--credential-env", "file": "--credential-file", "sshKey": "--ssh-key"}


def _check_kind(remote: str, place: str) -> None:
    if place == "sshKey":
        if not re.fullmatch(_SSH, remote):
            raise UsageError("--ssh-key goes with an address for ssh, such as git@host:path")
    elif not re.fullmatch(_WEB, remote):
        raise UsageError(f"{_FLAGS[place]} goes with an address that begins with https:// or http://")
