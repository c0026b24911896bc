"""The site that the sweep publishes from, as cheap copies of one template, and what must come of it."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from sites import Site

from briter_worker.git.plans import FilePlans
from briter_worker.git.repository import Repository
from briter_worker.git.run import Git
from soak.repository import fsck, read_files, read_history
from soak.users import commit_files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_NOWHERE = "git://nowhere/"
_BASES = "refs/briter/branches/main/mirror"
_DAYS = 3 * 24 * 3600.0
"""Longer than any file is kept because of its age."""
_POSTS = "content/posts"
_PERSONS = {"notes.txt": "a person's\n", "readme.md": "a person's\n"}
BEFORE = _PERSONS | {
    f"{_POSTS}/welcome.md": "# Welcome\n",
    f"{_POSTS}/change.md": "before\n",
    f"{_POSTS}/gone.md": "to be deleted\n",
    f"{_POSTS}/gallery/one.md": "one\n",
    f"{_POSTS}/gallery/two.md": "two\n",
}
COMMITS = {
    "Publish add": {f"{_POSTS}/add.md"},
    "Publish change": {f"{_POSTS}/change.md"},
    "Publish gone": {f"{_POSTS}/gone.md"},
    "Publish gallery": {f"{_POSTS}/gallery/one.md", f"{_POSTS}/gallery/two.md", f"{_POSTS}/gallery/three.md"},
}
AFTER = _PERSONS | {
    f"{_POSTS}/welcome.md": "# Welcome\n",
    f"{_POSTS}/add.md": "added\n",
    f"{_POSTS}/change.md": "after\n",
    f"{_POSTS}/gallery/one.md": "one, again\n",
    f"{_POSTS}/gallery/three.md": "three\n",
}
_HUMAN = ["M  notes.txt", " M readme.md", "?? scratch.txt"]
ELSEWHERE = {f"{_POSTS}/welcome.md": "# Welcome, from elsewhere\n", f"{_POSTS}/theirs.md": "theirs\n"}
FAST = {"BRITER_WORKER_BACKOFF_MS": "0"}


def make_template(root: Path, *, moved: bool) -> Site:
    """A site with four jobs that are due, one on hold, a dead letter, and a person in the middle of work.

    `moved`: somebody else has pushed since the site last looked.
    """
    root.mkdir(parents=True)
    site = Site.make(root)
    for path, text in BEFORE.items():
        site.write_post(path, text)
    site.commit_all("Fill the site")
    if moved:
        tip = site.git("rev-parse", "main")
        assert commit_files(site.remote, tip, ELSEWHERE, "From elsewhere")
    for path, text in (
        AFTER | {"notes.txt": "staged by a person\n", "scratch.txt": "of no concern\n"}
    ).items():
        site.write_post(path, text)
    site.git("add", "notes.txt")
    site.write_post("readme.md", "changed by a person\n")
    for path in BEFORE.keys() - AFTER.keys():
        (site.worktree / path).unlink()
    dead = {"status": "failed", "attempts": 8, "lastError": "the disk was full", "failure": "disk"}
    site.save("change", [f"{_POSTS}/change.md"], createdAt="2026-01-01T00:00:00Z", **dead)
    site.save("later", [f"{_POSTS}/later.md"], scheduledFor="2999-01-01T00:00:00Z")
    site.save("add", [f"{_POSTS}/add.md"])
    site.save("change", [f"{_POSTS}/change.md"])
    site.save("gone", [f"{_POSTS}/gone.md"])
    site.save("gallery", [f"{_POSTS}/gallery"])
    # The history is written in a thread of its own, whose calls strace counts apart and by chance: a fault
    # would come over its call in place of the one that is meant. One that cannot be written stops nothing.
    (site.storage / "history.db").mkdir()
    site.git("remote", "set-url", "origin", _NOWHERE)
    return site


def copy_of(template: Site, root: Path, address: str) -> Site:
    """A site of its own, like the template to the time stamp, whose remote is served at an address."""
    site = replace(template.copy(root), env={**FAST, "PYTHONDONTWRITEBYTECODE": "1"})
    config = site.worktree / ".git" / "config"
    config.write_text(config.read_text().replace(_NOWHERE, f"{address}/{root.name}/remote.git"))
    return site


def is_settled(site: Site) -> bool:
    """Return True if only scheduled jobs are left to do."""
    return [job["slug"] for job in site.jobs()] == ["later"] and not list(
        (site.queue / ".claimed").glob("[!.]*.json")
    )


def problems(site: Site, *, moved: bool) -> Iterator[str]:
    """Everything that is not as it must be once the worker has run again."""
    for check in (_remote, _local, _queue):
        try:
            yield from check(site, moved)
        except (AssertionError, ValueError, OSError) as error:
            yield f"{check.__name__.strip('_')}: {error}"


def _remote(site: Site, moved: bool) -> Iterator[str]:  # noqa: FBT001
    expected = Counter(["Start the site", "Fill the site", *COMMITS, *(["From elsewhere"] if moved else [])])
    commits = [(commit.message.strip(), commit.touched) for commit in read_history(site.remote, "main")]
    if (found := Counter(subject for subject, _ in commits)) != expected:
        yield f"on the remote: {dict(found - expected)} too many, {dict(expected - found)} missing"
    for subject, touched in commits:
        if subject in COMMITS and touched.keys() != COMMITS[subject]:
            yield f"{subject!r} touches {sorted(touched)}"
    there = {path: content.decode() for path, content in read_files(site.remote).items()}
    if there != (wanted := {**AFTER, **(ELSEWHERE if moved else {})}):
        yield f"the remote has {there}, not {wanted}"
    if (refs := site.git("for-each-ref", "--format=%(refname)", cwd=site.remote)) != "refs/heads/main":
        yield f"the remote has {refs}"
    yield from fsck(site.remote)


def _local(site: Site, moved: bool) -> Iterator[str]:  # noqa: FBT001
    tip = site.git("rev-parse", "refs/heads/main", cwd=site.remote)
    for ref in ("refs/heads/main", "refs/remotes/origin/main"):
        if (here := site.git("rev-parse", ref)) != tip:
            yield f"{ref} is {here}, not {tip}"
    texts = {"readme.md": "changed by a person\n", "scratch.txt": "of no concern\n"}
    allowed = list(_HUMAN)
    for path, text in ELSEWHERE.items() if moved else ():
        file = site.worktree / path
        found = file.read_text() if file.exists() else None
        if found == BEFORE.get(path) and site.git("for-each-ref", _BASES):
            # The disk would not have it; what the file started from is known, so that nothing reverts it.
            allowed.append(f" {'M' if path in BEFORE else 'D'} {path}")
        else:
            texts[path] = text
    status = site.git("-c", "core.quotePath=false", "status", "--porcelain", "--untracked-files=all")
    # `Site.git` strips its output, and with it what the first line may begin with.
    if {line.strip() for line in status.splitlines()} != {line.strip() for line in allowed}:
        yield f"git status says {status!r}"
    if site.git("show", ":notes.txt") != "staged by a person":
        yield "what a person had staged is not staged any more"
    for path, text in texts.items():
        file = site.worktree / path
        if not file.exists() or file.read_text() != text:
            yield f"{path} in the work tree is not {text!r}"
    yield from fsck(site.worktree)


def _queue(site: Site, moved: bool) -> Iterator[str]:  # noqa: ARG001, FBT001
    if not is_settled(site):
        jobs = [(job["slug"], job.get("status"), job.get("lastError")) for job in site.jobs()]
        yield f"in the queue: {jobs}"
    left = [path.name for path in (site.queue / ".claimed").iterdir() if path.name != ".lock"]
    left += [path.name for path in site.queue.iterdir() if path.name.startswith(".") and path.is_file()]
    if left:
        yield f"left over in the queue: {left}"
    if (site.storage / "quarantine").exists() and list((site.storage / "quarantine").iterdir()):
        yield "something was put aside"


def leftovers(site: Site) -> list[str]:
    """Return what is in the git folder that no clean publication leaves there."""
    git_dir = site.worktree / ".git"
    names = [str(path.relative_to(git_dir)) for path in git_dir.rglob("*") if path.is_file()]
    marks = (".lock", "tmp_", "fast_import_crash_", "briter/", "refs/briter/")
    kept = tuple(f"refs/briter/branches/main/{name}" for name in ("fetched", "pushed", "mirror"))
    lasting = ("logs/", "briter/lock", "briter/scheduled", "briter/format.json", "briter/first-saves")
    return sorted(
        name
        for name in names
        if any(mark in name for mark in marks) and not name.startswith((*kept, *lasting))
    )


def tidy_later(site: Site) -> None:
    """Tidy as an idle worker does, days from now: some files might be a living process's."""
    repository = Repository(Git(site.worktree, remote="origin", timeout=60.0), branch="main", remote="origin")
    with repository.working():
        repository.tidy(time.time() + _DAYS)
        FilePlans(repository.git.state_dir, "main", "unlanded").drop_before(time.time() + _DAYS)
