"""The laboratory: sites with many posts and bare remotes, and fresh copies of both, in a temporary folder.

Neither this machine's git configuration nor the user's takes part, and nothing is left behind.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

PROJECT = Path(__file__).resolve().parent.parent
FOLDER = "content/posts"
_IDENTITY = "[user]\n\tname = A Person\n\temail = person@example.org\n"
_OURS = ("GIT_", "BRITER_", "PYTHON", "XDG_", "SSL_CERT_", "CURL_CA_")
_LONGEST_S = 600.0
_WORDS = ("git", "post", "queue", "remote", "branch", "commit", "folder", "garden", "river", "mountain")


@dataclass(slots=True)
class Lab:
    """A temporary folder, its environment, and the templates built in it so far."""

    root: Path
    quick: bool
    env: dict[str, str]
    _templates: dict[int, Path] = field(default_factory=dict)
    _copies: int = 0

    def template(self, posts: int) -> Path:
        """Return a site of this many posts, committed and pushed. Built once."""
        if posts not in self._templates:
            say(f"building a site of {posts:,} posts")
            place = self.root / f"template-{posts}"
            _build(place, posts, self.env)
            self._templates[posts] = place
        return self._templates[posts]

    @contextmanager
    def site(self, posts: int) -> Iterator[Site]:
        """Yield a fresh copy of the template. Nothing of the copy is left to be written to the disk."""
        self._copies += 1
        root = self.root / f"site-{self._copies}"
        subprocess.run(["cp", "-a", str(self.template(posts)), str(root)], check=True)
        site = Site(root, self.env)
        try:
            site.git("remote", "set-url", "origin", str(site.remote))
            # The copies have other inodes than the index remembers, which is no business of what is measured.
            site.git("update-index", "-q", "--refresh")
            os.sync()
            yield site
        finally:
            remove(root)


@dataclass
class Site:
    """A work tree, its bare remote, and its storage."""

    root: Path
    env: Mapping[str, str]

    def __post_init__(self) -> None:
        """Name the folders."""
        self.remote, self.worktree = self.root / "remote.git", self.root / "site"
        self.storage = self.root / "storage"
        self.queue = self.storage / "queue"

    def git(self, *args: str, stdin: str = "") -> str:
        """Return the output of git, run in the work tree."""
        return git(args, self.worktree, self.env, stdin)

    def environment(self, **env: str) -> dict[str, str]:
        """Return the worker's environment for this site, live, with `env` on top."""
        return {
            **self.env,
            "BRITER_APP_ROOT": str(self.worktree),
            "BRITER_STORAGE_ROOT": str(self.storage),
            "BRITER_WORKER_DRY_RUN": "false",
            **env,
        }

    def edit(self, number: int) -> str:
        """Append a paragraph to a post and return the post's path. A post that is missing is created."""
        path = post_path(number)
        with (self.worktree / path).open("a", encoding="utf-8") as file:
            file.write(f"\nOne more paragraph, written at {time.time_ns()}.\n")
        return path

    def prepare_job(self, number: int, **keys: str) -> Path:
        """Write a job for the post under a name that the worker ignores. `commit_job` saves it."""
        document = {"id": f"job-{number}", "slug": f"post-{number:06}", "paths": [post_path(number)], **keys}
        partial = self.queue / f"job-{number:06}.tmp"
        partial.write_text(json.dumps(document), encoding="utf-8")
        return partial

    def count_commits(self) -> int:
        """Return the number of the remote's commits."""
        return count_commits(self.remote, self.env)


def post_path(number: int) -> str:
    """Return the path of a post."""
    return f"{FOLDER}/post-{number:06}.md"


def commit_job(partial: Path) -> None:
    """Save a prepared job, as producers do: with a rename."""
    partial.rename(partial.with_suffix(".json"))


def git(args: Sequence[str], folder: Path, env: Mapping[str, str], stdin: str = "") -> str:
    """Return the output of git. Raises RuntimeError with git's words."""
    done = subprocess.run(
        ["git", *args], cwd=folder, env=env, input=stdin, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"git {' '.join(args)}: {done.stderr.strip()}")
    return done.stdout.strip()


def count_commits(repository: Path, env: Mapping[str, str]) -> int:
    """Return the number of the branch's commits."""
    return int(git(("rev-list", "--count", "main"), repository, env))


def wait_until(is_so: Callable[[], bool], pause: float = 0.01) -> float:
    """Return the time at which the condition holds."""
    deadline = time.monotonic() + _LONGEST_S
    while not is_so():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {_LONGEST_S:.0f} s")
        time.sleep(pause)
    return time.perf_counter()


def worker(*args: str) -> list[str]:
    """Return the worker's command line."""
    return [sys.executable, "-m", "briter_worker", *args]


def timed(command: Sequence[str], folder: Path, env: Mapping[str, str]) -> float:
    """Return the seconds from start to end of a process that must succeed."""
    began = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    took = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])}: {done.stderr.strip() or done.stdout.strip()[-2000:]}")
    return took


@contextmanager
def daemon(
    folder: Path, env: Mapping[str, str], *args: str, is_read: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """Yield the worker as a started service, and end it. `is_read`: a thread reads the log from now on."""
    with subprocess.Popen(
        worker("run", *args), cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            wait_for(process, "worker-started")
            if is_read:
                threading.Thread(target=process.stdout.read, daemon=True).start()  # type: ignore[union-attr]
            yield process
            process.terminate()
            process.wait(60) if is_read else process.communicate(timeout=60)
        finally:
            process.kill()


def wait_for(process: subprocess.Popen[str], event: str) -> None:
    """Read the log up to the next line of this event."""
    lines = []
    for line in process.stdout or ():
        lines.append(line)
        entry: dict[str, Any] = json.loads(line[line.find("{") :]) if "{" in line else {}
        if entry.get("event") == event:
            return
    raise RuntimeError(f"the worker ended before {event}: {''.join(lines)[-2000:]}")


@contextmanager
def laboratory(*, quick: bool) -> Iterator[Lab]:
    """Yield a lab in a temporary folder, and remove the folder."""
    root = Path(tempfile.mkdtemp(prefix="briter-bench-")).resolve()
    try:
        home = root / "home"
        home.mkdir()
        (home / ".gitconfig").write_text(_IDENTITY, encoding="utf-8")
        env = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
        env |= {
            "HOME": str(home),
            "GIT_CONFIG_NOSYSTEM": "1",
            "LC_ALL": "C.UTF-8",
            "PYTHONPATH": str(PROJECT),
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }
        yield Lab(root, quick, env)
    finally:
        remove(root)


def remove(folder: Path) -> None:
    """Remove the folder, also while a `git maintenance` in the background still writes to it."""
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)
    raise RuntimeError(f"{folder} could not be removed")


def say(text: str) -> None:
    """Report progress."""
    print(f"    {text}", file=sys.stderr, flush=True)


def _build(place: Path, posts: int, env: Mapping[str, str]) -> None:
    site = Site(place, env)
    site.queue.mkdir(parents=True)
    (site.worktree / FOLDER).mkdir(parents=True)
    words = random.Random(1)  # noqa: S311 - the same posts each time
    for number in range(posts):
        text = " ".join(words.choices(_WORDS, k=250))
        (site.worktree / post_path(number)).write_text(f"# Post {number}\n\n{text}\n", encoding="utf-8")
    site.git("init", "--quiet", "--initial-branch=main")
    site.git("add", "--all")
    site.git("commit", "--quiet", "--message=Start the site")
    site.git("repack", "-a", "-d", "--quiet")
    git(("clone", "--quiet", "--bare", str(site.worktree), str(site.remote)), place, env)
    git(("remote", "remove", "origin"), site.remote, env)
    site.git("remote", "add", "origin", str(site.remote))
    site.git("push", "--quiet", "--set-upstream", "origin", "main")
    site.git("fetch", "--quiet")
