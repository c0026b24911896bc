"""What a scheduled job declares is not published before its time, whatever becomes of its file."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from sites import Result, Site

LATER = "content/posts/later.md"
SCHEDULED: dict[str, object] = {
    "id": "later",
    "slug": "later",
    "paths": [LATER],
    "scheduledFor": "2999-01-01",
}


@pytest.fixture
def job(site: Site) -> Path:
    """Return the file of a scheduled job, beside a due job for the folder of the job's post."""
    site.write_post(LATER, "later\n")
    site.write_post("content/posts/now.md", "now\n")
    return site.queue / "later.json"


def publish_folder(site: Site) -> Result:
    site.save("all", ["content/posts"])
    return site.run_once()


def put(job: Path, data: bytes, *, age: float = 0.0) -> None:
    job.write_bytes(data)
    os.utime(job, (time.time() - age,) * 2)


BROKEN: dict[str, dict[str, object]] = {
    "negative attempts": {"attempts": -1},
    "a bad time": {"scheduledFor": "next week"},
    "a bad author": {"author": {"name": 7}},
    "never scheduled": {"scheduledFor": None, "attempts": -1},
}
DAMAGES = {
    "torn": b'{"id": "later", "slug": "la',
    "empty": b"",
    "paths unreadable": json.dumps(SCHEDULED | {"paths": 7}).encode(),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_malformed_job_that_no_worker_saw_before_withholds_what_it_names(
    site: Site, job: Path, broken: str
) -> None:
    put(job, json.dumps(SCHEDULED | BROKEN[broken]).encode())
    for _ in range(2):
        publish_folder(site)
        assert site.remote_file("content/posts/now.md") == "now\n"
        assert site.remote_file(LATER) is None
    assert site.job("all")["lastError"] == f"a job that cannot be read declares {LATER}"


def test_what_is_scheduled_while_the_files_are_read_waits_for_its_time(site: Site, job: Path) -> None:
    late = site.root / "late.json"
    late.write_text(json.dumps(SCHEDULED))
    site.git("config", "filter.late.clean", f"mv {late} {job} 2>/dev/null; cat")
    site.write_post(".gitattributes", "*.late filter=late\n")
    site.write_post("content/posts/read.late", "read\n")
    publish_folder(site)
    assert site.remote_file("content/posts/now.md") == "now\n"
    assert not late.exists()
    assert site.remote_file(LATER) is None


@pytest.mark.parametrize("path", [f"./{LATER}", "content//posts/later.md", "content/posts/./later.md"])
def test_another_spelling_of_a_scheduled_path_withholds_the_file_too(
    site: Site, job: Path, path: str
) -> None:
    put(job, json.dumps(SCHEDULED | {"paths": [path]}).encode())
    publish_folder(site)
    assert site.remote_file("content/posts/now.md") == "now\n"
    assert site.remote_file(LATER) is None


@pytest.mark.parametrize("age", [0.0, 60.0])
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_an_earlier_worker_read_stays_withheld_when_the_file_is_damaged(
    site: Site, job: Path, damage: str, age: float
) -> None:
    put(job, json.dumps(SCHEDULED).encode(), age=90.0)
    site.run_once()  # as cron starts one
    put(job, DAMAGES[damage], age=age)
    for _ in range(2):
        publish_folder(site)
        assert site.remote_file("content/posts/now.md") == "now\n"
        assert site.remote_file(LATER) is None


def test_a_folder_waits_for_a_half_written_job_of_which_nothing_is_known(site: Site, job: Path) -> None:
    put(job, b'{"id": "later", "slug": "la', age=-3600.0)  # a clock ahead: it stays young
    site.save("exact", ["content/posts/now.md"])
    folder = site.save("all", ["content/posts"])
    result = site.run_once()
    assert [event["slug"] for event in result.of("published")] == ["exact"]
    assert site.remote_file(LATER) is None
    document = json.loads(folder.read_bytes())
    assert document["attempts"] == 0
    assert "still being written" in document["lastError"]
    put(job, json.dumps(SCHEDULED).encode())
    publish_folder(site)
    assert site.remote_file(LATER) is None


def test_withheld_files_are_free_when_the_damaged_job_is_cancelled(site: Site, job: Path) -> None:
    put(job, json.dumps(SCHEDULED | {"attempts": -1}).encode())
    publish_folder(site)
    assert site.remote_file(LATER) is None
    assert site.command("cancel", "later").returncode == 0
    publish_folder(site)
    assert site.remote_file(LATER) == "later\n"
