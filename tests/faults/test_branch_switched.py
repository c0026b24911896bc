"""Somebody switches branches, commits or begins a merge just after the worker has looked."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from caches import LINES
from outcomes import DELAYS, assert_published, assert_put_off, save

from briter_worker.errors import Failure, Kind

if TYPE_CHECKING:
    from pathlib import Path

    from sites import Site


def program(file: Path, text: str) -> Path:
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


@pytest.fixture
def drafts(site: Site) -> Site:
    """A site with a branch `drafts` that has another version of a published post."""
    site.write_post(".gitattributes", "*.bin filter=person\n")
    site.git("add", ".gitattributes")
    site.git("commit", "-qm", "Attributes")
    site.git("push", "-q", "origin", "main")
    site.git("switch", "-q", "-c", "drafts")
    site.write_post("content/posts/welcome.md", "# A draft, not to be published\n")
    site.git("commit", "-qam", "Draft")
    site.git("switch", "-q", "main")
    return site


def while_staging(site: Site, text: str) -> Path:
    """A person does this while the posts are being read: a filter is run in the middle of it."""
    person = "git -c user.name=P -c user.email=p@example.org"
    file = program(
        site.root / "person", f"cd {site.worktree}; ({text.replace('git ', f'{person} ')}) >&2; cat"
    )
    site.git("config", "filter.person.clean", str(file))
    site.write_post("content/posts/a.bin", "a\n")
    site.save("a", ["content/posts"])
    return file


def while_pushing(site: Site, text: str) -> None:
    """A person does this while the remote has not answered yet."""
    file = site.remote / "hooks" / "pre-receive"
    program(
        file, f"unset $(env | sed -n 's/^\\(GIT_[A-Z_]*\\)=.*/\\1/p'); cd {site.worktree}; {text}; rm {file}"
    )


def just_before(site: Site, command: str, text: str) -> str:
    """A PATH on which a person does this just before the worker's first `git <command>`."""
    person = "git -c user.name=P -c user.email=p@example.org"
    git = site.root / "bin" / "git"
    git.parent.mkdir()
    does = f"cd {site.worktree} && {text.replace('git ', f'{person} ')}"
    program(
        git,
        f'case " $* " in *" {command} "*) mkdir {site.root}/came 2>/dev/null && ({does}) >&2;; esac\n'
        'exec /usr/bin/git "$@"',
    )
    return f"{git.parent}:{os.environ['PATH']}"


@pytest.mark.parametrize(
    ("text", "failure", "back"),
    [
        ("git switch -q drafts", Failure.WRONG_BRANCH, "switch -q main"),
        ("git switch -q --detach drafts", Failure.WRONG_BRANCH, "switch -q main"),
        ("git switch -q drafts; sleep 0.1; git switch -q main", Failure.WRONG_BRANCH, ""),
        ("git merge --no-commit --no-ff drafts", Failure.UNFINISHED, "merge --abort"),
    ],
    ids=["switched", "detached", "there and back", "a merge begun"],
)
def test_what_was_read_from_another_branch_is_never_published(
    drafts: Site, text: str, failure: Failure, back: str
) -> None:
    person = while_staging(drafts, text)
    before = drafts.git("rev-parse", "main", "drafts")
    reason = assert_put_off(drafts, drafts.run_once(), failure)
    assert "Fix: " in reason
    assert [subject for _, subject in drafts.remote_log()] == ["Attributes", "Start the site"]
    assert drafts.git("rev-parse", "main", "drafts") == before
    program(person, "cat")
    if back:
        drafts.git(*back.split())
    drafts.command("retry", "a")
    assert_published(drafts, drafts.run_once(), attempt=1)
    assert drafts.remote_file("content/posts/welcome.md") == "# Welcome\n"


def test_a_branch_that_is_switched_during_the_push_keeps_its_index_and_its_files(drafts: Site) -> None:
    save(drafts, "a")
    tip, main = drafts.git("rev-parse", "drafts", "main").split()
    while_pushing(drafts, "git switch -q drafts")
    result = drafts.run_once()
    assert_published(drafts, result)
    assert "is not checked out any more" in result.of("warning")[0]["error"]
    assert drafts.git("rev-parse", "drafts", "HEAD", "main") == f"{tip}\n{tip}\n{main}"
    assert drafts.git("diff", "--cached", "--name-only") == ""
    assert drafts.git("status", "--porcelain") == "?? content/posts/a.md"
    drafts.git("switch", "-q", "main")
    assert drafts.run_once().names() == ["worker-started", "worker-stopped"]
    assert drafts.git("rev-parse", "main") == drafts.remote_log()[0][0]
    assert drafts.git("status", "--porcelain") == ""


def test_a_head_that_is_spoilt_during_the_push_leaves_the_branch_where_it_is_until_it_is_mended(
    site: Site,
) -> None:
    save(site, "a")
    before = site.git("rev-parse", "main")
    while_pushing(site, ": > .git/HEAD")
    result = site.run_once()
    assert_published(site, result)
    assert "is not checked out any more" in result.of("warning")[0]["error"]
    (site.worktree / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    assert site.git("rev-parse", "main") == before
    site.run_once()
    assert site.git("rev-parse", "main") == site.remote_log()[0][0]
    assert site.git("status", "--porcelain") == ""


@pytest.mark.parametrize(
    ("post", "edited"),
    [("a", False), ("welcome", False), ("welcome", True)],
    ids=["a new post", "an edited one", "edited again since"],
)
def test_a_persons_commit_during_the_push_is_kept_and_goes_out_with_the_next_post(
    site: Site,
    post: str,
    edited: bool,  # noqa: FBT001
) -> None:
    lines = "".join(f"line {number}\n" for number in range(9))
    site.write_post(f"content/posts/{post}.md", lines)
    site.save(post, [f"content/posts/{post}.md"])
    person = "git -c user.name=P -c user.email=p@example.org"
    while_pushing(site, f"{person} commit -q --allow-empty -m Theirs")
    result = site.run_once()
    assert_published(site, result, post)
    assert "Fix: git pull --rebase origin main" in result.of("warning")[0]["error"]
    theirs = site.git("log", "-1", "--format=%s", "main")
    assert theirs == "Theirs", "the branch moved under us, and was left where its owner put it"
    save(site, "b")
    held = site.run_once(BRITER_WORKER_BACKOFF_MS="60000")
    assert "Fix: git pull --rebase origin main" in assert_put_off(site, held, Failure.DIVERGED, slug="b")
    if edited:
        site.write_post("content/posts/welcome.md", lines + "more\n")

    # As docs/how-to/failed-posts.md has it.
    site.git("add", "content")
    site.git("pull", "-q", "--rebase", "--autostash", "origin", "main")
    site.git("reset", "-q")
    site.command("retry", "b")
    assert_published(site, site.run_once(**DELAYS), "b")
    assert [subject for _, subject in site.remote_log()] == [
        "Publish b",
        "Theirs",
        f"Publish {post}",
        "Start the site",
    ]
    left = "M content/posts/welcome.md" if edited else ""
    assert site.git("status", "--porcelain") == left


def theirs(site: Site, text: str) -> None:
    """Somebody else pushes this version of the post."""
    other = site.root / "other"
    site.git("clone", "-q", str(site.remote), str(other), cwd=site.root)
    (other / "content/posts/welcome.md").write_text(text)
    site.git("commit", "-qam", "Theirs", cwd=other)
    site.git("push", "-q", "origin", "HEAD:main", cwd=other)


@pytest.mark.parametrize("text", ["git switch -q drafts", "git switch -q --detach drafts"])
def test_a_branch_that_is_switched_right_before_it_moves_keeps_its_index_and_its_files(
    drafts: Site, text: str
) -> None:
    welcome = drafts.worktree / "content/posts/welcome.md"
    theirs(drafts, "# Theirs\n")
    save(drafts, "a")
    result = drafts.run_once(PATH=just_before(drafts, "ls-files -z -t", text))
    assert_published(drafts, result)
    (told,) = result.of("warning")
    assert "They follow by themselves once it is again: git switch main" in told["error"]
    assert welcome.read_text() == "# A draft, not to be published\n"
    assert drafts.git("diff", "--cached", "--name-only") == ""
    drafts.git("switch", "-q", "main")
    drafts.run_once()
    assert welcome.read_text() == "# Theirs\n"
    assert drafts.git("rev-parse", "main") == drafts.remote_log()[0][0]
    assert drafts.git("diff", "--cached", "--name-only") == "", "a person's next commit takes nothing back"
    assert (drafts.worktree / "content/posts/a.md").read_text() == "a\n"


def test_a_dry_run_that_loses_its_branch_takes_nothing_of_the_post_for_published(site: Site) -> None:
    welcome = site.write_post("content/posts/welcome.md", LINES)
    site.save("welcome", ["content/posts/welcome.md"])
    assert_published(site, site.run_once(), "welcome")
    site.git("branch", "drafts")
    theirs(site, LINES + "theirs\n")
    welcome.write_text("mine\n" + LINES)
    site.save("mine", ["content/posts/welcome.md"])
    dry = {"BRITER_WORKER_DRY_RUN": "true", "PATH": just_before(site, "push", "git switch -q drafts")}
    seen = site.git("rev-parse", "origin/main")
    assert_put_off(site, site.run_once(**dry), Failure.LOST_RACE, slug="mine", kind=Kind.TRANSIENT)
    assert site.git("rev-parse", "origin/main") == seen, "the remote has nothing of a dry run's"
    site.git("switch", "-q", "main")
    site.command("retry", "mine")
    assert site.run_once().of("published")
    assert site.remote_file("content/posts/welcome.md") == "mine\n" + LINES + "theirs\n"
    assert welcome.read_text() == "mine\n" + LINES + "theirs\n"
