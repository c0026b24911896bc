"""A kept ssh connection: what it saves, whom it serves, when it ends; it is never worse than none."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from links import Link, link
from remotes import HOST, SshHost, sshd
from sites import Site, eventually, lines_of, program, wait_for_publication

from briter_worker.errors import FailureCode, PublishError
from briter_worker.git import ssh as module
from briter_worker.git.push import push
from briter_worker.git.repository import Repository
from briter_worker.git.run import Git
from briter_worker.git.ssh import SshConnections, find_destination

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEEP_S = 60.0
_MAX_PATH = 104


@dataclass
class Client:
    """A worker's git in this process, with the connections that it keeps, and a clock that is set by hand."""

    site: Site
    host: SshHost
    link: Link
    temporary: Path
    now: float = 0.0
    connections: SshConnections = field(init=False)

    def __post_init__(self) -> None:
        self.connections = SshConnections(KEEP_S, clock=lambda: self.now)

    @contextmanager
    def repository(self, command: str = "") -> Iterator[Repository]:
        self.site.git("config", "core.sshCommand", command or self.host.command)
        with closing(Git(self.site.worktree, remote="origin", timeout=30, ssh=self.connections)) as git:
            yield Repository(git, branch="main", remote="origin")

    def ask(self, command: str = "") -> str | None:
        """Ask the remote where its branch is; return the commit."""
        with self.repository(command) as repository:
            return repository.remote_tip()

    def push(self) -> bool:
        """Push a commit of the site; return whether the remote took it."""
        commit = self.site.git("commit-tree", "-p", "HEAD", "-m", "More", "HEAD^{tree}")
        self.site.git("reset", "--quiet", "--soft", commit)
        with self.repository() as repository:
            return push(repository, "HEAD:refs/heads/main", expect=f"{commit}~") and self.ask() == commit

    def sockets(self) -> list[Path]:
        return [path for path in self.temporary.rglob("*") if path.is_socket()]

    def masters(self) -> list[psutil.Process]:
        return masters(self.temporary)


def masters(temporary: Path) -> list[psutil.Process]:
    """The processes that keep connections with sockets in this folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cmdline()[:1] and process.cmdline()[0].startswith(f"ssh: {temporary}/"):
                found.append(process)
    return found


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files with a path as short as /tmp's usually is."""
    folder = Path(tempfile.mkdtemp(prefix="b", dir="/tmp"))
    with monkeypatch.context() as patch:
        patch.setattr(module, "_find_parent", lambda: folder / f"briter-{os.geteuid()}")
        yield folder
    for process in masters(folder):  # of workers that were killed
        process.kill()
    shutil.rmtree(folder)


@pytest.fixture
def client(site: Site, temporary: Path) -> Iterator[Client]:
    """The site's remote is reached by ssh, over a link."""
    with sshd(site.root / "sshd") as server, link(server.port) as line:
        host = replace(server, port=line.port)
        host.introduce()
        site.git("remote", "set-url", "origin", host.url(site.remote))
        site.git("config", "core.sshCommand", host.command)
        made = Client(replace(site, env={"TMPDIR": str(temporary)}), host, line, temporary)
        yield made
        made.connections.close()


# What a kept connection saves


def test_questions_and_pushes_share_one_connection(client: Client) -> None:
    assert client.ask()
    assert client.push()
    with client.repository() as repository:
        repository.fetch()
    assert client.link.connections == 1


def test_without_a_keep_time_each_command_opens_a_connection_of_its_own(client: Client) -> None:
    client.connections = SshConnections(0)
    client.ask()
    client.ask()
    assert client.link.connections == 2
    assert not client.sockets()


def test_a_connection_is_used_for_the_keep_time_since_it_was_opened(client: Client) -> None:
    for client.now in (0.0, KEEP_S / 2, KEEP_S - 1):
        client.ask()
    assert client.link.connections == 1
    client.now = KEEP_S
    client.ask()
    assert client.link.connections == 2
    assert len(client.masters()) == 1


def test_an_idle_connection_ends_by_itself(client: Client) -> None:
    client.connections = SshConnections(0.3)
    client.ask()
    assert client.masters()
    eventually(lambda: not client.masters(), within=10)
    client.connections.close()


def test_a_question_over_a_kept_connection_takes_three_round_trips(client: Client) -> None:
    client.ask()
    client.link.delay = 0.02
    client.link.count()
    client.ask()
    assert client.link.count() <= (0, 3)


def test_a_pull_that_finds_nothing_new_takes_three_round_trips(client: Client) -> None:
    with client.repository() as repository:
        repository.fetch()
        client.link.delay = 0.02
        client.link.count()
        repository.fetch()
    assert client.link.count() <= (0, 3)


def test_a_save_over_a_kept_connection_takes_three_round_trips(client: Client) -> None:
    with client.site.running() as worker:
        client.site.save_post("a", "The first\n")
        wait_for_publication(worker)
        client.link.delay = 0.02
        client.link.count()
        client.site.save_post("b", "The second\n")
        wait_for_publication(worker)
    assert client.link.count() <= (0, 3)


# Whom it serves


def test_another_key_opens_another_connection(client: Client) -> None:
    client.host.make_key("other")
    keys = client.host.folder / "authorized_keys"
    keys.write_text(keys.read_text() + (client.host.folder / "other.pub").read_text())
    other = client.host.command.replace("/client ", "/other ")
    for command in (client.host.command, other, client.host.command, other):
        client.ask(command)
    assert client.link.connections == 2


def test_a_key_that_may_not_enter_does_not_enter_by_the_connection_of_another(client: Client) -> None:
    client.ask()
    client.host.make_key("stranger")
    with pytest.raises(PublishError) as caught:
        client.ask(client.host.command.replace("/client ", "/stranger "))
    assert caught.value.code is FailureCode.AUTH


def test_two_commands_at_once_have_a_connection_each(client: Client) -> None:
    client.ask()
    with (
        closing(Git(client.site.worktree, remote="origin", timeout=30)) as git,
        client.connections.borrow(
            git.ssh_command(git.settings),
            client.site.git("remote", "get-url", "origin"),
            git.variables(git.settings),
            client.site.worktree,
        ) as borrowed,
    ):
        assert borrowed is not None
        client.ask()
    assert client.link.connections == 2


@pytest.mark.parametrize(
    ("url", "destination"),
    [
        ("git@git.example.org:posts.git", "git@git.example.org"),
        ("git.example.org:posts.git", "git.example.org"),
        ("ssh://git@git.example.org:2222/posts.git", "ssh://git@git.example.org:2222"),
        ("git+ssh://git.example.org/posts.git", "ssh://git.example.org"),
        ("ssh://[::1]:22/posts.git", "ssh://[::1]:22"),
        ("https://git.example.org/posts.git", None),
        ("https://git.example.org:443/posts.git", None),
        ("/srv/git/posts.git", None),
        ("file:///srv/git/posts.git", None),
        ("ext::sh -c x", None),
        ("ssh://-oProxyCommand=x/posts.git", None),
        ("-oProxyCommand=x:posts.git", None),
        ("ssh://git:password@git.example.org/posts.git", None),
        ("ssh://%2doProxyCommand=x/posts.git", None),
    ],
)
def test_only_a_plain_address_of_ssh_has_a_connection_to_keep(url: str, destination: str | None) -> None:
    assert find_destination(url) == destination


def test_the_address_counts_as_git_rewrites_it(client: Client) -> None:
    url = client.site.git("remote", "get-url", "origin")
    client.site.git("config", f"url.{url}.insteadOf", "https://git.example.org/posts.git")
    client.site.git("remote", "set-url", "origin", "https://git.example.org/posts.git")
    client.ask()
    client.ask()
    assert client.link.connections == 1


# A user's own ways


@pytest.mark.parametrize("where", ["command", "configuration"])
def test_a_users_own_multiplexing_is_left_alone(client: Client, where: str) -> None:
    own = client.temporary / "own"
    command = f"{client.host.command} -o ControlMaster=no -o ControlPath={own}"
    if where == "configuration":
        (client.site.root / "config").write_text(f"Host {HOST}\n  ControlPath {own}\n")
        command = client.host.command.replace("-F /dev/null", f"-F {client.site.root}/config")
    client.ask(command)
    client.ask(command)
    assert client.link.connections == 2
    assert not client.sockets()


def test_an_ssh_that_is_not_openssh_gets_no_options_of_openssh(client: Client) -> None:
    log = client.site.root / "log"
    text = f'echo "$@" >> {log}\ncase "$*" in *" -G "*) exit 1;; esac\nexec {client.host.command} "$@"'
    other = program(client.site.root / "other-ssh", text)
    client.site.git("config", "ssh.variant", "ssh")
    assert client.ask(str(other))
    assert "Control" not in log.read_text()
    assert client.link.connections == 1


# Never worse than without


def stop_master(client: Client) -> None:
    for process in client.masters():
        process.suspend()


def kill_master(client: Client) -> None:
    for process in client.masters():
        process.kill()


FAULTS: dict[str, Callable[[Client], None]] = {
    "the link was frozen": lambda client: client.link.freeze(),
    "the link was cut": lambda client: client.link.cut(),
    "the process hangs": stop_master,
    "the process was killed": kill_master,
    "the folder was removed": lambda client: shutil.rmtree(next(client.temporary.glob("briter-*"))),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_connection_that_is_dead_is_replaced_in_the_same_attempt(
    client: Client, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault in {"the link was frozen", "the process hangs"}:
        monkeypatch.setattr(module, "SILENT_S", 1.0)
        monkeypatch.setattr(module, "_SLOW_HOST", 0)
    client.ask()
    before = client.masters()
    FAULTS[fault](client)
    assert client.push()
    assert client.link.connections > 1
    for process in before:
        with suppress(psutil.Error):
            process.kill()  # of the folder that was removed: it would end with its keep time


def test_a_host_that_allows_no_second_session_on_a_connection_gets_a_fresh_one(
    site: Site, temporary: Path
) -> None:
    with sshd(site.root / "sshd", MaxSessions="1") as server, link(server.port) as line:
        host = replace(server, port=line.port)
        host.introduce()
        site.git("remote", "set-url", "origin", host.url(site.remote))
        client = Client(site, host, line, temporary)
        client.ask()
        (path,) = client.sockets()
        command = ["ssh", "-F", os.devnull, "-S", str(path), HOST, "echo here; read line"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == b"here\n"
            assert client.push()
            assert client.link.connections == 2 + 1
            client.host.keep_out()
            with pytest.raises(PublishError) as caught:
                client.ask()
            assert caught.value.code is FailureCode.AUTH
            assert "mux" not in caught.value.message
            other.kill()
        client.connections.close()


def test_a_host_that_is_slow_to_answer_is_asked_again_once_and_then_has_its_time(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SILENT_S", 0.4)
    client.ask()
    client.host.let_in(options='command="sleep 1; eval $SSH_ORIGINAL_COMMAND"')
    client.now += KEEP_S
    client.ask()
    assert client.link.connections == 2
    client.ask()
    assert client.link.connections == 2


def test_a_host_that_has_become_slow_is_answered_for_in_the_same_attempt(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session is open already when the connection is given up: git fails, and is started again."""
    monkeypatch.setattr(module, "SILENT_S", 0.4)
    monkeypatch.setattr(module, "_SLOW_HOST", 0)
    slow = client.site.root / "slow"
    client.host.let_in(options=f'command="test ! -e {slow} || sleep 1; eval $SSH_ORIGINAL_COMMAND"')
    client.ask()
    slow.touch()
    with client.repository() as repository:
        assert repository.remote_tip()
    assert client.link.connections == 2


# When it ends


def test_a_revoked_key_acts_when_the_keep_time_ends_at_the_latest(client: Client) -> None:
    client.ask()
    client.host.keep_out()
    client.now = KEEP_S - 1
    client.ask()
    client.now = KEEP_S
    with pytest.raises(PublishError) as caught:
        client.ask()
    assert caught.value.code is FailureCode.AUTH


def test_a_changed_host_key_acts_when_the_keep_time_ends_at_the_latest(client: Client) -> None:
    client.ask()
    client.host.change_host_key()
    client.now = KEEP_S
    with pytest.raises(PublishError) as caught:
        client.ask()
    assert caught.value.code is FailureCode.HOST_KEY


def test_only_the_workers_user_can_enter_the_folder_and_its_paths_are_short(client: Client) -> None:
    client.ask()
    (path,) = client.sockets()
    assert len(f"{path}.0123456789abcdef") < _MAX_PATH
    for folder in path.relative_to(client.temporary).parents[:-1]:
        assert (client.temporary / folder).stat().st_mode & 0o777 == 0o700


def test_a_long_path_of_temporary_files_is_not_used_for_sockets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = tmp_path / "a-folder-with-a-long-name"
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    assert module._find_parent() == Path(f"/tmp/briter-{os.geteuid()}")  # noqa: SLF001


def test_a_folder_of_temporary_files_that_cannot_be_read_stops_no_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_path: Path) -> bool:
        raise PermissionError

    monkeypatch.setattr(Path, "is_dir", fail)
    connections = SshConnections(KEEP_S)
    with connections.borrow("ssh", "git@git.example.org:posts.git", {}, Path("/")) as connection:
        assert connection is None
    connections.close()


@pytest.mark.parametrize("foreign", ["open to others", "a link"])
def test_a_folder_that_is_not_private_is_not_used(client: Client, foreign: str) -> None:
    parent = client.temporary / f"briter-{os.geteuid()}"
    if foreign == "a link":
        (client.temporary / "elsewhere").mkdir(mode=0o700)
        parent.symlink_to("elsewhere")
    else:
        parent.mkdir()
        parent.chmod(0o770)
    client.ask()
    client.ask()
    assert client.link.connections == 2
    assert not client.sockets()


def saved(client: Client, slug: str) -> str:
    """Save a post; return its text once the remote has it."""
    text = f"{slug} by ssh\n"
    client.site.save_post(slug, text)
    eventually(lambda: client.site.remote_file(f"content/posts/{slug}.md") == text)
    return text


def test_after_sigterm_no_connection_and_no_file_is_left(client: Client) -> None:
    with client.site.running() as worker:
        saved(client, "a")
        saved(client, "b")
        assert len(client.masters()) == 1
        assert client.link.connections == 2 - 1
        worker.terminate()
        assert worker.wait(30) == 0
    assert not client.masters()
    assert not [*client.temporary.glob("briter-*/*")]


def test_after_sigkill_the_next_worker_ends_the_connection(client: Client) -> None:
    with client.site.running() as worker:
        saved(client, "a")
        worker.kill()
        worker.wait()
    assert client.masters()
    client.site.save_post("b", "Again\n")
    assert client.site.run_once().of("published")
    assert not client.masters()
    assert not [*client.temporary.glob("briter-*/*")]


def test_a_connection_of_a_worker_that_lives_is_left_alone_by_another(client: Client) -> None:
    client.ask()
    SshConnections(KEEP_S).close()
    client.ask()
    assert client.link.connections == 1


def test_a_connection_that_dies_in_a_worker_costs_no_attempt(client: Client) -> None:
    with client.site.running() as worker:
        saved(client, "a")
        client.link.cut()
        saved(client, "b")
        worker.terminate()
        events = [*lines_of(worker)]
    assert [each["attempt"] for each in events if each["event"] == "published"] == [1, 1]
    assert not [each for each in events if each["event"] == "failed"]


def test_doctor_asks_by_a_connection_of_its_own(client: Client) -> None:
    with client.site.running() as worker:
        saved(client, "a")
        client.host.keep_out()
        finding = client.site.command("doctor", "--json").finding("remote")
        saved(client, "b")
        worker.terminate()
        worker.wait()
    assert finding["state"] == "error"
