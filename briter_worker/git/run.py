"""Run git: the only module that starts processes.

Each command gets a scrubbed environment, a fixed repository, no prompts, no hooks of the work tree, and two
limits: for the time without progress, and in all. Children inherit the descriptors of the site's lock and of
the repository's, so that an orphan keeps the next worker and the next `pull` out until it has ended. They end
when the worker dies, so that git removes its lock files.
"""

from __future__ import annotations

import configparser
import io
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import filelock
import git
from git.cmd import Git as GitPythonCommand
from git.repo.fun import is_git_dir

from briter_worker.errors import FailureCode, PublishError, StoppedError
from briter_worker.git import messages
from briter_worker.git.command import Command, CommandTimeoutError, Limits
from briter_worker.git.configuration import Configuration, conceal_secrets, normalize_key
from briter_worker.git.environment import Surroundings, without
from briter_worker.git.format import check_format
from briter_worker.git.https import Logins, add_settings, has_own_header, is_not_accepted, parse_login

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from briter_worker.git.configuration import Setting
    from briter_worker.git.https import Login
    from briter_worker.git.ssh import SshConnection, SshConnections

_LOCK_POLL_S = 0.05
_NO_ENVIRONMENT: Mapping[str, str] = {}
_ENDING_ALONE = frozenset(
    {"check-attr", "check-ignore", "config", "diff-tree", "ls-files", "ls-tree", "merge-base"}
    | {"fast-import", "for-each-ref", "update-ref"}
)
"""Commands that ask no remote, and end without the worker: within milliseconds, or as their input ends."""
_REMOTE = frozenset({"fetch", "ls-remote", "push"})
"""Commands that a kept ssh connection serves."""
_HARMLESS = frozenset({"commit-tree", "--add", "checkout-index"})
"""Commands that hold no lock: they start programs that sign or filter, and such an orphan may hang."""


@dataclass(eq=False, repr=False)
class Git(Surroundings):
    """Run git in one repository. Not for use by two threads at once, except `abort`."""

    ssh: SshConnections | None = None
    """Connections to keep; None: each command opens one of its own."""
    branch: str = field(default="", init=False)
    """The branch to check out, for the fix of a damaged HEAD."""
    configuration: Configuration | None = field(default=None, init=False)
    """Git's configuration here, once it is read."""
    watch: Callable[[bytes], object] = field(default=len, init=False)
    """Gets what a push prints as it comes."""
    said: str = field(default="", init=False)
    """All that the last push printed, without its middle."""
    failures: set[FailureCode] = field(default_factory=set, init=False)
    """Codes of the failures that git reported."""

    def __post_init__(self) -> None:
        self._place = cast("Path", self.worktree or self.bare)
        self._lock: int | None = None
        self._repo: git.Repo | None = None
        self._environment: dict[str, str] | None = None
        self._active: list[Command] = []
        self._begun: dict[tuple[tuple[str, ...], bytes | None], Command] = {}
        self._aborted = threading.Event()
        self._is_given_up = False
        self._state: Path | None = None
        self._logins = Logins()

    @property
    def _limits(self) -> Limits:
        return Limits(self.timeout, self.total_timeout)

    @property
    def repo(self) -> git.Repo:
        """Return GitPython's view of the repository. Raises PublishError when there is none."""
        if self._repo is None:
            try:
                if self.worktree is None and is_git_dir(str(self._place)):
                    repo: git.Repo = _BareRepo(self._place)
                else:
                    repo = git.Repo(self._place, search_parent_directories=False, expand_vars=False)
            except (git.InvalidGitRepositoryError, git.NoSuchPathError) as error:
                raise self._no_repository() from error
            except (configparser.Error, UnicodeDecodeError) as error:
                # Without their text, which is the wrong line: a URL may stand there.
                raise PublishError(
                    FailureCode.CORRUPT,
                    f"git's configuration cannot be read ({type(error).__name__})",
                    "correct the line that git config --list names, in the site's repository",
                ) from None
            repo.git = _GitPython(self, self._place)
            self._folders = Path(repo.git_dir), Path(os.path.normpath(repo.common_dir))
            self._repo = repo
        return self._repo

    def _no_repository(self) -> PublishError:
        head = self._place / ".git" / "HEAD"
        if (head.parent / "objects").is_dir():  # git sees no repository there
            try:
                head.read_bytes()
            except OSError as error:
                return PublishError.from_os("HEAD cannot be read", error)
            fix = shlex.join(["echo", f"ref: refs/heads/{self.branch}"])
            return PublishError(
                FailureCode.CORRUPT, f"{head} is damaged", f"{fix} > {shlex.quote(str(head))}"
            )
        return PublishError(
            FailureCode.NOT_A_REPOSITORY,
            f"{self._place} is not the top of a git repository",
            "clone the site there, or point BRITER_GIT_WORKTREE at its clone",
        )

    @property
    def git_dir(self) -> Path:
        """Return the git folder of this work tree, which may be a linked one."""
        _ = self.repo  # reads the folders when it is opened
        return self._folders[0]

    @property
    def common_dir(self) -> Path:
        """Return the git folder that all linked work trees share."""
        _ = self.repo
        return self._folders[1]

    @property
    def state_dir(self) -> Path:
        """Return the folder of the state that the worker trusts; only its owner can enter it.

        Raises UsageError if a later program has written the state.
        """
        if self._state is None:
            check_format(self.common_dir / "briter")
            self._state = _make_folder(self.common_dir / "briter")
        return self._state

    @property
    def own_dir(self) -> Path:
        """Return the folder for what concerns this work tree alone, which may be a linked one."""
        return _make_folder(self.git_dir / "briter")

    @property
    def settings(self) -> Sequence[Setting]:
        """Return git's configuration here, in the order in which later settings win."""
        if self.configuration is None:
            self._environment = self.variables(())
            is_new = not self._place.exists()  # a clone that is about to be made
            listed = self.run("config", "--null", "--list", "--show-origin", discover=is_new)
            self._environment = None
            self.configuration = Configuration(listed, self._place)
            conceal_secrets(self.configuration.settings)
        return self.configuration.settings

    def config(self, key: str, default: str = "") -> str:
        """Return the value that counts for this key."""
        return next(iter(self.config_values(key)[-1:]), default)

    def config_values(self, key: str) -> list[str]:
        """Return all values of this key, in their order."""
        wanted = normalize_key(key)
        return [value for name, value in self.settings if name == wanted]

    def refresh(self) -> None:
        """Look at the repository again, and at its configuration if a user may have changed that."""
        if self.configuration is None or not self.configuration.is_current():
            self.configuration = self._environment = self._repo = None
        # What is damaged is opened again, and a linked work tree, which has a file there.
        if not is_git_dir(f"{self._place}/.git" if self.worktree else str(self._place)):
            self._repo = None

    @contextmanager
    def locked(self, path: Path, patience: float | None = None) -> Iterator[None]:
        """Hold the kernel's lock on the file inside. Children inherit the lock: an orphan of ours holds it.

        Raises PublishError if another process holds the lock for so many seconds (None: one git command's).
        """
        if self._lock is None:
            try:
                self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise PublishError.from_os("the repository cannot be locked", error) from error
            self.pass_fds += (self._lock,)
            self._environment = None
        deadline = time.monotonic() + (self.timeout if patience is None else patience)
        while not filelock.lock_descriptor(self._lock, blocking=False):
            self.check_running()
            if time.monotonic() >= deadline:
                text = "another command of briter-worker works in the repository"
                raise PublishError(FailureCode.LOCKED, text, "let that command end, then try again")
            time.sleep(_LOCK_POLL_S)
        try:
            yield
        finally:
            filelock.unlock_descriptor(self._lock)

    def run(
        self,
        *args: str,
        stdin: bytes = b"",
        ok: Collection[int] = (0,),
        env: Mapping[str, str] = _NO_ENVIRONMENT,
        discover: bool = False,
    ) -> bytes:
        """Return git's standard output. Raises PublishError when it exits with a status that is not `ok`.

        `discover`: git looks for the repository itself, and checks its owner.
        """
        status, out, err = self.attempt(*args, stdin=stdin, env=env, discover=discover)
        if status not in ok:
            raise self.failure(args, err, status)
        return out

    def fields(
        self,
        *args: str,
        lines: Iterable[str] = (),
        stdin: bytes = b"",
        ok: Collection[int] = (0,),
        env: Mapping[str, str] = _NO_ENVIRONMENT,
    ) -> list[str]:
        """Return what a command with `-z` prints, given the lines that it reads as such a one."""
        return os.fsdecode(self.run(*args, stdin=stdin or nul_lines(lines), ok=ok, env=env)).split("\0")[:-1]

    def attempt(
        self, *args: str, stdin: bytes = b"", env: Mapping[str, str] = _NO_ENVIRONMENT, discover: bool = False
    ) -> tuple[int, bytes, str]:
        """Return git's exit status, standard output and standard error."""
        command = self._begun.pop((args, stdin), None)
        if command is None and args[0] in _REMOTE:
            process, out, said = self._ask_remote(args)
            return process.returncode, out, said
        if command is None:
            command = self._start(args, stdin, env=env, discover=discover)
        command.restart(self._limits)
        with self._finishing(command):
            out, said = command.read_output()
        return command.process.returncode, out, said

    def _ask_remote(
        self, args: Sequence[str], watch: Callable[[bytes], object] = len
    ) -> tuple[subprocess.Popen[bytes], bytes, str]:
        """Run a command that asks the remote, with as few round trips as git allows.

        The remote is asked where it is pushed to: a fetch address may be a replica some seconds behind, and
        what a replica lacks is no rewritten history.
        """
        remote = args[args.index("--") + 1]
        url = self._push_url(remote)
        env = _NO_ENVIRONMENT if args[0] == "push" else self._redirected(remote, url)
        if url.startswith("https://"):
            return self._ask_by_https(args, watch, url, env)
        return self._ask_by_ssh(args, watch, url, env)

    def _redirected(self, remote: str, push_url: str) -> Mapping[str, str]:
        """Return the environment in which a fetch from the remote goes to this address.

        The address may contain a secret, so the address is no argument of git.
        """
        fetch_urls = self.config_values(f"remote.{remote}.url")
        if not fetch_urls or fetch_urls[0] == push_url:
            return _NO_ENVIRONMENT
        # Of several rewrites, git takes the one with the longest match: this one matches the whole address.
        rewrite = (f"url.{push_url}.insteadOf", fetch_urls[0])
        return add_settings(self.variables(self.settings), [rewrite])

    def _ask_by_https(
        self, args: Sequence[str], watch: Callable[[bytes], object], url: str, env: Mapping[str, str]
    ) -> tuple[subprocess.Popen[bytes], bytes, str]:
        """Run the command with the credentials in its first request, if they are known."""
        login, is_fresh = self._logins.get(url, time.monotonic()), False
        if login is None:
            login, is_fresh = self._find_login(url), True
        if login is None:
            return self._complete(args, watch, env)
        conceal_secrets(login.as_address())
        with_login = add_settings({**self.variables(self.settings), **env}, login.settings())
        process, out, said = self._complete(args, watch, with_login)
        if process.returncode and is_not_accepted(said):
            self._logins.forget(url, is_fresh=is_fresh)
            return self._complete(args, watch, env)
        if process.returncode == 0 and is_fresh:
            self._logins.keep(url, login, time.monotonic())
            if self.access is None:
                self.attempt("credential", "approve", stdin=login.described(url))  # as git does
        return process, out, said

    def _find_login(self, url: str) -> Login | None:
        """Return the credentials for the URL; None if there are none, or the host did not accept them."""
        if self._logins.is_refused(url) or has_own_header(self.settings):
            return None
        status, filled, _ = self.attempt("credential", "fill", stdin=os.fsencode(f"url={url}\n\n"))
        return None if status else parse_login(url, filled)

    def _ask_by_ssh(
        self, args: Sequence[str], watch: Callable[[bytes], object], url: str, env: Mapping[str, str]
    ) -> tuple[subprocess.Popen[bytes], bytes, str]:
        """Run the command over a kept ssh connection if there is one.

        Where that connection turns out to be dead, and the remote has said nothing, the command is repeated.
        """
        if self.ssh is None:
            return self._complete(args, watch, env)
        command = self.ssh_command(self.settings)
        variables = self.variables(self.settings)
        with self.ssh.borrow(command, url, variables, self.worktree or self._place) as connection:
            if connection is None:
                return self._complete(args, watch, env)
            line = without(self.pass_fds, f"{command} {connection.options}")
            env = {**env, "GIT_SSH_COMMAND": line}
            process, out, said = self._complete(args, watch, env, connection)
            if process.returncode and connection.has_given_up:
                process, out, said = self._complete(args, watch, env, connection)
            return process, out, connection.without_remarks(said)

    def _complete(
        self,
        args: Sequence[str],
        watch: Callable[[bytes], object],
        env: Mapping[str, str] = _NO_ENVIRONMENT,
        connection: SshConnection | None = None,
    ) -> tuple[subprocess.Popen[bytes], bytes, str]:
        command = self._start(args, env=env)
        with self._finishing(command), nullcontext() if connection is None else connection.watched(command):
            out, said = command.read_output(watch)
        return command.process, out, said

    def _push_url(self, remote: str) -> str:
        """Return the address that the remote is pushed to."""
        urls = self.config_values(f"remote.{remote}.pushurl") or self.config_values(f"remote.{remote}.url")
        if not urls:
            return remote
        if not any(key.startswith("url.") for key, _ in self.settings):
            return urls[0]
        return os.fsdecode(self.run("remote", "get-url", "--push", remote)).rstrip("\n")

    def begin(self, *args: str, stdin: bytes | None = b"") -> None:
        """Start a command ahead: `run` with the same arguments waits for this one and returns its output.

        With None for `stdin`, `ask` talks to the command, and then `open`.
        """
        self._begun[args, stdin] = command = self._start(args, stdin)
        command.restart(Limits(self.total_timeout, self.total_timeout))  # it may wait for its input

    def ask(self, args: tuple[str, ...], questions: Sequence[bytes]) -> list[bytes]:
        """Send questions of a line each to a command that `begin` started. Return [] if it is gone."""
        command = self._begun.get((args, None))
        if command is None:
            return []
        with suppress(OSError):
            command.send.write(b"".join(questions))
            command.send.flush()
            lines = [command.answers.readline() for _ in questions]
            if all(lines):
                return lines
        self.end_begun()
        return []

    def end_begun(self) -> None:
        """End the commands that `begin` started and nobody used, as after a batch that ended early."""
        while self._begun:
            command = self._begun.popitem()[1]  # ends with its input
            with suppress(OSError, ValueError):  # `abort` or `close` may have ended it
                if command.process.stdin is not None:
                    command.send.close()
                command.read_output()
            self._finish(command)

    @contextmanager
    def open(self, *args: str, env: Mapping[str, str] = _NO_ENVIRONMENT) -> Iterator[Command]:
        """Start git for a conversation through its pipes, within one deadline; end it on leaving.

        An exit status other than 0 raises PublishError with git's words, also in place of the broken pipe or
        the EOFError that the caller had. A git that prints more errors than a pipe holds meets its deadline.
        """
        command = self._begun.pop((args, None), None) or self._start(args, None, env=env)
        command.restart(self._limits)
        failed, said = None, ""
        with self._finishing(command):
            try:
                yield command
                command.send.close()
            except (BrokenPipeError, EOFError) as error:
                failed = error
            except BaseException:
                command.end()
                raise
            said = command.read_output()[1]
        if failed or command.process.returncode:
            raise self.failure(args, said, command.process.returncode) from failed

    def failure(self, args: Sequence[str], said: str, status: int) -> PublishError:
        """Return what a failed command's text means."""
        failure = messages.from_git(args, said or messages.status_text(status))
        self.failures.add(failure.code)
        return failure

    def check_running(self) -> None:
        """Raise StoppedError after `abort`."""
        if self._aborted.is_set():
            raise StoppedError

    def abort(self) -> None:
        """End every running command, and let none start. From any thread."""
        self._aborted.set()
        for command in list(self._active):
            command.end()

    def give_up(self) -> None:
        """As `abort`, and allow no last commands: the next run asks what became of a push."""
        self._is_given_up = True
        self.abort()

    def allow_last_commands(self, timeout: float) -> None:
        """After `abort`, allow a few commands within this time each: to ask what became of a push."""
        if self._aborted.is_set() and not self._is_given_up:
            self.timeout = self.total_timeout = min(timeout, self.timeout, self.total_timeout)
            self._aborted.clear()

    def close(self) -> None:
        """End everything that runs."""
        self.abort()
        for command in list(self._active):
            self._finish(command)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _start(
        self,
        args: Sequence[str],
        stdin: bytes | None = b"",
        *,
        env: Mapping[str, str] = _NO_ENVIRONMENT,
        discover: bool = False,
    ) -> Command:
        self.check_running()
        place = [] if discover else [f"--git-dir={self.repo.git_dir}"]
        if self.worktree is not None and not discover:
            place.append(f"--work-tree={self.worktree}")
        prefix = _with_death_signal() if _ENDING_ALONE.isdisjoint(args[:5]) else ()
        if self._environment is None:
            self._environment = self.variables(self.settings)
        try:
            # A file, which git may read or not. To make one on a disk takes 0.2 ms.
            with nullcontext() if not stdin else os.fdopen(os.memfd_create("stdin"), "w+b") as file:
                if file is not None:
                    file.write(stdin or b"")
                    file.seek(0)
                process = subprocess.Popen(  # noqa: S603 - no shell; what jobs declare goes through stdin only
                    [*prefix, "git", *place, "--no-replace-objects", *args],
                    stdin=file or (subprocess.PIPE if stdin is None else subprocess.DEVNULL),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    cwd=self.worktree or (self._place if self._place.exists() else self._place.parent),
                    env={**self._environment, **env},
                    pass_fds=self.pass_fds if _HARMLESS.isdisjoint(args) else (),
                    start_new_session=True,  # no terminal: ssh-keygen would ask there for a passphrase
                )
        except FileNotFoundError as error:
            if not self._place.is_dir():  # which Popen reports as if git itself were missing
                raise self._no_repository() from error
            fix = "install git 2.38 or newer"
            raise PublishError(FailureCode.GIT_MISSING, "git was not found", fix) from error
        except OSError as error:
            raise PublishError.from_os("git could not be started", error) from error
        command = Command(process, messages.name_of(args), self._limits)
        self._active.append(command)
        if self._aborted.is_set():  # since the check above: `abort` may have missed this process
            command.end()
            self._finish(command)
            raise StoppedError
        return command

    @contextmanager
    def _finishing(self, command: Command) -> Iterator[None]:
        """Wait for the process on leaving. Raises StoppedError or a timeout in place of a broken pipe."""
        try:
            yield
        except (OSError, ValueError):
            if not self._aborted.is_set() and not command.is_expired:
                raise
        finally:
            self._finish(command)
        self.check_running()
        if command.is_expired:
            raise CommandTimeoutError(command)

    def execute(self, args: Sequence[str]) -> subprocess.Popen[Any]:
        """Run what GitPython asks for, within the deadline; `watch` and `said` get what it prints."""
        try:
            ended, out, self.said = self._ask_remote(args, self.watch)
        except CommandTimeoutError as error:
            self.said = error.said
            raise
        process: subprocess.Popen[Any] = ended
        process.stdout, process.stderr = io.StringIO(out.decode(errors="replace")), None
        return process

    def _finish(self, command: Command) -> None:
        command.finish()
        if command in self._active:
            self._active.remove(command)


class _BareRepo(git.Repo):
    """A repository that is known to be bare: GitPython would read its configuration twice to find out."""

    def __init__(self, place: Path) -> None:
        self.git_dir = str(place)


class _GitPython(GitPythonCommand):
    """Lead what GitPython runs through `Git`."""

    def __init__(self, home: Git, place: Path) -> None:
        super().__init__(place)
        self._home = home

    @property
    def version_info(self) -> tuple[int, ...]:
        """Return the oldest supported version: GitPython would start git to ask."""
        return (2, 38)

    def execute(self, command: Sequence[str], *_: Any, **_options: Any) -> Any:  # noqa: ANN401
        """Run the command; only the push goes this way."""
        return GitPythonCommand.AutoInterrupt(self._home.execute(command[1:]), list(command))


def nul_lines(lines: Iterable[str]) -> bytes:
    """Return the lines as git reads them with `-z`."""
    return os.fsencode("".join(f"{line}\0" for line in lines))


def _make_folder(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise PublishError.from_os("the repository cannot be written", error) from error
    return folder


def run_program(
    command: Sequence[str], *, env: Mapping[str, str], place: Path, timeout: float
) -> tuple[int, str]:
    """Return a short program's exit status and its output; a negative status where it did not end in time."""
    try:
        process = subprocess.Popen(  # noqa: S603 - no text of a job
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=place,
            env=dict(env),
            start_new_session=True,
        )
    except OSError:
        return -1, ""
    program = Command(process, command[0], Limits(timeout, timeout))
    try:
        out, _ = program.read_output()
    finally:
        program.finish()
    return process.returncode, os.fsdecode(out)


@cache
def _with_death_signal() -> tuple[str, ...]:
    """Return the command prefix that has a child get SIGTERM when the worker dies.

    It is a program of util-linux and no `preexec_fn`, with which Python forks itself: 7 ms per git, not 1.
    Where it is missing, an orphan ends by itself, and holds the site's lock until then.
    """
    found = shutil.which("setpriv", path="/usr/bin:/bin:/usr/sbin:/sbin")
    return () if sys.platform != "linux" or found is None else (found, "--pdeathsig", "TERM", "--")
