"""Runs git: the only module that starts a process.

Every git command gets a scrubbed environment, fixed repository, no prompts, no hooks or programs of the
work tree's, and a limit on how long it may make no progress. Children hold the site's lock with us (its
descriptor is passed on), so that an orphan keeps the next worker out until it is gone; and they get
SIGTERM when we die, so that they remove their own lock files. What runs is watched by `watch`.
"""

from __future__ import annotations

import configparser
import subprocess
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import git
from git.cmd import Git

from briter_worker.errors import Failure, PublishError, conceal
from briter_worker.git import causes, configuration
from briter_worker.git.credentials import LISTED, secrets_in
from briter_worker.git.ending import dying_with_parent, until_exit
from briter_worker.git.environment import environment, getting_late, helpers_of, parsed, proxies
from briter_worker.git.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from git.config import GitConfigParser

    from briter_worker.git.access import Access
    from briter_worker.git.environment import Setting
    from briter_worker.git.watch import AnyProcess, Process

_OF_CACHES = configuration.Shared()


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
        self._hooks = hooks
        self._fds = pass_fds
        self._access = access
        self.is_cache = is_cache
        self.watch = Watch(timeout)
        # Kept for good: it remembers git's version, which it would ask for again.
        self._shell = _Shell(worktree)
        self._shell.home = self
        self._repo: git.Repo | None = None
        self._config: GitConfigParser | None = None
        self._environment: dict[str, str] | None = None
        self._configured: list[tuple[int, int, int] | None] = []
        self._read_again_at = 0.0
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

    def spawn(
        self,
        args: Sequence[str],
        *,
        feed: bool = False,
        extra: Mapping[str, str] | None = None,
        discover: bool = False,
        pushing: bool = False,
    ) -> Process:
        """Start git. The caller reads its output, and ends it by `watch.dismiss` or `watch.watched`."""
        self.watch.may_start()
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
        self.watch.begin(process)
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
        with self.watch.watched(process, args[0]):
            out, err = self.watch.converse(process, stdin)
        return process.returncode, out, err.decode(errors="replace")

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
