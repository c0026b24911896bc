"""What git's configuration may hold that no program of ours has written."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from outcomes import assert_published, save

if TYPE_CHECKING:
    from sites import Site

LATIN_1 = (
    b"[user]\n\tname = Ren\xe9\n# caf\xe9\n[alias]\n\tstatu = !echo \xe9\n"
    b'[branch "\xe9t\xe9"]\n\tremote = origin\n[remote "\xe9t\xe9"]\n\turl = /nowhere/\xe9\n'
)


@pytest.mark.parametrize("where", ["site", "home"])
def test_a_configuration_with_bytes_that_are_no_utf_8_stops_nothing(site: Site, where: str) -> None:
    """As an editor in latin-1 writes it."""
    home = site.root / "home"
    home.mkdir()
    file = site.worktree / ".git/config" if where == "site" else home / ".gitconfig"
    with file.open("ab") as config:
        config.write(LATIN_1)
    save(site, "a")
    assert_published(site, site.run_once(HOME=str(home)))
    site.push_elsewhere({"content/posts/theirs.md": "Theirs\n"})
    assert site.command("pull", HOME=str(home)).returncode == 0
    save(site, "b")
    assert_published(site, site.run_once(HOME=str(home)), "b")
    assert site.command("status", HOME=str(home)).returncode == 0
    assert site.command("doctor", "--json", HOME=str(home)).finding("remote")["state"] == "ok"


def test_an_address_with_bytes_that_are_no_utf_8_is_published_to(site: Site) -> None:
    there = os.fsencode(site.root) + b"/caf\xe9.git"
    site.remote.rename(os.fsdecode(there))
    site.remote.symlink_to(os.fsdecode(there))
    config = site.worktree / ".git/config"
    config.write_bytes(config.read_bytes().replace(os.fsencode(site.remote), there))
    save(site, "a")
    assert_published(site, site.run_once())
    site.push_elsewhere({"content/posts/theirs.md": "Theirs\n"})
    assert site.command("pull", "--json").returncode == 0
    assert site.command("status").returncode == 0
    assert site.command("doctor", "--json").finding("remote")["state"] == "ok"
