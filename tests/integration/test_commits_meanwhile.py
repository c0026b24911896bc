"""A person commits in the very moment in which the worker moves the branch and the index."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from machine import provide
from sites import PERSON, eventually

if TYPE_CHECKING:
    from pathlib import Path

    from sites import Site

REAL = shutil.which("git")


def committing_before(site: Site, folder: Path, command: str) -> str:
    """A PATH on which a person's `git commit` comes just before the worker's first `git <command>`."""
    folder.mkdir()
    person = " ".join(f"'{word}'" for word in PERSON)
    shim = folder / "git"
    shim.write_text(
        f"""#!/bin/sh
index=$GIT_INDEX_FILE
case " $* " in *" {command} "*)
  if mkdir '{folder}/done' 2>/dev/null; then
    unset GIT_INDEX_FILE GIT_DIR
    {REAL} -C '{site.worktree}' {person} commit -qm 'A note' >'{folder}/said' 2>&1
    echo $? >'{folder}/status'
  fi;;
esac
[ -z "$index" ] || export GIT_INDEX_FILE="$index"
exec {REAL} "$@"
"""
    )
    shim.chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def test_a_commit_between_the_branch_and_the_index_takes_no_post_back(site: Site, tmp_path: Path) -> None:
    site.write_post("content/posts/a.md", "published")
    site.write_post("notes.txt", "mine")
    site.git("add", "notes.txt")
    site.save("a", ["content/posts/a.md"])
    done = site.run_once(PATH=committing_before(site, tmp_path / "bin", "update-index"))
    assert done.of("published")
    assert (tmp_path / "bin" / "status").exists(), "the person never came"
    if site.git("diff", "--cached", "--name-only"):
        site.git("commit", "--quiet", "--message=A note, again")
    for commit in site.git("rev-list", "HEAD").splitlines():
        changed = site.git("show", "--format=", "--name-status", commit).splitlines()
        assert "D\tcontent/posts/a.md" not in changed
    site.run_once()
    site.git("pull", "--quiet", "--rebase")
    assert site.git("show", "HEAD:content/posts/a.md") == "published"
    assert site.git("show", "HEAD:notes.txt") == "mine"
    assert site.git("status", "--porcelain", "--untracked-files=no") == ""


def die_before_update_index(site: Site, folder: Path) -> None:
    """A run whose worker is killed when the branch has moved and the index has not."""
    die_before(site, folder, "update-index")


def publish_and_die(site: Site, folder: Path) -> None:
    """The same, of a post that is on the remote then."""
    site.write_post("content/posts/a.md", "published")
    site.save("a", ["content/posts/a.md"])
    die_before_update_index(site, folder)


def assert_held_until_followed(site: Site, folder: Path, does: str = "") -> None:
    """In the next run, the lock of the index goes when the index has followed, and not before.

    `does` is done before each command of git's.
    """
    lock, seen = site.worktree / ".git" / "index.lock", folder / "seen"
    assert lock.exists()
    folder.mkdir()
    shim = folder / "git"
    shim.write_text(
        f"""#!/bin/sh
{does}
if [ -e '{lock}' ]; then echo "held $*"; else echo "free $*"; fi >> '{seen}'
exec {REAL} "$@"
"""
    )
    shim.chmod(0o755)
    site.run_once(PATH=f"{folder}:/usr/bin:/bin")
    asked = seen.read_text().splitlines()
    follows = max(number for number, line in enumerate(asked) if " update-index " in line)
    free = [line for line in asked[: follows + 1] if not line.startswith("held ")]
    assert not free, "a person's commit could have come between"
    assert not lock.exists()
    assert site.git("diff", "--cached", "--name-only") == ""


def die_before(site: Site, folder: Path, command: str) -> None:
    """A run whose worker is killed as it starts this command of git's."""
    folder.mkdir()
    shim = folder / "git"
    shim.write_text(
        f"""#!/bin/sh
case " $* " in *" {command} "*) touch '{folder}/died'; kill -KILL $PPID; exit 1;; esac
exec {REAL} "$@"
"""
    )
    shim.chmod(0o755)
    site.run_once(PATH=f"{folder}:/usr/bin:/bin")
    assert (folder / "died").exists(), "the worker did not get that far"


def failing(folder: Path, command: str) -> Path:
    """A folder with a git that cannot do one command."""
    shim = folder / "failing" / "git"
    shim.parent.mkdir()
    shim.write_text(
        f"""#!/bin/sh
case " $* " in *" {command} "*) echo 'fatal: out of memory' >&2; exit 128;; esac
exec {REAL} "$@"
"""
    )
    shim.chmod(0o755)
    return shim.parent


def push_from_elsewhere(site: Site, other: Path) -> None:
    """Somebody else's post comes to the remote, of which nobody has told this clone."""
    site.git("clone", "-q", str(site.remote), str(other), cwd=other.parent)
    (other / "content/posts").mkdir(parents=True, exist_ok=True)
    (other / "content/posts/theirs.md").write_text("theirs")
    site.git("add", "-A", cwd=other)
    site.git("commit", "-qm", "Theirs", cwd=other)
    site.git("push", "-q", "origin", "HEAD:main", cwd=other)


def test_a_death_before_the_index_follows_the_remote_alone_is_made_up_for(site: Site, tmp_path: Path) -> None:
    push_from_elsewhere(site, tmp_path / "other")
    site.save("nothing-new", ["content"])
    die_before_update_index(site, tmp_path / "bin")
    assert site.run_once().of("nochange")
    assert site.git("diff", "--cached", "--name-only") == ""


def test_a_death_while_the_index_is_made_up_for_leaves_no_lock_in_a_persons_way(
    site: Site, tmp_path: Path
) -> None:
    site.write_post("content/posts/a.md", "published")
    site.save("a", ["content/posts/a.md"])
    assert site.run_once().of("published")
    site.git("read-tree", "HEAD~1")
    site.git("update-ref", "refs/briter/branches/main/unindexed", "HEAD~1")
    die_before_update_index(site, tmp_path / "bin")
    site.run_once()
    assert not (site.worktree / ".git" / "index.lock").exists()
    assert site.git("status", "--porcelain", "--untracked-files=no") == ""


def test_a_dead_workers_lock_of_the_index_is_held_until_the_index_has_followed(
    site: Site, tmp_path: Path
) -> None:
    publish_and_die(site, tmp_path / "bin")
    assert site.git("diff", "--cached", "--name-only") == "content/posts/a.md"
    assert_held_until_followed(site, tmp_path / "looking")


def test_the_index_follows_a_branch_that_a_dead_worker_has_moved_also_without_the_remote(
    site: Site, tmp_path: Path
) -> None:
    publish_and_die(site, tmp_path / "bin")
    site.remote.rename(tmp_path / "away.git")
    assert [event["slug"] for event in site.run_once().of("published")] == ["a"]
    assert not (site.worktree / ".git" / "index.lock").exists()
    assert site.git("diff", "--cached", "--name-only") == ""


def test_the_index_follows_a_branch_that_was_moved_by_the_second_push_also_without_the_remote(
    site: Site, tmp_path: Path
) -> None:
    """The first push lost a race: asked about it, a remote that is away says nothing."""
    push_from_elsewhere(site, tmp_path / "other")
    publish_and_die(site, tmp_path / "bin")
    away = site.remote.rename(tmp_path / "away.git")
    site.run_once()
    assert not (site.worktree / ".git" / "index.lock").exists()
    assert site.git("diff", "--cached", "--name-only") == ""
    away.rename(site.remote)
    assert [event["slug"] for event in site.run_once().of("published")] == ["a"]
    assert site.git("diff", "--cached", "--name-only") == ""


def test_a_dead_workers_lock_is_held_until_the_index_has_followed_whatever_git_ran_meanwhile(
    site: Site, tmp_path: Path
) -> None:
    publish_and_die(site, tmp_path / "bin")
    with subprocess.Popen(
        ["sh", "-c", "git cat-file --batch; :"],
        cwd=site.worktree,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    ) as somebody:
        ends = f"kill $(pgrep -P {somebody.pid}); sleep 0.2"
        assert_held_until_followed(
            site, tmp_path / "looking", f'case " $* " in *" update-index "*) {ends};; esac'
        )


def test_deaths_in_halves_of_a_batch_leave_the_index_where_the_branch_is(site: Site, tmp_path: Path) -> None:
    """The half that was not pushed yet moves the branch beyond what the other's plan knows of."""
    for slug in ("a", "b", "c"):
        site.write_post(f"content/posts/{slug}.md", slug)
        site.save(slug, [f"content/posts/{slug}.md"])
    for number, command in enumerate(["update-ref", "update-ref", "update-index"]):
        die_before(site, tmp_path / f"bin{number}", command)
    result = site.run_once()
    assert not result.of("warning"), "nobody has committed"
    assert site.git("status", "--porcelain") == ""
    assert site.jobs() == []
    assert len(site.remote_log()) == 4


def test_a_pause_keeps_no_lock_of_a_dead_worker(site: Site, tmp_path: Path) -> None:
    publish_and_die(site, tmp_path / "bin")
    assert site.command("pause").returncode == 0
    site.run_once()
    assert not (site.worktree / ".git" / "index.lock").exists()
    assert site.git("diff", "--cached", "--name-only") == ""


def test_a_worker_that_starts_in_a_pause_lets_go_of_a_dead_ones_lock_in_a_moment(
    site: Site, tmp_path: Path
) -> None:
    publish_and_die(site, tmp_path / "bin")
    assert site.command("pause").returncode == 0
    with site.running():
        eventually(lambda: not (site.worktree / ".git" / "index.lock").exists(), within=15)
    assert site.git("diff", "--cached", "--name-only") == ""


@pytest.mark.parametrize("ended", ["delay_enter", "delay_exit"], ids=["before", "after"])
def test_the_index_is_where_the_branch_is_also_when_git_has_to_be_ended_as_it_moves_that(
    site: Site, tmp_path: Path, ended: str
) -> None:
    provide("strace", package="strace")
    shim = tmp_path / "bin" / "git"
    shim.parent.mkdir()
    moves = f"-P {site.worktree}/.git/refs/heads/main.lock -e trace=rename"
    slow = f"strace -qq -o /dev/null {moves} -e inject=rename:{ended}=60000000 {REAL}"
    shim.write_text(
        f'#!/bin/sh\ncase " $* " in *" update-ref "*) exec {slow} "$@";; esac\nexec {REAL} "$@"\n'
    )
    shim.chmod(0o755)
    site.write_post("content/posts/a.md", "published")
    site.save("a", ["content/posts/a.md"])
    result = site.run_once(PATH=f"{shim.parent}:/usr/bin:/bin", BRITER_GIT_TIMEOUT_MS="3000")
    assert result.of("published")
    assert ("made no progress" in str(result.of("warning"))) == (ended == "delay_enter")
    assert (site.git("rev-parse", "main") == site.remote_log()[0][0]) == (ended == "delay_exit")
    assert site.git("diff", "--cached", "--name-only") == ""
    site.run_once()
    assert site.git("rev-parse", "main") == site.remote_log()[0][0]
    assert site.git("status", "--porcelain") == ""


def test_who_left_for_a_branch_of_earlier_before_the_index_followed_takes_nothing_back(
    site: Site, tmp_path: Path
) -> None:
    site.git("branch", "draft")
    publish_and_die(site, tmp_path / "bin")
    site.git("symbolic-ref", "HEAD", "refs/heads/draft")  # the dead worker's lock keeps them from more
    for _ in range(2):
        site.run_once()
        assert site.git("diff", "--cached", "--name-only") == "", "that branch never had the post"
    site.git("symbolic-ref", "HEAD", "refs/heads/main")
    site.run_once()
    assert site.git("status", "--porcelain") == ""
    assert site.git("show", "HEAD:content/posts/a.md") == "published"


@pytest.mark.parametrize("busy", [True, False], ids=["while they commit", "while git cannot"])
def test_who_left_before_the_index_followed_finds_it_followed_when_they_are_back(
    site: Site, tmp_path: Path, *, busy: bool
) -> None:
    publish_and_die(site, tmp_path / "bin")
    lock = site.worktree / ".git" / "index.lock"
    lock.unlink()
    site.git("switch", "--quiet", "--create", "draft")
    if busy:
        lock.touch()
        os.utime(lock, (0, 0))  # no dead worker's: that was there before it
        with subprocess.Popen(["git", "cat-file", "--batch"], cwd=site.worktree, stdin=subprocess.PIPE):
            site.run_once()
        lock.unlink()
    else:
        site.run_once(PATH=f"{failing(tmp_path, 'update-index')}:/usr/bin:/bin")
    assert site.git("diff", "--cached", "--name-only") == "content/posts/a.md"
    site.git("switch", "--quiet", "main")
    site.run_once()
    assert site.git("diff", "--cached", "--name-only") == ""
    assert site.git("show", "HEAD:content/posts/a.md") == "published"


def test_who_left_for_a_new_branch_before_the_index_followed_takes_nothing_back_there(
    site: Site, tmp_path: Path
) -> None:
    publish_and_die(site, tmp_path / "bin")
    site.git("switch", "--quiet", "--create", "draft")
    site.run_once()
    assert not (site.worktree / ".git" / "index.lock").exists()
    assert site.git("diff", "--cached", "--name-only") == ""
    site.git("switch", "--quiet", "main")
    site.run_once()
    assert site.git("status", "--porcelain", "--untracked-files=no") == ""
    assert site.git("show", "HEAD:content/posts/a.md") == "published"


def test_who_left_before_the_files_followed_finds_the_remotes_files_when_they_are_back(
    site: Site, tmp_path: Path
) -> None:
    push_from_elsewhere(site, tmp_path / "other")
    publish_and_die(site, tmp_path / "bin")
    site.git("switch", "--quiet", "--create", "draft")
    site.run_once()
    site.git("switch", "--quiet", "main")
    site.run_once()
    assert (site.worktree / "content/posts/theirs.md").read_text() == "theirs"
    assert site.git("status", "--porcelain") == ""
    assert (
        site.git("for-each-ref", "refs/briter/branches/main/bases", "refs/briter/branches/main/unindexed")
        == ""
    )


def test_who_left_before_the_files_followed_gets_none_of_those_they_leave_out(
    site: Site, tmp_path: Path
) -> None:
    site.write_post("content/posts/theirs.md", "ours")
    site.git("add", "content/posts/theirs.md")
    site.git("commit", "--quiet", "--message=Theirs")
    site.git("push", "--quiet")
    push_from_elsewhere(site, tmp_path / "other")
    publish_and_die(site, tmp_path / "bin")
    site.git("switch", "--quiet", "--create", "draft")
    site.run_once()
    site.git("switch", "--quiet", "main")
    site.git("update-index", "--skip-worktree", "content/posts/theirs.md")
    site.run_once()
    assert (site.worktree / "content/posts/theirs.md").read_text() == "ours"
    assert site.git("show", "HEAD:content/posts/theirs.md") == "theirs"


def test_what_a_killed_git_left_beside_the_index_is_in_nobodys_way(site: Site) -> None:
    (site.worktree / ".git" / "briter-new-index.lock").write_text("half an index")
    site.write_post("content/posts/a.md", "published")
    site.save("a", ["content/posts/a.md"])
    result = site.run_once()
    assert result.of("published")
    assert not result.of("warning")
    assert site.git("status", "--porcelain") == ""


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
    site.write_post("content/posts/a.md", "published")
    site.save("a", ["content/posts/a.md"])
    assert site.run_once().of("published")
    assert site.git("diff", "--name-only") == "notes.txt"


def test_the_index_is_not_copied_to_be_changed(site: Site, tmp_path: Path) -> None:
    provide("strace", package="strace")
    for number in range(300):
        site.write_post(f"content/posts/{number}.md", f"# {number}\n")
    site.git("add", "--all")
    site.git("commit", "--quiet", "--message=Many")
    site.git("push", "--quiet")
    size = (site.worktree / ".git" / "index").stat().st_size
    site.write_post("content/posts/1.md", "published")
    site.save("a", ["content/posts/1.md"])
    calls = tmp_path / "calls"
    subprocess.run(
        [
            *(
                "strace",
                "-ff",
                "-y",
                "-e",
                "trace=write,pwrite64,sendfile,copy_file_range,fsync",
                "-o",
                str(calls),
            ),
            *(sys.executable, "-m", "briter_worker", "run", "--once"),
        ],
        cwd=site.root,
        env=site.environment(),
        capture_output=True,
        check=True,
    )
    text = "".join(each.read_text(errors="replace") for each in tmp_path.glob("calls.*"))
    touching = [line for line in text.splitlines() if "index" in line.partition(">")[0] and ".git/" in line]
    touching = [
        line for line in touching if "index" in line.partition(".git/")[2].partition(">")[0].split("/")[0]
    ]
    written = sum(int(line.rpartition("= ")[2]) for line in touching if "fsync(" not in line)
    assert 0.9 * size <= written <= 1.1 * size
    assert sum("fsync(" in line for line in touching) == 1
