"""People use git in the CMS's clone while posts are published and workers are killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import traceback
from functools import cache
from itertools import count
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING

import mirror_worker
import psutil
import pytest
from mirror_worker import POST, MirrorWorker, text
from sites import PERSON, Site

if TYPE_CHECKING:
    from collections.abc import Callable

WORKER = Path(mirror_worker.__file__)
SLOW = 'sleep "$(cat ../slow 2>/dev/null || echo 0)"; cat'


class Person:
    """Works on `notes.txt` with real git, and repeats a command that git refuses for a lock."""

    def __init__(self, site: Site, random_: random.Random) -> None:
        self.site, self.random = site, random_
        self.refused = 0
        self.commits = 0
        self.number = 0

    def git(self, *args: str, **env: str) -> bool:
        """Run git until no lock is in the way; return True if it did what was asked."""
        for _ in range(200):
            done = subprocess.run(
                ["git", *PERSON, *args],
                cwd=self.site.worktree,
                env={**os.environ, **env},
                capture_output=True,
                text=True,
                check=False,
            )
            said = done.stdout + done.stderr
            if done.returncode and ("lock" in said or "is at" in said):
                self.refused += 1
                time.sleep(0.02)
                continue
            return done.returncode == 0
        raise AssertionError(f"git {args} is refused for ever: {said}")

    def edit(self) -> None:
        self.number += 1
        (self.site.worktree / "notes.txt").write_text(f"note {self.number}\n")

    def slow(self, seconds: float) -> None:
        (self.site.root / "slow").write_text(f"{seconds}")

    def pause(self) -> float:
        return self.random.choice((0, 0.01, 0.03, 0.1, 0.2))

    def commits_what_a_slow_add_read(self) -> None:
        self.edit()
        self.slow(self.pause())
        self.git("add", "-A")
        self.slow(0)
        self.git("commit", "-qm", "note", "--allow-empty")

    def commits_all_with_an_editor(self) -> None:
        self.edit()
        self.git("commit", "-a", "-q", GIT_EDITOR=f"sleep {self.pause()}; echo note >")

    def commits_the_index_with_an_editor(self) -> None:
        self.edit()
        self.git("add", "notes.txt")
        self.git("commit", "-q", GIT_EDITOR=f"sleep {self.pause()}; echo note >")

    def commits_one_path(self) -> None:
        self.edit()
        self.git("commit", "-qm", "note", "notes.txt")

    def amends(self) -> None:
        self.commits_one_path()
        self.edit()
        if "note" in self.site.git("log", "-1", "--format=%s"):
            self.git("commit", "-aq", "--amend", "--no-edit")

    def goes_to_another_branch_and_back(self) -> None:
        self.git("switch", "-q", "-C", f"draft{self.random.randrange(3)}")
        self.edit()
        self.git("commit", "-qam", "draft")
        self.git("switch", "-q", "main")

    def looks(self) -> None:
        self.git("status")
        self.git("diff")

    def gives_up_the_commit(self) -> None:
        """Put the branch back below a commit, so that the mirror can follow again; keep the commit."""
        kept = f"refs/kept/{self.random.getrandbits(60)}"
        base = self.site.git("log", "-1", "--grep=^post", "--grep=^Notes$", "--format=%H", "main")
        if self.site.git("rev-parse", "main") != base and self.git("update-ref", kept, "main"):
            self.git("reset", "-q", base)

    def works(self, *ways: Callable[[Person], None]) -> None:
        self.random.choice(ways)(self)
        self.gives_up_the_commit()
        time.sleep(self.random.choice((0, 0.05, 0.3)))


def race(
    root: Path, seed: int, *ways: Callable[[Person], None], posts: int, kills: int = 0
) -> dict[str, int]:
    """Have a person work while `posts` versions are published; return figures. Raises AssertionError."""
    chance = random.Random(seed)
    site = Site.make(root)
    site.write_post("notes.txt", "note 0\n")
    site.write_post(".gitattributes", "*.md filter=slow\n")
    site.git("add", "-A")
    site.git("commit", "-qm", "Notes")
    site.git("push", "-q", "origin", "main")
    site.git("config", "filter.slow.clean", SLOW)
    person = Person(site, chance)
    figures = {"kills": 0, "commands": 0, "synced": 0, "late": 0}
    number = 1
    while number <= posts:
        last = min(posts, number + chance.randrange(1, 12)) if kills else posts
        worker = subprocess.Popen(
            [sys.executable, str(WORKER), str(root), str(number), str(last)],
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        # By a timer: on a loaded machine, a person's command may outlast the worker.
        timer = Timer(chance.uniform(0.3, 1.2), _kill, (worker, chance.random() < 0.5))
        if figures["kills"] < kills:
            timer.start()
        while worker.poll() is None:
            person.works(*ways)
            figures["commands"] += 1
        timer.cancel()
        done, said = worker.communicate()
        figures["kills"] += worker.returncode == -signal.SIGKILL
        figures["synced"] += done.count("now")
        figures["late"] += done.count("later")
        assert worker.returncode in (0, -signal.SIGKILL), said
        published = int((site.remote_file(POST) or "version 0").split()[1])
        number = max(published, number) + 1 if worker.returncode == 0 else max(published + 1, number)
        assert_nothing_taken_back(site)
    figures |= {"posts": posts, "refused": person.refused}
    figures["commits"] = len(site.git("log", "--all", "--author=A Person", "--format=%h").splitlines())
    assert_nothing_taken_back(site)
    return figures


def _kill(worker: subprocess.Popen[str], whole_group: bool) -> None:  # noqa: FBT001 - a timer's argument
    if worker.poll() is None:
        (os.killpg if whole_group else os.kill)(worker.pid, signal.SIGKILL)


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
