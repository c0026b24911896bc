"""A site moves from its folder into the cluster, and back: nothing is lost or changed on the way."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from sites import Site

from briter_worker.queues.postgres.queue import PostgresQueue

if TYPE_CHECKING:
    from sites import Result

    from briter_worker.queues.postgres.database import Database

LATE = "2099-01-01T09:00:00.000Z"
SOON = "2098-01-01T09:00:00.000Z"


@pytest.fixture
def cluster(site: Site, database_url: str) -> Site:
    site.env["BRITER_DATABASE_URL"] = database_url
    site.env["BRITER_SITE"] = "blog"
    made = site.command("site", "add", "blog", "--remote", str(site.remote))
    assert made.returncode == 0, made.stderr
    return site


def ok(result: Result) -> Any:  # noqa: ANN401 - any JSON
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def jobs(site: Site) -> dict[str, dict[str, Any]]:
    return {job["slug"]: job for job in site.jobs()}


def queue_of(database: Database) -> PostgresQueue:
    return PostgresQueue(database, "blog", longest_delay=1800.0, dry_run=False)


@pytest.fixture
def other(cluster: Site, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Another host, with a clone of its own and an empty folder of jobs."""
    other = Site(tmp_path_factory.mktemp("other"), dict(cluster.env))
    cluster.git("clone", "--quiet", str(cluster.remote), str(other.worktree), cwd=cluster.root)
    return other


def a_full_folder(site: Site) -> dict[str, dict[str, Any]]:
    """One job of each kind, with keys that the worker does not know."""
    for name in ("hold", "retry", "dead", "new", "again"):
        site.write_post(f"content/posts/{name}.md", f"# {name}\n")
    site.write_post("content/posts/welcome.md", "# Welcome, changed\n")
    site.write_post("content/gallery/a.md", "a")
    site.write_post("content/gallery/b.md", "b")
    site.save(
        "hold", ["content/posts/hold.md"], scheduledFor=LATE, message="Ünïcode", theme={"dark": [1, None]}
    )
    site.save(
        "retry",
        ["content/posts/retry.md"],
        status="pending",
        attempts=3,
        nextAttemptAt=SOON,
        lastError="the remote was away",
        failure="network",
        updatedAt="2026-01-01T00:00:00.000Z",
        author={"name": "Ada", "email": "ada@example.org"},
    )
    site.save(
        "dead",
        ["content/posts/dead.md"],
        status="failed",
        attempts=8,
        lastError="it conflicts",
        failure="conflict",
        priority=7,
    )
    site.save("new", ["content/posts/new.md", "content/posts/welcome.md"], scheduledFor=LATE)
    site.save("gallery", ["content/gallery"], scheduledFor=LATE)
    site.save("gone", ["content/posts/never.md"], scheduledFor=LATE)
    return jobs(site)


def test_holds_retries_dead_letters_unknown_keys_ids_and_contents_survive_the_way_there_and_back(
    cluster: Site, other: Site, database: Database
) -> None:
    before = a_full_folder(cluster)
    moved = ok(cluster.command("import", "--json"))
    assert moved["jobs"] == len(before)
    assert cluster.jobs() == []
    states = {row["slug"]: row["state"] for row in ok(cluster.command("list", "--json"))}
    assert states == {
        **dict.fromkeys(("hold", "new", "gallery", "gone"), "scheduled"),
        "retry": "retrying",
        "dead": "failed",
    }
    back = ok(other.command("export", "--json"))
    assert back == {"jobs": len(before), "stayed": {}, "remarks": {}}
    assert jobs(other) == before
    for name in ("hold", "retry", "dead", "new"):
        assert (other.worktree / f"content/posts/{name}.md").read_text() == f"# {name}\n"
    assert (other.worktree / "content/posts/welcome.md").read_text() == "# Welcome, changed\n"
    assert (other.worktree / "content/gallery/b.md").read_text() == "b"
    assert ok(other.command("list", "--json")) == []
    with database.transaction() as connection:
        assert connection.execute("SELECT count(*) FROM files").fetchone() == (0,)
        assert connection.execute("SELECT count(*) FROM superseded").fetchone() == (0,)


def test_what_the_cms_has_changed_since_is_not_written_over(cluster: Site, other: Site) -> None:
    cluster.save_post("welcome", "# From here\n", scheduledFor=LATE)
    ok(cluster.command("import", "--json"))
    other.write_post("content/posts/welcome.md", "# Edited there\n")
    moved = ok_with_warnings(other.command("export", "--json"))
    assert "changed here since" in moved["remarks"]["content/posts/welcome.md"]
    assert (other.worktree / "content/posts/welcome.md").read_text() == "# Edited there\n"
    assert [job["slug"] for job in other.jobs()] == ["welcome"]


def ok_with_warnings(result: Result) -> Any:  # noqa: ANN401 - any JSON
    assert result.returncode == 0, result.stderr
    assert "warning: " in result.stderr
    return json.loads(result.stdout)


def test_a_job_whose_files_cannot_be_sent_stays_and_is_named(cluster: Site) -> None:
    cluster.write_post("content/posts/a.md", "a")
    cluster.write_post("content/posts/film.md", "x" * 2000)
    cluster.save("a", ["content/posts/a.md"])
    cluster.save("film", ["content/posts/film.md"])
    result = cluster.command("import", "--json", BRITER_WORKER_MAX_FILE_BYTES="1000")
    assert result.returncode == 1
    moved = json.loads(result.stdout)
    assert moved["jobs"] == 1
    assert "content/posts/film.md has 2000 bytes" in moved["stayed"]["film"]
    assert [job["slug"] for job in cluster.jobs()] == ["film"]


def test_a_move_that_ended_in_the_middle_goes_on(cluster: Site, database: Database) -> None:
    """Killed between the database's commit and the removal of the file: the job is in both places."""
    cluster.write_post("content/posts/a.md", "a")
    file = cluster.save("a", ["content/posts/a.md"], scheduledFor=LATE)
    text = file.read_text()
    ok(cluster.command("import", "--json"))
    file.write_text(text)
    assert ok(cluster.command("import", "--json"))["jobs"] == 1
    (row,) = queue_of(database).jobs(time.time())
    assert row.job.id == json.loads(text)["id"]
    assert cluster.jobs() == []
    with database.transaction() as connection:
        assert connection.execute("SELECT count(*) FROM superseded").fetchone() == (0,)


def test_nothing_is_moved_under_a_worker_that_publishes(cluster: Site) -> None:
    cluster.save("a", ["content/posts/a.md"], scheduledFor=LATE)
    with cluster.running(BRITER_DATABASE_URL="", BRITER_SITE="") as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        for command in ("import", "export"):
            result = cluster.command(command)
            assert result.returncode == 1
            assert f"a worker (PID {worker.pid}) publishes from {cluster.queue}" in result.stderr
    assert len(cluster.jobs()) == 1
