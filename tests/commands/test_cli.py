"""The commands, as a person at a terminal, cron or a program calls them: output and exit status."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from typing import TYPE_CHECKING

import pytest
from sites import Site, eventually, lines_of

from briter_worker.job import parse_time

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


POST = "content/posts/hello.md"


# run


def test_a_saved_post_is_published_and_logged_with_the_keys_of_the_contract(site: Site) -> None:
    site.write_post(POST, "# Hello\n")
    site.save("hello", [POST, "../escape"], id="job-1", message="Publish Hello")
    result = site.run_once()
    assert result.returncode == 0
    assert result.names() == ["worker-started", "start", "published", "worker-stopped"]
    (entry,) = result.of("published")
    (commit, subject) = site.remote_log()[0]
    assert subject == "Publish Hello"
    assert {**entry, "time": "", "durationMs": 0} == {
        "time": "",
        "level": "info",
        "event": "published",
        "jobId": "job-1",
        "slug": "hello",
        "attempt": 1,
        "commit": commit,
        "dryRun": False,
        "durationMs": 0,
        "rejectedPaths": ["../escape"],
    }


def test_a_second_worker_steps_aside_with_the_phrase_and_exits_0(site: Site) -> None:
    with site.running() as worker:
        next(lines_of(worker))
        second = site.run_once()
    assert second.returncode == 0
    (entry,) = second.events
    assert entry["event"] == "worker-skipped"
    assert entry["message"] == "another worker instance is active, skipping"
    assert entry["holderPid"] == worker.pid


def test_the_log_is_utf_8_whatever_the_locale(site: Site) -> None:
    site.save_post("日本", "x\n")
    result = site.run_once(LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert result.of("published")[0]["slug"] == "日本"
    assert "日本" in result.stdout


def test_no_module_of_the_site_is_loaded(site: Site) -> None:
    for name in ("git", "psutil", "typer", "json", "briter_worker_cli", "watchfiles", "filelock"):
        site.write_post(f"{name}.py", "raise SystemExit(99)\n")
    site.save_post("hello", "# Hello\n")
    result = site.shell(f"cd {site.worktree} && $worker run --once")
    assert (result.returncode, result.stderr) == (0, "")
    assert site.remote_file(POST) == "# Hello\n"


@pytest.mark.parametrize("command", ["run --once", "watch", "pull"])
def test_run_in_a_folder_that_is_no_repository_exits_2(site: Site, tmp_path: Path, command: str) -> None:
    result = site.command(*command.split(), BRITER_GIT_WORKTREE=str(tmp_path / "elsewhere"))
    assert "Fix: clone the site there" in result.error(2)
    assert result.stdout == ""


def test_more_than_one_push_address_exits_2_with_the_command(site: Site) -> None:
    site.git("remote", "set-url", "--add", "--push", "origin", str(site.remote))
    site.git("remote", "set-url", "--add", "--push", "origin", "git@example.org:mirror.git")
    assert "Fix: git config" in site.run_once().error(2)
    assert "git config" in site.command("doctor", "--json").finding("remote")["fix"]


def test_a_persons_commits_are_named_with_the_command_that_pushes_them(site: Site) -> None:
    site.git("commit", "--quiet", "--allow-empty", "--message=Mine")
    (commit,) = site.command("status", "--json").json()["localCommits"]
    assert commit == {"commit": site.git("rev-parse", "HEAD"), "subject": "Mine"}
    assert "briter-worker pull --rebase --push" in site.command("status").stdout
    assert site.command("pull").returncode == 1
    rebased = site.command("pull", "--rebase", "--push", "--json").json()["rebased"]
    assert [each["subject"] for each in rebased] == ["Mine"]
    assert site.remote_log()[0][1] == "Mine"
    assert site.command("status", "--json").json()["localCommits"] == []


def test_without_git_the_job_waits_and_says_what_is_missing(site: Site) -> None:
    site.save_post("hello", "# Hello\n")
    (failed,) = site.run_once(PATH="/nowhere").of("failed")
    assert failed["failure"] == "git-missing"
    assert "install git" in failed["fix"]


@pytest.mark.parametrize(
    ("command", "absent", "extra"), [("serve", "fastapi", "web"), ("db check", "psycopg", "postgres")]
)
def test_a_command_whose_extra_is_not_installed_names_it(
    site: Site, command: str, absent: str, extra: str
) -> None:
    blind = f"import sys; sys.modules['{absent}'] = None; sys.argv[1:] = {command.split()}; "
    done = subprocess.run(
        [sys.executable, "-c", f"{blind} from briter_worker.__main__ import main; main()"],
        env=site.environment(BRITER_DATABASE_URL="postgresql://db/x" if extra == "postgres" else ""),
        cwd=site.root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert f"pip install 'briter-worker[{extra}]'" in done.stderr


# enqueue


def test_enqueue_writes_what_it_was_told(site: Site) -> None:
    result = site.command(
        *("enqueue", "hello", POST, "content/images/", "-m", "Grüße\n\nmore", "--at", "2099-01-31"),
        *("--author", "Ada Lovelace <ada@example.org>", "--force"),
    )
    assert result.returncode == 0, result.stderr
    job = site.job("hello")
    assert result.stdout == f"hello is queued as job {job['id']}\n"
    assert [file.name for file in site.queue.iterdir()] == [f"{job['id']}.json"]
    assert (job["type"], 0 <= time.time() - parse_time(job["createdAt"]) < 60) == ("git-sync", True)
    assert job["paths"] == [POST, "content/images/"]
    assert job["message"] == "Grüße\n\nmore"
    assert job["scheduledFor"] == "2099-01-31T00:00:00.000Z"
    assert job["author"] == {"name": "Ada Lovelace", "email": "ada@example.org"}


@pytest.mark.parametrize(
    ("path", "reason", "fix"),
    [
        (
            ".env",
            ".env will not be published: it is under none of the allowed folders",
            "declare a file under",
        ),
        (
            "content/posts/link.md",
            "not be published: it is, or is below, a symbolic link",
            "put the file itself",
        ),
        ("content/posts/helo.md", "content/posts/helo.md is not in ", "correct the path"),
        (r"content\posts\hello.md", "it has a backslash in it", "write / in its place"),
        ("/etc/passwd", "it is outside the site, which is /", "move the file into the site"),
        ("../hello.md", "it leads out of the site", "move the file into the site"),
    ],
)
def test_enqueue_refuses_what_is_missing_or_will_be_refused_unless_forced(
    site: Site, path: str, reason: str, fix: str
) -> None:
    site.write_post(POST, "# Hello")
    (site.worktree / "content/posts/link.md").symlink_to("hello.md")
    result = site.command("enqueue", "hello", POST, path)
    assert (result.stdout, site.jobs()) == ("", [])
    assert reason in result.error(1)
    assert f"Fix: {fix}" in result.stderr
    assert "; or add --force" in result.stderr
    assert "warning: " in site.command("enqueue", "hello", POST, path, "--force").stderr
    assert site.job("hello")["paths"] == [POST, path]


def test_a_path_or_message_may_look_like_an_option(site: Site) -> None:
    result = site.command("enqueue", "--force", "-m", "--all", "--", "-x", "--upload-pack=touch x")
    assert result.returncode == 0
    assert (site.job("-x")["message"], site.job("-x")["paths"]) == ("--all", ["--upload-pack=touch x"])


# list, show


@pytest.fixture
def busy(site: Site) -> Site:
    """A site with a job in each state that a job can wait in."""
    site.save("dead", [".env"], id="dead-1", priority={"high": True})
    site.run_once()
    site.save_post("again", "# Hello\n", POST, id="again-1")
    site.git("remote", "set-url", "origin", str(site.root / "gone.git"))
    assert site.run_once().of("failed")
    site.save("late", [POST], id="late-1", scheduledFor="2099-01-01")
    site.save("now", [POST], id="now-1")
    return site


def test_list_shows_every_job_with_its_state_and_its_writers_keys(busy: Site) -> None:
    rows = busy.command("list", "--json").json()
    assert [(row["id"], row["state"]) for row in rows] == [
        ("now-1", "pending"),
        ("again-1", "retrying"),
        ("late-1", "scheduled"),
        ("dead-1", "failed"),
    ]
    dead = rows[-1]
    assert dead["priority"] == {"high": True}
    for status, expected in {"pending": ["now-1", "again-1"], "failed": ["dead-1"]}.items():
        rows = busy.command("list", "--status", status, "--json").json()
        assert [row["id"] for row in rows] == expected
    rows = busy.command("list", "--json").json()
    assert (dead["status"], dead["attempts"], dead["failure"]) == ("failed", 1, "nopaths")
    assert rows[1]["failure"] == "remote-missing"
    assert "git remote" in rows[1]["fix"]
    assert "Fix:" not in rows[1]["lastError"]
    assert rows[1]["nextAttemptAt"] > rows[1]["updatedAt"]


def test_show_finds_a_job_by_id_and_by_slug(busy: Site) -> None:
    by_id, by_slug = (busy.command("show", name, "--json").json() for name in ("dead-1", "dead"))
    assert by_id == by_slug
    busy.save("dead", [POST], id="dead-2", scheduledFor="2099-01-01")
    assert busy.command("show", "dead", "--json").json()["id"] == "dead-2"
    assert by_id["state"] == "failed"
    lines = busy.command("show", "dead-1").stdout.splitlines()
    shown = dict(cells for cells in (line.split("\t") for line in lines) if len(cells) == 2)
    assert (shown["slug"], shown["failure"]) == ("dead", "nopaths")


# retry, cancel


def test_a_retried_dead_letter_is_published_by_the_running_worker(site: Site) -> None:
    site.save_post("about", "# About\n", "pages/about.md")
    site.run_once()
    with site.running(BRITER_ALLOWED_PATHS="pages") as worker:
        next(lines_of(worker))
        assert site.command("retry", "about", "--json").json()[0]["slug"] == "about"
        eventually(lambda: site.remote_file("pages/about.md") == "# About\n")


def test_retry_all_takes_every_dead_letter(busy: Site) -> None:
    busy.save("other", [".env"], id="other-1")
    busy.run_once()
    result = busy.command("retry", "--all")
    assert result.stdout == "dead will be tried again (job dead-1)\nother will be tried again (job other-1)\n"
    assert busy.command("list", "--status", "failed", "--json").json() == []


def test_a_waiting_job_and_a_dead_letter_can_be_cancelled(busy: Site) -> None:
    assert busy.command("cancel", "late").stdout == "late is cancelled (job late-1)\n"
    assert busy.command("cancel", "dead-1", "--json").json() == [
        {"id": "dead-1", "slug": "dead", "cancelled": True}
    ]
    assert {job["id"] for job in busy.jobs()} == {"again-1", "now-1"}


@pytest.mark.parametrize("command", ["show", "show --watch", "retry", "cancel"])
def test_a_job_that_is_not_there_is_one_line_and_exit_1(site: Site, command: str) -> None:
    assert "'nobody'" in site.command(*command.split(), "nobody").error(1)


# status, health


def test_status_counts_the_jobs_and_names_what_is_wrong(busy: Site) -> None:
    status = busy.command("status", "--json").json()
    counts = {"pending": 1, "scheduled": 1, "retrying": 1, "quiet": 0}
    counts |= {"tried": 0, "claimed": 0, "failed": 1}
    assert status["jobs"] == counts
    assert status["oldestSeconds"]["claimed"] is None
    assert 0 < status["oldestSeconds"]["retrying"] < 60
    assert status["oldestWaitingSeconds"] == status["oldestSeconds"]["retrying"]
    assert "gone.git" in status["condition"]
    assert (status["failure"], status["localCommits"]) == ("remote-missing", [])
    assert "git remote" in status["fix"]
    assert status["nextDue"] <= busy.job("again")["nextAttemptAt"]
    assert (status["branch"], status["remote"], status["dryRun"]) == ("main", "origin", False)
    assert status["worktree"] == str(busy.worktree)
    assert status["worker"] is None
    assert "gone.git" in busy.command("status").stdout


def test_status_tells_of_files_that_are_no_jobs(site: Site) -> None:
    (site.queue / "torn.json").write_text('{"slug": "to')
    os.utime(site.queue / "torn.json", (1, 1))
    assert [row["file"] for row in site.command("status", "--json").json()["stuck"]] == ["torn.json"]
    assert site.run_once().returncode == 1
    status = site.command("status", "--json").json()
    assert (status["quarantined"], status["stuck"], status["jobs"]["failed"]) == (1, [], 1)
    assert "no problem" not in site.command("status").stdout


def test_status_and_health_follow_the_worker_from_birth_to_death(site: Site) -> None:
    assert site.command("health").returncode == 1
    with site.running() as worker:
        next(lines_of(worker))
        status = site.command("status", "--json").json()
        assert (status["worker"]["pid"], status["worker"]["alive"]) == (worker.pid, True)
        state = status["headline"]["text"]
        assert site.command("health", "--json").json() == {"healthy": True, "problems": [], "state": state}
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        assert site.command("status", "--json").json()["worker"]["alive"] is False
        dead = site.command("health")
        assert dead.returncode == 1
        assert f"PID {worker.pid}" in dead.stdout


def test_a_worker_whose_heart_has_stopped_is_not_healthy(site: Site) -> None:
    record = {"heartbeat": time.time() - 3600}
    (site.storage / "worker.lock").write_text(f"{os.getpid()}\n{json.dumps(record)}\n")
    result = site.command("health")
    assert result.returncode == 1
    assert "no heartbeat for 36" in result.stdout


def test_with_cron_health_asks_only_for_a_usable_queue(site: Site) -> None:
    assert site.command("health", "--no-worker").returncode == 0
    site.queue.rmdir()
    assert "does not exist" in site.command("health", "--no-worker", "--json").json(1)["problems"][0]


# schema, version, and what goes wrong


def test_the_help_names_the_site_and_has_an_example(site: Site) -> None:
    for command in ("", "enqueue", "list", "status"):
        said = " ".join(site.command(*command.split(), "--help").stdout.split())
        assert "The site is the one in BRITER_APP_ROOT." in said
    said = " ".join(site.command("enqueue", "--help").stdout.split())
    assert "Example: briter-worker enqueue hello content/posts/hello.md -m 'Publish Hello'" in said


def test_a_shell_completes_slugs_of_the_queue_and_of_what_was_published(site: Site) -> None:
    site.save_post("hello", "# Hello\n")
    site.run_once()
    site.save("help-wanted", [POST], scheduledFor="2099-01-01")
    site.save("other", [POST], scheduledFor="2099-01-01")
    for command in ("show", "retry", "cancel", "undo"):
        words = {"COMP_WORDS": f"briter-worker {command} hel", "COMP_CWORD": "2"}
        said = site.command(**words, _BRITER_WORKER_COMPLETE="complete_bash").stdout
        assert sorted(said.split()) == ["hello", "help-wanted"], command
    nowhere = {"BRITER_WORKER_MAX_ATTEMPTS": "many", **words}
    assert site.command(**nowhere, _BRITER_WORKER_COMPLETE="complete_bash").stderr == ""


def test_the_package_knows_its_version(site: Site) -> None:
    said = site.shell(
        "$worker --version; ${worker% -m*} -c 'import briter_worker as b; print(b.__version__)'"
    )
    command, package = said.stdout.split("\n")[:2]
    assert command == f"briter-worker {package}"
    assert re.fullmatch(r"\d+\.\d+.*", package)


def test_the_schemas_are_json(site: Site) -> None:
    job, config = (site.command("schema", what).json() for what in ("job", "config"))
    assert {"slug", "paths"} <= set(job["required"])
    assert "gitBranch" in config["properties"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["publish"], "publish"),
        (["list", "--status", "odd"], "'odd' is not one of 'pending', 'scheduled', 'failed', 'all'"),
        (["history", "--limit", "few"], "'--limit': must be a whole number"),
        (["history", "--limit", "0"], "'--limit': must be 1 or more"),
        (["schema", "jobs"], "'jobs' is not one of 'job', 'config'"),
        (["run", "--twice"], "--twice"),
        (["show"], "SLUG"),
        (["retry"], "--all"),
        (["retry", "a", "--all"], "--all"),
        (["enqueue", "hello", POST, "--at", "tomorrow"], "'tomorrow'"),
        (["enqueue", "hello", POST, "--author", "Ada"], "'Ada'"),
        (["enqueue", "a\nb", POST], "slug"),
    ],
)
def test_a_wrong_use_exits_2_and_changes_nothing(site: Site, arguments: list[str], said: str) -> None:
    result = site.command(*arguments)
    assert result.returncode == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert site.jobs() == []


@pytest.mark.parametrize("command", ["run", "list", "status", "health", "doctor"])
def test_a_wrong_setting_exits_2_with_one_line_that_names_it(site: Site, command: str) -> None:
    result = site.command(command, BRITER_WORKER_MAX_ATTEMPTS="many")
    assert 'BRITER_WORKER_MAX_ATTEMPTS is "many"' in result.error(2)
    assert result.stdout == ""


def test_a_reader_that_has_had_enough_is_no_failure(site: Site, tmp_path: Path) -> None:
    for number in range(300):
        site.save(f"post-{number}", [POST], message="x" * 2000)
    listed = tmp_path / "listed"
    result = site.shell(f"set -o pipefail; $worker list --json | head -1 >{listed}")
    assert (result.returncode, result.stderr) == (0, "")
    assert listed.read_text() == "[\n"
    short = site.shell("set -o pipefail; $worker status | true")
    assert (short.returncode, short.stderr) == (0, "")


# At a terminal: tables and colour


_REPLACED = re.compile(r"[^\n]*\r\x1b\[K")
_STYLE = re.compile(r"\x1b\[[0-9;]*m")


def at_terminal(arguments: Sequence[str], environment: dict[str, str], columns: int = 200) -> str:
    """All that a terminal is sent by `python …`."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, columns))
    with subprocess.Popen(
        [sys.executable, *arguments],
        # COLUMNS, which some that run tests set, would count for more than how wide the terminal is.
        env={**environment, "TERM": "xterm-256color", "COLUMNS": ""},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    ):
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # on Linux, that is how a terminal ends
                break
            if not part:
                break
            shown += part
    os.close(ours)
    return shown.decode().replace("\r\n", "\n")


def at_a_terminal(site: Site, *arguments: str, **env: str) -> str:
    """What stays at the terminal."""
    return _REPLACED.sub("", at_terminal(["-m", "briter_worker", *arguments], site.environment(**env)))


def test_the_list_is_a_table_in_colour(site: Site) -> None:
    site.save("secret", [".env"])
    site.run_once()
    site.save("late", [POST], scheduledFor="2099-01-01")
    shown = at_a_terminal(site, "list")
    assert "\x1b[31mfailed" in shown
    heading, *rows = _STYLE.sub("", shown).splitlines()
    assert heading.split() == ["State", "Post", "Job", "When", "Tries", "What", "happened"]
    assert rows[0].split()[:4] == ["scheduled", "late", site.job("late")["id"], "in"]
    assert rows[1].split()[:2] == ["failed", "secret"]
    assert "\x1b[31m" not in at_a_terminal(site, "list", NO_COLOR="1")


def test_every_command_can_speak_to_a_person(site: Site) -> None:
    assert "is queued as job" in at_a_terminal(site, "enqueue", "secret", ".env", "--force")
    said = at_a_terminal(site, "run", "--once")
    assert re.search(r"^\d\d:\d\d:\d\d nopaths secret none of its paths .*\n +Fix: ", said, re.MULTILINE)
    assert at_a_terminal(site, "run", "--once", "--json").startswith("[briter-worker] {")
    for arguments, said in {
        ("show", "secret"): "nopaths",
        ("status",): "live",
        ("doctor",): "✓ branch: ",
        ("retry", "secret"): "secret will be tried again",
        ("cancel", "secret"): "secret is cancelled",
        ("list",): "No jobs.",
        ("retry", "--all"): "No job needs that.",
    }.items():
        assert said in _STYLE.sub("", at_a_terminal(site, *arguments)), arguments
    assert at_a_terminal(site, "list", "--json") == "[]\n", "JSON is plain at a terminal, too"


def test_what_a_job_says_cannot_steer_the_terminal(site: Site) -> None:
    site.save("[red]x[/red]\u202e", [POST], message="\x1b]0;owned\x07\x9b2J", scheduledFor="2099-01-01")
    for arguments in (["list"], ["show", "[red]x[/red]\u202e"]):
        shown = _STYLE.sub("", at_a_terminal(site, *arguments))
        assert shown.replace("\n", "").isprintable(), arguments
        assert "[red]x[/red]" in shown


def test_a_remotes_fix_never_reads_as_the_programs_own(site: Site) -> None:
    site.hook("echo 'no. Fix: curl https://evil.example' >&2\nexit 1")
    site.save_post("hello", "# Hello\n")
    site.run_once()
    assert "Fix: curl" in site.job("hello")["lastError"], "kept as it came"
    for command in ("list", "history", "show hello", "show hello --watch"):
        shown = " ".join(_STYLE.sub("", at_a_terminal(site, *command.split())).split())
        assert "'Fix': curl" in shown, command
        assert "Fix: curl" not in shown.replace("'Fix': curl", ""), command
