"""`watch` compares the files with its own ledger, and nothing makes it silent."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from requirements import small
from sites import Site, eventually, lines_of
from watching import watching

from briter_worker.watch.kernel import KernelEvents, has_remote_folders
from briter_worker.watch.ledger import Ledger, Version, record, remove
from briter_worker.watch.tree import Tree

if TYPE_CHECKING:
    from briter_worker.git.folders import Folders
    from briter_worker.watch.tree import Seen

POST = "content/posts/welcome.md"


def _publish(site: Site) -> None:
    while {"published", "nochange"}.intersection(site.run_once().names()):
        pass


# 9. While a push is under way


def test_a_post_set_back_while_its_push_is_under_way_is_published_again(site: Site) -> None:
    with watching(site) as watched:
        site.write_post(POST, "second\n")
        assert watched.settle() == ["posts/welcome"]
        held = site.hold_push()
        with site.running("run"):
            held.wait()
            site.write_post(POST, "# Welcome\n")
            assert watched.settle() == ["posts/welcome"] * 2
            held.remove()
            eventually(lambda: site.remote_file(POST) == "# Welcome\n" and not site.jobs())


def test_a_post_deleted_while_its_push_is_under_way_is_removed(site: Site) -> None:
    with watching(site) as watched:
        site.write_post(POST, "second\n")
        watched.settle()
        held = site.hold_push()
        with site.running("run"):
            held.wait()
            (site.worktree / POST).unlink()
            watched.settle()
            held.remove()
            eventually(lambda: site.remote_file(POST) is None)
    assert site.subjects()[0] == "Remove posts/welcome"


def test_a_post_created_and_deleted_while_its_push_is_under_way_is_removed(site: Site) -> None:
    with watching(site) as watched:
        site.write_post("content/posts/new.md", "new\n")
        watched.settle()
        held = site.hold_push()
        with site.running("run"):
            held.wait()
            (site.worktree / "content/posts/new.md").unlink()
            watched.settle()
            held.remove()
            eventually(lambda: site.subjects()[0] == "Remove posts/new")
    assert site.remote_file("content/posts/new.md") is None


# 10. Nothing covers


@pytest.mark.parametrize("keeps_times", [True, False])
def test_an_older_file_in_its_place_is_published_beside_a_dead_letter(
    site: Site, *, keeps_times: bool
) -> None:
    with watching(site) as watched:
        site.write_post(POST, "refused\n")
        watched.settle()
        hook = site.hook("exit 1")
        site.run_once(BRITER_WORKER_MAX_ATTEMPTS="1")
        assert site.job("posts/welcome")["status"] == "failed"
        hook.unlink()
        older = site.root / "older.md"
        older.write_text("of last year\n")
        os.utime(older, (1e9, 1e9))
        copy = shutil.copy2 if keeps_times else shutil.copy
        copy(older, site.worktree / POST)
        watched.settle()
        _publish(site)
    assert site.remote_file(POST) == "of last year\n"


def test_a_deletion_beside_a_dead_letter_is_published(site: Site) -> None:
    with watching(site) as watched:
        site.write_post(POST, "refused\n")
        watched.settle()
        hook = site.hook("exit 1")
        site.run_once(BRITER_WORKER_MAX_ATTEMPTS="1")
        hook.unlink()
        (site.worktree / POST).unlink()
        watched.settle()
        _publish(site)
    assert site.remote_file(POST) is None


def test_a_dead_letter_saved_again_as_it_was_is_tried_again(site: Site) -> None:
    with watching(site) as watched:
        site.write_post(POST, "refused\n")
        watched.settle()
        hook = site.hook("exit 1")
        site.run_once(BRITER_WORKER_MAX_ATTEMPTS="1")
        hook.unlink()
        os.utime(site.write_post(POST, "refused\n"), (1.1e9, 1.1e9))
        watched.settle()
        _publish(site)
        assert site.remote_file(POST) == "refused\n"
        os.utime(site.write_post(POST, "refused\n"), (1.2e9, 1.2e9))  # the remote has it: no job
        assert len(watched.settle()) == 2


# 13. One file's trouble is one file's


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file `locked.md` and the folder `locked/` cannot be read: as root, permissions do not say so."""
    opened = os.open

    def refuse(path: object, *args: object, **options: object) -> int:
        if Path(str(path)).name in {"locked.md", "locked"}:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("os.open", refuse)


@pytest.mark.usefixtures("unreadable")
def test_what_cannot_be_read_is_named_once_and_stops_nothing(site: Site) -> None:
    with watching(site) as watched:
        site.write_post("content/posts/locked.md", "x\n")
        site.write_post("content/posts/locked/index.md", "x\n")
        site.write_post("content/posts/open.md", "x\n")
        assert watched.settle() == ["posts/open"]
        watched.wait(200)
        site.write_post("content/posts/open.md", "y\n")
        assert watched.settle() == ["posts/open"] * 2
        assert sorted(watched.warnings) == [
            "content/posts/locked.md cannot be read: Permission denied. The other posts are not affected",
            "content/posts/locked/ cannot be watched: Permission denied",
        ]


def test_a_folder_that_cannot_be_read_is_no_deletion(site: Site, request: pytest.FixtureRequest) -> None:
    site.write_post("content/posts/locked/index.md", "x\n")
    with watching(site) as watched:
        assert watched.settle() == ["posts/locked"]
    request.getfixturevalue("unreadable")
    with watching(site) as watched:
        assert watched.settle() == []
        assert watched.warnings == ["content/posts/locked/ cannot be watched: Permission denied"]


def test_a_filter_that_fails_stops_no_other_post(site: Site) -> None:
    for name in ("bad.bin", "good.md"):
        site.write_post(f"content/posts/{name}", "x\n")
    site.commit_all()
    site.git("config", "filter.broken.clean", "false")
    site.git("config", "filter.broken.required", "true")
    (site.worktree / ".gitattributes").write_text("*.bin filter=broken\n")
    for name in ("bad.bin", "good.md"):
        site.write_post(f"content/posts/{name}", "edited\n")  # compared as git would have it
    with watching(site) as watched:
        assert watched.settle() == ["posts/bad", "posts/good"]
    site.run_once()
    assert site.remote_file("content/posts/good.md") == "edited\n"


# 14. Files and folders in each other's place


def test_a_file_that_becomes_a_folder_is_published_and_back_again(site: Site) -> None:
    site.write_post("content/posts/trip.md", "of one file\n")
    with watching(site) as watched:
        watched.settle()
        _publish(site)
        (site.worktree / "content/posts/trip.md").unlink()
        site.write_post("content/posts/trip.md/index.md", "of more\n")
        watched.settle()
        _publish(site)
        assert site.remote_file("content/posts/trip.md/index.md") == "of more\n"
        shutil.rmtree(site.worktree / "content/posts/trip.md")
        site.write_post("content/posts/trip.md", "of one file\n")
        watched.settle()
        _publish(site)
    assert site.remote_file("content/posts/trip.md") == "of one file\n"
    assert site.jobs() == []


@pytest.mark.parametrize("name", ["trip", "trip.md"])
def test_a_folder_in_the_place_of_a_file_and_the_reverse_are_one_job_each(site: Site, name: str) -> None:
    place = site.worktree / "content/posts" / name
    place.write_text("of one file\n")
    with watching(site) as watched:
        watched.settle()
        saved = len(watched.saved)
        place.unlink()
        site.write_post(f"content/posts/{name}/index.md", "of more\n")
        assert len(watched.settle()) == saved + 1
        assert watched.saved[-1][1].keys() == {f"content/posts/{name}", f"content/posts/{name}/index.md"}
        shutil.rmtree(place)
        place.write_text("of one file\n")
        assert len(watched.settle()) == saved + 2
        assert watched.saved[-1][1].keys() == {f"content/posts/{name}", f"content/posts/{name}/index.md"}


def test_a_post_that_became_a_link_is_named_once_and_published_when_it_is_a_file(site: Site) -> None:
    post = site.worktree / POST
    with watching(site) as watched:
        for _ in range(2):
            post.unlink()
            post.symlink_to("elsewhere.md")
            assert watched.settle() == []
        (said,) = watched.warnings
        assert f"{POST} is, or is below, a link" in said
        post.unlink()
        post.write_text("a file again\n")
        assert watched.settle() == ["posts/welcome"]


# 15. Without a tracking ref


def test_an_edit_is_found_where_no_tip_of_the_remote_is_known(site: Site) -> None:
    site.git("update-ref", "-d", "refs/remotes/origin/main")
    site.write_post(POST, "edited before the first start\n")
    with watching(site) as watched:
        assert watched.settle() == ["posts/welcome"]
        site.write_post(POST, "and after\n")
        site.git("commit", "--quiet", "--all", "--message=Beside it")
        assert watched.settle() == ["posts/welcome"] * 2


def test_a_first_start_waits_for_a_tip_and_loses_nothing(site: Site) -> None:
    site.git("update-ref", "-d", "refs/remotes/origin/main")
    site.remote.rename(site.root / "away.git")
    with watching(site) as watched:
        site.write_post(POST, "meanwhile\n")
        assert watched.settle() == []
        assert any("waits for the remote's version" in text for text in watched.warnings)
        (site.root / "away.git").rename(site.remote)
        assert watched.settle() == ["posts/welcome"]


# 16. Another producer's jobs


def test_a_cancelled_job_of_another_slug_is_not_published_by_a_comparison(site: Site) -> None:
    with watching(site):
        pass  # which fills the ledger
    with watching(site) as watched:
        site.save("of-the-cms", [POST], scheduledFor="2199-01-01")
        site.write_post(POST, "secret\n")
        assert watched.settle() == []
        assert site.command("cancel", "of-the-cms").returncode == 0
        watched.watcher.look_everywhere()
        assert watched.settle() == []
    with watching(site) as watched:
        assert watched.settle() == []
        site.write_post(POST, "meant for everybody\n")
        assert watched.settle() == ["posts/welcome"]


@pytest.mark.parametrize("cause", ["no watch meanwhile", "ledger lost", "compared again"])
def test_a_cancelled_job_of_another_slug_stays_unpublished(site: Site, cause: str) -> None:
    watch = site.worktree / ".git/briter"
    with watching(site) as watched:
        if cause != "no watch meanwhile":
            _cancel_scheduled(site, POST)
            assert watched.settle() == []
    if cause == "no watch meanwhile":
        _cancel_scheduled(site, POST)
    elif cause == "ledger lost":
        (watch / "watch.db").unlink()
    with watching(site) as watched:
        if cause == "compared again":
            watched.watcher.order_comparison()
        assert watched.settle() == []
        site.write_post("content/posts/other.md", "a later save of another post\n")
        assert watched.settle() == ["posts/other"]
        site.write_post(POST, "meant for everybody\n")
        assert watched.settle() == ["posts/other", "posts/welcome"]


def _cancel_scheduled(site: Site, path: str) -> None:
    site.save("of-the-cms", [path], scheduledFor="2199-01-01")
    site.write_post(path, "secret\n")
    time.sleep(0.02)  # longer than a tick of the file system's clock
    assert site.command("cancel", "of-the-cms").returncode == 0


def test_a_producers_waiting_job_keeps_its_files_and_its_slug(site: Site) -> None:
    with watching(site) as watched:
        job = site.save("posts/trip", ["content/posts/trip/index.md"], scheduledFor="2199-01-01")
        site.write_post("content/posts/trip/index.md", "secret\n")
        site.write_post("content/posts/trip/map.svg", "<svg/>\n")
        assert watched.settle() == ["content/posts/trip/map.svg"]
    site.run_once()
    assert site.remote_file("content/posts/trip/index.md") is None
    assert site.remote_file("content/posts/trip/map.svg") == "<svg/>\n"
    assert job.exists()


# Messages, renames


def test_a_rename_is_one_commit_and_a_deletion_says_so(site: Site) -> None:
    for name in ("old", "gone"):
        site.write_post(f"content/posts/{name}.md", f"{name}\n")
    site.write_post("content/posts/trip/index.md", "trip\n")
    site.write_post("content/posts/trip/one.svg", "<svg/>\n")
    with watching(site) as watched:
        _publish(site)
        posts = site.worktree / "content/posts"
        (posts / "old.md").rename(posts / "new.md")
        (posts / "trip").rename(posts / "journey")
        (posts / "gone.md").unlink()
        watched.settle()
        assert watched.messages() == {
            "posts/new": "Rename posts/old to posts/new",
            "posts/journey": "Rename posts/trip to posts/journey",
            "posts/gone": "Remove posts/gone",
        }
        _publish(site)
        (posts / "journey/one.svg").unlink()
        watched.settle()
        assert watched.messages() == {"posts/journey": None}
        _publish(site)
    assert site.remote_file("content/posts/trip/index.md") is None
    assert site.remote_file("content/posts/journey/index.md") == "trip\n"
    assert site.remote_file("content/posts/journey/one.svg") is None


# 17. To be right from the start


def test_a_crash_between_job_and_ledger_costs_one_job_and_no_post(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watching(site) as watched:
        site.write_post(POST, "saved\n")
        with monkeypatch.context() as patch:
            patch.setattr(Ledger, "put", lambda *_: sys.exit("killed"))
            with pytest.raises(SystemExit):
                watched.settle()
    (job,) = site.jobs()
    with watching(site) as watched:
        assert watched.settle() == []  # the job waits, and will read the file
        assert site.jobs() == [job]
    _publish(site)
    assert len(site.remote_log()) == 2


def test_a_crash_between_job_and_ledger_while_the_job_is_published_costs_one_without_changes(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watching(site) as watched:
        site.write_post(POST, "saved\n")
        with monkeypatch.context() as patch:
            patch.setattr(Ledger, "put", lambda *_: sys.exit("killed"))
            with pytest.raises(SystemExit):
                watched.settle()
    _publish(site)
    for slugs in (["posts/welcome"], []):
        with watching(site) as watched:
            assert watched.settle() == slugs
    _publish(site)
    assert len(site.remote_log()) == 2


@pytest.mark.parametrize(
    ("first", "second"), [(["watch"], ["run", "--watch"]), (["run", "--watch"], ["watch"])]
)
def test_the_second_watcher_of_a_site_says_so_and_ends(
    site: Site, first: list[str], second: list[str]
) -> None:
    with site.running(*first):
        eventually((site.worktree / ".git/briter/watch.db").exists)
        done = site.command(*second)
        assert done.returncode == 0
        assert done.names() == ["worker-skipped"]
    with site.running("watch"):
        site.write_post(POST, "the lock is free again\n")
        eventually(site.jobs)


def test_a_queue_emptied_by_hand_is_filled_by_a_new_save_or_on_request(site: Site) -> None:
    with watching(site) as watched:
        site.write_post(POST, "saved\n")
        watched.settle()
        shutil.rmtree(site.queue)
        assert watched.settle() == ["posts/welcome"]
        (said,) = site.command("watch", "--again").of("worker-skipped")
        assert said["message"] == "another watch is active; it compares all files with the remote now"
        assert watched.settle() == ["posts/welcome"] * 2
        assert watched.settle() == ["posts/welcome"] * 2


def test_another_branch_with_edits_is_compared_when_the_site_is_back(site: Site) -> None:
    with watching(site) as watched:
        site.git("switch", "--quiet", "--create", "draft")
        site.write_post("content/posts/draft.md", "not for everybody\n")
        site.write_post(POST, "of the draft\n")
        site.git("add", "--all")
        site.git("commit", "--quiet", "--message=Draft")
        site.write_post("content/posts/untracked.md", "made there\n")
        watched.wait(60)
        assert watched.saved == []
        assert sum("watch rests" in text for text in watched.warnings) == 1
        site.git("switch", "--quiet", "main")
        assert watched.settle() == ["posts/untracked"]


def test_a_git_command_at_work_is_waited_for(site: Site) -> None:
    with watching(site) as watched:
        lock = site.worktree / ".git/index.lock"
        lock.touch()
        site.write_post(POST, "git switch writes this before it moves HEAD\n")
        watched.wait(3)
        assert watched.saved == []
        site.write_post(POST, "# Welcome\n")
        lock.unlink()
        assert watched.settle() == []


def test_a_pull_of_many_files_makes_no_job(site: Site) -> None:
    theirs = {f"content/posts/{number}.md": f"{number}\n" for number in range(500)}
    with watching(site) as watched:
        site.push_elsewhere(theirs)
        assert site.command("pull").returncode == 0
        assert (site.worktree / "content/posts/499.md").exists()
        assert watched.settle() == []
        site.write_post("content/posts/499.md", "edited\n")
        assert watched.settle() == ["posts/499"]


def test_a_pull_by_git_makes_no_job(site: Site) -> None:
    site.write_post("content/posts/theirs.md", "theirs\n")
    site.write_post("content/posts/gone.md", "of theirs\n")
    site.commit_all()
    with watching(site) as watched:
        site.push_elsewhere(
            {
                "content/posts/new.md": "x\n",
                "content/posts/theirs.md": "more\n",
                "content/posts/gone.md": None,
            }
        )
        site.git("pull", "--quiet", "--ff-only")
        assert watched.settle() == []
        site.write_post("content/posts/theirs.md", "theirs\n")  # set back, as the CMS does
        assert watched.settle() == ["posts/theirs"]


def test_what_git_brings_from_elsewhere_than_the_remote_is_published(site: Site) -> None:
    clone = site.colleague()
    (clone / POST).write_text("not pushed\n")
    site.git("commit", "--quiet", "--all", "--message=Theirs", cwd=clone)
    with watching(site) as watched:
        site.git("pull", "--quiet", "--ff-only", str(clone), "main")
        assert watched.settle() == ["posts/welcome"]


def test_a_commit_that_a_user_drops_is_no_pull(site: Site) -> None:
    with watching(site) as watched:
        site.write_post(POST, "committed by hand\n")
        assert watched.settle() == ["posts/welcome"]
        site.git("commit", "--quiet", "--all", "--message=By hand")
        site.write_post("content/posts/other.md", "x\n")
        watched.settle()
        site.git("reset", "--quiet", "--hard", "HEAD~1")
        assert watched.settle() == ["posts/welcome", "posts/other", "posts/welcome"]


def test_an_undo_makes_no_second_job(site: Site) -> None:
    with watching(site) as watched:
        site.write_post(POST, "second\n")
        watched.settle()
        _publish(site)
        assert site.command("undo", "posts/welcome").returncode == 0
        assert len(watched.settle()) == 1
        (job,) = site.jobs()
        assert job["message"] == "Restore posts/welcome"
        _publish(site)
    assert site.remote_file(POST) == "# Welcome\n"


def test_a_file_written_back_and_saved_by_the_cms_at_once_is_published(site: Site) -> None:
    with watching(site) as watched:
        site.push_elsewhere({"content/posts/theirs.md": "theirs\n"})
        assert site.command("pull").returncode == 0
        site.write_post("content/posts/theirs.md", "theirs, and ours\n")
        assert watched.settle() == ["posts/theirs"]
        _publish(site)
    assert site.remote_file("content/posts/theirs.md") == "theirs, and ours\n"


@pytest.mark.parametrize("damage", ["lost", "no database", "another program's", "lost while watching"])
def test_a_ledger_that_is_lost_or_damaged_is_rebuilt_and_that_is_said_once(site: Site, damage: str) -> None:
    with watching(site) as watched:
        ledger = site.worktree / ".git/briter/watch.db"
        if damage == "lost while watching":
            _damage(ledger, damage)
            site.write_post(POST, "edited\n")
            assert watched.settle() == ["posts/welcome"]
            (said,) = [text for text in watched.warnings if "ledger" in text]
            assert "was lost" in said
            return
    _damage(ledger, damage)
    site.write_post(POST, "edited meanwhile\n")
    with watching(site) as watched:
        assert watched.settle() == ["posts/welcome"]
        (said,) = [text for text in watched.warnings if "rebuilt" in text]
        assert ("was lost" if damage == "lost" else "is damaged") in said
    with watching(site) as watched:
        assert watched.settle() == []
        assert watched.warnings == []


def _damage(ledger: Path, damage: str) -> None:
    for suffix in ("-wal", "-shm"):
        ledger.with_name(ledger.name + suffix).unlink(missing_ok=True)
    ledger.unlink()
    if damage == "no database":
        ledger.write_bytes(b"\xff" * 10_000)
    elif damage == "another program's":
        connection = sqlite3.connect(ledger)
        connection.execute("CREATE TABLE theirs (a)")
        connection.close()


def test_an_older_ledger_put_in_its_place_while_watching_is_read(site: Site) -> None:
    ledger = site.worktree / ".git/briter/watch.db"
    with watching(site):
        pass
    older = shutil.copy(ledger, site.root / "older.db")
    with watching(site) as watched:
        site.write_post(POST, "edited\n")
        assert watched.settle() == ["posts/welcome"]
        remove(ledger)
        Path(older).rename(ledger)
        site.write_post("content/posts/other.md", "x\n")
        assert watched.settle() == ["posts/welcome", "posts/other"]
        watched.watcher.look_everywhere()
        assert watched.settle()[2:] == ["posts/welcome"]  # the older one does not know of that job


def test_a_ledger_that_is_truncated_while_watching_is_rebuilt(site: Site) -> None:
    with watching(site) as watched:
        ledger = site.worktree / ".git/briter/watch.db"
        os.truncate(ledger, 0)
        site.write_post(POST, "edited\n")
        assert watched.settle() == ["posts/welcome"]
        assert sum("rebuilt" in text for text in watched.warnings) == 1
        record(ledger, {POST: Version("0" * 40)})  # waits for no lock of a damaged file
        with closing(Ledger(ledger)) as found:
            assert found.known([POST])[POST].version.blob == "0" * 40


def test_a_folder_in_the_place_of_the_ledger_is_named_with_its_cause(site: Site) -> None:
    ledger = site.worktree / ".git/briter/watch.db"
    with watching(site):
        pass
    remove(ledger)
    ledger.mkdir()
    with site.running("watch") as worker:
        said = next(entry for entry in lines_of(worker) if entry["level"] == "warning")
        assert "the ledger of watch cannot be used: unable to open database file" in said["error"]
        assert str(ledger) in said["fix"]


@pytest.mark.parametrize("name", ["back\\slash.md", "line\nend.md", b"latin-\xe9.md"])
def test_a_file_whose_name_cannot_be_published_is_named_once(site: Site, name: str | bytes) -> None:
    folder = os.fsencode(site.worktree / "content/posts")
    with watching(site) as watched:
        for text in ("x\n", "y\n"):
            Path(os.fsdecode(os.path.join(folder, os.fsencode(name)))).write_text(text)  # noqa: PTH118 - bytes
            site.write_post("content/posts/other.md", text)
            watched.settle()
        assert watched.saved[-1][0] == "posts/other"
        (warning,) = watched.warnings
        assert "cannot be published" in warning


def test_damage_that_shows_while_watching_is_rebuilt(site: Site) -> None:
    with watching(site) as watched:
        connection = sqlite3.connect(site.worktree / ".git/briter/watch.db")
        connection.execute("DROP TABLE files")
        connection.close()
        site.write_post(POST, "edited\n")
        assert watched.settle() == ["posts/welcome"]
        assert sum("rebuilt" in text for text in watched.warnings) == 1


def test_a_poll_finds_what_the_kernel_reports(site: Site) -> None:
    site.write_post("content/posts/gone.md", "x\n")
    site.write_post("content/posts/old.md", "of old\n")
    with watching(site, sees_events=False) as watched:
        watched.settle()
        _publish(site)
        site.write_post(POST, "edited\n")
        (site.worktree / "content/posts/gone.md").unlink()
        (site.worktree / "content/posts/old.md").rename(site.worktree / "content/posts/new.md")
        site.write_post("content/posts/trip/index.md", "trip\n")
        watched.settle()
        assert watched.messages() == {
            "posts/welcome": None,
            "posts/gone": "Remove posts/gone",
            "posts/new": "Rename posts/old to posts/new",
            "posts/trip": None,
        }


def test_a_write_of_which_the_kernel_reports_nothing_is_found_by_the_next_comparison(site: Site) -> None:
    outside = site.root / "outside.md"
    os.link(site.worktree / POST, outside)
    with watching(site, backstop=0) as watched:
        outside.write_text("through the other name\n")
        assert watched.settle() == ["posts/welcome"]


def test_a_file_system_mounted_over_a_folder_is_watched_from_the_next_comparison_on(tmp_path: Path) -> None:
    folder = tmp_path / "content"
    folder.mkdir()
    with closing(KernelEvents(tmp_path, ["content"], interval=0)) as source, small(folder, size="1m"):
        assert source.wait(0).is_everything
        (folder / "new.md").write_text("x\n")
        assert "content/new.md" in source.wait(1).paths


@pytest.mark.parametrize(
    ("kind", "is_remote"),
    [("nfs4", True), ("fuse.sshfs", True), ("9p", True), ("ext4", False), ("overlay", False)],
)
def test_folders_on_other_machines_are_polled(tmp_path: Path, kind: str, *, is_remote: bool) -> None:
    mounts = tmp_path / "mountinfo"
    place = str(tmp_path / "my site").replace(" ", r"\040")
    (tmp_path / "my site/content").mkdir(parents=True)
    mounts.write_text(
        "22 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n"
        f"36 35 98:0 / {place} rw,noatime master:1 - {kind} server:/export rw\n"
    )
    assert has_remote_folders(tmp_path / "my site", ["content"], str(mounts)) is is_remote


def test_edits_made_while_a294fae_was_replaced_are_found(site: Site) -> None:
    # That version had no ledger; the tip is known from its last push.
    site.save_post("posts/other", "by the old version\n")
    _publish(site)
    site.write_post(POST, "edited while away\n")
    with watching(site) as watched:
        assert watched.settle() == ["posts/welcome"]
        assert watched.warnings == []


def test_a_site_that_is_not_mounted_is_no_deletion_of_everything(site: Site) -> None:
    for number in range(30):
        site.write_post(f"content/posts/{number}.md", f"{number}\n")
    site.commit_all()
    with watching(site) as watched:
        (site.worktree / "content").rename(site.root / "content")
        (site.worktree / "content").mkdir()
        assert watched.settle() == []
        assert any("has no files any more" in text for text in watched.warnings)
        (site.worktree / "content").rmdir()
        (site.root / "content").rename(site.worktree / "content")
        site.write_post("content/posts/1.md", "edited\n")
        assert watched.settle() == ["posts/1"]


def test_a_start_reads_no_file_whose_stat_data_is_known(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(50):
        site.write_post(f"content/posts/{number}.md", f"{number}\n")
    with watching(site):
        pass
    reads: list[str] = []
    read = Tree.read

    def spy(tree: Tree, folders: Folders, path: str, now: float, **options: bool) -> Seen:
        reads.append(path)
        return read(tree, folders, path, now, **options)

    monkeypatch.setattr(Tree, "read", spy)
    with watching(site):
        assert reads == []
        site.write_post(POST, "edited\n")
    with watching(site):
        assert reads == [POST]


def test_a_start_opens_each_folder_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        site.write_post(f"content/posts/2026/{number}/index.md", f"{number}\n")
    with watching(site):
        pass
    opened: list[str] = []
    open_file = os.open

    def spy(path: object, *args: object, **options: object) -> int:
        opened.append(str(path))
        return open_file(path, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("os.open", spy)
    with watching(site):
        assert opened.count("posts") == 1
        assert [opened.count(str(number)) for number in range(20)] == [1] * 20


def test_nothing_is_recorded_where_nobody_watches(tmp_path: Path) -> None:
    record(tmp_path / "watch.db", {POST: Version("0" * 40)})
    assert list(tmp_path.iterdir()) == []


def test_git_ignores_what_is_new_and_not_what_is_published(site: Site) -> None:
    (site.worktree / ".gitignore").write_text("*.log\nwelcome.md\n")
    with watching(site) as watched:
        site.write_post("content/posts/debug.log", "x\n")
        site.write_post(POST, "edited\n")
        assert watched.settle() == ["posts/welcome"]


def test_files_kept_by_line_ending_rules_are_no_edits(site: Site) -> None:
    site.write_post("content/posts/crlf.md", "a\nb\n")
    site.commit_all()
    site.git("config", "core.autocrlf", "true")
    (site.worktree / "content/posts/crlf.md").write_bytes(b"a\r\nb\r\n")
    with watching(site) as watched:
        assert watched.settle() == []
