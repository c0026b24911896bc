"""Ends processes of git's with everything they started, and has them end with us."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from typing import Protocol

import psutil

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_GRACE = 2.0
_LOOK = 0.01


class Process(Protocol):
    """A process of ours, the leader of its own group."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """Its exit status, or None while it runs."""
        ...


def die_with_parent() -> None:
    """In the child: SIGTERM when the parent dies, so that git removes its own lock files."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


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
