"""One running git command: what it prints, its limits, and its end with everything that it started."""

from __future__ import annotations

import os
import selectors
import signal
import threading
import time
from contextlib import suppress
from functools import cache
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

from briter_worker.errors import FailureCode, PublishError
from briter_worker.git.progress import Progress

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

_GRACE_S = 2.0
"""Time between SIGTERM and SIGKILL."""
_STEP_S = 0.1
"""Seconds between two looks at the limits of running commands."""
_LOOKS = 8
"""Checks of a command's progress within the limit without progress; each check reads /proc."""
_MAX_PAUSE_S = 5.0
_PIECE = 1 << 16
_KEPT_ERROR_BYTES = 64_000
"""So much is kept of the beginning of git's error output, and as much of its end."""
_OPEN_PIPE_S = 0.5
"""How long to wait for more output of a process that has exited, while another one keeps its pipe open."""


class Limits(NamedTuple):
    """Limits of one command, in seconds."""

    idle: float
    """Without progress."""
    total: float
    """In all, however well it progresses."""


class Command:
    """A git command and its limits. `finish` it once, in the thread that started it."""

    def __init__(self, process: subprocess.Popen[bytes], name: str, limits: Limits) -> None:
        self.process = process
        self.name = name
        self.send = cast("IO[bytes]", process.stdin)
        self.answers = cast("IO[bytes]", process.stdout)
        self.progress = Progress(process.pid)
        self.is_expired = False
        self.said = ""
        """The errors that the process printed, without their middle, once they are read."""
        self.has_output = False
        """True once the process has printed something."""
        self._ending = threading.RLock()  # `abort` may come from a signal handler
        self.restart(limits)

    def restart(self, limits: Limits) -> None:
        """Have the limits count from now."""
        _watch_limits()
        self.limits = limits
        self._started_at = self._moved_at = time.monotonic()
        _plan_look(self, self._started_at)

    def look(self, now: float) -> None:
        """End the command if its time is over; else plan the next look."""
        if self.has_exited():
            return
        if self.progress.has_risen():
            self._moved_at = now
        if now < self.ends_at:
            _plan_look(self, now)
        else:
            threading.Thread(target=self.expire, daemon=True).start()  # it may take seconds

    @property
    def ends_at(self) -> float:
        """Return when the command's time is over, unless it progresses until then."""
        return min(self._started_at + self.limits.total, self._moved_at + self.limits.idle)

    @property
    def has_used_up_total(self) -> bool:
        """Return True if the limit in all was the shorter one for this command."""
        return self._started_at + self.limits.total <= self._moved_at + self.limits.idle

    def expire(self) -> None:
        """End the process, unless it has exited: its time is over."""
        self.is_expired = not self.has_exited()
        self.end()

    def has_exited(self) -> bool:
        """Return True if the process itself has ended."""
        return self.process.poll() is not None

    def read_output(self, watch: Callable[[bytes], object] = len) -> tuple[bytes, str]:
        """Return the output, and the errors without their middle.

        `watch` gets the errors as they come, and an empty part from time to time while nothing comes.
        A daemon that ssh or a helper leaves behind may keep a pipe open: git's exit ends the reading then.
        """
        out, errors = bytearray(), bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self.answers, selectors.EVENT_READ, out)
            selector.register(cast("IO[bytes]", self.process.stderr), selectors.EVENT_READ, errors)
            has_exited = False
            while selector.get_map():
                ready = selector.select(0 if has_exited else _OPEN_PIPE_S)
                if not ready:
                    if has_exited:
                        break
                    watch(b"")
                    has_exited = self.has_exited()  # what it wrote just before is in the pipe now
                for key, _ in ready:
                    part = os.read(key.fd, _PIECE)
                    key.data.extend(part)
                    self.has_output = self.has_output or bool(part)
                    if key.data is errors:
                        self.progress.read(part)
                        watch(part)
                    del errors[_KEPT_ERROR_BYTES:-_KEPT_ERROR_BYTES]
                    if not part:
                        selector.unregister(key.fileobj)
        self.said = errors.decode(errors="replace")
        return bytes(out), self.said

    def end(self) -> None:
        """End the process and everything it started."""
        with self._ending:
            if not self.has_exited():
                end_process(self.process)

    def finish(self) -> None:
        """Wait for the exit, which the deadline bounds, and close the pipes."""
        self.process.wait()
        _looks.pop(self, None)
        with self._ending:  # another thread may still be ending what the process started
            for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
                if pipe is not None:
                    with suppress(OSError, ValueError):
                        pipe.close()


class CommandTimeoutError(PublishError):
    """Report a command that was ended at one of its limits."""

    def __init__(self, command: Command) -> None:
        self.said = command.said
        self.has_moved = command.progress.has_moved
        """The command had made progress."""
        limits = command.limits
        if command.has_used_up_total:
            text, setting = f"did not end within {limits.total:g} s", "BRITER_GIT_TRANSFER_TIMEOUT_MS"
        elif self.has_moved:
            text, setting = f"made no progress for {limits.idle:g} s", "BRITER_GIT_TIMEOUT_MS"
        else:
            text, setting = f"did not end within {limits.idle:g} s", "BRITER_GIT_TIMEOUT_MS"
        fix = f"check the network and the remote, or raise {setting}"
        super().__init__(FailureCode.TIMEOUT, f"git {command.name} {text}", fix)


_looks: dict[Command, float] = {}
"""Running commands, and when to look at each again."""


def _plan_look(command: Command, now: float) -> None:
    pause = min(max(command.limits.idle / _LOOKS, _STEP_S), _MAX_PAUSE_S)
    _looks[command] = min(now + pause, command.ends_at)


@cache
def _watch_limits() -> None:
    """Start the one thread that ends commands at their limits. Later calls do nothing.

    A thread for each command would cost 0.2 ms a command.
    """

    def run() -> None:
        while True:
            time.sleep(_STEP_S)
            for command, at in [*_looks.items()]:
                now = time.monotonic()
                is_due = at <= now
                if is_due and _looks.pop(command, None) is not None:  # the command may have ended meanwhile
                    command.look(now)

    threading.Thread(target=run, name="limits", daemon=True).start()


def end_process(process: subprocess.Popen[Any]) -> None:
    """End the process and its group. Return when all are gone, or cannot be ended."""
    with suppress(ProcessLookupError, PermissionError):
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(process.pid, signal_number)
            deadline = time.monotonic() + _GRACE_S
            while time.monotonic() < deadline:
                process.poll()
                os.killpg(process.pid, 0)  # raises when the group is gone
                time.sleep(0.01)
