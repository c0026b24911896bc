"""People who use git beside the worker: an operator in the site's repository, a colleague with a clone."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from sites import PERSON

from soak.cms import CONTESTED, TITLED, post_path

if TYPE_CHECKING:
    import random
    import threading

    from sites import Site

    from soak.ledger import Ledger

_TRIES = 600
"""With a pause of 0.05 s: a killed worker's stale index lock goes when the next worker starts."""


class Git:
    """Git in one clone, as a person runs it. A command that fails returns None."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *args: str, stdin: str = "", index: Path | None = None) -> str | None:
        """Run git; return its output, stripped."""
        done = subprocess.run(
            ["git", *PERSON, *args],
            cwd=self.folder,
            input=stdin,
            env=os.environ | ({"GIT_INDEX_FILE": str(index)} if index else {}),
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.strip() if done.returncode == 0 else None


class Operator:
    """Works in the site's repository: commits, pushes, pulls, switches, merges, and leaves files staged."""

    def __init__(self, site: Site, ledger: Ledger, dice: random.Random, no_worker: threading.Lock) -> None:
        self._site = site
        self._ledger = ledger
        self._dice = dice
        self._no_worker = no_worker
        self._git = Git(site.worktree)
        self._count = 0
        self._staged: dict[str, str] = {}
        self._texts: dict[str, str] = {}
        self.surprises: list[str] = []
        """Changes in the repository that the operator did not make."""

    def act(self) -> None:
        """Do one thing, then pause."""
        often = [self.commit_and_push, self.stage, self.edit, self.commit]
        self._dice.choice([*often, *often, self.leave_a_merge, self.draft, self.pull])()
        time.sleep(self._dice.uniform(0.05, 1.0))

    def edit(self) -> None:
        """Change a tracked file."""
        self._write("notes/unstaged.txt")

    def stage(self) -> None:
        """Stage a file."""
        path = f"notes/{self._dice.choice('abc')}.txt"
        text = self._write(path)
        if self._git("add", path) is not None:
            self._staged[path] = text

    def commit(self) -> bool:
        """Commit what is staged. Return True if git did."""
        self.stage()
        message = f"person {self._count}"
        self._ledger.persons[message] = frozenset(self._staged)
        if not self._staged or self._git("commit", "--quiet", f"--message={message}") is None:
            return False
        self._staged.clear()
        self._ledger.committed.add(message)
        return True

    def commit_and_push(self) -> None:
        """Commit, and push before the remote moves on."""
        if self.commit():
            self._git("push", "--quiet", "origin", "main")

    def draft(self) -> None:
        """Be on another branch for a while, perhaps commit there, and come back."""
        self._count += 1
        if self._git("switch", "--quiet", "--create", f"draft{self._count}") is None:
            return
        time.sleep(self._dice.uniform(0, 0.5))
        if not self._staged and self._dice.random() < 0.5:
            path = f"drafts/{self._count}.txt"
            (self._site.worktree / "drafts").mkdir(exist_ok=True)
            (self._site.worktree / path).write_text("a draft\n")
            self._git("add", path)
            if self._git("commit", "--quiet", "--message=draft") is not None:
                touched = self._git("diff-tree", "-r", "--no-commit-id", "--name-only", "HEAD")
                if touched != path:
                    self.surprises.append(f"the commit of {path} on a draft has {touched!r}")
        self._back()

    def leave_a_merge(self) -> None:
        """Begin a merge, and end it some time later."""
        side = self._side()
        # Not `git merge`: when it cannot begin, it resets the work tree hard and takes its stash back. What
        # the CMS saves between the two is gone, whoever publishes it.
        if self._staged or side is None or self._git("read-tree", "-m", "-u", "HEAD", side) is None:
            return
        git = self._site.worktree / ".git"
        (git / "MERGE_MODE").write_text("no-ff")
        (git / "MERGE_HEAD").write_text(f"{side}\n")
        time.sleep(self._dice.uniform(0, 0.6))
        self._end_merge(keep=self._dice.random() < 0.5)

    def pull(self) -> None:
        """Put local commits onto the remote's tip with the worker's command; now and then it is killed."""
        with self._no_worker:
            push = ["--push"] if self._dice.random() < 0.7 else []
            if self._dice.random() < 0.3:
                command = ["timeout", "--signal=KILL", f"{self._dice.uniform(0.2, 1.2)}"]
                command += [sys.executable, "-m", "briter_worker", "pull", "--rebase", *push]
                environment = self._site.environment()
                subprocess.run(command, env=environment, capture_output=True, check=False)
            else:
                self._site.command("pull", "--rebase", *push)

    def finish(self) -> None:
        """End what is begun, be on main, and push every commit. The caller has stopped everybody else."""
        self._end_merge(keep=False)
        self._back()
        done = self._site.command("pull", "--rebase", "--push")
        if done.returncode:
            self.surprises.append(f"pull --rebase --push exits with {done.returncode}: {done.stderr}")

    def disturbed(self) -> list[str]:
        """Return what of the operator's files is not as it was left."""
        wrong = list(self.surprises)
        for path, text in self._texts.items():
            if (self._site.worktree / path).read_text() != text:
                wrong.append(f"the operator's {path} was changed")
        staged = set((self._git("diff", "--cached", "--name-only") or "").splitlines())
        if staged != self._staged.keys():
            wrong.append(f"the operator has staged {sorted(self._staged)}, now it is {sorted(staged)}")
        wrong += [
            f"what the operator staged of {path} was changed"
            for path, text in self._staged.items()
            if self._git("show", f":{path}") != text.strip()
        ]
        return wrong

    def _write(self, path: str) -> str:
        self._count += 1
        text = f"{path} {self._count}\n"
        (self._site.worktree / path).write_text(text)
        self._texts[path] = text
        return text

    def _back(self) -> None:
        for _ in range(_TRIES):
            if self._git("switch", "--quiet", "main") is not None:
                return
            if self._git("symbolic-ref", "HEAD") == "refs/heads/main":
                return
            time.sleep(0.05)
        status = self._git("status", "--short", "--branch")
        self.surprises.append(f"no way back to main: {status}")

    def _side(self) -> str | None:
        """Return a commit beside the branch, made without the work tree."""
        self._count += 1
        path, message = f"side/{self._count}.txt", f"side {self._count}"
        head = self._git("rev-parse", "HEAD")
        with tempfile.TemporaryDirectory() as folder:
            index = Path(folder, "index")
            blob = self._git("hash-object", "-w", "--stdin", stdin=message)
            self._git("read-tree", f"{head}", index=index)
            self._git("update-index", "--add", "--cacheinfo", f"100644,{blob},{path}", index=index)
            tree = self._git("write-tree", index=index)
        self._ledger.persons[message] = frozenset({path})
        return self._git("commit-tree", f"{tree}", "-p", f"{head}", "-m", message)

    def _end_merge(self, *, keep: bool) -> None:
        marker = self._site.worktree / ".git" / "MERGE_HEAD"
        for _ in range(_TRIES):
            if not marker.exists():
                return
            if keep and self._git("commit", "--quiet", "--message=merge") is not None:
                return
            if self._git("merge", "--abort") is not None:
                return
            time.sleep(0.05)
        self.surprises.append("a merge that does not end")


class Colleague:
    """Has a clone elsewhere, and pushes to the same branch."""

    def __init__(
        self, remote: Path, clone: Path, ledger: Ledger, dice: random.Random, *, contest: bool = False
    ) -> None:
        self._remote = remote
        self._git = Git(clone)
        self._ledger = ledger
        self._dice = dice
        self._slugs = [*TITLED, *([CONTESTED] if contest else [])]
        self._count = 0

    def act(self) -> None:
        """Push once, then pause."""
        self.push()
        time.sleep(self._dice.uniform(0.05, 1.0))

    def push(self) -> None:
        """Change one file and push it, unless somebody else is quicker."""
        folder = self._git.folder
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            Git(folder.parent)("clone", "--quiet", str(self._remote), str(folder))
        if not folder.exists() or self._git("fetch", "--quiet") is None:
            return
        self._git("reset", "--quiet", "--hard", "origin/main")
        self._count += 1
        there = [slug for slug in self._slugs if (folder / post_path(slug)).exists()]
        slug = self._dice.choice([*there, *there, ""])
        path = post_path(slug) if slug else f"content/colleague/{self._count}.md"
        file = folder / path
        line = f"title: {self._count}"
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = file.read_text().splitlines() if slug else [line]
        lines[-1 if slug == CONTESTED else 0] = line
        file.write_text("\n".join(lines) + "\n")
        message = f"colleague {self._count}"
        self._git("add", path)
        if self._git("commit", "--quiet", f"--message={message}") is None:
            return
        self._ledger.persons[message] = frozenset({path})
        pushed = self._git("push", "--quiet", "origin", "HEAD:main") is not None
        if pushed:
            self._ledger.committed.add(message)
        if slug in TITLED:
            if pushed:
                self._ledger.titles[path] = line
            else:  # it may be there, or not
                self._ledger.titles.pop(path, None)
