"""A site whose worker runs in this very process: for proofs that need many of both.

Everything is real (the queue's folder, git, a bare remote); only process and clock are the proof's own.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sites import Site

from briter_worker.allowlist import Allowlist
from briter_worker.drain import Drain
from briter_worker.git.checkout import Checkout
from briter_worker.git.commits import Person
from briter_worker.git.plans import FileConflicts, FilePlans
from briter_worker.git.publisher import GitPublisher
from briter_worker.git.pull import pull
from briter_worker.git.repository import Repository
from briter_worker.git.run import Git
from briter_worker.git.staging import Staging, WorkTreeCopies
from briter_worker.plugins import Plugins
from briter_worker.ports import Backoff
from briter_worker.queues.disk.queue import DiskQueue
from briter_worker.sinks.earlier import EarlierSaves
from briter_worker.sinks.store import SqliteStore
from briter_worker.wiring import declared_earlier
from briter_worker.worker import Stop, Worker
from soak.report import IN_MEMORY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from briter_worker.events import Event

MAX_ATTEMPTS = 3
DELAYS = (60.0, 300.0, 1800.0)
WORKER = ("Briter Worker", "briter-worker@localhost")
_MAX_FILE_BYTES = 5_000


def memory_folder() -> Path:
    """Return a new folder, in memory where the system has such."""
    return Path(tempfile.mkdtemp(prefix="briter-proof-", dir=IN_MEMORY))


class CrashedError(BaseException):
    """The worker is dead from here on: whatever it still tries raises this, too."""


class CrashPoint:
    """Kills the worker after a number of steps. A step is a call of a port, or a start of git.

    An exception ends the worker, on whose way out it removes its mark and lets go of the index. A killed
    worker removes nothing: `restore()` puts back what was in the git folder, inode by inode.
    """

    def __init__(self, steps: int | None = None) -> None:
        self.left = steps
        self._is_dead = False
        self._git_dir = self._aside = Path()

    def watch(self, site: Site) -> None:
        """Keep the worker's own files in the git folder as they were when it died."""
        self._git_dir, self._aside = site.worktree / ".git", site.root / "aside"

    def step(self) -> None:
        """Count one more step. Raises CrashedError at the last, and ever after."""
        if self.left is not None:
            self.left -= 1
            if self.left <= 0 and not self._is_dead:
                self._is_dead = True
                for file in self._files():
                    _link(file, self._aside / file.relative_to(self._git_dir))
        if self._is_dead:
            raise CrashedError

    def _files(self) -> Iterator[Path]:
        yield from self._git_dir.glob("index.lock")
        yield from (path for path in (self._git_dir / "briter").rglob("*") if path.is_file())

    def restore(self) -> None:
        """Put back what the worker had in the git folder when it died."""
        for file in [path for path in self._aside.rglob("*") if path.is_file()]:
            _link(file, self._git_dir / file.relative_to(self._aside))
        shutil.rmtree(self._aside, ignore_errors=True)


def _link(file: Path, link: Path) -> None:
    link.unlink(missing_ok=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    os.link(file, link)


class _MortalGit(Git):
    crash: CrashPoint

    def _start(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - as the method it stands for
        self.crash.step()
        return super()._start(*args, **options)


class _MortalQueue:
    """A queue whose user may die before or after each call."""

    def __init__(self, queue: DiskQueue, crash: CrashPoint) -> None:
        self._queue = queue
        self._crash = crash

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the port has
        call = getattr(self._queue, name)

        def mortal(*args: Any, **options: Any) -> Any:  # noqa: ANN401
            self._crash.step()
            found = call(*args, **options)
            self._crash.step()
            return found

        return mortal


class _Sink:
    """Emits events at once."""

    def __init__(self, emit: Callable[[Event], None], crash: CrashPoint) -> None:
        self._emit = emit
        self._crash = crash

    def __call__(self, event: Event) -> None:
        self._crash.step()
        self._emit(event)

    def deliver(self, events: Sequence[Event], acknowledge: Callable[[], None]) -> None:
        acknowledge()
        for event in events:
            self(event)


def _never_wait(seconds: float, is_stopped: Callable[[], bool]) -> None:
    raise AssertionError(f"waited {seconds} s, {is_stopped}")


class LocalSite(Site):
    """A site with a worker in this process."""

    @property
    def quarantine(self) -> Path:
        return self.storage / "quarantine"

    @classmethod
    def with_files(cls, root: Path, files: Mapping[str, str]) -> LocalSite:
        """Make a site with these files, too, committed and pushed."""
        root.mkdir(parents=True)
        site = cls.make(root)
        for key, value in (("gc.auto", "0"), ("receive.autogc", "false"), ("receive.unpackLimit", "1000")):
            site.git("config", key, value, cwd=site.remote)
        site.git("rm", "--quiet", "-r", "content")
        for path, text in files.items():
            site.write_post(path, text)
        site.commit_all("Fill the site")
        return site

    def _repository(self, crash: CrashPoint) -> Repository:
        crash.watch(self)
        git = _MortalGit(self.worktree, remote="origin", timeout=60.0, durable=False)
        git.crash = crash
        return Repository(git, branch="main", remote="origin")

    def worker(
        self,
        *,
        clock: Callable[[], float],
        emit: Callable[[Event], None],
        dry_run: bool = False,
        crash: CrashPoint | None = None,
        folders: tuple[str, ...] = ("content",),
        progress: Callable[[str, int, int], None] = lambda _phase, _done, _total: None,
    ) -> Worker:
        """Return a worker that has just started; `run_once()` drains what is due by `clock`."""
        crash = crash or CrashPoint()
        repository = self._repository(crash)
        git = repository.git
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
        queue: Any = _MortalQueue(self.open_queue(clock, dry_run=dry_run), crash)
        earlier = EarlierSaves(SqliteStore(self.storage / "history.db"), clock)

        def remember(event: Event) -> None:
            earlier.store([event])
            emit(event)

        sink = _Sink(remember, crash)
        drain = Drain(
            queue=queue,
            publisher=lambda: publisher,
            emit=sink,
            plugins=Plugins({}),
            backoff=Backoff(DELAYS),
            max_attempts=MAX_ATTEMPTS,
            dry_run=dry_run,
            declared_earlier=partial(declared_earlier, queue, earlier),
            stopping=lambda: False,
            clock=clock,
        )

        return Worker(
            drain=drain,
            stuck_files=queue.stuck_files,
            still_ours=lambda: True,
            stop=Stop(emit, limit=60.0, abort=git.abort),
            wait=_never_wait,
            log_actions=lambda: None,
            pull=lambda _now: None,
            poll=5.0,
        )

    def pull(self, crash: CrashPoint, *, push: bool) -> None:
        """Run `pull --rebase`, perhaps with `--push`. Raises DeclinedError and PublishError."""
        repository = self._repository(crash)
        is_posts = lambda path: path.startswith("content/")  # noqa: E731 - as the worker's allowlist says
        checkout = Checkout(repository, lambda _, __: None, is_cms_path=is_posts)
        pull(repository, checkout, rebase=True, push=push)

    def open_queue(self, clock: Callable[[], float], *, dry_run: bool = False) -> DiskQueue:
        return DiskQueue(self.queue, self.quarantine, longest_delay=max(DELAYS), dry_run=dry_run, clock=clock)
