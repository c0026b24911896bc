"""A site in memory with the worker in this very process: for proofs that need many of both.

Everything is real (the queue's folder, git, a bare remote); only process and clock are the proof's own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from briter_worker.allowlist import Allowlist
from briter_worker.drain import Drain
from briter_worker.errors import PublishError
from briter_worker.git.checkout import Checkout
from briter_worker.git.publisher import GitPublisher
from briter_worker.git.pull import pull
from briter_worker.git.push import FileConflicts, FilePlans, Person
from briter_worker.git.repository import Repository
from briter_worker.git.run import Git
from briter_worker.git.staging import Staging, WorkTreeCopies
from briter_worker.plugins import Plugins
from briter_worker.ports import Backoff
from briter_worker.queues.disk.queue import DiskQueue
from briter_worker.worker import Stop, Worker
from soak.report import IN_MEMORY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from briter_worker.events import Event

MAX_ATTEMPTS = 3
DELAYS = (60.0, 300.0, 1800.0)
WORKER = ("Briter Worker", "briter-worker@localhost")
PERSON = {
    f"GIT_{role}_{key}": value
    for role in ("AUTHOR", "COMMITTER")
    for key, value in (("NAME", "A Person"), ("EMAIL", "person@example.org"))
}
_MAX_FILE_BYTES = 5_000


def in_memory() -> Path:
    """Return a new folder, in memory where the system has such."""
    return Path(tempfile.mkdtemp(prefix="briter-proof-", dir=IN_MEMORY))


class DiedError(BaseException):
    """The worker is dead from here on: whatever it still tries raises this, too."""


class Fuse:
    """Kills the worker after a number of steps. A step is a call of a port, or a start of git."""

    def __init__(self) -> None:
        self.left: int | None = None
        self._is_blown = False
        self._git_dir: Path | None = None
        self._aside: Path | None = None

    def watch(self, git_dir: Path, aside: Path) -> None:
        """Keep the worker's own files in the git folder as they were when it died."""
        self._git_dir, self._aside = git_dir, aside

    def step(self) -> None:
        """Count one more step. Raises DiedError at the last, and ever after."""
        if self.left is not None:
            self.left -= 1
            if self.left <= 0 and not self._is_blown:
                self._is_blown = True
                for number, file in enumerate(self._files()):
                    os.link(file, self._link(number, file))
        if self._is_blown:
            raise DiedError

    def _files(self) -> list[Path]:
        if self._git_dir is None:
            return []
        state = [path for path in (self._git_dir / "briter").rglob("*") if path.is_file()]
        return [*self._git_dir.glob("index.lock"), *state]

    def _link(self, number: int, file: Path) -> Path:
        assert self._aside is not None
        self._aside.mkdir(exist_ok=True)
        name = str(file.relative_to(self._git_dir or file)).replace("/", "%")
        return self._aside / f"{number}%{name}"

    def restore(self) -> None:
        """Put back what the worker had in the git folder when it died, inode by inode.

        An exception ended it, on whose way out it removed its mark and let go of the index. A killed worker
        removes nothing.
        """
        if self._aside is None or self._git_dir is None or not self._aside.exists():
            return
        for link in self._aside.iterdir():
            file = self._git_dir / link.name.partition("%")[2].replace("%", "/")
            file.unlink(missing_ok=True)
            file.parent.mkdir(parents=True, exist_ok=True)
            os.link(link, file)
        shutil.rmtree(self._aside)


class _MortalGit(Git):
    fuse: Fuse

    def _start(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - as the method it stands for
        self.fuse.step()
        return super()._start(*args, **options)


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


class _Sink:
    """Emits events at once."""

    def __init__(self, emit: Callable[[Event], None], fuse: Fuse) -> None:
        self._emit = emit
        self._fuse = fuse

    def __call__(self, event: Event) -> None:
        self._fuse.step()
        self._emit(event)

    def deliver(self, events: Sequence[Event], acknowledge: Callable[[], None]) -> None:
        acknowledge()
        for event in events:
            self(event)


def _never_wait(seconds: float, is_stopped: Callable[[], bool]) -> None:
    raise AssertionError(f"waited {seconds} s, {is_stopped}")


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
        """Make a site with these files, committed and pushed."""
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
        """Make another one like this."""
        shutil.copytree(self.root, root, symlinks=True)
        return Place(root)

    def git(
        self,
        *args: str,
        cwd: Path | None = None,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
    ) -> str:
        """Run git as a person would; return its output without the last line ending."""
        return os.fsdecode(self.ask(*args, cwd=cwd, stdin=stdin, env=env)).rstrip("\n")

    def ask(
        self,
        *args: str,
        cwd: Path | None = None,
        stdin: bytes = b"",
        ok: tuple[int, ...] = (0,),
        env: Mapping[str, str] | None = None,
    ) -> bytes:
        """Run git; return the bytes that it prints."""
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
        """Return a worker that has just started; `run_once()` drains what is due by `clock`."""
        fuse = fuse or Fuse()
        fuse.watch(self.site / ".git", self.root / "aside")
        git = _MortalGit(self.site, remote="origin", timeout=60.0, durable=False)
        git.fuse = fuse
        repository = Repository(git, branch="main", remote="origin")
        staging = Staging(repository, Allowlist(folders), _MAX_FILE_BYTES, progress)
        publisher = GitPublisher(
            repository,
            copies=WorkTreeCopies(staging, lambda _text, _fix: None),
            plans=FilePlans(git.state_dir, "main"),
            bases=FileConflicts(git.state_dir, "main"),
            identity=Person(*WORKER),
            dry_run=dry_run,
            progress=progress,
            warn=lambda _text, _fix: None,
            still_ours=lambda: True,
        )
        queue: Any = _MortalQueue(self.open_queue(clock, dry_run=dry_run), fuse)
        sink = _Sink(emit, fuse)
        drain = Drain(
            queue=queue,
            publisher=lambda: publisher,
            emit=sink,
            plugins=cache(partial(Plugins, {})),
            backoff=Backoff(DELAYS),
            max_attempts=MAX_ATTEMPTS,
            dry_run=dry_run,
            stopping=lambda: False,
            clock=clock,
        )

        def tidy() -> None:
            with suppress(PublishError):
                publisher.tidy(clock())

        return Worker(
            drain=drain,
            queue=queue,
            still_ours=lambda: True,
            emit=sink,
            stop=Stop(emit, limit=60.0, abort=git.abort),
            wait=_never_wait,
            tidy=tidy,
            pull=lambda _now: None,
            poll=5.0,
        )

    def pull(self, fuse: Fuse, *, push: bool) -> None:
        """Run `pull --rebase`, perhaps with `--push`. Raises DeclinedError and PublishError."""
        fuse.watch(self.site / ".git", self.root / "aside")
        git = _MortalGit(self.site, remote="origin", timeout=60.0, durable=False)
        git.fuse = fuse
        repository = Repository(git, branch="main", remote="origin")
        is_posts = lambda path: path.startswith("content/")  # noqa: E731 - as the worker's allowlist says
        pull(
            repository, Checkout(repository, lambda _, __: None, is_cms_path=is_posts), rebase=True, push=push
        )

    def open_queue(self, clock: Callable[[], float], *, dry_run: bool = False) -> DiskQueue:
        """Return the queue, for an operator's commands."""
        return DiskQueue(self.queue, self.quarantine, longest_delay=max(DELAYS), dry_run=dry_run, clock=clock)
