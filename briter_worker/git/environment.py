"""Build the environment of git: settings that hold, whatever the site's configuration says."""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from briter_worker.git.config_secrets import find_secrets
from briter_worker.redaction import conceal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
INHERITED = (
    *("PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR", "SSH_AUTH_SOCK"),
    *("LANG", "LC_CTYPE", "SSL_CERT_FILE", "SSL_CERT_DIR", "CURL_CA_BUNDLE"),
    *(*_PROXIES, "no_proxy", "NO_PROXY"),
)
_SSH_OPTIONS = "-o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=15"
_SSH = re.compile(r"(?:\S*/)?ssh(?:\s|\Z)")
_CLOSE_AND_RUN = (
    "import os,sys;[os.closerange(int(fd),int(fd)+1) for fd in sys.argv[1].split(',')];"
    """os.execv('/bin/sh',['sh','-c',sys.argv[2]+' "$@"','sh',*sys.argv[3:]])"""
)
"""A POSIX shell cannot close a descriptor of two digits."""

Setting = tuple[str, str]
"""A key of git's configuration, and its value."""


@dataclass(frozen=True, slots=True)
class RemoteAccess:
    """Credentials of one remote, as git gets them. Its repr shows no secret."""

    settings: tuple[Setting, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    ssh_options: str = ""


def build_environment(
    *,
    worktree: Path | None,
    remote: str,
    hooks: bool,
    stall_seconds: float = 120,
    ssh: str = "ssh",
    variant: str = "",
    fds: Sequence[int] = (),
    helpers: Iterable[Setting] = (),
    access: RemoteAccess | None = None,
    durable: bool = True,
) -> dict[str, str]:
    """Return all variables that git gets.

    `fds` are closed for the programs that may outlive git, the credential `helpers` among them. With
    `access`, no configured helper is asked. `ssh` and `variant` are core.sshCommand and ssh.variant.
    """
    settings = [*_fixed_settings(remote, stall_seconds), ("core.fsync", "all" if durable else "none")]
    if not hooks:
        settings.append(("core.hooksPath", os.devnull))
    settings += access.settings if access and access.settings else _wrap_helpers(helpers, fds)
    made = {name: os.environ[name] for name in INHERITED if name in os.environ}
    if "PATH" in made:
        made["PATH"] = trusted_path(made["PATH"], worktree)
    for i, (key, value) in enumerate(settings):
        made |= {f"GIT_CONFIG_KEY_{i}": key, f"GIT_CONFIG_VALUE_{i}": value}
    if fds:
        # Git derives the variant from the command's first word, which is no longer ssh's.
        made["GIT_SSH_VARIANT"] = variant or ("ssh" if _SSH.match(ssh) else "auto")
    if access:
        made |= access.variables
        ssh = f"{ssh} {access.ssh_options}".rstrip()
    return made | {
        "GIT_CONFIG_COUNT": str(len(settings)),
        "LC_ALL": "C",
        "LANGUAGE": "C",
        "GIT_TERMINAL_PROMPT": "0",
        # Set and empty: neither core.askPass nor SSH_ASKPASS is consulted.
        "GIT_ASKPASS": "",
        "SSH_ASKPASS_REQUIRE": "never",
        "GCM_INTERACTIVE": "never",
        "GIT_SSH_COMMAND": _without(fds, f"{ssh} {_SSH_OPTIONS}"),
    }


def _fixed_settings(remote: str, stall_seconds: float) -> list[Setting]:
    return [
        ("core.fsmonitor", "false"),
        ("core.askPass", ""),
        ("core.pager", "cat"),
        ("core.alternateRefsCommand", ""),
        ("gc.auto", "0"),
        ("maintenance.auto", "false"),
        ("safe.bareRepository", "explicit"),
        ("protocol.ext.allow", "never"),
        ("protocol.fd.allow", "never"),
        ("credential.interactive", "never"),
        ("fastimport.unpackLimit", "1"),
        ("http.lowSpeedLimit", "1"),
        ("http.lowSpeedTime", str(max(int(stall_seconds), 1))),
        ("push.gpgSign", "false"),
        ("push.followTags", "false"),
        ("push.pushOption", ""),  # clears those of the configuration
        ("push.recurseSubmodules", "no"),
        ("submodule.recurse", "false"),
        ("fetch.recurseSubmodules", "no"),
        ("fetch.writeCommitGraph", "false"),
        ("fetch.prune", "false"),
        (f"remote.{remote}.prune", "false"),
        (f"remote.{remote}.mirror", "false"),
    ]


def trusted_path(path: str, worktree: Path | None = None) -> str:
    """Return the folders to look for programs in: never the current one, never one of the work tree."""
    inside = None if worktree is None else os.path.normpath(worktree)
    folders = []
    for folder in path.split(os.pathsep):
        plain = os.path.normpath(folder)
        if folder.startswith("/") and not (inside and (plain == inside or plain.startswith(f"{inside}/"))):
            folders.append(folder)
    return os.pathsep.join(folders) or os.defpath


def _wrap_helpers(helpers: Iterable[Setting], fds: Sequence[int]) -> list[Setting]:
    """Return the credential helpers, in their order, each started without our descriptors.

    A helper may leave a daemon behind, as `credential-cache` does, and the daemon would hold the site's lock.
    """
    wrapped = []
    for key, helper in helpers:
        command = helper if Path(helper).is_absolute() else f"git credential-{helper}"
        if helper.startswith("!"):
            command = helper[1:]
        wrapped.append((key, f"!{_without(fds, command)}" if helper else ""))
    # An empty helper clears the list.
    return [("credential.helper", ""), *wrapped] if wrapped else []


def _without(fds: Sequence[int], command: str) -> str:
    """Return the shell command that runs this one without our descriptors, in place of git's shell."""
    if not fds:
        return command
    closing = (sys.executable, "-I", "-S", "-c", _CLOSE_AND_RUN, ",".join(map(str, fds)), command)
    return f"exec {shlex.join(closing)}"


def parse_settings(listed: bytes) -> list[Setting]:
    """Return the settings that `git config --null --list` printed; a key without a value is true."""
    pairs = (each.partition("\n") for each in os.fsdecode(listed).split("\0") if each)
    return [(key, value if given else "true") for key, given, value in pairs]


def normalize_key(key: str) -> str:
    """Return a key as git lists it: section and name in lower case, the part between them as it is."""
    section, _, rest = key.partition(".")
    middle, dot, name = rest.rpartition(".")
    return f"{section.lower()}.{middle}{dot}{name.lower()}"


def credential_helpers(settings: Iterable[Setting]) -> list[Setting]:
    """Return the settings that name credential helpers."""
    return [(k, v) for k, v in settings if k.startswith("credential.") and k.endswith(".helper")]


def conceal_secrets(settings: Iterable[Setting]) -> None:
    """Hide the secrets that git's configuration and the proxy variables hold, in every text from now on."""
    proxies = [("http.proxy", os.environ[name]) for name in _PROXIES if name in os.environ]
    conceal(find_secrets([*settings, *proxies]))
