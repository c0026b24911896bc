"""A declared folder is published as it is, whatever else the job declares."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from outcomes import assert_published, assert_refused

from briter_worker.errors import FailureCode

if TYPE_CHECKING:
    from sites import Site


@pytest.mark.parametrize("why", ["on hold", "left out"])
def test_a_file_does_not_take_the_place_of_a_folder_in_which_another_job_or_person_keeps_something(
    site: Site, why: str
) -> None:
    for name in ("kept", "other"):
        site.write_post(f"content/posts/note/{name}.md", f"{name}\n")
    site.commit_all("A note in a folder of its own")
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
    site.save("file", ["content/notes/later.md"])
    assert site.run_once().of("published"), "declared by itself"
