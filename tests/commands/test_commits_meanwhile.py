"""A person commits at each git command of a publication."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING

import pytest
from outcomes import assert_sound
from sites import PERSON, eventually

if TYPE_CHECKING:
    from sites import Result, Site

REAL = shutil.which("git")
POST = "content/posts/a.md"
COMMANDS = ["check-attr", "fast-import", "push", "publish", "update-index", "sync"]
"""The commands of a publication, in order; `publish` and `sync` are the messages of its ref updates."""


def at(site: Site, command: str, does: str) -> str:
    """A PATH on which this happens just before the worker's first git with this word in its command."""
    folder = site.root / "bin"
    folder.mkdir()
    shim = folder / "git"
    shim.write_text(
        f"""#!/bin/sh
case "$*" in *{command}*)
  if mkdir '{folder}/done' 2>/dev/null; then
    (unset $(env | grep -o '^GIT_[A-Z_0-9]*'); cd '{site.worktree}'; {does}) >'{folder}/said' 2>&1
  fi;;
esac
exec {REAL} "$@"
"""
    )
    shim.chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def run_with(site: Site, command: str, does: str) -> Result:
    """A run in which this happens; it did happen."""
    result = site.run_once(PATH=at(site, command, does))
    assert (site.root / "bin" / "done").exists(), f"no {command}"
    return result


def commit(*args: str) -> str:
    return " ".join([f"{REAL} {' '.join(repr(word) for word in PERSON)} commit -qm 'A note'", *args])


def save(site: Site) -> None:
    site.write_post(POST, "published\n")
    site.save("a", [POST])


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("args", [(), ("-a",)], ids=["commit", "commit -a"])
def test_no_commit_of_a_persons_takes_a_post_back(site: Site, command: str, args: tuple[str, ...]) -> None:
    site.push_elsewhere({"content/posts/theirs.md": "theirs\n", "content/posts/welcome.md": "# Theirs\n"})
    save(site)
    site.write_post("notes.txt", "mine\n")
    site.git("add", "notes.txt")
    assert run_with(site, command, commit(*args)).of("published")
    if site.git("diff", "--cached", "--name-only"):  # git was busy at that moment: the person tries again
        site.git("commit", "--quiet", "--message=A note", *args)
    note = site.git("log", "-1", "--format=%H", "--", "notes.txt")
    assert site.git("show", "--format=", "--name-status", note) == "A\tnotes.txt"
    site.run_once()
    assert site.command("pull", "--rebase", "--push").returncode == 0
    subjects = [subject for _, subject in site.remote_log()]
    assert sorted(subjects) == ["A note", "Publish a", "Start the site", "Theirs"]
    assert site.remote_file(POST) == "published\n"
    assert site.remote_file("content/posts/welcome.md") == "# Theirs\n"
    assert_sound(site)


def test_an_edit_in_the_second_in_which_a_file_was_staged_is_still_seen_after_a_publication(
    site: Site,
) -> None:
    notes = site.write_post("notes.txt", "one\n")
    while True:
        notes.write_text("one\n")
        site.git("add", "notes.txt")
        notes.write_text("two\n")
        index = (site.worktree / ".git" / "index").stat()
        if int(index.st_mtime) == int(notes.stat().st_mtime):
            break  # else a second ended in between: git would know by the time stamp
    assert site.git("diff", "--name-only") == "notes.txt"
    eventually(lambda: time.time() >= int(index.st_mtime) + 1.1)
    save(site)
    assert site.run_once().of("published")
    assert site.git("diff", "--name-only") == "notes.txt"
