"""Somebody switches branches, commits or begins a merge just after the worker has looked."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from functools import cache
from itertools import count
from typing import TYPE_CHECKING

import psutil
import pytest
from mirror_worker import POST, MirrorWorker, text
from outcomes import assert_published, assert_put_off, assert_sound, save
from remotes import left_over
from sites import PERSON, eventually, program

from briter_worker.errors import FailureCode

if TYPE_CHECKING:
    from pathlib import Path

    from sites import Result, Site


AS_A_PERSON = "unset $(env | sed -n 's/^\\(GIT_[A-Z_]*\\)=.*/\\1/p')"
"""Not with the repository and the index of the git that runs the program."""


@pytest.fixture
def drafts(site: Site) -> Site:
    """A site with a branch `drafts` that has another version of a published post."""
    site.write_post(".gitattributes", "*.bin filter=person\n")
    site.commit_all("Attributes")
    site.git("switch", "-q", "-c", "drafts")
    site.write_post("content/posts/welcome.md", "# A draft, not to be published\n")
    site.git("commit", "-qam", "Draft")
    site.git("switch", "-q", "main")
    return site


def while_staging(site: Site, text: str) -> Path:
    """A person does this while the posts are being read: a filter is run in the middle of it."""
    person = "git -c user.name=P -c user.email=p@example.org"
    does = text.replace("git ", f"{person} ")
    file = program(site.root / "person", f"({AS_A_PERSON}; cd {site.worktree}; {does}) >&2; cat")
    site.git("config", "filter.person.clean", str(file))
    site.write_post("content/posts/a.bin", "a\n")
    site.save("a", ["content/posts"])
    return file


def while_pushing(site: Site, text: str) -> None:
    """A person does this while the remote has not answered yet."""
    site.hook(f"{AS_A_PERSON}; cd {site.worktree}; {text}; rm {site.remote}/hooks/pre-receive")


@pytest.mark.parametrize(
    ("text", "failure", "back"),
    [
        ("git switch -q drafts", FailureCode.WRONG_BRANCH, "switch -q main"),
        ("git switch -q --detach drafts", FailureCode.WRONG_BRANCH, "switch -q main"),
        ("git switch -q drafts; sleep 0.1; git switch -q main", FailureCode.WRONG_BRANCH, ""),
        ("git merge --no-commit --no-ff drafts", FailureCode.UNFINISHED, "merge --abort"),
    ],
    ids=["switched", "detached", "there and back", "a merge begun"],
)
def test_what_was_read_from_another_branch_is_never_published(
    drafts: Site, text: str, failure: FailureCode, back: str
) -> None:
    person = while_staging(drafts, text)
    before = drafts.git("rev-parse", "main", "drafts")
    assert_put_off(drafts, drafts.run_once(), failure)
    assert drafts.job("a")["fix"]
    assert drafts.subjects() == ["Attributes", "Start the site"]
    assert drafts.git("rev-parse", "main", "drafts") == before
    program(person, "cat")
    if back:
        drafts.git(*back.split())
    drafts.command("retry", "a")
    assert_published(drafts, drafts.run_once(), attempt=1)
    assert drafts.remote_file("content/posts/welcome.md") == "# Welcome\n"


def test_a_branch_that_is_switched_during_the_push_keeps_its_index_and_its_files(drafts: Site) -> None:
    drafts.push_elsewhere({"content/posts/welcome.md": "# Theirs\n"})
    save(drafts, "a")
    tip, main = drafts.git("rev-parse", "drafts", "main").split()
    while_pushing(drafts, "git switch -q drafts")
    result = drafts.run_once()
    assert_published(drafts, result)
    assert "drafts is checked out" in result.of("warning")[0]["error"]
    assert drafts.git("rev-parse", "drafts", "HEAD", "main") == f"{tip}\n{tip}\n{main}"
    assert drafts.git("diff", "--cached", "--name-only") == ""
    assert drafts.git("status", "--porcelain") == "?? content/posts/a.md"
    drafts.git("switch", "-q", "main")
    assert not drafts.run_once().of("warning")
    assert drafts.git("rev-parse", "main") == drafts.remote_log()[0][0]
    assert (drafts.worktree / "content/posts/welcome.md").read_text() == "# Theirs\n"
    assert drafts.git("status", "--porcelain") == ""


@pytest.mark.parametrize("moment", ["during the run", "after it"])
def test_a_branch_that_is_created_from_the_tip_before_a_sync_has_nothing_of_it_staged(
    site: Site, moment: str
) -> None:
    """`git switch --create` reads the tip, and later moves HEAD, without the lock of the index in between."""
    site.push_elsewhere({"content/posts/theirs.md": "theirs\n", "content/posts/welcome.md": "# Theirs\n"})
    old, here, go = site.git("rev-parse", "main"), site.root / "here", site.root / "go"
    until = f"until [ -e {go} ] || [ $(git rev-parse main) != {old} ]; do sleep 0.002; done"
    if moment == "after it":
        until = f"until [ -e {go} ]; do sleep 0.02; done"
    hooks = site.worktree / ".git/hooks"
    wait = f"touch {here}; {until}; rm {hooks}/reference-transaction"
    creates = f"while read old new ref; do [ $ref = refs/heads/drafts ] && {{ {wait}; }}; done; :"
    program(hooks / "reference-transaction", f"[ $1 = prepared ] || exit 0\n{creates}")
    command = ["git", *PERSON, "-C", str(site.worktree), "switch", "--quiet", "--create", "drafts"]
    with subprocess.Popen(command) as person:
        eventually(here.exists)
        save(site, "a")
        assert_published(site, site.run_once())
        go.touch()
    assert person.returncode == 0
    if moment == "after it":
        assert site.git("diff", "--cached", "--name-only") != ""
        site.run_once()
    assert site.git("rev-parse", "drafts", "main").split() == [old, old]
    assert site.git("diff", "--cached", "--name-only") == ""
    site.git("switch", "--quiet", "main")
    assert not site.run_once().of("warning")
    assert site.git("rev-parse", "main") == site.remote_log()[0][0]
    assert (site.worktree / "content/posts/welcome.md").read_text() == "# Theirs\n"
    assert site.git("status", "--porcelain") == ""


@pytest.mark.parametrize("edited", [False, True], ids=["", "edited again since"])
@pytest.mark.parametrize("post", ["a", "welcome"], ids=["a new post", "an edited one"])
def test_a_persons_commit_during_the_push_stops_no_post_and_goes_out_by_pull(
    site: Site, post: str, *, edited: bool
) -> None:
    lines = "".join(f"line {number}\n" for number in range(9))
    file = site.write_post(f"content/posts/{post}.md", lines)
    site.save(post, [f"content/posts/{post}.md"])
    person = "git -c user.name=P -c user.email=p@example.org"
    while_pushing(site, f"{person} commit -q --allow-empty -m Theirs")
    result = site.run_once()
    assert_published(site, result, post)
    assert "main has commits that the remote lacks" in result.of("warning")[0]["error"]
    assert site.git("log", "-1", "--format=%s", "main") == "Theirs"
    save(site, "b")
    assert_published(site, site.run_once(), "b")
    if edited:
        file.write_text(lines + "more\n")

    assert site.command("pull", "--rebase", "--push").returncode == 0
    subjects = site.subjects()
    assert subjects == ["Theirs", "Publish b", f"Publish {post}", "Start the site"]
    assert site.git("rev-parse", "main") == site.remote_log()[0][0]
    assert file.read_text() == lines + ("more\n" if edited else "")
    assert site.git("status", "--porcelain") == (f"M content/posts/{post}.md" if edited else "")


def test_a_slow_add_that_holds_the_index_takes_no_post_back(site: Site, tmp_path: Path) -> None:
    go, here = tmp_path / "go", tmp_path / "here"
    site.git("config", "filter.slow.clean", f"touch {here}; until [ -e {go} ]; do sleep 0.02; done; cat")
    site.write_post(".gitattributes", "*.slow filter=slow\n")
    site.commit_all("Attributes")
    site.write_post("photo.slow", "mine")
    add = os.posix_spawn(
        str(shutil.which("git")), ["git", "-C", str(site.worktree), "add", "photo.slow"], os.environ
    )
    eventually(here.exists)
    save(site, "a")
    done = site.run_once()
    assert_published(site, done)
    assert "another git command holds the index" in done.of("warning")[0]["error"]
    go.touch()
    assert os.waitpid(add, 0)[1] == 0
    site.git("commit", "-qm", "Photo")
    assert "content/posts/a.md" not in site.git("show", "--format=", "--name-only", "main")
    assert site.command("pull", "--rebase", "--push").returncode == 0
    assert site.remote_file("content/posts/a.md") == "a\n"
    assert site.remote_file("photo.slow") == "mine"
    assert site.git("status", "--porcelain") == ""


# A person commits at each git command of a publication


REAL = shutil.which("git")
COMMANDS = ["check-attr", "fast-import", "push", "publish", "update-index", "sync"]
"""The commands of a publication, in order; `publish` and `sync` are the messages of its ref updates."""


def run_with(site: Site, command: str, does: str) -> Result:
    """A run in which this happens just before the worker's first git with this word in its command."""
    done = site.root / "bin" / "done"
    alone = (
        f"(unset $(env | grep -o '^GIT_[A-Z_0-9]*'); cd '{site.worktree}'; {does}) >'{site.root}/said' 2>&1"
    )
    once = f"case \"$*\" in *{command}*) if mkdir '{done}' 2>/dev/null; then {alone}; fi;; esac"
    program(site.root / "bin" / "git", f'{once}\nexec {REAL} "$@"')
    result = site.run_once(PATH=f"{site.root}/bin:/usr/bin:/bin")
    assert done.exists(), f"no {command}"
    return result


def commit(*args: str) -> str:
    return " ".join([f"{REAL} {' '.join(repr(word) for word in PERSON)} commit -qm 'A note'", *args])


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("args", [(), ("-a",)], ids=["commit", "commit -a"])
def test_no_commit_of_a_persons_takes_a_post_back(site: Site, command: str, args: tuple[str, ...]) -> None:
    site.push_elsewhere({"content/posts/theirs.md": "theirs\n", "content/posts/welcome.md": "# Theirs\n"})
    site.save_post("a", "published\n")
    site.write_post("notes.txt", "mine\n")
    site.git("add", "notes.txt")
    assert run_with(site, command, commit(*args)).of("published")
    if site.git("diff", "--cached", "--name-only"):  # git was busy at that moment: the person tries again
        site.git("commit", "--quiet", "--message=A note", *args)
    note = site.git("log", "-1", "--format=%H", "--", "notes.txt")
    assert site.git("show", "--format=", "--name-status", note) == "A\tnotes.txt"
    site.run_once()
    assert site.command("pull", "--rebase", "--push").returncode == 0
    subjects = site.subjects()
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
    site.save_post("a", "published\n")
    assert site.run_once().of("published")
    assert site.git("diff", "--name-only") == "notes.txt"


# A person commits after a worker was killed at any step of bringing the branch up to the remote


def assert_nothing_taken_back(site: Site, path: str = POST) -> None:
    """No commit of anybody's has an older version of the post than its parent."""
    for line in site.git("log", "--all", "--reflog", "--format=%H %P").splitlines():
        commit, *parents = line.split()
        for parent in parents[:1]:
            before, after = (version(site.worktree, each, path) for each in (parent, commit))
            who = site.git("log", "-1", "--format=%an: %s", commit)
            assert before <= after, f"{commit[:8]} ({who}) takes {path} from {before} back to {after}"


@cache
def version(worktree: Path, commit: str, path: str) -> int:
    """Return the number of the version that a commit has; 0 for none."""
    done = subprocess.run(
        ["git", "show", f"{commit}:{path}"], cwd=worktree, capture_output=True, text=True, check=False
    )
    return int(done.stdout.split()[1]) if done.returncode == 0 else 0


STEPS = {"link", "rename", "replace", "unlink", "write", "flush", "fsync", "mkdir", "fchmod", "readline"}


def killed_at(site: Site, step: int, tip: str, blobs: dict[str, str | None], *, with_git: bool) -> bool:
    """Sync in a process that is killed at its n-th step; return False if it ended before.

    The steps before the index is held change nothing: all of them are the first.
    """
    child = os.fork()
    lock = site.worktree / ".git/index.lock"
    if child == 0:
        taken = 0

        def kill(_frame: object, event: str, called: object) -> None:
            nonlocal taken
            if event == "c_call" and getattr(called, "__name__", "") in STEPS:
                taken += bool(taken) or os.path.lexists(lock)
                if taken == step:
                    for each in psutil.Process().children(recursive=True) if with_git else []:
                        each.kill()
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            worker = MirrorWorker(site.root)
            sys.setprofile(kill)
            worker.sync(tip, blobs)
        except BaseException:  # noqa: BLE001 - the parent sees the status
            traceback.print_exc(file=sys.__stderr__)
        finally:
            sys.setprofile(None)
            os._exit(0)
    status = os.waitpid(child, 0)[1]
    eventually(lambda: not left_over(site.worktree))  # a git that ends removes its locks
    return os.waitstatus_to_exitcode(status) == -signal.SIGKILL


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("with_git", [False, True], ids=["worker", "worker and git"])
def test_a_worker_killed_at_any_step_leaves_nothing_older_than_the_branch(
    site: Site, *, with_git: bool
) -> None:
    """The person removes the lock as git says, and commits everything, before a new worker comes."""
    worker = MirrorWorker(site.root)
    site.write_post("notes.txt", "0\n")
    for step in count(1):
        number = step
        site.push_elsewhere({"content/theirs.md": text(number)})
        site.git("fetch", "-q")
        site.write_post(POST, text(number))
        pushed = worker.push({POST: text(number)})
        if not killed_at(site, step, *pushed, with_git=with_git):
            break
        for lock in (site.worktree / ".git").rglob("*.lock"):
            lock.unlink(missing_ok=True)
        before = site.git("rev-parse", "main")
        for all_ in ([], ["--all"]):
            (site.worktree / "notes.txt").write_text(f"{number} {all_}\n")
            site.git("add", "notes.txt")
            site.git("commit", "-qm", "Note", *all_)
        assert_nothing_taken_back(site)
        assert_nothing_taken_back(site, "content/theirs.md")
        site.git("reset", "-q", before)
        assert MirrorWorker(site.root).sync(*pushed)
        assert site.git("rev-parse", "main") == worker.tip()
        assert site.git("status", "--porcelain", "--untracked-files=no") == ""
        assert (site.worktree / "content/theirs.md").read_text() == text(number)
        assert sorted(each.name for each in (site.worktree / "content").iterdir()) == ["posts", "theirs.md"]
    assert step > 15
    subprocess.run(["git", "fsck", "--strict"], cwd=site.worktree, check=True, capture_output=True)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_an_edit_of_a_file_that_a_killed_worker_has_written_conflicts_with_nobody(site: Site) -> None:
    worker, theirs = MirrorWorker(site.root), site.write_post("content/theirs.md", "0\n")
    site.commit_all("Theirs")
    edits = 0
    for step in count(1):
        pushed = worker.push({"content/theirs.md": text(step)})
        if not killed_at(site, step, pushed[0], {}, with_git=True):
            break
        if theirs.read_text() == text(step) and site.git("rev-parse", "main") != pushed[0]:
            edits += 1
            theirs.write_text(f"edited {step}\n")
            site.save("theirs", ["content/theirs.md"])
            assert "published" in site.run_once().names()
            assert site.remote_file("content/theirs.md") == f"edited {step}\n"
        else:
            assert worker.sync(pushed[0], {})
    assert edits
