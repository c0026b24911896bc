"""What an adapter or BRITER_EXCLUDED_PATHS excludes is never published; a cluster: test_cluster_drains."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
from outcomes import assert_published, assert_refused

from briter_worker.errors import FailureCode

if TYPE_CHECKING:
    from sites import Site

PAGE = "content/2_notes/hello"
POST = {f"{PAGE}/note.txt": "Title: Hello\n", f"{PAGE}/cover.jpg.txt": "Alt: A cover\n"}
EXCLUDED = (
    *("_changes/note.txt", "_changes/note.de.txt", ".lock", ".DS_Store", "._note.txt"),
    *("note.txt~", ".note.txt.swp", "#note.txt#", "sub/_changes/image.png.txt"),
)


def test_a_kirby_5_page_is_published_without_its_unpublished_edits(site: Site) -> None:
    for path, text in POST.items():
        site.write_post(path, text)
    for name in EXCLUDED:
        site.write_post(f"{PAGE}/{name}", "not yet\n")
    (site.worktree / PAGE / "_changes" / "link").symlink_to("/etc/passwd")
    (site.worktree / PAGE / ".#note.txt").symlink_to("author@host.1234")
    site.save("hello", [PAGE])
    result = site.run_once(BRITER_ADAPTER="kirby")
    assert_published(site, result, "hello")
    assert result.of("published")[0].get("rejectedPaths", []) == []
    tree = site.git("ls-tree", "-r", "--name-only", "main", PAGE, cwd=site.remote)
    assert sorted(tree.splitlines()) == sorted(POST)


@pytest.mark.parametrize("declared", ["content/2_notes", f"{PAGE}/_changes", f"{PAGE}/_changes/note.txt"])
def test_an_excluded_file_that_git_has_stays_on_the_branch_as_it_is(site: Site, declared: str) -> None:
    for name in ("_changes/note.txt", "_changes/other.txt", ".lock", "note.txt"):
        site.write_post(f"{PAGE}/{name}", "old\n")
    site.git("add", "--all", "--force")
    site.git("commit", "--quiet", "--message=All of it")
    site.git("push", "--quiet")
    before = site.git("rev-parse", f"main:{PAGE}/_changes", cwd=site.remote)
    (site.worktree / PAGE / ".lock").unlink()
    site.write_post(f"{PAGE}/_changes/note.txt", "new\n")
    (site.worktree / PAGE / "_changes/other.txt").unlink()
    if declared == f"{PAGE}/_changes":
        shutil.rmtree(site.worktree / declared)
    site.write_post(f"{PAGE}/note.txt", "new\n")
    site.save("hello", [f"{PAGE}/note.txt", declared])
    assert_published(site, site.run_once(BRITER_ADAPTER="kirby"), "hello")
    assert site.git("rev-parse", f"main:{PAGE}/_changes", cwd=site.remote) == before
    assert site.remote_file(f"{PAGE}/.lock") == "old\n"
    assert site.remote_file(f"{PAGE}/note.txt") == "new\n"


@pytest.mark.parametrize("path", ["", "_changes", "_changes/", "_changes/note.txt", ".lock", "note.txt~"])
def test_an_excluded_path_alone_is_refused_by_the_name_of_its_pattern(site: Site, path: str) -> None:
    for name in EXCLUDED if path else ("_changes/note.txt",):
        site.write_post(f"{PAGE}/{name}", "not yet\n")
    site.save("hello", [f"{PAGE}/{path}"])
    reason = assert_refused(site, site.run_once(BRITER_ADAPTER="kirby"), FailureCode.NO_PATHS, slug="hello")
    pattern = {".lock": ".lock", "note.txt~": "*~"}.get(path, "_changes/")
    assert f"the pattern {pattern} excludes it: see BRITER_EXCLUDED_PATHS" in reason
    assert "under content/ that are no links and that nothing excludes" in site.job("hello")["fix"]


@pytest.mark.parametrize("layer", ["environment", "config.json"])
def test_own_patterns_follow_the_rules_of_gitignore_and_come_after_the_adapters(
    site: Site, layer: str
) -> None:
    patterns = ["drafts/", "/content/posts/private.md", "*.bak", "!keep.bak", "!.DS_Store"]
    for name in ("a.md", "private.md", "sub/private.md", "drafts/b.md", "c.bak", "keep.bak", ".DS_Store"):
        site.write_post(f"content/posts/{name}", "x\n")
    site.save("all", ["content/posts"])
    if layer == "config.json":
        (site.queue.parent / "config.json").write_text(json.dumps({"excludedPaths": patterns}))
        result = site.run_once()
    else:
        result = site.run_once(BRITER_EXCLUDED_PATHS=",".join(patterns))
    assert_published(site, result, "all")
    tree = site.git("ls-tree", "-r", "--name-only", "main", "content/posts", cwd=site.remote)
    names = {path.removeprefix("content/posts/") for path in tree.splitlines()}
    assert names == {"welcome.md", "a.md", "sub/private.md", "keep.bak", ".DS_Store"}


def test_a_pattern_that_does_not_parse_stops_the_start(site: Site) -> None:
    result = site.run_once(BRITER_EXCLUDED_PATHS="drafts/,!")
    assert result.returncode == 2
    said = 'BRITER_EXCLUDED_PATHS is "drafts/,!"; accepted: a list of patterns as in .gitignore'
    assert said in result.stderr
