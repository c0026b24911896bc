"""A post that is saved again and again is published when its author pauses, with all who wrote it."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from cluster_farm import Farm
from postgres_queues import control_queue
from sites import eventually, lines_of

from briter_worker.cluster import sites
from briter_worker.job import State, format_time, parse_time

if TYPE_CHECKING:
    from pathlib import Path

    from sites import Site

    from briter_worker.queues.postgres.database import Database

POST = "content/posts/hello.md"
QUIET = {"BRITER_WORKER_QUIET_MS": "60000", "BRITER_WORKER_QUIET_MAX_MS": "90000"}


def save(site: Site, text: str = "Hello\n", *, age: float = 0.0, **keys: object) -> None:
    site.write_post(POST, text)
    site.save("hello", [POST], createdAt=format_time(time.time() - age), **keys)


def listed(site: Site, **env: str) -> dict[str, Any]:
    (job,) = json.loads(site.command("list", "--json", **env).stdout)
    return dict(job)


def subjects(site: Site) -> list[str]:
    return [subject for _, subject in site.remote_log()]


def test_what_is_still_quiet_is_left_and_shown_with_its_end(site: Site) -> None:
    save(site, age=5.0)
    result = site.run_once(**QUIET)
    assert (result.returncode, result.names()) == (0, ["worker-started", "worker-stopped"])
    job = listed(site, **QUIET)
    assert job["state"] == "quiet"
    assert parse_time(job["quietUntil"]) == pytest.approx(parse_time(job["createdAt"]) + 60)
    assert listed(site)["state"] == "pending"
    status = json.loads(site.command("status", "--json", **QUIET).stdout)
    assert (status["jobs"]["quiet"], status["nextDue"][:19]) == (1, job["quietUntil"][:19])
    assert f"quietUntil\t{job['quietUntil']}" in site.command("show", "hello", **QUIET).stdout


def test_a_worker_makes_one_commit_of_what_is_saved_again_and_again(site: Site) -> None:
    with site.running("run", BRITER_WORKER_QUIET_MS="1000", BRITER_WORKER_POLL_INTERVAL_MS="60000"):
        for number in range(5):
            save(site, f"{number}\n", message=f"save {number}")
        eventually(lambda: site.remote_file(POST) == "4\n")
    assert subjects(site)[0] == "save 4"
    assert len(subjects(site)) == 2


@pytest.mark.parametrize("is_on", [True, False])
def test_authors_of_superseded_saves_are_named_in_trailers_if_wanted(site: Site, is_on: bool) -> None:  # noqa: FBT001
    ada, bob = ({"name": name, "email": f"{name}@example.org"} for name in ("Ada", "Bob"))
    for age, author in ((9.0, bob), (8.0, ada), (7.0, bob), (6.0, ada)):
        save(site, age=age, author=author, message="Hello\n\nBody\n")
    assert site.run_once(BRITER_GIT_CO_AUTHORS=str(is_on).lower()).of("published")
    message = site.git("log", "-1", "--format=%an%n%B", "main", cwd=site.remote).rstrip("\n")
    trailer = "\n\nCo-authored-by: Bob <Bob@example.org>" if is_on else ""
    assert message == f"Ada\nHello\n\nBody{trailer}"
    trailers = site.git("log", "-1", "--format=%(trailers:key=Co-authored-by)", "main", cwd=site.remote)
    assert trailers.strip() == trailer.strip()


@pytest.mark.parametrize(
    "forged",
    [
        [{"name": "A\nSigned-off-by: B", "email": "a@b.c"}],
        [{"name": "A", "email": "a@b.c>\n"}],
        ["A <a@b.c>"],
    ],
)
def test_forged_co_authors_are_refused(site: Site, forged: object) -> None:
    save(site, age=9.0, coAuthors=forged)
    assert site.run_once(BRITER_GIT_CO_AUTHORS="true").returncode == 1
    assert site.job("hello")["failure"] == "malformed"
    assert len(subjects(site)) == 1


def test_the_doctor_proposes_a_quiet_time_for_a_post_published_again_and_again(site: Site) -> None:
    for number in range(6):
        save(site, f"{number}\n")
        assert site.run_once().of("published")
    with site.running("run") as worker:
        next(lines_of(worker))
        findings = json.loads(site.command("doctor", "--json").stdout)["findings"]
        assert '"quiet-time"' not in site.command("doctor", "--json", **QUIET).stdout
    (finding,) = [each for each in findings if each["check"] == "quiet-time"]
    assert finding["state"] == "warning"
    assert finding["message"].startswith("hello was published 5 times within 60 s")
    assert "BRITER_WORKER_QUIET_MS" in finding["fix"]


def test_each_site_of_a_cluster_has_its_own_quiet_time(
    tmp_path: Path, database: Database, database_url: str
) -> None:
    farm = Farm(tmp_path, database, database_url)
    try:
        farm.add("blog", workerQuietMs=120_000)
        farm.add("shop")
        farm.save("blog", "post")
        farm.save("blog", "post")
        farm.save("shop", "offer")
        done = farm.once()
        assert done.returncode == 0, done.stdout + done.stderr
        assert (farm.published("blog"), farm.published("shop")) == (Counter(), Counter({"offer": 1}))
        queue = control_queue(database, "blog")
        assert [row.state for row in queue.jobs(time.time())] == [State.QUIET]
        assert [summary.jobs["quiet"] for summary in sites.summaries(database, time.time())] == [1, 0]
        queue.publish_now("post", time.time())
        assert farm.once().returncode == 0
        assert farm.published("blog") == Counter({"post": 1})
    finally:
        farm.end()
