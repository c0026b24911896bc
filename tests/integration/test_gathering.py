"""What a job brings along when it is sent away: everything it declares, and nothing else."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from briter_worker.allowlist import Allowlist
from briter_worker.gathering import Gathered, GatheringError, gather
from briter_worker.ports import Delivery

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


def test_a_file_comes_with_its_git_blob_id_its_mode_and_its_bytes(tmp_path: Path) -> None:
    content = bytes(range(256)) * 9000  # more than one part
    file = put(tmp_path, "media/a.png", content)
    script = put(tmp_path, "content/run.sh")
    script.chmod(0o755)
    found = gathered(tmp_path, "media/a.png", "content/run.sh", most=1 << 30)
    a, b = found.delivery.files
    assert (a.path, a.mode, a.blob, a.saved_at) == ("media/a.png", "100644", blob_of(file), SAVED)
    assert b.mode == "100755"
    assert a.blob is not None
    assert b"".join(found.content(a.blob)) == content
    assert max(map(len, found.content(a.blob))) <= 1 << 20
    assert found.sizes[a.blob] == len(content)
    assert found.paths == ("media/a.png", "content/run.sh")


def test_a_folder_without_git_knows_no_version_to_start_from(tmp_path: Path) -> None:
    put(tmp_path, "content/a.md")
    (file,) = gathered(tmp_path, "content/a.md").delivery.files
    assert (file.base, file.knows_base) == (None, False)


def test_a_clone_tells_which_version_the_author_started_from(site: Site) -> None:
    old = blob_of(site.worktree / "content/posts/welcome.md")
    site.write_post("content/posts/welcome.md", "# Changed\n")
    site.write_post("content/posts/new.md", "# New\n")
    found = gathered(site.worktree, "content/posts/welcome.md", "content/posts/new.md")
    was, new = found.delivery.files
    assert (was.base, was.knows_base) == (old, True)
    assert was.blob != old
    assert (new.base, new.knows_base) == (None, True)


def test_a_deleted_file_is_gone_and_a_path_that_never_was_is_told(site: Site) -> None:
    old = blob_of(site.worktree / "content/posts/welcome.md")
    (site.worktree / "content/posts/welcome.md").unlink()
    found = gathered(site.worktree, "content/posts/welcome.md", "content/tpyo.md")
    gone, never = found.delivery.files
    assert (gone.path, gone.blob, gone.base) == ("content/posts/welcome.md", None, old)
    assert (never.path, never.blob) == ("content/tpyo.md", None)
    assert found.missing == ("content/tpyo.md",)


def test_a_folder_comes_with_all_that_is_in_it(site: Site) -> None:
    site.write_post("content/posts/deep/er/a.md", "a")
    found = gathered(site.worktree, "content/posts/")
    assert sorted(file.path for file in found.delivery.files) == [
        "content/posts/deep/er/a.md",
        "content/posts/welcome.md",
    ]
    assert found.delivery.folders == ("content/posts",)


def test_what_may_not_be_published_is_not_even_read(tmp_path: Path) -> None:
    put(tmp_path, ".env", b"canary")
    put(tmp_path, "content/a.md")
    found = gathered(tmp_path, ".env", "content/a.md", "content/../.env")
    assert [file.path for file in found.delivery.files] == ["content/a.md"]
    assert found.paths == (".env", "content/a.md", "content/../.env")  # the worker refuses and logs these


def test_a_link_is_left_out_with_its_reason_and_never_followed(tmp_path: Path) -> None:
    put(tmp_path, "secret/key", b"canary")
    put(tmp_path, "content/a.md")
    (tmp_path / "content/link").symlink_to(tmp_path / "secret/key")
    (tmp_path / "content/folder").symlink_to(tmp_path / "secret")
    found = gathered(tmp_path, "content/a.md", "content/link", "content/folder/key")
    assert [file.path for file in found.delivery.files] == ["content/a.md"]
    assert found.paths == ("content/a.md",)
    assert set(found.left_out) == {"content/link", "content/folder/key"}
    assert all("symbolic link" in reason for reason in found.left_out.values())


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
    files = {file.path: file.blob is not None for file in found.delivery.files}
    assert files == {"content/posts/welcome.md": True, "content/posts/gone.md": False}
    assert found.delivery.folders == ()
    assert list(found.left_out) == ["content/posts/odd"]
    assert found.paths == ("content/posts",)


def test_what_git_ignores_stays_behind(site: Site) -> None:
    site.write_post(".gitignore", "*.log\nwelcome.md\n")
    site.write_post("content/posts/a.log", "canary")
    site.write_post("content/posts/a.md", "a")
    found = gathered(site.worktree, "content/posts", "content/posts/a.log")
    assert sorted(file.path for file in found.delivery.files) == [
        "content/posts/a.md",
        "content/posts/welcome.md",  # git has it, so it ignores it no more
    ]
    assert found.paths == ("content/posts",)
    assert "git ignores it" in found.left_out["content/posts/a.log"]


def test_what_a_sparse_checkout_leaves_out_was_not_deleted(site: Site) -> None:
    site.write_post("content/other/b.md", "b")
    site.write_post("content/posts/gone.md", "gone")
    site.git("add", "--all")
    site.git("commit", "--quiet", "-m", "Another")
    site.git("sparse-checkout", "set", "content/posts")
    (site.worktree / "content/posts/gone.md").unlink()
    assert not (site.worktree / "content/other").exists()
    for path in ("content/other", "content/other/b.md"):
        found = gathered(site.worktree, path)
        assert found.delivery == Delivery()
    for path in ("content", "content/posts"):
        found = gathered(site.worktree, path)
        whole = path == "content/posts"
        assert found.delivery.folders == (("content/posts",) if whole else ())
        gone = [file.path for file in found.delivery.files if file.blob is None]
        assert gone == ([] if whole else ["content/posts/gone.md"])


def test_a_file_that_is_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    file = put(tmp_path, "media/film.mp4")
    os.truncate(file, 1 << 40)
    with pytest.raises(GatheringError, match=r"media/film.mp4 has 1099511627776 bytes, more than the 100"):
        gathered(tmp_path, "media/film.mp4", most=100)


def test_whose_hook_calls_it_does_not_lead_git_astray(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    old = blob_of(site.worktree / "content/posts/welcome.md")
    other = site.root / "other"
    site.git("init", "--quiet", str(other))
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    (file,) = gathered(site.worktree, "content/posts/welcome.md").delivery.files
    assert file.base == old


def test_a_repository_without_a_commit_has_no_versions(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    put(tmp_path, "content/a.md")
    (file,) = gathered(tmp_path, "content/a.md").delivery.files
    assert (file.base, file.knows_base) == (None, True)
