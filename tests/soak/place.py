"""A site in memory with the worker in this very process: for proofs that need many of both.

Everything is real (the queue's folder, git, a bare remote); only process and clock are the proof's own.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from briter_worker.allowlist import Allowlist
from briter_worker.backoff import Backoff
from briter_worker.drain import Drain
from briter_worker.git.command import Commands
from briter_worker.git.commits import Person
from briter_worker.git.publisher import GitPublisher
from briter_worker.plugins import Plugins
from briter_worker.queues.disk import DiskQueue
from briter_worker.settling import Desk
from briter_worker.worker import Stop, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from briter_worker.events import Event
    from briter_worker.ports import Queue

MAX_ATTEMPTS = 3
DELAYS = (60.0, 300.0, 1800.0)
WORKER = ("Briter Worker", "briter-worker@localhost")
PERSON = {
    f"GIT_{role}_{key}": value
    for role in ("AUTHOR", "COMMITTER")
    for key, value in (("NAME", "A Person"), ("EMAIL", "person@example.org"))
}
_MAX_FILE = 5_000


def in_memory() -> Path:
    """A new folder, in memory where the system has such."""
    fast = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="briter-proof-", dir=fast if os.access(fast, os.W_OK) else None))


class DiedError(BaseException):
    """The worker is dead from here on: whatever it still tries raises this, too."""


class Fuse:
    """Kills the worker when it has gone so many steps; a step is a call of a port or a start of git."""

    def __init__(self, steps: int | None = None) -> None:
        self.left = steps
        self.blown = False
        self.git_dir: Path | None = None
        self._left_behind: dict[Path, tuple[bytes, int]] = {}

    def step(self) -> None:
        """One more step; raises DiedError at the last, and ever after."""
        if self.left is not None:
            self.left -= 1
            if self.left <= 0 and not self.blown:
                self.blown = True
                self._left_behind = dict(self._marks())
        if self.blown:
            raise DiedError

    def _marks(self) -> Iterator[tuple[Path, tuple[bytes, int]]]:
        for pattern in ("*.lock", "briter-*") if self.git_dir else ():
            for file in self.git_dir.glob(pattern):  # type: ignore[union-attr] # there is one
                yield file, (file.read_bytes(), file.stat().st_mtime_ns)

    def leave_behind(self) -> None:
        """Put back what the worker had in git's folder when it died: a dead one takes nothing away.

        Here it is an exception that ends it, so that it has let go of the index and of its marker. While a
        dead worker's lock is there, nobody commits what its index says.
        """
        for file, (content, moment) in self._left_behind.items():
            file.write_bytes(content)
            os.utime(file, ns=(moment, moment))
        self._left_behind = {}


class _MortalCommands(Commands):
    fuse: Fuse

    def spawn(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - as the one it stands for
        self.fuse.step()
        return super().spawn(*args, **options)


class _MortalQueue:
    """A queue whose user may die before or after each call."""

    def __init__(self, queue: DiskQueue, fuse: Fuse) -> None:
        self._queue = queue
        self._fuse = fuse

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the port has
        call = getattr(self._queue, name)

        def mortal(*args: Any, **options: Any) -> Any:  # noqa: ANN401
            self._fuse.step()
            found = call(*args, **options)
            self._fuse.step()
            return found

        return mortal


class Place:
    """A site under `root`: the work tree, its bare remote, the queue; copied from a template."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.site = root / "site"
        self.remote = root / "remote.git"
        self.queue = root / "queue"
        self.quarantine = root / "quarantine"

    @classmethod
    def make(cls, root: Path, files: Mapping[str, str]) -> Place:
        """A site with these files, committed and pushed."""
        place = cls(root)
        root.mkdir(parents=True, exist_ok=True)
        bare = ("--quiet", "--template=", "--initial-branch=main")
        place.git("init", *bare, "--bare", str(place.remote), cwd=root)
        place.git("init", *bare, str(place.site), cwd=root)
        for key, value in (("gc.auto", "0"), ("receive.autogc", "false"), ("receive.unpackLimit", "1000")):
            place.git("config", key, value, cwd=place.remote)
        place.git("remote", "add", "origin", "../remote.git")
        (place.site / ".git" / "info").mkdir(exist_ok=True)
        for path, text in files.items():
            file = place.site / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        place.git("add", "--all")
        place.git("commit", "--quiet", "--message=Start the site")
        place.git("push", "--quiet", "--set-upstream", "origin", "main")
        place.queue.mkdir()
        return place

    def copy(self, root: Path) -> Place:
        """Another one like this."""
        shutil.copytree(self.root, root, symlinks=True)
        return Place(root)

    def git(
        self,
        *args: str,
        cwd: Path | None = None,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
    ) -> str:
        """Run git as a person would; its output, stripped of the last line end."""
        return os.fsdecode(self.ask(*args, cwd=cwd, stdin=stdin, env=env)).rstrip("\n")

    def ask(
        self,
        *args: str,
        cwd: Path | None = None,
        stdin: bytes = b"",
        ok: tuple[int, ...] = (0,),
        env: Mapping[str, str] | None = None,
    ) -> bytes:
        """Run git; the bytes that it prints."""
        done = subprocess.run(
            ["git", *args],
            cwd=cwd or self.site,
            input=stdin,
            capture_output=True,
            env={**os.environ, **PERSON, **(env or {})},
            check=False,
        )
        assert done.returncode in ok, f"git {' '.join(args)}: {done.stderr.decode(errors='replace')}"
        return done.stdout

    def worker(
        self,
        *,
        clock: Callable[[], float],
        emit: Callable[[Event], None],
        dry_run: bool = False,
        fuse: Fuse | None = None,
        folders: tuple[str, ...] = ("content",),
        progress: Callable[[str, int, int], None] = lambda _phase, _done, _total: None,
    ) -> Worker:
        """A worker that has just started; `once()` drains what is due by `clock`."""
        logging.getLogger("git.remote").disabled = True  # as `wiring` has it: it prints what git said
        fuse = fuse or Fuse()
        fuse.git_dir = self.site / ".git"
        commands = _MortalCommands(self.site, remote="origin", timeout=60.0)
        commands.fuse = fuse
        publisher = GitPublisher(
            commands,
            branch="main",
            remote="origin",
            allowlist=Allowlist(folders),
            identity=Person(*WORKER),
            max_file_bytes=_MAX_FILE,
            dry_run=dry_run,
            progress=progress,
            warn=lambda _text: None,
            still_ours=lambda: True,
        )
        queue = self.open_queue(clock)

        def tell(event: Event) -> None:
            fuse.step()
            emit(event)

        desk = Desk(
            queue=cast("Queue", _MortalQueue(queue, fuse)),
            emit=tell,
            backoff=Backoff(DELAYS),
            max_attempts=MAX_ATTEMPTS,
            extensions=Plugins({}),
            dry_run=dry_run,
            clock=clock,
        )
        return Worker(
            Drain(desk, lambda: publisher, stopping=lambda: False),
            tell,
            Stop(emit, limit=60.0, abort=publisher.abort),
            _NeverWaits(),
            next_due=queue.next_due,
            paused=queue.paused,
            pending_flush=publisher.pending_flush,
            still_ours=lambda: True,
            tidy=lambda: publisher.tidy(clock()),
            poll=5.0,
        )

    def open_queue(self, clock: Callable[[], float]) -> DiskQueue:
        """The queue, for a person's commands."""
        return DiskQueue(
            self.queue,
            self.quarantine,
            max_attempts=MAX_ATTEMPTS,
            longest_delay=max(DELAYS),
            clock=clock,
        )


class _NeverWaits:
    """A worker that drains once has nothing to wait for."""

    def wait(self, seconds: float, stop: Stop) -> None:
        raise AssertionError(f"waited {seconds} s, {stop}")
