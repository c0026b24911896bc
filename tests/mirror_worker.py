"""A worker that publishes posts, a step at a time: push, then sync. For tests that kill it in between."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

from briter_worker.errors import FailureCode, PublishError
from briter_worker.git.checkout import Checkout
from briter_worker.git.repository import Repository
from briter_worker.git.run import Git

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

POST = "content/posts/a.md"


def text(number: int) -> str:
    """Return the post's version of this number."""
    return f"version {number:05}\n"


class MirrorWorker:
    """Publishes as the real one: on the remote's tip."""

    def __init__(self, root: Path, *, is_cms_path: Callable[[str], bool] = lambda _path: True) -> None:
        self.worktree, self.remote = root / "site", root / "remote.git"
        self._index = root / "worker-index"
        self.git = Git(self.worktree, remote="origin", timeout=60)
        self.repository = Repository(self.git, branch="main", remote="origin")
        self.warned: list[str] = []
        self.checkout = Checkout(
            self.repository, lambda text, _fix: self.warned.append(text), is_cms_path=is_cms_path
        )

    def bases(self) -> dict[str, str | None]:
        """Return the remembered base versions."""
        return {path: base.blob for path, base in self.checkout.state().bases.items()}

    def tip(self) -> str:
        """Return the remote's tip."""
        return str(self._run("rev-parse", "main", cwd=self.remote))

    def push(self, posts: dict[str, str | None]) -> tuple[str, dict[str, str | None]]:
        """Commit these files on the remote's tip and push the commit; return it, and the blobs."""
        blobs: dict[str, str | None] = {}
        tip = self.tip()
        for left in self._index.parent.glob(f"{self._index.name}*"):
            left.unlink()  # a git that was killed
        self._run("read-tree", tip)
        for path, content in posts.items():
            blobs[path] = content and self._run("hash-object", "-w", "--stdin", stdin=content)
            change = ["--add", "--cacheinfo", f"100644,{blobs[path]},{path}"]
            self._run("update-index", *(change if content else ["--force-remove", path]))
        new = self._run("commit-tree", str(self._run("write-tree")), "-p", tip, "-m", f"post {list(posts)}")
        assert new
        self._run("push", "-q", "origin", f"{new}:refs/heads/main")
        return str(new), blobs

    def sync(self, tip: str, blobs: dict[str, str | None]) -> bool:
        """Bring the mirror up to the tip."""
        while True:
            try:
                with self.repository.working():
                    self.checkout.catch_up()
                    return self.checkout.sync(tip, blobs)
            except PublishError as failure:  # a person's git holds a lock just now: the drain tries again
                if failure.code is not FailureCode.LOCKED:
                    raise

    def _run(self, *args: str, stdin: str = "", cwd: Path | None = None) -> str | None:
        done = subprocess.run(
            ["git", "-c", "user.name=Worker", "-c", "user.email=worker@example.org", *args],
            cwd=cwd or self.worktree,
            env={**os.environ, "GIT_INDEX_FILE": str(self._index)},
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.strip() if done.returncode == 0 else None
