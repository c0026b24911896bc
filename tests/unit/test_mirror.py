"""The clone of the CMS follows the remote: branch, index and files, now or later."""

from __future__ import annotations

import os
import stat
import subprocess
import tracemalloc
from typing import TYPE_CHECKING

import pytest
from mirror_worker import MirrorWorker

from briter_worker.git import work_tree as work_tree_module

if TYPE_CHECKING:
    from collections.abc import Callable

    from sites import Site

WELCOME = "content/posts/welcome.md"


@pytest.fixture
def worker(site: Site) -> MirrorWorker:
    return MirrorWorker(site.root)


def push_theirs(site: Site, worker: MirrorWorker, **files: str | None) -> str:
    """Somebody else pushes files of `content/posts`; return the remote's tip, fetched."""
    site.push_elsewhere({f"content/posts/{name}.md": text for name, text in files.items()})
    return fetched(worker)


def push_all(site: Site, worker: MirrorWorker) -> str:
    """Somebody else pushes what is in their clone."""
    site.push_elsewhere()
    return fetched(worker)


def fetched(worker: MirrorWorker) -> str:
    with worker.repository.working():
        return worker.repository.fetch()


def follow(worker: MirrorWorker, tip: str) -> bool:
    return worker.sync(tip, {})


def assert_followed(site: Site, worker: MirrorWorker, status: str = "") -> None:
    assert site.git("rev-parse", "main") == worker.tip()
    assert site.git("diff", "--cached", "--name-only") == ""
    assert site.git("status", "--porcelain") == status
    assert not (site.worktree / ".git/index.lock").exists()
    assert {path.name for path in (site.worktree / ".git/briter").iterdir()} <= {"lock"}


def assert_commit_takes_nothing_back(site: Site, *paths: str) -> None:
    """`git commit -a`, the worst that a person can do."""
    before = {path: site.git("ls-tree", "HEAD", path) for path in paths}
    site.write_post("notes.txt", "a note\n")
    site.git("add", "notes.txt")
    site.git("commit", "-qam", "A note")
    assert {path: site.git("ls-tree", "HEAD", path) for path in paths} == before
    site.git("reset", "-q", "--soft", "HEAD~1")
    site.git("rm", "-q", "--cached", "notes.txt")
    (site.worktree / "notes.txt").unlink()


@pytest.mark.parametrize("kind", ["folder", "link", "linked folder"])
def test_what_is_in_the_way_is_told_kept_from_commits_and_written_when_the_way_is_free(
    site: Site, worker: MirrorWorker, kind: str
) -> None:
    other = site.colleague()
    (other / "content/new").mkdir()
    (other / "content/new/a.md").write_text("theirs\n")
    (site.root / "elsewhere").mkdir()
    way = site.worktree / "content/new"
    if kind == "linked folder":
        way.symlink_to(site.root / "elsewhere")
    else:
        way.mkdir()
        way = way / "a.md"
        way.mkdir() if kind == "folder" else way.symlink_to("/etc/hostname")
    assert follow(worker, push_all(site, worker))
    assert site.git("rev-parse", "main") == worker.tip()
    assert_commit_takes_nothing_back(site, "content/new/a.md")
    assert list((site.root / "elsewhere").iterdir()) == []
    (told,) = worker.warned
    assert "could not be written, such as content/new/a.md" in told

    way.rmdir() if kind == "folder" else way.unlink()
    with worker.repository.working():
        worker.checkout.catch_up()
    assert (site.worktree / "content/new/a.md").read_text() == "theirs\n"
    assert_followed(site, worker)


def test_files_of_the_remote_are_deep_and_large(site: Site, worker: MirrorWorker) -> None:
    depth, size = 1100, 40_000_000
    blob = (
        subprocess.run(
            ["git", "hash-object", "-w", "--stdin"],
            cwd=site.remote,
            input=b"x" * size,
            check=True,
            capture_output=True,
        )
        .stdout.decode()
        .strip()
    )
    path = f"content/{'d/' * depth}deep.md"
    lines = f"commit refs/heads/main\ncommitter T <t@t> 0 +0000\ndata 1\nx\nfrom {worker.tip()}\n"
    lines += f"M 100644 {blob} {path}\n"
    subprocess.run(["git", "fast-import", "--quiet"], cwd=site.remote, input=lines.encode(), check=True)
    with worker.repository.working():
        tip = worker.repository.fetch()
    tracemalloc.start()
    try:
        assert follow(worker, tip)
        assert tracemalloc.get_traced_memory()[1] < size / 4
    finally:
        tracemalloc.stop()
    assert (site.worktree / path).stat().st_size == size
    assert_followed(site, worker)
    subprocess.run(["rm", "-rf", site.worktree / "content/d"], check=True)


def test_written_files_keep_group_mode_and_setgid_whatever_the_umask(
    site: Site, worker: MirrorWorker
) -> None:
    posts = site.worktree / "content/posts"
    group = next(iter(set(os.getgroups()) - {os.getgid()}), 12345 if os.geteuid() == 0 else os.getgid())
    for each in (site.worktree / "content", posts):
        os.chown(each, -1, group)
        each.chmod(0o2775)
    (site.worktree / WELCOME).chmod(0o660)
    os.chown(site.worktree / WELCOME, -1, group)
    other = site.colleague()
    (other / "content/posts/sub").mkdir()
    (other / "content/posts/sub/new.md").write_text("new\n")
    (other / WELCOME).write_text("theirs\n")
    before = os.umask(0o077)
    try:
        assert follow(worker, push_all(site, worker))
    finally:
        os.umask(before)
    access = {
        name: (stat.S_IMODE((posts / name).stat().st_mode), (posts / name).stat().st_gid)
        for name in ("sub", "sub/new.md", "welcome.md")
    }
    assert access == {"sub": (0o2775, group), "sub/new.md": (0o664, group), "welcome.md": (0o660, group)}


# The moment of the exchange


def in_the_moment(monkeypatch: pytest.MonkeyPatch, does: Callable[[], object]) -> None:
    """Do something right before a file changes its name."""
    rename = work_tree_module._rename  # noqa: SLF001 - the kernel's, there is no other place to wait
    done: list[object] = []

    def late(*args: object) -> bool:
        if not done:
            done.append(does())
        return rename(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(work_tree_module, "_rename", late)


@pytest.mark.parametrize("way", ["in place", "by rename", "removed", "new"])
def test_what_the_cms_saves_in_that_moment_is_not_lost(
    site: Site, worker: MirrorWorker, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    file = site.worktree / ("content/posts/new.md" if way == "new" else WELCOME)

    def save() -> None:
        if way == "by rename":
            site.write_post("content/saved", "the CMS's\n").rename(file)
        elif way == "removed":
            file.unlink()
        else:
            file.write_text("the CMS's\n")

    in_the_moment(monkeypatch, save)
    assert follow(worker, push_theirs(site, worker, **{file.stem: "theirs\n"}))
    assert file.exists() != (way == "removed")
    assert way == "removed" or file.read_text() == "the CMS's\n"
    assert site.git("rev-parse", "main") == worker.tip()
    assert_commit_takes_nothing_back(site, f"content/posts/{file.name}")
    assert sorted(each.name for each in file.parent.iterdir() if each.name.startswith(".")) == []


def test_a_file_that_the_cms_has_open_for_writing_is_put_back(site: Site, worker: MirrorWorker) -> None:
    file = site.worktree / WELCOME
    tip = push_theirs(site, worker, welcome="theirs\n")
    with file.open("r+") as writing:
        assert follow(worker, tip)
        writing.write("the CMS's\n")
    assert file.read_text() == "the CMS's\n"


@pytest.mark.parametrize("removes", [False, True])
def test_without_an_exchange_a_file_is_replaced_after_a_look(
    site: Site, worker: MirrorWorker, monkeypatch: pytest.MonkeyPatch, *, removes: bool
) -> None:
    monkeypatch.setattr(work_tree_module, "_rename", lambda *_: False)
    assert follow(worker, push_theirs(site, worker, welcome=None if removes else "theirs\n", new="new\n"))
    assert_followed(site, worker)


# Locks


def test_a_lock_that_a_dead_worker_left_stops_nobody(site: Site, worker: MirrorWorker) -> None:
    (site.worktree / ".git/index.lock").write_bytes(b"briter-worker")
    assert follow(worker, push_theirs(site, worker, welcome="theirs\n"))
    assert_followed(site, worker)


def test_files_are_written_and_compared_as_git_converts_them(site: Site, worker: MirrorWorker) -> None:
    site.git("config", "filter.rot.clean", "tr a-z b-za")
    site.git("config", "filter.rot.smudge", "tr b-za a-z")
    site.write_post(".gitattributes", "*.txt text eol=crlf\n*.rot filter=rot\n")
    site.commit_all("Attributes")
    other = site.colleague()
    for round_ in ("one\n", "two\n"):
        (other / "content/a.txt").write_bytes(round_.encode())
        (other / "content/a.rot").write_bytes(round_.encode())
        assert follow(worker, push_all(site, worker))
        assert (site.worktree / "content/a.txt").read_bytes() == round_.replace("\n", "\r\n").encode()
        assert site.git("hash-object", "content/a.rot") == site.git("rev-parse", "HEAD:content/a.rot")
        assert_followed(site, worker)
