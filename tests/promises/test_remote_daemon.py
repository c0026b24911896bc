"""Nobody there, the wrong address, and a server that dies in the middle of a push."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
from outcomes import SOON, assert_waits_until_it_passes
from remotes import HOST, closed_port, git_daemon, silent_port

from briter_worker.errors import FailureCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from sites import Site


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
