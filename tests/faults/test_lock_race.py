"""The lock with real processes: killed, stopped, orphaned, and in other PID namespaces.

`BRITER_SOAK_PROCESSES` and `BRITER_SOAK_ROUNDS` set the scale; in full it is 20 and 200.
"""

from __future__ import annotations

import functools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from briter_worker.lock import AnotherWorkerError, SiteLock, is_held, read_holder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROCESSES = int(os.environ.get("BRITER_SOAK_PROCESSES", "8"))
ROUNDS = int(os.environ.get("BRITER_SOAK_ROUNDS", "15"))
RACER = Path(__file__).with_name("lock_racer.py")
ROOT = Path(__file__).parents[2]
UNSHARE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
WEDGED = 10.0
FAR_FUTURE = 1e6


@functools.cache
def why_no_namespaces() -> str:
    if shutil.which("unshare") is None:
        return "there is no unshare"
    tried = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, check=False)
    return tried.stderr.strip() if tried.returncode else ""


def needs_namespaces() -> None:
    if reason := why_no_namespaces():
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI must be able to make PID namespaces: {reason}")
        pytest.skip(f"no PID namespaces here: {reason}")


class Racer:
    """A process of `lock_racer.py`, perhaps PID 1 of its own namespace; `pid` is the one seen from here."""

    def __init__(self, folder: Path, act: str, name: str = "-", *, namespace: bool = False) -> None:
        self.name = name
        self.namespace = namespace
        command = [sys.executable, str(RACER), act, str(folder), name]
        self._process = subprocess.Popen(
            [*UNSHARE, *command] if namespace else command,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        if namespace:
            eventually(lambda: psutil.Process(self._process.pid).children(), "a process in its namespace")
            self.pid = psutil.Process(self._process.pid).children()[0].pid

    def says(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        eventually(lambda: psutil.Process(self.pid).status() == psutil.STATUS_STOPPED, "stopped")

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Dead and reaped at return; its children live on."""
        if self._process.poll() is None:  # else its PID may be somebody else's by now
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._process.wait(WEDGED)
        assert self._process.stdout is not None
        self._process.stdout.close()


def eventually(happens: Callable[[], object], what: str, within: float = WEDGED) -> float:
    """How long it took until it happened."""
    begun = time.monotonic()
    while not happens():
        assert time.monotonic() - begun < within, f"not within {within} s: {what}"
        time.sleep(0.0005)
    return time.monotonic() - begun


def end(orphan: psutil.Process) -> None:
    """Kill it; whoever adopted it may take its time to reap it."""

    def ended() -> bool:
        return not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE

    orphan.kill()
    with suppress(psutil.NoSuchProcess):
        eventually(ended, "the orphan ends")


@contextmanager
def racer(folder: Path, act: str, name: str = "-", *, namespace: bool = False) -> Iterator[Racer]:
    process = Racer(folder, act, name, namespace=namespace)
    try:
        yield process
    finally:
        process.kill()


def assert_refused(folder: Path) -> None:
    """Even when every record is ancient."""
    with pytest.raises(AnotherWorkerError):
        SiteLock(folder / "worker.lock", stale_after=60).acquire(time.time() + FAR_FUTURE)


def assert_free(folder: Path) -> None:
    lock = SiteLock(folder / "worker.lock", stale_after=60)
    lock.acquire(time.time())
    lock.release()


class Race:
    """Many racers on one lock, and what becomes of them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.dice = random.Random(seed)
        self.racers: dict[str, Racer] = {}
        self.started = 0
        self.takeovers: list[float] = []
        self.freezes = 0

    def join(self, *, namespace: bool = False) -> None:
        self.started += 1
        name = str(self.started)
        self.racers[name] = Racer(self.folder, "race", name, namespace=namespace)

    def log(self, name: str) -> list[str]:
        with suppress(FileNotFoundError):
            return (self.folder / name).read_text().splitlines()
        return []

    def taken(self) -> int:
        with suppress(FileNotFoundError):
            return (self.folder / "taken").stat().st_size
        return 0

    def go_on(self, times: int) -> None:
        before = len(self.log("taken"))
        eventually(lambda: len(self.log("taken")) >= before + times, "the race goes on")

    def holder(self) -> Racer:
        """Who has marked the lock at this moment."""
        found: list[str] = []

        def look() -> bool:
            with suppress(FileNotFoundError):
                found.append((self.folder / "marker").read_text())
            return bool(found)

        eventually(look, "somebody has the lock")
        return self.racers[found[-1]]

    def has_marked(self, racer: Racer) -> bool:
        with suppress(FileNotFoundError):
            return (self.folder / "marker").read_text() == racer.name
        return False

    def replace(self, victim: Racer) -> None:
        victim.kill()
        del self.racers[victim.name]
        before = self.taken()
        self.takeovers.append(eventually(lambda: self.taken() > before, "the lock is taken over"))
        self.join(namespace=victim.namespace)

    def round(self) -> None:
        everyone = list(self.racers.values())
        victim = self.holder() if self.dice.random() < 0.7 else self.dice.choice(everyone)
        match self.dice.choice(["kill", "stop", "stop", "stop and kill"]):
            case "kill":
                self.replace(victim)
            case "stop":
                self.freeze(victim)
                victim.go_on()
                self.go_on(1)
            case _:
                self.freeze(victim)
                self.replace(victim)

    def freeze(self, victim: Racer) -> None:
        victim.stop()
        if self.has_marked(victim):
            self.freezes += 1
            before = self.taken()
            time.sleep(0.02)  # for the others to try
            assert self.taken() == before, "a stopped holder was pushed out"
            assert_refused(self.folder)

    def end(self) -> None:
        for racer in self.racers.values():
            racer.kill()

    def run(self, rounds: int) -> None:
        try:
            for _ in range(rounds):
                self.go_on(PROCESSES)
                self.round()
        finally:
            self.end()
        print(  # noqa: T201 - the soak's figures, shown by pytest -s
            f"\n{self.started} processes, {rounds} rounds, {len(self.log('taken'))} times taken, "
            f"{len(self.log('overlaps'))} overlaps, {self.freezes} holders stopped, "
            f"{len(self.takeovers)} killed, slowest takeover {max(self.takeovers, default=0):.3f} s"
        )
        assert self.log("overlaps") == []
        assert max(self.takeovers, default=0) < 1
        assert_free(self.folder)


@pytest.mark.timeout(max(120, PROCESSES * ROUNDS // 2))
def test_of_many_killed_and_stopped_workers_never_two_hold_the_lock(tmp_path: Path) -> None:
    race = Race(tmp_path, seed=1)
    for _ in range(PROCESSES):
        race.join()
    race.run(ROUNDS)


@pytest.mark.timeout(max(120, PROCESSES * ROUNDS // 2))
def test_across_pid_namespaces_never_two_hold_the_lock(tmp_path: Path) -> None:
    needs_namespaces()
    race = Race(tmp_path, seed=2)
    for number in range(PROCESSES):
        race.join(namespace=number % 2 == 0)
    race.run(ROUNDS)


@pytest.mark.parametrize("way", ["pass_fds", "preexec", "fork"])
def test_an_orphaned_child_keeps_the_lock_until_it_ends(tmp_path: Path, way: str) -> None:
    with racer(tmp_path, "hold_with_child", way) as worker:
        orphan = psutil.Process(int(worker.says()))
        try:
            worker_pid = worker.pid
            os.kill(worker_pid, signal.SIGKILL)
            eventually(lambda: psutil.Process(worker_pid).status() == psutil.STATUS_ZOMBIE, "killed")
            assert_refused(tmp_path)
            assert not is_held(tmp_path / "worker.lock")  # no worker lives, though nobody else may start
        finally:
            end(orphan)
        assert_free(tmp_path)


def test_a_child_without_the_descriptor_keeps_nothing(tmp_path: Path) -> None:
    with racer(tmp_path, "hold_with_child", "plain") as worker:
        child = psutil.Process(int(worker.says()))
        try:
            os.kill(worker.pid, signal.SIGKILL)
            eventually(lambda: psutil.Process(worker.pid).status() == psutil.STATUS_ZOMBIE, "killed")
            assert_free(tmp_path)
        finally:
            end(child)


def test_a_forked_child_cannot_release_its_parents_lock(tmp_path: Path) -> None:
    with racer(tmp_path, "release_in_fork") as worker:
        assert worker.says() == "0 True"
        assert_refused(tmp_path)
        holder = read_holder(tmp_path / "worker.lock")
        assert holder is not None
        assert holder.pid == worker.pid
        assert holder.heartbeat


@pytest.mark.parametrize("namespace", [False, True])
def test_a_stopped_holder_keeps_the_lock_however_old_its_heartbeat(
    tmp_path: Path, *, namespace: bool
) -> None:
    if namespace:
        needs_namespaces()
    with racer(tmp_path, "hold", namespace=namespace) as worker:
        worker.says()
        worker.stop()
        assert_refused(tmp_path)
        assert is_held(tmp_path / "worker.lock")


@pytest.mark.parametrize("namespace", [False, True])
def test_a_killed_holder_is_replaced_at_once(tmp_path: Path, *, namespace: bool) -> None:
    if namespace:
        needs_namespaces()
    with racer(tmp_path, "hold", namespace=namespace) as worker:
        worker.says()
        worker.kill()
        assert_free(tmp_path)


def test_pid_1_of_a_new_container_takes_over_from_pid_1_of_a_dead_one(tmp_path: Path) -> None:
    needs_namespaces()
    for _ in range(2):
        with racer(tmp_path, "hold", namespace=True) as worker:
            assert worker.says() == "1"
            holder = read_holder(tmp_path / "worker.lock")
            assert holder is not None
            assert holder.pid == 1
            assert_refused(tmp_path)
