"""A worker that publishes posts, a step at a time: push, then sync. For tests that kill it in between."""

from __future__ import annotations

from typing import TYPE_CHECKING

from soak.repository import build_commit, git, write_blob

from briter_worker.errors import FailureCode, PublishError
from briter_worker.git.checkout import Checkout
from briter_worker.git.repository import Repository
from briter_worker.git.run import Git

if TYPE_CHECKING:
    from pathlib import Path

POST = "content/posts/a.md"


def text(number: int) -> str:
    """Return the post's version of this number."""
    return f"version {number:05}\n"


class MirrorWorker:
    """Publishes as the real one: on the remote's tip."""

    def __init__(self, root: Path) -> None:
        self.worktree, self.remote = root / "site", root / "remote.git"
        self.git = Git(self.worktree, remote="origin", timeout=60)
        self.repository = Repository(self.git, branch="main", remote="origin")
        self.warned: list[str] = []
        self.checkout = Checkout(
            self.repository, lambda text, _fix: self.warned.append(text), is_cms_path=lambda _path: True
        )

    def bases(self) -> dict[str, str | None]:
        return {path: base.blob for path, base in self.checkout.state().bases.items()}

    def tip(self) -> str:
        return git(self.remote, "rev-parse", "main")

    def push(self, posts: dict[str, str | None]) -> tuple[str, dict[str, str | None]]:
        """Commit these files on the remote's tip and push the commit; return it, and the blobs."""
        changes = {
            path: None if text is None else write_blob(self.worktree, text.encode())
            for path, text in posts.items()
        }
        new = build_commit(self.worktree, self.tip(), changes, f"post {list(posts)}")
        git(self.worktree, "push", "-q", "origin", f"{new}:refs/heads/main")
        return new, {path: blob and blob[1] for path, blob in changes.items()}

    def sync(self, tip: str, blobs: dict[str, str | None]) -> bool:
        while True:
            try:
                with self.repository.working():
                    self.checkout.catch_up()
                    return self.checkout.sync(tip, blobs)
            except PublishError as failure:  # a person's git holds a lock just now: the drain tries again
                if failure.code is not FailureCode.LOCKED:
                    raise
