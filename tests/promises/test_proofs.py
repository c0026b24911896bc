"""A small part of each proof that `scripts/soak` makes at full scale; and the lock with real processes."""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil
import pytest
from requirements import provide, unavailable
from soak import cluster, fuzz, lock, machine, oracle, sweep
from soak.lock import is_free, is_refused, racer, wait_for
from soak.networks import why_no_networks
from soak.report import Options
from soak.strace import may_trace

from briter_worker.lock import read_holder

if TYPE_CHECKING:
    from pathlib import Path


SEED = random.SystemRandom().randrange(2**31)


@pytest.mark.slow
def test_random_histories_lose_nothing_and_publish_nothing_twice_extra_or_early() -> None:
    figures, trouble = machine.histories(5, SEED)
    assert not trouble, trouble
    assert figures["published"], f"nothing was published in {dict(figures)}"


@pytest.mark.slow
def test_of_random_path_lists_what_git_itself_would_record_is_published() -> None:
    figures, trouble = oracle.trials(oracle.LISTS * oracle.DRAINS, SEED)
    assert not trouble, trouble
    assert figures["commits"]
    assert figures["nopaths"]


@pytest.mark.slow
def test_random_bytes_are_accepted_or_refused_and_nothing_else() -> None:
    if not fuzz.is_installed():
        unavailable("atheris is not installed: it has no wheel for this Python")
    runs, trouble = fuzz.fuzz(8_000, SEED)
    assert not trouble, trouble
    assert runs


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_whatever_call_a_kill_or_a_failing_disk_hits_the_next_runs_recover() -> None:
    provide("strace", package="strace")
    if not may_trace():
        unavailable("strace may not follow processes here: a container needs --cap-add SYS_PTRACE")
    print(f"again with: scripts/soak sweep --quick --seed {SEED}")  # noqa: T201
    report = sweep.run(Options(full=False, seed=SEED), print)
    # The number of system calls varies from run to run: a call may not be reached the second time.
    assert [failure for failure in report.failures if not failure.startswith("not reached")] == []
    assert report.figures["recovered"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_whatever_happens_to_the_nodes_of_a_cluster_each_save_is_published_once() -> None:
    provide("setpriv", package="util-linux")
    provide("ip", package="iproute2")
    if reason := why_no_networks():
        unavailable(f"no network namespaces here: {reason}")
    print(f"again with: scripts/soak cluster --quick --seed {SEED}")  # noqa: T201
    report = cluster.run(Options(full=False, seed=SEED), print)
    assert report.failures == []
    assert report.figures["commits of the worker"]
    assert report.figures["SIGSTOP, longer than the silence"]
    assert report.figures["networks cut, longer than the silence"]
    assert report.figures["disks spoilt"]
    assert report.figures["saves that a restore made outdated"]


# The lock: processes that are killed, stopped, orphaned, and in other PID namespaces


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
        holder = read_holder(tmp_path / "worker.lock")
        assert holder is not None
        assert not holder.alive  # no worker lives, though nobody else may start
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
