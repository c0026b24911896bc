"""A declared folder is published as it is, whatever else the job declares."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from outcomes import assert_published, assert_refused

from briter_worker.errors import FailureCode

if TYPE_CHECKING:
    from sites import Site


def test_a_refused_folder_above_does_not_keep_deletions_below_it_from_being_published(site: Site) -> None:
    gone = site.write_post("public/uploads/old.txt", "old\n")
    site.git("add", "--all")
    site.git("commit", "--quiet", "--message=An upload")
    site.git("push", "--quiet")
    gone.unlink()
    site.write_post("public/uploads/new.txt", "new\n")
    site.save("uploads", ["public", "public/uploads"])

    result = site.run_once(BRITER_ADAPTER="git-target")

    assert result.of("published")[0]["rejectedPaths"] == ["public"]
    assert site.remote_file("public/uploads/new.txt") == "new\n"
    assert site.remote_file("public/uploads/old.txt") is None


def test_a_file_that_takes_a_folders_place_is_a_file_where_modes_are_not_to_be_trusted(site: Site) -> None:
    old = site.write_post("content/posts/note/index.md", "old\n")
    site.git("add", "--all")
    site.git("commit", "--quiet", "--message=A note in a folder of its own")
    site.git("push", "--quiet")
    site.git("config", "core.fileMode", "false")
    old.unlink()
    old.parent.rmdir()
    site.write_post("content/posts/note", "new\n")
    site.save("note", ["content/posts/note"])

    result = site.run_once()

    assert result.names() == ["worker-started", "start", "published", "worker-stopped"]
    assert site.git("ls-tree", "main", "content/posts/note", cwd=site.remote).startswith("100644 blob ")
    site.git("fsck", "--strict", cwd=site.remote)


@pytest.mark.parametrize("why", ["on hold", "left out"])
def test_a_file_does_not_take_the_place_of_a_folder_in_which_another_job_or_person_keeps_something(
    site: Site, why: str
) -> None:
    for name in ("kept", "other"):
        site.write_post(f"content/posts/note/{name}.md", f"{name}\n")
    site.git("add", "content")
    site.git("commit", "--quiet", "--message=A note in a folder of its own")
    site.git("push", "--quiet")
    if why == "on hold":
        site.save("kept", ["content/posts/note/kept.md"], scheduledFor="2999-01-01")
    else:
        site.git("update-index", "--skip-worktree", "content/posts/note/kept.md")
    shutil.rmtree(site.worktree / "content/posts/note")
    site.write_post("content/posts/note", "A file now\n")
    site.write_post("content/posts/b.md", "B\n")
    site.save("note", ["content/posts/note"])
    site.save("b", ["content/posts/b.md", "content/posts/note"])
    result = site.run_once()
    reason = assert_refused(site, result, FailureCode.NO_PATHS, slug="note")
    assert "a folder in which content/posts/note/kept.md stays" in reason
    assert_published(site, result, "b")
    assert result.of("published")[0]["rejectedPaths"] == ["content/posts/note"]
    assert site.remote_file("content/posts/note/kept.md") == "kept\n"
    assert site.remote_file("content/posts/note/other.md") == "other\n"


def test_a_deletion_is_published_though_a_file_cannot_take_the_folders_place(site: Site) -> None:
    for name in ("kept", "gone", "sub/gone", "stays"):
        site.write_post(f"content/posts/note/{name}.md", f"{name}\n")
    site.git("add", "content")
    site.git("commit", "--quiet", "--message=A note in a folder of its own")
    site.git("push", "--quiet")
    site.save("kept", ["content/posts/note/kept.md"], scheduledFor="2999-01-01")
    shutil.rmtree(site.worktree / "content/posts/note")
    site.write_post("content/posts/note", "A file now\n")
    site.save("note", ["content/posts/note", "content/posts/note/gone.md", "content/posts/note/sub"])
    result = site.run_once()
    assert_published(site, result, "note")
    assert result.of("published")[0]["rejectedPaths"] == ["content/posts/note"]
    log = site.git("show", "--name-status", "--format=", "main", cwd=site.remote)
    assert log.split("\n") == ["D\tcontent/posts/note/gone.md", "D\tcontent/posts/note/sub/gone.md"]


@pytest.mark.parametrize("where", ["here", "on the remote"])
def test_a_file_does_not_take_the_place_of_a_folder_in_which_a_submodule_is(site: Site, where: str) -> None:
    colleague = site.root / "colleague"
    site.git("clone", "--quiet", str(site.remote), str(colleague))
    module = f"160000,{'1' * 40},content/posts/note/module"
    site.git("update-index", "--add", "--cacheinfo", module, cwd=colleague)
    site.git("commit", "--quiet", "--message=A module", cwd=colleague)
    site.git("push", "--quiet", cwd=colleague)
    if where == "here":
        site.git("pull", "--quiet")
        (site.worktree / "content/posts/note/module").rmdir()
        (site.worktree / "content/posts/note").rmdir()
    site.write_post("content/posts/note", "A file now\n")
    site.save("note", ["content/posts/note"])
    failure = FailureCode.NO_PATHS if where == "here" else FailureCode.CONFLICT
    reason = assert_refused(site, site.run_once(), failure, slug="note")
    assert "content/posts/note" in reason
    tree = site.git("ls-tree", "-r", "main", "content/posts/note", cwd=site.remote)
    assert tree.startswith("160000 commit "), "its author declared nothing of the module"


def test_a_folder_whose_only_post_is_scheduled_waits_for_it_and_is_not_refused(site: Site) -> None:
    site.write_post("content/notes/later.md", "later\n")
    (site.worktree / "content/notes/link.md").symlink_to("later.md")
    site.save("later", ["content/notes/later.md"], scheduledFor="2999-01-01")
    site.save("notes", ["content/notes"])

    result = site.run_once()

    assert not result.of("nopaths") + result.of("nochange"), result.stdout
    assert sorted(job["slug"] for job in site.jobs()) == ["later", "notes"]
    assert "scheduled" in site.job("notes")["lastError"]
    assert site.job("notes")["attempts"] == 0


@pytest.mark.parametrize("other", ["content/posts/empty/../../b", "content/posts/empty/.gitmodules"])
def test_an_empty_folder_is_no_more_refused_for_what_else_its_job_declares(site: Site, other: str) -> None:
    (site.worktree / "content/posts/empty").mkdir()
    site.save("a", ["content/posts/empty", other])
    result = site.run_once()
    assert result.of("nochange")[0]["rejectedPaths"] == [other]
    assert not result.of("nopaths")
