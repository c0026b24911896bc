"""People use git in the CMS's clone while posts are published and workers are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from itertools import count
from typing import TYPE_CHECKING

import psutil
import pytest
from mirror_races import Person, assert_nothing_taken_back, race
from mirror_worker import POST, MirrorWorker, text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sites import Site

TIMES = int(os.environ.get("BRITER_SOAK_MIRROR", "1"))
WAYS = [
    Person.commits_what_a_slow_add_read,
    Person.commits_all_with_an_editor,
    Person.commits_the_index_with_an_editor,
    Person.commits_one_path,
    Person.amends,
    Person.goes_to_another_branch_and_back,
    Person.looks,
]
STEPS = {"link", "rename", "replace", "unlink", "write", "flush", "fsync", "mkdir", "fchmod", "readline"}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_no_commit_takes_a_post_back(tmp_path: Path, way: Callable[[Person], None]) -> None:
    figures = race(tmp_path, TIMES, way, posts=15 * TIMES)
    assert figures["commands"]


@pytest.mark.parametrize("seed", range(TIMES))
def test_no_commit_takes_a_post_back_while_workers_are_killed(tmp_path: Path, seed: int) -> None:
    figures = race(tmp_path, seed, *WAYS, posts=30, kills=10)
    assert figures["kills"]


def killed_at(site: Site, step: int, tip: str, blobs: dict[str, str | None], *, with_git: bool) -> bool:
    """Sync in a process that is killed at its n-th step; return False if it ended before.

    The steps before the index is held change nothing: all of them are the first.
    """
    child = os.fork()
    lock = site.worktree / ".git/index.lock"
    if child == 0:
        taken = 0

        def kill(_frame: object, event: str, called: object) -> None:
            nonlocal taken
            if event == "c_call" and getattr(called, "__name__", "") in STEPS:
                taken += bool(taken) or os.path.lexists(lock)
                if taken == step:
                    for each in psutil.Process().children(recursive=True) if with_git else []:
                        each.kill()
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            worker = MirrorWorker(site.root)
            sys.setprofile(kill)
            worker.sync(tip, blobs)
        except BaseException:  # noqa: BLE001 - the parent sees the status
            traceback.print_exc(file=sys.__stderr__)
        finally:
            sys.setprofile(None)
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("with_git", [False, True], ids=["worker", "worker and git"])
def test_a_worker_killed_at_any_step_leaves_nothing_older_than_the_branch(
    site: Site, *, with_git: bool
) -> None:
    """The person removes the lock as git says, and commits everything, before a new worker comes."""
    worker = MirrorWorker(site.root)
    site.write_post("notes.txt", "0\n")
    other = site.root / "other"
    site.git("clone", "-q", str(site.remote), str(other), cwd=site.root)
    for step in count(1):
        number = step
        site.git("pull", "-q", "--rebase", cwd=other)
        (other / "content/theirs.md").write_text(text(number))
        site.git("add", "-A", cwd=other)
        site.git("commit", "-qm", "Theirs", cwd=other)
        site.git("push", "-q", "origin", "HEAD:main", cwd=other)
        site.git("fetch", "-q")
        site.write_post(POST, text(number))
        pushed = worker.push({POST: text(number)})
        if not killed_at(site, step, *pushed, with_git=with_git):
            break
        for lock in (site.worktree / ".git").rglob("*.lock"):
            lock.unlink(missing_ok=True)
        before = site.git("rev-parse", "main")
        for all_ in ([], ["--all"]):
            (site.worktree / "notes.txt").write_text(f"{number} {all_}\n")
            site.git("add", "notes.txt")
            site.git("commit", "-qm", "Note", *all_)
        assert_nothing_taken_back(site)
        assert_nothing_taken_back(site, "content/theirs.md")
        site.git("reset", "-q", before)
        assert MirrorWorker(site.root).sync(*pushed)
        assert site.git("rev-parse", "main") == worker.tip()
        assert site.git("status", "--porcelain", "--untracked-files=no") == ""
        assert (site.worktree / "content/theirs.md").read_text() == text(number)
        assert sorted(each.name for each in (site.worktree / "content").iterdir()) == ["posts", "theirs.md"]
    assert step > 15
    subprocess.run(["git", "fsck", "--strict"], cwd=site.worktree, check=True, capture_output=True)
