"""Where the measuring happens: a site with many posts, a bare remote, and fresh copies of both.

Nothing of this machine's git or of its owner takes part, and nothing stays behind.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

PROJECT = Path(__file__).resolve().parent.parent
FOLDER = "content/posts"
_IDENTITY = "[user]\n\tname = A Person\n\temail = person@example.org\n"
_OURS = ("GIT_", "BRITER_", "PYTHON", "XDG_")
_WORDS = (
    *("git", "post", "queue", "worker", "remote", "branch", "commit", "folder", "site", "reader", "writer"),
    *("garden", "river", "mountain", "evening", "letter", "window", "bread", "winter", "silver", "paper"),
)


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    quick: bool

    @property
    def posts(self) -> int:
        """In the folder of an ordinary site."""
        return 1_000 if self.quick else 10_000


@dataclass(slots=True)
class Lab:
    """A temporary folder, its environment, and the templates built in it so far."""

    root: Path
    scale: Scale
    env: dict[str, str]
    _templates: dict[tuple[int, bool], Path] = field(default_factory=dict)
    _copies: int = 0

    def template(self, posts: int, *, nested: bool = False) -> Path:
        """A site of this many posts, committed and pushed; built once."""
        if (posts, nested) not in self._templates:
            say(f"building a site of {posts:,} posts{', each in a folder by year' if nested else ''}")
            place = self.root / f"template-{posts}{'-nested' if nested else ''}"
            _build(place, posts, self.env, nested=nested)
            self._templates[posts, nested] = place
        return self._templates[posts, nested]

    @contextmanager
    def site(self, posts: int, *, nested: bool = False) -> Iterator[Site]:
        """A fresh copy of the template, at rest: nothing is left to be written to the disk.

        `nested`: as `content/posts/<year>/<slug>/index.md`, else all in one folder.
        """
        self._copies += 1
        root = self.root / f"site-{self._copies}"
        subprocess.run(["cp", "-a", str(self.template(posts, nested=nested)), str(root)], check=True)
        site = Site(root, self.env, nested=nested)
        try:
            site.git("remote", "set-url", "origin", str(site.remote))
            # The copies have other inodes than the index remembers: not the measured commands' business.
            site.git("update-index", "-q", "--refresh")
            os.sync()
            yield site
        finally:
            remove(root)


@dataclass(frozen=True, slots=True)
class Site:
    """A work tree, its bare remote, and its storage."""

    root: Path
    env: Mapping[str, str]
    nested: bool = False

    @property
    def remote(self) -> Path:
        """The bare repository that is pushed to."""
        return self.root / "remote.git"

    @property
    def worktree(self) -> Path:
        """The site."""
        return self.root / "site"

    @property
    def queue(self) -> Path:
        """Where jobs wait."""
        return self.root / "storage" / "queue"

    def git(self, *args: str, stdin: str = "") -> str:
        """What git prints, run in the work tree."""
        return git(args, self.worktree, self.env, stdin)

    def environment(self, **env: str) -> dict[str, str]:
        """For the worker: this site, live, and `env` on top."""
        return {
            **self.env,
            "BRITER_APP_ROOT": str(self.worktree),
            "BRITER_STORAGE_ROOT": str(self.root / "storage"),
            "BRITER_WORKER_DRY_RUN": "false",
            **env,
        }

    def post(self, number: int) -> str:
        """The path of a post."""
        if self.nested:
            return f"{FOLDER}/{2000 + number % 20}/post-{number:06}/index.md"
        return f"{FOLDER}/post-{number:06}.md"

    def edit(self, number: int) -> str:
        """Change a post, as an editor does; its path."""
        path = self.post(number)
        with (self.worktree / path).open("a", encoding="utf-8") as file:
            file.write(f"\nOne more paragraph, written at {time.time_ns()}.\n")
        return path

    def save(self, number: int, **keys: str) -> Path:
        """A job for the post, under a name that the worker does not read; rename it to `.json` to save."""
        document = {"id": f"job-{number}", "slug": f"post-{number:06}", "paths": [self.post(number)], **keys}
        partial = self.queue / f"job-{number:06}.tmp"
        partial.write_text(json.dumps(document), encoding="utf-8")
        return partial

    def published(self) -> int:
        """How many commits the remote has."""
        return int(git(("rev-list", "--count", "main"), self.remote, self.env))


def git(args: Sequence[str], folder: Path, env: Mapping[str, str], stdin: str = "") -> str:
    """What git prints; CalledProcessError when it fails."""
    done = subprocess.run(
        ["git", *args], cwd=folder, env=env, input=stdin, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"git {' '.join(args)}: {done.stderr.strip()}")
    return done.stdout.strip()


def worker(*args: str) -> list[str]:
    """The command that a user would type."""
    return [sys.executable, "-m", "briter_worker", *args]


def timed(command: Sequence[str], folder: Path, env: Mapping[str, str]) -> float:
    """Seconds from start to end of a process that must succeed."""
    began = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    took = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])}: {done.stderr.strip() or done.stdout.strip()[-2000:]}")
    return took


@contextmanager
def daemon(site: Site, **env: str) -> Iterator[subprocess.Popen[str]]:
    """`run` as a service; it has said that it started, and it is gone on leaving."""
    with subprocess.Popen(
        worker("run"),
        cwd=site.root,
        env=site.environment(**env),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            wait_for(process, "worker-started")
            yield process
            process.terminate()
            process.communicate(timeout=60)
        finally:
            process.kill()


def wait_for(process: subprocess.Popen[str], event: str) -> dict[str, Any]:
    """The next log line of this event."""
    for line in process.stdout or ():
        entry: dict[str, Any] = json.loads(line.partition(" ")[2])
        if entry["event"] == event:
            return entry
    raise RuntimeError(f"the worker ended before it said {event}")


def memory_of(pid: int, name: str) -> float:
    """MiB, as the kernel counts them: `VmRSS` now, `VmHWM` at most so far."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no {name} for {pid}")


@contextmanager
def laboratory(scale: Scale) -> Iterator[Lab]:
    """A lab in a temporary folder, which is gone on leaving."""
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
        yield Lab(root, scale, env)
    finally:
        remove(root)


def remove(folder: Path) -> None:
    """Nothing of the folder is left, also when a git that tidies in the background still writes to it."""
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)
    raise RuntimeError(f"{folder} could not be removed")


def say(text: str) -> None:
    """Tell the person who waits what is going on."""
    print(f"    {text}", file=sys.stderr, flush=True)


def _build(place: Path, posts: int, env: Mapping[str, str], *, nested: bool) -> None:
    site = Site(place, env, nested)
    site.queue.mkdir(parents=True)
    (site.worktree / FOLDER).mkdir(parents=True)
    words = random.Random(1)  # noqa: S311 - the same posts each time
    for number in range(posts):
        text = " ".join(words.choices(_WORDS, k=250))
        file = site.worktree / site.post(number)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# Post {number}\n\n{text}\n", encoding="utf-8")
    site.git("init", "--quiet", "--initial-branch=main")
    site.git("add", "--all")
    site.git("commit", "--quiet", "--message=Start the site")
    site.git("repack", "-a", "-d", "--quiet")
    git(("clone", "--quiet", "--bare", str(site.worktree), str(site.remote)), place, env)
    git(("remote", "remove", "origin"), site.remote, env)
    site.git("remote", "add", "origin", str(site.remote))
    site.git("push", "--quiet", "--set-upstream", "origin", "main")
    site.git("fetch", "--quiet")
