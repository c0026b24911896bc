"""The repository in odd states: what is a branch's own, what is damaged, what others left there."""

from __future__ import annotations

import subprocess

import pytest
from outcomes import save
from sites import Result, Site

from briter_worker.git.repository import Repository
from briter_worker.git.run import Git

DRY = {"BRITER_WORKER_DRY_RUN": "true"}


def try_again(site: Site) -> Result:
    """As a person does who has mended what was wrong."""
    assert site.command("retry", "a").returncode == 0
    return site.run_once()


def open_repository(site: Site, branch: str = "main") -> Repository:
    git = Git(site.worktree, remote="origin", timeout=30)
    return Repository(git, branch=branch, remote="origin")


# What is a branch's own


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


# Its state


# Its refs and objects


# What a power cut has damaged


@pytest.mark.parametrize("damaged", ["", "x" * 40 + "\n", "\0" * 41])
@pytest.mark.parametrize("name", ["refs/heads/main", "refs/remotes/origin/main"])
def test_a_damaged_ref_is_named_with_the_command_that_repairs_it(site: Site, name: str, damaged: str) -> None:
    (site.worktree / ".git" / name).write_text(damaged)
    save(site)
    assert site.run_once().of("failed")[0]["failure"] == "corrupt"
    fix = site.job("a")["fix"]
    subprocess.run(["sh", "-ec", fix], cwd=site.worktree, check=True, capture_output=True)
    assert try_again(site).of("published")
    assert [subject for _, subject in site.remote_log()] == ["Publish a", "Start the site"]


def test_the_repair_of_a_damaged_branch_brings_back_what_only_it_had(site: Site) -> None:
    site.git("commit", "-q", "--allow-empty", "-m", "Mine")
    lost = site.git("rev-parse", "main")
    (site.worktree / ".git/refs/heads/main").write_text("")
    save(site)
    site.run_once()
    subprocess.run(["sh", "-ec", site.job("a")["fix"]], cwd=site.worktree, check=True, capture_output=True)
    assert site.git("rev-parse", "main") == lost


@pytest.mark.parametrize("kept", ["pushed", "fetched"])
def test_a_damaged_ref_of_the_workers_own_does_not_stop_the_posts(site: Site, kept: str) -> None:
    damaged = site.worktree / ".git" / open_repository(site).own_refs / kept
    damaged.parent.mkdir(parents=True)
    damaged.write_text("")
    assert site.run_once().returncode == 0
    save(site)
    assert site.run_once().of("published")


# SHA-256


# Locks and leftovers


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
    site.hook(f"touch {lock}\nexec sleep 30")
    save(site)
    assert site.run_once(BRITER_GIT_TIMEOUT_MS="1000").of("failed")[0]["failure"] == "timeout"
    assert not lock.exists()
    assert not (site.worktree / ".git/briter/busy").exists()


def test_the_marker_of_a_dead_worker_outlives_a_look_that_was_refused(site: Site) -> None:
    git_dir = site.worktree / ".git"
    busy, lock = git_dir / "briter" / "busy", git_dir / "packed-refs.lock"
    busy.parent.mkdir()
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
