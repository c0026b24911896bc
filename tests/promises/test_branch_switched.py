"""Somebody switches branches, commits or begins a merge just after the worker has looked."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest
from outcomes import assert_published, assert_put_off, save
from sites import eventually, program

from briter_worker.errors import FailureCode

if TYPE_CHECKING:
    from pathlib import Path

    from sites import Site


AS_A_PERSON = "unset $(env | sed -n 's/^\\(GIT_[A-Z_]*\\)=.*/\\1/p')"
"""Not with the repository and the index of the git that runs the program."""


@pytest.fixture
def drafts(site: Site) -> Site:
    """A site with a branch `drafts` that has another version of a published post."""
    site.write_post(".gitattributes", "*.bin filter=person\n")
    site.commit_all("Attributes")
    site.git("switch", "-q", "-c", "drafts")
    site.write_post("content/posts/welcome.md", "# A draft, not to be published\n")
    site.git("commit", "-qam", "Draft")
    site.git("switch", "-q", "main")
    return site


def while_staging(site: Site, text: str) -> Path:
    """A person does this while the posts are being read: a filter is run in the middle of it."""
    person = "git -c user.name=P -c user.email=p@example.org"
    does = text.replace("git ", f"{person} ")
    file = program(site.root / "person", f"({AS_A_PERSON}; cd {site.worktree}; {does}) >&2; cat")
    site.git("config", "filter.person.clean", str(file))
    site.write_post("content/posts/a.bin", "a\n")
    site.save("a", ["content/posts"])
    return file


def while_pushing(site: Site, text: str) -> None:
    """A person does this while the remote has not answered yet."""
    site.hook(f"{AS_A_PERSON}; cd {site.worktree}; {text}; rm {site.remote}/hooks/pre-receive")


@pytest.mark.parametrize(
    ("text", "failure", "back"),
    [
        ("git switch -q drafts", FailureCode.WRONG_BRANCH, "switch -q main"),
        ("git switch -q --detach drafts", FailureCode.WRONG_BRANCH, "switch -q main"),
        ("git switch -q drafts; sleep 0.1; git switch -q main", FailureCode.WRONG_BRANCH, ""),
        ("git merge --no-commit --no-ff drafts", FailureCode.UNFINISHED, "merge --abort"),
    ],
    ids=["switched", "detached", "there and back", "a merge begun"],
)
def test_what_was_read_from_another_branch_is_never_published(
    drafts: Site, text: str, failure: FailureCode, back: str
) -> None:
    person = while_staging(drafts, text)
    before = drafts.git("rev-parse", "main", "drafts")
    assert_put_off(drafts, drafts.run_once(), failure)
    assert drafts.job("a")["fix"]
    assert [subject for _, subject in drafts.remote_log()] == ["Attributes", "Start the site"]
    assert drafts.git("rev-parse", "main", "drafts") == before
    program(person, "cat")
    if back:
        drafts.git(*back.split())
    drafts.command("retry", "a")
    assert_published(drafts, drafts.run_once(), attempt=1)
    assert drafts.remote_file("content/posts/welcome.md") == "# Welcome\n"


def test_a_branch_that_is_switched_during_the_push_keeps_its_index_and_its_files(drafts: Site) -> None:
    drafts.push_elsewhere({"content/posts/welcome.md": "# Theirs\n"})
    save(drafts, "a")
    tip, main = drafts.git("rev-parse", "drafts", "main").split()
    while_pushing(drafts, "git switch -q drafts")
    result = drafts.run_once()
    assert_published(drafts, result)
    assert "drafts is checked out" in result.of("warning")[0]["error"]
    assert drafts.git("rev-parse", "drafts", "HEAD", "main") == f"{tip}\n{tip}\n{main}"
    assert drafts.git("diff", "--cached", "--name-only") == ""
    assert drafts.git("status", "--porcelain") == "?? content/posts/a.md"
    drafts.git("switch", "-q", "main")
    assert not drafts.run_once().of("warning")
    assert drafts.git("rev-parse", "main") == drafts.remote_log()[0][0]
    assert (drafts.worktree / "content/posts/welcome.md").read_text() == "# Theirs\n"
    assert drafts.git("status", "--porcelain") == ""


@pytest.mark.parametrize("edited", [False, True], ids=["", "edited again since"])
@pytest.mark.parametrize("post", ["a", "welcome"], ids=["a new post", "an edited one"])
def test_a_persons_commit_during_the_push_stops_no_post_and_goes_out_by_pull(
    site: Site, post: str, *, edited: bool
) -> None:
    lines = "".join(f"line {number}\n" for number in range(9))
    file = site.write_post(f"content/posts/{post}.md", lines)
    site.save(post, [f"content/posts/{post}.md"])
    person = "git -c user.name=P -c user.email=p@example.org"
    while_pushing(site, f"{person} commit -q --allow-empty -m Theirs")
    result = site.run_once()
    assert_published(site, result, post)
    assert "main has commits that the remote lacks" in result.of("warning")[0]["error"]
    assert site.git("log", "-1", "--format=%s", "main") == "Theirs"
    save(site, "b")
    assert_published(site, site.run_once(), "b")
    if edited:
        file.write_text(lines + "more\n")

    assert site.command("pull", "--rebase", "--push").returncode == 0
    subjects = [subject for _, subject in site.remote_log()]
    assert subjects == ["Theirs", "Publish b", f"Publish {post}", "Start the site"]
    assert site.git("rev-parse", "main") == site.remote_log()[0][0]
    assert file.read_text() == lines + ("more\n" if edited else "")
    assert site.git("status", "--porcelain") == (f"M content/posts/{post}.md" if edited else "")


def test_a_slow_add_that_holds_the_index_takes_no_post_back(site: Site, tmp_path: Path) -> None:
    go, here = tmp_path / "go", tmp_path / "here"
    site.git("config", "filter.slow.clean", f"touch {here}; until [ -e {go} ]; do sleep 0.02; done; cat")
    site.write_post(".gitattributes", "*.slow filter=slow\n")
    site.commit_all("Attributes")
    site.write_post("photo.slow", "mine")
    add = os.posix_spawn(
        str(shutil.which("git")), ["git", "-C", str(site.worktree), "add", "photo.slow"], os.environ
    )
    eventually(here.exists)
    save(site, "a")
    done = site.run_once()
    assert_published(site, done)
    assert "another git command holds the index" in done.of("warning")[0]["error"]
    go.touch()
    assert os.waitpid(add, 0)[1] == 0
    site.git("commit", "-qm", "Photo")
    assert "content/posts/a.md" not in site.git("show", "--format=", "--name-only", "main")
    assert site.command("pull", "--rebase", "--push").returncode == 0
    assert site.remote_file("content/posts/a.md") == "a\n"
    assert site.remote_file("photo.slow") == "mine"
    assert site.git("status", "--porcelain") == ""
