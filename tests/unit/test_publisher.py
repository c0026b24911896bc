"""The publisher by its port, with real git: what the worker around it seldom brings about."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import pytest

from briter_worker.allowlist import Allowlist
from briter_worker.errors import FailureCode, PublishError
from briter_worker.git.publisher import GitPublisher
from briter_worker.git.push import FileConflicts, FilePlans, Person
from briter_worker.git.repository import Repository
from briter_worker.git.run import Git
from briter_worker.git.staging import Staging, WorkTreeCopies
from briter_worker.ports import Outcome, Request, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from pathlib import Path

    from sites import Site


NOW = 1_800_000_000.0
POST = "content/posts/b.md"
WELCOME = "content/posts/welcome.md"
LINES = "".join(f"line {n}\n" for n in range(20))
WORKER = Person("Briter Worker", "briter-worker@localhost")


@dataclass
class Here:
    """The site's publisher, in this process."""

    site: Site
    git: Git

    @cached_property
    def publisher(self) -> GitPublisher:
        repository = Repository(self.git, branch="main", remote="origin")
        staging = Staging(repository, Allowlist(["content"]), 1 << 20, lambda *_: None)
        return GitPublisher(
            repository,
            copies=WorkTreeCopies(staging, lambda *_: None),
            plans=FilePlans(self.git.state_dir, "main"),
            bases=FileConflicts(self.git.state_dir, "main"),
            identity=WORKER,
            dry_run=False,
            progress=lambda *_: None,
            warn=lambda *_: None,
            still_ours=lambda: True,
        )

    def publish(
        self,
        *requests: Request,
        cancelled: Callable[[], Collection[str]] = tuple,
        scheduled: Callable[[], Mapping[str, float]] = dict,
    ) -> dict[str, Outcome]:
        """What became of each, by its key."""
        found = self.publisher.publish(
            requests, scheduled=scheduled, check=lambda *_: None, cancelled=cancelled, now=NOW
        )
        return {outcome.key: outcome for outcomes in found for outcome in outcomes}

    def post(self, slug: str, text: str = "", path: str = "") -> Request:
        """A CMS saves a post."""
        path = path or f"content/posts/{slug}.md"
        self.site.write_post(path, text or f"{slug}\n")
        return declared(slug, path)

    def subjects(self) -> list[str]:
        return [subject for _, subject in self.site.remote_log()]

    def theirs(self, path: str, text: str | None) -> None:
        """Somebody else pushes a change of a file."""
        other = self.site.root / "other"
        if not other.exists():
            self.site.git("clone", "-q", str(self.site.remote), str(other), cwd=self.site.root)
        self.site.git("pull", "-q", "--rebase", cwd=other)
        if text is None:
            (other / path).unlink()
        else:
            (other / path).write_text(text)
        self.site.git("add", "-A", cwd=other)
        self.site.git("commit", "-qm", "Theirs", cwd=other)
        self.site.git("push", "-q", cwd=other)


def declared(slug: str, *paths: str) -> Request:
    return Request(slug, slug, paths, f"Publish {slug}", math.inf)


@pytest.fixture
def here(site: Site) -> Iterator[Here]:
    found = Here(site, Git(site.worktree, remote="origin", timeout=30))
    yield found
    found.git.close()


def hook(site: Site, text: str, name: str = "pre-receive") -> Path:
    file = site.remote / "hooks" / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


# Before the push


def test_a_post_that_is_cancelled_right_before_the_push_is_built_out_of_it(here: Here) -> None:
    asked: list[int] = []

    def at_the_last_moment() -> Collection[str]:
        asked.append(1)
        return ["a"] if len(asked) > 1 else []

    found = here.publish(here.post("a"), here.post("b"), cancelled=at_the_last_moment)
    assert found["a"].result is Result.CANCELLED
    assert found["b"].commit == here.site.remote_log()[0][0]
    assert here.subjects() == ["Publish b", "Start the site"]
    assert here.site.git("status", "--porcelain") == "?? content/posts/a.md"


def test_what_is_scheduled_while_the_files_are_read_is_released(here: Here) -> None:
    looks: list[Mapping[str, float]] = [{POST: NOW + 60}, {}]
    here.post("b")
    found = here.publish(here.post("a"), declared("all", "content/posts"), scheduled=looks.pop)
    assert (found["a"].result, found["all"].result) == (Result.PUBLISHED, Result.RELEASED)
    assert here.site.remote_file(POST) is None


@pytest.mark.parametrize("also", [(), ("content/posts/a.md",)])
@pytest.mark.parametrize("scheduled", ["content/notes/later.md", "content/notes"])
def test_withheld_files_keep_their_job_waiting_unless_it_publishes_others(
    here: Here, also: tuple[str, ...], scheduled: str
) -> None:
    later = "content/notes/later.md"
    here.post("a")
    here.post("later", path=later)
    found = here.publish(declared("x", "content/notes", *also), scheduled=lambda: {scheduled: NOW + 60})["x"]
    if also:
        assert found.result is Result.PUBLISHED
    else:
        assert (found.result, found.retry_at) == (Result.FAILED, NOW + 60)
        assert found.failure is not None
        assert later in found.failure.message
    assert here.site.remote_file(later) is None


def test_the_very_file_of_a_scheduled_post_is_published_when_another_job_declares_it(here: Here) -> None:
    here.post("b")
    assert here.publish(declared("x", POST), scheduled=lambda: {POST: NOW + 60})["x"].commit
    assert here.site.remote_file(POST) == "b\n"


# What became of a push


def lose_the_answer(here: Here, *, applied: bool = True) -> Request:
    """A push whose connection breaks, and a remote that is away from then on."""
    remote, gone = here.site.remote, here.site.root / "gone.git"
    name = "reference-transaction" if applied else "pre-receive"
    hook(here.site, f'[ "$1" = prepared ] || {{ mv {remote} {gone}; kill -9 $PPID; sleep 1; }}', name)
    request = here.post("a")
    with pytest.raises(PublishError) as failed:
        here.publish(request)
    assert failed.value.code is FailureCode.NETWORK
    gone.rename(remote)
    (remote / "hooks" / name).unlink()
    return request


def test_a_push_whose_answer_and_remote_are_lost_keeps_its_plan_until_the_remote_has_spoken(
    here: Here,
) -> None:
    away = here.site.root / "away.git"
    lose_the_answer(here)
    here.site.remote.rename(away)
    assert here.publisher.undecided() == {"a"}
    with pytest.raises(PublishError):
        list(here.publisher.resolve())
    assert here.publisher.undecided() == {"a"}
    away.rename(here.site.remote)
    here.site.write_post("content/posts/a.md", "edited meanwhile\n")
    (landed,) = here.publisher.resolve()
    assert [(each.key, each.commit) for each in landed] == [("a", here.site.remote_log()[0][0])]
    assert [file[:3] for file in landed[0].changes] == [("content/posts/a.md", 1, 0)]
    assert here.publisher.undecided() == set()
    assert "/batch/" not in here.site.git("for-each-ref", "refs/briter")
    here.publish(declared("a", "content/posts/a.md"))
    assert here.subjects() == ["Publish a", "Publish a", "Start the site"]
    assert here.site.remote_file("content/posts/a.md") == "edited meanwhile\n"


# Both sides changed


def conflicting(here: Here) -> Request:
    """A post that the remote has changed in the same line."""
    here.theirs(WELCOME, "# Theirs\n")
    return here.post("welcome", "# Mine\n")


def failure_of(outcome: Outcome) -> FailureCode | None:
    return outcome.failure.code if outcome.failure else None


def test_a_deletion_of_what_the_remote_edited_is_a_conflict(here: Here) -> None:
    here.publish(here.post("b", LINES))
    here.theirs(POST, LINES + "theirs\n")
    (here.site.worktree / POST).unlink()
    assert failure_of(here.publish(declared("b", POST))["b"]) is FailureCode.CONFLICT
    assert here.site.remote_file(POST) == LINES + "theirs\n"


def test_an_edit_of_what_the_remote_deleted_is_a_conflict(here: Here) -> None:
    here.publish(here.post("b", LINES))
    here.theirs(POST, None)
    assert failure_of(here.publish(here.post("b", LINES + "mine\n"))["b"]) is FailureCode.CONFLICT
    assert here.site.remote_file(POST) is None
    assert here.site.remote_file(POST, "conflict/b") == LINES + "mine\n"


def test_a_conflict_whose_version_the_remote_does_not_take_still_fails_alone(here: Here) -> None:
    hook(here.site, "grep -q refs/heads/conflict && { echo no; exit 1; }; exit 0")
    found = here.publish(conflicting(here), here.post("a"))
    assert failure_of(found["welcome"]) is FailureCode.CONFLICT
    assert found["a"].result is Result.PUBLISHED
