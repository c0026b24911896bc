"""Disks that are full, limited, read-only or broken: a condition of the site, and nothing is torn."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from outcomes import assert_published, assert_published_at_last, assert_put_off, assert_sound, save
from requirements import full, over, provide, read_only, small
from sites import UNMEASURED, Result, Site, lines_of, program

from briter_worker.errors import FailureCode
from briter_worker.git.index import Index
from briter_worker.git.run import Git

if TYPE_CHECKING:
    from collections.abc import Iterator


def assert_not_begun(site: Site, result: Result, reason: str, remedy: str, *slugs: str) -> None:
    """One line says what is wrong, where and what to do; no attempt was counted, no job file changed."""
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert reason in line
    assert str(site.storage) in line
    assert line.endswith(f"Fix: {remedy}")
    assert not {"start", "failed", "dead-lettered"} & set(result.names())
    kept = [*site.queue.glob("[!.]*.json"), *(site.queue / ".claimed").glob("[!.]*.json")]
    jobs = {job["slug"]: job for job in (json.loads(file.read_bytes()) for file in kept)}
    assert set(jobs) == set(slugs)
    assert all("attempts" not in job for job in jobs.values())


@contextmanager
def site_with_small(root: Path, folder: str, size: str) -> Iterator[Site]:
    with small(root / folder, size=size):
        yield Site.make(root)


# Full


def test_a_full_disk_under_the_queue_costs_no_attempt_and_no_job(tmp_path: Path) -> None:
    with site_with_small(tmp_path, "storage", "1m") as site:
        save(site, "a", "b")
        with full(site.storage):
            assert_not_begun(site, site.run_once(), "No space left on device", "free some space", "a", "b")
        assert_published_at_last(site, "a", "b")


def test_a_disk_that_fills_while_a_push_runs_loses_nothing(tmp_path: Path) -> None:
    with site_with_small(tmp_path, "storage", "1m") as site:
        save(site, "a")
        filler = site.storage / ".filler"
        site.hook(f"dd if=/dev/zero of={filler} bs=1k 2>/dev/null; rm $0", "post-receive")
        result = site.run_once()
        assert filler.stat().st_size > 800_000
        filler.unlink()
        if not result.of("published"):
            result = site.run_once()
        assert_published(site, result)
        assert_sound(site)


@pytest.mark.parametrize("left", [0, 16384], ids=["at once", "in the middle of the pack"])
def test_a_full_disk_under_the_repository_is_the_sites_condition(tmp_path: Path, left: int) -> None:
    with site_with_small(tmp_path, "site", "4m") as site:
        save(site, "a")
        site.save_post("big", os.urandom(30_000).hex())
        tip = site.git("rev-parse", "main")
        with full(site.worktree, left=left):
            result = site.run_once()
            assert_put_off(site, result, FailureCode.DISK, slug="big")
            assert_put_off(site, result, FailureCode.DISK)
            assert site.job("a")["fix"] == "free some space"
            assert site.git("rev-parse", "main") == tip
            status = site.command("status", "--json").json()
            assert status["fix"] == "free some space"
        assert_published_at_last(site, "a", "big")
        assert site.command("status", "--json").json()["condition"] is None


def test_a_disk_that_is_full_after_the_push_takes_no_colleagues_line_back(tmp_path: Path) -> None:
    with site_with_small(tmp_path, "site", "4m") as site:
        save(site, "a")
        site.save_post("both", "theirs\n\n\n\nours\n")
        assert_published(site, site.run_once(), "a", "both")
        site.push_elsewhere({"content/posts/both.md": "a colleague's\n\n\n\nours\n"})
        filler = site.worktree / ".git" / "filler"
        site.hook(f"dd if=/dev/zero of={filler} bs=1k 2>/dev/null; rm $0", "post-receive")
        site.save_post("both", "theirs\n\n\n\none\n")
        site.run_once()
        assert filler.stat().st_size > 800_000
        assert site.remote_file("content/posts/both.md") == "a colleague's\n\n\n\none\n"
        site.run_once()  # with nothing to write on still
        filler.unlink()
        site.save_post("both", "theirs\n\n\n\ntwo\n")
        site.run_once()
        assert site.remote_file("content/posts/both.md") == "a colleague's\n\n\n\ntwo\n"
        assert (site.worktree / "content/posts/both.md").read_text() == "a colleague's\n\n\n\ntwo\n"
        assert_sound(site)


def test_a_lock_of_the_index_that_cannot_be_written_does_not_stay(tmp_path: Path) -> None:
    with site_with_small(tmp_path, "site", "4m") as site:
        index = Index(Git(site.worktree, remote="origin", timeout=60))
        with (
            index.copied(),
            full(site.worktree),
            pytest.raises(OSError, match="No space left"),
            index.locked(),
        ):
            pass
        assert not index.is_locked()


# Limited


def test_a_limit_on_the_size_of_files_that_the_worker_itself_meets_costs_no_attempt(site: Site) -> None:
    save(site, "a")
    result = site.run_once("prlimit", "--fsize=0", **UNMEASURED)
    assert_not_begun(site, result, "File too large", "raise the limit on the size of files: ulimit -f", "a")
    result = site.run_once("prlimit", "--fsize=3")  # half a record would name another process
    assert result.returncode == 1
    assert "cannot be locked" in result.stderr
    assert_published(site, site.run_once())


def test_a_limit_on_the_size_of_files_that_git_meets_is_the_sites_condition(site: Site) -> None:
    save(site, "a")
    site.save_post("big", os.urandom(30_000).hex())
    tip = site.git("rev-parse", "main")
    result = site.run_once("prlimit", "--fsize=4096")
    assert_put_off(site, result, FailureCode.DISK, slug="big")
    assert_put_off(site, result, FailureCode.DISK)
    assert "ulimit -f" in site.job("a")["fix"]
    assert site.git("rev-parse", "main") == tip
    assert_published_at_last(site, "a", "big")


# Read-only


@pytest.mark.parametrize("folder", ["queue", "."], ids=["the queue", "all of the worker's storage"])
def test_a_read_only_queue_costs_no_attempt_and_no_job(site: Site, folder: str) -> None:
    save(site, "a")
    with read_only(site.storage / folder):
        result = site.run_once()
        assert_not_begun(site, result, "Read-only file system", "make the file system writable", "a")
    assert_published_at_last(site)


@pytest.mark.parametrize("folder", [".", ".git", ".git/objects", ".git/refs"])
def test_a_read_only_repository_is_the_sites_condition(site: Site, folder: str) -> None:
    save(site, "a")
    tip = site.git("rev-parse", "main")
    with read_only(site.worktree / folder):
        reason = assert_put_off(site, site.run_once(), FailureCode.DISK)
    # Of its own ref's folder, git does not say why.
    expected = "write access" if folder == ".git/refs" else "make the file system writable"
    assert expected in f"{reason} {site.job('a')['fix']}"
    assert site.git("rev-parse", "main") == tip
    assert len(site.remote_log()) == 1
    assert_published_at_last(site)


@pytest.mark.parametrize("folder", ["content", ".git"])
def test_the_remotes_files_reach_a_folder_on_a_disk_of_its_own(site: Site, folder: str) -> None:
    posts = [f"content/{name}.md" for name in ("posts/welcome", "new/theirs")]

    def publish_after(text: str) -> Result:
        site.push_elsewhere(dict.fromkeys(posts, text))
        result = site.run_once()
        assert "published" in result.names()
        return result

    shutil.copytree(site.worktree / folder, site.root / "kept")
    with small(site.worktree / folder, size="16m"):
        shutil.copytree(site.root / "kept", site.worktree / folder, dirs_exist_ok=True)
        save(site, "a")
        publish_after("one\n")
        assert all((site.worktree / post).read_text() == "one\n" for post in posts)
        assert_sound(site)
        save(site, "b")
        with read_only(site.worktree / "content"):
            told = publish_after("two\n").of("warning")
            assert any("could not be written, such as content/" in each["error"] for each in told)
            site.git("commit", "-q", "--all", "--allow-empty", "--message=All")
            assert site.git("diff-tree", "-r", "--no-commit-id", "HEAD") == ""
            site.git("reset", "-q", "--soft", "HEAD~1")
        site.run_once()
        assert all((site.worktree / post).read_text() == "two\n" for post in posts)
        assert_sound(site)


def test_a_worker_waits_until_its_queue_can_be_written_again(site: Site) -> None:
    save(site, "a")
    with site.running(BRITER_WORKER_POLL_INTERVAL_MS="100") as worker:
        told = lines_of(worker)
        assert next(told)["event"] == "worker-started"
        assert next(e for e in told if e["event"] == "published")["attempt"] == 1
        with read_only(site.queue):
            (site.root / "b.json").write_text(
                json.dumps({"slug": "b", "paths": ["content/posts/b.md"], "id": "b"})
            )
            site.write_post("content/posts/b.md", "b\n")
            # The CMS has it mounted elsewhere, and can write.
            elsewhere = f"umount -l {site.queue}; mv {site.root}/b.json {site.queue}/"
            subprocess.run(["unshare", "--mount", "sh", "-c", elsewhere], check=True)
            warning = next(e for e in told if e["event"] == "warning")
            assert warning["fix"] == "make the file system writable"
        published = next(e for e in told if e["event"] == "published")
        assert (published["slug"], published["attempt"]) == ("b", 1)


# Broken


@contextmanager
def unreadable() -> Iterator[Path]:
    """A regular file whose every read is an I/O error."""
    with subprocess.Popen(["sleep", "100"]) as sleeper:
        try:
            yield Path(f"/proc/{sleeper.pid}/mem")
        finally:
            sleeper.kill()


def test_an_io_error_under_a_post_concerns_that_post_alone(site: Site) -> None:
    save(site, "a", "b")
    with unreadable() as broken, over(site.worktree / "content/posts/a.md", broken):
        result = site.run_once()
    reason = assert_put_off(site, result, FailureCode.DISK)
    assert "content/posts/a.md cannot be read: Input/output error" in reason
    assert site.job("a")["fix"] == "check the disk"
    assert_published(site, result, "b")
    assert_published_at_last(site)


def test_an_io_error_under_a_job_file_is_shown_and_the_others_go_on(site: Site) -> None:
    save(site, "a", "b")
    (job,) = site.queue.glob("a-*.json")
    before = job.read_bytes()
    with unreadable() as broken, over(job, broken):
        result = site.run_once()
        assert [entry["slug"] for entry in result.of("published")] == ["b"]
        (stuck,) = site.command("status", "--json").json()["stuck"]
        assert stuck["file"] == job.name
        assert "Input/output error" in stuck["reason"]
    assert job.read_bytes() == before
    assert_published(site, site.run_once())


@pytest.mark.parametrize(
    ("error", "said"),
    [("EIO", "Input/output error"), ("EDQUOT", "Disk quota exceeded")],
    ids=["an I/O error", "over quota"],
)
def test_what_git_cannot_flush_to_the_disk_is_the_sites_condition(site: Site, error: str, said: str) -> None:
    provide("strace", package="strace")
    save(site, "first")
    assert_published(site, site.run_once(), "first")  # of its refs' files, git does not say why
    save(site, "a")
    inject = f"strace -f -qq -o /dev/null -e trace=fsync -e inject=fsync:error={error}"
    git = program(site.root / "bin" / "git", f'exec {inject} /usr/bin/git "$@"')
    tip = site.git("rev-parse", "main")
    reason = assert_put_off(site, site.run_once(PATH=f"{git.parent}:{os.environ['PATH']}"), FailureCode.DISK)
    assert said in reason
    assert site.git("rev-parse", "main") == tip
    assert len(site.remote_log()) == 2
    assert_published_at_last(site)


@pytest.mark.parametrize(
    ("call", "error", "said", "remedy"),
    [
        ("fsync", "EIO", "Input/output error", "check the disk"),
        ("rename,renameat,renameat2", "EROFS", "Read-only file system", "make the file system writable"),
        ("link,linkat,fsync", "EDQUOT", "Disk quota exceeded", "free some space, or raise the quota"),
    ],
)
def test_what_the_queue_cannot_write_costs_no_attempt_and_no_job(
    site: Site, call: str, error: str, said: str, remedy: str
) -> None:
    provide("strace", package="strace")
    save(site, "a")
    inject = ["-e", f"trace={call}", "-e", f"inject={call}:error={error}"]
    result = site.run_once("strace", "-qq", "-o", "/dev/null", *inject, **UNMEASURED)
    assert_not_begun(site, result, said, remedy, "a")
    assert_published_at_last(site)
