"""A remote by https: known credentials go with the first request, to their host alone."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from links import Link, link
from remotes import HOST, Exchange, asks_for, http_server, says, serve
from requirements import provide
from sites import wait_for_publication

from briter_worker.errors import FailureCode, PublishError, redact
from briter_worker.git.repository import Repository
from briter_worker.git.run import Git

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from sites import Site

PASSWORD = "correct-horse-battery"  # noqa: S105 - of the server below
HELPER = '!f() {{ echo "$1" >> {log}; [ "$1" != get ] || printf "username=me\\npassword={password}\\n"; }}; f'


@dataclass
class Client:
    """A site whose remote is reached by https, and what the server was asked."""

    site: Site
    link: Link
    behaviour: Callable[[Exchange], None] = field(default=asks_for("me", PASSWORD))
    asked: list[str] = field(default_factory=list)

    def url(self, user: str = "") -> str:
        return f"https://{user}{HOST}:{self.link.port}/{self.site.remote.name}"

    def use_helper(self, password: str = PASSWORD) -> None:
        """Have a credential helper know the password."""
        log = self.site.root / "helper.log"
        self.site.git("config", "credential.helper", HELPER.format(log=log, password=password))

    def helper_calls(self) -> list[str]:
        return (self.site.root / "helper.log").read_text().split()

    @contextmanager
    def repository(self) -> Iterator[Repository]:
        with closing(Git(self.site.worktree, remote="origin", timeout=30)) as git:
            yield Repository(git, branch="main", remote="origin")

    def ask(self) -> str | None:
        """Ask the remote where its branch is; return the commit."""
        with self.repository() as repository:
            return repository.remote_tip()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for loopback and its key, in one file."""
    provide("openssl", package="openssl")
    folder = tmp_path_factory.mktemp("certificate")
    subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
                "-nodes",
            ),
            *("-keyout", str(folder / "key"), "-out", str(folder / "certificate"), "-days", "2"),
            *("-subj", f"/CN={HOST}", "-addext", f"subjectAltName=IP:{HOST}"),
        ],
        check=True,
        capture_output=True,
    )
    both = folder / "both"
    both.write_text((folder / "key").read_text() + (folder / "certificate").read_text())
    return both


@pytest.fixture
def client(site: Site, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    for name in ("CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    made: list[Client] = []

    def behave(exchange: Exchange) -> None:
        exchange.folder = site.root
        is_known = "Authorization" in exchange.handler.headers
        made[0].asked.append(f"{exchange.handler.command} {'as me' if is_known else 'as anybody'}")
        made[0].behaviour(exchange)

    with http_server(behave, certificate) as port, link(port) as line:
        made.append(Client(site, line))
        site.git("config", "http.sslCAInfo", str(certificate))
        site.git("remote", "set-url", "origin", made[0].url())
        yield made[0]


def test_known_credentials_go_with_the_first_request(client: Client) -> None:
    client.use_helper()
    assert client.ask()
    assert client.asked == ["GET as me", "POST as me"]


def test_credentials_of_the_address_go_with_the_first_request(client: Client) -> None:
    client.site.git("remote", "set-url", "origin", client.url(f"me:{PASSWORD}@"))
    assert client.ask()
    assert client.asked == ["GET as me", "POST as me"]


def test_who_knows_no_credentials_asks_as_anybody(client: Client) -> None:
    client.behaviour = serve
    assert client.ask()
    assert client.asked == ["GET as anybody", "POST as anybody"]


def test_a_header_of_the_users_own_is_left_alone(client: Client) -> None:
    client.use_helper()
    client.site.git("config", "http.extraHeader", "Authorization: Basic bWU6Y29ycmVjdC1ob3JzZS1iYXR0ZXJ5")
    assert client.ask()
    assert client.asked == ["GET as me", "POST as me"]
    assert not (client.site.root / "helper.log").exists()


def test_the_helper_is_told_what_was_accepted_as_git_does(client: Client) -> None:
    client.use_helper()
    client.ask()
    assert client.helper_calls() == ["get", "store"]


def test_a_helper_is_not_asked_again_within_a_minute(client: Client) -> None:
    client.use_helper()
    with client.repository() as repository:
        repository.remote_tip()
        repository.remote_tip()
    assert client.asked == ["GET as me", "POST as me"] * 2
    assert client.helper_calls() == ["get", "store"]


def test_a_token_that_was_replaced_meanwhile_is_asked_for_at_once(client: Client) -> None:
    client.use_helper()
    with client.repository() as repository:
        repository.remote_tip()
        client.behaviour = asks_for("me", "another-password")
        client.use_helper("another-password")
        assert repository.remote_tip()
        client.asked.clear()
        assert repository.remote_tip()
    assert client.asked == ["GET as me", "POST as me"]


def test_credentials_that_are_wrong_are_asked_for_again_by_git_alone(client: Client) -> None:
    client.use_helper("wrong-horse-battery")
    with pytest.raises(PublishError) as caught:
        client.ask()
    assert caught.value.code is FailureCode.AUTH
    assert client.asked == ["GET as me", "GET as anybody", "GET as me"]
    assert client.helper_calls() == ["get", "get", "erase"]


def test_a_host_that_wants_another_kind_of_login_costs_no_credentials(client: Client) -> None:
    """With a header that it does not know: only what git itself finds out decides what the helper forgets."""
    client.use_helper()
    login = client.behaviour
    refuse = says(401, "Not like this", WWW_Authenticate='Basic realm="posts"')

    def refuse_first(exchange: Exchange) -> None:
        (refuse if len(client.asked) == 1 else login)(exchange)

    client.behaviour = refuse_first
    assert client.ask()
    assert "erase" not in client.helper_calls()


def test_credentials_follow_no_redirect(client: Client, certificate: Path) -> None:
    client.use_helper()
    seen: list[str | None] = []

    def elsewhere(exchange: Exchange) -> None:
        seen.append(exchange.handler.headers.get("Authorization"))
        exchange.folder = client.site.root
        serve(exchange)

    with http_server(elsewhere, certificate) as port:
        client.behaviour = lambda exchange: exchange.reply(
            302, headers={"Location": f"https://localhost:{port}{exchange.handler.path}"}
        )
        client.site.git("config", "http.sslVerify", "false")
        assert client.ask()
    assert seen == [None, None]


def test_a_password_that_only_a_helper_knows_is_hidden_in_every_text(client: Client) -> None:
    client.use_helper()
    client.ask()
    assert PASSWORD not in redact(f"remote: you are {PASSWORD}")


def test_no_argument_of_any_process_has_the_password(client: Client, tmp_path: Path) -> None:
    client.use_helper()
    log = tmp_path / "arguments"
    real = shutil.which("git")
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "git").write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec {real} "$@"\n')
    (folder / "git").chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        client.ask()
    assert "ls-remote" in log.read_text()
    assert PASSWORD not in log.read_text()
    assert "Authorization" not in log.read_text()


# Round trips: TCP and TLS take one each


def test_a_question_by_https_takes_four_round_trips(client: Client) -> None:
    client.use_helper()
    client.link.delay = 0.02
    client.ask()
    assert client.link.count() <= (1, 4)


def test_a_pull_that_finds_nothing_new_takes_four_round_trips_by_https(client: Client) -> None:
    client.use_helper()
    with client.repository() as repository:
        repository.fetch()
        client.link.delay = 0.02
        client.link.count()
        repository.fetch()
    assert client.link.count() <= (1, 4)


def test_a_save_takes_four_round_trips_by_https(client: Client) -> None:
    client.use_helper()
    with client.site.running() as worker:
        client.site.save_post("a", "The first\n")  # the remote's tip is not known yet
        wait_for_publication(worker)
        client.link.delay = 0.02
        client.link.count()
        client.site.save_post("b", "The second\n")
        wait_for_publication(worker)
    assert client.link.count() <= (1, 4)
