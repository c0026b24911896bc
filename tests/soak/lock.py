"""Many processes at one lock, killed and stopped, some in PID namespaces of their own: never two hold it."""

from __future__ import annotations

import functools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from sites import eventually

from briter_worker.lock import AnotherWorkerError, SiteLock
from soak.report import Report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from soak.report import Options

_RACER = Path(__file__).with_name("lock_racer.py")
_ROOT = Path(__file__).parents[2]
_UNSHARE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
_WEDGED = 10.0
_TAKEOVER = 1.0
_FAR_FUTURE = 1e6
_TOLD_EVERY = 50


def run(options: Options, tell: Callable[[str], None]) -> Report:
    """One race among processes of this namespace; and one where every other has its own."""
    processes, rounds = options.of(20, 8), options.of(200, 15)
    races = [(False, "here")]
    skipped = why_no_namespaces()
    if not skipped:
        races.append((True, "half in own PID namespaces"))
    figures: dict[str, float | int | str] = {"processes": processes, "rounds": rounds}
    failures = [f"PID namespaces could not be tried: {skipped}"] if skipped and options.full else []
    for namespaces, name in races:
        with tempfile.TemporaryDirectory(prefix="briter-lock-") as folder:
            race = Race(Path(folder), options.seed + namespaces)
            race.run(processes, rounds, namespaces=namespaces, tell=tell)
            figures |= {f"{what}, {name}": value for what, value in race.figures().items()}
            failures += [f"{name}: {broken}" for broken in race.broken()]
    return Report("lock", figures, failures)


@functools.cache
def why_no_namespaces() -> str:
    """Why this machine lets us make no PID namespace; empty where it does."""
    if shutil.which("unshare") is None:
        return "there is no unshare"
    tried = subprocess.run([*_UNSHARE, "true"], capture_output=True, text=True, check=False)
    return tried.stderr.strip() if tried.returncode else ""


class Racer:
    """A process of `lock_racer.py`, perhaps PID 1 of its own namespace; `pid` is the one seen from here."""

    def __init__(self, folder: Path, act: str, name: str = "-", *, namespace: bool = False) -> None:
        self.name = name
        self.namespace = namespace
        command = [sys.executable, str(_RACER), act, str(folder), name]
        self._process = subprocess.Popen(
            [*_UNSHARE, *command] if namespace else command,
            env=os.environ | {"PYTHONPATH": str(_ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        if namespace:
            wait_for(lambda: psutil.Process(self._process.pid).children())
            self.pid = psutil.Process(self._process.pid).children()[0].pid

    def says(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def stop(self) -> None:
        """Stopped at return."""
        os.kill(self.pid, signal.SIGSTOP)
        wait_for(lambda: psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Dead and reaped at return; its children live on."""
        if self._process.poll() is None:  # else its PID may be somebody else's by now
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._process.wait(_WEDGED)
        assert self._process.stdout is not None
        self._process.stdout.close()


def wait_for(happens: Callable[[], object]) -> float:
    """Wait, looking very often; return the seconds. Raises AssertionError when it never happens."""
    return eventually(happens, within=_WEDGED, pause=0.0005)


@contextmanager
def racer(folder: Path, act: str, name: str = "-", *, namespace: bool = False) -> Iterator[Racer]:
    """One process that does `act`, gone on leaving."""
    process = Racer(folder, act, name, namespace=namespace)
    try:
        yield process
    finally:
        process.kill()


def is_free(folder: Path, *, at: float | None = None) -> bool:
    """Whether a worker that comes now (or `at` that time) is let in."""
    lock = SiteLock(folder / "worker.lock", stale_after=60)
    try:
        lock.acquire(time.time() if at is None else at)
    except AnotherWorkerError:
        return False
    lock.release()
    return True


def is_refused(folder: Path) -> bool:
    """Whether nobody is let in, even when every record is ancient."""
    return not is_free(folder, at=time.time() + _FAR_FUTURE)


class Race:
    """Many racers on one lock, and what becomes of them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._dice = random.Random(seed)
        self._racers: dict[str, Racer] = {}
        self._started = 0
        self._takeovers: list[float] = []
        self._freezes = 0
        self._pushed_out = 0
        self._wedged: list[str] = []

    def run(self, processes: int, rounds: int, *, namespaces: bool, tell: Callable[[str], None]) -> None:
        """All rounds; each ends when every racer could have had a turn."""
        try:
            for number in range(processes):
                self._join(namespace=namespaces and number % 2 == 0)
            for number in range(1, rounds + 1):
                self._go_on(processes)
                self._round()
                if number % _TOLD_EVERY == 0:
                    tell(f"round {number} of {rounds}, {len(self._log('taken'))} times taken")
        except AssertionError as stuck:
            self._wedged.append(str(stuck))
        finally:
            for each in self._racers.values():
                each.kill()
        if not is_free(self._folder):
            self._wedged.append("the lock is not free, and all are dead")

    def figures(self) -> dict[str, float | int]:
        return {
            "times taken": len(self._log("taken")),
            "holders stopped": self._freezes,
            "killed": len(self._takeovers),
            "overlaps": len(self._log("overlaps")) + self._pushed_out,
            "wedged": len(self._wedged),
            "slowest takeover (s)": max(self._takeovers, default=0.0),
        }

    def broken(self) -> list[str]:
        """One line for each thing that must not be."""
        slow = [f"a takeover took {took:.3f} s" for took in self._takeovers if took >= _TAKEOVER]
        out = ["a stopped holder was pushed out"] * self._pushed_out
        return [*self._log("overlaps"), *out, *self._wedged, *slow]

    def _join(self, *, namespace: bool = False) -> None:
        self._started += 1
        name = str(self._started)
        self._racers[name] = Racer(self._folder, "race", name, namespace=namespace)

    def _log(self, name: str) -> list[str]:
        with suppress(FileNotFoundError):
            return (self._folder / name).read_text().splitlines()
        return []

    def _taken(self) -> int:
        with suppress(FileNotFoundError):
            return (self._folder / "taken").stat().st_size
        return 0

    def _go_on(self, times: int) -> None:
        before = len(self._log("taken"))
        wait_for(lambda: len(self._log("taken")) >= before + times)

    def _holder(self) -> Racer:
        """Who has marked the lock at this moment."""
        found: list[str] = []

        def look() -> bool:
            with suppress(FileNotFoundError):
                found.append((self._folder / "marker").read_text())
            return bool(found)

        wait_for(look)
        return self._racers[found[-1]]

    def _has_marked(self, racer: Racer) -> bool:
        with suppress(FileNotFoundError):
            return (self._folder / "marker").read_text() == racer.name
        return False

    def _replace(self, victim: Racer) -> None:
        victim.kill()
        del self._racers[victim.name]
        before = self._taken()
        self._takeovers.append(wait_for(lambda: self._taken() > before))
        self._join(namespace=victim.namespace)

    def _round(self) -> None:
        everyone = list(self._racers.values())
        victim = self._holder() if self._dice.random() < 0.7 else self._dice.choice(everyone)
        match self._dice.choice(["kill", "stop", "stop", "stop and kill"]):
            case "kill":
                self._replace(victim)
            case "stop":
                self._freeze(victim)
                victim.go_on()
                self._go_on(1)
            case _:
                self._freeze(victim)
                self._replace(victim)

    def _freeze(self, victim: Racer) -> None:
        victim.stop()
        if self._has_marked(victim):
            self._freezes += 1
            before = self._taken()
            time.sleep(0.02)  # for the others to try
            self._pushed_out += self._taken() != before or not is_refused(self._folder)
