"""Processes that are stopped and killed together."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil
from sites import eventually

if TYPE_CHECKING:
    from collections.abc import Iterable


def tree_of(pid: int, *, without: str = "") -> list[psutil.Process]:
    """Stop a process, and return it with all it has started, but for programs named `without` and below."""
    found: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        found.append(psutil.Process(pid))
    send(found, signal.SIGSTOP)
    for process in found:  # it grows
        with suppress(psutil.NoSuchProcess):
            found += [each for each in process.children() if not (without and _runs(each, without))]
    return found


def _runs(process: psutil.Process, program: str) -> bool:
    with suppress(psutil.NoSuchProcess):
        return any(program in word for word in process.cmdline()[:3])
    return False


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to those that still live."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def session_of(leader: int) -> list[psutil.Process]:
    """Return the processes of a session, without those that have ended."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end_session(leader: int) -> None:
    """Kill every process of a session, until none is left."""

    def is_empty() -> bool:
        members = session_of(leader)
        send(members, signal.SIGKILL)
        return not members

    eventually(is_empty)
