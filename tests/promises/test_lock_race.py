"""The lock with real processes: killed, stopped, orphaned, and in other PID namespaces.

`scripts/soak lock` runs the race at full scale.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil
from requirements import unavailable
from soak import lock
from soak.lock import is_free, is_refused, racer, wait_for
from soak.report import Options

from briter_worker.lock import is_held, read_holder

if TYPE_CHECKING:
    from pathlib import Path


def needs_namespaces() -> None:
    if reason := lock.why_no_namespaces():
        unavailable(f"no PID namespaces here: {reason}")


def end(orphan: psutil.Process) -> None:
    """Kill it; whoever adopted it may take its time to reap it."""

    def ended() -> bool:
        return not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE

    orphan.kill()
    with suppress(psutil.NoSuchProcess):
        wait_for(ended)


def test_of_many_killed_and_stopped_workers_never_two_hold_the_lock() -> None:
    needs_namespaces()
    report = lock.run(Options(full=False, seed=1), print)
    assert not report.failures, report.figures
    assert all(report.figures[f"times taken, {where}"] for where in ("here", "half in own PID namespaces"))


def test_an_orphaned_child_keeps_the_lock_until_it_ends(tmp_path: Path) -> None:
    with racer(tmp_path, "hold_with_child") as worker:
        orphan = psutil.Process(int(worker.says()))
        os.kill(worker.pid, signal.SIGKILL)
        wait_for(lambda: psutil.Process(worker.pid).status() == psutil.STATUS_ZOMBIE)
        assert is_refused(tmp_path)
        assert not is_held(tmp_path / "worker.lock")  # no worker lives, though nobody else may start
        end(orphan)
        assert is_free(tmp_path)


def test_pid_1_of_a_new_container_takes_over_from_pid_1_of_a_dead_one(tmp_path: Path) -> None:
    needs_namespaces()
    for _ in range(2):
        with racer(tmp_path, "hold", namespace=True) as worker:
            assert worker.says() == "1"
            holder = read_holder(tmp_path / "worker.lock")
            assert holder is not None
            assert holder.pid == 1
            assert is_refused(tmp_path)
