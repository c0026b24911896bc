"""The worker's commands as forks of one process that has imported the program: 20 ms for a start, not 250.

Each is a process of its own, with its own session, folder, settings and streams. Python itself is started
where a test changes more than settings, and for whatever runs in the background.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pkgutil
import signal
import subprocess
import sys
import threading
from functools import cache
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from multiprocessing.context import ForkServerContext
    from pathlib import Path

_starting = threading.Lock()
_MEASURED = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")


def run(
    arguments: Sequence[str], env: Mapping[str, str], cwd: Path, *, timeout: float, prefix: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run `python -m briter_worker` with these arguments to its end, perhaps started by another program."""
    is_measured = any(os.environ.get(name) for name in _MEASURED)
    if not prefix and not is_measured and _but_settings(env) == _but_settings(os.environ):
        return _fork(list(arguments), env, cwd, timeout)
    command = [*prefix, sys.executable, "-m", "briter_worker", *arguments]
    return subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False
    )


def _but_settings(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in env.items()
        if not name.startswith("BRITER_") and name != "PYTEST_CURRENT_TEST"
    }


@cache
def _context() -> ForkServerContext:
    """Return the server of forks, which ends with this process. Its modules stand in its command line."""
    program = importlib.import_module("briter_worker")
    modules = pkgutil.walk_packages(program.__path__, "briter_worker.")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *(module.name for module in modules)])
    return context


def _fork(
    arguments: list[str], env: Mapping[str, str], cwd: Path, timeout: float
) -> subprocess.CompletedProcess[str]:
    settings = {name: value for name, value in env.items() if name.startswith("BRITER_")}
    with TemporaryFile("w+", encoding="utf-8") as out, TemporaryFile("w+", encoding="utf-8") as err:
        streams = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (out, err)]
        process = _context().Process(target=_become, args=(arguments, settings, str(cwd), streams))
        with _starting:
            process.start()
            # Or the next start, in another thread, asks for the status that `join` waits for: one gets none.
            vars(multiprocessing.process)["_children"].discard(process)
        process.join(timeout)
        if process.exitcode is None:
            os.killpg(process.pid or 0, signal.SIGKILL)
            raise subprocess.TimeoutExpired(arguments, timeout)
        return subprocess.CompletedProcess(arguments, process.exitcode, out.read(), err.read())


def _become(arguments: list[str], settings: dict[str, str], cwd: str, streams: list[str]) -> None:
    """Be the program: its entry point returns or exits."""
    os.setsid()
    for number, path in enumerate([os.devnull, *streams]):
        os.dup2(os.open(path, os.O_RDWR), number)
    os.chdir(cwd)
    for name in [name for name in os.environ if name.startswith("BRITER_")]:
        del os.environ[name]
    os.environ.update(settings)
    sys.argv[1:] = arguments
    importlib.import_module("briter_worker.__main__").main()
