"""The remote moved ahead, refuses, or was rewritten: each means something else."""

from __future__ import annotations

import json
import re
import subprocess
from typing import TYPE_CHECKING

import pytest
from outcomes import save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sites import Site


@pytest.fixture
def other(site: Site) -> Path:
    return site.colleague()


LINES = "".join(f"line {n}\n" for n in range(20))


def test_other_posts_of_the_remote_are_taken_over(site: Site) -> None:
    site.push_elsewhere({"content/posts/theirs.md": "theirs\n"})
    save(site, "a")
    result = site.run_once()
    assert result.names() == ["worker-started", "start", "site-updated", "published", "worker-stopped"]
    assert result.of("site-updated")[0]["paths"] == ["content/posts/theirs.md"]
    assert result.of("published")[0]["attempt"] == 1
    assert site.subjects() == ["Publish a", "Theirs", "Start the site"]
    assert (site.worktree / "content/posts/theirs.md").read_text() == "theirs\n"
    assert site.git("status", "--porcelain") == ""
    assert site.git("rev-parse", "main") == site.remote_log()[0][0]


def test_an_edit_of_what_somebody_pulled_into_the_site_conflicts_with_nobody(site: Site) -> None:
    for text in ("edited\n", "a\n"):  # the second is what the worker published before
        save(site, "a")
        site.run_once()
        site.push_elsewhere({"content/posts/a.md": f"theirs before {text}"})
        site.git("pull", "-q", "--ff-only")
        site.save_post("a", text)
        assert "published" in site.run_once().names()
        assert site.remote_file("content/posts/a.md") == text


def test_lines_of_one_post_are_merged(site: Site) -> None:
    site.save_post("a", LINES)
    site.run_once()
    site.push_elsewhere({"content/posts/a.md": LINES.replace("line 1\n", "line one\n")})
    site.save_post("a", LINES.replace("line 18\n", "line eighteen\n"))
    result = site.run_once()
    assert result.of("published")
    merged = LINES.replace("line 1\n", "line one\n").replace("line 18\n", "line eighteen\n")
    assert site.remote_file("content/posts/a.md") == merged
    assert (site.worktree / "content/posts/a.md").read_text() == merged
    assert site.git("status", "--porcelain") == ""


def test_a_file_of_two_jobs_is_merged_once_where_its_lines_are_alike(site: Site) -> None:
    # Where lines are alike, git may take an edit for one of its neighbour too: held against its own outcome,
    # the very same edit would be a conflict.
    alike = "-\n" * 7
    site.save_post("a", f"start\n{alike}")
    site.run_once()
    site.push_elsewhere({"content/posts/a.md": f"start\n{alike[2:]}theirs\n"})
    site.write_post("content/posts/a.md", f"ours\n{alike}")
    site.save("all", ["content/posts"])
    site.save("a", ["content/posts/a.md"])

    result = site.run_once()

    assert sorted(event["slug"] for event in result.of("published")) == ["a", "all"]
    assert site.remote_file("content/posts/a.md") == f"ours\n{alike[2:]}theirs\n"
    assert site.jobs() == []


def test_a_conflict_concerns_its_own_post_alone_and_keeps_both_versions(site: Site) -> None:
    site.push_elsewhere({"content/posts/welcome.md": "# Theirs\n"})
    site.save_post("welcome", "# Ours\n")
    site.save_post("a", "A\n")
    result = site.run_once()
    assert [event["slug"] for event in result.of("dead-lettered")] == ["welcome"]
    assert [event["slug"] for event in result.of("published")] == ["a"]
    job = site.job("welcome")
    assert (job["failure"], job["attempts"]) == ("conflict", 1)
    assert "conflict/welcome" in job["lastError"]
    assert site.remote_file("content/posts/welcome.md") == "# Theirs\n"
    assert site.remote_file("content/posts/welcome.md", "conflict/welcome") == "# Ours\n"
    assert (site.worktree / "content/posts/welcome.md").read_text() == "# Ours\n"


@pytest.mark.parametrize("slugs", [("a", "a/b"), ("a/b", "a")])
def test_conflicts_of_slugs_of_which_one_begins_the_other_are_both_kept(
    site: Site, slugs: tuple[str, str]
) -> None:
    paths = [f"content/posts/{slug.replace('/', '-')}.md" for slug in slugs]
    for slug, path in zip(slugs, paths, strict=True):
        site.push_elsewhere({path: "theirs\n"})
        site.save_post(slug, f"{slug}\n", path)
    site.run_once()
    branches = [re.findall(r"(conflict/\S+) of", site.job(slug)["lastError"])[0] for slug in slugs]
    kept = [site.remote_file(path, branch) for path, branch in zip(paths, branches, strict=True)]
    assert kept == [f"{slug}\n" for slug in slugs]


@pytest.mark.parametrize("deletes", ["we", "they"])
def test_a_deletion_and_an_edit_of_one_post_are_a_conflict(site: Site, deletes: str) -> None:
    site.save_post("b", LINES)
    site.run_once()
    theirs = None if deletes == "they" else LINES + "theirs\n"
    site.push_elsewhere({"content/posts/b.md": theirs})
    post = site.write_post("content/posts/b.md", LINES + "ours\n")
    if deletes == "we":
        post.unlink()
    site.save("b", ["content/posts/b.md"])
    site.run_once()
    assert site.job("b")["failure"] == "conflict"
    assert site.remote_file("content/posts/b.md") == theirs
    assert site.remote_file("content/posts/b.md", "conflict/b") == (
        LINES + "ours\n" if theirs is None else None
    )


def test_the_same_content_conflicts_again_and_a_new_save_resolves_it(site: Site) -> None:
    site.push_elsewhere({"content/posts/welcome.md": "# Theirs\n"})
    save(site, "a")
    site.save_post("welcome", "# Ours\n")
    site.run_once()
    site.save("welcome", ["content/posts/welcome.md"])
    assert site.run_once().of("dead-lettered")
    assert site.remote_file("content/posts/welcome.md") == "# Theirs\n"
    site.save_post("welcome", "# Theirs, and ours\n")
    assert site.run_once().of("published")
    assert site.remote_file("content/posts/welcome.md") == "# Theirs, and ours\n"
    assert site.jobs() == []


def test_a_post_that_the_remote_deleted_is_deleted_here_when_untouched(site: Site) -> None:
    site.push_elsewhere({"content/posts/welcome.md": None})
    save(site, "a")
    site.run_once()
    assert not (site.worktree / "content/posts/welcome.md").exists()
    assert site.git("status", "--porcelain") == ""


def test_a_persons_commit_on_a_diverged_branch_stops_no_post(site: Site) -> None:
    site.push_elsewhere({"x.txt": "theirs\n"})
    site.write_post("y.txt", "mine\n")
    site.git("add", "y.txt")
    site.git("commit", "-qm", "By hand")
    save(site, "a")
    result = site.run_once()
    assert result.of("published")
    assert "commits that the remote lacks" in result.of("warning")[0]["error"]
    assert site.subjects() == ["Publish a", "Theirs", "Start the site"]
    assert site.git("log", "-1", "--format=%s") == "By hand"


def test_an_empty_remote_gets_its_branch_with_the_first_publication(site: Site) -> None:
    empty = site.root / "empty.git"
    site.git("init", "-q", "--bare", "-b", "main", str(empty))
    site.git("remote", "add", "second", str(empty))
    save(site, "a")
    assert site.run_once(BRITER_GIT_REMOTE="second").of("published")
    assert site.git("log", "--format=%s", "main", cwd=empty).splitlines() == ["Publish a", "Start the site"]


@pytest.mark.parametrize("text", ["# Welcome\n", "# Welcome\n\nEdited\n"])
def test_a_mode_that_the_remote_changed_is_not_taken_back(site: Site, other: Path, text: str) -> None:
    site.git("update-index", "--chmod=+x", "content/posts/welcome.md", cwd=other)
    site.git("commit", "-qm", "executable", cwd=other)
    site.git("push", "-q", cwd=other)
    for number in range(2):
        site.write_post("content/posts/b.md", f"B {number}\n")
        site.write_post("content/posts/welcome.md", text)
        site.save("b", ["content/posts"])
        assert site.run_once().of("published")
        assert site.git("ls-tree", "main", "content/posts/welcome.md", cwd=site.remote).startswith("100755 ")
        assert site.remote_file("content/posts/welcome.md") == text


@pytest.mark.parametrize(("theirs", "ours"), [("note", "note/index.md"), ("note/index.md", "note")])
def test_what_the_remote_has_in_a_posts_place_stays_also_when_the_post_is_published_again(
    site: Site, theirs: str, ours: str
) -> None:
    site.push_elsewhere({f"content/posts/{theirs}": "theirs\n"})
    site.write_post(f"content/posts/{ours}", "ours\n")
    for text in ("ours\n", "ours\n", "ours, edited\n"):
        site.write_post(f"content/posts/{ours}", text)
        site.save("note", ["content/posts/note"])
        site.save_post("a", text)
        result = site.run_once()
        assert "note" not in [entry["slug"] for entry in result.of("published")]
        assert site.job("note")["failure"] == "conflict"
        assert site.remote_file(f"content/posts/{theirs}") == "theirs\n"


WELCOME = "content/posts/welcome.md"


def conflict_branches(site: Site) -> list[str]:
    out = site.git("for-each-ref", "--format=%(refname:lstrip=2)", "refs/heads/conflict", cwd=site.remote)
    return out.splitlines()


def conflict(site: Site) -> None:
    """The post `welcome` has just conflicted."""
    site.push_elsewhere({WELCOME: "# Theirs\n"})
    site.save_post("welcome", "# Ours\n", WELCOME)
    assert site.run_once().of("dead-lettered")


def saved_while_the_conflict_was_in_flight(site: Site) -> str:
    """The CMS saves while the remote has not yet taken the version that conflicts."""
    job = site.root / "job"
    job.write_text(json.dumps({"id": "again", "slug": "welcome", "paths": [WELCOME]}))
    saves = f"echo '# Ours, edited' > {site.worktree / WELCOME}; cp {job} {site.queue}/again.tmp"
    moves = f"mv {site.queue}/again.tmp {site.queue}/again.json; rm $0"
    hook = site.hook(f"grep -q refs/heads/conflict || exit 0\n{saves}\n{moves}")
    conflict(site)
    assert not hook.exists()
    return "welcome"


def saved_with_another_posts_folder(site: Site) -> str:
    conflict(site)
    site.write_post(WELCOME, "# Ours, edited\n")
    site.save("all", ["content/posts"])
    return "all"


@pytest.mark.parametrize(
    "saves",
    [saved_while_the_conflict_was_in_flight, saved_with_another_posts_folder],
    ids=lambda each: each.__name__,
)
def test_what_was_saved_without_knowing_of_the_conflict_takes_nothing_back(
    site: Site, saves: Callable[[Site], str]
) -> None:
    slug = saves(site)
    site.run_once()
    assert site.job(slug)["failure"] == "conflict"
    assert site.remote_file(WELCOME) == "# Theirs\n"
    assert site.remote_file(WELCOME, f"conflict/{slug}") == "# Ours, edited\n"

    site.write_post(WELCOME, "# Theirs, and ours\n")
    site.save(slug, ["content/posts"])
    assert site.run_once().of("published")
    assert site.remote_file(WELCOME) == "# Theirs, and ours\n"
    assert conflict_branches(site) == []


def test_two_posts_that_conflict_in_one_file_in_turn_add_no_branches_and_each_can_answer(site: Site) -> None:
    conflict(site)
    site.save("all", ["content/posts"])
    for number in range(3):
        site.write_post(WELCOME, f"# Ours {number}\n")
        site.run_once()
        for slug in ("all", "welcome"):
            site.command("retry", slug)
            site.run_once()
        assert {job["failure"] for job in site.jobs()} == {"conflict"}
        assert conflict_branches(site) == ["conflict/all", "conflict/welcome"]
        assert site.remote_file(WELCOME) == "# Theirs\n"
    site.save_post("welcome", "# Theirs, and ours\n", WELCOME)
    assert site.run_once().of("published")
    assert site.remote_file(WELCOME) == "# Theirs, and ours\n"
    assert conflict_branches(site) == []


@pytest.mark.parametrize("deleted", [False, True], ids=["", "the host deletes the merged branch"])
def test_the_documented_fix_of_a_conflict_holds(site: Site, other: Path, *, deleted: bool) -> None:
    conflict(site)
    for _ in range(2):
        site.command("retry", "welcome")
        assert site.run_once().of("dead-lettered")
        assert conflict_branches(site) == ["conflict/welcome"]

    told = re.search(
        r"merge both, in another clone: (.*?); resolve and commit; (.*?), then retry",
        site.job("welcome")["fix"],
    )
    assert told
    for key, value in (("name", "A Person"), ("email", "person@example.org")):
        site.git("config", f"user.{key}", value, cwd=other)
    merge = subprocess.run(["sh", "-c", told[1]], cwd=other, capture_output=True, text=True, check=False)
    assert "CONFLICT" in merge.stdout
    (other / WELCOME).write_text("# Theirs, and ours\n")
    site.git("commit", "-qam", "Both", cwd=other)
    site.git(*told[2].split()[1:], cwd=other)
    if deleted:
        site.git("push", "-q", "origin", ":conflict/welcome", cwd=other)
    site.command("retry", "welcome")
    assert not site.run_once().of("dead-lettered")
    assert site.jobs() == []
    assert conflict_branches(site) == []
    assert site.remote_file(WELCOME) == "# Theirs, and ours\n"
    assert (site.worktree / WELCOME).read_text() == "# Theirs, and ours\n"
    assert site.git("status", "--porcelain") == ""
