"""Ends processes of git's with everything they started, and has them and their output end in time."""

from __future__ import annotations

import io
import os
import select
import shutil
import signal
import sys
import time
from contextlib import suppress
from functools import cache
from typing import IO, TYPE_CHECKING, Protocol

import psutil

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_TRUSTED = "/usr/bin:/bin:/usr/sbin:/sbin"
_GRACE = 2.0
_LOOK = 0.01
_LISTEN_MS = 500


class Process(Protocol):
    """A process of ours, the leader of its own group."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """Its exit status, or None while it runs."""
        ...


@cache
def dying_with_parent() -> tuple[str, ...]:
    """What to put before a command to have it get SIGTERM when we die: git then removes its lock files.

    A program of util-linux, not a `preexec_fn`: with that, Python forks itself and runs in the child, which
    took 7 ms for each git instead of 1. Where there is none, an orphan ends by itself, and holds the lock
    until then.
    """
    found = shutil.which("setpriv", path=_TRUSTED)
    if sys.platform != "linux" or found is None:
        return ()
    return (found, "--pdeathsig", "TERM", "--")


def await_exit(process: Process, seconds: float) -> None:
    """Return when the process has exited, at once; or when the time is over.

    `Popen.wait` with a limit looks now and then instead, which adds a millisecond to each command.
    """
    if process.poll() is not None:
        return
    try:
        fd = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # no Linux, or one before 5.3
        deadline = time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(_LOOK)
        return
    try:
        ended = select.poll()
        ended.register(fd, select.POLLIN)
        ended.poll(1000 * seconds)
    finally:
        os.close(fd)
    process.poll()


def end(process: Process) -> None:
    """End the process and everything it started; returns when they are gone, or cannot be ended."""
    tree = _started_by(process)
    for how in (signal.SIGTERM, signal.SIGKILL):
        # The leader may be gone, and its group not; without a group its number may be another's by now.
        if process.returncode is not None and not tree:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, how)
        for child in tree:
            with suppress(psutil.Error):
                child.send_signal(how)
        deadline = time.monotonic() + _GRACE
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(_LOOK)
        _, tree = psutil.wait_procs(tree, timeout=_GRACE if how == signal.SIGTERM else 0)
        if process.poll() is not None and not tree:
            return


def _started_by(process: Process) -> list[psutil.Process]:
    """Its descendants, and the rest of its group, whose parents may be gone."""
    found: set[psutil.Process] = set()
    if process.returncode is None:  # else the number may be another's by now
        with suppress(psutil.Error):
            found.update(psutil.Process(process.pid).children(recursive=True))
    for other in psutil.process_iter():
        with suppress(OSError):
            if other.pid != process.pid and os.getpgid(other.pid) == process.pid:
                found.add(other)
    return list(found)


def until_exit(process: Process, pipe: IO[bytes] | None) -> io.TextIOWrapper | None:
    """The lines of one of its pipes, until it has exited, whoever else keeps that pipe open."""
    if pipe is None:
        return None
    raw = _UntilExit(process, pipe)
    return io.TextIOWrapper(io.BufferedReader(raw), encoding="utf-8", errors="replace")


class _UntilExit(io.RawIOBase):
    def __init__(self, process: Process, pipe: IO[bytes]) -> None:
        self._process = process
        self._pipe = pipe
        self._poller = select.poll()
        self._poller.register(pipe, select.POLLIN)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer)
        exited = False
        while not self._poller.poll(0 if exited else _LISTEN_MS):
            if exited:
                return 0  # what it said last has been read
            exited = self._process.poll() is not None
        data = os.read(self._pipe.fileno(), len(view))
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._pipe.close()
        super().close()
