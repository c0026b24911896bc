"""`pull`: local commits come onto the remote's tip, and the CMS's files stay as they are."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest
from mirror_worker import MirrorWorker

from briter_worker.errors import DeclinedError, PublishError
from briter_worker.git.pull import PullResult, pull

if TYPE_CHECKING:
    from pathlib import Path

    from sites import Site

LINES = [f"line {number}\n" for number in range(12)]


@pytest.fixture
def worker(site: Site) -> MirrorWorker:
    for number in range(8):
        site.write_post(f"content/posts/{number}.md", "".join(LINES))
    commit(site, "Posts")
    site.git("push", "-q", "origin", "main")
    return MirrorWorker(site.root)


def commit(site: Site, message: str = "Mine") -> None:
    site.git("add", "-A")
    site.git("commit", "-qm", message)


def edit(file: Path, line: int, text: str) -> str:
    lines = file.read_text().splitlines(keepends=True)
    lines[line] = f"{text}\n"
    file.write_text("".join(lines))
    return file.read_text()


def publish(worker: MirrorWorker, path: str, text: str) -> bool:
    file = worker.worktree / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return worker.sync(*worker.push({path: text}))


def rebase(worker: MirrorWorker, *, push: bool = True) -> PullResult:
    return pull(worker.repository, worker.checkout, rebase=True, push=push)


def assert_settled(site: Site, worker: MirrorWorker, status: str = "") -> None:
    assert site.git("rev-parse", "main") == worker.tip() == site.git("rev-parse", "origin/main")
    assert site.git("status", "--porcelain") == status
    assert site.git("worktree", "list").count("\n") == 0
    assert {path.name for path in (site.worktree / ".git/briter").iterdir()} == {"lock"}
    assert worker.bases() == {}


def test_a_week_without_a_push_ends_with_everything_on_the_remote(site: Site, worker: MirrorWorker) -> None:
    for day in range(7):
        post = site.worktree / f"content/posts/{day}.md"
        edit(post, 11, f"the person's, {day}")
        site.write_post(f"theme{day}.css", f"{day}\n")
        commit(site, f"Day {day}")
        for number in range(6):
            publish(worker, f"content/posts/new-{day}-{number}.md", "new\n")
        publish(worker, f"content/posts/{day}.md", edit(post, 10, f"the CMS's, {day}"))
        edit(post, 9, f"the person's again, {day}")
        site.git("commit", "-qam", f"Evening {day}")
    unsaved = edit(site.worktree / "content/posts/7.md", 5, "not saved yet")
    assert site.git("rev-parse", "main") != worker.tip()

    with pytest.raises(DeclinedError, match=r"14 local commits are not on the remote: .*Day 0") as declined:
        pull(worker.repository, worker.checkout, rebase=False, push=False)
    assert declined.value.fix == "briter-worker pull --rebase --push"
    result = rebase(worker)

    assert result.is_pushed
    assert len(result.rebased) == 14
    assert (site.worktree / "content/posts/7.md").read_text() == unsaved
    assert_settled(site, worker, "M content/posts/7.md")
    for day in range(7):
        lines = [*LINES[:9], f"the person's again, {day}\n", f"the CMS's, {day}\n", f"the person's, {day}\n"]
        assert site.remote_file(f"content/posts/{day}.md") == "".join(lines)
        assert site.remote_file(f"theme{day}.css") == f"{day}\n"
        assert site.remote_file(f"content/posts/new-{day}-5.md") == "new\n"
    assert site.git("log", "-1", "--format=%an %cn %s") == "A Person A Person Evening 6"


def test_commits_that_conflict_are_named_and_nothing_changes(site: Site, worker: MirrorWorker) -> None:
    site.write_post("theme.css", "mine\n")
    commit(site, "Mine: theme")
    worker.push({"theme.css": "theirs\n"})
    before = site.git("rev-parse", "main"), site.git("ls-files", "-s"), worker.tip()
    with pytest.raises(
        DeclinedError, match=r"Mine: theme.* the same lines of theme\.css; nothing"
    ) as declined:
        rebase(worker)
    assert "git rebase origin/main" in declined.value.fix
    assert (site.git("rev-parse", "main"), site.git("ls-files", "-s"), worker.tip()) == before
    assert site.git("worktree", "list").count("\n") == 0
    assert (site.worktree / "theme.css").read_text() == "mine\n"
    # As the fix says, with the conflict resolved elsewhere.
    site.git("reset", "-q", declined.value.fix.rpartition(" ")[2])
    (site.worktree / "theme.css").unlink()
    assert pull(worker.repository, worker.checkout, rebase=False, push=False).late_reason == ""
    assert (site.worktree / "theme.css").read_text() == "theirs\n"
    assert_settled(site, worker)


@pytest.mark.parametrize("push", [False, True])
def test_while_the_index_is_held_nothing_is_pushed(site: Site, worker: MirrorWorker, *, push: bool) -> None:
    site.write_post("theme.css", "mine\n")
    commit(site)
    publish(worker, "content/posts/a.md", "a\n")
    lock = site.worktree / ".git/index.lock"
    lock.touch()
    os.utime(lock, (time.time() - 60, time.time() - 60))
    before = worker.tip()
    with pytest.raises(PublishError, match="holds the index"):
        rebase(worker, push=push)
    assert worker.tip() == before
    lock.unlink()
    assert rebase(worker).is_pushed
    assert site.remote_file("theme.css") == "mine\n"
    assert_settled(site, worker)
