"""What goes on beside the worker: gc, writers at work, a clock that jumps, a log that nobody takes."""

from __future__ import annotations

import os
import subprocess
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from outcomes import assert_published, assert_put_off, assert_sound, save
from queue_backends import NOW, Disk
from remotes import left_over
from sites import Site, eventually, lines_of, program

from briter_worker.errors import Failure, FailureClass, FailureCode
from briter_worker.job import format_time

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("tidying", "attempts"),
    [
        ("gc --quiet", 1),
        ("pack-refs --all --prune", 1),
        # These drop what no ref holds yet, as git's manual warns: that push fails, and the next one lands.
        ("gc --quiet --prune=now", 5),
        ("repack -adq", 5),
    ],
)
def test_posts_are_published_while_somebody_tidies_the_repository(
    site: Site, tidying: str, attempts: int
) -> None:
    loop = f"while :; do git {tidying}; git -C {site.remote} gc --quiet; done 2>/dev/null"
    rounds = 3
    published: list[dict[str, Any]] = []
    with subprocess.Popen(["sh", "-c", loop], cwd=site.worktree, start_new_session=True) as busy:
        try:
            for number in range(rounds):
                save(site, f"a{number}", f"b{number}")

                def all_out() -> bool:
                    # A retry within the same second finds what git left of the pack of the same name.
                    result = site.run_once(BRITER_WORKER_BACKOFF_MS="1100")
                    published.extend(result.of("published"))
                    return not site.jobs()

                eventually(all_out)
        finally:
            os.killpg(busy.pid, 15)
            busy.wait()
            eventually(lambda: not left_over(site.root))
    assert max(event["attempt"] for event in published) <= attempts
    wanted = [f"Publish {slug}{number}" for slug in "ab" for number in range(rounds)]
    assert sorted(site.subjects()) == sorted([*wanted, "Start the site"])
    for left in [*(site.worktree / ".git").rglob("*.lock"), *site.remote.rglob("*.lock")]:
        left.unlink()  # of the git that was killed just now
    assert_sound(site)


# Posts that are written meanwhile


def test_a_post_that_changes_whenever_it_is_read_is_tried_again_later(site: Site) -> None:
    site.write_post(".gitattributes", "*.md filter=restless\n")
    post = site.worktree / "content/posts/a.md"
    filter_ = program(site.root / "filter", f"cat; echo more >> {post}")
    site.git("config", "filter.restless.clean", str(filter_))
    save(site, "a")
    reason = assert_put_off(site, site.run_once(), FailureCode.UNSETTLED, kind=FailureClass.TRANSIENT)
    assert "keeps changing while it is read" in reason
    assert len(site.remote_log()) == 1
    program(filter_, "cat")
    site.command("retry", "a")
    assert_published(site, site.run_once())
    assert site.remote_file("content/posts/a.md") == post.read_text()


def test_a_post_that_is_rewritten_while_its_neighbour_is_read_is_read_again(site: Site) -> None:
    site.write_post(".gitattributes", "*.slow filter=slow\n")
    post = site.worktree / "content/posts/a.md"
    site.git("config", "filter.slow.clean", str(program(site.root / "filter", f"cat; echo newer > {post}")))
    save(site, "a")
    site.save_post("b", "b\n", "content/posts/b.slow")
    assert_published(site, site.run_once(), "a", "b")
    assert site.remote_file("content/posts/a.md") == "newer\n"


@pytest.mark.parametrize("kind", ["clean", "process"])
def test_a_filter_that_fails_stops_no_other_post_whatever_it_prints(site: Site, kind: str) -> None:
    site.git("config", f"filter.odd.{kind}", "echo fatal: connection refused >&2; exit 3")
    site.git("config", "filter.odd.required", "true")
    site.write_post(".gitattributes", "*.odd filter=odd\n")
    save(site, "a")
    site.write_post("content/posts/b.odd", "b\n")
    site.save("b", ["content/posts/b.odd"])
    result = site.run_once()
    assert_published(site, result, "a")
    reason = assert_put_off(site, result, FailureCode.UNSETTLED, slug="b", kind=FailureClass.TRANSIENT)
    assert "the filter of content/posts/b.odd failed" in reason
    assert "git check-attr" in site.job("b")["fix"]


def test_a_path_that_is_missing_and_untracked_waits_and_the_others_are_published(site: Site) -> None:
    save(site, "a")
    site.save("a", ["content/posts/a.md", "content/posts/never.md"], createdAt="2039-01-01T00:00:00Z")
    site.save("b", ["content/posts/never.md"])
    result = site.run_once()
    assert [(e["slug"], e["waitingPaths"]) for e in result.of("published")] == [
        ("a", ["content/posts/never.md"])
    ]
    assert [(e["slug"], e["attempt"], e["failure"]) for e in result.of("failed")] == [("b", 1, "missing")]
    assert [job["failure"] for job in site.jobs()] == ["missing", "missing"]
    assert result.returncode == 1


# Clocks


def test_a_retry_is_never_further_away_than_the_longest_delay(site: Site) -> None:
    """The clock was set back by a year after the failure: the retry is due by our own clock's measure."""
    save(site, "a")
    (file,) = site.queue.glob("a-*.json")
    file.unlink()
    next_year = format_time(time.time() + 365 * 86400)
    times = {"nextAttemptAt": next_year, "updatedAt": next_year}
    site.save("a", ["content/posts/a.md"], attempts=1, failure="network", lastError="x", **times)
    with site.running(BRITER_WORKER_POLL_INTERVAL_MS="100", BRITER_WORKER_BACKOFF_MS="300") as worker:
        published = next(event for event in lines_of(worker) if event["event"] == "published")
    assert published["attempt"] == 2


@pytest.mark.parametrize("jump", [-400 * 86400.0, -3600.0, 3600.0, 400 * 86400.0])
def test_a_wall_clock_that_jumps_delays_no_retry_and_forgets_no_hold(tmp_path: Path, jump: float) -> None:
    disk = Disk(tmp_path)
    disk.save("a", ["x"], created=NOW)
    disk.save("held", ["y"], created=NOW, scheduledFor=format_time(NOW + 900 * 86400))
    (claim,) = disk.queue.claim(NOW).claims
    disk.queue.retry_later(claim, Failure(FailureCode.LOST_RACE, "busy"), at=NOW + 60)
    later = NOW + jump
    due = disk.queue.next_due(later)
    assert due is not None
    assert due <= later + 1800.0, "the longest delay"
    again = disk.queue.claim(due).claims
    assert [(claim.job.slug, claim.attempt) for claim in again] == [("a", 2)]


@pytest.mark.parametrize(
    ("script", "least"),
    [
        ("$worker run --once >&-", 0),
        ("$worker run --once > /dev/full", 1),
        ("$worker run --once | true", 0),
        ("$worker run --once | sleep 3", 0),
    ],
    ids=["closed", "a full disk", "a reader that left", "a reader that does not read"],
)
def test_a_log_that_cannot_be_written_stops_no_post_and_is_told_once(
    site: Site, script: str, least: int
) -> None:
    save(site, "a", "b")
    result = site.shell(script)
    complaints = [line for line in result.stderr.splitlines() if "the log cannot be written" in line]
    assert least <= len(complaints) <= 1
    assert sorted(site.subjects()) == ["Publish a", "Publish b", "Start the site"]
    assert site.jobs() == []


MESSAGES = {
    "an option": "--amend",
    "a dash": "-m x",
    "a comment": "# not a comment\n\n# nor this",
    "scissors": "x\n# ------------------------ >8 ------------------------\nkept",
    "trailing space": "  x  \n\n\n",
    "escapes": "\x1b[31mred\x1b[0m \x07 \x7f",
    "windows": "a\r\nb\r\n",
    "a command": "$(touch /tmp/x) `id` %s %H",
    "a stream": "data 3\ncommit refs/heads/main\nfrom 0\n",
    "other scripts": "Ünïcode ☃ \N{RIGHT-TO-LEFT OVERRIDE}x \N{NO-BREAK SPACE}",
    "a megabyte": "x" * 1_000_000,
    "empty": "",
}


def test_a_message_is_used_exactly_as_it_is(site: Site) -> None:
    for number, message in enumerate(MESSAGES.values()):
        site.write_post(f"content/posts/{number}.md", f"{number}\n")
        moment = datetime.fromtimestamp(NOW + number, UTC).isoformat()
        site.save(f"m{number}", [f"content/posts/{number}.md"], message=message, createdAt=moment)
    result = site.run_once()
    published = {e["slug"]: e["commit"] for e in result.of("published")}
    assert len(published) == len(MESSAGES), result.stdout + result.stderr
    assert {e["attempt"] for e in result.of("published")} == {1}
    for number, (what, message) in enumerate(MESSAGES.items()):
        raw = subprocess.run(
            ["git", "cat-file", "commit", published[f"m{number}"]],
            cwd=site.remote,
            capture_output=True,
            check=True,
        ).stdout
        head, _, body = raw.partition(b"\n\n")
        assert body == (message or f"Publish m{number}").encode(), what
        assert head.count(b"\nparent ") == 1, what
    assert_sound(site)


# The environment


def test_nothing_inherited_changes_what_git_does_or_runs_a_program(site: Site) -> None:
    mark = site.root / "ran"
    program_ = str(program(site.root / "canary", f"echo $0 $@ >> {mark}; exit 1"))
    library = site.root / "canary.so"
    save(site, "a")
    names = (
        *("PAGER", "EDITOR", "VISUAL", "BROWSER", "SSH_ASKPASS", "GIT_ASKPASS", "GIT_EDITOR", "GIT_PAGER"),
        *("GIT_SEQUENCE_EDITOR", "GIT_EXTERNAL_DIFF", "GIT_SSH", "GIT_SSH_COMMAND", "GIT_PROXY_COMMAND"),
        *("GIT_TEMPLATE_DIR", "GIT_EXEC_PATH", "BASH_ENV", "ENV"),
    )
    env = dict.fromkeys(names, program_) | {
        **dict.fromkeys(("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"), "/nonexistent"),
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "core.fsmonitor",
        "GIT_CONFIG_VALUE_0": program_,
        "GIT_AUTHOR_NAME": "Somebody",
        "GIT_COMMITTER_EMAIL": "somebody@example.org",
        "GIT_TRACE": str(site.root / "trace"),
        "GIT_OBJECT_DIRECTORY": str(site.root / "objects"),
        "GIT_ALTERNATE_OBJECT_DIRECTORIES": "/nonexistent",
        "GIT_NAMESPACE": "elsewhere",
        "GIT_CEILING_DIRECTORIES": "/",
        "GIT_CONFIG_PARAMETERS": "'core.sshCommand'='false'",
        "GIT_LITERAL_PATHSPECS": "0",
        "GIT_ALLOW_PROTOCOL": "ext",
        "GIT_TERMINAL_PROMPT": "1",
        "GIT_HTTP_PROXY_AUTHMETHOD": "x",
        "LD_PRELOAD_NOT": str(library),
        "LC_MESSAGES": "de_DE.UTF-8",
        "LANGUAGE": "de",
    }
    result = site.run_once(**env)
    assert_published(site, result)
    assert not mark.exists(), mark.read_text()
    assert not (site.root / "trace").exists()
    assert not (site.root / "objects").exists()
    who = site.git("log", "-1", "--format=%an %ce", "main", cwd=site.remote)
    assert who == "Briter Worker briter-worker@localhost"
    assert site.git("for-each-ref", "--format=%(refname)", cwd=site.remote) == "refs/heads/main"
    assert_sound(site)


def test_ld_variables_do_not_reach_git(site: Site) -> None:
    """They are the worker's own while it starts; what it starts does not get them."""
    seen = site.root / "seen"
    site.write_post(".gitattributes", "*.md filter=look\n")
    site.git("config", "filter.look.clean", str(program(site.root / "look", f"env >> {seen}; cat")))
    save(site, "a")
    secret = {"AWS_SECRET_ACCESS_KEY": "canary", "LD_LIBRARY_PATH": "/nonexistent", "LD_BIND_NOW": "1"}
    assert_published(site, site.run_once(**secret))
    inherited = seen.read_text()
    assert "canary" not in inherited
    assert "LD_" not in inherited
    assert "PYTHON" not in inherited
