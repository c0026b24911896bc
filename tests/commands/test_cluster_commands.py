"""The commands on a site of a cluster do the same as on a folder; and the move from one to the other."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from postgres import count_rows, execute
from queue_backends import NOW, control_queue, store
from sites import Site

from briter_worker.cluster.health import report_node
from briter_worker.cluster.submit import enqueue
from briter_worker.errors import UsageError
from briter_worker.job import State
from briter_worker.queues.postgres.payloads import PostgresPayloads
from briter_worker.queues.postgres.rows import SiteMissingError
from briter_worker.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from briter_worker.queues.postgres.database import Database


LATE = "2099-01-01T09:00:00.000Z"
POST = "content/posts/hello.md"


@pytest.fixture
def cluster(site: Site, database_url: str) -> Site:
    site.env["BRITER_DATABASE_URL"] = database_url
    for name in ("blog", "shop"):
        made = site.command("site", "add", name, "--remote", str(site.remote))
        assert made.returncode == 0, made.stderr
    site.write_post(POST, "# Hello\n")
    return site


def carried(database: Database, slug: str) -> dict[str, bytes | None]:
    with database.transaction() as connection:
        row = connection.execute("SELECT id, site FROM publications WHERE slug = %s", (slug,)).fetchone()
    assert row is not None
    payloads = PostgresPayloads(database, row[1])
    files = payloads.of([str(row[0])])[str(row[0])].files
    return {file.path: None if file.blob is None else payloads.content(file.blob) for file in files}


# --- enqueue


def test_a_post_is_sent_with_its_files_and_its_site_is_woken(
    cluster: Site, database: Database, woken: Callable[[], bool]
) -> None:
    job = cluster.command(
        *("enqueue", "hello", POST, "content/posts/welcome.md", "-m", "Hello", "--author", "A <a@b.c>"),
        *("--site", "blog", "--json"),
    ).json()
    assert job == {"id": job["id"], "slug": "hello", "site": "blog"}
    (row,) = cluster.command("list", "--site", "blog", "--json").json()
    assert row["id"] == job["id"]
    assert row["paths"] == [POST, "content/posts/welcome.md"]
    assert (row["message"], row["author"], row["state"]) == (
        "Hello",
        {"name": "A", "email": "a@b.c"},
        "pending",
    )
    assert carried(database, "hello") == {POST: b"# Hello\n", "content/posts/welcome.md": b"# Welcome\n"}
    assert woken()
    assert cluster.command("list", "--site", "shop", "--json").json() == []
    assert not cluster.jobs()


def test_the_site_is_the_environments_unless_another_is_named(cluster: Site) -> None:
    assert cluster.command("enqueue", "a", POST, "--json", BRITER_SITE="shop").json()["site"] == "shop"
    named = cluster.command("enqueue", "a", POST, "--site", "blog", "--json", BRITER_SITE="shop")
    assert named.json()["site"] == "blog"
    nowhere = cluster.command("enqueue", "a", POST)
    assert "no site was given. Fix: use --site NAME or BRITER_SITE" in nowhere.error(2)
    assert "there is no site 'nope'" in cluster.command("enqueue", "a", POST, "--site", "nope").error(1)


def test_each_site_sends_only_what_it_may_publish(cluster: Site, database: Database) -> None:
    cluster.write_post("media/a.png", "png")
    cluster.write_post(".env", "canary")
    cluster.command("site", "change", "shop", "--allow", "media")
    cluster.command("enqueue", "a", "media/a.png", "--site", "shop", "--json").json()
    assert carried(database, "a") == {"media/a.png": b"png"}
    for path in ("media/a.png", ".env"):
        result = cluster.command("enqueue", "b", path, POST, "--site", "blog", "--force")
        assert f"warning: {path} will not be published" in result.stderr
        assert carried(database, "b") == {POST: b"# Hello\n"}
        (job,) = cluster.command("list", "--site", "blog", "--json").json()
        assert path in job["paths"], "the worker says why it is refused"


def test_what_is_not_there_or_a_link_is_said_at_once(cluster: Site) -> None:
    missing = cluster.command("enqueue", "a", "content/tpyo.md", "--site", "blog")
    assert "content/tpyo.md is not in" in missing.error(1)
    (cluster.worktree / "content/link.md").symlink_to("/etc/passwd")
    result = cluster.command("enqueue", "a", "content/link.md", "--site", "blog")
    assert "content/link.md will not be published: it is, or is below, a symbolic link" in result.error(1)


def test_a_root_is_refused_where_the_worker_reads_the_files_itself(site: Site) -> None:
    assert "--root needs a cluster" in site.command("enqueue", "a", POST, "--root", "x").error(2)


def test_a_program_in_python_sends_files_or_what_they_contain(
    cluster: Site, database: Database, woken: Callable[[], bool]
) -> None:
    settings = load_settings(cluster.environment(BRITER_SITE="blog"))
    sent = enqueue("hello", [POST], settings=settings, root=cluster.worktree, theme="dark")
    assert (sent.site, sent.left_out, sent.missing) == ("blog", {}, ())
    files = {"content/a.md": b"a", "content/b.md": None}
    other = enqueue("values", files=files, site="shop", settings=settings, message="Values")
    assert other.site == "shop"
    assert carried(database, "values") == files
    assert woken()
    with pytest.raises(ValueError, match="under none of the allowed folders"):
        enqueue("x", files={".env": b"canary"}, settings=settings)
    with pytest.raises(ValueError, match="leave paths and root out"):
        enqueue("x", ["a"], files={"content/a.md": b"a"}, settings=settings)
    with pytest.raises(SiteMissingError):
        enqueue("x", ["content/a.md"], site="nope", settings=settings)
    with pytest.raises(UsageError, match="the site to publish to"):
        enqueue("x", ["content/a.md"], settings=load_settings({}))


# --- look and steer


def test_a_pause_is_one_sites_alone(cluster: Site, woken: Callable[[], bool]) -> None:
    cluster.command("site", "pause", "blog", "--for", "2h", "--reason", "a freeze")
    assert cluster.command("status", "--site", "blog", "--json").json()["paused"]["reason"] == "a freeze"
    assert cluster.command("status", "--site", "shop", "--json").json()["paused"] is None
    assert cluster.command("site", "show", "blog", "--json").json()["paused"] is True
    assert "publishing goes on" in cluster.command("site", "resume", "blog").stdout
    assert cluster.command("status", "--site", "blog", "--json").json()["paused"] is None
    assert woken()
    assert cluster.command("pause", "--site", "shop", "--json").json()["until"] is None
    assert cluster.command("resume", "--site", "shop", "--json").json() == {"resumed": True}


def test_the_status_tells_what_waits_and_that_nobody_is_there_to_publish(cluster: Site) -> None:
    cluster.command("enqueue", "hello", POST, "--site", "blog")
    status = cluster.command("status", "--site", "blog", "--json").json()
    assert (status["jobs"]["pending"], status["hosts"], status["worker"]) == (1, 0, None)
    assert (status["remote"], status["queue"]) == (str(cluster.remote), "the site blog of the cluster")
    text = cluster.command("status", "--site", "blog").stdout
    assert "worker\tno node of the cluster runs" in text
    assert f"publishes\tmain on {cluster.remote}" in text


def test_a_failure_of_the_surroundings_is_the_sites_condition(cluster: Site, database: Database) -> None:
    cluster.command("enqueue", "hello", POST, "--site", "blog")
    assert cluster.command("status", "--site", "blog", "--json").json()["condition"] is None
    with database.transaction() as connection:
        connection.execute(
            "UPDATE publications SET failure = 'network', document = (document::jsonb ||"
            """ '{"failure": "network", "lastError": "the remote is down", "fix": "check it"}')::text"""
        )
    status = cluster.command("status", "--site", "blog", "--json").json()
    assert (status["condition"], status["failure"], status["fix"]) == (
        "the remote is down",
        "network",
        "check it",
    )
    execute(database, "INSERT INTO conditions VALUES ('blog', NULL, NULL, '', 1e11)")
    assert cluster.command("status", "--site", "blog", "--json").json()["condition"] is None


def test_a_site_is_not_removed_with_jobs_unless_that_is_asked_for(cluster: Site, database: Database) -> None:
    cluster.command("enqueue", "hello", POST, "--site", "blog")
    assert "still has 1 job" in cluster.command("site", "remove", "blog").error(1)
    cluster.command("site", "remove", "blog", "--discard", "--json").json()
    assert count_rows(database, "publications") == count_rows(database, "files") == 0
    assert "there is no site 'blog'" in cluster.command("enqueue", "hello", POST, "--site", "blog").error(1)


# --- is all well?


def test_the_doctor_looks_at_the_database_the_hosts_and_the_sites_remote(cluster: Site) -> None:
    live = {"BRITER_WORKER_DRY_RUN": "false"}
    found = cluster.command("doctor", "--site", "blog", "--json", **live).json()
    states = {each["check"]: each["state"] for each in found["findings"]}
    assert found["ok"] is True
    assert (states["database"], states["site"], states["remote"]) == ("ok", "ok", "ok")
    assert states["hosts"] == "warning"
    assert len(cluster.remote_log()) == 1
    said = cluster.command("status", "--site", "blog", "--json").json()["headline"]["text"]
    assert said in [each["message"] for each in found["findings"] if each["check"] == "state"]
    general = cluster.command("doctor", "--json").json()
    assert "remote" not in {each["check"] for each in general["findings"]}


@pytest.mark.parametrize(
    ("arguments", "check", "said"),
    [
        (("--remote", "/nowhere/gone.git"), "remote", "gone.git"),
        (("--branch", "nope"), "remote", "the remote has no branch nope"),
        (("--remote", "https://127.0.0.1:1/x.git", "--credential-env", "NOT_SET"), "remote", "NOT_SET"),
    ],
)
def test_the_doctor_names_what_keeps_a_site_from_being_published(
    cluster: Site, arguments: tuple[str, ...], check: str, said: str
) -> None:
    assert cluster.command("site", "change", "blog", *arguments).returncode == 0
    found = cluster.command("doctor", "--site", "blog", "--json").json(1)["findings"]
    (wrong,) = [each for each in found if each["state"] == "error"]
    assert wrong["check"] == check
    assert said in wrong["message"] + wrong["fix"]


def test_a_host_is_healthy_while_the_database_answers_and_a_worker_lives(
    cluster: Site, database: Database
) -> None:
    assert cluster.command("health", "--no-worker").returncode == 0
    assert "no worker is running" in cluster.command("health").stdout
    report_node(database, "node", {})
    assert cluster.command("health").returncode == 0
    away = "postgresql://u@127.0.0.1:1/x"
    assert cluster.command("health", "--no-worker", BRITER_DATABASE_URL=away).returncode == 1


def test_beside_a_folder_nothing_of_the_cluster_is_loaded(site: Site) -> None:
    site.save("late", [POST], scheduledFor=LATE)
    site.write_post(POST, "Hello\n")
    for command in (["list"], ["status"], ["enqueue", "a", POST], ["run", "--once"], ["pause"]):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "briter_worker", *command],
            cwd=site.root,
            env=site.environment(),
            capture_output=True,
            text=True,
            check=True,
        )
        loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        forbidden = ("psycopg", "briter_worker.cluster", "briter_worker.queues.postgres")
        assert not {name for name in loaded if name.startswith(forbidden)}, command


# A site moves from its folder into the cluster, and back: nothing is lost or changed on the way


SOON = "2098-01-01T09:00:00.000Z"


@pytest.fixture
def moving(cluster: Site) -> Site:
    cluster.env["BRITER_SITE"] = "blog"
    return cluster


def jobs(site: Site) -> dict[str, dict[str, Any]]:
    return {job["slug"]: job for job in site.jobs()}


@pytest.fixture
def other(moving: Site, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Another host, with a clone of its own and an empty folder of jobs."""
    other = Site(tmp_path_factory.mktemp("other"), dict(moving.env))
    moving.git("clone", "--quiet", str(moving.remote), str(other.worktree), cwd=moving.root)
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
    moving: Site, other: Site, database: Database
) -> None:
    before = a_full_folder(moving)
    moved = moving.command("import", "--json").json()
    assert moved["jobs"] == len(before)
    assert moving.jobs() == []
    states = {row["slug"]: row["state"] for row in moving.command("list", "--json").json()}
    assert states == {
        **dict.fromkeys(("hold", "new", "gallery", "gone"), "scheduled"),
        "retry": "retrying",
        "dead": "failed",
    }
    back = other.command("export", "--json").json()
    assert back == {"jobs": len(before), "stayed": {}, "remarks": {}}
    assert jobs(other) == before
    for name in ("hold", "retry", "dead", "new"):
        assert (other.worktree / f"content/posts/{name}.md").read_text() == f"# {name}\n"
    assert (other.worktree / "content/posts/welcome.md").read_text() == "# Welcome, changed\n"
    assert (other.worktree / "content/gallery/b.md").read_text() == "b"
    assert other.command("list", "--json").json() == []
    assert count_rows(database, "files") == count_rows(database, "superseded") == 0


def test_what_the_cms_has_changed_since_is_not_written_over(moving: Site, other: Site) -> None:
    moving.save_post("welcome", "# From here\n", scheduledFor=LATE)
    moving.command("import", "--json").json()
    other.write_post("content/posts/welcome.md", "# Edited there\n")
    exported = other.command("export", "--json")
    assert "warning: " in exported.error(0)
    moved = json.loads(exported.stdout)
    assert "changed here since" in moved["remarks"]["content/posts/welcome.md"]
    assert (other.worktree / "content/posts/welcome.md").read_text() == "# Edited there\n"
    assert [job["slug"] for job in other.jobs()] == ["welcome"]


def test_a_job_whose_files_cannot_be_sent_stays_and_is_named(moving: Site) -> None:
    moving.save_post("a", "a")
    moving.save_post("film", "x" * 2000)
    result = moving.command("import", "--json", BRITER_WORKER_MAX_FILE_BYTES="1000")
    assert result.returncode == 1
    moved = json.loads(result.stdout)
    assert moved["jobs"] == 1
    assert "content/posts/film.md has 2000 bytes" in moved["stayed"]["film"]
    assert [job["slug"] for job in moving.jobs()] == ["film"]


def test_a_move_that_ended_in_the_middle_goes_on(moving: Site, database: Database) -> None:
    """Killed between the database's commit and the removal of the file: the job is in both places."""
    file = moving.save_post("a", "a", scheduledFor=LATE)
    text = file.read_text()
    moving.command("import", "--json").json()
    file.write_text(text)
    assert moving.command("import", "--json").json()["jobs"] == 1
    (row,) = control_queue(database, "blog").jobs(time.time())
    assert row.job.id == json.loads(text)["id"]
    assert moving.jobs() == []
    assert count_rows(database, "superseded") == 0


def test_an_import_supersedes_no_newer_save_of_the_cluster(
    moving: Site, other: Site, database: Database
) -> None:
    moving.save_post("trip", "older\n", "content/posts/trip.md")
    other.save_post("trip", "held\n", "content/posts/trip.md", scheduledFor=LATE)
    other.command("import", "--json").json()
    result = moving.command("import", "--json")
    assert result.returncode == 1
    assert "a newer save of trip" in json.loads(result.stdout)["stayed"]["trip"]
    assert [job["slug"] for job in moving.jobs()] == ["trip"]
    (row,) = control_queue(database, "blog").jobs(time.time())
    assert row.state is State.SCHEDULED


def test_an_import_joins_what_watch_has_found_of_a_scheduled_post(moving: Site, database: Database) -> None:
    moving.save_post("trip", "held\n", "content/posts/trip.md", scheduledFor=LATE)
    moving.write_post("content/posts/photo.md", "photo\n")
    moving.save("trip", ["content/posts/photo.md"], madeBy="watch")
    assert moving.command("import", "--json").json()["jobs"] == 1
    assert moving.jobs() == []
    (row,) = control_queue(database, "blog").jobs(time.time())
    assert row.state is State.SCHEDULED
    assert row.job.paths_of_programs == frozenset(["content/posts/photo.md"])


def test_an_exported_job_is_as_old_as_its_save(other: Site, database: Database) -> None:
    store(database, {"slug": "trip", "paths": []}, site="blog", now=NOW - 1e8)
    other.save("trip", ["content/posts/welcome.md"], scheduledFor=LATE)
    other.command("export", "--json").json()
    (job,) = other.command("list", "--json", BRITER_DATABASE_URL="", BRITER_SITE="").json()
    assert (job["state"], job["paths"]) == ("scheduled", ["content/posts/welcome.md"])


def test_nothing_is_moved_under_a_worker_that_publishes(moving: Site) -> None:
    moving.save("a", ["content/posts/a.md"], scheduledFor=LATE)
    with moving.running(BRITER_DATABASE_URL="", BRITER_SITE="") as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        for command in ("import", "export"):
            result = moving.command(command)
            assert result.returncode == 1
            assert f"a worker (PID {worker.pid}) publishes from {moving.queue}" in result.stderr
    assert len(moving.jobs()) == 1
