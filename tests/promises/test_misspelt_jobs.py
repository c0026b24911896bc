"""An embargo does not fail by a hyphen; and what waited before keys were checked is read as before."""

from __future__ import annotations

import json
import os
import shutil
import time
from typing import TYPE_CHECKING, Any

import pytest
from postgres import add_site
from queue_backends import store

from briter_worker.job import MalformedJobError, format_time
from briter_worker.queues.disk.claims import ClaimFolder
from briter_worker.settings import load_settings
from briter_worker.wiring import open_disk_queue

if TYPE_CHECKING:
    from sites import Result, Site

    from briter_worker.queues.postgres.database import Database

POST = "content/posts/secret.md"
COME = "2099-01-01T00:00:00Z"
KEYS = ["scheduled_for", "scheduled-for", "scheduledfor", "publishAt", "publish_date"]


def warnings_of(done: Result) -> list[str]:
    return [each["error"] for each in done.of("warning") if "which is not read" in each["error"]]


@pytest.mark.parametrize("key", KEYS)
def test_a_job_whose_time_would_be_overlooked_is_refused_and_its_files_are_withheld(
    site: Site, key: str
) -> None:
    site.save_post("secret", "not yet\n", **{key: COME, "note": {"mine": 1}})
    site.save_post("now", "now\n")
    site.save("all", ["content/posts"])
    done = site.run_once()
    (quarantined,) = done.of("quarantined")
    assert f"{key}: " in quarantined["error"]
    assert "scheduledFor" in quarantined["error"]
    assert site.remote_file("content/posts/now.md") == "now\n"
    for _ in range(2):
        site.run_once()
        assert site.remote_file(POST) is None
        job = site.job("secret")
        assert (job["status"], job["failure"], job[key], job["note"]) == (
            "failed",
            "malformed",
            COME,
            {"mine": 1},
        )
    assert len([*(site.storage / "quarantine").iterdir()]) == 1
    (shown,) = site.command("list", "--status", "failed", "--json").json()
    assert (shown["slug"], "scheduledFor" in shown["lastError"]) == ("secret", True)


def test_the_right_save_replaces_the_refused_one(site: Site) -> None:
    site.save_post("secret", "not yet\n", scheduled_for=COME)
    site.run_once()
    site.save_post("secret", "now\n")
    assert site.run_once().of("published")
    assert site.remote_file(POST) == "now\n"


def test_the_file_that_is_claimed_decides(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer writes a misspelt save over the one that the worker has read."""
    saved = site.save_post("secret", "not yet\n")
    queue = open_disk_queue(load_settings(site.environment()))
    take = ClaimFolder.take

    def write_and_take(self: ClaimFolder, name: str) -> str | None:
        saved.write_text(json.dumps({**json.loads(saved.read_text()), "publishOn": COME}))
        monkeypatch.setattr(ClaimFolder, "take", take)
        return take(self, name)

    monkeypatch.setattr(ClaimFolder, "take", write_and_take)
    now = time.time()
    assert queue.claim(now).claims == ()
    assert [each.slug for each in queue.claim(now).quarantined] == ["secret"]


def test_other_near_misses_are_one_warning_and_keys_of_the_cms_are_silent(site: Site) -> None:
    own: dict[str, Any] = {"uid": 1, "path": "x", "authors": ["Ada"], "types": ["post"]}
    site.save_post("secret", "x\n", created_at="2026-01-01", Mesage="x", **own)
    site.git("remote", "set-url", "origin", str(site.root / "away"))
    told = warnings_of(site.run_once())
    assert told == [
        "the job of secret has the key created_at, which is not read",
        "the job of secret has the key Mesage, which is not read",
    ]
    site.git("remote", "set-url", "origin", str(site.remote))
    assert site.command("retry", "secret").returncode == 0
    assert site.run_once().of("published")


# --- the upgrade


def forget_upgrade(site: Site) -> None:
    """Leave the queue as an earlier version does."""
    (site.queue / ".claimed/.lock").write_bytes(b"")


@pytest.fixture
def earlier(site: Site) -> Site:
    """A site on which an earlier version has run; since then, jobs have come that it reads as due."""
    site.run_once()
    forget_upgrade(site)
    site.save_post("secret", "secret\n", scheduled_for=COME)
    site.save_post("failed", "failed\n", publishAt=COME, status="failed", failure="network", lastError="x")
    soon = format_time(time.time() + 1000)
    site.save_post("retrying", "retrying\n", scheduled_for=COME, attempts=2, nextAttemptAt=soon)
    return site


def test_jobs_that_waited_before_the_upgrade_are_read_as_before(earlier: Site) -> None:
    states = {job["slug"]: job["state"] for job in earlier.command("list", "--json").json()}
    assert states == {"secret": "pending", "failed": "failed", "retrying": "retrying"}
    done = earlier.run_once()
    assert [each["slug"] for each in done.of("published")] == ["secret", "failed"]
    assert {each["slug"] for each in done.of("revived")} == {"failed"}
    assert earlier.command("retry", "retrying").returncode == 0
    done = earlier.run_once()
    assert [each["slug"] for each in done.of("published")] == ["retrying"]
    assert earlier.jobs() == []


def test_a_job_that_waited_stays_accepted_when_it_is_rewritten_joined_and_renamed(earlier: Site) -> None:
    job = earlier.queue / next(file.name for file in earlier.queue.glob("secret*"))
    earlier.save_post("secret", "again\n", "content/posts/more.md", scheduled_for=COME)
    earlier.git("remote", "set-url", "origin", str(earlier.root / "away"))
    assert earlier.run_once().of("failed")
    assert not job.exists()
    earlier.git("remote", "set-url", "origin", str(earlier.remote))
    assert earlier.command("retry", "secret").returncode == 0
    assert "secret" in {each["slug"] for each in earlier.run_once().of("published")}
    assert earlier.remote_file("content/posts/more.md") == "again\n"


def test_a_save_after_the_upgrade_is_refused_also_under_an_earlier_name(earlier: Site) -> None:
    (job,) = earlier.queue.glob("secret*")
    written = json.loads(job.read_text())
    assert earlier.command("pause").returncode == 0  # notes what waited, as the worker does
    job.write_text(json.dumps(written))
    os.utime(job)
    assert earlier.command("resume").returncode == 0
    assert [each["slug"] for each in earlier.run_once().of("quarantined")] == ["secret"]
    assert earlier.remote_file(POST) is None


def test_a_folder_that_no_worker_has_used_has_no_jobs_from_before(site: Site) -> None:
    shutil.rmtree(site.queue / ".claimed", ignore_errors=True)
    site.save_post("secret", "secret\n", scheduled_for=COME)
    assert site.run_once().of("quarantined")


# --- other doors


def test_a_cluster_refuses_a_new_job_and_keeps_what_it_has(database: Database) -> None:
    site = add_site(database)
    for key in KEYS:
        with pytest.raises(MalformedJobError, match="scheduledFor"):
            store(database, {"slug": "a", "paths": [], key: COME}, site=site)
