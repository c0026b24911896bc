"""The repository in odd states: what is a branch's own, what is spoilt, what others left there."""

from __future__ import annotations

import os
import re
import subprocess
import time
from typing import TYPE_CHECKING

import psutil
import pytest
from sites import Result, Site, eventually

from briter_worker.errors import PublishError
from briter_worker.git import refs
from briter_worker.git.command import Commands
from briter_worker.git.pending import has_dry_run_commits
from briter_worker.git.site import Site as Repository

if TYPE_CHECKING:
    from pathlib import Path

DRY = {"BRITER_WORKER_DRY_RUN": "true"}


def save(site: Site, slug: str = "a") -> None:
    site.write_post(f"content/posts/{slug}.md", f"{slug}\n")
    site.save(slug, [f"content/posts/{slug}.md"])


def try_again(site: Site) -> Result:
    """As a person does who has mended what was wrong."""
    assert site.command("retry", "a").returncode == 0
    return site.run_once()


def repository(site: Site, branch: str = "main") -> Repository:
    return Repository(Commands(site.worktree, remote="origin", timeout=30), branch=branch, remote="origin")


def private(site: Site) -> list[str]:
    return site.git("for-each-ref", "--format=%(refname)", refs.PRIVATE).split()


# What is a branch's own


def test_dry_runs_of_one_branch_are_not_pushed_to_another(site: Site) -> None:
    save(site)
    assert site.run_once(**DRY).of("published")
    site.git("push", "-q", "origin", "origin/main:refs/heads/live")
    site.git("switch", "-q", "-c", "live", "origin/live")
    assert site.run_once(BRITER_GIT_BRANCH="live").returncode == 0
    assert [subject for _, subject in site.remote_log("live")] == ["Start the site"]
    site.git("switch", "-q", "main")
    site.run_once()
    assert [subject for _, subject in site.remote_log()] == ["Publish a", "Start the site"]


def test_linked_work_trees_keep_apart_what_is_theirs(site: Site) -> None:
    site.git("branch", "fr")
    site.git("push", "-q", "origin", "fr")
    other = Site(site.root / "other")
    other.queue.mkdir(parents=True)
    site.git("worktree", "add", "-q", str(other.worktree), "fr")
    save(site)
    assert site.run_once(**DRY).of("published")
    save(other, "b")
    assert other.run_once(BRITER_GIT_BRANCH="fr").of("published")
    assert [subject for _, subject in site.remote_log("fr")] == ["Publish b", "Start the site"]
    assert len(site.remote_log()) == 1
    assert has_dry_run_commits(site.worktree, "main")
    assert not has_dry_run_commits(other.worktree, "fr")


@pytest.mark.parametrize("packed", [False, True])
def test_whether_dry_runs_left_commits_is_seen_without_git(site: Site, packed: bool) -> None:  # noqa: FBT001
    assert not has_dry_run_commits(site.worktree, "main")
    save(site)
    site.run_once(**DRY)
    if packed:
        site.git("pack-refs", "--all", "--prune")
    assert has_dry_run_commits(site.worktree, "main")
    assert not has_dry_run_commits(site.worktree, "live")
    assert not has_dry_run_commits(site.root / "nowhere", "main")
    assert repository(site).ref("refs/heads/main") == site.git("rev-parse", "main")


def test_branches_whose_names_contain_one_another_do_not_collide(site: Site) -> None:
    names = ["a", "a/dry-run", "a%2Fdry-run", "b/c"]
    paths = [refs.of_branch(name) + "/dry-run" for name in names]
    for path in paths:
        site.git("update-ref", path, "HEAD")
    assert sorted(private(site)) == sorted(paths)


# What a power cut has spoilt


@pytest.mark.parametrize("spoilt", ["", "x" * 40 + "\n", "\0" * 41])
@pytest.mark.parametrize("name", ["refs/heads/main", "refs/remotes/origin/main"])
def test_a_spoilt_ref_is_named_with_the_command_that_repairs_it(site: Site, name: str, spoilt: str) -> None:
    (site.worktree / ".git" / name).write_text(spoilt)
    save(site)
    assert site.run_once().of("failed")[0]["failure"] == "corrupt"
    fix = site.job("a")["lastError"].partition("Fix: ")[2]
    subprocess.run(["sh", "-ec", fix], cwd=site.worktree, check=True, capture_output=True)
    assert try_again(site).of("published")
    assert [subject for _, subject in site.remote_log()] == ["Publish a", "Start the site"]


def test_the_repair_of_a_spoilt_branch_brings_back_what_only_it_had(site: Site) -> None:
    save(site)
    site.run_once(**DRY)
    lost = site.git("rev-parse", "main")
    (site.worktree / ".git/refs/heads/main").write_text("")
    save(site, "b")
    assert lost in site.run_once().of("failed")[0]["error"]


@pytest.mark.parametrize("kept", ["dry-run", "bases", "unindexed", "fetched"])
def test_a_spoilt_ref_of_the_workers_own_does_not_stop_the_posts(site: Site, kept: str) -> None:
    spoilt = site.worktree / ".git" / refs.of_branch("main") / kept
    spoilt.parent.mkdir(parents=True)
    spoilt.write_text("")
    assert site.run_once().returncode == 0
    save(site)
    assert site.run_once().of("published")


def test_an_empty_head_is_named_with_its_repair(site: Site) -> None:
    (site.worktree / ".git" / "HEAD").write_text("")
    save(site)
    result = site.run_once()
    assert result.of("failed"), result.stdout + result.stderr
    assert "Fix: " in site.job("a")["lastError"]


# SHA-256


def test_a_sha256_repository_is_published_like_any_other(tmp_path: Path) -> None:
    site = Site(tmp_path)
    for folder in (("--bare", str(site.remote)), (str(site.worktree),)):
        site.git("init", "-q", "--object-format=sha256", "-b", "main", *folder, cwd=tmp_path)
    site.git("remote", "add", "origin", str(site.remote))
    site.write_post("content/posts/welcome.md", "# Welcome\n")
    site.git("add", "--all")
    site.git("commit", "-qm", "Start the site")
    site.git("push", "-q", "-u", "origin", "main")
    save(site)
    assert site.run_once(**DRY).of("published")
    assert len(site.remote_log()) == 1
    save(site, "b")
    assert site.run_once().of("published")
    other = site.root / "other"
    site.git("clone", "-q", str(site.remote), str(other), cwd=site.root)
    (other / "content/posts/theirs.md").write_text("theirs\n")
    site.git("add", "--all", cwd=other)
    site.git("commit", "-qm", "Theirs", cwd=other)
    site.git("push", "-q", "origin", "HEAD:main", cwd=other)
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


# Locks and leftovers


def during_the_push(site: Site, text: str) -> None:
    """Somebody does this while the remote has not answered yet."""
    hook = site.remote / "hooks" / "pre-receive"
    hook.write_text(f"#!/bin/sh\n{text}\n")
    hook.chmod(0o755)


def test_a_persons_lock_after_a_publication_that_failed_is_theirs(site: Site) -> None:
    there = site.git("remote", "get-url", "origin")
    site.git("remote", "set-url", "origin", "/nowhere/at/all.git")
    save(site)
    assert site.run_once().of("failed")
    lock = site.worktree / ".git/HEAD.lock"
    lock.touch()
    site.git("remote", "set-url", "origin", there)
    assert try_again(site).of("failed")[0]["failure"] == "locked"
    assert lock.exists()


def test_the_lock_of_a_git_that_had_to_be_ended_goes_with_it(site: Site) -> None:
    lock = site.worktree / ".git/refs/remotes/origin/main.lock"
    hook = site.remote / "hooks" / "pre-receive"
    hook.write_text(f"#!/bin/sh\ntouch {lock}\nexec sleep 30\n")
    hook.chmod(0o755)
    save(site)
    assert site.run_once(BRITER_GIT_TIMEOUT_MS="1000").of("failed")[0]["failure"] == "timeout"
    assert not lock.exists()
    assert not list((site.worktree / ".git").glob("briter-worker.*"))


def test_the_marker_of_a_dead_worker_outlives_a_look_that_was_refused(site: Site) -> None:
    git_dir = site.worktree / ".git"
    busy, lock = git_dir / "briter-worker.busy", git_dir / "packed-refs.lock"
    busy.touch()
    lock.touch()
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
    assert not lock.exists()
    assert not busy.exists()


def test_a_dead_workers_lock_of_the_index_goes_also_after_a_run_in_which_a_git_of_somebodys_ran(
    site: Site,
) -> None:
    git_dir = site.worktree / ".git"
    busy, lock = git_dir / "briter-worker.busy", git_dir / "index.lock"
    busy.touch()
    lock.touch()
    site.git("symbolic-ref", "HEAD", "refs/heads/draft")  # the site's person is away, and cannot come back
    save(site)
    with subprocess.Popen(
        ["git", "cat-file", "--batch"], cwd=site.worktree, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ):
        assert site.run_once().of("failed")[0]["failure"] == "wrong-branch"
        assert lock.exists(), "it may be that git's"
    assert try_again(site).of("failed")[0]["failure"] == "wrong-branch"
    assert not lock.exists()
    assert not busy.exists()


def test_a_lock_of_the_index_that_came_after_the_dead_worker_stays_while_its_git_runs(site: Site) -> None:
    git_dir = site.worktree / ".git"
    busy, lock = git_dir / "briter-worker.busy", git_dir / "index.lock"
    busy.touch()
    lock.touch()
    save(site)
    with subprocess.Popen(
        ["git", "cat-file", "--batch"], cwd=site.worktree, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ):
        assert site.run_once().of("published")
        assert lock.exists()
        lock.unlink()
    site.run_once()
    assert not busy.exists()


def test_what_a_look_in_vain_took_for_a_dead_workers_is_not_taken_for_it_later(site: Site) -> None:
    git_dir = site.worktree / ".git"
    busy, lock, head = git_dir / "briter-worker.busy", git_dir / "index.lock", git_dir / "HEAD.lock"
    for file in (busy, lock, head):
        file.touch()
    opened = repository(site)
    # A child of our own would be the worker's.
    somebodys = ["sh", "-c", "git cat-file --batch; :"]
    with subprocess.Popen(
        somebodys, cwd=site.worktree, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as somebody:
        eventually(lambda: psutil.Process(somebody.pid).children())
        with pytest.raises(PublishError, match=r"HEAD\.lock"), opened.working():
            pass
        # A person removes them, and commits: their lock may have the number of the one that was there.
        busy.unlink()
        head.unlink()
        with opened.working():
            assert busy.exists(), "if this worker died now, nobody would know its locks"
    assert lock.exists()
    opened.commands.watch.close()


@pytest.mark.parametrize("theirs", [False, True], ids=["removes", "replaces"])
def test_a_dead_workers_lock_of_the_index_that_somebody_removes_meanwhile_is_not_waited_for(
    site: Site, *, theirs: bool
) -> None:
    git_dir = site.worktree / ".git"
    busy, lock = git_dir / "briter-worker.busy", git_dir / "index.lock"
    busy.touch()
    lock.touch()
    during_the_push(site, f"touch {lock}.new; mv {lock}.new {lock}" if theirs else f"rm {lock}")
    save(site)
    with subprocess.Popen(
        ["git", "cat-file", "--batch"], cwd=site.worktree, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ):
        assert site.run_once().of("published")
    assert not busy.exists()
    assert lock.exists() == theirs
    lock.unlink(missing_ok=True)
    site.run_once()
    assert site.git("status", "--porcelain") == ""


@pytest.mark.parametrize("gone", [False, True], ids=["it stays", "it goes"])
def test_a_lock_that_comes_during_a_publication_and_stays_is_nobodys(site: Site, *, gone: bool) -> None:
    lock = site.worktree / ".git/refs/remotes/origin/main.lock"
    away = f"(sleep 0.3; rm {lock}) >/dev/null 2>&1 &" if gone else ""
    during_the_push(site, f"touch {lock}; {away}")
    save(site)
    result = site.run_once()
    assert result.of("published")
    assert not lock.exists()
    assert not (site.worktree / ".git/briter-worker.busy").exists()
    site.run_once()
    assert site.git("rev-parse", "main", "origin/main").split() == [site.remote_log()[0][0]] * 2
    assert site.git("status", "--porcelain") == ""


def test_a_lock_is_ours_by_its_folder_not_by_a_name_in_its_path(tmp_path: Path) -> None:
    (tmp_path / "refs/briter").mkdir(parents=True)
    site = Site.make(tmp_path / "refs/briter")
    lock = site.worktree / ".git/HEAD.lock"
    lock.touch()
    save(site)
    assert site.run_once().of("failed")[0]["failure"] == "locked"
    assert lock.exists()


@pytest.mark.parametrize("packed", [False, True], ids=["loose", "packed"])
def test_old_refs_of_dead_workers_are_swept_and_no_others(site: Site, packed: bool) -> None:  # noqa: FBT001
    long_ago = {"GIT_COMMITTER_DATE": "2020-01-01T00:00:00Z"}
    old = subprocess.run(
        ["git", "-c", "user.name=x", "-c", "user.email=x", "commit-tree", "-m", "old", "HEAD^{tree}"],
        cwd=site.worktree,
        env=os.environ | long_ago,
        capture_output=True,
        check=True,
        text=True,
    ).stdout.strip()
    new = site.git("commit-tree", "-m", "new", "HEAD^{tree}")
    swept, flight, young, conflict = (
        f"{refs.PRIVATE}/{name}" for name in ("1" * 32, "2" * 32, "3" * 32, "conflict/a-12345678")
    )
    for name, commit in ((swept, old), (flight, old), (young, new), (conflict, old)):
        site.git("update-ref", name, commit)
    now = time.time()
    for name in (swept, flight, conflict):
        os.utime(site.worktree / ".git" / name, (now - 300_000, now - 300_000))
    if packed:
        site.git("pack-refs", "--all", "--prune")
    repository(site).tidy(now, keep=[flight])
    assert private(site) == [flight, young, conflict]


@pytest.mark.parametrize("lacking", ["refs/heads/main", "refs/remotes/origin/main"])
def test_old_refs_are_swept_also_where_nothing_can_be_late(site: Site, lacking: str) -> None:
    site.git("update-ref", f"{refs.PRIVATE}/{'1' * 32}", "main")
    site.git("update-ref", "-d", lacking)
    repository(site).tidy(time.time() + 300_000)
    assert private(site) == []


def test_the_ref_of_what_landed_is_kept_for_as_long_as_the_branch_has_not_got_it(site: Site) -> None:
    landed = site.git("commit-tree", "-p", "main", "-m", "landed", "main^{tree}")
    ref = f"{refs.PRIVATE}/{'1' * 32}"
    site.git("update-ref", ref, landed)
    site.git("update-ref", "refs/remotes/origin/main", landed)
    long_after = time.time() + 300_000
    repository(site).tidy(long_after)
    assert private(site) == [ref]
    site.git("update-ref", "refs/heads/main", landed)
    repository(site).tidy(long_after)
    assert private(site) == []


def test_a_branch_that_is_gone_from_the_remote_is_said_to_be_gone(site: Site) -> None:
    site.git("config", "receive.denyDeleteCurrent", "ignore", cwd=site.remote)
    site.git("update-ref", "-d", "refs/heads/main", cwd=site.remote)
    save(site)
    assert site.run_once().of("failed")[0]["failure"] == "remote-rewritten"
    assert re.search(r"Fix: git push origin main", site.job("a")["lastError"])
    assert site.git("for-each-ref", cwd=site.remote) == ""
