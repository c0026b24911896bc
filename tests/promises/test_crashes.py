"""Killed at any moment: nothing is lost, nothing is published twice, nothing extra, and nothing wedges."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from outcomes import assert_once, save
from remotes import left_over
from requirements import provide
from sites import eventually, lines_of, program
from soak import kills
from soak.report import Options

if TYPE_CHECKING:
    from pathlib import Path

    from sites import Site


SEED = int(os.environ.get("BRITER_SOAK_SEED") or random.SystemRandom().randrange(2**32))
"""`scripts/test` chooses it, and prints it."""
FAST = {"BRITER_WORKER_BACKOFF_MS": "0", "BRITER_WORKER_POLL_INTERVAL_MS": "100"}


def kill_after_the_push(site: Site, *args: str) -> None:
    """Kill a command's process group while the remote has its commits and it does not know."""
    landed = site.hold_push(name="post-receive")
    with site.running(*args, **FAST) as process:
        landed.wait()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        landed.remove()


@pytest.mark.timeout(300)
def test_kills_at_random_moments_lose_and_double_nothing() -> None:
    told: list[str] = []
    options = Options(full=False, seed=SEED)
    report = kills.run(options, told.append)
    again = f"again with: scripts/soak kills --quick --seed {SEED} --processes {options.processes}"
    assert not report.failures, "\n".join([*told, again])
    assert report.figures["kills while a push was planned"]


def test_a_push_that_landed_while_its_worker_was_killed_is_settled_with_its_commit(site: Site) -> None:
    site.save_post("a", "A\n")
    kill_after_the_push(site)
    commit = site.remote_log()[0][0]

    site.run_once(**FAST)

    assert site.subjects().count("Publish a") == 1
    assert site.jobs() == []
    assert site.git("rev-parse", "main") == commit
    assert site.git("status", "--porcelain") == ""
    receipt = site.command("history", "--json").json()[0]
    assert (receipt["outcome"], receipt["commit"]) == ("published", commit)
    assert receipt["changes"] == [{"path": "content/posts/a.md", "added": 1, "removed": 0, "deleted": False}]


def test_local_commits_whose_pull_was_killed_after_the_push_are_not_rebased_again(site: Site) -> None:
    site.save_post("a", "A\n")
    for number in range(3):
        if number == 2:
            assert site.run_once().returncode == 0
            kill_after_the_push(site, "pull", "--rebase", "--push")
        site.write_post("theme.css", f"{number}\n")
        site.git("add", "theme.css")
        site.git("commit", "--quiet", f"--message=mine {number}")
    assert site.command("pull", "--rebase", "--push").returncode == 0
    assert site.remote_file("theme.css") == "2\n"
    assert [site.subjects().count(f"mine {number}") for number in range(3)] == [1, 1, 1]
    assert site.git("rev-parse", "main") == site.remote_log()[0][0]
    assert site.git("status", "--porcelain") == ""


def test_what_died_with_its_worker_publishes_nothing_of_a_newer_save_on_hold(site: Site) -> None:
    die_in_a_push(site, "a")
    site.save_post("a", "in the year 2100\n", scheduledFor="2100-01-01")

    assert "superseded" in site.run_once(**FAST).names()

    assert site.remote_file("content/posts/a.md") is None
    assert [job["scheduledFor"] for job in site.jobs()] == ["2100-01-01"]


@pytest.mark.parametrize("moment", ["delay_enter", "delay_exit"], ids=["before", "after"])
def test_a_worker_that_is_killed_as_a_published_job_leaves_the_queue_has_left_one_receipt(
    site: Site, moment: str
) -> None:
    provide("strace", package="strace")
    site.save_post("a", "a\n")
    claimed = site.queue / ".claimed"
    claimed.mkdir()
    leaves = ["-P", str(claimed), "-e", "trace=unlinkat", "-e", f"inject=unlinkat:{moment}=60000000:when=3"]
    worker = [sys.executable, "-m", "briter_worker", "run", "--once"]
    with subprocess.Popen(
        ["strace", "-f", "-qq", "-o", str(site.root / "calls"), *leaves, *worker],
        env=site.environment(),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        # The first two are of markers that the claim removes.
        eventually(lambda: _text(site.root / "calls").count("unlinkat(") == 3)
        eventually(lambda: bool([*claimed.glob("a-*.json")]) == (moment == "delay_enter"))
        os.killpg(process.pid, signal.SIGKILL)
    site.wait_for_lock()  # strace alone was waited for, not the worker that it traced
    ((commit, _), *_) = site.remote_log()
    if moment == "delay_enter":
        assert [event["commit"] for event in site.run_once().of("published")] == [commit]
    assert not [*claimed.glob("a-*.json")]
    (receipt,) = site.command("history", "--json").json()
    assert (receipt["outcome"], receipt["commit"], receipt["attempt"]) == ("published", commit, 1)


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def test_an_orphaned_push_keeps_the_next_worker_out_until_it_is_gone(site: Site) -> None:
    push = site.hold_push()
    site.save_post("a", "A\n")
    with site.running(**FAST) as worker:
        push.wait()
        worker.kill()  # the worker alone: git lives on for a moment, and its remote side until the release
        worker.wait()
    push.hook.unlink()
    assert "published" in site.run_once(**FAST).names()
    push.release()
    eventually(lambda: not left_over(site.remote))
    assert site.subjects().count("Publish a") == 1


def test_a_job_that_kills_its_worker_ends_as_a_dead_letter_and_its_neighbours_do_not(site: Site) -> None:
    site.write_post(".gitattributes", "*.kill filter=killer\n")
    for number in range(4):
        site.save_post(f"p{number}", f"{number}\n", f"content/posts/{number}.md")
    bomb = site.root / "bomb.py"
    # A filter's parent is git; its parent is the worker.
    bomb.write_text(
        "import os, signal\n"
        "git = os.getppid()\n"
        "stat = open(f'/proc/{git}/stat').read().rsplit(')', 1)[1].split()\n"
        "shell = int(stat[1])\n"
        "pids = [shell, int(open(f'/proc/{shell}/stat').read().rsplit(')', 1)[1].split()[1])]\n"
        "for pid in pids:\n"
        "    if 'briter_worker' in open(f'/proc/{pid}/cmdline').read():\n"
        "        os.kill(pid, signal.SIGKILL)\n"
    )
    site.git("config", "filter.killer.clean", f"{sys.executable} {bomb}")
    site.save_post("bomb", "boom\n", "content/posts/bomb.kill")
    for _ in range(12):
        site.run_once(**FAST, BRITER_WORKER_MAX_ATTEMPTS="4")
        site.wait_for_lock()
        if [job["status"] for job in site.jobs()] == ["failed"]:
            break
    (job,) = site.jobs()
    assert (job["slug"], job["status"], job["failure"]) == ("bomb", "failed", "killed-worker")
    assert all(site.subjects().count(f"Publish p{number}") == 1 for number in range(4))


def test_sigterm_lets_a_running_push_end_and_takes_no_new_job(site: Site) -> None:
    push = site.hold_push()
    site.save_post("a", "A\n")
    names = []
    with site.running(**FAST) as worker:
        push.wait()
        worker.terminate()
        site.save_post("b", "B\n")
        for event in lines_of(worker):
            names.append(event["event"])
            if event["event"] == "worker-stopping":
                push.release()
        assert worker.wait() == 0
    assert names == ["worker-started", "start", "worker-stopping", "published", "worker-stopped"]
    assert [job["slug"] for job in site.jobs()] == ["b"]


def test_a_push_that_outlives_the_shutdown_limit_is_ended_and_tried_again_later(site: Site) -> None:
    push = site.hold_push()
    site.save_post("a", "A\n")
    with site.running(**FAST, BRITER_WORKER_SHUTDOWN_TIMEOUT_MS="300") as worker:
        push.wait()
        worker.terminate()
        assert worker.wait(60) == 0
    push.remove()
    result = site.run_once(**FAST)
    assert result.of("published")[0]["attempt"] == 1
    assert site.subjects().count("Publish a") == 1


@pytest.mark.parametrize("hook", ["pre-receive", "post-receive"])
def test_a_second_ctrl_c_ends_a_push_at_once_and_the_next_run_publishes_the_post_once(
    site: Site, hook: str
) -> None:
    push = site.hold_push(name=hook)
    site.save_post("a", "A\n")
    with site.running(**FAST) as worker:
        push.wait()
        worker.send_signal(signal.SIGINT)
        lines = lines_of(worker)
        first = next(event for event in lines if event["event"] == "worker-stopping")
        assert first["message"].startswith("waiting up to 5 min for the running publication to end; a second")
        worker.send_signal(signal.SIGINT)
        second, *_, last = lines
        assert (second["event"], last["event"], worker.wait(20)) == ("worker-stopping", "worker-stopped", 0)
        assert second["message"].endswith("the next run asks the remote whether the push arrived")
    push.remove()
    result = site.run_once(**FAST)
    assert result.returncode == 0
    assert len(result.of("published")) == 1
    assert_once(site, "a")


def test_a_worker_that_is_given_up_does_not_wait_for_a_remote_that_is_silent(site: Site) -> None:
    push = site.hold_push()
    site.save_post("a", "A\n")
    silent = program(site.root / "silent", "exec sleep 60")
    with site.running(**FAST) as worker:
        push.wait()
        site.git("config", "remote.origin.uploadpack", str(silent))
        worker.send_signal(signal.SIGINT)
        lines = lines_of(worker)
        next(event for event in lines if event["event"] == "worker-stopping")
        worker.send_signal(signal.SIGINT)
        assert worker.wait(5) == 0
    assert in_flight(site) == 1


def test_an_idle_worker_stops_without_a_word_of_what_it_waits_for(site: Site) -> None:
    with site.running(**FAST) as worker:
        lines = lines_of(worker)
        assert next(lines)["event"] == "worker-started"
        worker.send_signal(signal.SIGINT)
        assert "message" not in next(lines)


# How the loop ends and how it goes on


def die_in_a_push(site: Site, *slugs: str) -> None:
    """The jobs are in flight, their worker is dead, and the remote has none of them."""
    save(site, *slugs)
    push = site.hold_push("exit 1")
    with site.running(**FAST) as worker:
        push.wait()
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
        push.release()
    push.hook.unlink()


def in_flight(site: Site) -> int:
    return len(list((site.queue / ".claimed").glob("[!.]*.json")))


def test_a_worker_whose_lock_file_is_gone_publishes_nothing_more_and_ends(site: Site) -> None:
    with site.running(**FAST) as worker:
        lines = lines_of(worker)
        assert next(lines)["event"] == "worker-started"
        (site.storage / "worker.lock").unlink()
        save(site, "a")
        *earlier, warning, last = lines
        assert (warning["event"], last["event"], worker.wait()) == ("warning", "worker-stopped", 1)
        assert "lock" in warning["error"]
        assert [event["event"] for event in earlier] in ([], ["start"])
    assert len(site.remote_log()) == 1
    assert site.job("a").get("attempts", 0) == 0
    assert site.run_once().of("published")


def test_a_lock_lost_between_claim_and_push_gives_the_job_back(site: Site) -> None:
    # The filter runs while the post is staged.
    site.write_post(".gitattributes", "*.md filter=thief\n")
    site.git("config", "filter.thief.clean", f"rm -f {site.storage}/worker.lock; cat")
    save(site, "a")
    with site.running(**FAST) as worker:
        names = [event["event"] for event in lines_of(worker)]
        assert (names, worker.wait()) == (["worker-started", "start", "warning", "worker-stopped"], 1)
    assert len(site.remote_log()) == 1
    assert (site.job("a")["slug"], site.job("a").get("attempts", 0)) == ("a", 0)
    assert in_flight(site) == 0


def test_a_stop_during_recovery_leaves_what_has_not_begun(site: Site) -> None:
    die_in_a_push(site, "a", "b", "c", "d")
    push = site.hold_push()
    with site.running(**FAST, BRITER_WORKER_SHUTDOWN_TIMEOUT_MS="200") as worker:
        push.wait()
        worker.terminate()
        assert [event["event"] for event in lines_of(worker)].count("start") == 1, "one by one"
        assert worker.wait() == 0
    push.remove()
    site.run_once(**FAST)
    assert_once(site, *"abcd")


def test_jobs_in_doubt_wait_while_others_go_on_and_are_decided_without_a_restart(site: Site) -> None:
    die_in_a_push(site, "a")
    away = site.root / "away.git"
    site.remote.rename(away)
    with site.running(**FAST) as worker:
        names = (event["event"] for event in lines_of(worker))
        assert [next(names), next(names)] == ["worker-started", "warning"]
        save(site, "b")
        assert [next(names), next(names)] == ["start", "failed"]
        assert in_flight(site) >= 1
        time.sleep(2)  # asked at 0, 0.2, 0.6, 1.4, … s, and told once
        away.rename(site.remote)
        eventually(lambda: len(site.remote_log()) == 3)
        worker.terminate()
        assert "warning" not in names
        assert worker.wait() == 0
    assert site.jobs() == []
