"""The clone of the CMS: it follows the remote, takes local commits along by `pull`, and stays tidy."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import time
import tracemalloc
from typing import TYPE_CHECKING

import pytest
from mirror_worker import MirrorWorker
from soak.repository import run_git, write_blob

from briter_worker.errors import DeclinedError, PublishError
from briter_worker.git import work_tree as work_tree_module
from briter_worker.git.pull import PullResult, pull
from briter_worker.git.repository import Repository
from briter_worker.git.run import Git

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from sites import Site


WELCOME = "content/posts/welcome.md"


@pytest.fixture
def worker(site: Site) -> MirrorWorker:
    return MirrorWorker(site.root)


def push_theirs(site: Site, worker: MirrorWorker, files: dict[str, str | None]) -> str:
    """Somebody else pushes these files; return the remote's tip, fetched."""
    site.push_elsewhere(files)
    return fetched(worker)


def fetched(worker: MirrorWorker) -> str:
    with worker.repository.working():
        return worker.repository.fetch()


def follow(worker: MirrorWorker, tip: str) -> bool:
    return worker.sync(tip, {})


def assert_followed(site: Site, worker: MirrorWorker, status: str = "") -> None:
    assert site.git("rev-parse", "main") == worker.tip()
    assert site.git("diff", "--cached", "--name-only") == ""
    assert site.git("status", "--porcelain") == status
    assert not (site.worktree / ".git/index.lock").exists()
    assert {path.name for path in (site.worktree / ".git/briter").iterdir()} <= {"lock"}


def assert_commit_takes_nothing_back(site: Site, *paths: str) -> None:
    """`git commit -a`, the worst that a person can do."""
    before = {path: site.git("ls-tree", "HEAD", path) for path in paths}
    site.write_post("notes.txt", "a note\n")
    site.git("add", "notes.txt")
    site.git("commit", "-qam", "A note")
    assert {path: site.git("ls-tree", "HEAD", path) for path in paths} == before
    site.git("reset", "-q", "--soft", "HEAD~1")
    site.git("rm", "-q", "--cached", "notes.txt")
    (site.worktree / "notes.txt").unlink()


@pytest.mark.parametrize("kind", ["folder", "link", "linked folder"])
def test_what_is_in_the_way_is_told_kept_from_commits_and_written_when_the_way_is_free(
    site: Site, worker: MirrorWorker, kind: str
) -> None:
    tip = push_theirs(site, worker, {"content/new/a.md": "theirs\n"})
    (site.root / "elsewhere").mkdir()
    way = site.worktree / "content/new"
    if kind == "linked folder":
        way.symlink_to(site.root / "elsewhere")
    else:
        way.mkdir()
        way = way / "a.md"
        way.mkdir() if kind == "folder" else way.symlink_to("/etc/hostname")
    assert follow(worker, tip)
    assert site.git("rev-parse", "main") == worker.tip()
    assert_commit_takes_nothing_back(site, "content/new/a.md")
    assert list((site.root / "elsewhere").iterdir()) == []
    (told,) = worker.warned
    assert "could not be written, such as content/new/a.md" in told

    way.rmdir() if kind == "folder" else way.unlink()
    with worker.repository.working():
        worker.checkout.catch_up()
    assert (site.worktree / "content/new/a.md").read_text() == "theirs\n"
    assert_followed(site, worker)


def test_files_of_the_remote_are_deep_and_large(site: Site, worker: MirrorWorker) -> None:
    depth, size = 1100, 40_000_000
    _, blob = write_blob(site.remote, b"x" * size)
    path = f"content/{'d/' * depth}deep.md"
    lines = f"commit refs/heads/main\ncommitter T <t@t> 0 +0000\ndata 1\nx\nfrom {worker.tip()}\n"
    run_git(site.remote, "fast-import", "--quiet", stdin=f"{lines}M 100644 {blob} {path}\n".encode())
    tip = fetched(worker)
    tracemalloc.start()
    try:
        assert follow(worker, tip)
        assert tracemalloc.get_traced_memory()[1] < size / 4
    finally:
        tracemalloc.stop()
    assert (site.worktree / path).stat().st_size == size
    assert_followed(site, worker)
    subprocess.run(["rm", "-rf", site.worktree / "content/d"], check=True)


def test_written_files_keep_group_mode_and_setgid_whatever_the_umask(
    site: Site, worker: MirrorWorker
) -> None:
    posts = site.worktree / "content/posts"
    group = next(iter(set(os.getgroups()) - {os.getgid()}), 12345 if os.geteuid() == 0 else os.getgid())
    for each in (site.worktree / "content", posts):
        os.chown(each, -1, group)
        each.chmod(0o2775)
    (site.worktree / WELCOME).chmod(0o660)
    os.chown(site.worktree / WELCOME, -1, group)
    tip = push_theirs(site, worker, {"content/posts/sub/new.md": "new\n", WELCOME: "theirs\n"})
    before = os.umask(0o077)
    try:
        assert follow(worker, tip)
    finally:
        os.umask(before)
    access = {
        name: (stat.S_IMODE((posts / name).stat().st_mode), (posts / name).stat().st_gid)
        for name in ("sub", "sub/new.md", "welcome.md")
    }
    assert access == {"sub": (0o2775, group), "sub/new.md": (0o664, group), "welcome.md": (0o660, group)}


# The moment of the exchange


def in_the_moment(monkeypatch: pytest.MonkeyPatch, does: Callable[[], object]) -> None:
    """Do something right before a file changes its name."""
    rename = work_tree_module._rename  # noqa: SLF001 - the kernel's, there is no other place to wait
    done: list[object] = []

    def late(*args: object) -> bool:
        if not done:
            done.append(does())
        return rename(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(work_tree_module, "_rename", late)


@pytest.mark.parametrize("way", ["in place", "by rename", "removed", "new"])
def test_what_the_cms_saves_in_that_moment_is_not_lost(
    site: Site, worker: MirrorWorker, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    file = site.worktree / ("content/posts/new.md" if way == "new" else WELCOME)

    def save() -> None:
        if way == "by rename":
            site.write_post("content/saved", "the CMS's\n").rename(file)
        elif way == "removed":
            file.unlink()
        else:
            file.write_text("the CMS's\n")

    in_the_moment(monkeypatch, save)
    assert follow(worker, push_theirs(site, worker, {f"content/posts/{file.name}": "theirs\n"}))
    assert file.exists() != (way == "removed")
    assert way == "removed" or file.read_text() == "the CMS's\n"
    assert site.git("rev-parse", "main") == worker.tip()
    assert_commit_takes_nothing_back(site, f"content/posts/{file.name}")
    assert sorted(each.name for each in file.parent.iterdir() if each.name.startswith(".")) == []


def test_a_file_that_the_cms_has_open_for_writing_is_put_back(site: Site, worker: MirrorWorker) -> None:
    file = site.worktree / WELCOME
    tip = push_theirs(site, worker, {WELCOME: "theirs\n"})
    with file.open("r+") as writing:
        assert follow(worker, tip)
        writing.write("the CMS's\n")
    assert file.read_text() == "the CMS's\n"


@pytest.mark.parametrize("removes", [False, True])
def test_without_an_exchange_a_file_is_replaced_after_a_look(
    site: Site, worker: MirrorWorker, monkeypatch: pytest.MonkeyPatch, *, removes: bool
) -> None:
    monkeypatch.setattr(work_tree_module, "_rename", lambda *_: False)
    files = {WELCOME: None if removes else "theirs\n", "content/posts/new.md": "new\n"}
    assert follow(worker, push_theirs(site, worker, files))
    assert_followed(site, worker)


# Locks


def test_a_lock_that_a_dead_worker_left_stops_nobody(site: Site, worker: MirrorWorker) -> None:
    (site.worktree / ".git/index.lock").write_bytes(b"briter-worker")
    assert follow(worker, push_theirs(site, worker, {WELCOME: "theirs\n"}))
    assert_followed(site, worker)


def test_files_are_written_and_compared_as_git_converts_them(site: Site, worker: MirrorWorker) -> None:
    site.git("config", "filter.rot.clean", "tr a-z b-za")
    site.git("config", "filter.rot.smudge", "tr b-za a-z")
    site.write_post(".gitattributes", "*.txt text eol=crlf\n*.rot filter=rot\n")
    site.commit_all("Attributes")
    for round_ in ("one\n", "two\n"):
        assert follow(worker, push_theirs(site, worker, {"content/a.txt": round_, "content/a.rot": round_}))
        assert (site.worktree / "content/a.txt").read_bytes() == round_.replace("\n", "\r\n").encode()
        assert site.git("hash-object", "content/a.rot") == site.git("rev-parse", "HEAD:content/a.rot")
        assert_followed(site, worker)


# `pull`: local commits come onto the remote's tip, and the CMS's files stay as they are


LINES = [f"line {number}\n" for number in range(12)]


@pytest.fixture
def clone(site: Site) -> MirrorWorker:
    for number in range(8):
        site.write_post(f"content/posts/{number}.md", "".join(LINES))
    commit(site, "Posts")
    site.git("push", "-q", "origin", "main")
    return MirrorWorker(site.root)


def commit(site: Site, message: str = "Mine") -> None:
    site.git("add", "-A")
    site.git("commit", "-qm", message)


def edit(file: Path, line: int, text: str) -> str:
    lines = file.read_text().splitlines(keepends=True)
    lines[line] = f"{text}\n"
    file.write_text("".join(lines))
    return file.read_text()


def publish(clone: MirrorWorker, path: str, text: str) -> bool:
    file = clone.worktree / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return clone.sync(*clone.push({path: text}))


def rebase(clone: MirrorWorker, *, push: bool = True) -> PullResult:
    return pull(clone.repository, clone.checkout, rebase=True, push=push)


def assert_settled(site: Site, clone: MirrorWorker, status: str = "") -> None:
    assert site.git("rev-parse", "main") == clone.tip() == site.git("rev-parse", "origin/main")
    assert site.git("status", "--porcelain") == status
    assert site.git("worktree", "list").count("\n") == 0
    assert {path.name for path in (site.worktree / ".git/briter").iterdir()} == {"lock"}
    assert clone.bases() == {}


def test_a_week_without_a_push_ends_with_everything_on_the_remote(site: Site, clone: MirrorWorker) -> None:
    for day in range(7):
        post = site.worktree / f"content/posts/{day}.md"
        edit(post, 11, f"the person's, {day}")
        site.write_post(f"theme{day}.css", f"{day}\n")
        commit(site, f"Day {day}")
        for number in range(6):
            publish(clone, f"content/posts/new-{day}-{number}.md", "new\n")
        publish(clone, f"content/posts/{day}.md", edit(post, 10, f"the CMS's, {day}"))
        edit(post, 9, f"the person's again, {day}")
        site.git("commit", "-qam", f"Evening {day}")
    unsaved = edit(site.worktree / "content/posts/7.md", 5, "not saved yet")
    assert site.git("rev-parse", "main") != clone.tip()

    with pytest.raises(DeclinedError, match=r"not on the remote: 14 local commits: .*Day 0") as declined:
        pull(clone.repository, clone.checkout, rebase=False, push=False)
    assert declined.value.fix == "briter-worker pull --rebase --push"
    result = rebase(clone)

    assert result.is_pushed
    assert len(result.rebased) == 14
    assert (site.worktree / "content/posts/7.md").read_text() == unsaved
    assert_settled(site, clone, "M content/posts/7.md")
    for day in range(7):
        lines = [*LINES[:9], f"the person's again, {day}\n", f"the CMS's, {day}\n", f"the person's, {day}\n"]
        assert site.remote_file(f"content/posts/{day}.md") == "".join(lines)
        assert site.remote_file(f"theme{day}.css") == f"{day}\n"
        assert site.remote_file(f"content/posts/new-{day}-5.md") == "new\n"
    assert site.git("log", "-1", "--format=%an %cn %s") == "A Person A Person Evening 6"


def test_commits_that_conflict_are_named_and_nothing_changes(site: Site, clone: MirrorWorker) -> None:
    site.write_post("theme.css", "mine\n")
    commit(site, "Mine: theme")
    clone.push({"theme.css": "theirs\n"})
    before = site.git("rev-parse", "main"), site.git("ls-files", "-s"), clone.tip()
    with pytest.raises(
        DeclinedError, match=r"Mine: theme.* the same lines of theme\.css; nothing"
    ) as declined:
        rebase(clone)
    assert "git rebase origin/main" in declined.value.fix
    assert (site.git("rev-parse", "main"), site.git("ls-files", "-s"), clone.tip()) == before
    assert site.git("worktree", "list").count("\n") == 0
    assert (site.worktree / "theme.css").read_text() == "mine\n"
    # As the fix says, with the conflict resolved elsewhere.
    site.git("reset", "-q", declined.value.fix.rpartition(" ")[2])
    (site.worktree / "theme.css").unlink()
    assert pull(clone.repository, clone.checkout, rebase=False, push=False).late_reason == ""
    assert (site.worktree / "theme.css").read_text() == "theirs\n"
    assert_settled(site, clone)


@pytest.mark.parametrize("push", [False, True])
def test_while_the_index_is_held_nothing_is_pushed(site: Site, clone: MirrorWorker, *, push: bool) -> None:
    site.write_post("theme.css", "mine\n")
    commit(site)
    publish(clone, "content/posts/a.md", "a\n")
    lock = site.worktree / ".git/index.lock"
    lock.touch()
    os.utime(lock, (time.time() - 60, time.time() - 60))
    before = clone.tip()
    with pytest.raises(PublishError, match="holds the index"):
        rebase(clone, push=push)
    assert clone.tip() == before
    lock.unlink()
    assert rebase(clone).is_pushed
    assert site.remote_file("theme.css") == "mine\n"
    assert_settled(site, clone)


# Packs stay few, leftovers go, and nothing that anybody may need is dropped


def packs(site: Site) -> list[Path]:
    return sorted((site.worktree / ".git" / "objects" / "pack").glob("*.pack"))


def objects(site: Site) -> set[str]:
    return set(site.git("cat-file", "--batch-all-objects", "--batch-check=%(objectname)").split())


def tidy(site: Site, now: float, keep: Collection[str] = ()) -> None:
    git = Git(site.worktree, remote="origin", timeout=60)
    repository = Repository(git, branch="main", remote="origin")
    with repository.working():
        repository.tidy(now, keep)


@pytest.mark.parametrize("packed", [False, True], ids=["loose", "packed"])
def test_refs_of_dead_workers_are_removed_and_no_others(site: Site, *, packed: bool) -> None:
    commit = site.git("rev-parse", "HEAD")
    prefix = "refs/briter/branches/main"
    swept, planned, pushed, theirs = (
        *(f"{prefix}/batch/{name}" for name in ("one", "two")),
        f"{prefix}/pushed",
        "refs/briter/branches/other/batch/one",
    )
    for name in (swept, planned, pushed, theirs):
        site.git("update-ref", name, commit)
    if packed:
        site.git("pack-refs", "--all", "--prune")

    tidy(site, time.time(), [planned])
    assert site.git("for-each-ref", "--format=%(refname)", "refs/briter").split() == [planned, pushed, theirs]


def test_old_temporary_files_are_removed_and_new_ones_are_not(site: Site) -> None:
    git_dir = site.worktree / ".git"
    names = [
        "fast_import_crash_1",
        "objects/pack/tmp_pack_1",
        "objects/17/tmp_obj_1",
        "briter/index-1",
        "briter/.1.tmp",
    ]
    for name in names:
        (git_dir / name).parent.mkdir(exist_ok=True)
        (git_dir / name).touch()
    tidy(site, time.time())
    assert all((git_dir / name).exists() for name in names)
    tidy(site, time.time() + 1000)
    assert not any((git_dir / name).exists() for name in names)


def test_a_run_of_cron_leaves_few_packs_and_drops_no_object(site: Site) -> None:
    for number in range(3):
        site.write_post("content/posts/a.md", f"{number}\n")
        commit(site, f"{number}")
        site.git("-c", "repack.writeBitmaps=false", "repack", "-d", "-q")
    for number in range(32):
        for file in packs(site)[0], packs(site)[0].with_suffix(".idx"):
            shutil.copy(file, file.with_stem(f"pack-{number:040}"))
    # Nothing refers to these any more, or yet: they are a person's to drop.
    site.git("reset", "--quiet", "--hard", "HEAD~3")
    (site.worktree / "draft").write_text("staged once and not committed\n")
    site.git("hash-object", "-w", "draft")
    before, many = objects(site), len(packs(site))
    site.save_post("b", "b\n")
    assert site.run_once().of("published")
    assert len(packs(site)) < 5 < many
    assert objects(site) >= before
    site.git("fsck", "--strict")


@pytest.mark.parametrize("option", ["--shared", "--reference", "--filter"])
def test_packs_stay_few_in_a_clone_that_lacks_objects_of_its_own(site: Site, option: str) -> None:
    """What is in another repository, or still on the remote, stays there; nothing of ours is dropped."""
    site.git("config", "uploadpack.allowFilter", "true", cwd=site.remote)
    shutil.rmtree(site.worktree)
    how = {
        "--shared": ["--shared", str(site.remote)],
        "--reference": [f"--reference={site.remote}", f"file://{site.remote}"],
        "--filter": ["--filter=blob:none", f"file://{site.remote}"],
    }[option]
    site.git("clone", "--quiet", *how, str(site.worktree), cwd=site.root)
    for number in range(12):
        site.push_elsewhere({"content/posts/theirs.md": f"{number}\n"})
        site.git(
            "fetch", "--quiet", "--no-auto-maintenance"
        )  # a pack of promised objects, in a clone with a filter
        blob = write_blob(site.worktree, f"ours {number}\n".encode())[1]
        pack = site.worktree / ".git/objects/pack/pack"
        run_git(site.worktree, "pack-objects", "-q", str(pack), stdin=f"{blob}\n".encode())
    site.git("prune-packed")
    before, many = objects(site), len(packs(site))
    tidy(site, time.time())
    assert objects(site) == before
    assert len(packs(site)) < 6
    assert many >= 12
    promised = [path for path in packs(site) if path.with_suffix(".promisor").exists()]
    assert bool(promised) == (option == "--filter")
    site.git("fsck", "--strict")
    site.git("gc", "--quiet", "--prune=now")
    site.git("fsck", "--strict")
