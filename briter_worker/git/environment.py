"""What git is told through its environment: which settings hold, whatever the site's configuration says."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from briter_worker.git.access import Access

_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
KEPT = (
    *("PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR", "SSH_AUTH_SOCK"),
    *("LANG", "LC_CTYPE", "SSL_CERT_FILE", "SSL_CERT_DIR", "CURL_CA_BUNDLE"),
    *(*_PROXIES, "no_proxy", "NO_PROXY"),
)
_SSH_OPTIONS = "-o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=15"
_VARIANTS = ("ssh", "plink", "putty", "tortoiseplink")
_LAST_DIGIT = 9
_CLOSE = (
    "import os,sys;[os.close(int(fd)) for fd in sys.argv[1].split(',')];"
    "os.execv('/bin/sh',['sh','-c',' '.join(sys.argv[2:])])"
)

Setting = tuple[str, str]
"""A key of git's configuration, and its value."""


def environment(
    *,
    worktree: Path,
    remote: str,
    hooks: bool,
    ssh: str = "ssh",
    variant: str = "",
    fds: Sequence[int] = (),
    helpers: Iterable[Setting] = (),
    access: Access | None = None,
    durable: bool = True,
) -> dict[str, str]:
    """All that git gets. `fds` are closed for the programs that may outlive it, `helpers` among them.

    With `access`, it alone opens the remote: no helper that is configured hears of it.
    """
    settings: list[Setting] = [
        ("core.fsync", "all" if durable else "none"),
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
        ("push.gpgSign", "false"),
        ("push.followTags", "false"),
        ("push.pushOption", ""),  # forgets those that the configuration has
        ("push.recurseSubmodules", "no"),
        ("submodule.recurse", "false"),
        ("fetch.recurseSubmodules", "no"),
        ("fetch.writeCommitGraph", "false"),
        ("fetch.prune", "false"),
        (f"remote.{remote}.prune", "false"),
        (f"remote.{remote}.mirror", "false"),
    ]
    if not hooks:
        settings.append(("core.hooksPath", os.devnull))
    if access and access.settings:
        settings += access.settings
    else:
        settings += _let_go(helpers, fds)
    made = {name: os.environ[name] for name in KEPT if name in os.environ}
    if "PATH" in made:
        made["PATH"] = trusted_path(made["PATH"], worktree)
    for i, (key, value) in enumerate(settings):
        made[f"GIT_CONFIG_KEY_{i}"] = key
        made[f"GIT_CONFIG_VALUE_{i}"] = value
    low = [fd for fd in fds if fd <= _LAST_DIGIT]
    if low:
        # Git goes by the command's first word, which is no longer ssh's.
        made["GIT_SSH_VARIANT"] = variant or _variant(ssh)
    if access:
        made |= access.variables
        ssh = f"{ssh} {access.ssh_options}".rstrip()
    return made | {
        "GIT_CONFIG_COUNT": str(len(settings)),
        "LC_ALL": "C",
        "LANGUAGE": "C",
        "GIT_TERMINAL_PROMPT": "0",
        # Set but empty: neither core.askPass nor SSH_ASKPASS is consulted.
        "GIT_ASKPASS": "",
        "SSH_ASKPASS_REQUIRE": "never",
        "GCM_INTERACTIVE": "never",
        "GIT_SSH_COMMAND": f"{_closing(low)}{ssh} {_SSH_OPTIONS}",
    }


def getting_late(env: dict[str, str], remote: str) -> dict[str, str]:
    """The same environment, in which git fetches from the remote what it lacks, when it needs it.

    It is in no file of the repository, as a push must not have it: git would fetch the old contents of all
    that it sends, to send less.
    """
    count = int(env["GIT_CONFIG_COUNT"])
    late = ((f"remote.{remote}.promisor", "true"), (f"remote.{remote}.partialCloneFilter", "blob:none"))
    made = {**env, "GIT_CONFIG_COUNT": str(count + len(late))}
    for i, (key, value) in enumerate(late, count):
        made |= {f"GIT_CONFIG_KEY_{i}": key, f"GIT_CONFIG_VALUE_{i}": value}
    return made


def trusted_path(path: str, worktree: Path | None = None) -> str:
    """The folders to look for programs in: never the current one, never one of the work tree's."""
    inside = None if worktree is None else os.path.normpath(worktree)
    folders = []
    for folder in path.split(os.pathsep):
        plain = os.path.normpath(folder)
        if folder.startswith("/") and not (inside and (plain == inside or plain.startswith(f"{inside}/"))):
            folders.append(folder)
    return os.pathsep.join(folders) or os.defpath


def _let_go(helpers: Iterable[Setting], fds: Sequence[int]) -> list[Setting]:
    """The configured credential helpers, in their order, each without our descriptors.

    A helper may leave a daemon behind, as `credential-cache` does, and the daemon would hold the site's lock.
    """
    wrapped = [(key, _without(fds, helper) if helper else "") for key, helper in helpers]
    # An empty one makes git forget all those before it.
    return [("credential.helper", ""), *wrapped] if wrapped else []


def _without(fds: Sequence[int], helper: str) -> str:
    """The helper as git would run it, without the descriptors; git adds what it wants at the end."""
    if helper.startswith("!"):
        command = helper[1:]
    else:
        command = helper if Path(helper).is_absolute() else f"git credential-{helper}"
    if all(fd <= _LAST_DIGIT for fd in fds):
        return f"!{_closing(fds)}{command}"
    # A POSIX shell cannot name a descriptor of two digits.
    closing = (sys.executable, "-I", "-S", "-c", _CLOSE, ",".join(map(str, fds)), command)
    return f"!{shlex.join(closing)}"


def _closing(fds: Sequence[int]) -> str:
    """For the shell itself: `COMMAND 7>&-` would leave it with a copy while it waits for the command."""
    return f"exec {' '.join(f'{fd}>&-' for fd in fds)}; " if fds else ""


def _variant(ssh: str) -> str:
    """What git itself would take this command for."""
    try:
        name = Path(shlex.split(ssh)[0]).name.lower().removesuffix(".exe")
    except (ValueError, IndexError):
        return "auto"
    return name if name in _VARIANTS else "auto"


def parsed(listed: bytes) -> list[Setting]:
    """The settings that `git config --null --get-regexp` printed; a key without a value is skipped."""
    pairs = (each.partition("\n") for each in os.fsdecode(listed).split("\0"))
    return [(key, value) for key, given, value in pairs if given]


def helpers_of(settings: Iterable[Setting]) -> list[Setting]:
    """Those of them that name credential helpers."""
    return [(key, value) for key, value in settings if key.startswith("credential.")]


def proxies() -> list[Setting]:
    """The addresses that git gets by its environment."""
    return [("http.proxy", os.environ[name]) for name in _PROXIES if name in os.environ]
