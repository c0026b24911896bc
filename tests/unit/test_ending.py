"""Processes end with all that they started, in time, on any system."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from briter_worker.git import ending

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def sh(text: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sh", "-c", text], stdout=subprocess.PIPE, process_group=0)


def test_without_setpriv_git_is_started_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "_TRUSTED", "/nowhere")
    ending.dying_with_parent.cache_clear()
    try:
        assert ending.dying_with_parent() == ()
    finally:
        ending.dying_with_parent.cache_clear()


def test_an_exit_is_awaited_also_where_a_process_cannot_be_polled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    with sh("sleep 0.1; exit 3") as process:
        ending.await_exit(process, 30)
        assert process.returncode == 3
    with sh("exec sleep 60") as process:
        ending.await_exit(process, 0.05)
        assert process.poll() is None
        process.kill()


def test_what_does_not_want_to_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "_GRACE", 0.2)
    with sh("trap '' TERM; echo ready; while :; do sleep 0.05; done") as process:
        assert process.stdout is not None
        process.stdout.readline()
        ending.end(process)
        assert process.poll() == -signal.SIGKILL


def test_a_pipe_that_another_keeps_open_is_read_until_the_process_has_exited(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    with sh(f"echo said; setsid sleep 60 & echo $! > {pid}; exit 0") as process:
        began = time.monotonic()
        lines = ending.until_exit(process, process.stdout)
        assert lines is not None
        assert lines.readlines() == ["said\n"]
        assert time.monotonic() - began < 30
        with suppress(ProcessLookupError):
            os.kill(int(pid.read_text()), signal.SIGKILL)


def test_a_pipe_that_was_not_asked_for_has_no_lines() -> None:
    with sh("exit 0") as process:
        assert ending.until_exit(process, process.stderr) is None
