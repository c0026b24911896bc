"""A person steers from outside while the worker runs: cancels, pauses, hurries."""

from __future__ import annotations

import json
import os
import pwd
from typing import TYPE_CHECKING, Any

import pytest
from outcomes import save
from sites import Site, eventually, lines_of

from briter_worker.queues.disk.index import PAUSE_FILE

if TYPE_CHECKING:
    from pathlib import Path


HOUR_AHEAD = "2999-01-01T00:00:00Z"


def hold(site: Site, folder: Path, then: str) -> tuple[Path, Path]:
    """Have every push wait in a hook; the file that shows it began, and the one that ends the wait."""
    began, end = folder / "began", folder / "end"
    site.hook(f"touch '{began}'\nwhile [ ! -e '{end}' ]; do sleep 0.02; done\n{then}")
    return began, end


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
        assert [job["cancelled"] for job in json.loads(done.stdout)] == [False]
        end.touch()
        lines = lines_of(worker)
        seen = until(lines, "published") + until(lines, "cancelled")
        assert sorted((line["event"], line["slug"]) for line in seen if "slug" in line) == [
            ("cancelled", "goes"),
            ("published", "stays"),
            ("start", "goes"),
            ("start", "stays"),
        ]
    assert [subject for _, subject in site.remote_log()][:2] == ["Publish stays", "Slow filter"]
    assert site.jobs() == []
    assert site.remote_file("content/posts/goes.md") is None


def test_a_retry_that_is_cancelled_is_not_written_back(site: Site, tmp_path: Path) -> None:
    began, end = hold(site, tmp_path, "echo 'no' >&2\nexit 1")
    save(site, "a")
    with site.running() as worker:
        eventually(began.exists)
        site.command("cancel", "a")
        end.touch()
        seen = until(lines_of(worker), "cancelled", "failed", "dead-lettered")
    assert seen[-1]["event"] == "cancelled"
    assert site.jobs() == []


def test_a_paused_site_publishes_nothing_and_goes_on_at_once_when_resumed(site: Site) -> None:
    said = site.command("pause", "--reason", "moving house")
    assert "moving house" in said.stdout
    save(site, "a")
    done = site.run_once()
    assert (done.returncode, done.names()) == (0, ["worker-started", "paused", "worker-stopped"])
    assert json.loads(site.command("status", "--json").stdout)["paused"]["reason"] == "moving house"
    assert "moving house" in site.command("status").stdout
    assert "moving house" in site.command("list").stderr
    doctor = json.loads(site.command("doctor", "--json").stdout)
    assert [each["fix"] for each in doctor["findings"] if each["check"] == "pause"]
    with site.running(BRITER_WORKER_POLL_INTERVAL_MS="60000") as worker:
        lines = lines_of(worker)
        until(lines, "paused")
        assert site.command("resume").returncode == 0
        assert [line["event"] for line in until(lines, "published")] == ["resumed", "start", "published"]


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
    done = json.loads(site.command("history", "--actions", "--json").stdout)
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
