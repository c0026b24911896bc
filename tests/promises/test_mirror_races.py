"""A person commits after a worker was killed at any step of bringing the branch up to the remote."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from functools import cache
from itertools import count
from typing import TYPE_CHECKING

import psutil
import pytest
from mirror_worker import POST, MirrorWorker, text

if TYPE_CHECKING:
    from pathlib import Path

    from sites import Site


def assert_nothing_taken_back(site: Site, path: str = POST) -> None:
    """No commit of anybody's has an older version of the post than its parent."""
    for line in site.git("log", "--all", "--reflog", "--format=%H %P").splitlines():
        commit, *parents = line.split()
        for parent in parents[:1]:
            before, after = version(site, parent, path), version(site, commit, path)
            who = site.git("log", "-1", "--format=%an: %s", commit)
            assert before <= after, f"{commit[:8]} ({who}) takes {path} from {before} back to {after}"


def version(site: Site, commit: str, path: str) -> int:
    """Return the number of the version that a commit has; 0 for none."""
    return _version(site.worktree, commit, path)


@cache
def _version(worktree: Path, commit: str, path: str) -> int:
    done = subprocess.run(
        ["git", "show", f"{commit}:{path}"], cwd=worktree, capture_output=True, text=True, check=False
    )
    return int(done.stdout.split()[1]) if done.returncode == 0 else 0


STEPS = {"link", "rename", "replace", "unlink", "write", "flush", "fsync", "mkdir", "fchmod", "readline"}


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
    for step in count(1):
        number = step
        site.push_elsewhere({"content/theirs.md": text(number)})
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


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_an_edit_of_a_file_that_a_killed_worker_has_written_conflicts_with_nobody(site: Site) -> None:
    worker, theirs = MirrorWorker(site.root), site.write_post("content/theirs.md", "0\n")
    site.git("add", "content")
    site.git("commit", "-qm", "Theirs")
    site.git("push", "-q", "origin", "main")
    edits = 0
    for step in count(1):
        pushed = worker.push({"content/theirs.md": text(step)})
        if not killed_at(site, step, pushed[0], {}, with_git=True):
            break
        if theirs.read_text() == text(step) and site.git("rev-parse", "main") != pushed[0]:
            edits += 1
            theirs.write_text(f"edited {step}\n")
            site.save("theirs", ["content/theirs.md"])
            assert "published" in site.run_once().names()
            assert site.remote_file("content/theirs.md") == f"edited {step}\n"
        else:
            assert worker.sync(pushed[0], {})
    assert edits
