"""A whole site in a temporary folder, for tests that look at the worker from outside.

`from sites import Site`, and take the fixture `site`. Everything in it is real: a bare remote, a clone of
it, a queue folder, and the worker as a process of its own.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import forks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

PREFIX = "[briter-worker] "
PERSON = ("-c", "user.name=A Person", "-c", "user.email=person@example.org")
"""Who commits in tests when it is not the worker; never written to the clone's configuration."""
_numbers = count(1)
UNMEASURED = {"COVERAGE_PROCESS_START": "", "COVERAGE_PROCESS_CONFIG": ""}
"""For a process that cannot write what was measured, and would say so, or whose own doing is counted."""


def events_in(stdout: str) -> list[dict[str, Any]]:
    """The worker's log lines, parsed, in order."""
    return [json.loads(line.removeprefix(PREFIX)) for line in stdout.splitlines() if line.startswith(PREFIX)]


@dataclass(frozen=True)
class Result:
    """What a finished command left."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def events(self) -> list[dict[str, Any]]:
        return events_in(self.stdout)

    def names(self) -> list[str]:
        """Only the `event` words, in order."""
        return [entry["event"] for entry in self.events]

    def of(self, event: str) -> list[dict[str, Any]]:
        return [entry for entry in self.events if entry["event"] == event]

    def json(self, status: int = 0) -> Any:  # noqa: ANN401 - any JSON
        """What a command printed with `--json`; it ended with this status, and without a warning."""
        assert (self.returncode, self.stderr) == (status, ""), self
        return json.loads(self.stdout)

    def error(self, status: int) -> str:
        """The only line on standard error of a command that ended with this status."""
        (line,) = self.stderr.splitlines()
        assert (self.returncode, line.startswith("briter-worker: ")) == (status, True), self
        return line

    def finding(self, check: str) -> dict[str, Any]:
        """The one thing that a check of `doctor --json` found."""
        (found,) = [each for each in json.loads(self.stdout)["findings"] if each["check"] == check]
        return dict(found)


@dataclass(frozen=True)
class Hold:
    """A hook of the remote in which pushes wait."""

    hook: Path
    began: Path
    end: Path

    def wait(self) -> None:
        """Wait until a push has begun."""
        eventually(self.began.exists)

    def release(self) -> None:
        """Let it go on, and all that come later."""
        self.end.touch()

    def remove(self) -> None:
        """Let it go on; later pushes meet no hook."""
        self.hook.unlink()
        self.release()


@dataclass(frozen=True)
class Site:
    """A site under `root`; `env` is what every command of the worker gets besides the hermetic rest."""

    root: Path
    env: dict[str, str] = field(default_factory=dict)

    @property
    def remote(self) -> Path:
        return self.root / "remote.git"

    @property
    def worktree(self) -> Path:
        return self.root / "site"

    @property
    def storage(self) -> Path:
        return self.root / "storage"

    @property
    def queue(self) -> Path:
        return self.storage / "queue"

    @classmethod
    def make(cls, root: Path) -> Self:
        """A bare remote with one commit on `main`, cloned, with `content/posts` in it."""
        site = cls(Site(_template()).copy(root).root)
        site.root.chmod(0o755)
        if site.worktree != Site(root).worktree:
            Site(root).worktree.rename(site.worktree)
        site.git("update-index", "--refresh", "-q")
        site.queue.mkdir(parents=True)
        return site

    def copy(self, root: Path) -> Self:
        """Make another site like this one; links and times stay."""
        shutil.copytree(self.root, root, symlinks=True, dirs_exist_ok=True)
        site = type(self)(root, self.env)
        config = site.worktree / ".git" / "config"
        config.write_text(config.read_text().replace(str(self.remote), str(site.remote)))
        return site

    def _begin(self) -> None:
        self.git("init", "--quiet", "--bare", "--initial-branch=main", str(self.remote), cwd=self.root)
        self.git("clone", "--quiet", str(self.remote), str(self.worktree), cwd=self.root)
        self.git("symbolic-ref", "HEAD", "refs/heads/main")
        self.write_post("content/posts/welcome.md", "# Welcome\n")
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message=Start the site")
        self.git("push", "--quiet", "--set-upstream", "origin", "main")

    def git(self, *args: str, cwd: Path | None = None) -> str:
        """Run git as a person would, in the worktree or in `cwd`; its output, stripped."""
        done = subprocess.run(
            ["git", *PERSON, *args], cwd=cwd or self.worktree, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"git {' '.join(args)}: {done.stderr}"
        return done.stdout.strip()

    def write_post(self, path: str, text: str) -> Path:
        """Write a file of the site, as the CMS does."""
        file = self.worktree / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return file

    def commit_all(self, message: str = "By hand") -> str:
        """Commit everything as a person would, and push it. Return the commit."""
        return self._commit_all(self.worktree, message)

    def _commit_all(self, clone: Path, message: str) -> str:
        self.git("add", "--all", cwd=clone)
        self.git("commit", "--quiet", f"--message={message}", cwd=clone)
        self.git("push", "--quiet", "origin", "HEAD:main", cwd=clone)
        return self.git("rev-parse", "HEAD", cwd=clone)

    def colleague(self) -> Path:
        """Return somebody else's clone, up to date."""
        clone = self.root / "other"
        if not clone.exists():
            self.git("clone", "--quiet", str(self.remote), str(clone), cwd=self.root)
        self.git("pull", "--quiet", "--rebase", cwd=clone)
        return clone

    def push_elsewhere(self, files: Mapping[str, str | None] | None = None, message: str = "Theirs") -> str:
        """Have somebody else push these files (None deletes one), or what is in `colleague()`."""
        clone = self.colleague() if files else self.root / "other"
        write_files(clone, files or {})
        return self._commit_all(clone, message)

    def hook(self, text: str, name: str = "pre-receive") -> Path:
        """Have the remote run this script at every push."""
        return program(self.remote / "hooks" / name, text)

    def hold_push(self, then: str = "", name: str = "pre-receive") -> Hold:
        """Have each push wait in a hook, which goes on with `then` once it is released."""
        began, end = self.root / f"{name}-began", self.root / f"{name}-end"
        for file in (began, end):
            file.unlink(missing_ok=True)
        wait = f"timeout 100 sh -c 'until [ -e {end} ]; do sleep 0.02; done'"
        return Hold(self.hook(f"touch {began}\n{wait}\n{then}", name), began, end)

    def save_post(self, slug: str, text: str, path: str = "", /, **keys: object) -> Path:
        """Write a post of one file, and a job for it."""
        path = path or f"content/posts/{slug}.md"
        self.write_post(path, text)
        return self.save(slug, [path], **keys)

    def save(self, slug: str, paths: Sequence[str], **keys: object) -> Path:
        """Write a job for the post, safely: a name the worker does not read, then a rename."""
        number = next(_numbers)
        job: dict[str, object] = {"id": f"{slug}-{os.getpid()}-{number}", "slug": slug, "paths": list(paths)}
        job |= {"createdAt": datetime.now(UTC).isoformat(), **keys}
        self.queue.mkdir(parents=True, exist_ok=True)
        waiting = self.queue / f"{job['id']}.json".replace("/", "_")
        partial = waiting.with_suffix(".tmp")
        partial.write_text(json.dumps(job), encoding="utf-8")
        partial.rename(waiting)
        return waiting

    def jobs(self) -> list[dict[str, Any]]:
        """What waits or is dead-lettered in the queue folder, by file name."""
        found = []
        for file in sorted(self.queue.glob("[!.]*.json")):
            with suppress(FileNotFoundError):  # a worker has claimed it meanwhile
                found.append(json.loads(file.read_bytes()))
        return found

    def job(self, slug: str) -> dict[str, Any]:
        (found,) = [job for job in self.jobs() if job["slug"] == slug]
        return found

    def environment(self, **env: str) -> dict[str, str]:
        """What the worker is started with: this site, live, and `env` on top."""
        # What steers the tests themselves is nothing of the worker's: its doctor would wonder.
        ours = {name: value for name, value in os.environ.items() if not name.startswith("BRITER_SOAK")}
        return {
            **ours,
            "BRITER_APP_ROOT": str(self.worktree),
            "BRITER_STORAGE_ROOT": str(self.storage),
            "BRITER_WORKER_DRY_RUN": "false",
            **self.env,
            **env,
        }

    def command(self, *args: str, prefix: Sequence[str] = (), **env: str) -> Result:
        """Run `python -m briter_worker` with these arguments, to its end; perhaps by another program."""
        done = forks.run(args, self.environment(**env), self.root, timeout=100, prefix=prefix)
        return Result(done.returncode, done.stdout, done.stderr)

    def run_once(self, *prefix: str, **env: str) -> Result:
        """Drain what is due, live unless `env` says otherwise; perhaps started by another program."""
        return self.command("run", "--once", prefix=prefix, **env)

    def shell(self, script: str, **env: str) -> Result:
        """Run a shell script in which `$worker` is the program."""
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.root,
            env=self.environment(**env, worker=f"{sys.executable} -m briter_worker"),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    def running(self, *args: str, **env: str) -> AbstractContextManager[subprocess.Popen[str]]:
        """`python -m briter_worker run` (or `args`) in a session of its own, read by `lines_of`."""
        return self.running_to(None, *args, **env)

    @contextmanager
    def running_to(self, log: Path | None, /, *args: str, **env: str) -> Iterator[subprocess.Popen[str]]:
        """As `running`, but it prints to a file. On leaving, it is gone, and the next one gets the lock."""
        with (
            log.open("w") if log else nullcontext() as out,
            subprocess.Popen(
                [sys.executable, "-m", "briter_worker", *(args or ("run",))],
                cwd=self.root,
                env=self.environment(**env),
                stdout=out or subprocess.PIPE,
                stderr=out or subprocess.PIPE,
                text=True,
                start_new_session=True,
            ) as worker,
        ):
            try:
                yield worker
            finally:
                worker.kill()
                worker.communicate()
        self.wait_for_lock()

    def wait_for_lock(self) -> None:
        """Wait until no process holds the lock: what a killed worker has started may outlive it."""
        lock = self.storage / "worker.lock"
        eventually(lambda: not lock.is_file() or is_free(lock))

    def remote_log(self, branch: str = "main") -> list[tuple[str, str]]:
        """(commit, subject) of everything on the remote's branch, newest first."""
        lines = self.git("log", "--format=%H%x09%s", f"refs/heads/{branch}", cwd=self.remote).splitlines()
        return [(commit, subject) for commit, _, subject in (line.partition("\t") for line in lines)]

    def subjects(self, branch: str = "main") -> list[str]:
        """The subjects of everything on the remote's branch, newest first."""
        return [subject for _, subject in self.remote_log(branch)]

    def remote_file(self, path: str, branch: str = "main") -> str | None:
        """The remote's version of a file, to the letter; None when it has none."""
        command = ["git", "cat-file", "blob", f"refs/heads/{branch}:{path}"]
        done = subprocess.run(command, cwd=self.remote, capture_output=True, check=False)
        return done.stdout.decode() if done.returncode == 0 else None


@functools.cache
def _template() -> Path:
    """A site as it begins, made once: with git, it takes longer than many a test."""
    folder = Path(tempfile.mkdtemp(prefix="briter-template-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    Site(folder)._begin()  # noqa: SLF001 - of this module
    return folder


def write_files(folder: Path, files: Mapping[str, str | None]) -> None:
    """Write files; None deletes one."""
    for path, text in files.items():
        file = folder / path
        if text is None:
            file.unlink()
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)


def program(file: Path, text: str) -> Path:
    """Write an executable script."""
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


def eventually(condition: Callable[[], object], *, within: float = 45.0, pause: float = 0.02) -> float:
    """Wait until `condition()` is true; return the seconds. Raises AssertionError after `within` seconds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + within, f"not within {within} s: {condition}"
        time.sleep(pause)
    return time.monotonic() - began


def is_free(lock: Path) -> bool:
    """Return True if no process holds the lock file: neither a worker nor what it left behind."""
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def lines_of(worker: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """The log lines of a running worker, as they come."""
    assert worker.stdout is not None
    for line in worker.stdout:
        yield from events_in(line)


def wait_for_publication(worker: subprocess.Popen[str]) -> None:
    """Read the worker's log up to the next job that is published."""
    for entry in lines_of(worker):
        if entry["event"] == "published":
            return
    raise AssertionError("the worker ended before")
