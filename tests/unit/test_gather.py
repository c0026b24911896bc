"""What a job brings along when it is sent away: everything it declares, and nothing else."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from briter_worker.allowlist import Allowlist
from briter_worker.git.payloads import Gathered, gather

if TYPE_CHECKING:
    from pathlib import Path

    from sites import Site

SAVED = 1_700_000_000.0


def gathered(root: Path, *paths: str, most: int = 1 << 20) -> Gathered:
    allowlist = Allowlist(["content", "media"])
    return gather(root, paths, allowlist=allowlist, max_bytes=most, saved_at=SAVED)


def blob_of(path: Path) -> str:
    done = subprocess.run(
        ["git", "hash-object", "--no-filters", str(path)], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def put(root: Path, path: str, content: bytes = b"x") -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


def test_a_clone_tells_which_version_the_author_started_from(site: Site) -> None:
    old = blob_of(site.worktree / "content/posts/welcome.md")
    site.write_post("content/posts/welcome.md", "# Changed\n")
    site.write_post("content/posts/new.md", "# New\n")
    found = gathered(site.worktree, "content/posts/welcome.md", "content/posts/new.md")
    was, new = found.payload.files
    assert (was.base, was.has_base) == (old, True)
    assert was.blob != old
    assert (new.base, new.has_base) == (None, True)


def test_a_deleted_file_is_gone_and_a_path_that_never_was_is_told(site: Site) -> None:
    old = blob_of(site.worktree / "content/posts/welcome.md")
    (site.worktree / "content/posts/welcome.md").unlink()
    found = gathered(site.worktree, "content/posts/welcome.md", "content/tpyo.md")
    gone, never = found.payload.files
    assert (gone.path, gone.blob, gone.base) == ("content/posts/welcome.md", None, old)
    assert (never.path, never.blob) == ("content/tpyo.md", None)
    assert found.missing == ("content/tpyo.md",)


def test_what_the_allowlist_refuses_is_declared_and_the_worker_says_why(tmp_path: Path) -> None:
    put(tmp_path, "content/a.md")
    found = gathered(tmp_path, "content", "content/.git/config", "elsewhere/b.md")
    assert found.paths == ("content", "content/.git/config", "elsewhere/b.md")
    assert (found.payload.folders, found.left_out) == (("content",), {})


@pytest.mark.parametrize("kind", ["link", "pipe", "repository"])
def test_a_folder_that_is_not_sent_whole_names_what_was_deleted_instead(site: Site, kind: str) -> None:
    """Of a folder that is sent whole, the site loses what was not sent: here that would be too much."""
    odd = site.worktree / "content/posts/odd"
    odd.symlink_to("welcome.md")
    site.write_post("content/posts/gone.md", "gone")
    site.git("add", "--all")
    site.git("commit", "--quiet", "-m", "Two more")
    (site.worktree / "content/posts/gone.md").unlink()
    if kind != "link":
        odd.unlink()
    if kind == "pipe":
        os.mkfifo(odd)
    elif kind == "repository":
        site.git("init", "--quiet", "content/posts/odd")
    found = gathered(site.worktree, "content/posts")
    files = {file.path: file.blob is not None for file in found.payload.files}
    assert files == {"content/posts/welcome.md": True, "content/posts/gone.md": False}
    assert found.payload.folders == ()
    assert list(found.left_out) == ["content/posts/odd"]
    assert found.paths == ("content/posts",)
