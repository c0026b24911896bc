"""A CMS that writes no jobs: `watch` enqueues each post whose files changed."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from errno import EMFILE, ENOSPC
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest
from sites import events_in, eventually
from watching import watching

from briter_worker import events
from briter_worker.settings import load_settings
from briter_worker.wiring import open_post_watcher

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sites import Site

    Watcher = subprocess.Popen[str]


@pytest.fixture
def excluding(site: Site) -> None:
    site.env["BRITER_EXCLUDED_PATHS"] = "private.md"


@pytest.fixture
def watcher(site: Site) -> Iterator[Watcher]:
    with site.running("watch") as watcher:
        yield watcher


@pytest.fixture
def watched(site: Site, watcher: Watcher) -> Site:  # noqa: ARG001 - runs meanwhile
    """A site with `watch` running, which has seen its first change."""
    site.write_post("content/posts/first.md", "first\n")
    eventually(site.jobs)
    assert site.run_once().of("published")
    return site


def _published(site: Site, *slugs: str) -> dict[str, list[str]]:
    """Wait for a job of each slug and publish what waits; the paths of the jobs, by slug."""
    eventually(lambda: {job["slug"] for job in site.jobs()} >= set(slugs))
    jobs = {job["slug"]: job["paths"] for job in site.jobs()}
    while site.run_once().of("published"):
        pass
    return jobs


def test_each_changed_post_is_a_job_and_a_commit_of_its_own(watched: Site) -> None:
    watched.write_post("content/posts/a.md", "a\n")
    watched.write_post("content/posts/b.md", "b\n")
    (watched.worktree / "content/posts/welcome.md").unlink()

    jobs = _published(watched, "posts/a", "posts/b", "posts/welcome")

    assert set(jobs) == {"posts/a", "posts/b", "posts/welcome"}
    assert watched.remote_file("content/posts/welcome.md") is None
    assert len(watched.remote_log()) == 5


def test_a_page_with_its_siblings_is_one_post(watched: Site) -> None:
    watched.write_post("content/posts/trip/index.md", "trip\n")
    watched.write_post("content/posts/trip/img/map.svg", "<svg/>\n")

    files = {"content/posts/trip/index.md", "content/posts/trip/img/map.svg"}
    eventually(lambda: {path for job in watched.jobs() for path in job["paths"]} == files)
    assert set(_published(watched, "posts/trip")) == {"posts/trip"}
    assert watched.remote_file("content/posts/trip/img/map.svg") == "<svg/>\n"
    subprocess.run(["rm", "-r", str(watched.worktree / "content/posts/trip")], check=True)

    eventually(lambda: {path for job in watched.jobs() for path in job["paths"]} == files)
    assert set(_published(watched, "posts/trip")) == {"posts/trip"}
    assert watched.remote_file("content/posts/trip/img/map.svg") is None


@pytest.mark.parametrize("order", [("one.png", "two.png", "index.md"), ("index.md", "one.png", "two.png")])
def test_a_bundle_that_comes_file_by_file_is_one_job(
    site: Site, order: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with watching(site) as watcher:
        for name in order:
            path = (
                f"content/posts/trip/pictures/{name}" if name == "two.png" else f"content/posts/trip/{name}"
            )
            site.write_post(path, name)
            watcher.wait(0.4)
            assert site.jobs() == []
        site.write_post("content/posts/old.md", "of a folder that the remote has\n")
        watcher.wait(0.05)
        assert [job["slug"] for job in site.jobs()] == ["posts/old"]
        watcher.wait(1)
        assert {job["slug"]: len(job["paths"]) for job in site.jobs()} == {"posts/old": 1, "posts/trip": 3}
        monkeypatch.setattr("briter_worker.watch.watcher.MAX_ARRIVING", 0)
        site.write_post("content/posts/import/one.md", "one of very many\n")
        watcher.wait(0.05)
        assert len(site.jobs()) == 3


def test_nobody_waits_for_ever_for_the_last_file_of_a_folder(site: Site) -> None:
    with watching(site) as watcher:
        for number in range(40):
            site.write_post(f"content/posts/trip/{number}.md", "x\n")
            watcher.wait(0.3)
        assert site.jobs() != []


def test_a_page_of_kirby_is_one_post_without_its_unpublished_edits(site: Site) -> None:
    site.env["BRITER_ADAPTER"] = "kirby"
    page = "content/2_notes/hello"
    with site.running("watch"):
        for name in ("note.txt", "_changes/note.txt", ".lock", "cover.jpg", "cover.jpg.txt"):
            site.write_post(f"{page}/{name}", "x\n")
        names = {f"{page}/{name}" for name in ("cover.jpg", "cover.jpg.txt", "note.txt")}
        eventually(lambda: {path for job in site.jobs() for path in job["paths"]} == names)
        site.write_post(f"{page}/_changes/note.txt", "y\n")
        site.write_post("content/2_notes/last/note.txt", "x\n")
        eventually(lambda: any(job["slug"] == "2_notes/last" for job in site.jobs()))
    published = _published(site, "2_notes/hello", "2_notes/last")
    assert set(published) == {"2_notes/hello", "2_notes/last"}
    assert site.remote_file(f"{page}/_changes/note.txt") is None


def test_what_is_renamed_leaves_its_old_name(watched: Site) -> None:
    watched.write_post("content/posts/old/a.md", "a\n")
    _published(watched, "posts/old/a")

    posts = watched.worktree / "content/posts"
    (posts / "old").rename(posts / "new")
    (posts / "first.md").rename(posts / "second.md")

    _published(watched, "posts/new/a", "posts/second")
    assert watched.remote_file("content/posts/first.md") is None
    assert watched.remote_file("content/posts/second.md") == "first\n"
    assert watched.remote_file("content/posts/old/a.md") is None
    assert watched.remote_file("content/posts/new/a.md") == "a\n"


@pytest.mark.usefixtures("excluding")
def test_what_git_ignores_what_is_no_post_and_what_did_not_change_makes_no_job(watched: Site) -> None:
    (watched.worktree / ".gitignore").write_text("*.log\n")
    for name in ("debug.log", "first.md~", ".first.md.swp", "#first.md#", ".goutputstream-X1", ".DS_Store"):
        watched.write_post(f"content/posts/{name}", "x\n")
    watched.write_post("content/posts/draft.tmp", "first, under another name\n").unlink()
    watched.write_post("content/posts/private.md", "x\n")
    watched.write_post("layout.html", "x\n")
    watched.write_post("content/posts/first.md", "first\n")
    (watched.worktree / "content/posts/link.md").symlink_to("../../layout.html")
    watched.write_post("content/posts/last.md", "last\n")

    assert set(_published(watched, "posts/last")) == {"posts/last"}


def test_files_that_the_worker_writes_make_no_job(watched: Site) -> None:
    watched.push_elsewhere({"content/posts/theirs.md": "theirs\n"})
    watched.write_post("content/posts/mine.md", "mine\n")
    _published(watched, "posts/mine")
    eventually((watched.worktree / "content/posts/theirs.md").exists)

    watched.write_post("content/posts/mine.md", "mine again\n")

    assert set(_published(watched, "posts/mine")) == {"posts/mine"}


def test_what_changed_while_nobody_watched_is_found_once(site: Site) -> None:
    site.write_post("content/posts/away.md", "away\n")
    with site.running("watch"):
        eventually(site.jobs)
    first = site.jobs()
    site.write_post("content/posts/later.md", "later\n")
    with site.running("watch"):
        eventually(lambda: len(site.jobs()) > 1)
    assert {job["slug"] for job in site.jobs()} == {"posts/away", "posts/later"}
    assert first[0] in site.jobs()


@pytest.mark.parametrize("has_inotify", [True, False])
def test_a_start_finds_what_git_does_not_report(site: Site, *, has_inotify: bool) -> None:
    for name in ("edited", "deleted", "staged", "same"):
        site.write_post(f"content/posts/{name}.md", "first\n")
    site.commit_all()
    site.git("push", "--quiet", "origin", "main")
    marked = ("content/posts/edited.md", "content/posts/deleted.md", "content/posts/same.md")
    site.git("update-index", "--skip-worktree", *marked)
    site.write_post("content/posts/edited.md", "second\n")
    (site.worktree / "content/posts/deleted.md").unlink()
    site.write_post("content/posts/staged.md", "second\n")
    site.git("add", "--all")
    site.write_post("content/posts/theirs/a.md", "of another repository\n")
    site.git("init", "--quiet", cwd=site.worktree / "content/posts/theirs")
    with watching(site, sees_events=has_inotify):
        assert {job["slug"] for job in site.jobs()} == {"posts/edited", "posts/deleted", "posts/staged"}


@pytest.mark.parametrize(("number", "fix"), [(EMFILE, "max_user_instances"), (ENOSPC, "max_user_watches")])
def test_without_the_kernels_events_it_polls_and_says_why(
    site: Site, monkeypatch: pytest.MonkeyPatch, number: int, fix: str
) -> None:
    monkeypatch.setattr("briter_worker.watch.kernel.INotify", Mock(side_effect=OSError(number, "no more")))
    warnings: list[events.Event] = []
    watcher = open_post_watcher(load_settings(site.environment()), warnings.append)
    site.write_post("content/posts/welcome.md", "found by the poll\n")

    watcher.run(lambda: bool(site.jobs()), poll=0.05)

    assert [fix in each.fix for each in warnings if isinstance(each, events.Warned)] == [True]


def test_a_folder_that_was_not_there_is_watched_from_its_making_on(site: Site) -> None:
    site.env["BRITER_ALLOWED_PATHS"] = "public/uploads"
    with site.running("watch"):
        site.write_post("content/posts/first.md", "first\n")
        eventually(site.jobs)
        for number in range(2):  # and again, after it was removed
            site.write_post(f"public/uploads/{number}.svg", "<svg/>\n")
            eventually(lambda: len(site.jobs()) == number + 2)  # noqa: B023 - called at once
            shutil.rmtree(site.worktree / "public")
    assert {job["slug"] for job in site.jobs()} == {"posts/first", "0", "1"}


def test_a_scheduled_post_is_left_to_its_job(watched: Site) -> None:
    watched.save("secret", ["content/posts/secret.md"], scheduledFor="2199-01-01")
    watched.write_post("content/posts/secret.md", "not yet\n")
    watched.write_post("content/posts/other.md", "x\n")

    eventually(lambda: len(watched.jobs()) == 2)

    assert {job["slug"] for job in watched.jobs()} == {"secret", "posts/other"}


def test_a_cancelled_post_is_left_alone_until_it_is_saved_again(watched: Site) -> None:
    def saved(path: str) -> set[str]:
        """Save a post; return the slugs of all jobs once it has one."""
        watched.write_post(f"content/{path}.md", "x\n")
        eventually(lambda: path in {job["slug"] for job in watched.jobs()})
        return {job["slug"] for job in watched.jobs()}

    for slug in ("posts/secret", "posts/first"):
        saved(slug)
        time.sleep(0.02)  # longer than a tick of the file system's clock
        assert watched.command("cancel", slug).returncode == 0
    (watched.worktree / "content/new").mkdir()
    (watched.worktree / "content/new").rename(watched.worktree / "content/moved")  # everything is compared
    assert saved("moved/a") == {"moved/a"}
    with watched.running("watch"):
        assert saved("moved/b") == {"moved/a", "moved/b"}
        assert saved("posts/secret") == {"moved/a", "moved/b", "posts/secret"}


def test_more_changes_than_the_kernel_queues_are_all_found(watched: Site, watcher: Watcher) -> None:
    most = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    albums = {f"content/posts/album{number}": set[str]() for number in range(10)}
    for album in albums:
        watched.write_post(f"{album}/index.md", f"{album}\n")
    eventually(lambda: len(watched.jobs()) == len(albums))
    watcher.send_signal(signal.SIGSTOP)
    for album, files in albums.items():
        for number in range(max(most // 20, 1_000)):  # a creation and a close each
            (watched.worktree / album / f"{number}.txt").write_text(f"{number}\n")
            files.add(f"{album}/{number}.txt")
    watcher.send_signal(signal.SIGCONT)

    def declared() -> set[str]:
        return {path for job in watched.jobs() for path in job["paths"]}

    eventually(lambda: set().union(*albums.values()) <= declared(), within=60)

    watched.write_post("content/posts/new/b.md", "b\n")
    eventually(lambda: any(job["slug"] == "posts/new/b" for job in watched.jobs()))
    assert len({job["slug"] for job in watched.jobs()}) == len(albums) + 1


def test_run_watch_publishes_what_it_finds(site: Site) -> None:
    with site.running("run", "--watch") as worker:
        site.write_post("content/posts/hello.md", "hello\n")
        eventually(lambda: site.remote_file("content/posts/hello.md") == "hello\n")
        worker.terminate()
        out, _ = worker.communicate(timeout=60)
    assert worker.returncode == 0
    entry = next(each for each in events_in(out) if each["event"] == "enqueued")
    assert (entry["slug"], entry["paths"]) == ("posts/hello", ["content/posts/hello.md"])


def test_watch_is_of_a_site_with_a_queue_folder(site: Site) -> None:
    result = site.command("watch", BRITER_DATABASE_URL="postgresql://localhost/none")
    assert result.returncode == 2
    assert "queue folder" in result.stderr
    assert site.command("run", "--once", "--watch").returncode == 2
