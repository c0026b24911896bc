"""Packs stay few, nothing is dropped, and no publication waits for it."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from briter_worker.git.command import Commands
from briter_worker.git.upkeep import Upkeep

if TYPE_CHECKING:
    from pathlib import Path

    from sites import Site


def packs(site: Site) -> list[Path]:
    return sorted((site.worktree / ".git" / "objects" / "pack").glob("*.pack"))


def objects(site: Site) -> set[str]:
    return set(site.git("cat-file", "--batch-all-objects", "--batch-check=%(objectname)").split())


def fill(site: Site, number: int) -> None:
    """So many small packs, as publications leave them, and a loose object that nothing refers to."""
    for i in range(number):
        site.write_post("content/posts/a.md", f"{i}\n")
        site.git("add", ".")
        site.git("commit", "--quiet", "--allow-empty", f"--message={i}")
        site.git("-c", "repack.writeBitmaps=false", "repack", "-d", "-q")
    (site.worktree / "draft").write_text("what a person wrote, staged once and not committed\n")
    site.git("hash-object", "-w", "draft")
    (site.worktree / "draft").unlink()


def never() -> bool:
    return False


def upkeep_of(site: Site, **most: int) -> Upkeep:
    return Upkeep(Commands(site.worktree, remote="origin", timeout=60), **most)


def test_many_small_packs_become_one_and_no_object_is_dropped(site: Site) -> None:
    fill(site, 6)
    site.git("reset", "--quiet", "--hard", "HEAD~2")  # what nothing refers to any more is a person's to drop
    before, many = objects(site), len(packs(site))
    upkeep = upkeep_of(site, packs=4)
    upkeep.begin()
    upkeep.finish(never, 60)
    assert len(packs(site)) <= 2 < many
    assert objects(site) == before
    site.git("fsck", "--strict")


def test_few_packs_are_left_alone(site: Site) -> None:
    fill(site, 3)
    before = packs(site)
    upkeep = upkeep_of(site, packs=4)
    upkeep.begin()
    upkeep.finish(never, 60)
    assert packs(site) == before


def test_loose_objects_are_packed_when_there_are_many(site: Site) -> None:
    for i in range(700):  # two or so in each folder
        (site.worktree / f"{i}").write_text(f"{i}\n")
    site.git("hash-object", "-w", "--", *map(str, range(700)))
    before = objects(site)
    upkeep = upkeep_of(site, loose=1)
    upkeep.begin()
    upkeep.finish(never, 60)
    assert site.git("count-objects").startswith("0 objects")
    assert objects(site) == before


@pytest.mark.parametrize("shared", ["objects/info/alternates", "objects/pack/pack-1.promisor"])
def test_objects_that_are_shared_are_left_to_git_gc(site: Site, shared: str) -> None:
    fill(site, 4)
    (site.worktree / ".git" / shared).touch()
    before = packs(site)
    upkeep = upkeep_of(site, packs=2)
    upkeep.begin()
    upkeep.finish(never, 60)
    assert packs(site) == before


def test_a_repository_without_packs_is_left_alone(site: Site) -> None:
    (site.worktree / ".git" / "objects" / "pack").rmdir()
    before = objects(site)
    upkeep = upkeep_of(site, packs=1)
    upkeep.begin()
    upkeep.finish(never, 60)
    assert objects(site) == before


def test_a_git_that_would_not_is_not_asked_again_for_a_while(site: Site) -> None:
    fill(site, 4)
    damaged = packs(site)[0]
    content = damaged.read_bytes()
    damaged.chmod(0o644)
    damaged.write_bytes(b"rubbish")
    commands = Commands(site.worktree, remote="origin", timeout=60)
    upkeep = Upkeep(commands, packs=3)
    upkeep.begin()
    assert commands.watch.running()
    upkeep.finish(never, 60)
    damaged.write_bytes(content)
    before = packs(site)
    upkeep.begin()
    assert commands.watch.running() == ()
    assert packs(site) == before


def test_what_runs_already_is_not_begun_again(site: Site) -> None:
    fill(site, 4)
    commands = Commands(site.worktree, remote="origin", timeout=60)
    upkeep = Upkeep(commands, packs=3)
    upkeep.begin()
    (pid,) = commands.watch.running()
    os.kill(pid, signal.SIGSTOP)
    upkeep.begin()
    assert commands.watch.running() == (pid,)
    upkeep.end()


def test_what_is_to_be_published_ends_it_at_once(site: Site) -> None:
    fill(site, 4)
    before = objects(site)
    commands = Commands(site.worktree, remote="origin", timeout=60)
    upkeep = Upkeep(commands, packs=3)
    upkeep.begin()
    (pid,) = commands.watch.running()
    os.kill(pid, signal.SIGSTOP)  # it would take as long as it likes
    upkeep.make_way()
    assert commands.watch.running() == ()
    assert objects(site) == before
    site.git("fsck", "--strict")
    upkeep.begin()  # what was ended is begun again, the next time there is nothing to do
    upkeep.finish(never, 60)
    assert len(packs(site)) <= 2
    assert objects(site) == before


def test_a_site_that_never_rests_is_kept_up_all_the_same(site: Site) -> None:
    fill(site, 10)
    commands = Commands(site.worktree, remote="origin", timeout=60)
    upkeep = Upkeep(commands, packs=1)
    upkeep.begin()
    (pid,) = commands.watch.running()
    os.kill(pid, signal.SIGSTOP)
    upkeep.make_way()
    assert commands.watch.running() == (pid,)
    os.kill(pid, signal.SIGCONT)
    upkeep.finish(never, 60)
    assert len(packs(site)) <= 2


def test_a_worker_that_has_to_stop_does_not_wait_for_it(site: Site) -> None:
    fill(site, 4)
    commands = Commands(site.worktree, remote="origin", timeout=60)
    upkeep = Upkeep(commands, packs=3)
    upkeep.begin()
    (pid,) = commands.watch.running()
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    upkeep.finish(lambda: True, 600)
    assert time.monotonic() - began < 60
    assert commands.watch.running() == ()


def test_a_run_of_cron_leaves_few_packs(site: Site) -> None:
    fill(site, 31)
    site.git("push", "--quiet")
    site.write_post("content/posts/b.md", "B\n")
    site.save("b", ["content/posts/b.md"])
    result = site.run_once()
    assert result.of("published")
    assert result.returncode == 0
    assert len(packs(site)) <= 3
