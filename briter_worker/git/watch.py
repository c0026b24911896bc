"""What runs of git, and how it ends: when it makes no progress, when it is no longer wanted, with us."""

from __future__ import annotations

import os
import selectors
import subprocess
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, cast

from briter_worker.errors import Failure, PublishError, Stopped
from briter_worker.git.ending import await_exit, end

if TYPE_CHECKING:
    from collections.abc import Iterator

_PIECE = 1 << 16
_LAST_WORDS = 0.5
"""How long a process that has closed its output may take to exit."""
_LOOK = 1.0
"""How often what runs is looked at, at least."""

Process = subprocess.Popen[bytes]
AnyProcess = subprocess.Popen[Any]


@dataclass(eq=False, slots=True)
class _Running:
    """A process, and since when it makes no progress while somebody waits for it."""

    process: AnyProcess
    touched: float
    awaited: bool = True
    expired: bool = False


class Watch:
    """The processes of one repository that have not ended. Each makes progress, or is ended.

    A thread of its own looks at them; else not for use by two threads at once.
    """

    def __init__(self, timeout: float) -> None:
        """`timeout`: how long a process may make no progress while somebody waits for it, in seconds."""
        self._timeout = timeout
        self._active: dict[int, _Running] = {}
        self._aborted = threading.Event()
        self._busy = threading.Event()
        self._ending = threading.Lock()
        self._guardian: threading.Thread | None = None
        self._closed = threading.Event()
        self.ended = 0
        """How many were ended, by us or by somebody else: those may have left lock files."""

    def may_start(self) -> None:
        """To be asked before a process is started. Raises Stopped after `abort`."""
        if self._aborted.is_set():
            raise Stopped
        if self._guardian is None:
            self._guardian = threading.Thread(target=self._guard, name="git time limit", daemon=True)
            self._guardian.start()

    def begin(self, process: AnyProcess) -> None:
        """Watch this one from now on. Raises Stopped, and it is gone, where `abort` came first."""
        self._active[process.pid] = _Running(process, time.monotonic())
        self._busy.set()
        if self._aborted.is_set():  # since we looked: `abort` may have missed this one
            self._finish(process, at_once=True)
            raise Stopped

    def abort(self) -> None:
        """End every running command, and let none start: the time to finish is over."""
        self._aborted.set()
        for running in list(self._active.values()):
            self._end(running.process)

    def reopen(self, timeout: float) -> None:
        """After `abort`, allow a few last commands, each within this time: to see what became of a push."""
        if self._aborted.is_set():
            self._timeout = min(timeout, self._timeout)
            self._aborted.clear()

    def close(self) -> None:
        """Nothing of it runs any more, nor will: neither git, nor the thread that watches it."""
        self._aborted.set()
        for running in list(self._active.values()):
            self._finish(running.process, at_once=True)
        self._closed.set()
        self._busy.set()
        if self._guardian is not None:
            self._guardian.join()

    def touch(self) -> None:
        """Note that what is waited for makes progress."""
        now = time.monotonic()
        for running in list(self._active.values()):
            running.touched = now

    @contextmanager
    def awaiting(self, process: Process) -> Iterator[None]:
        """For a process that outlives one question: the time limit holds for it inside only.

        Between two questions it is idle, and neither hangs nor is to blame for what does.
        """
        running = self._active.get(process.pid)
        if running is None:
            yield
            return
        self._await(running)
        try:
            yield
        finally:
            running.awaited = False

    def _await(self, running: _Running) -> None:
        running.touched = time.monotonic()
        running.awaited = True
        self._busy.set()

    def converse(self, process: subprocess.Popen[bytes], stdin: bytes) -> tuple[bytes, bytes]:
        """As `communicate`, and every byte that moves counts as progress. For use inside `watched`."""
        parts: dict[str, list[bytes]] = {"out": [], "err": []}
        left = memoryview(stdin)
        with selectors.DefaultSelector() as selector:
            selector.register(cast("IO[bytes]", process.stdout), selectors.EVENT_READ, "out")
            selector.register(cast("IO[bytes]", process.stderr), selectors.EVENT_READ, "err")
            if process.stdin is not None:
                os.set_blocking(process.stdin.fileno(), False)
                selector.register(process.stdin, selectors.EVENT_WRITE, "in")
            while selector.get_map():
                ready = selector.select(_LOOK)
                if not ready and process.poll() is not None:
                    break  # something that it left behind keeps its output open
                for key, _ in ready:
                    self.touch()
                    if key.data != "in":
                        part = os.read(key.fd, _PIECE)
                        if part:
                            parts[key.data].append(part)
                        else:
                            selector.unregister(key.fileobj)
                        continue
                    try:
                        left = left[os.write(key.fd, left[:_PIECE]) :]
                    except BlockingIOError:  # pragma: no cover - the pipe was filled since it was asked
                        continue
                    except BrokenPipeError:
                        left = left[:0]
                    if not left:
                        selector.unregister(key.fileobj)
                        _close(cast("IO[bytes]", process.stdin))
        return b"".join(parts["out"]), b"".join(parts["err"])

    @contextmanager
    def watched(self, process: AnyProcess | None, name: str) -> Iterator[None]:
        """Whatever happens inside, the process and all it started are gone on leaving.

        Without a process: those that are started inside.

        Raises PublishError when the time limit ended it, Stopped when `abort` did.
        """
        others = set(self._active)
        known = self._active.get(process.pid) if process else None
        if known is not None:
            self._await(known)
        ended: list[_Running] = []
        try:
            yield
        except (OSError, ValueError):
            # A pipe broke as the process was ended; what follows says why it was.
            if not (self._aborted.is_set() or any(each.expired for each in self._active.values())):
                raise
        finally:
            if process is None:
                ended = [each for pid, each in self._active.items() if pid not in others]
            elif known is not None:
                ended = [known]
            for each in ended:
                self._finish(each.process)
        if self._aborted.is_set():
            raise Stopped
        if any(each.expired for each in ended):
            raise PublishError(
                Failure.TIMEOUT,
                f"git {name} made no progress for {self._timeout:g} s and was ended. Fix: check the network "
                "and the remote, or raise BRITER_GIT_TIMEOUT_MS",
            )

    def running(self) -> tuple[int, ...]:
        """The processes that have not ended yet, by their numbers."""
        return tuple(self._active)

    def dismiss(self, process: AnyProcess) -> None:
        """End a process that nobody waits for any more, with all that it started."""
        self._finish(process, at_once=True)

    def _finish(self, process: AnyProcess, *, at_once: bool = False) -> None:
        if not at_once:
            await_exit(process, _LAST_WORDS)
        if process.poll() is None:
            self._end(process)
        elif process.returncode < 0:
            self.ended += 1  # not by us: by the kernel when memory was short, say
        with self._ending:
            pass  # another thread's `_end` may be at what it started, which may take longer to go
        self._active.pop(process.pid, None)
        for pipe in (process.stdin, process.stdout, process.stderr):
            _close(pipe)

    def _end(self, process: AnyProcess) -> None:
        with self._ending:
            self.ended += 1
            end(process)

    def _guard(self) -> None:
        """End what makes no progress within the time limit; runs beside the commands until `close`."""
        while not self._closed.is_set():
            self._busy.wait()
            awaited = [running for running in list(self._active.values()) if running.awaited]
            if not awaited:
                self._busy.clear()
                if self._closed.is_set() or any(each.awaited for each in list(self._active.values())):
                    self._busy.set()  # pragma: no cover - a race: it began between the two lines above
                continue
            nap = _LOOK
            for running in awaited:
                left = running.touched + self._timeout - time.monotonic()
                if left <= 0:
                    running.expired, running.awaited = True, False
                    self._end(running.process)
                else:
                    nap = min(nap, left)
            self._closed.wait(nap)


def _close(pipe: IO[Any] | None) -> None:
    if pipe is not None:
        with suppress(OSError, ValueError):
            pipe.close()
