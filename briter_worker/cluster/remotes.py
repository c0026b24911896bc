"""Checks of a site's remote and of the references to its credentials, before they are stored.

The database is shared, copied and backed up, so it contains no credential: only the name of an environment
variable or the path of a file, on each node.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from briter_worker.errors import UsageError
from briter_worker.git.environment import find_secrets
from briter_worker.redaction import redact

if TYPE_CHECKING:
    from collections.abc import Mapping

_HOST = r"(?:[A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9a-fA-F:.]+\])(?::[0-9]{1,5})?"
_USER = r"[A-Za-z0-9_][A-Za-z0-9._+-]*"
_PATH = r"[^\s\x00-\x1f\x7f-\x9f\ud800-\udfff\\?#]*"
_HTTP = rf"https?://{_HOST}/{_PATH}"
_SSH = rf"ssh://(?:{_USER}@)?{_HOST}/{_PATH}|(?:{_USER}@)?[A-Za-z0-9][A-Za-z0-9._-]*:(?!:|//|$){_PATH}"
_OTHER = rf"git://{_HOST}/{_PATH}|file:///{_PATH}|/{_PATH}"
_MAX_LENGTH = 2000
_ACCEPTED = (
    "https://host/path, ssh://host/path, git@host:path, git://host/path, file:///path or an absolute "
    "path, without a password, token, query or fragment"
)
_USE_REFERENCE = "name the credentials with --credential-env NAME, --credential-file PATH or --ssh-key PATH"
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]{0,199}"
_USERNAME = r"[^\s\x00-\x1f\x7f-\x9f:@]{1,200}"
_OPTIONS = {"env": "--credential-env", "file": "--credential-file", "sshKey": "--ssh-key"}


def check_remote(url: str) -> None:
    """Raise UsageError unless the address is one that everybody may read."""
    if len(url) > _MAX_LENGTH or not re.fullmatch(f"{_HTTP}|{_SSH}|{_OTHER}", url):
        # The value is not shown, because its mistake may be the secret in it.
        raise UsageError(f"--remote is not accepted; accepted: {_ACCEPTED}", _USE_REFERENCE)
    without_user = re.sub(f"ssh://{_USER}@", "ssh://", url)  # the user of ssh is not a secret
    if find_secrets([("remote.site.url", url)]) or redact(without_user) != without_user:
        raise UsageError("--remote contains what looks like a credential", _USE_REFERENCE)


def check_credentials(remote: str, reference: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Return the reference: `env` or `file` with an optional `username`, or `sshKey`. Raises UsageError."""
    given = {key: value for key, value in (reference or {}).items() if value is not None}
    if not given:
        return None
    kinds = [key for key in _OPTIONS if key in given]
    unknown = given.keys() - {*kinds, "username"}
    if len(kinds) != 1 or unknown or given.keys() == {"username", "sshKey"}:
        raise UsageError(
            "credentials are one of --credential-env, --credential-file and --ssh-key; "
            "--credential-user goes with the first two"
        )
    (kind,) = kinds
    value = given[kind]
    _check_scheme(remote, kind)
    if kind == "env":
        _check_variable(value)
    elif not isinstance(value, str) or not value.startswith("/") or not value.isprintable():
        raise UsageError(f"{_OPTIONS[kind]}: an absolute path on the nodes, such as /run/secrets/blog")
    user = given.get("username")
    if user is not None and (not isinstance(user, str) or not re.fullmatch(_USERNAME, user)):
        raise UsageError("--credential-user is not accepted; accepted: a name without spaces, : and @")
    return {key: str(value) for key, value in given.items()}


def _check_scheme(remote: str, kind: str) -> None:
    if kind == "sshKey":
        if not re.fullmatch(_SSH, remote):
            raise UsageError("--ssh-key goes with an address for ssh, such as git@host:path")
    elif not re.fullmatch(_HTTP, remote):
        raise UsageError(f"{_OPTIONS[kind]} goes with an address that begins with https:// or http://")


def _check_variable(name: object) -> None:
    if not isinstance(name, str) or not re.fullmatch(_VARIABLE, name) or redact(name) != name:
        raise UsageError(
            "--credential-env is not accepted; accepted: the name of a variable in the nodes' environment, "
            "such as BLOG_TOKEN; not the credential itself"
        )
    if name.startswith("BRITER_"):
        raise UsageError(f"--credential-env {name} belongs to the worker", "use another name")
