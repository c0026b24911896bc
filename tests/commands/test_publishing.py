"""A saved post reaches the remote, exactly once, and nothing else does."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
from outcomes import save

if TYPE_CHECKING:
    from sites import Site


def changed_by(site: Site, commit: str) -> set[str]:
    """The paths that a commit on the remote touched."""
    out = site.git("diff-tree", "--no-commit-id", "--name-only", "-r", "-z", commit, cwd=site.remote)
    return set(out.strip("\0").split("\0"))


def test_a_saved_post_becomes_one_commit_with_its_message(site: Site) -> None:
    file = site.write_post("content/posts/a.md", "A\n")
    before = file.stat()
    site.save("a", ["content/posts/a.md"], message="Ein Gruß,\n\nmit zwei Zeilen")

    result = site.run_once()

    assert result.returncode == 0
    assert result.names() == ["worker-started", "start", "published", "worker-stopped"]
    commit, subject = site.remote_log()[0]
    assert subject == "Ein Gruß,"
    assert result.of("published")[0]["commit"] == commit
    assert site.git("log", "-1", "--format=%B", commit, cwd=site.remote) == "Ein Gruß,\n\nmit zwei Zeilen"
    assert changed_by(site, commit) == {"content/posts/a.md"}
    assert site.jobs() == []
    assert site.git("status", "--porcelain") == ""
    assert site.git("rev-parse", "main", "origin/main").split() == [commit, commit]
    assert (file.stat().st_ino, file.stat().st_ctime_ns) == (before.st_ino, before.st_ctime_ns), "left alone"


def test_the_author_is_the_writers_and_the_committer_the_workers(site: Site) -> None:
    site.save_post("a", "A\n", author={"name": "Ada Lovelace", "email": "ada@example.org"})
    site.run_once()
    who = site.git("log", "-1", "--format=%an <%ae> / %cn <%ce>", "main", cwd=site.remote)
    assert who == "Ada Lovelace <ada@example.org> / Briter Worker <briter-worker@localhost>"


def test_many_jobs_are_one_commit_each(site: Site) -> None:
    for number in range(25):
        site.write_post(f"content/posts/{number}.md", f"{number}\n")
        site.save(f"p{number}", [f"content/posts/{number}.md"])
    result = site.run_once()
    assert len(result.of("published")) == 25
    assert len(site.remote_log()) == 26
    for event in result.of("published"):
        assert changed_by(site, event["commit"]) == {f"content/posts/{event['slug'][1:]}.md"}


def test_what_others_staged_or_changed_stays_as_it_was(site: Site) -> None:
    site.write_post("content/posts/staged.md", "staged\n")
    site.git("add", "content/posts/staged.md")
    site.write_post("content/posts/welcome.md", "edited, not saved\n")
    save(site, "a")

    site.run_once()

    assert changed_by(site, site.remote_log()[0][0]) == {"content/posts/a.md"}
    status = site.git("status", "--porcelain").splitlines()
    assert sorted(map(str.strip, status)) == ["A  content/posts/staged.md", "M content/posts/welcome.md"]


def test_a_deleted_post_is_deleted_on_the_remote(site: Site) -> None:
    (site.worktree / "content/posts/welcome.md").unlink()
    site.save("welcome", ["content/posts/welcome.md"])
    assert site.run_once().of("published")
    assert site.remote_file("content/posts/welcome.md") is None
    assert site.git("status", "--porcelain") == ""


def test_a_folder_carries_all_under_it_with_deletions(site: Site) -> None:
    site.write_post("content/posts/trip/index.md", "trip\n")
    site.write_post("content/posts/trip/old.png", "old\n")
    site.save("trip", ["content/posts/trip/"])
    site.run_once()
    (site.worktree / "content/posts/trip/old.png").unlink()
    site.write_post("content/posts/trip/deep/new.png", "new\n")
    site.save("trip", ["content/posts/trip"])
    result = site.run_once()
    assert changed_by(site, result.of("published")[0]["commit"]) == {
        "content/posts/trip/old.png",
        "content/posts/trip/deep/new.png",
    }


@pytest.mark.parametrize(
    "name",
    [
        "Grüße aus Köln.md",
        "日本語.md",
        'with "quotes".md',
        "a*b?[c].md",
        "-dash.md",
        ":(top)x.md",
        "é-nfd.md",
    ],
)
def test_odd_names_are_published_as_they_are(site: Site, name: str) -> None:
    path = f"content/posts/{name}"
    site.write_post(path, "odd\n")
    site.write_post("content/posts/aXbYc.md", "would match a glob\n")
    site.save("odd", [path])
    result = site.run_once()
    assert changed_by(site, result.of("published")[0]["commit"]) == {path}


@pytest.mark.parametrize("how", ["removed", "skip-worktree", "sparse"])
@pytest.mark.parametrize("said", ["*.md text=auto", "*.md filter=upper"])
def test_attributes_that_are_not_checked_out_count_as_git_add_counts_them(
    site: Site, how: str, said: str
) -> None:
    site.git("config", "filter.upper.clean", "tr -d '\\r' | tr a-z A-Z")
    site.write_post("content/.gitattributes", f"{said}\n")
    site.write_post("content/posts/b/.gitattributes", "*.md -text -filter\n")
    site.commit_all("attributes")
    if how == "sparse":
        site.git("sparse-checkout", "set", "--no-cone", "/content/posts/")
    elif how == "skip-worktree":
        site.git("update-index", "--skip-worktree", "content/.gitattributes")
    (site.worktree / "content/.gitattributes").unlink(missing_ok=True)
    posts = ["content/posts/a \N{SNOWMAN}.md", "content/posts/welcome.md", "content/posts/b/plain.md"]
    for post in posts:
        site.write_post(post, "one\r\ntwo\r\n")
    site.save("a", posts)
    assert site.run_once().of("published")
    site.git("add", *posts)
    assert site.git("diff", "--cached", "--name-only", "--", *posts) == "", "as git add has it"
    changed = "one\ntwo\n" if "auto" in said else "ONE\nTWO\n"
    assert [site.remote_file(post) for post in posts] == [changed, changed, "one\r\ntwo\r\n"]


def test_nothing_new_is_nochange(site: Site) -> None:
    site.save("welcome", ["content/posts/welcome.md"])
    result = site.run_once()
    assert result.names() == ["worker-started", "start", "nochange", "worker-stopped"]
    assert len(site.remote_log()) == 1
    assert site.jobs() == []


def test_allowed_paths_are_published_and_the_others_logged(site: Site) -> None:
    site.write_post("content/posts/a.md", "A\n")
    site.write_post("config.php", "secret\n")
    (site.worktree / "content/posts/link.md").symlink_to("/etc/passwd")
    site.save(
        "a", ["content/posts/a.md", "config.php", "content/posts/link.md", "../x", "content/../config.php"]
    )
    result = site.run_once()
    assert set(result.of("published")[0]["rejectedPaths"]) == {
        "config.php",
        "content/posts/link.md",
        "../x",
        "content/../config.php",
    }
    assert changed_by(site, site.remote_log()[0][0]) == {"content/posts/a.md"}


@pytest.mark.parametrize(
    "kind",
    [
        "symlink",
        "fifo",
        "ignored",
        "piped-rules",
        "nested",
        "bare",
        "linked-folder",
        "folder of links",
        "outside",
    ],
)
def test_a_job_with_no_allowed_path_fails_as_nopaths_at_once(site: Site, kind: str) -> None:
    path = "content/posts/x.md"
    if kind == "symlink":
        (site.worktree / path).symlink_to("/etc/passwd")
    elif kind == "fifo":
        os.mkfifo(site.worktree / path)
    elif kind == "ignored":
        site.write_post(".gitignore", "x.md\n")
        site.write_post(path, "x\n")
    elif kind == "piped-rules":  # git would wait for ever to read them
        path = "content/piped/x.md"
        site.write_post(path, "x\n")
        os.mkfifo(site.worktree / "content/piped/.gitignore")
    elif kind == "nested":
        site.write_post("content/posts/sub/x.md", "x\n")
        site.git("init", "-q", str(site.worktree / "content/posts/sub"))
        path = "content/posts/sub/x.md"
    elif kind == "bare":
        path = "content/posts/sub"
        site.git("init", "-q", "--bare", str(site.worktree / path / "b.git"))
    elif kind == "folder of links":
        path = "content/posts/sub"
        (site.worktree / path).mkdir()
        (site.worktree / path / "a.md").symlink_to("/etc/passwd")
    elif kind == "linked-folder":
        site.write_post("elsewhere/x.md", "x\n")
        (site.worktree / "content/linked").symlink_to(site.worktree / "elsewhere")
        path = "content/linked/x.md"
    else:
        path = "content2/x.md"
        site.write_post(path, "x\n")
    site.save("x", [path])
    save(site, "good")

    result = site.run_once()

    assert result.returncode == 1
    assert [event["slug"] for event in result.of("nopaths")] == ["x"]
    job = site.job("x")
    assert (job["status"], job["failure"], job["attempts"]) == ("failed", "nopaths", 1)
    assert path in job["lastError"]
    assert [event["slug"] for event in result.of("published")] == ["good"]


def test_what_a_sparse_checkout_leaves_out_is_not_deleted(site: Site) -> None:
    site.write_post("content/notes/n.md", "note\n")
    site.commit_all("notes")
    site.git("sparse-checkout", "set", "content/posts")
    assert not (site.worktree / "content/notes/n.md").exists()
    site.write_post("content/posts/a.md", "A\n")
    site.save("all", ["content"])
    result = site.run_once()
    assert changed_by(site, result.of("published")[0]["commit"]) == {"content/posts/a.md"}


def test_a_file_too_large_is_refused_alone(site: Site) -> None:
    site.write_post("content/posts/big.bin", "x" * 2000)
    site.write_post("content/posts/a.md", "A\n")
    site.save("big", ["content/posts/big.bin"])
    site.save("a", ["content/posts/a.md"])
    result = site.run_once(BRITER_WORKER_MAX_FILE_BYTES="1000")
    assert [event["slug"] for event in result.of("dead-lettered")] == ["big"]
    assert site.job("big")["failure"] == "too-large"
    assert [event["slug"] for event in result.of("published")] == ["a"]


def test_a_folder_never_takes_the_workers_storage_along(site: Site) -> None:
    storage = site.worktree / "content" / "storage"
    site.write_post("content/posts/a.md", "a\n")
    (storage / "queue").mkdir(parents=True)
    (storage / "config.json").write_text('{"dashboardToken": "a-token-of-the-dashboard"}')
    job = {"id": "x", "slug": "all", "paths": ["content"]}
    (storage / "queue" / "x.json").write_text(json.dumps(job))
    result = site.run_once(BRITER_STORAGE_ROOT=str(storage))
    assert [event["slug"] for event in result.of("published")] == ["all"], result.stdout
    names = site.git("ls-tree", "-r", "--name-only", "main", cwd=site.remote).splitlines()
    assert names == ["content/posts/a.md", "content/posts/welcome.md"]
