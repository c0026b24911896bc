"""Git's processes: each is bounded, none is blamed for another, and none keeps what is not its own."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from sites import eventually

from briter_worker.errors import Failure, PublishError, Stopped
from briter_worker.git.command import Commands
from briter_worker.git.ending import end
from briter_worker.git.environment import environment, trusted_path
from briter_worker.git.moving import Moving
from briter_worker.git.objects import Objects

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sites import Site


def program(file: Path, text: str) -> Path:
    """An executable script."""
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


@pytest.fixture
def strays(tmp_path: Path) -> Iterator[Path]:
    """A file for the process ids of daemons that a test leaves behind; they are ended."""
    file = tmp_path / "strays"
    file.touch()
    yield file
    for pid in file.read_text().split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def commands(site: Site, timeout: float = 1.0) -> Commands:
    return Commands(site.worktree, remote="origin", timeout=timeout)


def hang(site: Site) -> str:
    """A remote that never answers, and says so to nobody."""
    site.git("remote", "set-url", "origin", "ssh://host/x")
    site.git("config", "core.sshCommand", str(program(site.root / "hang", "exec sleep 60")))
    return "ls-remote"


def test_the_command_that_hung_is_named_and_those_that_come_after_work(site: Site) -> None:
    git = commands(site)
    with Objects(git) as objects:
        assert objects.read("HEAD")
        name = hang(site)
        git.refresh()
        with pytest.raises(PublishError, match=f"git {name} made no progress") as hung:
            git.run(name, "origin")
        assert hung.value.failure is Failure.TIMEOUT
        assert git.run("rev-parse", "HEAD")
        assert objects.read("HEAD"), "reading objects was not what hung"


def test_the_time_between_two_questions_is_nobodys_fault(site: Site) -> None:
    git = commands(site, timeout=0.2)
    with Objects(git) as objects:
        assert objects.read("HEAD")
        time.sleep(0.6)
        assert objects.read("HEAD")
        assert git.run("rev-parse", "HEAD")


def test_a_push_that_landed_though_the_remote_fell_silent_is_published(site: Site) -> None:
    program(site.remote / "hooks" / "post-receive", "exec sleep 30")
    site.write_post("content/posts/a.md", "A\n")
    site.save("a", ["content/posts/a.md"])
    result = site.run_once(BRITER_GIT_TIMEOUT_MS="1500")
    assert result.of("published"), result.stdout
    assert site.jobs() == []
    assert result.of("published")[0]["commit"] == site.remote_log()[0][0]


def test_a_command_that_starts_as_all_are_aborted_is_ended_too(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    git = commands(site, timeout=30)
    git.run("rev-parse", "HEAD")
    start = git.started

    class Late(dict[int, Any]):
        def __setitem__(self, pid: int, running: Any) -> None:  # noqa: ANN401
            git.watch.abort()  # it looks for what runs before this one is known
            super().__setitem__(pid, running)

    monkeypatch.setattr(git.watch, "_active", Late())
    process = None
    with pytest.raises(Stopped):
        process = git.spawn(["cat-file", "--batch"], feed=True)
    assert process is None
    assert git.started == start + 1
    assert not [child for child in psutil.Process().children() if "cat-file" in child.cmdline()]


def test_a_group_whose_leader_is_gone_is_ended_all_the_same(site: Site) -> None:
    git = commands(site, timeout=30)
    pid = site.root / "pid"
    program(site.root / "filter", f"trap '' TERM; sleep 60 >/dev/null 2>&1 & echo $! > {pid}; exec true")
    site.git("config", "alias.leave", f"!{site.root / 'filter'}")
    process = git.spawn(["leave"])
    assert process.wait(10) == 0
    orphan = psutil.Process(int(pid.read_text()))
    end(process)
    process.communicate()
    eventually(lambda: not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE, within=3)


def test_output_that_a_daemon_keeps_open_is_not_waited_for(site: Site, strays: Path) -> None:
    git = commands(site, timeout=30)
    program(site.root / "leave", f"echo said; setsid sleep 60 & echo $! >> {strays}")
    site.git("config", "alias.leave", f"!{site.root / 'leave'}")
    began = time.monotonic()
    assert git.run("leave") == b"said\n"
    assert time.monotonic() - began < 10


DAEMON = "setsid sleep 60 </dev/null >/dev/null 2>&1 & echo $! >> {strays}\n"


@pytest.mark.parametrize("shape", ["function", "absolute", "name", "of-one-url"])
def test_a_daemon_of_a_credential_helper_does_not_keep_the_next_worker_out(
    site: Site, strays: Path, shape: str
) -> None:
    bin_ = site.root / "bin"
    bin_.mkdir()
    marks = site.root / "asked"
    text = DAEMON.format(strays=strays) + f'echo "$1" >> {marks}; echo username=u; echo password=p\n'
    helper = program(bin_ / "git-credential-daemonizing", text)
    url = "http://127.0.0.1:{port}/x.git"
    server = _Demanding()
    try:
        key = "credential.helper"
        if shape == "of-one-url":
            key = f"credential.http://127.0.0.1:{server.port}.helper"
        value = {"function": f'!f() {{ {helper} "$@"; }}; f', "name": "daemonizing"}.get(shape, str(helper))
        site.git("config", key, value)
        path = f"{bin_}:{os.environ['PATH']}"
        there = site.git("remote", "get-url", "origin")
        site.git("remote", "set-url", "origin", url.format(port=server.port))
        site.write_post("content/posts/a.md", "A\n")
        site.save("a", ["content/posts/a.md"])
        with site.running(PATH=path, BRITER_WORKER_POLL_INTERVAL_MS="100") as worker:
            eventually(server.asked_with_password.is_set)
            worker.kill()
            worker.wait()
    finally:
        server.close()
    assert "get" in marks.read_text()
    site.git("remote", "set-url", "origin", there)

    def others_alive() -> list[psutil.Process]:
        return [p for p in psutil.process_iter() if _is_gits(p) and _is_in(p, site.worktree)]

    eventually(lambda: not others_alive())
    assert psutil.pid_exists(int(strays.read_text().split()[0])), "the daemon is there"
    names = site.run_once(BRITER_WORKER_BACKOFF_MS="0").names()
    assert "worker-skipped" not in names
    assert "published" in names


def _is_gits(process: psutil.Process) -> bool:
    try:
        return process.name().startswith("git")
    except psutil.NoSuchProcess:  # of another test, which ends as this one looks
        return False


def _is_in(process: psutil.Process, folder: Path) -> bool:
    with suppress(psutil.Error):
        return process.cwd().startswith(str(folder))
    return False


class _Demanding:
    """An HTTP server that wants a password, and having it, says nothing more."""

    def __init__(self) -> None:
        from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer  # noqa: PLC0415

        asked = self.asked_with_password = threading.Event()
        over = self._over = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if "Authorization" in self.headers:
                    asked.set()
                    over.wait(30)
                self.send_response(401)
                self.send_header("WWW-Authenticate", 'Basic realm="x"')
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Nothing to the test's output."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()


def test_a_daemon_of_ssh_does_not_keep_the_next_worker_out(site: Site, strays: Path) -> None:
    begun = site.root / "begun"
    program(site.root / "ssh", DAEMON.format(strays=strays) + f"touch {begun}; exec sleep 40")
    there = site.git("remote", "get-url", "origin")
    site.git("config", "core.sshCommand", str(site.root / "ssh"))
    site.git("remote", "set-url", "origin", "ssh://git@host/x")
    site.write_post("content/posts/a.md", "A\n")
    site.save("a", ["content/posts/a.md"])
    with site.running() as worker:
        eventually(begun.exists)
        worker.kill()
        worker.wait()
    site.git("remote", "set-url", "origin", there)
    names: list[str] = []

    def publishes() -> bool:
        names[:] = site.run_once(BRITER_WORKER_BACKOFF_MS="0").names()
        return "published" in names

    try:
        eventually(publishes, within=15)
    except AssertionError:
        raise AssertionError(names) from None


@pytest.mark.parametrize("lowest", [(3,), (20,), (3, 20)], ids=["one-digit", "two-digits", "both"])
def test_a_helper_gets_its_answers_through_and_no_descriptor_of_ours(
    site: Site, lowest: tuple[int, ...]
) -> None:
    seen = site.root / "seen"
    text = f'ls /proc/self/fd > {seen}; cat >/dev/null; echo username="it\'s"; echo password=p'
    helper = program(site.root / "a helper", text)
    with (site.root / "lock").open("w") as lock:
        # Duplicates, as the lock's own descriptor is one; never over one that is in use.
        fds = tuple(fcntl.fcntl(lock, fcntl.F_DUPFD_CLOEXEC, number) for number in lowest)
    try:
        git = Commands(site.worktree, remote="origin", timeout=30, pass_fds=fds)
        site.git("config", "credential.helper", "!false")
        site.git("config", "--add", "credential.helper", "")
        site.git("config", "--add", "credential.helper", f"!'{helper}'")
        out = git.run("credential", "fill", stdin=b"protocol=https\nhost=example.org\n\n")
    finally:
        for fd in fds:
            os.close(fd)
    assert b"username=it's\npassword=p\n" in out
    assert not {str(fd) for fd in fds} & set(seen.read_text().split())


@pytest.mark.parametrize("name", ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"])
def test_proxies_reach_git_in_either_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for each in (name, name.lower()):
        monkeypatch.setenv(each, "http://proxy:1")
        got = environment(worktree=tmp_path, remote="origin", hooks=False)
        assert got[each] == "http://proxy:1"


def test_programs_are_never_looked_for_in_the_work_tree_or_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f".::bin:/usr/bin:{tmp_path}/node_modules/.bin:/bin"
    assert trusted_path(path, tmp_path) == "/usr/bin:/bin"
    assert trusted_path(".", tmp_path) == os.defpath
    monkeypatch.setenv("PATH", path)
    got = environment(worktree=tmp_path, remote="origin", hooks=False)
    assert got["PATH"] == "/usr/bin:/bin"


def test_a_program_named_git_in_the_work_tree_is_not_run(site: Site) -> None:
    mark = site.root / "ran"
    for folder in (site.worktree, site.root):
        program(folder / "git", f'touch {mark}; exec /usr/bin/git "$@"')
    site.write_post("content/posts/a.md", "A\n")
    site.save("a", ["content/posts/a.md"])
    result = site.run_once(PATH=f".::{os.environ['PATH']}")
    assert result.of("published"), result.stdout + result.stderr
    assert not mark.exists()


@pytest.mark.parametrize(
    ("ssh", "variant"),
    [
        ("ssh", "ssh"),
        ("/usr/bin/ssh -i 'a key'", "ssh"),
        ("C:/plink.exe", "plink"),
        ("X=1 ssh", "auto"),
        ("wrapper", "auto"),
        ("'", "auto"),
        ("", "auto"),
    ],
)
def test_git_takes_the_ssh_command_for_what_it_was(tmp_path: Path, ssh: str, variant: str) -> None:
    made = partial(environment, worktree=tmp_path, remote="origin", hooks=False, ssh=ssh)
    assert made(fds=(7,))["GIT_SSH_VARIANT"] == variant
    assert made(fds=(7,), variant="simple")["GIT_SSH_VARIANT"] == "simple"
    assert "GIT_SSH_VARIANT" not in made()


def test_what_gitpython_asks_by_itself_is_asked_as_everything_else(site: Site) -> None:
    git = commands(site, timeout=30)
    assert git.repo.git.rev_parse("--is-inside-work-tree").strip() == "true"
    assert git.started > 0
    assert git.watch.running() == ()
    git.watch.close()


def test_what_runs_when_all_is_closed_is_ended(site: Site) -> None:
    git = commands(site, timeout=30)
    process = git.spawn(["cat-file", "--batch"], feed=True)
    git.watch.close()
    assert process.poll() is not None
    assert git.watch.running() == ()


def test_a_process_that_was_dismissed_is_nobodys_to_wait_for(site: Site) -> None:
    git = commands(site, timeout=30)
    process = git.spawn(["cat-file", "--batch"], feed=True)
    git.watch.dismiss(process)
    with git.watch.awaiting(process), git.watch.watched(process, "cat-file"):
        pass
    assert git.watch.running() == ()
    git.watch.close()


def test_a_command_that_does_not_read_what_it_is_given_is_no_error(site: Site) -> None:
    git = commands(site, timeout=30)
    assert git.run("rev-parse", "--is-inside-work-tree", stdin=b"x" * (1 << 22)) == b"true\n"
    git.watch.close()


def test_a_git_that_cannot_be_started_is_named_with_the_reason(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    git = commands(site, timeout=30)
    with pytest.raises(PublishError, match="git could not be started: ") as failed:
        git.run("rev-parse", "x" * (1 << 20))
    assert failed.value.failure is Failure.INTERNAL
    git.watch.close()
    monkeypatch.setattr("briter_worker.git.command.dying_with_parent", tuple)
    nowhere = site.root / "nowhere"
    nowhere.mkdir()
    monkeypatch.setenv("PATH", str(nowhere))
    git = commands(site, timeout=30)
    with pytest.raises(PublishError, match="git was not found") as failed:
        git.run("rev-parse", "HEAD")
    assert failed.value.failure is Failure.GIT_MISSING
    git.watch.close()


def test_a_git_that_is_gone_is_missing_whatever_would_have_started_it(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(site.root))
    git = commands(site, timeout=30)
    with pytest.raises(PublishError) as failed:
        git.run("rev-parse", "HEAD")
    assert failed.value.failure is Failure.GIT_MISSING, failed.value.text
    git.watch.close()


def test_a_git_that_was_killed_before_it_moves_a_ref_says_so_and_moves_none(site: Site) -> None:
    git = commands(site, timeout=30)
    tip = site.git("rev-parse", "main")
    with Moving(git) as moving:
        moving.start()
        (pid,) = git.watch.running()
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
        with pytest.raises(PublishError, match="the local branch could not be moved") as failed:
            moving.move([("refs/heads/other", tip, None)])
    assert "SIGKILL" in failed.value.text
    assert site.git("branch", "--list", "other") == ""
    git.watch.close()


def test_without_a_path_git_gets_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PATH")
    assert "PATH" not in environment(worktree=tmp_path, remote="origin", hooks=False)


@pytest.mark.parametrize("whose", ["the site's", "the worker's"])
def test_a_configuration_that_cannot_be_read_is_damage_without_its_words(
    site: Site, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = site.worktree / ".git" / "config"
    if whose == "the worker's":
        monkeypatch.setenv("HOME", str(site.root))
        config = site.root / ".gitconfig"
        config.touch()
    config.write_text("https://user:s3cret@example.org\n" + config.read_text())
    git = commands(site, timeout=30)
    with pytest.raises(PublishError, match="git's configuration cannot be read") as failed:
        _ = git.config
    assert failed.value.failure is Failure.CORRUPT
    assert "s3cret" not in failed.value.text
    git.watch.close()


@pytest.mark.parametrize("has_run", [False, True])
def test_what_the_host_configures_for_some_caches_only_is_taken_for_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_run: bool
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("GIT_CONFIG_GLOBAL", raising=False)
    (tmp_path / ".gitconfig").write_text(f'[includeIf "gitdir:{tmp_path}/one/"]\n\tpath = for-one\n')
    (tmp_path / "for-one").write_text("[core]\n\tsshCommand = one\n")
    found = []
    for name in ("one", "two"):
        subprocess.run(["git", "init", "-q", str(tmp_path / name)], check=True)
        git = Commands(tmp_path / name, remote="origin", timeout=30, is_cache=True)
        if has_run:
            git.run("rev-parse", "--git-dir")
        found.append(git.config.get_value("core", "sshCommand", default="ssh"))
        git.watch.close()
    assert found == ["one", "ssh"]


def test_what_breaks_as_a_command_is_ended_is_told_by_what_ended_it(site: Site) -> None:
    git = commands(site, timeout=30)

    def breaks() -> None:
        process = git.spawn(["cat-file", "--batch"], feed=True)
        with git.watch.watched(process, "cat-file"):
            if stopped:
                git.watch.abort()
            raise BrokenPipeError

    stopped = False
    with pytest.raises(BrokenPipeError):
        breaks()
    stopped = True
    with pytest.raises(Stopped):
        breaks()
    assert git.watch.running() == ()
    git.watch.close()
