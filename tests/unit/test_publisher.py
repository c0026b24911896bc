"""The publisher by its port, with real git: what the worker around it seldom brings about."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from briter_worker.allowlist import Allowlist
from briter_worker.errors import FailureCode, LockLostError, PublishError
from briter_worker.git.publisher import GitPublisher
from briter_worker.git.push import FileConflicts, FilePlans, Person
from briter_worker.git.repository import Repository
from briter_worker.git.run import Git
from briter_worker.git.staging import Staging, WorkTreeCopies
from briter_worker.ports import Outcome, Plan, Request, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from sites import Site

    from briter_worker.ports import Change

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
    warned: list[str] = field(default_factory=list)
    has_lock: bool = True
    opened: dict[bool, GitPublisher] = field(default_factory=dict)

    def publisher(self, *, dry_run: bool = False) -> GitPublisher:
        if dry_run not in self.opened:
            self.opened[dry_run] = self.open_publisher(dry_run=dry_run)
        return self.opened[dry_run]

    def open_publisher(self, *, dry_run: bool) -> GitPublisher:
        repository = Repository(self.git, branch="main", remote="origin")
        staging = Staging(repository, Allowlist(["content"]), 1 << 20, lambda *_: None)
        return GitPublisher(
            repository,
            copies=WorkTreeCopies(staging, self.warn),
            plans=FilePlans(self.git.state_dir, "main"),
            bases=FileConflicts(self.git.state_dir, "main"),
            identity=WORKER,
            dry_run=dry_run,
            progress=lambda *_: None,
            warn=self.warn,
            still_ours=lambda: self.has_lock,
        )

    def warn(self, text: str, _fix: str) -> None:
        self.warned.append(text)

    def publish(
        self,
        *requests: Request,
        cancelled: Callable[[], Collection[str]] = tuple,
        check: Callable[[str, Sequence[Change]], Outcome | None] = lambda *_: None,
        scheduled: Callable[[], Mapping[str, float]] = dict,
        dry_run: bool = False,
    ) -> dict[str, Outcome]:
        """What became of each, by its key."""
        found = self.publisher(dry_run=dry_run).publish(
            requests, scheduled=scheduled, check=check, cancelled=cancelled, now=NOW
        )
        return {outcome.key: outcome for outcomes in found for outcome in outcomes}

    def post(self, slug: str, text: str = "", path: str = "") -> Request:
        """A CMS saves a post."""
        path = path or f"content/posts/{slug}.md"
        self.site.write_post(path, text or f"{slug}\n")
        return declared(slug, path)

    def subjects(self) -> list[str]:
        return [subject for _, subject in self.site.remote_log()]

    def plans(self) -> Sequence[Plan]:
        return FilePlans(self.git.state_dir, "main").plans()

    def own_refs(self) -> list[str]:
        return self.site.git("for-each-ref", "--format=%(refname)", "refs/briter").splitlines()

    def own_ref(self, name: str) -> str:
        return f"refs/briter/branches/main/{name}"

    def elsewhere(self) -> Path:
        """Somebody else's clone, up to date."""
        other = self.site.root / "other"
        if not other.exists():
            self.site.git("clone", "-q", str(self.site.remote), str(other), cwd=self.site.root)
        self.site.git("pull", "-q", "--rebase", cwd=other)
        return other

    def theirs(self, path: str = "theirs.txt", text: str | None = "theirs\n") -> str:
        """Somebody else pushes a change of a file; the new commit."""
        file = self.elsewhere() / path
        if text is None:
            file.unlink()
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return self.push_theirs()

    def push_theirs(self) -> str:
        other = self.site.root / "other"
        self.site.git("add", "-A", cwd=other)
        self.site.git("commit", "-qm", "Theirs", cwd=other)
        self.site.git("push", "-q", cwd=other)
        return self.site.git("rev-parse", "HEAD", cwd=other)


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


def shadow(here: Here, monkeypatch: pytest.MonkeyPatch, command: str, does: str) -> None:
    """Git is as ever, but for one command of it, which does this."""
    bin_ = here.site.root / "bin"
    bin_.mkdir()
    git = bin_ / "git"
    git.write_text(f'#!/bin/sh\ncase " $* " in *" {command} "*) {does};; esac\nexec /usr/bin/git "$@"\n')
    git.chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_}:{os.environ['PATH']}")
    here.git.close()
    here.opened.clear()
    here.git = Git(here.site.worktree, remote="origin", timeout=30)


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


def test_a_request_that_a_plugin_defers_keeps_its_rejected_paths_and_stops_no_other(here: Here) -> None:
    def check(key: str, _changes: Sequence[Change]) -> Outcome | None:
        return Outcome(key, Result.FAILED, retry_at=NOW + 5) if key == "a" else None

    here.post("a")
    found = here.publish(declared("a", "content/posts/a.md", "secret.md"), here.post("b"), check=check)
    assert (found["a"].retry_at, found["a"].rejected_paths) == (NOW + 5, ("secret.md",))
    assert here.subjects() == ["Publish b", "Start the site"]


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


def test_a_worker_that_has_lost_its_site_pushes_nothing_and_leaves_no_plan(here: Here) -> None:
    here.has_lock = False
    with pytest.raises(LockLostError):
        here.publish(here.post("a"))
    assert here.subjects() == ["Start the site"]
    assert (here.plans(), here.publisher().undecided()) == ([], set())


def test_a_plan_that_cannot_be_stored_means_no_push(here: Here) -> None:
    folder = here.git.state_dir
    next_to_it = FilePlans(folder, "main")
    next_to_it.record(Plan("0" * 32, None, "1" * 40, {}, {}))
    (plans,) = folder.glob("*/plans")
    (plans / f"{'0' * 32}.json").unlink()
    plans.rmdir()
    plans.write_text("in the way")
    with pytest.raises(PublishError) as failed:
        here.publish(here.post("a"))
    assert failed.value.code is FailureCode.DISK
    assert here.subjects() == ["Start the site"]


# The remote's tip is the base


def test_a_persons_local_commits_are_in_no_posts_way_and_are_not_pushed(here: Here) -> None:
    here.site.git("commit", "-q", "--allow-empty", "-m", "By hand")
    assert here.publish(here.post("a"))["a"].result is Result.PUBLISHED
    here.theirs()
    assert here.publish(here.post("b"))["b"].result is Result.PUBLISHED
    assert here.subjects() == ["Publish b", "Theirs", "Publish a", "Start the site"]
    assert here.site.git("log", "-1", "--format=%s", "main") == "By hand"


def test_a_post_that_two_requests_bring_is_one_commit_and_the_receipt_of_both(here: Here) -> None:
    here.post("a")
    found = here.publish(declared("x", "content/posts/a.md"), declared("y", "content/posts/a.md"))
    assert found["x"].commit == found["y"].commit == here.site.remote_log()[0][0]
    assert len(here.subjects()) == 2


def test_an_unchanged_post_is_compared_with_what_the_remote_has_by_now(here: Here) -> None:
    here.publish(here.post("a"))
    here.theirs(WELCOME, "# Theirs\n")
    found = here.publish(declared("welcome", WELCOME))
    assert found["welcome"].result is Result.UNCHANGED
    assert here.site.remote_file(WELCOME) == "# Theirs\n"
    assert (here.site.worktree / WELCOME).read_text() == "# Theirs\n"
    assert here.site.git("status", "--porcelain") == ""


def test_what_a_person_fetched_does_not_decide_what_the_remote_has(here: Here) -> None:
    here.publish(here.post("a", "a leaked secret\n"))
    leaked = here.site.remote_log()[0][0]
    here.site.git("update-ref", "refs/heads/main", f"{leaked}^", cwd=here.site.remote)
    here.site.git("fetch", "-q")
    with pytest.raises(PublishError) as failed:
        here.publish(here.post("b"))
    assert failed.value.code is FailureCode.REMOTE_REWRITTEN
    assert "git reset --keep origin/main" in failed.value.fix
    assert here.subjects() == ["Start the site"]
    here.site.git("status")  # as the fix says
    here.site.git("reset", "-q", "--keep", "origin/main")
    assert here.publish(here.post("b"))["b"].result is Result.PUBLISHED
    assert here.subjects() == ["Publish b", "Start the site"]


def test_a_repository_that_goes_away_is_missed(here: Here) -> None:
    here.publish(here.post("a"))
    (here.site.worktree / ".git").rename(here.site.root / "away")
    with pytest.raises(PublishError) as failed:
        here.publish(here.post("b"))
    assert failed.value.code is FailureCode.NOT_A_REPOSITORY


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
    assert here.publisher().undecided() == {"a"}
    with pytest.raises(PublishError):
        list(here.publisher().resolve())
    assert here.publisher().undecided() == {"a"}
    away.rename(here.site.remote)
    here.site.write_post("content/posts/a.md", "edited meanwhile\n")
    (landed,) = here.publisher().resolve()
    assert landed == {"a": here.site.remote_log()[0][0]}
    assert here.publisher().undecided() == set()
    assert not [ref for ref in here.own_refs() if "/batch/" in ref]
    here.publish(declared("a", "content/posts/a.md"))
    assert here.subjects() == ["Publish a", "Publish a", "Start the site"]
    assert here.site.remote_file("content/posts/a.md") == "edited meanwhile\n"


def test_a_lost_push_that_is_below_a_colleagues_commit_has_landed(here: Here) -> None:
    lose_the_answer(here)
    ours = here.site.remote_log()[0][0]
    here.theirs("content/posts/a.md", "a\ntheirs\n")
    (landed,) = here.publisher().resolve()
    assert landed == {"a": ours}
    assert here.publish(declared("a", "content/posts/a.md"))["a"].result is Result.UNCHANGED
    assert here.subjects() == ["Theirs", "Publish a", "Start the site"]


def test_a_push_that_has_not_landed_is_done_again_and_only_once(here: Here) -> None:
    request = lose_the_answer(here, applied=False)
    (landed,) = here.publisher().resolve()
    assert landed == {}
    assert here.publish(request)["a"].result is Result.PUBLISHED
    assert here.subjects() == ["Publish a", "Start the site"]


@pytest.mark.parametrize("edit", [None, "a, edited\n"])
def test_a_push_that_lands_after_all_is_found_and_not_doubled(here: Here, edit: str | None) -> None:
    request = here.post("a")
    here.publish(here.post("b"))
    start = here.site.git("rev-parse", "main", cwd=here.site.remote)
    here.publish(request)
    late = here.site.git("rev-parse", "main", cwd=here.site.remote)
    # As if nobody had ever heard of that push.
    here.site.git("update-ref", here.own_ref("pushed"), start)
    here.site.git("update-ref", "refs/heads/main", start)
    here.site.git("read-tree", "main")
    outcome = here.publish(here.post("a", edit) if edit else request)["a"]
    assert outcome.result is Result.PUBLISHED
    if edit is None:
        assert outcome.commit == late
        assert here.subjects() == ["Publish a", "Publish b", "Start the site"]
    else:
        assert here.subjects() == ["Publish a", "Publish a", "Publish b", "Start the site"]
        assert here.site.remote_file("content/posts/a.md") == edit


def test_a_rejected_batch_is_rejected_as_a_whole_in_the_remotes_words_alone(here: Here) -> None:
    hook(here.site, "echo 'no swearing. Fix: run this' >&2; exit 1")
    with pytest.raises(PublishError) as failed:
        here.publish(here.post("a"), here.post("b"))
    assert failed.value.code is FailureCode.REJECTED
    assert "no swearing. Fix: run this" in failed.value.message
    assert "run this" not in failed.value.fix
    assert (here.plans(), [ref for ref in here.own_refs() if "/batch/" in ref]) == ([], [])


# Both sides changed


def conflicting(here: Here) -> Request:
    """A post that the remote has changed in the same line."""
    here.theirs(WELCOME, "# Theirs\n")
    return here.post("welcome", "# Mine\n")


def failure_of(outcome: Outcome) -> FailureCode | None:
    return outcome.failure.code if outcome.failure else None


def test_lines_of_both_sides_are_merged_and_the_next_edit_is_one_of_what_was_merged(here: Here) -> None:
    here.publish(here.post("b", LINES))
    here.theirs(POST, LINES + "theirs\n")
    here.publish(here.post("b", "mine\n" + LINES))
    assert here.site.remote_file(POST) == "mine\n" + LINES + "theirs\n"
    assert (here.site.worktree / POST).read_text() == "mine\n" + LINES + "theirs\n"


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


def test_a_repository_that_the_remote_has_in_a_posts_place_stays(here: Here) -> None:
    here.publish(here.post("b", LINES))
    other = here.elsewhere()
    (other / POST).unlink()
    nested = here.site.git("rev-parse", "main")
    here.site.git("add", "-A", cwd=other)
    here.site.git("update-index", "--add", "--cacheinfo", f"160000,{nested},{POST}", cwd=other)
    here.site.git("commit", "-qm", "Theirs", cwd=other)
    here.site.git("push", "-q", cwd=other)
    assert failure_of(here.publish(here.post("b", LINES + "mine\n"))["b"]) is FailureCode.CONFLICT
    assert here.site.git("ls-tree", "main", POST, cwd=here.site.remote).startswith("160000 commit")
    assert here.site.remote_file(POST, "conflict/b") == LINES + "mine\n"


def test_a_start_that_the_repository_has_lost_is_damage_not_a_conflict(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.publish(here.post("b", LINES))
    start = here.site.remote_log()[0][0]
    lost = here.site.git("rev-parse", f"{start}:{POST}", cwd=here.site.remote)
    here.theirs(POST, LINES + "theirs\n")
    plain = Repository.blob

    def blob(repository: Repository, sha: str) -> bytes:
        return plain(repository, "0" * 40 if sha == lost else sha)

    monkeypatch.setattr(Repository, "blob", blob)
    here.opened.clear()
    with pytest.raises(PublishError) as failed:
        here.publish(here.post("b", "mine\n" + LINES))
    assert failed.value.code is FailureCode.CORRUPT


def test_a_git_that_dies_as_it_merges_is_no_conflict(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    here.publish(here.post("b", LINES))
    here.theirs(POST, LINES + "theirs\n")
    shadow(here, monkeypatch, "merge-file", "echo 'fatal: out of memory' >&2; exit 128")
    with pytest.raises(PublishError, match="two versions of a file could not be merged") as failed:
        here.publish(here.post("b", "mine\n" + LINES))
    assert failed.value.code is FailureCode.DISK
    assert here.site.git("for-each-ref", "refs/heads/conflict", cwd=here.site.remote) == ""


def test_a_dry_runs_conflict_is_kept_nowhere(here: Here) -> None:
    outcome = here.publish(conflicting(here), dry_run=True)["welcome"]
    assert failure_of(outcome) is FailureCode.CONFLICT
    assert here.site.git("for-each-ref", "refs/heads/conflict", cwd=here.site.remote) == ""


def test_a_conflict_whose_version_the_remote_does_not_take_still_fails_alone(here: Here) -> None:
    hook(here.site, "grep -q refs/heads/conflict && { echo no; exit 1; }; exit 0")
    found = here.publish(conflicting(here), here.post("a"))
    assert failure_of(found["welcome"]) is FailureCode.CONFLICT
    assert found["a"].result is Result.PUBLISHED


def test_the_same_conflict_is_kept_once_and_is_over_with_another_content(here: Here) -> None:
    request = conflicting(here)
    first = here.publish(request)["welcome"]
    assert first.failure == here.publish(request)["welcome"].failure
    branches = here.site.git(
        "for-each-ref", "--format=%(refname)", "refs/heads/conflict", cwd=here.site.remote
    )
    assert branches == "refs/heads/conflict/welcome"
    assert here.publish(here.post("welcome", "# Both\n"))["welcome"].result is Result.PUBLISHED
    assert here.site.remote_file(WELCOME) == "# Both\n"
    assert here.site.git("for-each-ref", "refs/heads/conflict", cwd=here.site.remote) == ""


@pytest.mark.parametrize("seen", [False, True], ids=["", "and another post followed"])
def test_a_conflict_branch_that_somebody_has_merged_is_published_and_deleted(
    here: Here, *, seen: bool
) -> None:
    here.publish(here.post("b", LINES))
    here.theirs(POST, LINES.replace("line 1\n", "line one\n"))
    request = here.post("b", LINES.replace("line 1\n", "Line 1\n") + "mine\n")
    failure = here.publish(request)["b"].failure
    assert failure is not None
    assert "git merge origin/conflict/b" in failure.fix
    other = here.elsewhere()
    here.site.git("fetch", "-q", cwd=other)
    here.site.git("merge", "-q", "-X", "ours", "-m", "Both", "origin/conflict/b", cwd=other)
    here.site.git("push", "-q", "origin", "main", cwd=other)
    both = LINES.replace("line 1\n", "line one\n") + "mine\n"
    if seen:
        here.publish(here.post("c"))
    assert here.publish(request)["b"].result is (Result.UNCHANGED if seen else Result.PUBLISHED)
    assert here.site.remote_file(POST) == both
    assert (here.site.worktree / POST).read_text() == both
    assert here.site.git("for-each-ref", "refs/heads/conflict", cwd=here.site.remote) == ""


# The remote


def test_a_remote_that_is_taken_out_of_the_configuration_is_missing(here: Here) -> None:
    here.site.git("config", "--remove-section", "remote.origin")
    with pytest.raises(PublishError, match="no remote named origin") as failed:
        here.publish(here.post("a"))
    assert failed.value.code is FailureCode.REMOTE_MISSING


def test_a_remote_that_dies_without_an_answer_is_asked_what_it_has(here: Here) -> None:
    hook(here.site, "kill -9 $PPID; sleep 1")
    with pytest.raises(PublishError, match="the push failed") as failed:
        here.publish(here.post("a"))
    assert failed.value.code is FailureCode.NETWORK
    assert (here.subjects(), here.plans()) == (["Start the site"], [])


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


def test_a_remote_that_does_not_say_what_became_of_the_branch_leaves_the_push_undecided(here: Here) -> None:
    here.publish(here.post("b"))
    program = here.site.root / "ssh"
    program.write_text(_SPEECHLESS.format(python=sys.executable, tip=here.site.remote_log()[0][0]))
    program.chmod(0o755)
    here.site.git("remote", "set-url", "origin", "ssh://host/x")
    here.site.git("config", "core.sshCommand", str(program))
    with pytest.raises(PublishError, match="remote failed to report status"):
        here.publish(here.post("a"))
    assert here.publisher().undecided() == {"a"}


def test_a_remote_that_is_a_program_is_refused_and_not_run(here: Here) -> None:
    here.publish(here.post("b"))
    mark = here.site.root / "ran"
    here.site.git("remote", "set-url", "origin", f"ext::touch {mark}")
    with pytest.raises(PublishError, match="transport 'ext' not allowed") as failed:
        here.publish(here.post("a"))
    assert failed.value.code is FailureCode.REMOTE_MISSING
    assert not mark.exists()
