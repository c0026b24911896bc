"""The worker's commands as forks of one process that has imported the program: 20 ms for a start, not 250.

Each is a process of its own, with its own session, folder, settings and streams. Python itself is started
where a test changes more than settings, and for whatever runs in the background.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_MEASURED = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")


def run(
    arguments: Sequence[str], env: Mapping[str, str], cwd: Path, *, timeout: float, prefix: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run `python -m briter_worker` with these arguments to its end, perhaps started by another program."""
    is_measured = any(os.environ.get(name) for name in _MEASURED)
    if not prefix and not is_measured and _but_settings(env) == _but_settings(os.environ):
        return forks().run(arguments, env, cwd, timeout)
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
def forks() -> Forks:
    """Return this test process's own."""
    return Forks()


class Forks:
    """The process that has imported the program; it ends with this one."""

    def __init__(self) -> None:
        folder = tempfile.mkdtemp(prefix="briter-forks-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        self._socket = f"{folder}/socket"
        # Tests know a worker by its command line.
        command = [sys.executable, __file__, "briter_worker", self._socket]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"
        atexit.register(self.process.communicate)

    def run(
        self, arguments: Sequence[str], env: Mapping[str, str], cwd: Path, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        settings = {name: value for name, value in env.items() if name.startswith("BRITER_")}
        request = json.dumps([list(arguments), settings, str(cwd)]).encode()
        said = [os.memfd_create(name) for name in ("stdout", "stderr")]
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self._socket)
            connection.settimeout(timeout)
            socket.send_fds(connection, [request], said)
            connection.shutdown(socket.SHUT_WR)
            pid, status = int(connection.recv(8)), b""
            try:
                status = connection.recv(8)
            finally:
                if not status:
                    os.killpg(pid, signal.SIGKILL)
        texts = []
        for descriptor in said:
            os.lseek(descriptor, 0, os.SEEK_SET)
            with open(descriptor, encoding="utf-8") as file:  # noqa: PTH123 - a descriptor
                texts.append(file.read())
        return subprocess.CompletedProcess(arguments, int(status), *texts)


def _serve(path: str) -> list[str]:
    """Fork twice for each request: a process that runs the command, and one that waits for its status.

    Return, in the first of them, the command's arguments.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            ready, _, _ = select.select([listener.fileno(), 0], [], [])
            if 0 in ready:
                os._exit(0)  # the tests have ended
            connection, _ = listener.accept()
            if os.fork() == 0:
                break
            connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, said, _, _ = socket.recv_fds(connection, 1 << 16, 2)
    while part := connection.recv(1 << 16):
        request += part
    if pid := os.fork():
        connection.sendall(b"%8d" % pid)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        connection.sendall(b"%8d" % status)
        os._exit(0)
    connection.close()
    os.setsid()
    arguments, settings, cwd = json.loads(request)
    for descriptor, number in ((os.open(os.devnull, os.O_RDONLY), 0), (said[0], 1), (said[1], 2)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(cwd)
    os.environ.update(settings)
    return list(arguments)


def _main() -> None:
    for name in [name for name in os.environ if name.startswith("BRITER_")]:
        del os.environ[name]
    os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"  # as the program does
    del sys.path[0]
    program = importlib.import_module("briter_worker")
    for module in pkgutil.walk_packages(program.__path__, "briter_worker."):
        importlib.import_module(module.name)
    gc.freeze()
    sys.argv[1:] = _serve(sys.argv[2])
    importlib.import_module("briter_worker.__main__").main()


if __name__ == "__main__":
    _main()
