"""People who use git beside the worker: an operator in the site's repository, a colleague at the remote."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from edits import PATTERNS

from soak.ledger import Save
from soak.repository import build_commit, read_blobs, read_tree, try_git, write_blob

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from sites import Site

    from soak.ledger import Ledger


NOTES = {f"notes/{name}.txt": f"{name}\n" for name in ("a", "b", "c", "unstaged")}
"""The operator's files, which are on the branch from the beginning."""
FILLER = [f"line {number}" for number in range(8)]
"""No two lines alike: where they are, git may find an edit of one in its neighbour, and a conflict there."""


def post_path(slug: str) -> str:
    """Return the path of a post that is one file."""
    return f"content/posts/{slug}.md"


class Operator:
    """Works in the site's repository on files that are no posts. What git refuses changes nothing."""

    def __init__(self, site: Site, ledger: Ledger, dice: random.Random) -> None:
        self._site = site
        self._ledger = ledger
        self._dice = dice
        self._count = 0
        self._staged: dict[str, str] = {}
        self._texts: dict[str, str] = {}
        self.surprises: list[str] = []
        """Changes in the repository that the operator did not make."""

    def git(self, *args: str) -> str | None:
        """Run git in the site; return None if it fails."""
        return try_git(self._site.worktree, *args)

    def edit(self, path: str = "notes/unstaged.txt") -> None:
        self._count += 1
        self._texts[path] = f"{path} {self._count}\n"
        (self._site.worktree / path).write_text(self._texts[path])

    def stage(self) -> None:
        """Change a file and stage it."""
        path = f"notes/{self._dice.choice('abc')}.txt"
        self.edit(path)
        if self.git("add", path) is not None:
            self._staged[path] = self._texts[path]

    def unstage(self) -> None:
        """Take everything back out of the index; the files keep their changes."""
        if self.git("reset", "--quiet", "--", "notes") is not None:
            self._staged.clear()

    def commit(self) -> bool:
        """Commit what is staged. Return True if git did."""
        self.stage()
        message = f"person {self._count}"
        self._ledger.persons[message] = frozenset(self._staged)
        if not self._staged or self.git("commit", "--quiet", f"--message={message}") is None:
            return False
        self._staged.clear()
        self._ledger.committed.add(message)
        return True

    def push(self) -> None:
        """Push the branch, unless the remote has moved on."""
        self.git("push", "--quiet", "origin", "main")

    def leave(self) -> bool:
        """Switch to a new branch. Return True if git did."""
        self._count += 1
        return self.git("switch", "--quiet", "--create", f"draft{self._count}") is not None

    def commit_draft(self) -> None:
        if self._staged:
            return
        path = f"drafts/{self._count}.txt"
        (self._site.worktree / "drafts").mkdir(exist_ok=True)
        (self._site.worktree / path).write_text("a draft\n")
        self.git("add", path)
        if self.git("commit", "--quiet", "--message=draft") is not None:
            touched = self.git("diff-tree", "-r", "--no-commit-id", "--name-only", "HEAD")
            if touched != path:
                self.surprises.append(f"the commit of {path} on a draft has {touched!r}")

    def is_away(self) -> bool:
        """Return True if another branch is checked out."""
        return (self._site.worktree / ".git/HEAD").read_text() != "ref: refs/heads/main\n"

    def come_back(self) -> bool:
        """Switch to the branch. Return True if it is checked out."""
        return not self.is_away() or self.git("switch", "--quiet", "main") is not None

    def begin_merge(self) -> None:
        """Begin a merge with a new commit that is on no branch."""
        self._count += 1
        path, message = f"side/{self._count}.txt", f"side {self._count}"
        side = build_commit(
            self._site.worktree, "HEAD", {path: write_blob(self._site.worktree, message.encode())}, message
        )
        self._ledger.persons[message] = frozenset({path})
        # Not `git merge`: when it cannot begin, it resets the work tree hard and takes its stash back. What
        # the CMS saves between the two is gone, whoever publishes it.
        if not self._staged and self.git("read-tree", "-m", "-u", "HEAD", side) is not None:
            (self._site.worktree / ".git/MERGE_MODE").write_text("no-ff")
            (self._site.worktree / ".git/MERGE_HEAD").write_text(f"{side}\n")

    def is_merging(self) -> bool:
        return (self._site.worktree / ".git/MERGE_HEAD").exists()

    def end_merge(self, *, keep: bool = False) -> bool:
        """Commit or abort the merge. Return True if none is under way."""
        if keep and self.is_merging():
            self.git("commit", "--quiet", "--message=merge")
        if self.is_merging():
            self.git("merge", "--abort")
        return not self.is_merging()

    def state(self) -> tuple[object, ...]:
        """Return what the worker must leave alone."""
        git = self._site.worktree / ".git"
        return (
            (git / "HEAD").read_text(),
            (git / "MERGE_HEAD").read_text() if self.is_merging() else "",
            self.git("ls-files", "--stage", "notes", "config.toml"),
            [(file.name, file.read_bytes()) for file in sorted((self._site.worktree / "notes").iterdir())],
        )

    def disturbed(self) -> list[str]:
        """Return what of the operator's files is not as it was left."""
        wrong = list(self.surprises)
        for path, text in self._texts.items():
            if (self._site.worktree / path).read_text() != text:
                wrong.append(f"the operator's {path} was changed")
        staged = set((self.git("diff", "--cached", "--name-only") or "").splitlines())
        if staged != self._staged.keys():
            wrong.append(f"the operator has staged {sorted(self._staged)}, now it is {sorted(staged)}")
        wrong += [
            f"what the operator staged of {path} was changed"
            for path, text in self._staged.items()
            if self.git("show", f":{path}") != text.strip()
        ]
        return wrong


class Colleague:
    """Changes the first line of posts, and adds files, by commits of their own on the remote's branch.

    Of `contested`, the colleague changes the same line as the CMS.
    """

    def __init__(
        self, remote: Path, ledger: Ledger, dice: random.Random, slugs: Sequence[str], contested: str = ""
    ) -> None:
        self._remote = remote
        self._ledger = ledger
        self._dice = dice
        self._slugs = slugs
        self._contested = contested
        self._count = 0

    def push(self) -> None:
        """Push one change, unless the remote is away or has moved on meanwhile."""
        with suppress(AssertionError, FileNotFoundError):
            self._push()

    def _push(self) -> None:
        remote = self._remote
        self._count += 1
        tip = try_git(remote, "rev-parse", "main") or ""
        tree = read_tree(remote, tip)
        there = [slug for slug in (*self._slugs, self._contested) if post_path(slug) in tree]
        slug = self._dice.choice([*there, *there, ""])
        path = post_path(slug) if slug else f"content/colleague/{self._count}.md"
        line = f"title: {self._count}"
        (content,) = read_blobs(remote, [tree[path][1]]).values() if slug else (b"-",)
        lines = content.decode().splitlines()
        lines[-1 if slug and slug == self._contested else 0] = line
        message = f"colleague {self._count}"
        commit = commit_files(remote, tip, {path: "\n".join(lines) + "\n"}, message)
        self._ledger.persons[message] = frozenset({path})
        if commit:
            self._ledger.committed.add(message)
            if slug in self._slugs:
                self._ledger.titles[path] = line


def commit_files(remote: Path, tip: str, files: Mapping[str, str | None], message: str) -> str:
    """Commit files after `tip` and move the branch there. Return "" if the branch has moved."""
    changes = {
        path: None if text is None else write_blob(remote, text.encode()) for path, text in files.items()
    }
    commit = build_commit(remote, tip, changes, message)
    return commit if try_git(remote, "update-ref", "refs/heads/main", commit, tip) is not None else ""


class RemoteFaults:
    """Trouble at the remote: away, refusing every push or some, locked, slow."""

    def __init__(self, site: Site) -> None:
        self._remote = site.remote
        self._away = site.root / "away.git"
        self._lock: Path | None = None

    @property
    def repository(self) -> Path:
        """The remote's folder right now."""
        return self._away if self._away.exists() else self._remote

    def is_away(self) -> bool:
        """Return True if the remote cannot be reached."""
        return self._away.exists()

    def vanish(self) -> None:
        self._remote.rename(self._away)

    def hook(self, name: str, text: str) -> None:
        hook = self.repository / "hooks" / name
        partial = hook.with_suffix(".partial")
        hook.parent.mkdir(exist_ok=True)
        partial.write_text(f"#!/bin/sh\n{text}\n")
        partial.chmod(0o755)
        partial.rename(hook)  # a script that is open for writing cannot be run

    def refuse(self, pattern: str) -> None:
        """Refuse pushes with a commit whose message matches."""
        found = f"git log --format=%s $old..$new | grep -q -E '{pattern}'"
        self.hook(
            "pre-receive",
            f"while read -r old new ref; do {found} && {{ echo not now; exit 1; }}; done; exit 0",
        )

    def lock(self) -> None:
        """Hold the lock of the remote's branch, unless a push does."""
        lock = self._remote / "refs" / "heads" / "main.lock"
        with suppress(FileExistsError):
            lock.touch(exist_ok=False)
            self._lock = lock

    def recover(self) -> None:
        """Make the remote reachable and take every push."""
        if self.is_away():
            self._away.rename(self._remote)
        for name in ("pre-receive", "post-receive"):
            (self._remote / "hooks" / name).unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.unlink(missing_ok=True)
            self._lock = None


AUTHOR = "An Author <author@example.org>"
TITLED = [f"titled{number}" for number in range(4)]
"""Posts whose first line another clone changes, and whose last line the CMS does: these merge."""
CONTESTED = "contested"
"""A post of which both change the same line."""
FLEETING = [f"fleeting{number}" for number in range(4)]
"""Posts that are deleted and written again."""
BUNDLES = [f"bundle{number}" for number in range(2)]
"""Folders, declared as such."""


class Cms:
    """Writes posts and jobs, and looks at nothing else. With `is_watched` it writes no jobs."""

    def __init__(self, site: Site, ledger: Ledger, dice: random.Random, *, is_watched: bool = False) -> None:
        self._is_watched = is_watched
        self._site = site
        self._ledger = ledger
        self._dice = dice
        self._count = 0

    def act(self, _: random.Random) -> None:
        bundles = [] if self._is_watched else BUNDLES
        self.save(self._dice.choice([*TITLED, *TITLED, CONTESTED, *FLEETING, *bundles, "new", "new"]))
        time.sleep(self._dice.choice([0, 0.02, 0.1, 0.4]))

    def save(self, slug: str) -> None:
        """A save of this post; `new` is a post that has not been there."""
        self._count += 1
        marker = f"m{self._count}"
        slug = f"new-{marker}" if slug == "new" else slug
        held = time.time() + self._dice.uniform(0.5, 2) if self._dice.random() < 0.15 else 0.0
        if slug in BUNDLES:
            paths, files = self._bundle(slug, marker)
        else:
            path = post_path(slug)
            paths = (path,)
            deleted = slug in FLEETING and self._dice.random() < 0.3
            files = {path: None if deleted else self._text(slug, marker)}
        if self._is_watched:
            slug = f"posts/{slug}"
            is_removal = all(data is None for data in files.values())
            message = f"Remove {slug}" if is_removal else f"Publish {slug}"
            save = Save(marker, slug, paths, files, message)
            self._edit_files(save)
            self._ledger.saves.append(save)
            return
        author = AUTHOR if self._dice.random() < 0.3 else None
        save = Save(marker, slug, paths, files, f"{marker}: save {slug}", author, held)
        # A post on hold is not written before its job says so: a folder's job would carry it.
        order = [self._write_job, self._write_files] if held else [self._write_files, self._write_job]
        for step in order:
            step(save)

    def _text(self, slug: str, marker: str) -> bytes:
        file = self._site.worktree / post_path(slug)
        try:
            lines = file.read_text().splitlines()
        except FileNotFoundError:
            lines = ["title: -", *FILLER, "body: -"]
        lines[-1] = f"body: {slug} {marker}"
        return ("\n".join(lines) + "\n").encode()

    def _bundle(self, slug: str, marker: str) -> tuple[tuple[str, ...], dict[str, bytes | None]]:
        folder = f"content/bundles/{slug}"
        files: dict[str, bytes | None] = {
            f"{folder}/{self._dice.choice('abcde')}.md": f"{slug} {marker} {number}\n".encode()
            for number in range(self._dice.randint(1, 3))
        }
        gone = f"{folder}/{self._dice.choice('abcde')}.md"
        if gone not in files and (self._site.worktree / gone).exists():
            files[gone] = None
        return (folder,), files

    def _write_files(self, save: Save) -> None:
        for path, data in save.files.items():
            file = self._site.worktree / path
            if data is None:
                file.unlink(missing_ok=True)
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            if self._dice.random() < 0.5:
                partial = self._site.root / "cms.partial"
                partial.write_bytes(data)
                partial.rename(file)
            else:
                file.write_bytes(data)

    def _edit_files(self, save: Save) -> None:
        """Save as an editor, a transfer program or a CMS does, whose pauses take a fifth of their time."""
        for path, data in save.files.items():
            file = self._site.worktree / path
            if data is None:
                file.unlink(missing_ok=True)
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            pattern = PATTERNS[self._dice.choice([*PATTERNS])]
            for seconds in pattern(file, data.decode()):
                time.sleep(seconds / 5)

    def _write_job(self, save: Save) -> None:
        job: dict[str, object] = {"id": save.marker, "slug": save.slug, "paths": list(save.paths)}
        job |= {"message": save.message, "createdAt": datetime.now(UTC).isoformat()}
        if save.held_until:
            job["scheduledFor"] = datetime.fromtimestamp(save.held_until, UTC).isoformat()
        if save.author:
            name, _, mail = save.author.rstrip(">").partition(" <")
            job["author"] = {"name": name, "email": mail}
        # Some name the file after the post, and write over what is there; a folder's job has paths to lose.
        again = save.slug in TITLED and self._dice.random() < 0.5
        waiting = self._site.queue / f"{save.slug if again else save.marker}.json"
        text = json.dumps(job)
        if self._dice.random() < 0.7:
            partial = waiting.with_suffix(".partial")
            partial.write_text(text)
            partial.rename(waiting)
        else:
            with waiting.open("w") as file:
                file.write(text[: len(text) // 2])
                file.flush()
                time.sleep(self._dice.uniform(0, 0.02))
                file.write(text[len(text) // 2 :])
        self._ledger.saves.append(save)
