"""A remote behind ssh: its key, ours, what its login prints, and what ssh leaves running here."""

from __future__ import annotations

import os
import subprocess
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest
from outcomes import (
    LAST,
    SOON,
    assert_dead_letter,
    assert_once,
    assert_published,
    assert_waits_until_it_passes,
    save,
)
from remotes import HOST, SshHost, closed_port, git_daemon, silent_port, sshd
from sites import program

from briter_worker.errors import FailureCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sites import Site


@pytest.fixture
def ssh(site: Site) -> Iterator[SshHost]:
    """The site's remote, reached by ssh."""
    with sshd(site.root / "sshd") as host:
        site.git("config", "core.sshCommand", host.command)
        site.git("remote", "set-url", "origin", host.url(site.remote))
        yield host


def test_a_host_that_does_not_let_the_worker_in_is_waited_for(site: Site, ssh: SshHost) -> None:
    ssh.keep_out()
    reason = assert_waits_until_it_passes(site, FailureCode.AUTH, "deploy key or token", ssh.let_in)
    assert "Permission denied (publickey)" in reason


def test_a_host_whose_key_has_changed_is_not_talked_to(site: Site, ssh: SshHost) -> None:
    ssh.change_host_key()
    reason = assert_waits_until_it_passes(site, FailureCode.HOST_KEY, "ssh-keygen -R HOST", ssh.introduce)
    assert "IDENTIFICATION HAS CHANGED" in reason


@pytest.mark.parametrize("strict", ["-o StrictHostKeyChecking=yes", "-o StrictHostKeyChecking=ask"])
def test_a_host_whose_key_is_unknown_is_not_talked_to_and_nobody_is_asked(
    site: Site, ssh: SshHost, strict: str
) -> None:
    (ssh.folder / "known_hosts").unlink()
    site.git("config", "core.sshCommand", ssh.command.replace("-o StrictHostKeyChecking=yes", strict))
    assert_waits_until_it_passes(site, FailureCode.HOST_KEY, "ssh-keyscan HOST", ssh.introduce)


def test_nobody_is_ever_asked_for_a_passphrase(site: Site, ssh: SshHost) -> None:
    key = str(ssh.folder / "client")
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "passphrase", "-f", key], check=True)
    mark = site.root / "asked"
    ask = str(program(site.root / "askpass", f'echo "$@" >> {mark}; echo passphrase'))
    save(site, "a")
    asking = {"SSH_ASKPASS": ask, "SSH_ASKPASS_REQUIRE": "force", "GIT_ASKPASS": ask, "DISPLAY": ":0"}
    assert_dead_letter(site, site.run_once(**asking, **LAST), FailureCode.AUTH)
    assert not mark.exists(), mark.read_text()


@pytest.mark.usefixtures("ssh")
def test_a_master_connection_that_stays_does_not_hold_up_the_push(site: Site) -> None:
    """As ControlPersist has it: a daemon of ssh's own, with git's standard error still open."""
    strays = site.root / "strays"
    stay = f"setsid sleep 60 </dev/null >/dev/null & echo $! >> {strays}\n"
    command = site.git("config", "core.sshCommand")
    site.git("config", "core.sshCommand", str(program(site.root / "ssh", f'{stay}exec {command} "$@"')))
    site.git("config", "ssh.variant", "ssh")
    save(site, "a")
    began = time.monotonic()
    try:
        result = site.run_once()
        assert time.monotonic() - began < 50
    finally:
        for pid in strays.read_text().split():
            os.kill(int(pid), 9)
    assert_published(site, result)
    assert_once(site, "a")


# git's own protocol, and nobody there


def back(site: Site) -> Callable[[], str]:
    """Give the site the address of its remote again."""
    return partial(site.git, "remote", "set-url", "origin", str(site.remote))


@pytest.fixture(autouse=True)
def _an_ssh_without_settings(site: Site) -> None:
    site.git("config", "core.sshCommand", "ssh -F /dev/null")


@pytest.mark.parametrize("host", [HOST, "nowhere.invalid"], ids=["down", "unknown"])
@pytest.mark.parametrize("scheme", ["git", "https", "ssh"])
def test_a_host_that_is_down_is_waited_for(site: Site, scheme: str, host: str) -> None:
    with closed_port() as port:
        site.git("remote", "set-url", "origin", f"{scheme}://{host}:{port}/x.git")
        assert_waits_until_it_passes(site, FailureCode.NETWORK, "the host's status", back(site))


@pytest.mark.parametrize("scheme", ["git", "https", "ssh"])
def test_a_host_that_never_says_a_word_is_given_up_with_every_process(site: Site, scheme: str) -> None:
    with silent_port() as port:
        site.git("remote", "set-url", "origin", f"{scheme}://{HOST}:{port}/x.git")
        fix = "raise BRITER_GIT_TIMEOUT_MS"
        assert_waits_until_it_passes(site, FailureCode.TIMEOUT, fix, back(site), **SOON)


@pytest.mark.parametrize("wrong", ["no such repository", "for reading only"])
def test_an_address_that_is_not_served_is_told(site: Site, wrong: str) -> None:
    options = ["--enable=receive-pack"] if wrong == "no such repository" else []
    name = "renamed.git" if wrong == "no such repository" else site.remote.name
    with git_daemon(site.root, *options) as url:
        site.git("remote", "set-url", "origin", f"{url}/{name}")
        fix = "git remote -v, and that its server lets the worker push"
        assert_waits_until_it_passes(site, FailureCode.REMOTE_MISSING, fix, back(site))
