"""The environment of git: settings that hold, whatever the site's configuration says."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from briter_worker.git.configuration import PROXIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from briter_worker.git.configuration import Setting

INHERITED = (
    *("PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR", "SSH_AUTH_SOCK"),
    *("GNUPGHOME", "LANG", "LC_CTYPE", "SSL_CERT_FILE", "SSL_CERT_DIR", "CURL_CA_BUNDLE"),
    *(*PROXIES, "no_proxy", "NO_PROXY"),
)
_SSH_OPTIONS = "-o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=15"
_HELPER = re.compile(r"credential\.(?:.*\.)?helper", re.DOTALL)
_SSH = re.compile(r"(?:\S*/)?ssh(?:\s|\Z)")
_MAX_SHELL_FD = 9
_SYSTEM_PATH = "/usr/bin:/bin"


@dataclass(frozen=True, slots=True)
class RemoteAccess:
    """Credentials of one remote, as git gets them. Its repr shows no secret."""

    settings: tuple[Setting, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    ssh_options: str = ""


@dataclass(frozen=True, slots=True)
class Signer:
    """Key and format of the commits' signatures. `key` is a path, a `key::` literal, or the id of a key."""

    key: str
    format: str = "ssh"

    def options(self, folder: Path) -> list[str]:
        """Return git's options; `folder` keeps the wrapper that stops gpg from asking for a passphrase."""
        program = _SIGNERS[self.format]
        if self.format != "ssh":
            wrapper, text = folder / program, _WRAPPER.format(program=program)
            # Once: git cannot run a file that another thread's new process has still open for writing.
            if not wrapper.is_file() or wrapper.read_text() != text:
                partial = wrapper.with_suffix(".tmp")
                partial.write_text(text)
                partial.chmod(0o700)
                partial.replace(wrapper)
            program = str(wrapper)
        return ["-c", f"gpg.format={self.format}", "-c", f"gpg.{self.format}.program={program}"]

    def report(self, folder: Path) -> str:
        """Return what the last gpg printed: git 2.38 does not pass its errors on."""
        try:
            return (folder / f"{_SIGNERS[self.format]}.log").read_text(errors="replace")
        except FileNotFoundError:
            return ""


_SIGNERS = {"ssh": "ssh-keygen", "openpgp": "gpg", "x509": "gpgsm"}
_WRAPPER = """\
#!/bin/sh
{program} --batch --no-tty --pinentry-mode=error "$@" 2>"$0.log"; status=$?; cat "$0.log" >&2; exit $status
"""
"""In this mode, gpg's agent uses a passphrase that it knows, and opens no window for another one."""


@dataclass(eq=False, repr=False)
class Surroundings:
    """The values that every git command of one repository depends on."""

    worktree: Path | None
    """None: the repository is bare."""
    _: KW_ONLY
    bare: Path | None = None
    remote: str
    timeout: float
    """Seconds that each command may take without progress."""
    total_timeout: float = 3600.0
    """Seconds that each command may take in all."""
    hooks: bool = False
    pass_fds: tuple[int, ...] = ()
    """Descriptors of locks, which every child inherits."""
    access: RemoteAccess | None = None
    durable: bool = True
    signer: Signer | None = None

    def variables(self, configured: Sequence[Setting]) -> dict[str, str]:
        """Return all variables that git gets. `configured`: its configuration, as far as it is known.

        The descriptors of locks are closed for the programs that may outlive git, such as credential helpers.
        With credentials of the worker's own, no configured helper is asked.
        """
        access, values = self.access or RemoteAccess(), dict(configured)
        settings = [*_FIXED, ("http.lowSpeedTime", str(max(int(2 * self.timeout), 1)))]
        settings += [(f"remote.{self.remote}.{name}", "false") for name in ("prune", "mirror")]
        settings.append(("core.fsync", "all" if self.durable else "none"))
        if not self.hooks:
            settings.append(("core.hooksPath", os.devnull))
        settings += access.settings or _wrap_helpers(configured, self.pass_fds)
        made = {name: os.environ[name] for name in INHERITED if name in os.environ}
        if "PATH" in made:
            made["PATH"] = trusted_path(made["PATH"], self.worktree)
        for i, (key, value) in enumerate(settings):
            made |= {f"GIT_CONFIG_KEY_{i}": key, f"GIT_CONFIG_VALUE_{i}": value}
        if self.pass_fds:
            ssh = values.get("core.sshcommand", "ssh")
            # Git derives the variant from the command's first word, which is no longer ssh's.
            made["GIT_SSH_VARIANT"] = values.get("ssh.variant") or ("ssh" if _SSH.match(ssh) else "auto")
        return {
            **made,
            **access.variables,
            "GIT_CONFIG_COUNT": str(len(settings)),
            "LC_ALL": "C",
            "LANGUAGE": "C",
            "GIT_TERMINAL_PROMPT": "0",
            # Set and empty: neither core.askPass nor SSH_ASKPASS is consulted.
            "GIT_ASKPASS": "",
            "SSH_ASKPASS_REQUIRE": "never",
            "GCM_INTERACTIVE": "never",
            "GIT_SSH_COMMAND": without(self.pass_fds, self.ssh_command(configured)),
        }

    def ssh_command(self, configured: Sequence[Setting]) -> str:
        """Return the shell's command line for ssh, with the key and all options."""
        access = self.access or RemoteAccess()
        return f"{dict(configured).get('core.sshcommand', 'ssh')} {access.ssh_options} {_SSH_OPTIONS}"


_FIXED: list[Setting] = [
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
    ("push.gpgSign", "false"),
    ("push.followTags", "false"),
    ("push.pushOption", ""),  # clears those of the configuration
    ("push.recurseSubmodules", "no"),
    ("submodule.recurse", "false"),
    ("fetch.recurseSubmodules", "no"),
    ("fetch.writeCommitGraph", "false"),
    ("fetch.prune", "false"),
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


def _wrap_helpers(configured: Iterable[Setting], fds: Sequence[int]) -> list[Setting]:
    """Return the credential helpers, in their order, each started without our descriptors.

    A helper may leave a daemon behind, as `credential-cache` does, and the daemon would hold the site's lock.
    """
    wrapped = []
    for key, helper in configured if fds else ():
        if not _HELPER.fullmatch(key):
            continue
        command = helper if Path(helper).is_absolute() else f"git credential-{helper}"
        if helper.startswith("!"):
            command = helper[1:]
        wrapped.append((key, f"!{without(fds, command)}" if helper else ""))
    # An empty helper clears the list.
    return [("credential.helper", ""), *wrapped] if wrapped else []


def without(fds: Sequence[int], command: str) -> str:
    """Return the shell command that runs this one without our descriptors.

    A POSIX shell cannot close a descriptor of two digits: without bash, such a one stays open.
    """
    bash = _find_bash()
    script = "".join(f"exec {fd}>&-; " for fd in fds if bash or fd <= _MAX_SHELL_FD) + command
    if bash is None or max(fds, default=0) <= _MAX_SHELL_FD:
        return script
    arguments = ' "$@"'
    return f"exec {bash} -c {shlex.quote(script + arguments)} bash"


@cache
def _find_bash() -> str | None:
    return shutil.which("bash", path=_SYSTEM_PATH)
