"""Who else is at a site: the CMS, a person in the repository, somebody else and trouble at the remote."""

from __future__ import annotations

import json
import os
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from soak.place import Place

POSTS = tuple(f"content/posts/p{number}.md" for number in range(4))
MEDIA = tuple(f"content/media/p{number}.txt" for number in range(4))
LINK = "content/posts/link.md"
_BODY = "".join(f"line {number}\n" for number in range(6))
"""No two lines alike: where they are, git may find an edit of one in its neighbour, and a conflict there."""
_HOOK = """#!/bin/sh
while read -r old new ref; do
  git log --format=%s "$old..$new" | grep -q -E "$(cat refused)" && { echo "policy: not this one"; exit 1; }
done
exit 0
"""


def template_files() -> dict[str, str]:
    """What each site begins with; two posts are new when they are saved first."""
    files = {path: text("start", "start") for path in (*POSTS[:2], *MEDIA[:2])}
    return files | {"config.toml": "x = 1\n", "human/notes.txt": "notes\n", "human/staged.txt": "staged\n"}


def text(first: str, last: str) -> str:
    """A post: the CMS writes its first line, somebody else its last one."""
    return f"{first}\n{_BODY}{last}\n"


def first_line(content: bytes | None) -> str | None:
    """The CMS's line; None where there is no file."""
    return None if content is None else content.decode().split("\n", 1)[0]


def last_line(content: bytes) -> str:
    """Somebody else's line."""
    return content.decode().rstrip("\n").rsplit("\n", 1)[-1]


class Cms:
    """Writes posts and jobs, as careful as it should be or not."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def write(self, path: str, version: str) -> None:
        """Edit the file that is there: only the first line changes."""
        file = self._place.site / path
        file.parent.mkdir(parents=True, exist_ok=True)
        last = last_line(file.read_bytes()) if file.exists() else "-"
        temp = file.with_name(f".{file.name}.tmp")
        temp.write_text(text(version, last), encoding="utf-8")
        temp.rename(file)

    def delete(self, path: str) -> None:
        """The post is gone."""
        (self._place.site / path).unlink(missing_ok=True)

    def existing(self) -> list[str]:
        """The posts that there are."""
        return [path for path in POSTS if (self._place.site / path).exists()]

    def save(self, job_id: str, slug: str, paths: Sequence[str], **keys: object) -> None:
        """Write a job, safely."""
        document = {"id": job_id, "slug": slug, "paths": list(paths), "message": f"save {job_id}", **keys}
        temp = self._place.queue / f".{job_id}.tmp"
        temp.write_text(json.dumps({k: v for k, v in document.items() if v is not None}), encoding="utf-8")
        temp.rename(self._place.queue / f"{job_id}.json")

    def tear(self, name: str, content: bytes, now: float) -> None:
        """A careless writer is stopped in the middle of a job."""
        file = self._place.queue / f"{name}.json"
        file.write_bytes(content)
        os.utime(file, (now, now))


def iso(moment: float) -> str:
    """As JavaScript writes it."""
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Operator:
    """Works in the site's own repository, on files that are no posts."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._git = place.git
        self.commits: list[str] = []
        """The messages of commits on the branch."""
        self._number = 0

    def edits(self) -> None:
        """An unstaged change."""
        self._number += 1
        (self._place.site / "human/notes.txt").write_text(f"note {self._number}\n", encoding="utf-8")

    def stages(self) -> None:
        """A staged change."""
        self._number += 1
        (self._place.site / "human/staged.txt").write_text(f"staged {self._number}\n", encoding="utf-8")
        self._git("add", "human/staged.txt")

    def unstages(self) -> None:
        """Back out of the index; the file keeps its change."""
        self._git("reset", "--quiet", "--", "human/staged.txt")

    def commits_something(self) -> None:
        """A commit of what is staged, and of one more file."""
        self._number += 1
        (self._place.site / f"human/{self._number}.txt").write_text("by hand\n", encoding="utf-8")
        self._git("add", f"human/{self._number}.txt")
        self._git("commit", "--quiet", f"--message=by hand {self._number}")
        self.commits.append(f"by hand {self._number}")

    def leaves(self) -> None:
        """Switches to a new branch, from where the old one is."""
        self._number += 1
        self._git("switch", "--quiet", "--create", f"side-{self._number}")

    def comes_back(self) -> None:
        """Back on the branch: nothing that the worker did meanwhile is in the way."""
        self._git("switch", "--quiet", "main")

    def is_away(self) -> bool:
        """Whether another branch is checked out."""
        return (self._place.site / ".git/HEAD").read_text() != "ref: refs/heads/main\n"

    def begins_a_merge(self) -> None:
        """A merge that waits to be committed."""
        self._number += 1
        path, branch = f"human/merged-{self._number}.txt", f"feature-{self._number}"
        made = f"commit refs/heads/{branch}\n"
        made += f"committer A Person <person@example.org> {int(time.time())} +0000\ndata 1\nx\n"
        made += f"from refs/heads/main^0\nM 100644 inline {path}\ndata 1\nx\n\n"
        self._git("fast-import", "--quiet", stdin=made.encode())
        try:
            self._git("merge", "--quiet", "--no-ff", "--no-commit", branch)
        except AssertionError as refusal:
            # As where a worker died before it had brought the index up to date: nobody merges then.
            if "overwritten by merge" not in str(refusal):
                raise

    def is_locked_out(self) -> bool:
        """Whether a dead worker has the index: git lets nobody change it until the next worker has been."""
        return (self._place.site / ".git/index.lock").exists()

    def is_merging(self) -> bool:
        """Whether a merge is under way."""
        return (self._place.site / ".git/MERGE_HEAD").exists()

    def aborts_the_merge(self) -> None:
        """Never mind."""
        self._git("merge", "--abort")

    def state(self) -> tuple[object, ...]:
        """What the worker must leave alone."""
        git = self._place.site / ".git"
        files = sorted((self._place.site / "human").iterdir())
        return (
            (git / "HEAD").read_text(),
            (git / "MERGE_HEAD").read_text() if self.is_merging() else "",
            self._git("ls-files", "--stage", "human", "config.toml"),
            tuple((file.name, file.read_bytes()) for file in files),
        )


class Elsewhere:
    """The remote: who else pushes there, and what is wrong with it."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._away = place.root / "remote.away"
        self.commits: set[str] = set()
        self._number = 0

    @property
    def repository(self) -> Path:
        """Where the remote is right now."""
        return self._away if self._away.exists() else self._place.remote

    def changes(self, path: str, content: str | None) -> None:
        """Somebody else pushes a commit that changes or deletes the file."""
        self._number += 1
        made = f"commit refs/heads/main\ncommitter Somebody <s@example.org> {int(time.time())} +0000\n"
        made += "data 14\nby another one\nfrom refs/heads/main^0\n"
        if content is None:
            made += f"D {path}\n"
        else:
            made += f"M 100644 inline {path}\ndata {len(content.encode())}\n{content}\n"
        self._place.git("fast-import", "--quiet", cwd=self.repository, stdin=made.encode())
        self.commits.add(self.tip())

    def tip(self) -> str:
        """The commit of the remote's branch."""
        return self._place.git("rev-parse", "refs/heads/main", cwd=self.repository)

    def file(self, path: str) -> bytes | None:
        """The remote's version."""
        found = self.files()
        if path not in found:
            return None
        return self._place.ask("cat-file", "blob", found[path], cwd=self.repository)

    def files(self) -> dict[str, str]:
        """Each file on the remote's branch, with its blob."""
        out = self._place.git("ls-tree", "-r", "-z", "refs/heads/main", cwd=self.repository)
        pairs = [line.partition("\t") for line in out.split("\0") if line]
        return {path: about.split()[2] for about, _, path in pairs}

    def vanishes(self) -> None:
        """Cannot be reached."""
        self._place.remote.rename(self._away)

    def is_gone(self) -> bool:
        """Whether it cannot be reached."""
        return self._away.exists()

    def refuses(self, pattern: str) -> None:
        """A hook refuses pushes with a commit whose message is like this."""
        (self.repository / "refused").write_text(f"{pattern}\n")
        hook = self.repository / "hooks" / "pre-receive"
        hook.parent.mkdir(exist_ok=True)
        hook.write_text(_HOOK)
        hook.chmod(0o755)

    def is_well_again(self) -> None:
        """There, and taking everything."""
        if self._away.exists():
            self._away.rename(self._place.remote)
        (self._place.remote / "hooks" / "pre-receive").unlink(missing_ok=True)
