"""One running git command: what it prints, its deadline, and its end with everything that it started."""

from __future__ import annotations

import os
import selectors
import signal
import threading
import time
from contextlib import suppress
from functools import cache
from typing import IO, TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

_GRACE_S = 2.0
"""Time between SIGTERM and SIGKILL."""
_STEP_S = 0.1
"""Seconds between two looks at the deadlines of running commands."""
_PIECE = 1 << 16
_KEPT_ERROR_BYTES = 64_000
"""So much is kept of the beginning of git's error output, and as much of its end."""
_OPEN_PIPE_S = 0.5
"""How long to wait for more output of a process that has exited, while another one keeps its pipe open."""


class Command:
    """A git command and its deadline. `finish` it once, in the thread that started it."""

    def __init__(self, process: subprocess.Popen[bytes], name: str, timeout: float) -> None:
        self.process = process
        self.name = name
        self.send = cast("IO[bytes]", process.stdin)
        self.answers = cast("IO[bytes]", process.stdout)
        self.is_expired = False
        self.has_output = False
        """True once the process has printed something."""
        self._ending = threading.RLock()  # `abort` may come from a signal handler
        self.set_deadline(timeout)

    def set_deadline(self, timeout: float) -> None:
        """End the process after so many seconds from now, in place of an earlier deadline."""
        _watch_deadlines()
        _deadlines[self] = time.monotonic() + timeout

    def expire(self) -> None:
        """End the process, unless it has exited: its deadline is over."""
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
                        watch(part)
                    del errors[_KEPT_ERROR_BYTES:-_KEPT_ERROR_BYTES]
                    if not part:
                        selector.unregister(key.fileobj)
        return bytes(out), errors.decode(errors="replace")

    def end(self) -> None:
        """End the process and everything it started."""
        with self._ending:
            if not self.has_exited():
                end_process(self.process)

    def finish(self) -> None:
        """Wait for the exit, which the deadline bounds, and close the pipes."""
        self.process.wait()
        _deadlines.pop(self, None)
        with self._ending:  # another thread may still be ending what the process started
            for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
                if pipe is not None:
                    with suppress(OSError, ValueError):
                        pipe.close()


_deadlines: dict[Command, float] = {}


@cache
def _watch_deadlines() -> None:
    """Start the thread that ends the commands: one for each would cost 0.2 ms a command."""

    def run() -> None:
        while True:
            time.sleep(_STEP_S)
            for command, at in [*_deadlines.items()]:
                if at <= time.monotonic() and _deadlines.pop(command, 0.0):
                    threading.Thread(target=command.expire, daemon=True).start()  # it may take seconds

    threading.Thread(target=run, name="deadlines", daemon=True).start()


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
