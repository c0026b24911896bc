"""Keep ssh connections for the next push, by OpenSSH's own multiplexing.

With `ControlMaster=auto`, the first command opens the connection, and the next ones use its socket. A kept
connection is never worse than a fresh one:

- One command at a time uses a connection. A second one at the same moment opens another.
- A connection is used for a limited time since it was opened, and ends with its worker.
- One that is silent for too long ends. Then ssh opens a fresh one by itself, or the caller repeats the
  command.
- A user's own multiplexing, and an ssh that is not OpenSSH, stay as they are.

Commands share a connection only if their ssh command, with its key and its options, and the destination are
the same. ssh itself adds host, port and user to the socket's name (`%C`).

The sockets lie in a folder that only the worker's user can enter, with a file that the worker locks. After a
SIGKILL, the next worker of the user finds the lock free, and ends what is left.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import stat
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import filelock
import psutil

from briter_worker.git.environment import trusted_path
from briter_worker.git.run import run_program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from briter_worker.git.command import Command

SILENT_S = 5.0
"""A kept connection over which nothing came for so long is taken for dead."""
_SLOW_HOST = 3
"""A host that is slow itself has so many times the time of its last answer to a fresh connection."""
_EXIT_S = 1.0
_ASK_S = 10.0
_STEP_S = 0.005
_ABANDONED_S = 60.0
_MAX_IDLE = 16
"""More connections than these are not kept: each is a process."""
_MAX_ASKED = 10_000
_MAX_FOLDER = 27
"""A socket's path has less than 104 bytes: the worker's folder adds 9, the socket's name up to 48, and ssh 17
while it makes the socket."""
_PLAIN_PATH = re.compile(rf"/[\w./+-]{{0,{_MAX_FOLDER}}}", re.ASCII)
"""A path that ssh and a shell read as it is."""
_LOCK = "worker"
_HOST = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_USER = r"[A-Za-z0-9_][A-Za-z0-9._+-]*@"
_URL = re.compile(
    rf"(?:git\+)?ssh(?:\+git)?://((?:{_USER})?(?:{_HOST}|\[[0-9a-fA-F:.]+\])(?::\d+)?)(?:/.*)?", re.DOTALL
)
_SHORT_URL = re.compile(rf"((?:{_USER})?{_HOST}):(?!//|:).*", re.DOTALL)
_REMARK = re.compile(r"^(?:mux_?client|ControlSocket )[^\n]*\n?", re.MULTILINE)


def find_destination(url: str) -> str | None:
    """Return whom ssh connects to for git's URL; None if that is not by ssh, or not plain enough to tell."""
    if named := _URL.fullmatch(url):
        return f"ssh://{named[1]}"
    if named := _SHORT_URL.fullmatch(url):
        return named[1]
    return None


@dataclass(frozen=True, slots=True)
class Ssh:
    """Way in which git reaches one remote by ssh. Equal ways share connections."""

    command: str
    """Command line for a shell, with the key and all options."""
    destination: str


class SshConnection:
    """A connection, open or not. One command at a time uses it."""

    def __init__(self, socket: Path, keep: float, path: str) -> None:
        """Take the socket's path without its last part, which ssh adds; `path`: where to look for ssh."""
        persist = max(1, math.ceil(keep))
        self.options = f"-o ControlMaster=auto -o ControlPath={socket}-%C -o ControlPersist={persist}"
        self.has_given_up = False
        """True if the connection was ended because the last command had no answer."""
        self._socket = socket
        self._keep = keep
        self._path = path
        self._opened = -math.inf
        self._answered = 0.0

    def is_open(self) -> bool:
        """Return True if the next command finds a socket."""
        return bool(self._sockets())

    def prepare(self, now: float) -> None:
        """Have the next command open a fresh connection if this one is too old."""
        self.has_given_up = False
        if now - self._opened >= self._keep:
            self.end()
        if not self.is_open():
            self._opened = now

    @staticmethod
    def without_remarks(text: str) -> str:
        """Remove what ssh prints when it could not use the connection, and opened a fresh one by itself."""
        return _REMARK.sub("", text)

    @contextmanager
    def watched(self, command: Command) -> Iterator[None]:
        """End the connection, if it was kept, when the command prints nothing within the time for it."""
        if not self.is_open():
            began = time.monotonic()
            yield
            self._answered = time.monotonic() - began
            return

        def give_up() -> None:
            if not command.has_output:
                self.has_given_up = True
                self.end()

        timer = threading.Timer(max(SILENT_S, _SLOW_HOST * self._answered), give_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()  # it may just be ending the connection, which the next command would use

    def end(self) -> None:
        """End the connection, if it is open, whatever state it is in."""
        with suppress(OSError):
            for socket in self._sockets():
                _end_master(socket, self._path)

    def _sockets(self) -> list[Path]:
        with suppress(OSError):
            found = self._socket.parent.glob(f"{self._socket.name}-*")
            return [path for path in found if not path.suffix]  # with a suffix: ssh is just making it
        return []


class SshConnections:
    """The connections of one worker. Safe in several threads."""

    def __init__(
        self, keep: float, *, worktree: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Use each connection for so many seconds since it was opened. Ends what a dead worker left."""
        self._keep = keep
        self._clock = clock
        self._path = trusted_path(os.environ.get("PATH", os.defpath), worktree)
        self._guard = threading.Lock()
        self._folder: Path | None = None
        self._lock: int | None = None
        self._made = 0
        self._idle: list[tuple[Ssh, SshConnection]] = []
        """The most recently used last."""
        self._asked: dict[Ssh, tuple[float, bool]] = {}
        """Time at which ssh was asked for its configuration, and True if a connection may be kept."""
        self._parent = _find_parent()
        if self._parent is not None:
            self._end_abandoned(self._parent)

    @contextmanager
    def borrow(
        self, command: str, url: str, env: Mapping[str, str], place: Path
    ) -> Iterator[SshConnection | None]:
        """Yield the connection for one command of git; None where none may be kept.

        `command`: how git starts ssh, in `place` with `env`. `url`: the remote's address.
        """
        destination = find_destination(url) if self._keep else None
        if destination is None:
            yield None
            return
        ssh = Ssh(command, destination)
        if not self._may_keep(ssh, env, place) or (connection := self._take(ssh)) is None:
            yield None
            return
        try:
            connection.prepare(self._clock())
            yield connection
        finally:
            self._give_back(ssh, connection)

    def close(self) -> None:
        """End all connections."""
        with self._guard:
            idle, self._idle = self._idle, []
            folder, self._folder, self._parent = self._folder, None, None
        for _, connection in idle:
            connection.end()
        if folder is not None:
            _remove(folder, self._path)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _may_keep(self, ssh: Ssh, env: Mapping[str, str], place: Path) -> bool:
        """Return True if ssh is OpenSSH, and its user has configured no multiplexing for this destination."""
        now = self._clock()
        asked, may_keep = self._asked.get(ssh, (-math.inf, False))
        if now - asked < self._keep:
            return may_keep
        if len(self._asked) > _MAX_ASKED:
            self._asked.clear()
        # As git does it: a shell reads the command, and adds the arguments.
        command = ["/bin/sh", "-c", f'{ssh.command} -G "$@"', "ssh", ssh.destination]
        status, out = run_program(command, env=env, place=place, timeout=_ASK_S)
        found = dict(line.partition(" ")[::2] for line in out.lower().splitlines())
        is_off = found.get("controlmaster") in {"no", "false"}
        may_keep = status == 0 and is_off and found.get("controlpath", "none") == "none"
        self._asked[ssh] = now, may_keep
        return may_keep

    def _take(self, ssh: Ssh) -> SshConnection | None:
        """Return a connection that no command uses; None if there is no folder for its socket."""
        with self._guard:
            folder = self._open_folder()
            if folder is None:
                return None
            for number, (known, connection) in enumerate(self._idle):
                if known == ssh:
                    del self._idle[number]
                    return connection
            self._made += 1
            return SshConnection(folder / str(self._made), self._keep, self._path)

    def _give_back(self, ssh: Ssh, connection: SshConnection) -> None:
        with self._guard:
            if self._folder is not None:
                self._idle.append((ssh, connection))
            surplus = [each for _, each in self._idle[:-_MAX_IDLE]]
            self._idle = self._idle[-_MAX_IDLE:]
        for each in surplus:
            each.end()

    def _open_folder(self) -> Path | None:
        """Return the folder of the sockets, which may have to be made; None if there can be none."""
        if self._folder is not None and _is_folder(self._folder):
            return self._folder
        if self._parent is None:
            return None
        self._idle = []  # somebody has removed the folder, with the sockets
        with suppress(OSError):
            self._folder = self._make_folder(self._parent)
            return self._folder
        return None

    def _make_folder(self, parent: Path) -> Path:
        parent.mkdir(mode=0o700, exist_ok=True)
        if not _is_private(parent):
            raise PermissionError
        hidden = Path(tempfile.mkdtemp(prefix=".", dir=parent))
        if self._lock is not None:
            os.close(self._lock)
        self._lock = _open_lock(hidden, os.O_CREAT)
        filelock.lock_descriptor(self._lock, blocking=False)
        folder = parent / hidden.name[1:]
        hidden.rename(folder)  # under this name another worker looks at it: now it is locked
        return folder

    def _end_abandoned(self, parent: Path) -> None:
        """End the connections of workers that died."""
        with suppress(OSError):
            if not _is_private(parent):
                return
            for folder in parent.iterdir():
                if folder.name.startswith("."):
                    if time.time() - folder.stat().st_mtime > _ABANDONED_S:
                        shutil.rmtree(folder, ignore_errors=True)
                elif _is_abandoned(folder):
                    _remove(folder, self._path)


def _find_parent() -> Path | None:
    """Return the place for the folders of this user's workers; None if no path is short and plain enough."""
    for place in (os.environ.get("TMPDIR", ""), "/tmp"):  # noqa: S108 - the folder is checked to be private
        parent = Path(place, f"briter-{os.geteuid()}")
        if _PLAIN_PATH.fullmatch(str(parent)) and _is_folder(parent.parent):
            return parent
    return None


def _is_folder(path: Path) -> bool:
    with suppress(OSError):  # a folder above may not be entered, or the disk cannot be read
        return path.is_dir()
    return False


def _is_private(folder: Path) -> bool:
    """Return True if only this process's user can enter the folder, and it is no link."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _open_lock(folder: Path, flags: int = 0) -> int:
    return os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)


def _is_abandoned(folder: Path) -> bool:
    """Return True if no worker holds the folder's lock."""
    try:
        lock = _open_lock(folder)
    except OSError:
        return True
    try:
        return filelock.lock_descriptor(lock, blocking=False)
    finally:
        os.close(lock)


def _remove(folder: Path, path: str) -> None:
    """End the connections of the folder, and remove it."""
    with suppress(OSError):
        for socket in folder.iterdir():
            if stat.S_ISSOCK(socket.lstat().st_mode):
                _end_master(socket, path)
    shutil.rmtree(folder, ignore_errors=True)


def _end_master(socket: Path, path: str) -> None:
    """End the process that keeps the connection, by its socket; if it does not answer there, kill it."""
    command = ["ssh", "-F", os.devnull, "-S", str(socket), "-O", "exit", "host"]
    status, _ = run_program(command, env={"PATH": path}, place=socket.parent, timeout=_EXIT_S)
    deadline = time.monotonic() + _EXIT_S
    while status == 0 and socket.exists() and time.monotonic() < deadline:
        time.sleep(_STEP_S)
    if not socket.exists():
        return
    title = f"ssh: {socket} [mux]"
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cmdline()[:1] == [title]:
                process.kill()
    socket.unlink(missing_ok=True)
