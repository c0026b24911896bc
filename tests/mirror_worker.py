"""A worker that publishes one post again and again: plan, push, sync. For tests that race or kill it.

python mirror_worker.py ROOT FROM TO: publishes the versions FROM to TO of `content/posts/a.md`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from briter_worker.errors import FailureCode, PublishError
from briter_worker.git.checkout import Checkout
from briter_worker.git.repository import Repository
from briter_worker.git.run import Git

if TYPE_CHECKING:
    from collections.abc import Callable

POST = "content/posts/a.md"


def main(root: Path, first: int, last: int) -> None:
    worker = MirrorWorker(root)
    worker.resume()
    for number in range(first, last + 1):
        print("now" if worker.publish(number) else "later", flush=True)  # noqa: T201


def text(number: int) -> str:
    """Return the post's version of this number."""
    return f"version {number:05}\n"


class MirrorWorker:
    """Publishes as the real one: on the remote's tip, with a plan before the push."""

    def __init__(self, root: Path, *, is_cms_path: Callable[[str], bool] = lambda _path: True) -> None:
        self.worktree, self.remote = root / "site", root / "remote.git"
        self._index, self._plan = root / "worker-index", root / "plan.json"
        self.git = Git(self.worktree, remote="origin", timeout=60)
        self.repository = Repository(self.git, branch="main", remote="origin")
        self.warned: list[str] = []
        self.checkout = Checkout(
            self.repository, lambda text, _fix: self.warned.append(text), is_cms_path=is_cms_path
        )

    def resume(self) -> None:
        """Finish what a killed worker has pushed."""
        if self._plan.exists():
            plan = json.loads(self._plan.read_text())
            if self._run("merge-base", "--is-ancestor", plan["tip"], self.tip()) is not None:
                self.sync(plan["tip"], plan["blobs"])
            self._plan.unlink()

    def bases(self) -> dict[str, str | None]:
        """Return the remembered base versions."""
        return {path: base.blob for path, base in self.checkout.state().bases.items()}

    def tip(self) -> str:
        """Return the remote's tip."""
        return str(self._run("rev-parse", "main", cwd=self.remote))

    def publish(self, number: int) -> bool:
        """Save the next version as the CMS does, push it, and sync."""
        saved = self.worktree / f".{number}.new"
        saved.write_text(text(number))
        saved.rename(self.worktree / POST)
        return self.sync(*self.push({POST: text(number)}))

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
        plan = self._plan.with_suffix(".new")
        plan.write_text(json.dumps({"tip": new, "blobs": blobs}))
        plan.rename(self._plan)
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


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
