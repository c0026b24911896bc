"""What is scheduled reaches the remote at its time, by whatever door a job comes to the queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from briter_worker.client import compose, submit
from briter_worker.job import Program

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sites import Site

LATER = "2199-01-01T00:00:00Z"
HELD, OTHER = "content/posts/trip/held.md", "content/posts/trip/photo.png"


@pytest.fixture
def scheduled(site: Site) -> Site:
    """A site whose post `trip` is scheduled, with a file beside it that nobody has declared."""
    site.write_post(HELD, "held\n")
    site.write_post(OTHER, "photo\n")
    site.save("trip", [HELD], scheduledFor=LATER, message="The trip")
    return site


def make(site: Site, slug: str, paths: Sequence[str], made_by: Program = Program.WATCH) -> None:
    """Enqueue a job as a program of ours does."""
    submit(compose(slug, paths, made_by=made_by), queue=site.queue)


def assert_held(site: Site) -> None:
    """The scheduled file is not on the remote, and its job waits as it was."""
    assert site.remote_file(HELD) is None
    (job,) = site.command("list", "--status", "scheduled", "--json").json()
    assert (job["slug"], job["message"], job["scheduledFor"]) == ("trip", "The trip", LATER)


@pytest.mark.parametrize("made_by", Program)
@pytest.mark.parametrize("paths", [[HELD], [OTHER], [OTHER, HELD], ["content/posts/trip/"]], ids=str)
def test_a_program_publishes_nothing_of_a_scheduled_post(
    scheduled: Site, paths: list[str], made_by: Program
) -> None:
    make(scheduled, "trip", paths, made_by)
    scheduled.run_once()
    assert_held(scheduled)
    assert scheduled.remote_file(OTHER) is None
    scheduled.command("publish-now", "trip")
    (published,) = scheduled.run_once().of("published")
    assert published["slug"] == "trip"
    assert scheduled.remote_file(HELD) == "held\n"
    assert scheduled.subjects()[0] == "The trip"


@pytest.mark.parametrize("paths", [[HELD], [HELD, OTHER], [OTHER, "content/posts/"]], ids=str)
def test_a_program_publishes_no_scheduled_file_under_another_slug(scheduled: Site, paths: list[str]) -> None:
    make(scheduled, "posts/trip/held", paths)
    scheduled.run_once()
    assert_held(scheduled)


def test_a_path_that_a_producer_took_over_from_a_program_is_still_withheld(scheduled: Site) -> None:
    make(scheduled, "other", [HELD])
    scheduled.save_post("other", "other\n")
    scheduled.run_once()
    assert_held(scheduled)
    assert scheduled.remote_file("content/posts/other.md") == "other\n"


def test_a_job_that_declares_more_is_withheld_when_it_is_retried_or_published_now(scheduled: Site) -> None:
    scheduled.write_post("content/posts/now.md", "now\n")
    scheduled.save("all", ["content/posts/"], scheduledFor=LATER)
    failed = {"status": "failed", "failure": "rejected", "lastError": "refused"}
    scheduled.save("again", ["content/posts/trip/"], **failed)
    assert scheduled.command("publish-now", "all").returncode == 0
    assert scheduled.command("retry", "again").returncode == 0
    scheduled.run_once()
    assert scheduled.remote_file("content/posts/now.md") == "now\n"
    assert scheduled.remote_file(HELD) is None


def test_a_job_that_an_outage_stopped_is_revived_without_what_is_scheduled_since(scheduled: Site) -> None:
    failed = {"status": "failed", "failure": "network", "lastError": "no network"}
    scheduled.save("again", ["content/posts/trip/"], **failed)
    scheduled.save("trip", [HELD, OTHER], **failed, madeBy="watch")
    scheduled.save_post("works", "works\n")
    done = scheduled.run_once()
    assert {each["slug"] for each in done.of("revived")} == {"again", "trip"}
    scheduled.run_once()
    assert_held(scheduled)
    assert scheduled.remote_file(OTHER) is None


# --- undo


@pytest.fixture
def published(site: Site) -> Site:
    """A site whose post `trip` was published twice."""
    for text in ("one\n", "two\n"):
        site.write_post(OTHER, text)
        site.save("trip", [OTHER])
        assert site.run_once().of("published")
    return site


@pytest.mark.parametrize(
    "keys",
    [{}, {"scheduledFor": LATER}, {"attempts": 1, "nextAttemptAt": LATER, "updatedAt": LATER}],
    ids=str,
)
def test_an_undo_declines_while_a_save_of_the_post_waits(published: Site, keys: dict[str, object]) -> None:
    published.write_post(HELD, "held\n")
    saved = published.save("trip", [HELD], **keys)
    before = saved.read_bytes()
    error = published.command("undo", "trip").error(1)
    assert "the queue has a save of trip" in error
    assert "Fix: briter-worker cancel trip" in error
    assert (published.worktree / OTHER).read_text() == "two\n"
    assert [saved.read_bytes(), *published.queue.glob("*.json")] == [before, saved]


def test_an_undo_declines_where_another_scheduled_post_declares_a_file_of_it(published: Site) -> None:
    published.save("album", ["content/posts/trip"], scheduledFor=LATER)
    error = published.command("undo", "trip").error(1)
    assert f"{OTHER} belongs to a scheduled post" in error
    assert (published.worktree / OTHER).read_text() == "two\n"
    assert [job["slug"] for job in published.jobs()] == ["album"]


def test_an_undo_declines_while_a_save_of_the_post_is_in_flight(published: Site) -> None:
    push = published.hold_push()
    published.write_post(HELD, "held\n")
    published.save("trip", [HELD])
    with published.running():
        push.wait()
        assert "claimed" in published.command("undo", "trip").error(1)
        push.release()


def test_a_post_that_failed_can_be_undone(published: Site) -> None:
    published.save("trip", ["content/posts/never.md"], status="failed", failure="rejected", lastError="x")
    assert published.command("undo", "trip").returncode == 0
    assert published.run_once().of("published")
    assert published.remote_file(OTHER) == "one\n"
