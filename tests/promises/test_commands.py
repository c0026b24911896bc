"""Git's processes: each is bounded, none is blamed for another, and none keeps what is not its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil
import pytest
from outcomes import save
from remotes import HOST, Exchange, http_remote, left_over
from sites import eventually, program

from briter_worker.errors import FailureCode, PublishError
from briter_worker.git.run import Git

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sites import Site


@pytest.fixture
def strays(tmp_path: Path) -> Iterator[Path]:
    """A file for the process ids of daemons that a test leaves behind; they are ended."""
    file = tmp_path / "strays"
    file.touch()
    yield file
    for pid in file.read_text().split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def test_a_command_that_hangs_is_ended_at_its_deadline_with_all_that_it_started(site: Site) -> None:
    short = Git(site.worktree, remote="origin", timeout=2)
    site.git("config", "alias.hang", "!sleep 60 | sleep 60")
    with pytest.raises(PublishError, match=r"git hang did not end within 2 s") as hung:
        short.run("hang")
    assert hung.value.code is FailureCode.TIMEOUT
    assert short.run("rev-parse", "HEAD"), "those that come after work"
    assert left_over(site.worktree) == []


def test_a_remote_that_talks_without_end_is_ended_at_the_deadline_and_little_of_it_is_kept(
    site: Site,
) -> None:
    short = Git(site.worktree, remote="origin", timeout=1)
    site.git("config", "alias.talk", "!yes 'remote: words without end' >&2")
    with pytest.raises(PublishError) as ended:
        short.run("talk")
    assert ended.value.code is FailureCode.TIMEOUT
    site.git("config", "alias.talk", "!yes 'remote: words' | head -c 50000000 >&2; exit 1")
    status, _, said = Git(site.worktree, remote="origin", timeout=60).attempt("talk")
    assert status == 1
    assert len(said) < 200_000


def test_a_push_that_landed_though_the_remote_fell_silent_is_published(site: Site) -> None:
    site.hook("exec sleep 30", "post-receive")
    site.save_post("a", "A\n")
    result = site.run_once(BRITER_GIT_TIMEOUT_MS="4000")
    assert result.of("published"), result.stdout
    assert site.jobs() == []
    assert result.of("published")[0]["commit"] == site.remote_log()[0][0]


def test_git_gets_sigterm_when_the_worker_dies(site: Site) -> None:
    pid, program_text = site.root / "pid", "from pathlib import Path; from briter_worker.git.run import Git; "
    program_text += f"Git(Path({str(site.worktree)!r}), remote='origin', timeout=60).run('hang')"
    site.git("config", "alias.hang", f"!echo $PPID > {pid}; exec sleep 60")
    with subprocess.Popen([sys.executable, "-c", program_text]) as worker:
        eventually(lambda: pid.exists() and pid.read_text())
        worker.kill()
    eventually(lambda: not psutil.pid_exists(int(pid.read_text())))


DAEMON = "setsid sleep 60 </dev/null >/dev/null 2>&1 & echo $! >> {strays}\n"


def test_a_daemon_of_a_credential_helper_does_not_keep_the_next_worker_out(site: Site, strays: Path) -> None:
    marks = site.root / "asked"
    text = DAEMON.format(strays=strays) + f'echo "$1" >> {marks}; echo username=u; echo password=p\n'
    helper = program(site.root / "helper", text)

    def demand(exchange: Exchange) -> None:
        if "Authorization" in exchange.handler.headers:
            worker.kill()
            exchange.hang_up()
        else:
            exchange.reply(401, headers={"WWW-Authenticate": 'Basic realm="x"'})

    there = site.git("remote", "get-url", "origin")
    with http_remote(site.root) as server:
        server.behaviour = demand
        site.git("config", f"credential.http://{HOST}:{server.port}.helper", f'!f() {{ {helper} "$@"; }}; f')
        site.git("remote", "set-url", "origin", server.url(site.remote))
        site.save_post("a", "A\n")
        with site.running() as worker:
            worker.wait(60)
    assert "get" in marks.read_text()
    site.git("remote", "set-url", "origin", there)
    assert psutil.pid_exists(int(strays.read_text().split()[0])), "the daemon is there"
    names = site.run_once(BRITER_WORKER_BACKOFF_MS="0").names()
    assert "worker-skipped" not in names
    assert "published" in names


def test_a_signing_program_that_hangs_does_not_keep_the_next_worker_out(site: Site, strays: Path) -> None:
    folder = program(site.root / "bin" / "ssh-keygen", f"echo $$ >> {strays}\nexec sleep 60").parent
    save(site, "a")
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "BRITER_GIT_SIGNING_KEY": str(site.root / "key")}
    with site.running(**env) as worker:
        eventually(strays.read_text)
        worker.kill()
        worker.wait()
        assert "published" in site.run_once().names()
    assert psutil.pid_exists(int(strays.read_text().split()[0])), "the program is there"


def test_a_filter_that_hangs_does_not_keep_the_next_worker_out(site: Site, strays: Path) -> None:
    site.write_post(".gitattributes", "*.md filter=slow\n")
    site.commit_all()
    hangs = program(site.root / "filter", f"echo $$ >> {strays}\nexec sleep 60")
    site.git("config", "filter.slow.clean", str(hangs))
    save(site, "a")
    with site.running() as worker:
        eventually(strays.read_text)
        worker.kill()
        worker.wait()
        site.git("config", "filter.slow.clean", "cat")
        assert "published" in site.run_once().names()
    assert psutil.pid_exists(int(strays.read_text().split()[0])), "the filter is there"


def test_a_daemon_of_a_remotes_hook_does_not_keep_the_next_worker_out(site: Site, strays: Path) -> None:
    program(site.remote / "hooks" / "post-receive", DAEMON.format(strays=strays))
    save(site, "a")
    with site.running() as worker:
        eventually(strays.read_text)
        worker.kill()
        worker.wait()
    save(site, "b")
    assert "worker-skipped" not in site.run_once().names()
    assert psutil.pid_exists(int(strays.read_text().split()[0])), "the daemon is there"
    assert site.remote_file("content/posts/b.md") == "b\n"


def test_a_program_named_git_in_the_work_tree_is_not_run(site: Site) -> None:
    mark = site.root / "ran"
    for folder in (site.worktree, site.root):
        program(folder / "git", f'touch {mark}; exec /usr/bin/git "$@"')
    site.save_post("a", "A\n")
    result = site.run_once(PATH=f".::{os.environ['PATH']}")
    assert result.of("published"), result.stdout + result.stderr
    assert not mark.exists()


def test_a_configuration_with_bytes_that_are_no_text_is_read_and_pushed_with(site: Site) -> None:
    with (site.worktree / ".git" / "config").open("ab") as config:
        config.write(b'[odd "\xff"]\n\tname = M\xfcller\n\tempty\n')
    site.save_post("a", "A\n")
    assert site.run_once().of("published")
