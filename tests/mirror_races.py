"""People who work in the CMS's clone while posts are published, and the look whether they took one back."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING

from mirror_worker import POST
from sites import PERSON, Site

if TYPE_CHECKING:
    from collections.abc import Callable

WORKER = Path(__file__).with_name("mirror_worker.py")
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

    def stashes(self) -> None:
        self.edit()
        if self.git("stash", "-q"):
            self.git("stash", "pop", "-q")

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
