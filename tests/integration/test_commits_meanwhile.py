"""A person commits in the very moment in which the worker moves the branch and the index."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from sites import PERSON

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
    folder.mkdir()
    shim = folder / "git"
    shim.write_text(
        f"""#!/bin/sh
case " $* " in *" update-index "*) touch '{folder}/died'; kill -KILL $PPID; exit 1;; esac
exec {REAL} "$@"
"""
    )
    shim.chmod(0o755)
    site.run_once(PATH=f"{folder}:/usr/bin:/bin")
    assert (folder / "died").exists(), "the worker did not get that far"


def test_a_death_before_the_index_follows_the_remote_alone_is_made_up_for(site: Site, tmp_path: Path) -> None:
    other = tmp_path / "other"
    site.git("clone", "-q", str(site.remote), str(other), cwd=tmp_path)
    (other / "content/posts/theirs.md").parent.mkdir(parents=True, exist_ok=True)
    (other / "content/posts/theirs.md").write_text("theirs")
    site.git("add", "-A", cwd=other)
    site.git("commit", "-qm", "Theirs", cwd=other)
    site.git("push", "-q", "origin", "HEAD:main", cwd=other)
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


def test_what_a_killed_git_left_beside_the_index_is_in_nobodys_way(site: Site) -> None:
    (site.worktree / ".git" / "briter-new-index.lock").write_text("half an index")
    site.write_post("content/posts/a.md", "published")
    site.save("a", ["content/posts/a.md"])
    result = site.run_once()
    assert result.of("published")
    assert not result.of("warning")
    assert site.git("status", "--porcelain") == ""
