"""Dry run: every step but the real push; and the first live run pushes what dry runs have committed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sites import Site

DRY = {"BRITER_WORKER_DRY_RUN": "true"}


def dry_publish(site: Site, slug: str) -> str:
    site.write_post(f"content/posts/{slug}.md", f"{slug}\n")
    site.save(slug, [f"content/posts/{slug}.md"])
    result = site.run_once(**DRY)
    (event,) = result.of("published")
    assert event["dryRun"] is True
    return str(event["commit"])


def test_a_dry_run_is_the_default_and_reaches_nobody(site: Site) -> None:
    site.write_post("content/posts/a.md", "A\n")
    site.save("a", ["content/posts/a.md"])
    result = site.run_once(BRITER_WORKER_DRY_RUN="")
    assert result.of("published")[0]["dryRun"] is True
    assert len(site.remote_log()) == 1
    assert site.git("rev-parse", "main") == result.of("published")[0]["commit"]
    assert site.jobs() == []
    assert site.git("status", "--porcelain") == ""


def test_the_first_live_run_pushes_all_of_them_with_an_empty_queue(site: Site) -> None:
    commits = [dry_publish(site, slug) for slug in "abc"]
    assert site.run_once().returncode == 0
    assert [commit for commit, _ in site.remote_log()][:3] == commits[::-1]
    before = site.remote_log()
    assert site.run_once().names() == ["worker-started", "worker-stopped"]
    assert site.remote_log() == before


def test_a_job_whose_content_is_in_a_dry_runs_commit_is_published_by_the_push_that_carries_it(
    site: Site,
) -> None:
    dry_publish(site, "a")
    site.save("a", ["content/posts/a.md"])
    result = site.run_once()
    assert [event["event"] for event in result.events if "jobId" in event] == ["start", "published"]
    assert len(site.remote_log()) == 2


def test_a_persons_commit_on_top_of_dry_runs_is_not_pushed_alone(site: Site) -> None:
    dry = dry_publish(site, "a")
    site.write_post("x.txt", "mine\n")
    site.git("add", "x.txt")
    site.git("commit", "-qm", "By hand")
    site.run_once()
    assert site.remote_log()[0][0] == dry
    assert site.git("log", "-1", "--format=%s") == "By hand"


def test_dry_commits_are_put_on_top_of_a_remote_that_moved(site: Site) -> None:
    dry_publish(site, "a")
    other = site.root / "other"
    site.git("clone", "-q", str(site.remote), str(other), cwd=site.root)
    (other / "theirs.txt").write_text("theirs\n")
    site.git("add", "-A", cwd=other)
    site.git("commit", "-qm", "Theirs", cwd=other)
    site.git("push", "-q", cwd=other)
    dry_publish(site, "b")
    assert len(site.remote_log()) == 2
    assert (site.worktree / "theirs.txt").exists()
    site.write_post("content/posts/c.md", "c\n")
    site.save("c", ["content/posts/c.md"])
    result = site.run_once()
    assert result.of("published")
    assert [subject for _, subject in site.remote_log()] == [
        "Publish c",
        "Publish b",
        "Publish a",
        "Theirs",
        "Start the site",
    ]
    assert site.git("status", "--porcelain") == ""
    assert site.git("rev-parse", "main") == site.remote_log()[0][0]


def test_a_flush_is_put_on_top_of_a_remote_that_moved(site: Site) -> None:
    dry_publish(site, "a")
    other = site.root / "other"
    site.git("clone", "-q", str(site.remote), str(other), cwd=site.root)
    (other / "theirs.txt").write_text("theirs\n")
    site.git("add", "-A", cwd=other)
    site.git("commit", "-qm", "Theirs", cwd=other)
    site.git("push", "-q", cwd=other)
    assert site.run_once().returncode == 0
    assert [subject for _, subject in site.remote_log()] == ["Publish a", "Theirs", "Start the site"]
    assert (site.worktree / "theirs.txt").read_text() == "theirs\n"
    assert site.git("status", "--porcelain") == ""


def somebody_else_pushes(site: Site, name: str) -> None:
    other = site.root / name
    site.git("clone", "-q", str(site.remote), str(other), cwd=site.root)
    (other / f"{name}.txt").write_text("theirs\n")
    site.git("add", "-A", cwd=other)
    site.git("commit", "-qm", f"Theirs: {name}", cwd=other)
    site.git("push", "-q", cwd=other)


def test_a_remote_that_moved_on_and_was_fetched_is_not_overwritten_by_a_flush(site: Site) -> None:
    dry_publish(site, "a")
    somebody_else_pushes(site, "one")
    site.git("fetch", "-q")
    assert site.run_once().returncode == 0
    assert [subject for _, subject in site.remote_log()] == ["Publish a", "Theirs: one", "Start the site"]
    assert site.git("status", "--porcelain") == ""


def test_a_merge_with_a_remote_that_was_never_fetched_by_its_name_is_not_overwritten_either(
    site: Site,
) -> None:
    dry_publish(site, "a")
    somebody_else_pushes(site, "one")
    site.git("pull", "-q", "--no-rebase", "--no-edit", str(site.remote), "main")
    theirs = site.remote_log()
    assert "Fix: git push origin main" in site.run_once().of("warning")[0]["error"]
    assert site.remote_log() == theirs


def test_what_a_person_has_merged_goes_out_with_the_next_post(site: Site) -> None:
    dry_publish(site, "a")
    somebody_else_pushes(site, "one")
    site.git("pull", "-q", "--no-rebase", "--no-edit")
    site.write_post("content/posts/b.md", "b\n")
    site.save("b", ["content/posts/b.md"])
    assert site.run_once().of("published")
    assert site.run_once().names() == ["worker-started", "worker-stopped"]
    subjects = [subject for _, subject in site.remote_log()]
    assert {"Publish a", "Publish b", "Theirs: one"} <= set(subjects)


@pytest.mark.parametrize("again", [False, True], ids=["", "and the remote moves on"])
def test_what_a_person_has_merged_with_the_remote_is_for_that_person_to_push(
    site: Site,
    again: bool,  # noqa: FBT001
) -> None:
    dry_publish(site, "a")
    somebody_else_pushes(site, "one")
    site.git("pull", "-q", "--no-rebase", "--no-edit")
    if again:
        somebody_else_pushes(site, "two")
    theirs = site.remote_log()
    for _ in range(2):
        result = site.run_once()
        assert site.remote_log() == theirs, "nothing of theirs is overwritten"
        (warning,) = result.of("warning")
        assert f"Fix: git {'pull --rebase' if again else 'push'} origin main" in warning["error"]
    if again:
        site.git("pull", "-q", "--no-rebase", "--no-edit")
    site.git("push", "-q", "origin", "main")
    site.write_post("content/posts/b.md", "b\n")
    site.save("b", ["content/posts/b.md"])
    result = site.run_once()
    assert result.names() == ["worker-started", "start", "published", "worker-stopped"]
    subjects = [subject for _, subject in site.remote_log()]
    assert {"Publish a", "Publish b", "Theirs: one"} <= set(subjects)


def test_a_dry_runs_commit_that_a_person_took_back_is_not_pushed(site: Site) -> None:
    dry_publish(site, "a")
    site.git("reset", "-q", "--hard", "origin/main")
    assert site.run_once().returncode == 0
    assert len(site.remote_log()) == 1


def test_a_person_who_commits_during_a_dry_run_costs_no_post(site: Site) -> None:
    # A filter that commits while the post is read: the branch cannot take the dry run's commit any more.
    person = site.root / "person"
    commit = "git -c user.name=P -c user.email=p@example.org commit -q --allow-empty -m 'By hand'"
    person.write_text(f"#!/bin/sh\nrm {person}; cd {site.worktree}; {commit} >&2; cat\n")
    person.chmod(0o755)
    site.write_post(".gitattributes", "*.bin filter=person\n")
    site.git("config", "filter.person.clean", f"test ! -e {person} && cat || {person}")
    site.write_post("content/posts/a.bin", "A\n")
    site.save("a", ["content/posts/a.bin"])
    first = site.run_once(**DRY, BRITER_WORKER_BACKOFF_MS="60000")
    assert [event["failure"] for event in first.of("failed")] == ["lost-race"]
    assert site.job("a")["status"] == "pending"

    site.command("retry", "a")
    site.run_once()
    assert site.remote_file("content/posts/a.bin") == "A\n"
    assert [subject for _, subject in site.remote_log()].count("Publish a") == 1


_REFUSES = """#!/bin/sh
while read -r old new ref; do
  git log --format=%s "$old..$new" | grep -q "Publish bad" && { echo "policy: not this one"; exit 1; }
done
exit 0
"""


def refuse(site: Site, text: str = _REFUSES) -> None:
    file = site.remote / "hooks" / "pre-receive"
    file.write_text(text)
    file.chmod(0o755)


def subjects(site: Site) -> list[str]:
    return [subject for _, subject in site.remote_log()][::-1]


@pytest.mark.parametrize("others", [0, 1, 6])
@pytest.mark.parametrize("moved", [False, True], ids=["", "and the remote moved"])
def test_what_a_live_remote_rejects_of_dry_runs_is_left_out_alone_and_kept(
    site: Site,
    others: int,
    moved: bool,  # noqa: FBT001
) -> None:
    slugs = [f"a{number}" for number in range(others)]
    for slug in slugs[: others // 2]:
        dry_publish(site, slug)
    bad = dry_publish(site, "bad")
    for slug in slugs[others // 2 :]:
        dry_publish(site, slug)
    if moved:
        somebody_else_pushes(site, "one")
    refuse(site)

    result = site.run_once()
    expected = ["Start the site", *(["Theirs: one"] if moved else []), *(f"Publish {slug}" for slug in slugs)]
    assert subjects(site) == expected
    (warning,) = result.of("warning")
    assert "'Publish bad' is left out" in warning["error"]
    assert "policy: not this one" in warning["error"]
    (kept,) = site.git("for-each-ref", "--format=%(objectname)", "refs/briter/rejected").splitlines()
    assert kept in warning["error"]
    assert site.git("show", f"{kept}:content/posts/bad.md") == "bad"
    if not moved:
        assert kept == bad
    assert (site.worktree / "content/posts/bad.md").read_text() == "bad\n"
    assert site.git("status", "--porcelain") == "?? content/posts/bad.md"
    assert site.git("rev-parse", "main") == site.remote_log()[0][0]
    assert site.run_once().names() == ["worker-started", "worker-stopped"]

    site.save("bad", ["content/posts/bad.md"], message="Better")
    assert site.run_once().names() == ["worker-started", "start", "published", "worker-stopped"]
    assert subjects(site) == [*expected, "Better"]
    assert site.git("status", "--porcelain") == ""


def test_a_later_dry_run_of_the_rejected_post_goes_out_as_it_was_written(site: Site) -> None:
    site.write_post("content/posts/welcome.md", "# Welcome\n\nbad\n")
    site.save("bad", ["content/posts/welcome.md"])
    site.run_once(**DRY)
    site.write_post("content/posts/welcome.md", "# Welcome\n\nbetter\n")
    site.save("good", ["content/posts/welcome.md"])
    site.run_once(**DRY)
    refuse(site)
    dry_publish(site, "b")
    site.run_once()
    assert subjects(site) == ["Start the site", "Publish good", "Publish b"]
    assert site.remote_file("content/posts/welcome.md") == "# Welcome\n\nbetter\n"
    assert site.git("status", "--porcelain") == ""


def test_each_rejected_commit_of_dry_runs_is_left_out_while_posts_wait(site: Site) -> None:
    for slug in ("bad1", "a", "bad2", "bad3"):
        dry_publish(site, slug)
    refuse(site)
    site.write_post("content/posts/b.md", "b\n")
    site.save("b", ["content/posts/b.md"])
    result = site.run_once()
    assert [event["slug"] for event in result.of("published")] == ["b"]
    assert len(result.of("warning")) == 3
    assert subjects(site) == ["Start the site", "Publish a", "Publish b"]
    assert len(site.git("for-each-ref", "refs/briter/rejected").splitlines()) == 3


def test_a_remote_that_rejects_dry_runs_below_a_persons_commit_is_for_that_person(site: Site) -> None:
    dry_publish(site, "bad")
    site.git("commit", "-q", "--allow-empty", "-m", "By hand")
    tip = site.git("rev-parse", "main")
    refuse(site)
    (warning,) = site.run_once().of("warning")
    assert "git rebase -i origin/main, and drop what it rejects" in warning["error"]
    assert site.git("rev-parse", "main") == tip
    assert subjects(site) == ["Start the site"]


def test_a_persons_commit_between_dry_runs_is_not_rewritten_for_what_is_rejected(site: Site) -> None:
    dry_publish(site, "bad")
    site.git("commit", "-q", "--allow-empty", "-m", "By hand")
    tip = dry_publish(site, "c")
    refuse(site)
    (warning,) = site.run_once().of("warning")
    assert "git rebase -i origin/main, and drop what it rejects" in warning["error"]
    assert site.git("rev-parse", "main") == tip
    assert subjects(site) == ["Start the site"]


_ONCE = """#!/bin/sh
unset $(env | sed -n 's/^\\(GIT_[A-Z_]*\\)=.*/\\1/p')
echo x >> {calls}
test $(wc -l < {calls}) -gt 1 || {{ {first}; echo "policy: not this one"; exit 1; }}
{then}
"""


def refuse_once(site: Site, *, first: str = ":", then: str = ":") -> None:
    """The first push is rejected for what is in it; from the second on something else happens."""
    refuse(site, _ONCE.format(calls=site.root / "calls", first=first, then=then))


def test_a_remote_that_fails_while_the_rejected_commit_is_looked_for_loses_none(site: Site) -> None:
    tips = [dry_publish(site, slug) for slug in "abc"]
    refuse_once(site, then="echo 'fatal: no space left on device' >&2; exit 1")
    (warning,) = site.run_once().of("warning")
    assert "could not take the push" in warning["error"]
    assert site.git("rev-parse", "main") == tips[-1]
    assert site.git("for-each-ref", "refs/briter/rejected") == ""
    (site.remote / "hooks" / "pre-receive").unlink()
    assert site.run_once().returncode == 0
    assert [commit for commit, _ in site.remote_log()][:3] == tips[::-1]


def test_a_remote_that_moves_while_the_rejected_commit_is_looked_for_is_not_overwritten(site: Site) -> None:
    for slug in "abc":
        dry_publish(site, slug)
    theirs = site.git("commit-tree", "-p", "main", "-m", "Theirs", "main^{tree}", cwd=site.remote)
    moves = f"git --git-dir={site.remote} update-ref refs/heads/main {theirs}"
    refuse_once(site, first=moves)
    (warning,) = site.run_once().of("warning")
    assert "somebody else pushed meanwhile" in warning["error"]
    assert subjects(site) == ["Start the site", "Theirs"]
    assert site.run_once().returncode == 0
    assert subjects(site) == ["Start the site", "Theirs", *(f"Publish {slug}" for slug in "abc")]


def test_what_stands_on_a_rejected_commit_of_dry_runs_is_for_a_person(site: Site) -> None:
    site.write_post("content/posts/x", "a file\n")
    site.save("x", ["content/posts/x"])
    site.run_once()
    (site.worktree / "content/posts/x").unlink()
    site.save("bad", ["content/posts/x"])
    site.run_once(**DRY)
    site.write_post("content/posts/x/y.md", "below\n")
    site.save("y", ["content/posts/x/y.md"])
    site.run_once(**DRY)
    tip = site.git("rev-parse", "main")
    refuse(site)
    (warning,) = site.run_once().of("warning")
    assert "stands on what the remote rejects: content/posts/x/y.md. Fix: git reset" in warning["error"]
    assert site.git("rev-parse", "main") == tip
    assert subjects(site) == ["Start the site", "Publish x"]


def the_remote_edits_the_welcome(site: Site, text: str) -> None:
    other = site.root / "editing"
    site.git("clone", "-q", str(site.remote), str(other), cwd=site.root)
    (other / "content/posts/welcome.md").write_text(text)
    site.git("commit", "-qam", "Theirs", cwd=other)
    site.git("push", "-q", cwd=other)


@pytest.mark.parametrize("waiting", [False, True], ids=["alone", "with a post"])
def test_a_dry_runs_commit_that_the_remote_edited_too_stops_with_the_way_out(
    site: Site,
    waiting: bool,  # noqa: FBT001
) -> None:
    site.write_post("content/posts/welcome.md", "# Mine\n")
    site.save("welcome", ["content/posts/welcome.md"])
    assert site.run_once(**DRY).of("published")
    the_remote_edits_the_welcome(site, "# Theirs\n")
    if waiting:
        site.write_post("content/posts/b.md", "b\n")
        site.save("b", ["content/posts/b.md"])
        result = site.run_once(**DRY)
        assert result.of("failed")[0]["failure"] == "diverged"
        said = site.job("b")["lastError"]
    else:
        said = site.run_once().of("warning")[0]["error"]
    assert "content/posts/welcome.md in the same lines as a dry run's commit. Fix: git reset --keep" in said
    assert subjects(site) == ["Start the site", "Theirs"]
    assert site.git("log", "-1", "--format=%s", "main") == "Publish welcome"


def test_what_of_dry_runs_was_put_on_a_moved_remote_before_a_death_is_not_put_there_twice(site: Site) -> None:
    dry = dry_publish(site, "a")
    dry_publish(site, "b")
    somebody_else_pushes(site, "one")
    # As a live run does, and dies before it can take note of it.
    other = site.root / "one"
    site.git("fetch", "-q", str(site.worktree), "main", cwd=other)
    worker = ("-c", "user.name=Briter Worker", "-c", "user.email=briter-worker@localhost")
    site.git(*worker, "cherry-pick", dry, cwd=other)
    site.git("push", "-q", cwd=other)
    assert site.run_once().returncode == 0
    assert subjects(site) == ["Start the site", "Theirs: one", "Publish a", "Publish b"]
    assert site.git("rev-parse", "main") == site.remote_log()[0][0]
    assert site.git("status", "--porcelain") == ""


def test_what_a_person_has_pushed_of_dry_runs_is_gone_on_from(site: Site) -> None:
    first, last = dry_publish(site, "a"), dry_publish(site, "b")
    site.git("push", "-q", str(site.remote), f"{first}:main")  # by its address: nothing here tells of it
    assert site.run_once().returncode == 0
    assert site.remote_log()[0][0] == last
    assert subjects(site) == ["Start the site", "Publish a", "Publish b"]


_RACES = """#!/bin/sh
unset $(env | sed -n 's/^\\(GIT_[A-Z_]*\\)=.*/\\1/p')
cd {remote}
new=$(git -c user.name=x -c user.email=x commit-tree -p main -m Theirs 'main^{{tree}}')
git update-ref refs/heads/main $new
"""


@pytest.mark.parametrize("waiting", [False, True], ids=["dry runs' commits", "a post"])
def test_a_remote_that_moves_at_every_push_is_given_up_for_now(
    site: Site,
    waiting: bool,  # noqa: FBT001
) -> None:
    if waiting:
        site.write_post("content/posts/a.md", "a\n")
        site.save("a", ["content/posts/a.md"])
    else:
        dry_publish(site, "a")
    refuse(site, _RACES.format(remote=site.remote))
    result = site.run_once()
    (told,) = result.of("failed") if waiting else result.of("warning")
    assert "others pushed 5 times while this was being pushed" in told["error"]
    assert "Publish a" not in subjects(site)
    (site.remote / "hooks" / "pre-receive").unlink()
    if waiting:
        site.command("retry", "a")
    assert site.run_once().returncode == 0
    assert subjects(site)[-1] == "Publish a"


def test_a_remote_that_is_away_keeps_what_dry_runs_committed(site: Site) -> None:
    dry = dry_publish(site, "a")
    there = site.git("remote", "get-url", "origin")
    site.git("remote", "set-url", "origin", "/nowhere/at/all.git")
    assert site.run_once().of("warning")
    site.git("remote", "set-url", "origin", there)
    assert site.run_once().returncode == 0
    assert site.remote_log()[0][0] == dry
