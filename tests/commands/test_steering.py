"""A person steers from outside while the worker runs: cancels, pauses, hurries."""

from __future__ import annotations

import os
import pwd
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from outcomes import save
from queue_backends import control_queue
from sites import Site, eventually, lines_of

from briter_worker.cluster import sites
from briter_worker.job import State, format_time, parse_time
from briter_worker.queues.disk.index import PAUSE_FILE

if TYPE_CHECKING:
    from pathlib import Path

    from cluster_farm import Farm
    from sites import Site


HOUR_AHEAD = "2999-01-01T00:00:00Z"


def until(lines: Any, *wanted: str) -> list[dict[str, Any]]:  # noqa: ANN401 - a generator
    """The log up to the first of these events."""
    seen = []
    for line in lines:
        seen.append(line)
        if line["event"] in wanted:
            return seen
    pytest.fail(f"the worker ended without {wanted}")


def test_a_post_that_is_cancelled_before_its_push_is_left_out_of_it_and_the_others_go(
    site: Site, tmp_path: Path
) -> None:
    # A filter holds the drain while it reads the posts: after the claim, before the push.
    began, end = tmp_path / "began", tmp_path / "end"
    end.touch()
    script = f"touch '{began}'; while [ ! -e '{end}' ]; do sleep 0.02; done; cat"
    site.git("config", "filter.slow.clean", script)
    site.write_post(".gitattributes", "*.md filter=slow\n")
    site.commit_all("Slow filter")
    end.unlink()
    began.unlink(missing_ok=True)
    for slug in ("stays", "goes"):
        site.save_post(slug, slug)
    with site.running() as worker:
        eventually(began.exists)
        done = site.command("cancel", "goes", "--json")
        assert [job["cancelled"] for job in done.json()] == [False]
        end.touch()
        lines = lines_of(worker)
        ends = ("published", "cancelled")
        seen = until(lines, *ends) + until(lines, *ends)
        assert sorted((line["event"], line["slug"]) for line in seen if "slug" in line) == [
            ("cancelled", "goes"),
            ("published", "stays"),
            ("start", "goes"),
            ("start", "stays"),
        ]
    assert site.subjects()[:2] == ["Publish stays", "Slow filter"]
    assert site.jobs() == []
    assert site.remote_file("content/posts/goes.md") is None


def test_a_retry_that_is_cancelled_is_not_written_back(site: Site) -> None:
    push = site.hold_push("echo 'no' >&2\nexit 1")
    save(site, "a")
    with site.running() as worker:
        push.wait()
        site.command("cancel", "a")
        push.release()
        seen = until(lines_of(worker), "cancelled", "failed", "dead-lettered")
    assert seen[-1]["event"] == "cancelled"
    assert site.jobs() == []


def test_a_paused_site_publishes_nothing_and_goes_on_at_once_when_resumed(site: Site) -> None:
    said = site.command("pause", "--reason", "moving house")
    assert "moving house" in said.stdout
    save(site, "a")
    done = site.run_once()
    assert (done.returncode, done.names()) == (0, ["worker-started", "paused", "worker-stopped"])
    assert site.command("status", "--json").json()["paused"]["reason"] == "moving house"
    rows = dict(line.split("\t") for line in site.command("status").stdout.splitlines())
    assert rows["paused"] == "until briter-worker resume: moving house"
    assert rows["next due"] == "when publishing is resumed"
    assert "moving house" in site.command("list").stderr
    assert site.command("doctor", "--json").finding("pause")["fix"]
    with site.running(BRITER_WORKER_POLL_INTERVAL_MS="60000") as worker:
        lines = lines_of(worker)
        until(lines, "paused")
        assert site.command("resume").returncode == 0
        began = time.monotonic()
        assert [line["event"] for line in until(lines, "published")] == ["resumed", "start", "published"]
        assert time.monotonic() - began < 30, "the worker waited for the next poll"


def test_a_post_that_waits_says_for_what(site: Site) -> None:
    site.save("a", ["content/posts/a.md"])
    assert "no worker is running" in site.command("show", "a").stderr
    site.command("pause", "--reason", "Lunch")
    assert "paused until briter-worker resume: Lunch" in site.command("show", "a").stderr
    with site.running("show", "a", "--watch") as watching:
        assert watching.stdout is not None
        assert watching.stdout.readline() == "pending; paused until briter-worker resume: Lunch\n"
        site.command("resume")
        assert watching.stdout.readline().startswith("pending; no worker is running")
        site.command("cancel", "a")
        assert watching.stdout.readline().startswith("cancelled")


def test_a_pause_ends_by_itself(site: Site) -> None:
    save(site, "a")
    site.command("pause")
    with site.running() as worker:
        lines = lines_of(worker)
        until(lines, "paused")
        site.command("pause", "--for", "1s")  # not before: a slow worker would begin after its end
        seen = until(lines, "published")
    assert [line["event"] for line in seen][-3:] == ["resumed", "start", "published"]


def test_a_pause_that_makes_no_sense_is_refused(site: Site) -> None:
    done = site.command("pause", "--for", "soon")
    assert done.returncode == 2
    assert "such as 90s, 30m, 2h or 1d" in done.stderr
    assert not (site.queue / PAUSE_FILE).exists()


def test_who_steered_is_in_the_history(site: Site) -> None:
    for slug in ("a", "b"):
        site.save(slug, [f"content/posts/{slug}.md"], scheduledFor=HOUR_AHEAD)
    steps = ["publish-now a", "cancel b", "pause", "resume", "resume", "retry c"]
    for step in steps:
        site.command(*step.split())
    done = site.command("history", "--actions", "--json").json()
    found = [(each["action"], each.get("slug")) for each in reversed(done)]
    assert found == [("publish-now", "a"), ("cancel", "b"), ("pause", None), ("resume", None)]
    assert {each["by"] for each in done} == {pwd.getpwuid(os.getuid()).pw_name}
    assert site.command("history", "--actions", "--slug", "b").stdout.count("\n") == 1


def test_a_worker_logs_what_users_do_beside_it_and_did_before_it(site: Site) -> None:
    me = pwd.getpwuid(os.getuid()).pw_name
    site.run_once()
    site.save("a", ["content/posts/a.md"], scheduledFor=HOUR_AHEAD)
    site.command("publish-now", "a")
    with site.running() as worker:
        lines = lines_of(worker)
        first = until(lines, "steered")[-1]
        site.command("pause")
        second = until(lines, "steered")[-1]
    assert [(each["by"], each["action"], each.get("slug")) for each in (first, second)] == [
        (me, "publish-now", "a"),
        (me, "pause", None),
    ]


# A post that is saved again and again is published when its author pauses, with all who wrote it


POST = "content/posts/hello.md"
QUIET = {"BRITER_WORKER_QUIET_MS": "60000", "BRITER_WORKER_QUIET_MAX_MS": "90000"}


def save_hello(site: Site, text: str = "Hello\n", *, age: float = 0.0, **keys: object) -> None:
    site.save_post("hello", text, createdAt=format_time(time.time() - age), **keys)


def listed(site: Site, **env: str) -> dict[str, Any]:
    (job,) = site.command("list", "--json", **env).json()
    return dict(job)


def test_what_is_still_quiet_is_left_and_shown_with_its_end(site: Site) -> None:
    save_hello(site, age=5.0)
    result = site.run_once(**QUIET)
    assert (result.returncode, result.names()) == (0, ["worker-started", "worker-stopped"])
    job = listed(site, **QUIET)
    assert job["state"] == "quiet"
    assert parse_time(job["quietUntil"]) == pytest.approx(parse_time(job["createdAt"]) + 60)
    assert listed(site)["state"] == "pending"
    status = site.command("status", "--json", **QUIET).json()
    assert (status["jobs"]["quiet"], status["nextDue"][:19]) == (1, job["quietUntil"][:19])
    assert f"quietUntil\t{job['quietUntil']}" in site.command("show", "hello", **QUIET).stdout


def test_a_worker_makes_one_commit_of_what_is_saved_again_and_again(site: Site) -> None:
    with site.running("run", BRITER_WORKER_QUIET_MS="4000", BRITER_WORKER_POLL_INTERVAL_MS="60000"):
        for number in range(5):
            save_hello(site, f"{number}\n", message=f"save {number}")
        eventually(lambda: site.remote_file(POST) == "4\n")
    assert site.subjects()[0] == "save 4"
    assert len(site.subjects()) == 2


@pytest.mark.parametrize("is_on", [True, False])
def test_authors_of_superseded_saves_are_named_in_trailers_if_wanted(site: Site, is_on: bool) -> None:  # noqa: FBT001
    ada, bob = ({"name": name, "email": f"{name}@example.org"} for name in ("Ada", "Bob"))
    for age, author in ((9.0, bob), (8.0, ada), (7.0, bob), (6.0, ada)):
        save_hello(site, age=age, author=author, message="Hello\n\nBody\n")
    assert site.run_once(BRITER_GIT_CO_AUTHORS=str(is_on).lower()).of("published")
    message = site.git("log", "-1", "--format=%an%n%B", "main", cwd=site.remote).rstrip("\n")
    trailer = "\n\nCo-authored-by: Bob <Bob@example.org>" if is_on else ""
    assert message == f"Ada\nHello\n\nBody{trailer}"
    trailers = site.git("log", "-1", "--format=%(trailers:key=Co-authored-by)", "main", cwd=site.remote)
    assert trailers.strip() == trailer.strip()


def test_the_doctor_proposes_a_quiet_time_for_a_post_published_again_and_again(site: Site) -> None:
    for number in range(6):
        save_hello(site, f"{number}\n")
        assert site.run_once().of("published")
    with site.running("run") as worker:
        next(lines_of(worker))
        finding = site.command("doctor", "--json").finding("quiet-time")
        assert '"quiet-time"' not in site.command("doctor", "--json", **QUIET).stdout
    assert finding["state"] == "warning"
    assert finding["message"].startswith("hello was published 5 times within 60 s")
    assert "BRITER_WORKER_QUIET_MS" in finding["fix"]


def test_each_site_of_a_cluster_has_its_own_quiet_time(farm: Farm) -> None:
    farm.add("blog", workerQuietMs=120_000)
    farm.add("shop")
    farm.save("blog", "post")
    farm.save("blog", "post")
    farm.save("shop", "offer")
    farm.once()
    assert (farm.published("blog"), farm.published("shop")) == (Counter(), Counter({"offer": 1}))
    queue = control_queue(farm.database, "blog")
    assert [row.state for row in queue.jobs(time.time())] == [State.QUIET]
    assert [summary.jobs["quiet"] for summary in sites.summaries(farm.database, time.time())] == [1, 0]
    queue.publish_now("post", time.time())
    farm.once()
    assert farm.published("blog") == Counter({"post": 1})
