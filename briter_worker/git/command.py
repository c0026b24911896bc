"""Runs git: the only module that starts a process.

Every git command gets a scrubbed environment, fixed repository, no prompts, no hooks or programs of the
work tree's, and a limit on how long it may make no progress. Children hold the site's lock with us (its
descriptor is passed on), so that an orphan keeps the next worker out until it is gone; and they get
SIGTERM when we die, so that they remove their own lock files.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any, cast

import git
import psutil
from git.cmd import Git

from briter_worker.errors import Failure, PublishError, Stopped
from briter_worker.git import causes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_KEPT = (
    *("PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR", "SSH_AUTH_SOCK"),
    *("LANG", "LC_CTYPE", "SSL_CERT_FILE", "SSL_CERT_DIR", "CURL_CA_BUNDLE"),
    *(
        name
        for proxy in ("http", "https", "all", "no")
        for name in (f"{proxy}_proxy", f"{proxy}_PROXY".upper())
    ),
)
_SSH_OPTIONS = "-o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=15"
_GRACE = 2.0
_PIECE = 1 << 16
_LAST_WORDS = 0.5
"""How long a process that has closed its output may take to exit."""


Process = subprocess.Popen[bytes]


class _Shell(Git):
    """GitPython's way to run git, led through ours, so that its push runs like every other command."""

    home: Commands

    def execute(self, command: Sequence[str], *_: Any, as_process: bool = False, **options: Any) -> Any:  # noqa: ANN401
        if not as_process:
            return self.home.run(*command[1:]).decode(errors="replace")
        text = bool(options.get("universal_newlines"))
        return Git.AutoInterrupt(self.home.spawn(command[1:], text=text), list(command))


class Commands:
    """Runs git in one repository. Not for use by two threads at once."""

    def __init__(
        self,
        worktree: Path,
        *,
        remote: str,
        timeout: float,
        hooks: bool = False,
        pass_fds: tuple[int, ...] = (),
    ) -> None:
        self.worktree = worktree
        self._remote = remote
        self._timeout = timeout
        self._hooks = hooks
        self._fds = pass_fds
        # Kept for good: it remembers git's version, which it would ask for again.
        self._shell = _Shell(worktree)
        self._shell.home = self
        self._active: dict[int, subprocess.Popen[Any]] = {}
        self._aborted = threading.Event()
        self._busy = threading.Event()
        self._expired = False
        self._guardian: threading.Thread | None = None
        self._repo: git.Repo | None = None
        self._environment: dict[str, str] | None = None
        self._touched = time.monotonic()
        self.started = 0
        """How many processes were started, for the tests that guard this number."""

    @property
    def repo(self) -> git.Repo:
        """GitPython's view of the repository. Raises PublishError when there is none."""
        if self._repo is None:
            try:
                repo = git.Repo(self.worktree, search_parent_directories=False)
            except (git.InvalidGitRepositoryError, git.NoSuchPathError) as error:
                raise PublishError(
                    Failure.NOT_A_REPOSITORY,
                    f"{self.worktree} is not the top of a git repository. "
                    "Fix: clone the site there, or point BRITER_GIT_WORKTREE at its clone",
                ) from error
            repo.git = self._shell
            self._repo = repo
        return self._repo

    def refresh(self) -> None:
        """Forget what was read of the repository's configuration, which a person may have changed."""
        self._repo = None
        self._environment = None

    def abort(self) -> None:
        """End every running command, and let none start: the time to finish is over."""
        self._aborted.set()
        for process in list(self._active.values()):
            _end(process)

    def reopen(self, timeout: float) -> None:
        """After `abort`, allow a few last commands, each within this time: to see what became of a push."""
        if self._aborted.is_set():
            self._timeout = min(timeout, self._timeout)
            self._aborted.clear()

    def touch(self) -> None:
        """Note that the running command makes progress."""
        self._touched = time.monotonic()

    def spawn(
        self,
        args: Sequence[str],
        *,
        feed: bool = False,
        text: bool = False,
        extra: Mapping[str, str] | None = None,
        discover: bool = False,
    ) -> subprocess.Popen[Any]:
        """Start git. The caller reads its output, and ends it by `finish` or `watched`."""
        if self._aborted.is_set():
            raise Stopped
        if self._guardian is None:
            self._guardian = threading.Thread(target=self._guard, name="git time limit", daemon=True)
            self._guardian.start()
        if not self._active:
            self._expired = False
        repo = self.repo
        place = [] if discover else [f"--git-dir={repo.git_dir}", f"--work-tree={self.worktree}"]
        self.started += 1
        self.touch()
        try:
            process = subprocess.Popen(  # noqa: S603 - no shell; what jobs declare goes by stdin only
                ["git", *place, "--no-replace-objects", *args],  # noqa: S607 - the PATH's git
                stdin=subprocess.PIPE if feed else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=self.worktree,
                env={**self._env(), **(extra or {})},
                pass_fds=self._fds,
                process_group=0,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - one prctl call, and no thread of ours holds a lock
                universal_newlines=text,
                encoding="utf-8" if text else None,
                errors="replace" if text else None,
            )
        except FileNotFoundError as error:
            raise PublishError(
                Failure.GIT_MISSING, "git was not found. Fix: install git 2.36 or newer"
            ) from error
        except OSError as error:
            raise causes.from_os("git could not be started", error) from error
        self._active[process.pid] = process
        self._busy.set()
        return process

    def run(
        self,
        *args: str,
        stdin: bytes = b"",
        ok: Iterable[int] = (0,),
        doing: str = "",
        discover: bool = False,
    ) -> bytes:
        """Git's standard output. Raises PublishError when it exits with a status that is not `ok`."""
        status, out, err = self.attempt(*args, stdin=stdin, discover=discover)
        if status not in ok:
            raise causes.from_git(doing or f"git {args[0]} failed", err or f"exit status {status}")
        return out

    def attempt(self, *args: str, stdin: bytes = b"", discover: bool = False) -> tuple[int, bytes, str]:
        """Git's exit status, standard output and standard error."""
        process = self.spawn(args, feed=bool(stdin), discover=discover)
        with self.watched(process, args[0]):
            out, err = self._converse(process, stdin)
        return process.returncode, out, err.decode(errors="replace")

    def _converse(self, process: subprocess.Popen[bytes], stdin: bytes) -> tuple[bytes, bytes]:
        """As `communicate`, and every byte that moves counts as progress."""
        parts: dict[str, list[bytes]] = {"out": [], "err": []}
        left = memoryview(stdin)
        with selectors.DefaultSelector() as selector:
            selector.register(cast("IO[bytes]", process.stdout), selectors.EVENT_READ, "out")
            selector.register(cast("IO[bytes]", process.stderr), selectors.EVENT_READ, "err")
            if process.stdin is not None:
                os.set_blocking(process.stdin.fileno(), False)
                selector.register(process.stdin, selectors.EVENT_WRITE, "in")
            while selector.get_map():
                for key, _ in selector.select():
                    self.touch()
                    if key.data != "in":
                        part = os.read(key.fd, _PIECE)
                        if part:
                            parts[key.data].append(part)
                        else:
                            selector.unregister(key.fileobj)
                        continue
                    try:
                        left = left[os.write(key.fd, left[:_PIECE]) :]
                    except BlockingIOError:
                        continue
                    except BrokenPipeError:
                        left = left[:0]
                    if not left:
                        selector.unregister(key.fileobj)
                        _close(cast("IO[bytes]", process.stdin))
        return b"".join(parts["out"]), b"".join(parts["err"])

    @contextmanager
    def watched(self, process: subprocess.Popen[Any] | None, name: str) -> Iterator[None]:
        """Whatever happens inside, the process and all it started are gone on leaving.

        Without a process: those that are started inside.

        Raises PublishError when the time limit ended it, Stopped when `abort` did.
        """
        others = set(self._active)
        try:
            yield
        except (OSError, ValueError):
            # A pipe broke as the process was ended; what follows says why it was.
            if not (self._expired or self._aborted.is_set()):
                raise
        finally:
            ending = [process] if process else [p for pid, p in self._active.items() if pid not in others]
            for each in ending:
                self._finish(each)
        if self._aborted.is_set():
            raise Stopped
        if self._expired:
            raise PublishError(
                Failure.TIMEOUT,
                f"git {name} made no progress for {self._timeout:g} s and was ended. Fix: check the network "
                "and the remote, or raise BRITER_GIT_TIMEOUT_MS",
            )

    def _finish(self, process: subprocess.Popen[Any]) -> None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LAST_WORDS)
        if process.poll() is None:
            _end(process)
        self._active.pop(process.pid, None)
        if not self._active:
            self._busy.clear()
        for pipe in (process.stdin, process.stdout, process.stderr):
            _close(pipe)

    def _guard(self) -> None:
        """End what makes no progress within the time limit; runs beside the commands, for good."""
        while True:
            self._busy.wait()
            left = self._touched + self._timeout - time.monotonic()
            if left <= 0:
                self._expired = True
                self._busy.clear()
                for process in list(self._active.values()):
                    _end(process)
            else:
                time.sleep(min(left, 1.0))

    def _env(self) -> dict[str, str]:
        if self._environment is None:
            kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
            reader = self.repo.config_reader()
            ssh = str(reader.get_value("core", "sshCommand", default="ssh"))
            config = {
                "core.fsync": "all",
                "core.fsmonitor": "false",
                "core.askPass": "",
                "core.pager": "cat",
                "core.alternateRefsCommand": "",
                "gc.auto": "0",
                "maintenance.auto": "false",
                "safe.bareRepository": "explicit",
                "protocol.ext.allow": "never",
                "credential.interactive": "never",
                "push.gpgSign": "false",
                "push.followTags": "false",
                "push.recurseSubmodules": "no",
                "submodule.recurse": "false",
                "fetch.recurseSubmodules": "no",
                "fetch.writeCommitGraph": "false",
                "fetch.prune": "false",
                f"remote.{self._remote}.prune": "false",
                f"remote.{self._remote}.mirror": "false",
            }
            if not self._hooks:
                config["core.hooksPath"] = os.devnull
            for i, (key, value) in enumerate(config.items()):
                kept[f"GIT_CONFIG_KEY_{i}"] = key
                kept[f"GIT_CONFIG_VALUE_{i}"] = value
            self._environment = kept | {
                "GIT_CONFIG_COUNT": str(len(config)),
                "LC_ALL": "C",
                "LANGUAGE": "C",
                "GIT_TERMINAL_PROMPT": "0",
                # Set but empty: neither core.askPass nor SSH_ASKPASS is consulted.
                "GIT_ASKPASS": "",
                "SSH_ASKPASS_REQUIRE": "never",
                "GCM_INTERACTIVE": "never",
                "GIT_SSH_COMMAND": f"{ssh} {_SSH_OPTIONS}",
            }
        return self._environment


def _die_with_parent() -> None:
    """In the child: SIGTERM when the parent dies, so that git removes its own lock files."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _close(pipe: IO[Any] | None) -> None:
    if pipe is not None:
        with suppress(OSError, ValueError):
            pipe.close()


def _end(process: subprocess.Popen[Any]) -> None:
    """End the process and everything it started; returns when the process is gone."""
    with suppress(psutil.Error):
        tree = psutil.Process(process.pid).children(recursive=True)
        for how, wait in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, _GRACE)):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, how)
            for child in tree:
                with suppress(psutil.Error):
                    child.send_signal(how)
            with suppress(subprocess.TimeoutExpired):
                process.wait(wait)
            _, tree = psutil.wait_procs(tree, timeout=wait if how == signal.SIGTERM else 0)
            if process.poll() is not None and not tree:
                return
