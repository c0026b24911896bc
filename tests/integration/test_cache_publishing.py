"""Publishing from a cache of what jobs brought along."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from caches import LINES, NOW, Cluster, blobs_here, named, small
from machine import provide

from briter_worker.errors import Failure

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return small(tmp_path)


@pytest.mark.parametrize("filters", [True, False], ids=["filters", "no-filters"])
def test_what_a_job_brought_is_published_from_a_fresh_cache(cluster: Cluster, *, filters: bool) -> None:
    cluster.git("config", "uploadpack.allowFilter", str(filters).lower())
    a = cluster.save("a", {"content/posts/a.md": "A\n"})
    outcome = cluster.publish(a)["a"]
    assert (outcome.failure, outcome.commit) == (None, cluster.tip())
    assert cluster.file("content/posts/a.md") == "A\n"
    assert cluster.file("content/posts/b.md") == LINES
    assert cluster.log() == ["Publish a", "Start the site"]
    assert cluster.git("show", "-s", "--format=%an %cn", "main") == "Briter Worker Briter Worker"
    assert (named(LINES.encode()) in blobs_here(cluster)) is not filters


def test_every_job_of_a_batch_becomes_its_own_commit_by_one_push(cluster: Cluster) -> None:
    cluster.publish(*(cluster.save(f"p{n}", {f"content/posts/{n}.md": f"{n}\n"}) for n in range(5)))
    assert cluster.log() == [*(f"Publish p{n}" for n in (4, 3, 2, 1, 0)), "Start the site"]
    assert len(cluster.plans) == 1


def test_a_deleted_post_is_deleted(cluster: Cluster) -> None:
    cluster.publish(cluster.save("welcome", {"content/posts/welcome.md": None}))
    assert cluster.file("content/posts/welcome.md") is None
    assert cluster.file("content/posts/b.md") == LINES


def test_a_folder_is_published_with_what_is_gone_from_it(cluster: Cluster) -> None:
    cluster.person({"content/posts/x/old.md": "old\n", "content/posts/x/kept.md": "kept\n"})
    request = cluster.save(
        "x",
        {"content/posts/x/kept.md": "kept\n", "content/posts/x/new.md": "new\n"},
        folders=["content/posts/x"],
    )
    cluster.publish(request)
    names = cluster.git("ls-tree", "-r", "--name-only", "main", "content/posts").splitlines()
    assert names == [f"content/posts/{name}" for name in ("b.md", "welcome.md", "x/kept.md", "x/new.md")]


def test_a_folder_that_is_gone_is_deleted_with_all_that_was_in_it(cluster: Cluster) -> None:
    cluster.person({"content/posts/x/a.md": "a\n", "content/posts/x/y/b.md": "b\n"})
    cluster.publish(cluster.save("x", {"content/posts/x": None}))
    assert cluster.git("ls-tree", "main", "content/posts/x") == ""


def test_a_folder_takes_nothing_away_that_its_author_never_had(cluster: Cluster) -> None:
    cluster.publish(cluster.save("c", {"content/x/c.md": "c\n"}))
    cluster.person({"content/x/theirs.md": "theirs\n", "content/x/b.md": "b\n"})
    # The author's git has seen b, which is gone, and a; the worker has published c; theirs is nobody's here.
    bases = {"content/x/a.md": None, "content/x/b.md": named(b"b\n")}
    files = {"content/x/a.md": "a\n", "content/x/b.md": None}
    cluster.publish(cluster.save("x", files, folders=["content/x"], bases=bases))
    names = cluster.git("ls-tree", "-r", "--name-only", "main", "content/x").splitlines()
    assert names == ["content/x/a.md", "content/x/theirs.md"]


def test_what_a_job_declares_and_did_not_bring_is_left_alone(cluster: Cluster) -> None:
    request = cluster.save(
        "a", {"content/posts/a.md": "A\n"}, paths=["content/posts/a.md", "content/posts/b.md"]
    )
    cluster.publish(request)
    assert cluster.file("content/posts/a.md") == "A\n"
    assert cluster.file("content/posts/b.md") == LINES


def test_a_folder_never_carries_what_a_post_on_hold_declares(cluster: Cluster) -> None:
    request = cluster.save(
        "x",
        {"content/posts/x/now.md": "now\n", "content/posts/x/later.md": "later\n"},
        folders=["content/posts/x"],
    )
    cluster.publish(request, held=["content/posts/x/later.md"])
    assert cluster.file("content/posts/x/now.md") == "now\n"
    assert cluster.file("content/posts/x/later.md") is None


def test_the_mode_that_was_saved_is_published(cluster: Cluster) -> None:
    cluster.publish(cluster.save("a", {"content/a.sh": "#!/bin/sh\n"}, mode="100755"))
    assert cluster.git("ls-tree", "main", "content/a.sh").startswith("100755 ")


def test_what_is_not_allowed_is_refused_with_the_reason_and_never_written(cluster: Cluster) -> None:
    request = cluster.save(
        "a",
        {"content/a.md": "A\n", "../../escaped.md": "no\n", "content/.git/config": "no\n", "x.md": "no\n"},
    )
    outcome = cluster.publish(request)["a"]
    assert outcome.commit
    assert set(outcome.rejected_paths) == {"../../escaped.md", "content/.git/config", "x.md"}
    assert cluster.git("show", "--format=", "--name-only", "main") == "content/a.md"
    assert not list(cluster.root.rglob("escaped.md"))


def test_a_job_none_of_whose_paths_is_allowed_is_refused(cluster: Cluster) -> None:
    assert cluster.publish(cluster.save("a", {"x.md": "no\n"}))["a"].failure is Failure.NO_PATHS


def test_what_is_there_already_changes_nothing(cluster: Cluster) -> None:
    outcome = cluster.publish(cluster.save("b", {"content/posts/b.md": LINES}))["b"]
    assert (outcome.failure, outcome.commit) == (None, None)
    assert cluster.log() == ["Start the site"]


def test_the_posts_files_do_not_lie_about_when_the_drain_is_over(cluster: Cluster) -> None:
    cluster.publish(cluster.save("a", {"content/posts/a.md": "A\n"}))
    assert os.listdir(cluster.repository()) == [".git"]  # noqa: PTH208


def test_a_content_that_is_not_what_was_saved_is_not_published(cluster: Cluster) -> None:
    torn = cluster.save("torn", {"content/torn.md": "all of it\n"})
    whole = cluster.save("whole", {"content/whole.md": "whole\n"})
    cluster.database.contents[named(b"all of it\n")] = b"all o"
    outcomes = cluster.publish(torn, whole)
    assert outcomes["torn"].failure is Failure.INTERNAL
    assert cluster.log() == ["Publish whole", "Start the site"]


def test_of_two_versions_in_a_batch_the_newer_is_published(cluster: Cluster) -> None:
    new = cluster.save("new", {"content/a.md": "new\n"})
    old = cluster.save("old", {"content/a.md": "old\n"}, at=NOW - 5)
    cluster.publish(old, new)
    assert cluster.file("content/a.md") == "new\n"


def test_what_a_later_save_of_the_batch_deleted_with_its_folder_is_not_brought_back(cluster: Cluster) -> None:
    cluster.person({"content/x/b.md": "b\n"})
    old = cluster.save("old", {"content/x/a.md": "a\n", "content/kept.md": "kept\n"})
    cluster.publish(old, cluster.save("gone", {"content/x": None}))
    assert cluster.git("ls-tree", "-r", "--name-only", "main", "content/x") == ""
    assert cluster.file("content/kept.md") == "kept\n"


def test_an_older_version_never_takes_the_place_of_a_newer_one_that_is_published(cluster: Cluster) -> None:
    old = cluster.save("old", {"content/a.md": "old\n", "content/only.md": "only\n"})
    cluster.publish(cluster.save("new", {"content/a.md": "new\n"}))
    outcome = cluster.publish(old)["old"]
    assert outcome.failure is None
    assert cluster.file("content/a.md") == "new\n"
    assert cluster.file("content/only.md") == "only\n"


def test_an_older_deletion_never_takes_a_newer_version_away(cluster: Cluster) -> None:
    gone = cluster.save("gone", {"content/a.md": None})
    folder = cluster.save("folder", {"content/x/1.md": "1\n"}, folders=["content/x"])
    cluster.publish(cluster.save("new", {"content/a.md": "new\n", "content/x/2.md": "2\n"}))
    cluster.publish(gone, folder)
    assert cluster.file("content/a.md") == "new\n"
    assert cluster.file("content/x/2.md") == "2\n"
    assert cluster.file("content/x/1.md") == "1\n"


def test_line_ends_are_as_the_sites_attributes_want_them(cluster: Cluster) -> None:
    cluster.person({".gitattributes": "*.md text eol=lf\n", "content/posts/.gitattributes": "*.bin binary\n"})
    first = cluster.save("a", {"content/posts/a.md": "A\r\nB\r\n", "content/posts/a.bin": "1\r\n"})
    cluster.publish(first)
    assert cluster.file("content/posts/a.md") == "A\nB\n"
    assert cluster.file("content/posts/a.bin") == "1\r\n"
    # What it started from is what git made of it, so that the next edit is an edit of that.
    cluster.publish(cluster.save("a", {"content/posts/a.md": "A\r\nB\r\nC\r\n"}), host="two")
    assert cluster.file("content/posts/a.md") == "A\nB\nC\n"


def test_large_files_are_stored_by_lfs(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    provide("git-lfs", package="git-lfs")
    config = cluster.root / "gitconfig"
    config.write_text('[filter "lfs"]\n\tclean = git-lfs clean -- %f\n\tprocess = git-lfs filter-process\n')
    config.write_text(config.read_text() + "\tsmudge = git-lfs smudge -- %f\n\trequired = true\n")
    monkeypatch.delenv("GIT_CONFIG_GLOBAL")
    home = cluster.root / "home"
    home.mkdir()
    config.rename(home / ".gitconfig")
    monkeypatch.setenv("HOME", str(home))
    cluster.person({".gitattributes": "*.jpg filter=lfs diff=lfs merge=lfs -text\n"})
    cluster.url = f"file://{cluster.remote}"
    cluster.publish(cluster.save("a", {"content/a.jpg": b"\xff\xd8" + b"x" * 1000}))
    assert str(cluster.file("content/a.jpg")).startswith("version https://git-lfs.github.com/spec/v1\n")
    stored = [path for path in (cluster.remote / "lfs" / "objects").rglob("*") if path.is_file()]
    assert [path.stat().st_size for path in stored] == [1002]


def test_what_the_site_ignores_is_refused_unless_git_has_it(cluster: Cluster) -> None:
    cluster.person({"content/tracked.tmp": "tracked\n"})
    cluster.person({".gitignore": "*.tmp\n", "content/posts/.gitignore": "draft-*\n"})
    outcomes = cluster.publish(
        cluster.save("ignored", {"content/a.tmp": "no\n"}),
        cluster.save("draft", {"content/posts/draft-a.md": "no\n"}),
        cluster.save("tracked", {"content/tracked.tmp": "new\n"}),
        cluster.save("folder", {"content/y/a.md": "a\n", "content/y/b.tmp": "no\n"}, folders=["content/y"]),
    )
    assert outcomes["ignored"].failure is outcomes["draft"].failure is Failure.NO_PATHS
    assert cluster.file("content/tracked.tmp") == "new\n"
    assert cluster.git("ls-tree", "--name-only", "main", "content/y/") == "content/y/a.md"


def test_of_two_versions_in_a_batch_the_newer_is_published_whichever_comes_first(cluster: Cluster) -> None:
    new = cluster.save("new", {"content/x/a.md": "new\n"}, folders=["content/x"])
    files = {"content/x/a.md": "old\n", "content/x/b.md": "gone since\n"}
    old = cluster.save("old", files, folders=["content/x"], at=NOW - 5)
    cluster.publish(new, old)
    assert cluster.file("content/x/a.md") == "new\n"
    assert cluster.file("content/x/b.md") is None


def test_of_a_file_and_a_folder_of_one_name_the_newer_is_published(cluster: Cluster) -> None:
    folder = cluster.save("folder", {"content/x/y.md": "below\n"})
    file = cluster.save("file", {"content/x": "a file\n"})
    cluster.publish(folder, file)
    assert cluster.file("content/x") == "a file\n"


def test_a_content_larger_than_allowed_is_refused_before_all_of_it_is_there(cluster: Cluster) -> None:
    cluster.max_file_bytes = 10
    large = cluster.save("large", {"content/large.md": b"x" * (3 << 20)})
    outcomes = cluster.publish(large, cluster.save("a", {"content/a.md": "A\n"}))
    assert outcomes["large"].failure is Failure.TOO_LARGE
    assert cluster.log() == ["Publish a", "Start the site"]


def test_what_a_removed_rule_ignored_is_published_with_its_removal(cluster: Cluster) -> None:
    cluster.person({"content/.gitignore": "*.tmp\n"})
    cluster.publish(cluster.save("a", {"content/.gitignore": None, "content/a.tmp": "A\n"}))
    assert cluster.file("content/.gitignore") is None
    assert cluster.file("content/a.tmp") == "A\n"


def test_a_start_that_names_no_version_is_taken_for_unknown(cluster: Cluster) -> None:
    path = "content/posts/b.md"
    outcome = cluster.publish(cluster.save("b", {path: LINES + "x\n"}, bases={path: "HEAD; rm -rf /"}))["b"]
    assert outcome.failure is None
    assert cluster.file(path) == LINES + "x\n"
