"""What opens a remote, given by reference: a variable of the worker's environment, or a file on its host.

The secret is read when a site's drain begins, so that a new one is used at once. Git's helper finds it in
git's own environment: it is in no command line, in no configuration and in no address.
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from briter_worker.errors import Failure, PublishError, conceal, explained

if TYPE_CHECKING:
    from collections.abc import Mapping

_USER = "x-access-token"
"""Who holds a token, where nobody says otherwise: hosts look at the token alone."""
_NAME, _SECRET = "BRITER_ACCESS_NAME", "BRITER_ACCESS_SECRET"
_HELPER = (
    f'!f() {{ test "$1" = get || exit 0; printf "username=%s\\npassword=%s\\n" "${_NAME}" "${_SECRET}"; }}; f'
)
_LONGEST = 65_536


@dataclass(frozen=True, slots=True)
class Access:
    """How git is let in. Its text names no secret."""

    settings: tuple[tuple[str, str], ...] = ()
    """Of git's configuration, in this order."""
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    ssh_options: str = ""


def open_access(url: str, credentials: Mapping[str, str] | None) -> Access | None:
    """What these credentials open, now.

    They are `{"env": NAME}` or `{"file": PATH}`, with a `username` if one is needed, or `{"sshKey": PATH}`.
    Nothing shows the secret from here on. Raises PublishError where there is none.
    """
    if not credentials:
        return None
    if "sshKey" in credentials:
        return _by_key(credentials["sshKey"])
    where, secret = _read(credentials)
    conceal([secret])
    if not secret or re.search(r"[\x00-\x1f\x7f]", secret):
        raise _unusable(f"{where} holds no credential in one line")
    parts = urlsplit(url)
    # For this host alone: what a redirect or another service asks for is not this.
    return Access(
        (
            ("credential.helper", ""),  # nobody's helper is asked before, nor told to keep it
            (f"credential.{parts.scheme}://{parts.netloc.rpartition('@')[2]}.helper", _HELPER),
        ),
        {_NAME: credentials.get("username", _USER), _SECRET: secret},
    )


def _read(credentials: Mapping[str, str]) -> tuple[str, str]:
    if "env" in credentials:
        where = f"the variable {credentials['env']} of the worker's environment"
        return where, os.environ.get(credentials["env"], "").strip()
    where = f"the file {credentials.get('file')} on the worker's host"
    try:
        with Path(credentials["file"]).open("rb") as file:
            content = file.read(_LONGEST)
        return where, content.decode().strip()
    except KeyError:
        raise _unusable("the credentials name neither env, file nor sshKey") from None
    except UnicodeDecodeError:
        raise _unusable(f"{where} holds no text") from None
    except OSError as error:
        raise _unusable(f"{where} cannot be read: {explained(error, where=False)}") from error


def _by_key(path: str) -> Access:
    try:
        with Path(path).open("rb"):
            pass
    except OSError as error:
        said = explained(error, where=False)
        raise _unusable(f"the ssh key {path} on the worker's host cannot be read: {said}") from error
    return Access(ssh_options=f"-i {shlex.quote(path)} -o IdentitiesOnly=yes")


def _unusable(what: str) -> PublishError:
    return PublishError(
        Failure.AUTH, f"{what}. Fix: put it there for every worker, or change the site's credentials"
    )
