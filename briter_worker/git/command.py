"""Runs git: the only module that starts a process.

Every git command gets a scrubbed environment, fixed repository, no prompts, no hooks or programs of the
work tree's, and a limit on how long it may make no progress. Children hold the site's lock with us (its
descriptor is passed on), so that an orphan keeps the next worker out until it is gone; and they get
SIGTERM when we die, so that they remove their own lock files.
"""

from __future__ import annotations

import configparser
import os
import selectors
import subprocess
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, TYPE_CHECKING, Any, cast

import git
from git.cmd import Git

from briter_worker.errors import Failure, PublishError, Stopped, conceal
from briter_worker.git import causes, configuration
from briter_worker.git.credentials import LISTED, secrets_in
from briter_worker.git.ending import await_exit, dying_with_parent, end, until_exit
from briter_worker.git.environment import environment, getting_late, helpers_of, parsed, proxies

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from git.config import GitConfigParser

    from briter_worker.git.access import Access
    from briter_worker.git.environment import Setting

_PIECE = 1 << 16
_LAST_WORDS = 0.5
"""How long a process that has closed its output may take to exit."""
_LOOK = 1.0
"""How often what runs is looked at, at least."""


_OF_CACHES = configuration.Shared()

Process = subprocess.Popen[bytes]
AnyProcess = subprocess.Popen[Any]


@dataclass(eq=False, slots=True)
class _Running:
    """A process, and since when it makes no progress while somebody waits for it."""

    process: AnyProcess
    touched: float
    awaited: bool = True
    expired: bool = False


class _Shell(Git):
    """GitPython's way to run git, led through ours, so that its push runs like every other command."""

    home: Commands

    @property
    def version_info(self) -> tuple[int, ...]:
        """At least what the worker needs: GitPython would start git to ask, before a first push."""
        return (2, 36)

    def execute(self, command: Sequence[str], *_: Any, as_process: bool = False, **_options: Any) -> Any:  # noqa: ANN401
        if not as_process:
            return self.home.run(*command[1:]).decode(errors="replace")
        process: AnyProcess = self.home.spawn(command[1:], pushing=True)
        # Read to their end, which a daemon that ssh leaves behind, as ControlPersist does, would hold back.
        process.stdout = until_exit(process, process.stdout)
        process.stderr = until_exit(process, process.stderr)
        return Git.AutoInterrupt(process, list(command))


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
        access: Access | None = None,
        is_cache: bool = False,
    ) -> None:
        """`access`: what opens the remote.

        In a cache, nothing waits for the disk, and git gets from the remote what the repository lacks.
        """
        self.worktree = worktree
        self._remote = remote
        self._timeout = timeout
        self._hooks = hooks
        self._fds = pass_fds
        self._access = access
        self.is_cache = is_cache
        # Kept for good: it remembers git's version, which it would ask for again.
        self._shell = _Shell(worktree)
        self._shell.home = self
        self._active: dict[int, _Running] = {}
        self._aborted = threading.Event()
        self._busy = threading.Event()
        self._ending = threading.Lock()
        self._guardian: threading.Thread | None = None
        self._closed = threading.Event()
        self._repo: git.Repo | None = None
        self._config: GitConfigParser | None = None
        self._environment: dict[str, str] | None = None
        self._configured: list[tuple[int, int, int] | None] = []
        self._read_again_at = 0.0
        self.started = 0
        """How many processes were started, for the tests that guard this number."""
        self.ended = 0
        """How many were ended, by us or by somebody else: those may have left lock files."""

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
            except configparser.Error as error:  # pragma: no cover - GitPython 3.1 reads it only when asked
                raise configuration.unreadable(error) from None
            repo.git = self._shell
            self._repo = repo
            self._configured = configuration.signature(repo)
            self._read_again_at = time.monotonic() + configuration.BELIEVED
        return self._repo

    @property
    def config(self) -> GitConfigParser:
        """What git is configured to do here. It is read once until `refresh`, as each reading takes 1 ms."""
        if self._config is None:
            self._config = _OF_CACHES.reader(self.repo) if self.is_cache else configuration.read(self.repo)
        return self._config

    def refresh(self) -> None:
        """Forget what was read of the configuration, if a person may have changed it since."""
        if (
            self._repo is not None
            and time.monotonic() < self._read_again_at
            and configuration.signature(self._repo) == self._configured
        ):
            return
        self._repo = None
        self._config = None
        self._environment = None

    def abort(self) -> None:
        """End every running command, and let none start: the time to finish is over."""
        self._aborted.set()
        for running in list(self._active.values()):
            self._end(running.process)

    def reopen(self, timeout: float) -> None:
        """After `abort`, allow a few last commands, each within this time: to see what became of a push."""
        if self._aborted.is_set():
            self._timeout = min(timeout, self._timeout)
            self._aborted.clear()

    def close(self) -> None:
        """Nothing of it runs any more, nor will: neither git, nor the thread that watches it."""
        self._aborted.set()
        for running in list(self._active.values()):
            self._finish(running.process, at_once=True)
        self._closed.set()
        self._busy.set()
        if self._guardian is not None:
            self._guardian.join()

    def touch(self) -> None:
        """Note that what is waited for makes progress."""
        now = time.monotonic()
        for running in list(self._active.values()):
            running.touched = now

    @contextmanager
    def awaiting(self, process: Process) -> Iterator[None]:
        """For a process that outlives one question: the time limit holds for it inside only.

        Between two questions it is idle, and neither hangs nor is to blame for what does.
        """
        running = self._active.get(process.pid)
        if running is None:
            yield
            return
        self._await(running)
        try:
            yield
        finally:
            running.awaited = False

    def _await(self, running: _Running) -> None:
        running.touched = time.monotonic()
        running.awaited = True
        self._busy.set()

    def spawn(
        self,
        args: Sequence[str],
        *,
        feed: bool = False,
        extra: Mapping[str, str] | None = None,
        discover: bool = False,
        pushing: bool = False,
    ) -> Process:
        """Start git. The caller reads its output, and ends it by `finish` or `watched`."""
        if self._aborted.is_set():
            raise Stopped
        if self._guardian is None:
            self._guardian = threading.Thread(target=self._guard, name="git time limit", daemon=True)
            self._guardian.start()
        repo = self.repo
        place = [] if discover else [f"--git-dir={repo.git_dir}", f"--work-tree={self.worktree}"]
        self.started += 1
        env = {**self._env(), **(extra or {})}
        if self.is_cache and not pushing:
            env = getting_late(env, self._remote)
        try:
            process = subprocess.Popen(  # noqa: S603 - no shell; what jobs declare goes by stdin only
                [*self._dying_with_us(feed=feed), "git", *place, "--no-replace-objects", *args],
                stdin=subprocess.PIPE if feed else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=self.worktree,
                env=env,
                pass_fds=self._fds,
                process_group=0,
            )
        except FileNotFoundError as error:
            raise PublishError(
                Failure.GIT_MISSING, "git was not found. Fix: install git 2.36 or newer"
            ) from error
        except OSError as error:
            raise causes.from_os("git could not be started", error) from error
        running = _Running(process, time.monotonic())
        self._active[process.pid] = running
        self._busy.set()
        if self._aborted.is_set():  # since we looked: `abort` may have missed this one
            self._finish(process, at_once=True)
            raise Stopped
        return process

    def _dying_with_us(self, *, feed: bool) -> tuple[str, ...]:
        """One more program to start; what is fed ends by itself, too, and in a cache nobody waits for it."""
        return () if feed and self.is_cache else dying_with_parent()

    def run(
        self,
        *args: str,
        stdin: bytes = b"",
        ok: Iterable[int] = (0,),
        doing: str = "",
        discover: bool = False,
        extra: Mapping[str, str] | None = None,
    ) -> bytes:
        """Git's standard output. Raises PublishError when it exits with a status that is not `ok`."""
        status, out, err = self.attempt(*args, stdin=stdin, discover=discover, extra=extra)
        if status not in ok:
            raise causes.from_git(doing or f"git {args[0]} failed", err or causes.wordless(status))
        return out

    def attempt(
        self,
        *args: str,
        stdin: bytes = b"",
        discover: bool = False,
        extra: Mapping[str, str] | None = None,
    ) -> tuple[int, bytes, str]:
        """Git's exit status, standard output and standard error."""
        process = self.spawn(args, feed=bool(stdin), discover=discover, extra=extra)
        with self.watched(process, args[0]):
            out, err = self.converse(process, stdin)
        return process.returncode, out, err.decode(errors="replace")

    def converse(self, process: subprocess.Popen[bytes], stdin: bytes) -> tuple[bytes, bytes]:
        """As `communicate`, and every byte that moves counts as progress. For use inside `watched`."""
        parts: dict[str, list[bytes]] = {"out": [], "err": []}
        left = memoryview(stdin)
        with selectors.DefaultSelector() as selector:
            selector.register(cast("IO[bytes]", process.stdout), selectors.EVENT_READ, "out")
            selector.register(cast("IO[bytes]", process.stderr), selectors.EVENT_READ, "err")
            if process.stdin is not None:
                os.set_blocking(process.stdin.fileno(), False)
                selector.register(process.stdin, selectors.EVENT_WRITE, "in")
            while selector.get_map():
                ready = selector.select(_LOOK)
                if not ready and process.poll() is not None:
                    break  # something that it left behind keeps its output open
                for key, _ in ready:
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
                    except BlockingIOError:  # pragma: no cover - the pipe was filled since it was asked
                        continue
                    except BrokenPipeError:
                        left = left[:0]
                    if not left:
                        selector.unregister(key.fileobj)
                        _close(cast("IO[bytes]", process.stdin))
        return b"".join(parts["out"]), b"".join(parts["err"])

    @contextmanager
    def watched(self, process: AnyProcess | None, name: str) -> Iterator[None]:
        """Whatever happens inside, the process and all it started are gone on leaving.

        Without a process: those that are started inside.

        Raises PublishError when the time limit ended it, Stopped when `abort` did.
        """
        others = set(self._active)
        known = self._active.get(process.pid) if process else None
        if known is not None:
            self._await(known)
        ended: list[_Running] = []
        try:
            yield
        except (OSError, ValueError):
            # A pipe broke as the process was ended; what follows says why it was.
            if not (self._aborted.is_set() or any(each.expired for each in self._active.values())):
                raise
        finally:
            if process is None:
                ended = [each for pid, each in self._active.items() if pid not in others]
            elif known is not None:
                ended = [known]
            for each in ended:
                self._finish(each.process)
        if self._aborted.is_set():
            raise Stopped
        if any(each.expired for each in ended):
            raise PublishError(
                Failure.TIMEOUT,
                f"git {name} made no progress for {self._timeout:g} s and was ended. Fix: check the network "
                "and the remote, or raise BRITER_GIT_TIMEOUT_MS",
            )

    def running(self) -> tuple[int, ...]:
        """The processes that have not ended yet, by their numbers."""
        return tuple(self._active)

    def dismiss(self, process: AnyProcess) -> None:
        """End a process that nobody waits for any more, with all that it started."""
        self._finish(process, at_once=True)

    def _finish(self, process: AnyProcess, *, at_once: bool = False) -> None:
        if not at_once:
            await_exit(process, _LAST_WORDS)
        if process.poll() is None:
            self._end(process)
        elif process.returncode < 0:
            self.ended += 1  # not by us: by the kernel when memory was short, say
        with self._ending:
            pass  # another thread's `_end` may be at what it started, which may take longer to go
        self._active.pop(process.pid, None)
        for pipe in (process.stdin, process.stdout, process.stderr):
            _close(pipe)

    def _end(self, process: AnyProcess) -> None:
        with self._ending:
            self.ended += 1
            end(process)

    def _guard(self) -> None:
        """End what makes no progress within the time limit; runs beside the commands until `close`."""
        while not self._closed.is_set():
            self._busy.wait()
            awaited = [running for running in list(self._active.values()) if running.awaited]
            if not awaited:
                self._busy.clear()
                if self._closed.is_set() or any(each.awaited for each in list(self._active.values())):
                    self._busy.set()  # pragma: no cover - a race: it began between the two lines above
                continue
            nap = _LOOK
            for running in awaited:
                left = running.touched + self._timeout - time.monotonic()
                if left <= 0:
                    running.expired, running.awaited = True, False
                    self._end(running.process)
                else:
                    nap = min(nap, left)
            self._closed.wait(nap)

    def _env(self) -> dict[str, str]:
        if self._environment is None:
            reader = self.config
            make = partial(
                environment,
                worktree=self.worktree,
                remote=self._remote,
                ssh=str(reader.get_value("core", "sshCommand", default="ssh")),
                variant=str(reader.get_value("ssh", "variant", default="")),
                hooks=self._hooks,
                fds=self._fds,
                access=self._access,
                durable=not self.is_cache,
            )

            def listed() -> list[Setting]:
                self._environment = make()
                found = parsed(self.run("config", "--null", "--get-regexp", LISTED, ok=(0, 1)))
                conceal(secrets_in([*found, *proxies()]))
                return found

            found = _OF_CACHES.listed(reader, listed) if self.is_cache else listed()
            if self._fds or self._environment is None:
                self._environment = make(helpers=helpers_of(found) if self._fds else ())
        return self._environment


def _close(pipe: IO[Any] | None) -> None:
    if pipe is not None:
        with suppress(OSError, ValueError):
            pipe.close()
