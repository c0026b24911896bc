"""Processes that stand ready and start together, and the processor time that they take."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

_LONGEST = 600.0
_LOOK = 0.02
"""Each look takes some of Postgres's time, which is measured."""


@dataclass
class Race:
    """Processes that stand ready, and start together. They end on leaving."""

    commands: Sequence[Sequence[str]]
    env: Mapping[str, str]
    folder: Path
    _processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def __enter__(self) -> Self:
        for command in self.commands:
            self._processes.append(
                subprocess.Popen(
                    command,
                    cwd=self.folder,
                    env=dict(self.env),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        for process in self._processes:
            assert process.stdout is not None  # noqa: S101 - asked for
            said = process.stdout.readline()
            if said.strip() != "ready":
                raise RuntimeError(f"{process.args!r}: {said}{process.stdout.read()}")
        return self

    def go(self) -> None:
        """They begin."""
        for process in self._processes:
            assert process.stdin is not None  # noqa: S101 - asked for
            process.stdin.write("go\n")
            process.stdin.flush()

    def until(self, done: Callable[[], bool]) -> float:
        """The moment at which that is so."""
        deadline = time.monotonic() + _LONGEST
        while not done():
            for process in self._processes:
                if process.poll():
                    assert process.stdout is not None  # noqa: S101 - asked for
                    raise RuntimeError(f"{process.args!r}: {process.stdout.read()[-2000:]}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"not done within {_LONGEST:.0f} s")
            time.sleep(_LOOK)
        return time.perf_counter()

    def processor(self) -> float:
        """Seconds of processor time that they have taken so far."""
        return sum(processor_of(process.pid) for process in self._processes)

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


def module(name: str, *arguments: str) -> list[str]:
    """A program of this folder."""
    return [sys.executable, "-m", f"benchmarks.cluster.{name}", *arguments]


def host(*, publishes: bool, slots: int = 1, once: bool = False) -> list[str]:
    """Our host, as a process; one that does not publish does all but git."""
    return module("host", json.dumps({"publishes": publishes, "slots": slots, "once": once}))


def processor_of(pid: int) -> float:
    """Seconds of processor time so far, of a process with its children, those that have ended included."""
    total = 0.0
    try:
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            try:
                times = each.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system + times.children_user + times.children_system
    except psutil.NoSuchProcess:
        pass
    return total
