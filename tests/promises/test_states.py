"""The site's repository as people leave it: locks, half-done operations, damage, rubbish."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from outcomes import assert_published, assert_published_at_last, assert_put_off, assert_sound, save
from sites import PERSON, Result, Site, eventually, program

from briter_worker.errors import FailureCode
from briter_worker.git.repository import Repository
from briter_worker.git.run import Git

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


HOUR = 3600.0


def try_again(site: Site) -> Result:
    site.command("retry", "a")
    return site.run_once()


def lock(site: Site, name: str, *, age: float = 0.0) -> Path:
    file = site.worktree / ".git" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    moment = time.time() - age
    os.utime(file, (moment, moment))
    return file


@contextmanager
def commit_in_its_editor(site: Site) -> Iterator[subprocess.Popen[bytes]]:
    """A person's `git commit` that waits for its editor; it ends without a commit."""
    open_, shut = site.root / "editor-is-open", site.root / "editor-may-end"
    wait = f"touch {open_}\nwhile [ ! -e {shut} ]; do sleep 0.02; done\nexit 1"
    editor = program(site.root / "editor", wait)
    site.write_post("draft.md", "mine\n")
    site.git("add", "draft.md")
    with subprocess.Popen(
        ["git", *PERSON, "commit", "-a"],
        cwd=site.worktree,
        env={**os.environ, "GIT_EDITOR": str(editor)},
        stderr=subprocess.DEVNULL,
    ) as commit:
        eventually(open_.exists)
        yield commit
        shut.touch()
        commit.wait(30)


# Locks


@pytest.mark.parametrize(
    "name", ["HEAD.lock", "packed-refs.lock", "refs/heads/main.lock", "refs/remotes/origin/main.lock"]
)
def test_a_young_lock_may_be_somebodys_and_stays(site: Site, name: str) -> None:
    file = lock(site, name)
    save(site, "a")
    assert str(file) in assert_put_off(site, site.run_once(), FailureCode.LOCKED)
    assert file.exists()
    file.unlink()
    assert_published(site, try_again(site))


@pytest.mark.parametrize(
    "name", ["index.lock", "refs/remotes/origin/main.lock", "refs/heads/main.lock", "packed-refs.lock"]
)
def test_an_old_lock_that_nobody_holds_is_removed(site: Site, name: str) -> None:
    file = lock(site, name, age=HOUR)
    save(site, "a")
    assert_published_at_last(site)
    assert not file.exists()


@pytest.mark.parametrize("name", ["index.lock", "refs/heads/other.lock", "refs/remotes/origin/other.lock"])
def test_a_lock_that_is_not_in_the_way_stops_nothing_and_stays(site: Site, name: str) -> None:
    file = lock(site, name)
    save(site, "a")
    assert_published(site, site.run_once())
    assert file.exists()


@pytest.mark.parametrize("age", [0.0, HOUR])
def test_a_lock_under_the_workers_own_refs_is_its_own_to_remove(site: Site, age: float) -> None:
    file = lock(site, f"refs/briter/branches/main/batch/{'1' * 32}.lock", age=age)
    save(site, "a")
    assert_published(site, site.run_once())
    assert not file.exists()


def test_a_live_commit_in_its_editor_neither_stops_a_post_nor_loses_its_lock(site: Site) -> None:
    save(site, "a")
    with commit_in_its_editor(site):
        held = site.worktree / ".git" / "index.lock"
        old = time.time() - HOUR
        os.utime(held, (old, old))
        assert_published(site, site.run_once())
        assert held.exists(), "it is old, but its holder lives"
    site.run_once()
    assert site.git("diff", "--cached", "--name-status") == "A\tdraft.md"
    assert site.subjects() == ["Publish a", "Start the site"]


@pytest.mark.parametrize("name", ["site", "a-link-to-it"])
def test_an_old_lock_stays_while_any_git_lives_in_the_repository(site: Site, name: str) -> None:
    (site.root / "a-link-to-it").symlink_to(site.worktree)
    file = lock(site, "HEAD.lock", age=HOUR)
    save(site, "a")
    with commit_in_its_editor(site):
        assert_put_off(site, site.run_once(BRITER_APP_ROOT=str(site.root / name)), FailureCode.LOCKED)
        assert file.exists()
    assert_published(site, try_again(site))
    assert not file.exists()


# Half-done operations: `test_hostile_surroundings` has the others


@pytest.mark.parametrize(
    ("begin", "failure", "end"),
    [
        ("merge other", FailureCode.UNFINISHED, "merge --abort"),
        ("rebase other", FailureCode.WRONG_BRANCH, "rebase --abort"),
        ("cherry-pick other", FailureCode.UNFINISHED, "cherry-pick --abort"),
        ("revert HEAD~1", FailureCode.UNFINISHED, "revert --abort"),
        ("bisect start", FailureCode.UNFINISHED, "bisect reset"),
        ("switch -q --detach", FailureCode.WRONG_BRANCH, "switch -q main"),
        ("switch -q --orphan new", FailureCode.WRONG_BRANCH, "switch -q main"),
        ("branch -m main renamed", FailureCode.WRONG_BRANCH, "branch -m renamed main"),
        ("update-ref -d refs/heads/main", FailureCode.WRONG_BRANCH, "update-ref refs/heads/main origin/main"),
    ],
    ids=lambda value: str(value).split(" --abort", maxsplit=1)[0],
)
def test_what_a_person_is_in_the_middle_of_is_left_alone(
    site: Site, begin: str, failure: FailureCode, end: str
) -> None:
    site.git("switch", "-q", "-c", "other")
    site.write_post("content/posts/welcome.md", "# Other\n")
    site.git("commit", "-qam", "Other")
    site.git("switch", "-q", "main")
    site.write_post("content/posts/welcome.md", "# Mine\n")
    site.commit_all("Mine")
    subprocess.run(
        ["git", *PERSON, *begin.split()], cwd=site.worktree, capture_output=True, check=False,
        env={**os.environ, "GIT_EDITOR": "true"},
    )  # fmt: skip
    save(site, "a")
    before = site.git("status", "--porcelain=v2", "--branch"), site.git("for-each-ref")
    assert_put_off(site, site.run_once(), failure)
    assert site.job("a")["fix"] == site.command("status", "--json").json()["fix"] != ""
    assert (site.git("status", "--porcelain=v2", "--branch"), site.git("for-each-ref")) == before
    assert site.subjects() == ["Mine", "Start the site"]
    site.git(*end.split())
    assert_published(site, try_again(site))


# Damage


def repair(site: Site) -> None:
    """Run the job's fix in a shell."""
    fix = site.job("a")["fix"].removeprefix("rebuild the index: ")
    subprocess.run(["sh", "-ec", fix], cwd=site.worktree, check=True, capture_output=True)


RUBBISH = (b"", b"x" * 40 + b"\n", b"\0" * 41)
DAMAGED = {"index": (b"", b"x" * 200, b"DIRC\0\0\0\2"), "HEAD": (b"", b"ref: \n", b"\0" * 20)}
DAMAGED |= {"refs/heads/main": RUBBISH, "refs/remotes/origin/main": RUBBISH}


@pytest.mark.parametrize(
    ("name", "content"), [(name, content) for name, contents in DAMAGED.items() for content in contents]
)
def test_a_damaged_file_of_git_is_named_with_its_repair_and_not_reset(
    site: Site, name: str, content: bytes
) -> None:
    file = site.worktree / ".git" / name
    file.write_bytes(content)
    save(site, "a")
    assert_put_off(site, site.run_once(), FailureCode.CORRUPT)
    assert file.read_bytes() == content
    assert len(site.remote_log()) == 1
    repair(site)
    assert_published_at_last(site)
    assert site.git("symbolic-ref", "HEAD") == "refs/heads/main"
    assert site.subjects() == ["Publish a", "Start the site"]


def test_a_removed_index_stops_no_post_and_is_left_to_the_operator(site: Site) -> None:
    (site.worktree / ".git" / "index").unlink()
    save(site, "a")
    result = site.run_once()
    assert_published(site, result)
    assert "the repository has no index" in result.of("warning")[0]["error"]
    site.git("reset", "-q")
    site.run_once()
    assert_sound(site)


@pytest.mark.parametrize(
    ("what", "emptied"),
    [
        ("HEAD^{tree}", False),
        ("HEAD:content", False),
        ("HEAD", True),
        ("HEAD^{tree}", True),
        ("HEAD:content", True),
    ],
)
def test_a_lost_object_is_named_with_its_repair_and_nothing_is_reset(
    site: Site, what: str, *, emptied: bool
) -> None:
    save(site, "a")
    sha = site.git("rev-parse", what)
    file = site.worktree / ".git" / "objects" / sha[:2] / sha[2:]
    content = file.read_bytes()
    file.unlink()
    if emptied:
        file.touch()
    assert_put_off(site, site.run_once(), FailureCode.CORRUPT)
    assert "git fsck --full" in site.job("a")["fix"]
    assert len(site.remote_log()) == 1
    assert (site.worktree / ".git/refs/heads/main").read_text().strip() == site.remote_log()[0][0]
    file.unlink(missing_ok=True)
    file.write_bytes(content)
    assert_published(site, try_again(site))


# What is a branch's own


def test_linked_work_trees_keep_apart_what_is_theirs(site: Site) -> None:
    site.git("branch", "fr")
    site.git("push", "-q", "origin", "fr")
    other = Site(site.root / "other")
    other.queue.mkdir(parents=True)
    site.git("worktree", "add", "-q", str(other.worktree), "fr")
    save(site)
    assert site.run_once(BRITER_WORKER_DRY_RUN="true").of("published")
    save(other, "b")
    assert other.run_once(BRITER_GIT_BRANCH="fr").of("published")
    assert site.subjects("fr") == ["Publish b", "Start the site"]
    assert len(site.remote_log()) == 1
    assert [job["slug"] for job in site.jobs()] == ["a"]


def test_a_symlinked_work_tree_is_published_like_any_other(site: Site) -> None:
    moved = site.root / "elsewhere"
    site.worktree.rename(moved)
    site.worktree.symlink_to(moved)
    save(site)
    assert site.run_once().of("published")
    assert site.git("status", "--porcelain") == ""


def test_without_a_home_the_posts_are_published(site: Site) -> None:
    save(site)
    result = site.run_once(HOME="")
    assert result.of("published"), result.stdout + result.stderr


# What a power cut has damaged


def test_the_repair_of_a_damaged_branch_brings_back_what_only_it_had(site: Site) -> None:
    site.git("commit", "-q", "--allow-empty", "-m", "Mine")
    lost = site.git("rev-parse", "main")
    (site.worktree / ".git/refs/heads/main").write_text("")
    save(site)
    site.run_once()
    repair(site)
    assert site.git("rev-parse", "main") == lost


@pytest.mark.parametrize("kept", ["pushed", "fetched"])
def test_a_damaged_ref_of_the_workers_own_does_not_stop_the_posts(site: Site, kept: str) -> None:
    own = Repository(Git(site.worktree, remote="origin", timeout=30), branch="main", remote="origin").own_refs
    damaged = site.worktree / ".git" / own / kept
    damaged.parent.mkdir(parents=True)
    damaged.write_text("")
    assert site.run_once().returncode == 0
    save(site)
    assert site.run_once().of("published")


# Locks and leftovers


def test_a_persons_lock_after_a_publication_that_failed_is_theirs(site: Site) -> None:
    there = site.git("remote", "get-url", "origin")
    site.git("remote", "set-url", "origin", "/nowhere/at/all.git")
    save(site)
    assert site.run_once().of("failed")
    held = lock(site, "HEAD.lock")
    site.git("remote", "set-url", "origin", there)
    assert try_again(site).of("failed")[0]["failure"] == "locked"
    assert held.exists()


def test_the_lock_of_a_git_that_had_to_be_ended_goes_with_it(site: Site) -> None:
    lock = site.worktree / ".git/refs/remotes/origin/main.lock"
    site.hook(f"touch {lock}\nexec sleep 30")
    save(site)
    assert site.run_once(BRITER_GIT_TIMEOUT_MS="1000").of("failed")[0]["failure"] == "timeout"
    assert not lock.exists()
    assert not (site.worktree / ".git/briter/busy").exists()


def test_the_marker_of_a_dead_worker_outlives_a_look_that_was_refused(site: Site) -> None:
    busy, held = lock(site, "briter/busy"), lock(site, "packed-refs.lock")
    save(site)
    idle = subprocess.Popen(
        ["git", "cat-file", "--batch"], cwd=site.worktree, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    try:
        assert site.run_once().of("failed")[0]["failure"] == "locked"
        assert busy.exists()
    finally:
        idle.communicate()
    assert try_again(site).of("published")
    assert not held.exists()
    assert not busy.exists()


def test_refs_are_read_by_git_however_it_keeps_them(site: Site) -> None:
    """Here HEAD is a symbolic link, and the refs are packed; reftables are in `scripts/soak git`."""
    site.git("config", "core.preferSymlinkRefs", "true")
    site.git("symbolic-ref", "HEAD", "refs/heads/main")
    assert (site.worktree / ".git/HEAD").is_symlink()
    for slug in ("a", "b"):
        site.git("pack-refs", "--all", "--prune")
        save(site, slug)
        assert_published(site, site.run_once(), slug)
        assert site.git("rev-parse", "main") == site.remote_log()[0][0]
    site.git("switch", "--quiet", "--create", "drafts")
    save(site, "c")
    assert_put_off(site, site.run_once(), FailureCode.WRONG_BRANCH, slug="c")


def test_a_sha256_repository_is_published_like_any_other(tmp_path: Path) -> None:
    site = Site(tmp_path)
    for folder in (("--bare", str(site.remote)), (str(site.worktree),)):
        site.git("init", "-q", "--object-format=sha256", "-b", "main", *folder, cwd=tmp_path)
    site.git("remote", "add", "origin", str(site.remote))
    site.write_post("content/posts/welcome.md", "# Welcome\n")
    site.commit_all("Start the site")
    save(site)
    assert site.run_once(BRITER_WORKER_DRY_RUN="true").of("published")
    assert len(site.remote_log()) == 1
    save(site, "b")
    assert site.run_once().of("published")
    site.push_elsewhere({"content/posts/theirs.md": "theirs\n"})
    save(site, "c")
    assert site.run_once().of("published")
    (site.worktree / "content/posts/a.md").unlink()
    site.save("a", ["content/posts/a.md"])
    assert site.run_once().of("published")
    subjects = [subject.removeprefix("Publish ") for _, subject in site.remote_log()]
    assert subjects == ["a", "c", "Theirs", "b", "a", "Start the site"]
    assert len(site.remote_log()[0][0]) == 64
    assert site.git("status", "--porcelain") == ""
    assert (site.worktree / "content/posts/theirs.md").exists()
