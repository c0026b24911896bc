"""The publisher by its port, with real git: what the worker around it seldom brings about."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import pytest
from caches import LINES, NOW, WORKER

from briter_worker.allowlist import Allowlist
from briter_worker.errors import Failure, PublishError
from briter_worker.git.adopt import Adoption
from briter_worker.git.command import Commands
from briter_worker.git.folders import read_all
from briter_worker.git.publisher import GitPublisher
from briter_worker.git.remote import Remote
from briter_worker.git.site import Site as Repository
from briter_worker.git.writeback import _like_a_checkout
from briter_worker.ports import Outcome, Plan, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from sites import Site

    from briter_worker.git.moving import Move
    from briter_worker.git.objects import Entry
    from briter_worker.ports import Change

POST = "content/posts/b.md"


def nobody() -> Collection[str]:
    return ()


def untold(_phase: str, _done: int, _total: int) -> None:
    """Nobody wants to know how far it is."""


def unexamined(_key: str, _changes: Sequence[Change]) -> Outcome | None:
    return None


@dataclass
class Here:
    """The site's publisher, in this process."""

    site: Site
    commands: Commands
    warned: list[str] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)

    def publisher(
        self,
        *,
        dry_run: bool = False,
        progress: Callable[[str, int, int], None] = untold,
        allowlist: Allowlist | None = None,
    ) -> GitPublisher:
        return GitPublisher(
            self.commands,
            branch="main",
            remote="origin",
            allowlist=allowlist or Allowlist(["content"]),
            identity=WORKER,
            max_file_bytes=1 << 20,
            dry_run=dry_run,
            progress=progress,
            warn=self.warned.append,
            still_ours=lambda: True,
        )

    def publish(
        self,
        *requests: Request,
        cancelled: Callable[[], Collection[str]] = nobody,
        examine: Callable[[str, Sequence[Change]], Outcome | None] = unexamined,
        held: Collection[str] = (),
        dry_run: bool = False,
        progress: Callable[[str, int, int], None] = untold,
        allowlist: Allowlist | None = None,
    ) -> dict[str, Outcome]:
        """What became of each, by its key."""
        publisher = self.publisher(dry_run=dry_run, progress=progress, allowlist=allowlist)
        found = publisher.publish(
            requests, held=held, examine=examine, cancelled=cancelled, record=self.plans.append, now=NOW
        )
        return {outcome.key: outcome for outcomes in found for outcome in outcomes}

    def post(self, slug: str, text: str = "", path: str = "") -> Request:
        """A CMS saves a post."""
        path = path or f"content/posts/{slug}.md"
        self.site.write_post(path, text or f"{slug}\n")
        return declared(slug, path)

    def subjects(self) -> list[str]:
        return [subject for _, subject in self.site.remote_log()]

    def theirs(self, path: str = "theirs.txt", text: str = "theirs\n") -> str:
        """Somebody else pushes a change of a file; the new commit."""
        other = self.elsewhere()
        (other / path).parent.mkdir(parents=True, exist_ok=True)
        (other / path).write_text(text)
        return self.push_theirs()

    def elsewhere(self) -> Path:
        other = self.site.root / "other"
        if not other.exists():
            self.site.git("clone", "-q", str(self.site.remote), str(other), cwd=self.site.root)
        self.site.git("pull", "-q", "--rebase", cwd=other)
        return other

    def push_theirs(self) -> str:
        other = self.site.root / "other"
        self.site.git("add", "-A", cwd=other)
        self.site.git("commit", "-qm", "Theirs", cwd=other)
        self.site.git("push", "-q", cwd=other)
        return self.site.git("rev-parse", "HEAD", cwd=other)


def declared(slug: str, *paths: str) -> Request:
    return Request(slug, slug, paths, f"Publish {slug}")


@pytest.fixture
def here(site: Site) -> Iterator[Here]:
    commands = Commands(site.worktree, remote="origin", timeout=30)
    found = Here(site, commands)
    yield found
    found.commands.watch.close()


def refuse(site: Site, text: str) -> None:
    hook = site.remote / "hooks" / "pre-receive"
    hook.write_text(f"#!/bin/sh\n{text}\n")
    hook.chmod(0o755)


def shadow(here: Here, monkeypatch: pytest.MonkeyPatch, command: str, does: str) -> None:
    """Git is as ever, but for one command of it, which does this."""
    bin_ = here.site.root / "bin"
    bin_.mkdir()
    git = bin_ / "git"
    git.write_text(f'#!/bin/sh\ncase " $* " in *" {command} "*) {does};; esac\nexec /usr/bin/git "$@"\n')
    git.chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_}:{os.environ['PATH']}")
    here.commands.watch.close()
    here.commands = Commands(here.site.worktree, remote="origin", timeout=30)  # it looks at PATH once


# What is asked at the last moment


def test_a_post_that_is_cancelled_right_before_the_push_is_built_out_of_it(here: Here) -> None:
    asked: list[int] = []

    def at_the_last_moment() -> Collection[str]:
        asked.append(1)
        return ["a"] if len(asked) > 1 else []

    found = here.publish(here.post("a"), here.post("b"), cancelled=at_the_last_moment)
    assert found["a"].cancelled
    assert found["b"].commit == here.site.remote_log()[0][0]
    assert here.subjects() == ["Publish b", "Start the site"]
    assert here.site.git("status", "--porcelain") == "?? content/posts/a.md"


def test_what_somebody_else_refuses_is_not_published_and_keeps_its_rejected_paths(here: Here) -> None:
    def examine(key: str, _changes: Sequence[Change]) -> Outcome | None:
        return Outcome(key, snooze_until=NOW + 5) if key == "a" else None

    here.post("a")
    found = here.publish(declared("a", "content/posts/a.md", "secret.md"), here.post("b"), examine=examine)
    assert found["a"].snooze_until == NOW + 5
    assert found["a"].rejected_paths == ("secret.md",)
    assert found["b"].commit
    assert here.subjects() == ["Publish b", "Start the site"]


# What a person has done meanwhile


def test_a_rejected_post_that_goes_along_with_a_persons_commits_is_not_blamed_for_them(here: Here) -> None:
    here.site.git("commit", "-q", "--allow-empty", "-m", "By hand")
    refuse(here.site, "echo 'policy: not by hand'; exit 1")
    with pytest.raises(PublishError, match="goes along with commits of a person's") as failed:
        here.publish(here.post("a"))
    assert failed.value.failure is Failure.REMOTE_REFUSED
    assert "Fix first: git push origin main" in failed.value.text
    assert here.subjects() == ["Start the site"]


def test_a_post_is_put_on_what_a_person_has_fetched(here: Here) -> None:
    here.theirs()
    here.site.git("fetch", "-q")
    assert here.publish(here.post("a"))["a"].commit == here.site.remote_log()[0][0]
    assert here.subjects() == ["Publish a", "Theirs", "Start the site"]
    assert (here.site.worktree / "theirs.txt").exists()


def test_an_unchanged_post_is_compared_with_what_the_remote_has_by_now(here: Here) -> None:
    here.theirs("content/posts/welcome.md", "# Theirs\n")
    found = here.publish(declared("welcome", "content/posts/welcome.md"))
    assert (found["welcome"].commit, found["welcome"].failure) == (None, None)
    assert here.site.remote_file("content/posts/welcome.md") == "# Theirs\n"
    assert (here.site.worktree / "content/posts/welcome.md").read_text() == "# Theirs\n"
    assert here.site.git("status", "--porcelain") == ""


def test_a_push_that_is_adopted_already_is_not_adopted_again(here: Here) -> None:
    here.publish(here.post("a"))
    here.site.git("update-ref", f"refs/briter/{'1' * 32}", "main")  # as a worker leaves it that dies there
    here.theirs("content/posts/a.md", "theirs\n")
    assert here.publish(here.post("b"))["b"].commit
    assert (here.site.worktree / "content/posts/a.md").read_text() == "theirs\n"
    assert here.site.git("status", "--porcelain") == ""


def test_a_push_below_a_persons_commit_leaves_nothing_of_its_own_behind(here: Here) -> None:
    site = here.site
    here.publish(here.post("a"))
    (plan,) = here.plans
    site.git("update-ref", plan.ref, plan.new)  # as a worker leaves it that dies there
    site.git("commit", "-q", "--allow-empty", "-m", "By hand")
    theirs = site.git("rev-parse", "main")
    assert here.publisher().landed(plan)
    assert site.git("for-each-ref", "refs/briter") == ""
    assert site.git("rev-parse", "main") == theirs
    assert (site.git("status", "--porcelain"), here.warned) == ("", [])


def test_a_push_that_was_taken_over_to_its_end_moves_nothing_when_it_is_found_again(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = here.site
    request = here.post("a")
    site.git("add", "-A")
    site.git("commit", "-qm", "By hand")
    assert here.publish(request)["a"].commit == site.git("rev-parse", "main")
    shadow(here, monkeypatch, "update-ref", "exit 1")
    assert here.publisher().landed(here.plans[-1])
    assert here.warned == []


# A person leaves for another branch in the moment in which theirs moves. Git writes HEAD last: until then,
# `git switch --create` has read where the branch was, and has asked for no lock.


def leaving_as_the_branch_moves(
    here: Here, monkeypatch: pytest.MonkeyPatch, then: Callable[[], object] = lambda: None
) -> None:
    plain = Repository.update

    def update(site: Repository, *moves: Move) -> None:
        plain(site, *moves)
        if site.branch_ref in {name for name, _, _ in moves}:
            here.site.git("symbolic-ref", "HEAD", "refs/heads/draft")
            monkeypatch.setattr(Repository, "update", plain)
            then()

    here.site.git("branch", "draft")
    monkeypatch.setattr(Repository, "update", update)


def leaving_as_the_index_is_written(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    here.site.git("branch", "draft")
    mark = here.site.root / "left"
    does = f"mkdir '{mark}' 2>/dev/null && /usr/bin/git symbolic-ref HEAD refs/heads/draft"
    shadow(here, monkeypatch, "update-index", does)


in_each_moment = pytest.mark.parametrize(
    "leaving", [leaving_as_the_branch_moves, leaving_as_the_index_is_written], ids=["branch", "index"]
)


@in_each_moment
def test_who_leaves_while_the_branch_moves_finds_it_where_it_was_and_comes_back(
    here: Here, monkeypatch: pytest.MonkeyPatch, leaving: Callable[[Here, pytest.MonkeyPatch], None]
) -> None:
    site = here.site
    start = site.git("rev-parse", "main")
    leaving(here, monkeypatch)
    published = here.publish(here.post("a"), here.post("welcome", "# Edited\n"))
    assert {outcome.failure for outcome in published.values()} == {None}
    assert site.git("symbolic-ref", "HEAD") == "refs/heads/draft"
    assert site.git("diff", "--cached", "--name-only") == "", "the posts are no part of the draft"
    assert site.git("rev-parse", "main", "draft") == f"{start}\n{start}"
    assert here.warned == [text for text in here.warned if "They follow by themselves" in text] != []

    site.git("switch", "-q", "main")
    here.publisher().tidy(NOW)
    assert site.git("rev-parse", "main") == site.remote_log()[0][0]
    assert site.git("status", "--porcelain") == ""
    assert site.git("for-each-ref", "refs/briter") == ""


@pytest.mark.parametrize("locked", ["index", "refs/heads/main"])
def test_who_leaves_a_branch_that_somebody_else_has_locked_is_told_how_to_come_back(
    here: Here, monkeypatch: pytest.MonkeyPatch, locked: str
) -> None:
    site = here.site
    start = site.git("rev-parse", "main")
    lock = site.worktree / ".git" / f"{locked}.lock"
    if locked == "index":
        # It refuses nothing: during the push, somebody begins to commit.
        refuse(site, f"rm '{site.remote}/hooks/pre-receive'; : > '{lock}'")
        leaving_as_the_branch_moves(here, monkeypatch)
    else:
        leaving_as_the_branch_moves(here, monkeypatch, lock.touch)
    assert here.publish(here.post("a"))["a"].failure is None
    (told,) = here.warned
    assert "were left alone. Fix: git switch main; files that are in its way" in told
    assert site.git("rev-parse", "main", "draft") == f"{site.remote_log()[0][0]}\n{start}"
    assert site.git("diff", "--cached", "--name-only") == "", "the posts are no part of the draft"

    lock.unlink(missing_ok=True)
    (site.worktree / "content/posts/a.md").unlink()
    site.git("switch", "-q", "main")
    here.publisher().tidy(NOW)
    assert here.publish(here.post("b"))["b"].commit == site.git("rev-parse", "main")
    assert here.subjects() == ["Publish b", "Publish a", "Start the site"]
    assert site.git("status", "--porcelain") == ""
    assert site.git("for-each-ref", "refs/briter") == ""


def test_who_leaves_again_for_a_moment_is_told_of_no_commits_that_nobody_has_made(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = here.site
    leaving_as_the_branch_moves(here, monkeypatch)
    here.publish(here.post("a"))
    site.git("switch", "-q", "main")
    plain = Adoption.adopt

    def adopt(self: Adoption, plan: Plan, known: Mapping[str, Entry | None] | None) -> None:
        monkeypatch.setattr(Adoption, "adopt", plain)
        site.git("symbolic-ref", "HEAD", "refs/heads/draft")
        try:
            plain(self, plan, known)
        finally:
            site.git("symbolic-ref", "HEAD", "refs/heads/main")

    monkeypatch.setattr(Adoption, "adopt", adopt)
    assert here.publish(here.post("c"))["c"].failure is None
    assert len(here.warned) == len([text for text in here.warned if "follow by themselves" in text]) == 3

    for _ in range(2):
        here.publisher().tidy(NOW)
    assert site.git("rev-parse", "main") == site.remote_log()[0][0]
    assert site.git("status", "--porcelain") == ""


@in_each_moment
def test_who_leaves_while_the_branch_moves_keeps_what_a_file_started_from(
    here: Here, monkeypatch: pytest.MonkeyPatch, leaving: Callable[[Here, pytest.MonkeyPatch], None]
) -> None:
    site = here.site
    here.publish(here.post("b", LINES))
    here.theirs(POST, LINES + "theirs\n")
    leaving(here, monkeypatch)
    here.publish(here.post("b", "ours\n" + LINES))
    request = here.post("b", "ours again\n" + LINES)
    site.git("switch", "-q", "main")
    here.publisher().tidy(NOW)
    here.publish(request)
    assert site.remote_file(POST) == "ours again\n" + LINES + "theirs\n"


@in_each_moment
def test_who_leaves_while_a_dry_run_moves_the_branch_has_it_tried_again(
    here: Here, monkeypatch: pytest.MonkeyPatch, leaving: Callable[[Here, pytest.MonkeyPatch], None]
) -> None:
    site = here.site
    start = site.git("rev-parse", "main")
    leaving(here, monkeypatch)
    with pytest.raises(PublishError) as failed:
        here.publish(here.post("a"), dry_run=True)
    assert failed.value.failure is Failure.LOST_RACE
    assert site.git("rev-parse", "main") == start
    site.git("switch", "-q", "main")
    assert site.git("for-each-ref", "refs/briter") == ""


def test_an_edit_that_a_person_has_staged_is_still_one_of_what_its_author_has_seen(here: Here) -> None:
    here.publish(here.post("b", LINES))
    edit = here.post("b", "mine\n" + LINES)
    here.theirs(POST, LINES + "theirs\n")
    here.publish(here.post("a"))
    here.site.git("add", POST)
    assert here.publish(edit)["b"].commit
    assert here.site.remote_file(POST) == "mine\n" + LINES + "theirs\n"


def test_what_a_sparse_checkout_leaves_out_stays_out_when_the_remote_changes_it(here: Here) -> None:
    here.theirs("notes/n.md", "one\n")
    here.publish(here.post("a"))
    here.site.git("status")  # else git is not sure that the file may go
    here.site.git("sparse-checkout", "set", "content")
    here.theirs("notes/n.md", "two\n")
    here.publish(here.post("b"))
    assert here.site.git("show", "HEAD:notes/n.md") == "two"
    assert here.site.git("ls-files", "-t", "notes") == "S notes/n.md"
    assert here.site.git("status", "--porcelain") == ""
    assert not (here.site.worktree / "notes").exists()


def test_a_push_that_is_taken_note_of_already_is_still_not_adopted_while_its_person_is_away(
    here: Here,
) -> None:
    before = here.site.git("rev-parse", "main")
    refuse(here.site, f"unset GIT_DIR GIT_QUARANTINE_PATH; cd {here.site.worktree}; git switch -qc draft")
    assert here.publish(here.post("a"))["a"].commit
    refs = here.site.git("for-each-ref")
    assert here.publisher().landed(here.plans[-1])
    assert here.site.git("for-each-ref") == refs
    assert here.site.git("rev-parse", "main") == before
    assert len(here.warned) == 2


def test_a_repository_that_goes_away_is_missed(here: Here) -> None:
    here.publish(here.post("a"))
    (here.site.worktree / ".git").rename(here.site.root / "away")
    with pytest.raises(PublishError) as failed:
        here.publish(here.post("b"))
    assert failed.value.failure is Failure.NOT_A_REPOSITORY
    assert "Fix: clone the site there" in failed.value.text


# Both sides changed


def test_a_deletion_of_what_the_remote_edited_is_a_conflict(here: Here) -> None:
    here.publish(here.post("b", LINES))
    here.theirs(POST, LINES + "theirs\n")
    (here.site.worktree / POST).unlink()
    assert here.publish(declared("b", POST))["b"].failure is Failure.CONFLICT
    assert here.site.remote_file(POST) == LINES + "theirs\n"


def test_a_repository_that_the_remote_has_in_a_posts_place_stays(here: Here) -> None:
    here.publish(here.post("b", LINES))
    other = here.elsewhere()
    (other / POST).unlink()
    nested = here.site.git("rev-parse", "main")
    here.site.git("add", "-A", cwd=other)
    here.site.git("update-index", "--add", "--cacheinfo", f"160000,{nested},{POST}", cwd=other)
    here.site.git("commit", "-qm", "Theirs", cwd=other)
    here.site.git("push", "-q", cwd=other)
    assert here.publish(here.post("b", LINES + "mine\n"))["b"].failure is Failure.CONFLICT
    assert here.site.git("ls-tree", "main", POST, cwd=here.site.remote).startswith("160000 commit")
    assert here.site.remote_file(POST, "conflict/b") == LINES + "mine\n"


def loosen(site: Site, pack: Path) -> None:
    """Each of its objects has a file of its own from now on."""
    aside = site.root / pack.name
    pack.rename(aside)
    for left in pack.parent.glob(f"{pack.stem}.*"):
        left.unlink()
    with aside.open("rb") as file:
        subprocess.run(["git", "unpack-objects", "-q"], stdin=file, cwd=site.worktree, check=True)


def test_a_start_that_the_repository_has_lost_is_damage_not_a_conflict(here: Here) -> None:
    here.publish(here.post("b", LINES))
    here.theirs(POST, LINES + "theirs\n")
    start = here.site.git("rev-parse", f"main:{POST}")
    here.site.git("fetch", "-q")  # what comes from there is not put together with what is lost
    objects = here.site.worktree / ".git" / "objects"
    for pack in (objects / "pack").glob("*.pack"):
        loosen(here.site, pack)
    (objects / start[:2] / start[2:]).unlink()
    with pytest.raises(PublishError, match=f"has no blob {start}") as failed:
        here.publish(here.post("b", "mine\n" + LINES))
    assert failed.value.failure is Failure.CORRUPT


def test_a_git_that_dies_as_it_merges_is_no_conflict(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    here.publish(here.post("b", LINES))
    here.theirs(POST, LINES + "theirs\n")
    shadow(here, monkeypatch, "merge-file", "echo 'fatal: out of memory' >&2; exit 128")
    with pytest.raises(PublishError, match="two versions could not be merged") as failed:
        here.publish(here.post("b", "mine\n" + LINES))
    assert failed.value.failure is Failure.DISK
    assert here.site.git("for-each-ref", "refs/heads/conflict", cwd=here.site.remote) == ""


def conflicting(here: Here) -> Request:
    """A post that the remote has changed in the same line."""
    here.theirs("content/posts/welcome.md", "# Theirs\n")
    return here.post("welcome", "# Mine\n")


def test_the_version_of_a_dry_runs_conflict_is_kept_here(here: Here) -> None:
    outcome = here.publish(conflicting(here), dry_run=True)["welcome"]
    assert outcome.failure is Failure.CONFLICT
    (kept,) = here.site.git("for-each-ref", "--format=%(refname)", "refs/briter/conflict").splitlines()
    assert f"the post's on the local ref {kept}" in outcome.text
    assert here.site.git("show", f"{kept}:content/posts/welcome.md") == "# Mine"
    assert here.subjects() == ["Theirs", "Start the site"]


def test_the_version_of_a_conflict_that_the_remote_does_not_take_is_kept_here(here: Here) -> None:
    refuse(here.site, "grep -q refs/heads/conflict && { echo no; exit 1; }; exit 0")
    outcome = here.publish(conflicting(here))["welcome"]
    assert outcome.failure is Failure.CONFLICT
    (kept,) = here.site.git("for-each-ref", "--format=%(refname)", "refs/briter/conflict").splitlines()
    assert f"the post's on the local ref {kept}" in outcome.text
    assert here.site.git("show", f"{kept}:content/posts/welcome.md") == "# Mine"


def test_the_version_of_a_conflict_that_the_branch_has_is_said_to_be_there(here: Here) -> None:
    welcome = "content/posts/welcome.md"
    here.post("welcome", "# A draft of mine\n")
    here.theirs(welcome, "# Same\n")
    here.publish(here.post("a"))
    request = here.post("welcome", "# Same\n")  # an edit of what its author has seen, not of theirs
    here.theirs(welcome, "# Later\n")
    outcome = here.publish(request)["welcome"]
    assert outcome.failure is Failure.CONFLICT
    assert "the post's on the branch main of this repository" in outcome.text


def test_a_conflict_whose_version_git_does_not_take_still_fails_alone(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = conflicting(here)
    # A pack with the post's own version cannot be written any more; all that came before could be.
    count = here.site.root / "packs"
    fails = "{ echo 'fatal: no space left on device' >&2; exit 128; }"
    shadow(here, monkeypatch, "index-pack", f"echo x >> {count}; test $(wc -l < {count}) -lt 2 || {fails}")
    outcome = here.publish(request)["welcome"]
    assert outcome.failure is Failure.CONFLICT
    assert "the post's in the work tree alone (" in outcome.text


# What is staged


def test_a_post_does_not_replace_a_file_that_is_in_the_way_of_its_folder(here: Here) -> None:
    here.publish(here.post("x", path="content/posts/x"))
    (here.site.worktree / "content/posts/x").unlink()
    here.post("y", path="content/posts/x/y.md")
    found = here.publish(declared("y", "content/posts/x/y.md"))
    assert found["y"].failure is Failure.NO_PATHS
    assert "it would replace the file content/posts/x; declare that path, too" in found["y"].text
    assert here.publish(declared("y", "content/posts/x/y.md", "content/posts/x"))["y"].commit


def test_a_job_that_declares_nothing_is_refused_with_what_to_do(here: Here) -> None:
    found = here.publish(declared("a"))
    assert found["a"].failure is Failure.NO_PATHS
    assert found["a"].text == "the job declares no paths. Fix: list what to publish"


def test_modes_that_are_not_to_be_trusted_are_kept_as_they_were_committed(here: Here) -> None:
    file = here.site.write_post(POST, "1\n")
    file.chmod(0o755)
    here.site.git("config", "core.fileMode", "true")
    here.publish(declared("b", POST))
    here.site.git("config", "core.fileMode", "false")
    here.commands.refresh()
    file.chmod(0o644)
    here.publish(here.post("b", "2\n"))
    assert here.site.git("ls-tree", "main", POST, cwd=here.site.remote).startswith("100755")
    assert here.site.remote_file(POST) == "2\n"


def test_a_file_that_a_filter_cannot_take_stops_no_other(here: Here) -> None:
    here.site.write_post(".gitattributes", "*.md filter=picky\n")
    here.site.git("config", "filter.picky.required", "true")
    here.commands.refresh()
    posts = [here.post(slug, f"{slug}\n") for slug in ("a", "bad", "c")]
    here.site.git("config", "filter.picky.clean", "grep -v bad")
    found = here.publish(*posts)
    assert found["bad"].failure is not None
    assert [found[slug].failure for slug in ("a", "c")] == [None, None]
    assert here.site.remote_file("content/posts/a.md") == "a\n"


def as_it_is_read(does: Callable[[], object]) -> Callable[[str, int, int], None]:
    """What is passed as `progress` to have something happen between the look at a file and its reading."""
    left = [does]

    def progress(phase: str, _done: int, _total: int) -> None:
        if phase == "stage" and left:
            left.pop()()

    return progress


def test_a_post_that_is_deleted_before_it_is_read_is_deleted(here: Here) -> None:
    file = here.site.worktree / "content/posts/welcome.md"
    request = here.post("welcome", "# New\n")
    found = here.publish(request, progress=as_it_is_read(file.unlink))
    assert found["welcome"].commit
    assert here.site.remote_file("content/posts/welcome.md") is None


def test_a_post_that_comes_back_before_it_is_read_is_not_deleted(here: Here) -> None:
    file = here.site.worktree / "content/posts/welcome.md"
    file.unlink()
    request = declared("welcome", "content/posts/welcome.md")
    found = here.publish(request, progress=as_it_is_read(lambda: file.write_text("# Back\n")))
    assert found["welcome"].commit
    assert here.site.remote_file("content/posts/welcome.md") == "# Back\n"


def test_a_post_that_becomes_a_folder_before_it_is_read_is_tried_again(here: Here) -> None:
    request = here.post("a")
    file = here.site.worktree / "content/posts/a.md"

    def becomes_a_folder() -> None:
        file.unlink()
        file.mkdir()

    found = here.publish(request, here.post("b"), progress=as_it_is_read(becomes_a_folder))
    assert found["a"].failure is Failure.UNSETTLED
    assert "has just become a folder" in found["a"].text
    assert here.subjects() == ["Publish b", "Start the site"]


def test_a_post_that_becomes_a_link_before_it_is_read_is_refused(here: Here) -> None:
    request = here.post("a")
    file = here.site.worktree / "content/posts/a.md"

    def becomes_a_link() -> None:
        file.unlink()
        file.symlink_to("/etc/passwd")

    found = here.publish(request, here.post("b"), progress=as_it_is_read(becomes_a_link))
    assert found["a"].failure is Failure.NO_PATHS
    assert "symbolic link" in found["a"].text
    assert here.subjects() == ["Publish b", "Start the site"]


@pytest.mark.parametrize("times", [1, 100], ids=["once", "again and again"])
def test_a_post_that_is_written_while_it_is_read_is_never_published_in_halves(
    here: Here, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = here.post("a", "half\n")
    file = here.site.worktree / "content/posts/a.md"
    written: list[int] = []

    def read_meanwhile(fd: int, size: int) -> bytes:
        content = read_all(fd, size)
        if len(written) < times:
            written.append(1)
            file.write_text("half\n" * (1 + len(written)))
        return content

    monkeypatch.setattr("briter_worker.git.staging.read_all", read_meanwhile)
    outcome = here.publish(request)["a"]
    if times == 1:
        assert here.site.remote_file("content/posts/a.md") == "half\nhalf\n"
    else:
        assert outcome.failure is Failure.UNSETTLED
        assert "keeps changing while it is read" in outcome.text


# What declared paths stand for


def test_a_path_on_hold_that_nobody_may_publish_holds_nothing_back(here: Here) -> None:
    here.post("x", path="content/x/a.md")
    found = here.publish(declared("x", "content/x"), held=["../x", "content/x/later.md"])
    assert found["x"].commit
    assert here.site.remote_file("content/x/a.md") == "x\n"


def a_submodule(here: Here, path: str) -> None:
    here.site.git(
        "update-index", "--add", "--cacheinfo", f"160000,{here.site.git('rev-parse', 'main')},{path}"
    )


def test_what_is_below_a_repository_of_the_branchs_is_refused(here: Here) -> None:
    a_submodule(here, "content/sub")
    here.site.git("commit", "-qm", "Submodule")
    here.site.git("push", "-q", "origin", "main")
    found = here.publish(here.post("x", path="content/sub/x.md"))
    assert found["x"].failure is Failure.NO_PATHS
    assert "inside a nested repository (a submodule)" in found["x"].text


def test_what_is_below_a_repository_that_somebody_has_staged_stops_no_other(here: Here) -> None:
    a_submodule(here, "content/sub")
    requests = [here.post(slug, path=f"content/{slug}.md") for slug in ("a", "sub/x", "b")]
    found = here.publish(*requests)
    assert found["sub/x"].failure is Failure.NO_PATHS
    assert [found[slug].failure for slug in ("a", "b")] == [None, None]
    assert here.subjects() == ["Publish b", "Publish a", "Start the site"]


def test_a_folder_that_is_a_repository_is_refused(here: Here) -> None:
    (here.site.worktree / "content" / "nested" / ".git").mkdir(parents=True)
    here.post("x", path="content/nested/x.md")
    found = here.publish(declared("x", "content/nested"))
    assert found["x"].failure is Failure.NO_PATHS
    assert "it is inside a nested repository; publish it from there" in found["x"].text


class Meanwhile(Allowlist):
    """Something happens as one path is looked at."""

    path = ""
    does: Callable[[], object] = staticmethod(lambda: None)

    def resolve(self, path: str) -> str:
        found = super().resolve(path)
        if path == self.path:
            self.path = ""
            self.does()
        return found


def test_a_folder_that_goes_while_another_is_looked_at_takes_only_its_own_posts_along(here: Here) -> None:
    for name in ("x/a.md", "x/y/b.md"):
        here.post("x", path=f"content/{name}")
    here.publish(declared("x", "content/x"))
    here.post("x", "new\n", path="content/x/a.md")
    meanwhile = Meanwhile(["content"])
    meanwhile.path = "content/x/y"
    meanwhile.does = partial(shutil.rmtree, here.site.worktree / "content/x/y")
    assert here.publish(declared("x", "content/x"), allowlist=meanwhile)["x"].commit
    assert here.site.remote_file("content/x/a.md") == "new\n"
    assert here.site.remote_file("content/x/y/b.md") is None


# What comes from the remote


def test_what_the_remote_removed_is_removed_here_only_where_nobody_touched_it(here: Here) -> None:
    names = [f"drafts/{name}.txt" for name in ("gone", "edited", "untouched")]
    for name in names:
        here.theirs(name, "1\n")
    here.publish(here.post("a"))
    gone, edited, untouched = (here.site.worktree / name for name in names)
    gone.unlink()
    edited.write_text("mine\n")
    other = here.elsewhere()
    for name in names:
        (other / name).unlink()
    here.push_theirs()
    here.publish(here.post("b"))
    assert edited.read_text() == "mine\n"
    assert not gone.exists()
    assert not untouched.exists()


def test_folders_that_the_remote_emptied_go_with_their_last_file(here: Here) -> None:
    here.theirs("drafts/deep/x.txt", "1\n")
    here.publish(here.post("a"))
    assert (here.site.worktree / "drafts/deep/x.txt").exists()
    other = here.elsewhere()
    (other / "drafts/deep/x.txt").unlink()
    here.push_theirs()
    here.publish(here.post("b"))
    assert not (here.site.worktree / "drafts").exists()


def test_a_file_that_is_already_as_the_remote_has_it_is_left_as_it_is(here: Here) -> None:
    here.theirs("theirs.txt", "same\n")
    file = here.site.write_post("theirs.txt", "same\n")
    before = file.stat()
    here.publish(here.post("a"))
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert here.site.git("status", "--porcelain") == ""


def test_what_the_cms_saves_while_the_remotes_version_is_made_is_not_overwritten(here: Here) -> None:
    here.site.write_post(".gitattributes", "*.md filter=slow\n")
    here.site.git("config", "filter.slow.clean", "cat")
    file = here.site.worktree / "content/posts/welcome.md"
    here.site.git("config", "filter.slow.smudge", f"cat; echo '# Mine, just now' > {file}")
    here.theirs("content/posts/welcome.md", "# Theirs\n")
    here.publish(here.post("a"))
    assert file.read_text() == "# Mine, just now\n"
    assert here.site.remote_file("content/posts/welcome.md") == "# Theirs\n"


def test_who_is_not_root_gives_no_file_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    before = file.stat()
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("os.chown", lambda *_: pytest.fail("only root may"))
    _like_a_checkout(file, tmp_path.stat(), executable=True)
    assert file.stat().st_mode & 0o100
    assert file.stat().st_uid == before.st_uid


# The remote


def test_a_branch_of_the_same_name_elsewhere_on_the_remote_is_not_taken_for_it(here: Here) -> None:
    start = here.site.git("rev-parse", "main")
    for name in ("refs/a/refs/heads/main", "refs/z/refs/heads/main"):
        here.site.git("update-ref", name, start, cwd=here.site.remote)
    here.publish(here.post("a"))
    tip = here.site.git("rev-parse", "main")
    site = Repository(here.commands, branch="main", remote="origin")
    remote = Remote(site, progress=lambda _done, _total: None)
    assert remote.tip() == tip
    here.site.git("update-ref", "-d", "refs/heads/main", cwd=here.site.remote)
    assert remote.tip() is None


def test_a_fetch_that_brings_nothing_is_told(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    here.theirs()
    shadow(here, monkeypatch, "fetch", "exit 0")
    with pytest.raises(PublishError, match="git fetch succeeded, but brought no commit") as failed:
        here.publish(here.post("a"))
    assert failed.value.failure is Failure.INTERNAL
    assert here.subjects() == ["Theirs", "Start the site"]


def test_a_remote_that_is_taken_out_of_the_configuration_right_before_the_push_is_missing(here: Here) -> None:
    def examine(_key: str, _changes: Sequence[Change]) -> None:
        here.site.git("config", "--remove-section", "remote.origin")

    with pytest.raises(PublishError, match="no remote named origin") as failed:
        here.publish(here.post("a"), examine=examine)
    assert failed.value.failure is Failure.REMOTE_MISSING


def test_a_remote_that_dies_without_an_answer_is_asked_what_it_has(here: Here) -> None:
    refuse(here.site, "kill -9 $PPID; sleep 1")
    with pytest.raises(PublishError, match="the push failed") as failed:
        here.publish(here.post("a"))
    assert failed.value.failure is Failure.NETWORK
    assert here.subjects() == ["Start the site"]


def test_whether_a_dry_run_landed_is_seen_by_the_branch(here: Here) -> None:
    here.publish(here.post("a"), dry_run=True)
    (plan,) = here.plans
    dry = here.publisher(dry_run=True)
    assert dry.landed(plan)
    here.site.git("reset", "-q", "--hard", "origin/main")
    assert not dry.landed(plan)


_SPEECHLESS = """#!{python}
import os, sys
if "receive" not in " ".join(sys.argv): sys.exit(1)
def line(text): return b"%04x%s" % (len(text) + 4, text)
os.write(1, line(b"{tip} refs/heads/main\\0report-status delete-refs ofs-delta\\n") + b"0000")
while (size := int(os.read(0, 4), 16)):
    os.read(0, size - 4)
os.write(1, line(b"unpack ok\\n") + b"0000")
while os.read(0, 65536):
    pass
"""


def test_a_remote_that_does_not_say_what_became_of_the_branch_has_not_published(here: Here) -> None:
    program = here.site.root / "ssh"
    program.write_text(_SPEECHLESS.format(python=sys.executable, tip=here.site.git("rev-parse", "main")))
    program.chmod(0o755)
    here.site.git("remote", "set-url", "origin", "ssh://host/x")
    here.site.git("config", "core.sshCommand", str(program))
    with pytest.raises(PublishError, match="remote failed to report status") as failed:
        here.publish(here.post("a"))
    assert failed.value.failure is Failure.NETWORK
    assert here.subjects() == ["Start the site"]


def test_a_remote_that_is_a_program_is_refused_and_not_run(here: Here) -> None:
    mark = here.site.root / "ran"
    here.site.git("remote", "set-url", "origin", f"ext::touch {mark}")
    with pytest.raises(PublishError, match="transport 'ext' not allowed") as failed:
        here.publish(here.post("a"))
    assert failed.value.failure is Failure.REMOTE_MISSING
    assert not mark.exists()
