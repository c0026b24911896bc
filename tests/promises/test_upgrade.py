"""What an earlier version (a294fae) left behind is read as it was, from files as that version wrote them."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from briter_worker.job import format_time

if TYPE_CHECKING:
    from sites import Site

LATER = "2099-01-01T00:00:00Z"
QUIET = {"BRITER_WORKER_QUIET_MS": "600000", "BRITER_WORKER_QUIET_MAX_MS": "600000"}
AWAY = {
    "lastError": "git push failed: '/srv/remote.git' does not appear to be a git repository; "
    "Could not read from remote repository",
    "failure": "remote-missing",
    "fix": "check the remote's address: git remote -v, and that its server lets the worker push there",
}


def ago(seconds: float) -> str:
    return format_time(time.time() - seconds)


def left_behind() -> dict[str, dict[str, Any]]:
    """The job files, by slug."""
    ended = {"status": "failed", "attempts": 1, "nextAttemptAt": None, "updatedAt": ago(10)}
    return {
        # Nobody read this key then.
        "waiting": {"createdAt": ago(40), "publishAt": LATER, "priority": 3},
        "watched": {"createdAt": ago(39), "type": "git-sync"},
        "scheduled": {"createdAt": ago(38), "scheduledFor": LATER},
        "retrying": {
            "createdAt": ago(37),
            "scheduled_for": LATER,
            "author": {"name": "Ada", "email": "a@b.c"},
            "status": "pending",
            "attempts": 3,
            "nextAttemptAt": ago(-1000),
            "updatedAt": ago(5),
            **AWAY,
        },
        "dead": {"createdAt": ago(36), **ended, **AWAY, "publish_date": LATER},
        "refused": {
            "createdAt": ago(35),
            **ended,
            "failure": "rejected",
            "fix": "change the post",
            "lastError": "the remote rejected the push: [remote rejected] (pre-receive hook declined)",
        },
        "tried": {
            "createdAt": ago(34),
            "status": "pending",
            "attempts": 0,
            **dict.fromkeys(("nextAttemptAt", "lastError", "failure", "fix")),
            "updatedAt": ago(5),
            "dryRunAt": ago(5),
        },
        "old": {"commitMessage": "As it was spelled", "attempt": 1, "createdAt": ago(33)},
    }


@pytest.fixture
def upgraded(site: Site) -> Site:
    """A site on which the earlier version has run, and is about to be replaced."""
    for slug, keys in left_behind().items():
        site.save_post(slug, f"{slug}\n", **{**keys, "id": f"{slug}-1"})
    claimed = site.queue / ".claimed"
    claimed.mkdir()
    (claimed / ".lock").touch()
    (site.storage / "worker.lock").touch()
    trusted = site.worktree / ".git/briter"
    trusted.mkdir()
    (scheduled,) = site.queue.glob("scheduled*")
    record = {scheduled.name: ["scheduled", ["content/posts/scheduled.md"], time.time() - 38, 4070908800.0]}
    (trusted / "scheduled").write_text(json.dumps(record))
    return site


def states(site: Site, **env: str) -> dict[str, str]:
    return {job["slug"]: job["state"] for job in site.command("list", "--json", **env).json()}


def test_every_job_is_in_the_state_in_which_it_was(upgraded: Site) -> None:
    failed = {"refused": "failed", "dead": "failed"}
    waits = {"scheduled": "scheduled", "retrying": "retrying", **failed}
    due = dict.fromkeys(("waiting", "watched", "old"), "pending")
    assert states(upgraded) == {**waits, **due, "tried": "tried"}
    assert states(upgraded, **QUIET)["waiting"] == "quiet"
    before = {job["id"]: job for job in upgraded.jobs()}
    upgraded.run_once(BRITER_WORKER_DRY_RUN="true", **QUIET)
    after = {job["id"]: job for job in upgraded.jobs()}
    assert before.keys() == after.keys()
    for job_id in ("scheduled-1", "retrying-1", "refused-1", "dead-1", "tried-1"):
        assert after[job_id] == before[job_id]


def test_every_job_ends_as_it_would_have(upgraded: Site) -> None:
    done = upgraded.run_once()
    published = {each["slug"]: each["attempt"] for each in done.of("published")}
    assert published == {"waiting": 1, "watched": 1, "tried": 1, "old": 2, "dead": 1, "retrying": 4}
    assert [each["slug"] for each in done.of("revived")] == ["dead"]
    assert states(upgraded) == {"scheduled": "scheduled", "refused": "failed"}
    assert "As it was spelled" in upgraded.subjects()
    assert upgraded.remote_file("content/posts/scheduled.md") is None
    assert upgraded.command("retry", "refused").returncode == 0
    assert upgraded.command("publish-now", "scheduled").returncode == 0
    assert len(upgraded.run_once().of("published")) == 2
    assert upgraded.jobs() == []


def test_a_job_that_a_killed_worker_had_taken_is_finished(upgraded: Site) -> None:
    for file in (*upgraded.queue.glob("waiting*"), *upgraded.queue.glob("old*")):
        file.rename(upgraded.queue / ".claimed" / f".{file.name}")
    assert states(upgraded)["watched"] == "pending"
    assert {"waiting", "old"} <= {each["slug"] for each in upgraded.run_once().of("published")}


def test_what_a_scheduled_job_declared_stays_withheld_when_its_file_is_damaged(upgraded: Site) -> None:
    (scheduled,) = upgraded.queue.glob("scheduled*")
    scheduled.write_bytes(b'{"id": "sched')
    upgraded.save("all", ["content/posts"])
    upgraded.run_once()
    assert upgraded.remote_file("content/posts/watched.md") == "watched\n"
    assert upgraded.remote_file("content/posts/scheduled.md") is None
