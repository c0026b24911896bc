"""A cache may be lost, broken or taken at any time, and costs no job an attempt."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
from typing import TYPE_CHECKING

import mounts
import pytest
from caches import LINES, NOW, Cluster, made, named, small
from faults.servers import cuts_after, http_remote

from briter_worker.errors import AwayError, Failure, PublishError, Stopped

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return small(tmp_path)


def lose(cluster: Cluster) -> None:
    shutil.rmtree(cluster.cache())


def lose_the_clone(cluster: Cluster) -> None:
    shutil.rmtree(cluster.repository())


def lose_the_objects(cluster: Cluster) -> None:
    shutil.rmtree(cluster.repository() / ".git" / "objects")


def lose_the_config(cluster: Cluster) -> None:
    (cluster.repository() / ".git" / "config").unlink()


def tear_a_pack(cluster: Cluster) -> None:
    for pack in (cluster.repository() / ".git" / "objects" / "pack").glob("*.pack"):
        pack.chmod(0o644)
        pack.write_bytes(pack.read_bytes()[:40])


def empty_the_branch(cluster: Cluster) -> None:
    (cluster.repository() / ".git" / "refs" / "heads" / "main").write_bytes(b"")


def break_the_config(cluster: Cluster) -> None:
    (cluster.repository() / ".git" / "config").write_text("[core\n")


def leave_locks(cluster: Cluster) -> None:
    for name in ("packed-refs.lock", "shallow.lock", "index.lock", "refs/heads/main.lock", "HEAD.lock"):
        (cluster.repository() / ".git" / name).touch()


def check_another_branch_out(cluster: Cluster) -> None:
    (cluster.repository() / ".git" / "HEAD").write_text("ref: refs/heads/other\n")


def put_a_file_there(cluster: Cluster) -> None:
    lose_the_clone(cluster)
    cluster.repository().write_text("a file\n")


def put_anothers_clone_there(cluster: Cluster) -> None:
    lose_the_clone(cluster)
    cluster.git("clone", "-q", str(cluster.remote), str(cluster.repository()), cwd=cluster.root)


def litter(cluster: Cluster) -> None:
    (cluster.repository() / "content" / "posts").mkdir(parents=True)
    (cluster.repository() / "content" / "posts" / "b.md").write_text("left by a dead worker\n")


@pytest.mark.parametrize(
    "damage",
    [
        lose,
        lose_the_clone,
        lose_the_objects,
        lose_the_config,
        tear_a_pack,
        empty_the_branch,
        break_the_config,
        leave_locks,
        check_another_branch_out,
        put_a_file_there,
        put_anothers_clone_there,
        litter,
    ],
)
def test_a_cache_that_is_lost_or_broken_costs_no_attempt(
    cluster: Cluster, damage: Callable[[Cluster], None]
) -> None:
    cluster.publish(cluster.save("a", {"content/posts/a.md": "A\n"}))
    damage(cluster)
    outcome = cluster.publish(cluster.save("c", {"content/posts/c/c.md": "C\n"}, folders=["content/posts/c"]))
    assert outcome["c"].commit == cluster.tip()
    assert cluster.log() == ["Publish c", "Publish a", "Start the site"]
    assert cluster.file("content/posts/b.md") == LINES
    cluster.git("fsck", "--strict", "--no-dangling")


@pytest.mark.parametrize("damage", [lose, lose_the_clone, lose_the_objects, lose_the_config])
def test_a_cache_that_is_lost_right_before_the_push_costs_no_attempt(
    cluster: Cluster, damage: Callable[[Cluster], None]
) -> None:
    cluster.publish(cluster.save("a", {"content/posts/a.md": "A\n"}))
    damages = [damage]

    def loses_it() -> bool:
        while damages:
            damages.pop()(cluster)
        return True

    outcome = cluster.publish(cluster.save("c", {"content/c.md": "C\n"}), still_ours=loses_it)["c"]
    assert (outcome.failure, outcome.commit) == (None, cluster.tip())
    assert cluster.log() == ["Publish c", "Publish a", "Start the site"]


POST = "content/posts/b.md"


def test_the_next_save_is_merged_though_the_cache_was_lost_while_the_last_was_pushed(
    cluster: Cluster,
) -> None:
    cluster.publish(cluster.save("b", {POST: LINES}))
    cluster.person({POST: LINES.replace("line 1\n", "line one\n")})
    hook = cluster.remote / "hooks" / "post-receive"
    hook.write_text(f"#!/bin/sh\nrm -rf '{cluster.repository()}'\n")
    hook.chmod(0o755)
    mine = LINES.replace("line 12\n", "line twelve\n")
    cluster.publish(cluster.save("b", {POST: mine}))
    hook.unlink()
    theirs = mine.replace("line 1\n", "line I\n")
    cluster.person({POST: theirs})
    outcome = cluster.publish(cluster.save("b", {POST: mine.replace("twelve", "XII")}))["b"]
    assert outcome.failure is None, outcome.text
    assert cluster.file(POST) == theirs.replace("twelve", "XII")


def test_a_post_is_not_settled_before_it_is_kept_what_its_next_save_starts_from(cluster: Cluster) -> None:
    cluster.publish(cluster.save("b", {POST: LINES}))
    cluster.person({POST: LINES.replace("line 1\n", "line one\n")})
    mine = LINES.replace("line 12\n", "line twelve\n")

    def goes_away() -> bool:
        cluster.database.is_away = len(cluster.plans) > 1  # the first push only finds that the remote moved
        return True

    with pytest.raises(AwayError):
        cluster.publish(cluster.save("b", {POST: mine}), still_ours=goes_away)
    assert cluster.file(POST) == mine.replace("line 1\n", "line one\n")
    with pytest.raises(AwayError):
        cluster.landed(cluster.plans[-1], host="two")
    cluster.database.is_away = False
    assert cluster.landed(cluster.plans[-1], host="two")
    assert cluster.database.known[POST].start == named(mine.encode())
    assert cluster.database.starts[named(mine.encode())] == mine.encode()


def test_a_cache_of_another_address_or_branch_is_not_used(cluster: Cluster, tmp_path: Path) -> None:
    cluster.publish(cluster.save("a", {"content/a.md": "A\n"}))
    (tmp_path / "elsewhere").mkdir()
    other = made(tmp_path / "elsewhere", {"content/other.md": "other\n"})
    url, cluster.url = cluster.url, other.url
    cluster.database.tip = None
    cluster.publish(cluster.save("c", {"content/c.md": "C\n"}))
    assert other.log() == ["Publish c", "Start the site"]
    cluster.url, cluster.branch, cluster.database.tip = url, "drafts", None
    cluster.git("branch", "drafts", "main~1")
    cluster.publish(cluster.save("d", {"content/d.md": "D\n"}))
    assert cluster.log("drafts") == ["Publish d", "Start the site"]
    assert cluster.log() == ["Publish a", "Start the site"]


def test_a_cache_that_has_grown_is_cloned_anew(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("briter_worker.git.cache._MOST_PACKS", 4)
    packs: list[int] = []
    for number in range(12):
        cluster.publish(cluster.save("a", {"content/a.md": f"{number}\n"}))
        packs.append(len(list((cluster.repository() / ".git" / "objects" / "pack").glob("*.pack"))))
    assert max(packs) <= 5
    assert packs.count(2) > 1
    assert len(cluster.log()) == 13


def test_while_somebody_has_a_cache_another_is_taken_and_given_up_after(cluster: Cluster) -> None:
    with cluster.publisher() as (held, _):
        with cluster.publisher() as (other, _):
            assert other.commands.worktree != held.commands.worktree
        assert cluster.publish(cluster.save("a", {"content/a.md": "A\n"}))["a"].commit
        assert held.commands.worktree == cluster.repository()
    assert not (cluster.cache() / "1").exists()
    assert cluster.publish(cluster.save("c", {"content/c.md": "C\n"}))["c"].commit


def test_no_thread_and_no_process_outlives_a_drain(cluster: Cluster) -> None:
    before = threading.active_count()
    with cluster.publisher() as (cache, publisher):
        list(
            publisher.publish(
                [cluster.save("a", {"content/a.md": "A\n"})],
                held=(),
                examine=lambda _key, _changes: None,
                cancelled=tuple,
                record=cluster.plans.append,
                now=NOW,
            )
        )
        assert threading.active_count() > before
    assert threading.active_count() == before
    assert not cache.commands.watch.running()


def test_a_drain_that_is_given_up_is_asked_about_and_tried_again(cluster: Cluster) -> None:
    a = cluster.save("a", {"content/a.md": "A\n"})
    with cluster.publisher() as (_, publisher):
        publisher.abort()
        with pytest.raises(Stopped):
            list(
                publisher.publish(
                    [a],
                    held=(),
                    examine=lambda _key, _changes: None,
                    cancelled=tuple,
                    record=cluster.plans.append,
                    now=NOW,
                )
            )

    def given_up_before_the_push() -> bool:
        cluster.running[-1].abort()
        return True

    with pytest.raises(Stopped):
        cluster.publish(a, still_ours=given_up_before_the_push)
    with cluster.publisher() as (_, publisher):
        publisher.abort()
        assert not publisher.landed(cluster.plans[-1])
    assert cluster.publish(a)["a"].commit == cluster.tip()
    assert cluster.log() == ["Publish a", "Start the site"]


def test_a_repository_of_the_other_hash_is_cloned_as_what_it_is(tmp_path: Path) -> None:
    cluster = made(tmp_path, {"content/posts/b.md": LINES}, "--object-format=sha256")
    for host in ("one", "one", "two"):
        assert cluster.publish(cluster.save("a", {"content/a.md": f"{host}\n{LINES}"}), host=host)["a"]
    assert cluster.file("content/a.md") == f"two\n{LINES}"
    assert len(cluster.tip()) == 64


def test_a_site_all_of_whose_caches_are_held_waits_for_them(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("briter_worker.git.cache._BESIDE", 2)
    with (
        cluster.publisher(),
        cluster.publisher(),
        pytest.raises(PublishError, match="all 2 caches") as failed,
    ):
        cluster.publish(cluster.save("a", {"content/a.md": "A\n"}))
    assert failed.value.failure is Failure.LOCKED
    assert cluster.publish(cluster.save("a", {"content/a.md": "A\n"}))["a"].commit


def test_a_place_that_cannot_hold_a_cache_is_named(cluster: Cluster) -> None:
    (cluster.root / "hosts").write_text("a file\n")
    with pytest.raises(PublishError, match="cannot be used") as failed:
        cluster.publish(cluster.save("a", {"content/a.md": "A\n"}))
    assert str(cluster.cache()) in failed.value.text


@pytest.mark.parametrize("becomes", ["gone", "another"])
def test_a_lock_whose_file_was_removed_meanwhile_is_nobodys(
    cluster: Cluster, becomes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = cluster.cache() / "0.lock"
    flock = fcntl.flock

    def removed_meanwhile(descriptor: int, how: int) -> None:
        flock(descriptor, how)
        if first.exists() and os.path.samestat(os.fstat(descriptor), first.stat()):
            first.unlink()
            if becomes == "another":
                first.touch()

    monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
    with cluster.publisher() as (cache, _):
        assert cache.commands.worktree.name == "1"


def test_a_file_system_without_locks_is_named_and_nothing_stays_open(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unable(_descriptor: int, _how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    monkeypatch.setattr(fcntl, "flock", unable)
    with pytest.raises(PublishError, match="cannot be used"), cluster.publisher():
        pass
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_a_cache_that_was_never_made_knows_of_no_tip(cluster: Cluster) -> None:
    with cluster.publisher() as (cache, _):
        assert cache.tip is None


@pytest.mark.parametrize("made", [False, True], ids=["before it is made", "while posts are laid out"])
def test_a_full_disk_under_the_cache_is_the_hosts_condition(cluster: Cluster, *, made: bool) -> None:
    post = cluster.save("a", {"content/a.md": "A\n" * 100_000})
    with mounts.small(cluster.root / "hosts", size="4m") as place:
        if made:
            cluster.publish(cluster.save("b", {"content/b.md": "B\n"}))
        with mounts.full(place), pytest.raises(PublishError) as failed:
            cluster.publish(post)
        assert failed.value.failure is Failure.DISK
        assert cluster.publish(post)["a"].commit == cluster.tip()


def test_a_disk_that_is_full_once_a_post_is_pushed_fails_it_no_more(cluster: Cluster) -> None:
    with mounts.small(cluster.root / "hosts", size="4m") as place:
        cluster.publish(cluster.save("b", {"content/b.md": "B\n"}))
        hook = cluster.remote / "hooks" / "post-receive"
        hook.write_text(f"#!/bin/sh\nhead -c 9m /dev/zero > '{place}/filled' 2>/dev/null\nrm '{hook}'\n")
        hook.chmod(0o755)
        first = cluster.publish(cluster.save("a", {"content/a.md": "A\n"}))["a"]
        assert (first.failure, first.commit) == (None, cluster.tip())
        (told,) = cluster.warned
        assert told.startswith("the cache's branch could not be moved: ")
        (place / "filled").unlink()
        cluster.publish(cluster.save("c", {"content/c.md": "C\n"}))
    assert cluster.log() == ["Publish c", "Publish a", "Publish b", "Start the site"]


def test_a_host_that_has_not_heard_of_the_last_push_takes_it_for_nobody_elses(cluster: Cluster) -> None:
    cluster.publish(cluster.save("b", {"content/b.md": "B\n"}), host="two")
    known = cluster.database.tip
    cluster.publish(cluster.save("a", {"content/a.md": "A\n"}))
    cluster.database.tip = known  # the host died when the post was settled, and before it could say so
    outcome = cluster.publish(cluster.save("a", {"content/a.md": "Again\n"}), host="two")["a"]
    assert (outcome.failure, outcome.commit) == (None, cluster.tip())
    assert cluster.file("content/a.md") == "Again\n"


def test_contents_that_the_database_cannot_give_now_are_not_a_fault_of_this_hosts_disk(
    cluster: Cluster,
) -> None:
    post = cluster.save("a", {"content/a.md": "A\n"})
    cluster.database.is_away = True
    with pytest.raises(AwayError, match="the database is away"):
        cluster.publish(post)
    cluster.database.is_away = False
    assert cluster.publish(post)["a"].commit == cluster.tip()


def test_a_push_whose_answer_was_cut_off_is_followed(cluster: Cluster) -> None:
    with http_remote(cluster.root) as server:
        cluster.url = server.url(cluster.remote)
        server.on_push = cuts_after
        outcome = cluster.publish(cluster.save("a", {"content/a.md": "A\n"}))["a"]
        assert outcome.commit == cluster.tip()
    tracking = "refs/remotes/origin/main"
    assert cluster.git("rev-parse", tracking, cwd=cluster.repository()) == cluster.tip()


def test_a_start_that_is_nowhere_any_more_stops_no_post_from_being_settled(cluster: Cluster) -> None:
    cluster.publish(cluster.save("b", {POST: LINES}))
    cluster.person({POST: LINES.replace("line 1\n", "line one\n")})
    hook = cluster.remote / "hooks" / "post-receive"
    hook.write_text(f"#!/bin/sh\nrm -rf '{cluster.repository()}'\n")
    hook.chmod(0o755)
    mine = LINES.replace("line 12\n", "line twelve\n")

    def also_in_the_database() -> bool:
        if len(cluster.plans) > 1:  # the first push only finds that the remote moved
            cluster.database.contents.clear()
        return True

    request = cluster.save("b", {POST: mine})
    outcome = cluster.publish(request, still_ours=also_in_the_database)["b"]
    assert (outcome.failure, outcome.commit) == (None, cluster.tip())
    assert cluster.database.known[POST].start == named(mine.encode())
    assert named(mine.encode()) not in cluster.database.starts
