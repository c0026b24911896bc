"""A saved post reaches the remote, exactly once, and nothing else does; in a dry run, nothing does."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING

import pytest
from outcomes import assert_published, assert_refused, save

from briter_worker.errors import FailureCode

if TYPE_CHECKING:
    from sites import Result, Site


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
        site.save_post(f"p{number}", f"{number}\n", f"content/posts/{number}.md")
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
    "kind", ["symlink", "fifo", "ignored", "piped-rules", "nested", "linked-folder", "outside"]
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
    site.save_post("big", "x" * 2000)
    site.save_post("a", "A\n")
    result = site.run_once(BRITER_WORKER_MAX_FILE_BYTES="1000")
    assert [event["slug"] for event in result.of("dead-lettered")] == ["big"]
    assert site.job("big")["failure"] == "too-large"
    assert [event["slug"] for event in result.of("published")] == ["a"]


def test_a_folder_never_takes_the_workers_storage_along(site: Site) -> None:
    storage = site.worktree / "content" / "storage"
    site.write_post("content/posts/a.md", "a\n")
    (storage / "queue").mkdir(parents=True)
    (storage / "config.json").write_text('{"dashboardToken": "a-token-of-the-dashboard"}')
    job = {"id": "x", "slug": "all", "paths": ["content", "content/storage/config.json"]}
    (storage / "queue" / "x.json").write_text(json.dumps(job))
    result = site.run_once(BRITER_STORAGE_ROOT=str(storage))
    assert result.of("published")[0]["rejectedPaths"] == ["content/storage", "content/storage/config.json"]
    names = site.git("ls-tree", "-r", "--name-only", "main", cwd=site.remote).splitlines()
    assert names == ["content/posts/a.md", "content/posts/welcome.md"]


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


# What an adapter or BRITER_EXCLUDED_PATHS excludes; in a cluster: test_cluster_drains


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
    site.commit_all("All of it")
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
    assert f"the pattern {pattern} excludes it" in reason
    fix = f"rename the file, or lift the pattern: BRITER_EXCLUDED_PATHS=!{pattern}"
    assert site.job("hello")["fix"] == fix


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


def test_a_folder_job_never_deletes_what_no_job_may_publish(site: Site) -> None:
    site.write_post("content/.gitattributes", "*.bin binary\n")
    site.commit_all("attributes")
    (site.worktree / "content/.gitattributes").unlink()
    site.write_post("content/posts/a.md", "A\n")
    site.save("all", ["content"])
    result = site.run_once()
    assert changed_by(site, result.of("published")[0]["commit"]) == {"content/posts/a.md"}


# Dry run: every step but the real push. Branch, index, work tree and remote stay; so do the jobs


DRY = {"BRITER_WORKER_DRY_RUN": "true"}
WELCOME = "content/posts/welcome.md"


def local_side(site: Site) -> tuple[str, ...]:
    """Everything that a person sees of the repository, and the worker's own refs below `batch`."""
    return (
        site.git("for-each-ref", "refs/heads", "refs/remotes", "refs/briter/**/batch"),
        site.git("ls-files", "--stage"),
        site.git("status", "--porcelain"),
        (site.worktree / WELCOME).read_text(),
    )


def states(site: Site) -> dict[str, str]:
    return {job["slug"]: job["state"] for job in site.command("list", "--json").json()}


def outcomes(result: Result) -> list[tuple[str, str, bool]]:
    return [
        (e["event"], e["slug"], e["dryRun"])
        for e in result.events
        if e["event"] != "start" and "dryRun" in e and "slug" in e
    ]


@pytest.mark.parametrize("value", ["", "true"])
def test_a_dry_run_is_the_default_moves_nothing_and_keeps_its_jobs(site: Site, value: str) -> None:
    save(site, "a")
    before = local_side(site)
    result = site.run_once(BRITER_WORKER_DRY_RUN=value)
    assert result.returncode == 0
    assert outcomes(result) == [("published", "a", True)]
    assert len(result.of("published")[0]["commit"]) == 40
    assert local_side(site) == before
    assert site.subjects() == ["Start the site"]
    job = site.job("a")
    assert (job["status"], job["attempts"], bool(job["dryRunAt"])) == ("pending", 0, True)
    assert states(site) == {"a": "tried"}


def test_the_first_live_run_publishes_in_order_what_the_queue_holds(site: Site) -> None:
    for slug in "abc":
        save(site, slug)
        site.run_once(**DRY)
    assert [event["slug"] for event in site.run_once().of("published")] == ["a", "b", "c"]
    assert site.subjects() == ["Publish c", "Publish b", "Publish a", "Start the site"]
    assert (site.jobs(), site.git("status", "--porcelain")) == ([], "")


def test_what_the_remote_has_already_is_acknowledged_in_a_dry_run_too(site: Site) -> None:
    site.save("welcome", [WELCOME])
    assert outcomes(site.run_once(**DRY)) == [("nochange", "welcome", True)]
    assert site.jobs() == []


def test_a_conflict_is_found_in_a_dry_run_and_kept_nowhere(site: Site) -> None:
    site.push_elsewhere({WELCOME: "# Theirs\n"})
    site.save_post("welcome", "# Mine\n")
    assert outcomes(site.run_once(**DRY)) == [("dead-lettered", "welcome", True)]
    assert site.job("welcome")["failure"] == "conflict"
    assert site.git("for-each-ref", "refs/heads/conflict", cwd=site.remote) == ""
