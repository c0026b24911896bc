"""Success is said only of what is known: missing paths, withheld files, stashes."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from outcomes import assert_published, assert_put_off, assert_sound, save

from briter_worker.errors import FailureClass, FailureCode
from briter_worker.job import format_time, parse_time

if TYPE_CHECKING:
    from collections.abc import Callable

    from sites import Result, Site

LATER = "2099-01-01T00:00:00Z"
NEVER = "content/posts/never.md"
WELCOME = "content/posts/welcome.md"
PICTURE = "content/posts/picture.jpg"


def run_again(site: Site, slug: str = "a", **env: str) -> Result:
    """Have the job's next attempt come now."""
    site.command("publish-now", slug)
    return site.run_once(**env)


def only(result: Result, event: str, slug: str = "a") -> dict[str, Any]:
    """Return the one outcome of the run's one attempt of the post."""
    others = {"start", "superseded", "steered"}
    outcomes = [each for each in result.events if each.get("slug") == slug and each["event"] not in others]
    assert [each["event"] for each in outcomes] == [event], result.stdout + result.stderr
    return outcomes[0]


def receipts(site: Site) -> list[dict[str, Any]]:
    return list(site.command("history", "--json").json())


# Missing


def test_a_job_whose_file_does_not_exist_is_tried_after_two_delays_and_then_a_dead_letter(
    site: Site,
) -> None:
    site.save("a", [NEVER])
    reason = assert_put_off(site, site.run_once(), FailureCode.MISSING, kind=FailureClass.TRANSIENT)
    assert "no such file, and the remote never had one" in reason
    assert NEVER in reason
    first = only(run_again(site), "failed")
    assert (first["attempt"], first["failure"]) == (2, "missing")
    result = run_again(site)
    assert result.returncode == 1
    assert (only(result, "dead-lettered")["failure"], site.job("a")["status"]) == ("missing", "failed")
    assert len(site.remote_log()) == 1


def test_commands_and_history_say_missing_of_a_missing_post(site: Site) -> None:
    site.save("a", [NEVER])
    site.run_once()
    (row,) = site.command("list", "--json").json()
    assert (row["state"], row["failure"]) == ("retrying", "missing")
    for command in (("list",), ("show", "a"), ("history",)):
        assert "no such file" in site.command(*command).stdout.replace("\n", " ")
    assert [(each["outcome"], each["failure"]) for each in receipts(site)] == [("failed", "missing")]
    headline = site.command("status", "--json").json()["headline"]
    assert "remote" not in headline["text"], headline


def test_the_delays_of_a_missing_path_are_the_first_two(site: Site) -> None:
    site.save("a", [NEVER], attempts=3)
    delays = {"BRITER_WORKER_BACKOFF_MS": "100000,500000,900000"}
    for wait in (100, 500):
        result = run_again(site, **delays) if wait > 100 else site.run_once(**delays)
        failed = only(result, "failed")
        assert parse_time(failed["retryAt"]) - parse_time(failed["time"]) == pytest.approx(wait, abs=5)
    only(run_again(site, **delays), "dead-lettered")


def test_a_file_that_comes_a_moment_after_its_job_is_published_with_the_next_try(site: Site) -> None:
    site.save("a", ["content/posts/a.md"])
    only(site.run_once(), "failed")
    site.write_post("content/posts/a.md", "a\n")
    assert_published(site, run_again(site), attempt=2)


def test_a_picture_that_comes_after_its_post_is_published_with_the_next_try(site: Site) -> None:
    site.write_post("content/posts/a.md", "a\n")
    site.save("a", ["content/posts/a.md", PICTURE])
    first = site.run_once()
    assert first.returncode == 1
    published = only(first, "published")
    assert (published["waitingPaths"], published.get("rejectedPaths")) == ([PICTURE], None)
    assert site.remote_file("content/posts/a.md") == "a\n"
    waiting = site.job("a")
    assert (waiting["paths"], waiting["failure"], waiting["status"]) == ([PICTURE], "missing", "pending")
    site.write_post("content/posts/a.md", "not saved yet\n")
    site.write_post(PICTURE, "a picture")
    assert only(run_again(site), "published")["attempt"] == 2
    assert site.remote_file(PICTURE) == "a picture"
    assert site.remote_file("content/posts/a.md") == "a\n"
    assert site.jobs() == []


def test_a_picture_that_never_comes_ends_as_published_in_part(site: Site) -> None:
    site.write_post("content/posts/a.md", "a\n")
    site.save("a", ["content/posts/a.md", PICTURE])
    commit = only(site.run_once(), "published")["commit"]
    only(run_again(site), "failed")
    result = run_again(site)
    last = only(result, "published")
    assert (last["commit"], last["rejectedPaths"], result.returncode) == (commit, [PICTURE], 0)
    assert site.jobs() == []
    assert len(site.remote_log()) == 2
    newest = receipts(site)[0]
    assert (newest["outcome"], newest["commit"], newest["rejectedPaths"]) == ("published", commit, [PICTURE])
    headline = site.command("status", "--json").json()["headline"]
    assert "in part" in headline["text"], headline
    assert_sound(site)


def test_an_undo_after_a_partial_publication_restores_the_post(site: Site) -> None:
    save(site, "a")
    site.run_once()
    site.write_post("content/posts/a.md", "second\n")
    site.save("a", ["content/posts/a.md", PICTURE])
    for _ in range(3):
        run_again(site)
    assert site.jobs() == []
    assert site.command("undo", "a").returncode == 0
    assert_published_text(site, "a\n")


def assert_published_text(site: Site, text: str) -> None:
    site.run_once()
    assert site.remote_file("content/posts/a.md") == text


def test_a_missing_path_beside_unchanged_ones_ends_without_being_called_published(site: Site) -> None:
    site.save("a", ["content/posts/welcome.md", PICTURE])
    only(site.run_once(), "failed")
    only(run_again(site), "failed")
    last = only(run_again(site), "nochange")
    assert last["rejectedPaths"] == [PICTURE]
    assert site.jobs() == []


def test_an_empty_declared_folder_is_like_a_missing_path(site: Site) -> None:
    (site.worktree / "content/new/below").mkdir(parents=True)
    site.save("a", ["content/new/"])
    assert only(site.run_once(), "failed")["failure"] == "missing"
    site.write_post("content/new/below/a.md", "a\n")
    assert_published(site, run_again(site), attempt=2)


# What somebody knows is not missing


def _superseded(site: Site) -> None:
    site.save_post("a", "a\n", createdAt="2026-01-01T00:00:00Z")


def _cancelled(site: Site) -> None:
    save(site, "a")
    site.command("cancel", "a")


def _cancelled_at_once(site: Site) -> None:
    site.save_post("a", "a\n", scheduledFor=LATER)
    site.run_once()
    site.command("cancel", "a")


def _failed(site: Site) -> None:
    site.hook("exit 1")
    save(site, "a")
    site.run_once()
    (site.remote / "hooks/pre-receive").unlink()


def _failed_under_an_earlier_version(site: Site) -> None:
    site.save("a", ["content/posts/a.md"], status="failed", failure="network", lastError="x", attempts=8)


def _deleted_on_both_sides(site: Site) -> None:
    save(site, "a")
    site.run_once()
    site.push_elsewhere({"content/posts/a.md": None})


def _deleted_before(site: Site) -> None:
    site.push_elsewhere({"content/posts/a.md": "theirs\n"})
    site.push_elsewhere({"content/posts/a.md": None})


def _deleted_on_a_merged_branch(site: Site) -> None:
    other = site.colleague()
    site.git("switch", "--quiet", "--create", "side", cwd=other)
    for text in ("theirs\n", None):
        file = other / "content/posts/a.md"
        file.write_text(text) if text else file.unlink()
        site.git("add", "--all", cwd=other)
        site.git("commit", "--quiet", "--message=Side", cwd=other)
    site.git("switch", "--quiet", "main", cwd=other)
    site.git("merge", "--quiet", "--no-ff", "--message=Merge", "side", cwd=other)
    site.git("push", "--quiet", "origin", "main", cwd=other)


def _published_and_deleted(site: Site) -> None:
    save(site, "a")
    site.run_once()
    (site.worktree / "content/posts/a.md").unlink()
    site.save("a", ["content/posts/a.md"])
    site.run_once()


def _only_a_colleague_has_it(site: Site) -> None:
    site.push_elsewhere({"content/posts/a.md": "theirs\n"})


@pytest.mark.parametrize(
    "before",
    [
        _superseded,
        _cancelled,
        _cancelled_at_once,
        _failed,
        _failed_under_an_earlier_version,
        _deleted_on_both_sides,
        _deleted_before,
        _deleted_on_a_merged_branch,
        _published_and_deleted,
        _only_a_colleague_has_it,
    ],
)
def test_what_somebody_knew_and_is_gone_is_no_failure(site: Site, before: Callable[[Site], None]) -> None:
    before(site)
    (site.worktree / "content/posts/a.md").unlink(missing_ok=True)
    site.save("a", ["content/posts/a.md"])
    site.save_post("beside", "makes the worker see the remote's tip\n")
    result = site.run_once()
    assert [each["slug"] for each in result.of("nochange")] == ["a"], result.stdout
    assert site.jobs() == []


@pytest.mark.parametrize("program", ["watch", "undo"])
def test_a_draft_that_only_a_program_of_ours_has_seen_is_no_failure(site: Site, program: str) -> None:
    site.save("a", [NEVER], madeBy=program)
    result = site.run_once()
    only(result, "nochange")
    assert site.jobs() == []


def test_a_mistyped_path_stays_missing_however_often_it_is_saved(site: Site) -> None:
    save(site, "a")
    site.run_once()
    for _ in range(2):
        site.save("a", [NEVER])
        for _ in range(3):
            result = run_again(site)
        assert only(result, "dead-lettered")["failure"] == "missing"


def test_an_attempt_that_failed_otherwise_does_not_make_its_own_path_known(site: Site) -> None:
    site.save("a", [NEVER])
    site.save_post("b", "b\n")
    site.hook("exit 1")
    site.run_once()
    assert only(run_again(site), "failed")["failure"] == "missing"


def test_a_missing_path_does_not_hold_up_other_posts(site: Site) -> None:
    site.save("a", [NEVER])
    site.save_post("b", "b\n")
    assert_published(site, site.run_once(), "b")


@pytest.mark.parametrize("kind", ["--depth=1", "--filter=blob:none"])
def test_a_shallow_or_partial_clone_knows_what_it_had(site: Site, kind: str) -> None:
    save(site, "b", "c")
    site.run_once()
    site.git("config", "uploadpack.allowFilter", "true", cwd=site.remote)
    config = (site.worktree / ".git").rename(site.root / "old-git")
    site.git(
        "clone",
        "--quiet",
        "--no-checkout",
        kind,
        f"file://{site.remote}",
        str(site.root / "new"),
        cwd=site.root,
    )
    (site.root / "new/.git").rename(site.worktree / ".git")
    site.git("reset", "--quiet", "--hard")
    assert config.exists()
    (site.worktree / "content/posts/b.md").unlink()
    site.push_elsewhere({"content/posts/b.md": None})
    site.save("b", ["content/posts/b.md"])
    site.save("a", [NEVER])
    result = site.run_once()
    only(result, "nochange", "b")
    assert only(result, "failed")["failure"] == "missing"


# What is withheld keeps its job waiting


TRIP = "content/posts/trip/"
INDEX, PHOTO = f"{TRIP}index.md", f"{TRIP}photos/1.jpg"


def save_trip(site: Site, **keys: object) -> None:
    """Save a scheduled post in a folder, and a due one that declares the folder and one below it."""
    site.write_post(INDEX, "the trip\n")
    site.write_post(PHOTO, "a photo\n")
    site.save("trip", [TRIP], scheduledFor=LATER)
    site.save("photos", [TRIP, f"{TRIP}photos/"], **keys)


def assert_waits_for_trip(site: Site, result: Result, event: str) -> dict[str, Any]:
    outcome = only(result, event, "photos")
    waiting = site.job("photos")
    assert (waiting["status"], waiting["attempts"], waiting["failure"]) == ("pending", 0, "unsettled")
    assert "belongs to a scheduled post" in waiting["lastError"]
    assert parse_time(waiting["nextAttemptAt"]) > time.time()
    assert site.remote_file(INDEX) is None
    assert site.remote_file(PHOTO) == "a photo\n"
    return outcome


def test_what_a_scheduled_post_withholds_keeps_the_job_waiting_while_the_rest_is_published(
    site: Site,
) -> None:
    save_trip(site)
    published = assert_waits_for_trip(site, site.run_once(), "published")
    assert published["waitingPaths"] == [TRIP]
    assert parse_time(published["retryAt"]) > time.time()
    assert_waits_for_trip(site, run_again(site, "photos"), "failed")


def test_a_job_that_waits_for_a_scheduled_post_goes_out_when_that_is_cancelled(site: Site) -> None:
    save_trip(site)
    site.run_once()
    site.command("cancel", "trip")
    result = site.run_once()
    assert only(result, "published", "photos")["attempt"] == 1
    assert site.remote_file(INDEX) == "the trip\n"
    assert site.jobs() == []


def test_a_job_that_waits_for_a_scheduled_post_ends_when_that_is_published_now(site: Site) -> None:
    save_trip(site)
    site.run_once()
    result = run_again(site, "trip")
    only(result, "published", "trip")
    assert site.remote_file(INDEX) == "the trip\n"
    assert site.jobs() == []
    assert site.subjects().count("Publish trip") == 1


def test_a_withheld_path_is_joined_by_a_newer_save_and_still_withheld(site: Site) -> None:
    save_trip(site)
    site.run_once()
    site.save_post("photos", "other\n", "content/posts/other.md")
    published = only(site.run_once(), "published", "photos")
    assert (published["waitingPaths"], site.job("photos")["paths"]) == ([TRIP], [TRIP])
    assert site.remote_file("content/posts/other.md") == "other\n"
    assert site.remote_file(INDEX) is None


@pytest.mark.parametrize("what", ["withheld", "missing"])
def test_a_crash_between_push_and_acknowledgement_forgets_nothing_that_is_not_published(
    site: Site, what: str
) -> None:
    if what == "withheld":
        save_trip(site)
    else:
        site.write_post(PHOTO, "a photo\n")
        site.save("photos", [PHOTO, NEVER])
    push = site.hold_push(name="post-receive")
    with site.running() as worker:
        push.wait()
        worker.kill()
        worker.wait()
        push.remove()
    result = site.run_once()
    assert only(result, "published", "photos")["waitingPaths"] == [TRIP if what == "withheld" else NEVER]
    assert site.job("photos")["paths"] == [TRIP if what == "withheld" else NEVER]
    assert site.subjects().count("Publish photos") == 1


def test_a_damaged_scheduled_job_withholds_without_a_time(site: Site) -> None:
    save_trip(site)
    site.run_once()
    (file,) = site.queue.glob("trip-*.json")
    file.write_text('{"slug": "trip", "paths": [')
    result = run_again(site, "photos")
    outcome = only(result, "failed", "photos")
    assert "cannot be read" in outcome["error"]
    assert parse_time(outcome["retryAt"]) > time.time()
    assert site.remote_file(INDEX) is None


# Stashes


def test_a_save_that_a_user_has_stashed_waits_for_the_stash(site: Site) -> None:
    site.write_post("content/posts/welcome.md", "saved\n")
    site.save("a", ["content/posts/welcome.md"])
    site.git("stash")
    result = site.run_once()
    assert "stash@{0}" in only(result, "failed")["error"]
    waiting = site.job("a")
    assert (waiting["attempts"], waiting["status"]) == (0, "pending")
    site.git("stash", "pop")
    assert_published(site, run_again(site))
    assert site.remote_file("content/posts/welcome.md") == "saved\n"


def test_a_new_post_in_the_untracked_part_of_a_stash_is_not_missing(site: Site) -> None:
    save(site, "a")
    site.git("stash", "--include-untracked")
    assert "content/posts/a.md" in only(site.run_once(), "failed")["error"]
    assert site.job("a")["attempts"] == 0
    site.git("stash", "pop")
    assert_published(site, run_again(site))


def test_a_stashed_deletion_waits_too(site: Site) -> None:
    (site.worktree / "content/posts/welcome.md").unlink()
    site.save("a", ["content/posts/"])
    site.git("stash")
    assert "stash@{0}" in only(site.run_once(), "failed")["error"]
    site.git("stash", "pop")
    assert_published(site, run_again(site))
    assert site.remote_file("content/posts/welcome.md") is None


def test_a_stashed_file_beside_a_published_one_keeps_the_job_waiting(site: Site) -> None:
    site.write_post("content/posts/welcome.md", "saved\n")
    site.save("a", ["content/posts/welcome.md", PICTURE])
    site.git("stash")
    site.write_post(PICTURE, "a picture")
    published = only(site.run_once(), "published")
    assert (published["waitingPaths"], site.job("a")["attempts"]) == (["content/posts/welcome.md"], 0)
    site.git("stash", "pop")
    only(run_again(site), "published")
    assert site.remote_file("content/posts/welcome.md") == "saved\n"


def test_a_stash_from_before_the_save_or_of_another_file_delays_nothing(site: Site) -> None:
    site.write_post("content/posts/welcome.md", "tried\n")
    site.git("stash")
    later = format_time(time.time() + 2)
    site.save("a", ["content/posts/welcome.md"], createdAt=later)
    site.write_post("notes.txt", "mine")
    site.git("add", "notes.txt")
    site.git("stash")
    only(site.run_once(), "nochange")
    assert site.jobs() == []


def test_a_stash_of_what_is_never_published_delays_nothing(site: Site) -> None:
    site.write_post(".gitignore", "storage/\n*.tmp\n")
    site.commit_all()
    site.write_post("content/posts/a.tmp", "ignored")
    site.write_post("content/posts/.DS_Store", "excluded")
    site.save("a", ["content/posts/"])
    site.git("stash", "--all", "--", "content")
    only(site.run_once(), "nochange")


def test_a_dropped_stash_ends_the_wait(site: Site) -> None:
    site.write_post("content/posts/welcome.md", "saved\n")
    site.save("a", ["content/posts/welcome.md"])
    site.git("stash")
    site.run_once()
    site.git("stash", "drop")
    assert "git" in only(run_again(site), "nochange")["reason"]


def have_git_write_a_conflict(site: Site) -> None:
    """Have a colleague push the same line, and a user pull it with a stash."""
    site.push_elsewhere({WELCOME: "theirs\n"})
    site.git("stash")
    site.git("pull")
    with pytest.raises(AssertionError, match="stash pop"):
        site.git("stash", "pop")
    assert "<<<<<<<" in (site.worktree / WELCOME).read_text()


def test_a_conflict_that_git_has_written_into_a_post_is_not_published(site: Site) -> None:
    site.write_post(WELCOME, "saved\n")
    site.write_post(PICTURE, "a picture")
    site.save("a", ["content/posts/"])
    have_git_write_a_conflict(site)
    published = only(site.run_once(), "published")
    assert "conflict" in published["reason"]
    assert (site.remote_file(WELCOME), site.remote_file(PICTURE)) == ("theirs\n", "a picture")
    assert "git add" in only(run_again(site), "failed")["fix"]
    assert site.job("a")["attempts"] == 0
    site.write_post(WELCOME, "resolved\n")
    site.git("add", WELCOME)
    only(run_again(site), "published")
    assert site.remote_file(WELCOME) == "resolved\n"


def test_a_save_of_a_post_with_a_conflict_resolves_it(site: Site) -> None:
    site.write_post(WELCOME, "saved\n")
    site.save("a", [WELCOME])
    have_git_write_a_conflict(site)
    site.write_post(WELCOME, "saved again\n")
    site.save("a", [WELCOME])
    only(site.run_once(), "published")
    assert site.remote_file(WELCOME) == "saved again\n"


def test_a_file_that_a_user_restores_is_unchanged_and_the_log_says_that_git_wrote_it(site: Site) -> None:
    site.write_post("content/posts/welcome.md", "saved\n")
    site.save("a", ["content/posts/welcome.md"])
    site.git("checkout", "--", "content/posts/welcome.md")
    done = only(site.run_once(), "nochange")
    assert done["reason"] == "git has written content/posts/welcome.md since the save"
    site.save("a", ["content/posts/welcome.md"])
    assert "reason" not in only(site.run_once(), "nochange")


# Quiet time


def test_the_quiet_time_ends_under_cron_although_the_cms_rewrites_its_job_file(site: Site) -> None:
    now = time.time()
    site.write_post("content/posts/a.md", "a\n")
    job = site.queue / "a.json"

    def save_over(at: float) -> None:
        document = {"slug": "a", "paths": ["content/posts/a.md"], "createdAt": format_time(at)}
        partial = job.with_suffix(".tmp")
        partial.write_text(json.dumps(document))
        partial.rename(job)

    quiet = {"BRITER_WORKER_QUIET_MS": "60000", "BRITER_WORKER_QUIET_MAX_MS": "60000"}
    for at in (now - 50, now - 30, now):
        save_over(at)
        assert site.run_once(**quiet).of("start") == []
    bounded = quiet | {"BRITER_WORKER_QUIET_MAX_MS": "45000"}
    assert_published(site, site.run_once(**bounded))
    save_over(time.time())
    assert site.run_once(**bounded).of("start") == [], "the next save has a quiet time of its own"
