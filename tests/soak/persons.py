"""Who works beside the worker with git: a person in the site's repository, a colleague with a clone."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from sites import PERSON

from soak.cms import CONTESTED, TITLED, post_path

if TYPE_CHECKING:
    import random
    from collections.abc import Collection

    from sites import Site

    from soak.cms import Gate
    from soak.ledger import Ledger

_PATIENCE = 600
"""Twentieths of a second: a killed worker's lock of the index goes when the next one starts."""


class Git:
    """Git in one clone, as a person runs it; what fails is told, not raised."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *args: str, stdin: str = "", index: Path | None = None) -> str | None:
        """Its output, stripped, or None."""
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

    def says(self, *args: str) -> list[str]:
        """NUL-separated output; empty where it fails."""
        return [each for each in (self(*args) or "").split("\0") if each]


class Person:
    """Works in the site's own repository: commits, pushes, switches, merges, and leaves things staged."""

    def __init__(self, site: Site, ledger: Ledger, dice: random.Random, gate: Gate) -> None:
        self._site = site
        self._ledger = ledger
        self._dice = dice
        self._gate = gate
        self._git = Git(site.worktree)
        self._count = 0
        self._staged: dict[str, str] = {}
        self._texts: dict[str, str] = {}
        self._joined: dict[str, tuple[str | None, bytes]] = {}
        """What they have merged into an author's file by hand, and what that was known to have begun as."""
        self.surprises: list[str] = []
        """What they found that was not of their doing."""

    def act(self) -> None:
        """One thing, with a pause before the next."""
        # Commits that are not pushed stop the worker as soon as the remote moves: few of them.
        often = [self.commit_and_push, self.stage, self.edit]
        seldom = [self.commit, self.leave_a_merge, self.draft]
        self._dice.choice([*often, *often, *seldom])()
        if self._dice.random() < 0.7:
            self.reconcile()
        time.sleep(self._dice.uniform(0.05, 1.0))

    def edit(self) -> None:
        """Change a tracked file, and leave it."""
        self._write("notes/unstaged.txt")

    def stage(self) -> None:
        """Stage a file, and leave it so."""
        path = f"notes/{self._dice.choice('abc')}.txt"
        text = self._write(path)
        if self._git("add", path) is not None:
            self._staged[path] = text

    def commit(self) -> bool:
        """Commit all that is staged."""
        self.stage()
        message = f"person {self._count}"
        self._ledger.persons[message] = frozenset(self._staged)
        if not self._staged or self._git("commit", "--quiet", f"--message={message}") is None:
            return False
        self._staged.clear()
        self._ledger.committed.add(message)
        return True

    def commit_and_push(self) -> None:
        """Commit, and push it before the worker does."""
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
        """Begin a merge, think about it, and end it one way or the other."""
        side = self._side()
        # Not `git merge`: when it cannot begin, it resets the work tree hard and takes its stash back, and
        # what the CMS saves between the two is gone, whoever publishes it.
        if self._staged or side is None or self._git("read-tree", "-m", "-u", "HEAD", side) is None:
            return
        git = self._site.worktree / ".git"
        (git / "MERGE_MODE").write_text("no-ff")
        (git / "MERGE_HEAD").write_text(f"{side}\n")
        time.sleep(self._dice.uniform(0, 0.6))
        self._end_merge(keep=self._dice.random() < 0.5)

    def reconcile(self) -> None:
        """If the remote moved on, and a commit of theirs is in the way: join both, the service stopped."""
        if self._git("fetch", "--quiet", "origin") is None or not self._diverged():
            return
        with self._gate:
            # A killed worker's lock goes when the next one starts.
            if self._diverged() and not (self._site.worktree / ".git" / "index.lock").exists():
                self._join()

    def finish(self) -> None:
        """End what is begun, be on main, and have pushed. The caller has stopped everybody else."""
        self._end_merge(keep=False)
        self._back()
        self._git("fetch", "--quiet", "origin")
        if self._diverged():
            self._join()

    def push(self) -> bool:
        """Whether the remote took what they have."""
        return self._git("push", "--quiet", "origin", "main") is not None

    def decided(self, slugs: Collection[str]) -> set[str]:
        """The authors' files of these posts that they have merged by hand."""
        wanted = {path for save in self._ledger.saves if save.slug in slugs for path in save.files}
        return wanted & self._joined.keys()

    def disturbed(self) -> list[str]:
        """What of theirs is not as they left it."""
        wrong = list(self.surprises)
        for path, text in self._texts.items():
            if (self._site.worktree / path).read_text() != text:
                wrong.append(f"the person's {path} was changed")
        staged = set(self._git.says("diff", "--cached", "--name-only", "-z"))
        if staged != self._staged.keys():
            wrong.append(f"the person has staged {sorted(self._staged)}, now it is {sorted(staged)}")
        wrong += [
            f"what the person staged of {path} was changed"
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
        for _ in range(_PATIENCE):
            if self._git("switch", "--quiet", "main") is not None:
                return
            if self._git("symbolic-ref", "HEAD") == "refs/heads/main":
                return
            time.sleep(0.05)
        status = self._git("status", "--short", "--branch")
        said = subprocess.run(
            ["git", "switch", "main"], cwd=self._site.worktree, capture_output=True, text=True, check=False
        )
        if said.returncode:
            self.surprises.append(f"no way back to main: {said.stderr} {status}")

    def _side(self) -> str | None:
        """A commit beside the branch, made without the work tree."""
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
        for _ in range(_PATIENCE):
            if not marker.exists():
                return
            if keep and self._git("commit", "--quiet", "--message=merge") is not None:
                return
            if self._git("merge", "--abort") is not None:
                return
            time.sleep(0.05)
        self.surprises.append("a merge that does not end")

    def _diverged(self) -> bool:
        if self._git("symbolic-ref", "HEAD") != "refs/heads/main":
            return False
        if self._git("merge-base", "--is-ancestor", "origin/main", "main") is not None:
            return False
        # Without a commit of a person's, it is the worker's to bring together.
        return bool(self._git("log", "--committer=A Person", "--format=%H", "origin/main..main"))

    def _join(self) -> None:
        """As a careful person does: put the authors' unpublished files aside, join, merge them back."""
        aside: dict[str, bytes | None] = {}
        bases: dict[str, bytes] = {}
        begins: dict[str, str | None] = {}
        for line in self._git.says("status", "--porcelain", "-z", "-uall", "content"):
            path = line.lstrip("MADRCU? ")
            file = self._site.worktree / path
            aside[path] = file.read_bytes() if file.exists() else None
            begins[path] = self._begun(path)
            base = self._git("show", f"HEAD:{path}")
            bases[path] = self._base(path, begins[path], base)
            if base is None:
                self._git("rm", "--quiet", "--cached", "--ignore-unmatch", path)
                file.unlink(missing_ok=True)
            else:
                self._git("checkout", "--quiet", "HEAD", "--", path)
        # What a dry run has committed may conflict with a colleague's edit: what was saved here is taken.
        way = ["rebase", "--quiet", "--strategy-option=theirs"]
        # And a merge would keep it beside the commit that the worker has put in its place.
        dry = self._git("log", "--committer=Briter Worker", "--format=%H", "origin/main..main")
        if not dry and self._dice.random() < 0.5:
            way = ["merge", "--quiet", "--no-edit", "--strategy-option=ours"]
        if self._git(*way, "--autostash", "origin/main") is None:
            self.surprises.append(f"git {way[0]} did not work: {self._git('status', '--short')}")
            self._git(way[0], "--abort")
        for path in self._staged:
            # What they have written since, while the index was locked, is staged with it.
            if self._git("add", path) is not None:
                self._staged[path] = self._texts[path]
        for path, mine in aside.items():
            self._note(path, begins[path])
            self._put_back(path, mine, bases[path])
        # Of a publication that had not come here yet, git brings back what was deleted since: it cannot know.
        for path, (_, data) in self._ledger.last_writes().items():
            if data is None:
                (self._site.worktree / path).unlink(missing_ok=True)

    def _begun(self, path: str) -> str | None:
        """What an unpublished file began as, where the remote's edit was not merged into it yet."""
        return self._git("cat-file", "blob", f"refs/briter/branches/main/bases:{quote(path, safe='')}?start")

    def _base(self, path: str, begun: str | None, base: str | None) -> bytes:
        # No worker may have run since they did this last: then only they know what is in it already.
        if begun is not None and path in self._joined and self._joined[path][0] == begun:
            return self._joined[path][1]
        # Of a post whose publication has not come here yet, they look up how it began.
        born = self._git("log", "--diff-filter=A", "--format=%H", "-1", "origin/main", "--", path)
        first = begun or base or self._git("show", f"{born}:{path}")
        return f"{first}\n".encode() if first else b""

    def _note(self, path: str, begun: str | None) -> None:
        file = self._site.worktree / path
        if file.exists():
            self._joined[path] = begun, file.read_bytes()

    def _put_back(self, path: str, mine: bytes | None, base: bytes) -> None:
        file = self._site.worktree / path
        if mine is None:
            file.unlink(missing_ok=True)
            return
        theirs = file.read_bytes() if file.exists() else None
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(mine)
        if theirs is None or theirs == base or not base:
            return
        with tempfile.TemporaryDirectory() as folder:
            for name, data in (("base", base), ("theirs", theirs)):
                Path(folder, name).write_bytes(data)
            self._git("merge-file", "--quiet", "--ours", path, f"{folder}/base", f"{folder}/theirs")


class Colleague:
    """Has a clone elsewhere, and pushes to the same branch."""

    def __init__(self, site: Site, ledger: Ledger, dice: random.Random) -> None:
        self._ledger = ledger
        self._dice = dice
        site.git("clone", "--quiet", str(site.remote), str(site.root / "colleague"), cwd=site.root)
        self._git = Git(site.root / "colleague")
        self._count = 0

    def act(self) -> None:
        """One push, if nobody else is quicker."""
        if self._git("fetch", "--quiet") is not None:
            self._git("reset", "--quiet", "--hard", "origin/main")
            self._push()
        time.sleep(self._dice.uniform(0.05, 1.0))

    def _push(self) -> None:
        self._count += 1
        slug = self._dice.choice([*TITLED, CONTESTED, ""])
        path = post_path(slug) if slug else f"content/colleague/{self._count}.md"
        file = self._git.folder / path
        line = f"title: {self._count}"
        if slug and not file.exists():
            return
        if slug:
            lines = file.read_text().splitlines()
            lines[-1 if slug == CONTESTED else 0] = line
        else:
            lines = [line]
            file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(lines) + "\n")
        message = f"colleague {self._count}"
        self._git("add", path)
        if self._git("commit", "--quiet", f"--message={message}") is None:
            return
        self._ledger.persons[message] = frozenset({path})
        pushed = self._git("push", "--quiet", "origin", "main") is not None
        if pushed:
            self._ledger.committed.add(message)
        if slug in TITLED:
            if pushed:
                self._ledger.titles[path] = line
            else:  # it may be there, or not
                self._ledger.titles.pop(path, None)
