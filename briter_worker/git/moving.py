"""Moves refs: one `git update-ref` for all the moves of a publication."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Self, cast

from briter_worker.git import causes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from briter_worker.git.command import Commands
    from briter_worker.git.watch import Process

Move = tuple[str, str | None, str | None]
"""A ref's name, its new value (None: delete it), and the value it must have (None: any)."""

_STEPS = (b"start: ok", b"prepare: ok", b"commit: ok")


class Moving:
    """Moves refs. Close it after the publication: it holds a process."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._process: Process | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            with self._commands.watch.watched(process, "update-ref"):
                cast("IO[bytes]", process.stdin).close()
                process.wait()

    def start(self) -> None:
        """Have git started already when the first move comes."""
        with self._commands.watch.awaiting(self._started()):
            pass

    def _started(self) -> Process:
        if self._process is None:
            command = ["update-ref", "-m", "briter: publish", "--stdin"]
            self._process = self._commands.spawn(command, feed=True)
        return self._process

    def move(self, moves: Sequence[Move]) -> None:
        """Move the refs, all or none. Raises PublishError."""
        lines = ["start"]
        for name, new, old in moves:
            if new is None:
                lines.append(f"delete {name}")
            else:
                lines.append(f"update {name} {new}" + (f" {old}" if old else ""))
        lines += ["prepare", "commit", ""]
        process = self._started()
        stdin, stdout = cast("IO[bytes]", process.stdin), cast("IO[bytes]", process.stdout)
        with self._commands.watch.awaiting(process):
            try:
                stdin.write("\n".join(lines).encode())
                stdin.flush()
                done = all(stdout.readline().rstrip() == step for step in _STEPS)
            except BrokenPipeError:
                done = False
        if not done:
            self._process = None
            with self._commands.watch.watched(process, "update-ref"):
                said = cast("IO[bytes]", process.stderr).read().decode(errors="replace")
            raise causes.from_git(
                "the local branch could not be moved", said or causes.wordless(process.returncode)
            )
